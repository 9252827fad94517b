"""The order of collectives on a GPU, call by call, on a GPU that only writes down what it is asked."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="its streams and events are what is ordered")

import kept_cxx  # noqa: E402

from spccl import _torch_glue  # noqa: E402

SOURCE = Path(__file__).resolve().parent / "stream_order.cpp"
# What each call must do, and why. 1 is the event behind the latest call that did not run on the order's own
# stream (or marks its end when needed), 2 the fork from the caller's stream; 3 and 4 are those of captures.
WANTED = [
    ("K@0 R1@0", "the first: nothing to wait for"),
    ("K@0 R1@0", "same stream: hardware keeps the order"),
    ("R2@0 W2@100 W1@100 K@100", "async: behind the caller's stream and behind the last call"),
    ("R2@7 W2@100 K@100", "async from another stream: the own stream keeps the order"),
    ("R1@100 W1@7 K@7 R1@7", "sync: behind the last async one"),
    ("W1@0 K@0 R1@0", "sync on another stream: behind the last sync one"),
    ("R2@0 W2@100 W1@100 K@100 threw", "a call that throws keeps its place"),
    ("K@9 R3@9", "a capture begins: no event from outside is touched"),
    ("R4@9 W4@101 W3@101 K@101", "async in the capture: on the captures' stream"),
    ("R3@101 W3@9 K@9 R3@9", "sync in the capture: behind it"),
    ("R4@9 W4@101 W3@101 K@101 R3@101 W3@9 threw", "a call that throws joins its stream again"),
    ("R4@9 W4@101 K@101", "another capture: the events of the first mean nothing"),
    ("R1@100 W1@9 K@9 R1@9", "after the captures: behind the last eager call"),
    ("R2@0 W2@100 W1@100 K@100", "and on as before"),
]


@pytest.mark.skipif(
    torch.cuda.is_available(), reason="torch has a CUDA guard of its own here: tests/gpu shows the order"
)
def test_order(tmp_path):
    driver = tmp_path / "libcuda.so.1"
    command = _torch_glue.command(torch, kept_cxx.compiler(_torch_glue._compiler()), driver)
    command[command.index(str(_torch_glue.SOURCES / "glue.cpp"))] = str(SOURCE)
    command += [f"-I{_torch_glue.SOURCES}", "-O0", "-Wl,-soname,libcuda.so.1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stdout + done.stderr
    code = f"import torch, ctypes; ctypes.CDLL({str(driver)!r}, ctypes.RTLD_GLOBAL).play()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line.strip() for line in done.stdout.splitlines()]
    for i, (line, (wanted, why)) in enumerate(zip(lines, WANTED, strict=True)):
        assert line == wanted, f"call {i} ({why}): {line}, wanted {wanted}"
