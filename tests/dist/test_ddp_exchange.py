"""bench/ddp_exchange.py: which arguments it refuses, and the lines that it prints, with 2 ranks on the CPU."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the benchmark runs torch's DDP")

from launch import torchrun

SCRIPT = str(Path(__file__).resolve().parents[2] / "bench" / "ddp_exchange.py")
LINE = re.compile(
    r"round (\d+): (\w+), buckets of (\d+) MB, (\w+) thread blocks: (\d+\.\d) ms with exchange, (\d+\.\d) without, "
    r"difference (-?\d+\.\d); density (\d\.\d{4}), hook (\d+\.\d\d) ms of host time; memory: not measured on a CPU"
)


@pytest.mark.parametrize(
    ("args", "part"),
    [
        (["sparse"], '"sparse" is not one of dense, pruned, momentum'),
        (["dense,"], '"" is not one of'),
        (["pruned:"], '"pruned:" is not one of'),
        (["pruned:all"], '"pruned:all" is not one of'),
        (["pruned:0"], '"pruned:0" is not one of'),
        (["dense:8"], "thread blocks are a setting of spccl"),
        (["pruned", "--max-ctas", "-1"], "-1 is not a whole number above 0"),
        (["pruned", "--rounds", "0"], "0 is not a whole number above 0"),
        (["pruned", "--bucket-mb", "x"], "x is not a whole number above 0"),
        (["pruned", "--device", "tpu"], "invalid choice: 'tpu'"),
        (["pruned"], "start it with torchrun"),
    ],
)
def test_refuses(monkeypatch, capsys, args, part):
    monkeypatch.setattr(sys, "argv", [SCRIPT, *args])
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(SCRIPT, run_name="__main__")
    assert ended.value.code == 2
    assert part in capsys.readouterr().err


@pytest.mark.slow
def test_prints_a_line_for_each_run():
    status, output = torchrun(SCRIPT, "dense,pruned:32", "--rounds", "2", "--bucket-mb", "25", "--device", "cpu")
    assert status == 0, output
    runs = [match.groups() for match in LINE.finditer(output)]
    assert [run[:4] for run in runs] == [
        ("1", "dense", "25", "all"),
        ("1", "pruned", "25", "32"),
        ("2", "dense", "25", "all"),
        ("2", "pruned", "25", "32"),
    ], output
    for _, name, _, _, with_exchange, without, difference, density, hook_ms in runs:
        assert float(difference) == pytest.approx(float(with_exchange) - float(without), abs=0.11)
        if name == "dense":
            assert (density, hook_ms) == ("1.0000", "0.00")
        else:
            assert 0.005 < float(density) < 0.02
            assert float(hook_ms) > 0
