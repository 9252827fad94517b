"""examples/rl as a user runs it: every step each worker has the trainer's bits, over anchors and deltas."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the example trains a torch model")
pytest.importorskip("safetensors", reason="spccl.sync writes safetensors files, and it is not installed")

from launch import run_command

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "rl" / "grpo.py"


@pytest.mark.slow
@pytest.mark.parametrize("model", ["torch", "transformers"])
def test_grpo(model):
    if model == "transformers":
        pytest.importorskip("transformers", reason="the example's other model")
    # At this learning rate part of the bits change, so that workers take deltas.
    command = [sys.executable, str(EXAMPLE), "--model", model, "--steps", "4", "--lr", "1e-5"]
    status, output = run_command(command, dict(os.environ, OMP_NUM_THREADS="1"))
    lines = re.findall(r"^step (\d): .* ([\d.]+)% changed.* 2 workers have its bits", output, re.M)
    assert status == 0 and [int(step) for step, _ in lines] == [0, 1, 2, 3], output
    assert all(0 < float(changed) < 50 for _, changed in lines[1:]), output
