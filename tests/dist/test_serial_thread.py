"""Tests the glue's threads: the signals that they block, and their use in children of fork. Starts no ranks."""

from __future__ import annotations

import subprocess
from pathlib import Path

from spccl import _torch_glue

SOURCE = Path(__file__).resolve().parent / "serial_thread.cpp"


def test_threads_block_signals_and_children_of_fork_can_exit(tmp_path):
    program = tmp_path / "serial_thread"
    command = [_torch_glue._compiler(), "-std=c++20", "-O1", "-g", "-Wall", "-Wextra", "-pthread"]
    command += [f"-I{_torch_glue.SOURCES}", str(SOURCE), "-o", str(program)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    done = subprocess.run([str(program)], capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
