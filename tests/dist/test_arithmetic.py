"""Tests the integer arithmetic of the sparse all-reduce for many numbers of ranks, without starting ranks."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from spccl import _torch_glue

SOURCE = Path(__file__).resolve().parent / "arithmetic.cpp"


def test_integer_sums_wrap_and_averages_divide_by_any_number_of_ranks(tmp_path):
    program = tmp_path / "arithmetic"
    command = [_torch_glue._compiler(), "-std=c++20", "-O1", "-g", "-Wall", "-Wextra"]
    command += ["-fsanitize=undefined", "-fno-sanitize-recover=all"]
    probe = tmp_path / "probe.cpp"
    probe.write_text("int main() {}\n")
    if subprocess.run([*command, str(probe), "-o", str(program)], capture_output=True).returncode != 0:
        pytest.skip("this C++ compiler has no undefined-behaviour sanitizer (Debian: libubsan comes with g++)")
    command += [f"-I{_torch_glue.SOURCES}", str(SOURCE), "-o", str(program)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    done = subprocess.run([str(program)], capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
