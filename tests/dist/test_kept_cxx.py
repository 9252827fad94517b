"""Several test processes compile at the same time with one cache folder (kept_cxx.py)."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from pathlib import Path

import kept_cxx
import pytest

COMPILER = """#!/bin/sh
# Writes its first argument to the file after -o.
[ "$1" = --version ] && echo 1 && exit
[ "$1" = broken ] && exit 3
echo compiled >> "$(dirname "$0")/count"
echo "$1" > "$3"
"""


def compile_word(folder: Path, word: str, output: Path) -> int:
    command = [sys.executable, kept_cxx.__file__, str(folder / "cxx"), word, "-o", str(output)]
    return subprocess.run(command, env=dict(os.environ, SPCCL_TEST_CACHE=str(folder / "cache")), timeout=500).returncode


def make_compiler(folder: Path) -> None:
    (folder / "cxx").write_text(COMPILER)
    (folder / "cxx").chmod(0o755)


def test_a_result_is_kept_and_a_failure_is_not(tmp_path):
    make_compiler(tmp_path)
    for output in ("one", "two"):
        assert compile_word(tmp_path, "word", tmp_path / output) == 0
        assert (tmp_path / output).read_text() == "word\n"
    assert (tmp_path / "count").read_text() == "compiled\n"
    assert compile_word(tmp_path, "broken", tmp_path / "three") == 3
    assert not (tmp_path / "three").exists()


def test_copies_hold_the_lock(tmp_path, monkeypatch):
    """Another process cannot delete a result that is copied just now, or a part of one that is written."""
    cache, output, n_copies = tmp_path / "cache", tmp_path / "output", 0
    cache.mkdir()
    copy = shutil.copyfile

    def copy_locked(source: Path, target: Path) -> None:
        nonlocal n_copies
        with open(cache / kept_cxx.LOCK) as file, pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        copy(source, target)
        n_copies += 1

    monkeypatch.setattr(shutil, "copyfile", copy_locked)
    n = kept_cxx.N_KEPT + 3
    for i in range(n):
        output.write_text(str(i))
        kept_cxx.keep(output, cache / f"key{i}")
        os.utime(cache / f"key{i}", (i, i))
    assert kept_cxx.take(cache / f"key{n - 2}", output) and output.read_text() == str(n - 2)
    assert not kept_cxx.take(cache / "key0", output)
    assert len(list(cache.iterdir())) == kept_cxx.N_KEPT + 1  # and the lock
    assert n_copies == n + 1
