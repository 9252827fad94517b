"""Tests the collective order call by call, with a stand-in for the GPU that records the calls."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="its streams and events are what is ordered")

import kept_cxx  # noqa: E402

from spccl import _torch_glue  # noqa: E402

SOURCE = Path(__file__).resolve().parent / "stream_order.cpp"
# What each call must do, and why. After each collective it records an event; the next collective on another stream
# waits for that event. An asynchronous call also records event 3 (in captures 4) on the caller's stream. A call asks
# the driver at most once, and never about stream 0, which cannot be captured.
WANTED = [
    ("K@0 R1@0", "the first call has nothing to wait for"),
    ("K@0 R2@0", "same stream: the stream keeps the order"),
    ("R3@0 W3@100 W2@100 K@100 R1@100", "async: after the caller's stream and after the last call"),
    ("? R3@7 W3@100 K@100 R2@100", "async from another stream: the order's own stream keeps the order"),
    ("? W2@7 K@7 R1@7", "sync: after the last async call"),
    ("W1@0 K@0 R2@0", "sync on another stream: after the last sync call"),
    ("R3@0 W3@100 W2@100 K@100 R1@100 threw", "a call that throws is in the order too"),
    ("? K@9 R2@9", "a capture begins: it does not wait for calls outside of it"),
    ("? R4@9 W4@101 W2@101 K@101 R5@101", "async in the capture: on the captures' stream"),
    ("? W5@9 K@9 R2@9", "sync in the capture: after the async call"),
    ("? R4@9 W4@101 W2@101 K@101 R5@101 W5@9 threw", "a call that throws joins its stream to the caller's"),
    ("? R4@9 W4@101 K@101 R5@101", "another capture: it does not wait for events of the first"),
    ("? W1@9 K@9 R2@9", "after the captures: after the last call outside of captures"),
    ("R3@0 W3@100 W2@100 K@100 R1@100", "async again"),
    ("R3@0 W3@100 K@100 R2@100 closed", "the call closes its turn itself: the event is recorded once"),
    ("? W2@7 K@7 R1@7 closed threw", "the call closes its turn itself and throws"),
]


@pytest.mark.slow
@pytest.mark.skipif(
    torch.cuda.is_available(), reason="torch has a CUDA guard of its own here: tests/gpu shows the order"
)
def test_order(tmp_path):
    driver = tmp_path / "libcuda.so.1"
    command = _torch_glue.command(torch, kept_cxx.compiler(_torch_glue._compiler()), driver)
    command[command.index(str(_torch_glue.SOURCES / "glue.cpp"))] = str(SOURCE)
    command += [f"-I{_torch_glue.SOURCES}", "-O0", "-Wl,-soname,libcuda.so.1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    code = f"import torch, ctypes; ctypes.CDLL({str(driver)!r}, ctypes.RTLD_GLOBAL).play()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line.strip() for line in done.stdout.splitlines()]
    for i, (line, (wanted, why)) in enumerate(zip(lines, WANTED, strict=True)):
        assert line == wanted, f"call {i} ({why}): {line}, wanted {wanted}"
