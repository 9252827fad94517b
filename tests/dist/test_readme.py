"""The README's first example, run as the README says."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the example uses torch.distributed")

from launch import run_command

README = Path(__file__).resolve().parents[2] / "README.md"


def test_first_example_prints_the_sum(tmp_path):
    code = re.search(r"```python\n(# example\.py: .*?)```", README.read_text(), re.S)
    assert code is not None, "the README's first example is not there"
    (tmp_path / "example.py").write_text(code[1])
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    settings = dict(os.environ, OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")
    status, output = run_command([*command, str(tmp_path / "example.py")], settings)
    assert status == 0, output
    for rank in range(2):
        assert f"rank {rank}: 167773 nonzeros, each 2" in output, output
