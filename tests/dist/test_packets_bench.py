"""bench/packets.py without GPUs: what it refuses, its check of results, and its CSV."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="the benchmark runs NCCL by torch")

SCRIPT = str(Path(__file__).resolve().parents[2] / "bench" / "packets.py")


@pytest.mark.parametrize(
    ("args", "n_ranks", "n_here", "part"),
    [
        (["--rounds", "0"], "2", "2", "--rounds 0: wanted 1 or more"),
        ([], "2", None, "start it with torchrun"),
        ([], "3", "3", "wanted 2, 4 or 8 ranks of one host; got 3 ranks, here 3"),
        ([], "4", "2", "wanted 2, 4 or 8 ranks of one host; got 4 ranks, here 2"),
        ([], "2", "2", "sees no GPU"),
    ],
)
def test_refuses(monkeypatch, capsys, args, n_ranks, n_here, part):
    monkeypatch.setattr(sys, "argv", [SCRIPT, *args])
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", n_ranks)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if n_here is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", n_here)
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(SCRIPT, run_name="__main__")
    assert ended.value.code == 2
    assert part in capsys.readouterr().err


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("n_ranks", [2, 8])
def test_counts_wrong_elements(monkeypatch, n_ranks, in_place):
    """The sum of all ranks; in place it is added up again in each call."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    packets = runpy.run_path(SCRIPT)
    systems = []
    for rank in range(n_ranks):
        source, target = torch.empty(2, 300)
        systems.append(packets["System"]("one", source, source if in_place else target, lambda: None))
        systems[-1].fill(rank, 21)
    system = systems[0]
    assert system.wrong(n_ranks, 21) == 300
    system.target.copy_(sum(each.source for each in systems))
    for _ in range(packets["CALLS"] if in_place else 0):
        system.target.mul_(n_ranks)
    assert system.wrong(n_ranks, 21) == 0
    system.target[7] = float("nan")
    assert system.wrong(n_ranks, 21) == 1


def test_writes_a_csv(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("SPCCL_COMMIT", "abc")
    packets = runpy.run_path(SCRIPT)
    packets["write_csv"](tmp_path / "x.csv", "gpu: none", [(1024, "graph", "packets", 1.234, 1.0, 2.0, 0)])
    lines = (tmp_path / "x.csv").read_text().splitlines()
    assert lines == [
        "# gpu: none, commit: abc",
        "size_bytes,how,system,median_us,least_us,most_us,wrong",
        "1024,graph,packets,1.23,1.00,2.00,0",
    ]
