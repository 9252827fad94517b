"""Finding the torch glue: the ways that SPCCL_TORCH_GLUE forces, and what is said when one does not work.
(test_first_use.py runs the compiler for real.)"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch", reason="the glue is for torch, and none is installed")

from spccl import _torch_glue  # noqa: E402


def failure(**env: str) -> str:
    """The GlueError of a fresh process with these settings."""
    code = (
        "from spccl import _torch_glue\ntry: _torch_glue.load()\nexcept _torch_glue.GlueError as e: print('told:', e)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=dict(os.environ, **env), capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0 and "told:" in done.stdout, done.stdout + done.stderr
    return done.stdout


def test_forced_prebuilt_that_is_not_there(monkeypatch, tmp_path):
    monkeypatch.setattr(_torch_glue, "PACKAGE", tmp_path)
    monkeypatch.setenv("SPCCL_TORCH_GLUE", "prebuilt")
    with pytest.raises(_torch_glue.GlueError, match=r"prebuilt.*does not exist"):
        _torch_glue._choose(torch)


def test_prebuilt_wins_over_the_cache(monkeypatch, tmp_path):
    monkeypatch.setattr(_torch_glue, "PACKAGE", tmp_path)
    monkeypatch.delenv("SPCCL_TORCH_GLUE", raising=False)
    prebuilt = tmp_path / f"libspccl_torch-{_torch_glue._minor(torch.__version__)}.so"
    prebuilt.write_bytes(b"")
    assert _torch_glue._choose(torch) == prebuilt


def test_unknown_setting():
    assert "wanted auto, prebuilt, compile, or the path" in failure(SPCCL_TORCH_GLUE="yes please")


def test_library_of_something_else(tmp_path):
    other = tmp_path / "libother.so"
    other.write_bytes(b"not a library")
    text = failure(SPCCL_TORCH_GLUE=str(other))
    assert "libother.so" in text and "delete it" in text


def test_cache_that_cannot_be_written(tmp_path):
    blocked = tmp_path / "a file"
    blocked.write_text("in the way")
    text = failure(SPCCL_TORCH_GLUE="compile", XDG_CACHE_HOME=str(blocked))
    assert "cannot write" in text and "XDG_CACHE_HOME" in text


def test_compiler_that_fails(tmp_path):
    """Its own words, the command line, and no half library in the cache."""
    compiler = tmp_path / "c++"
    compiler.write_text('#!/bin/sh\necho "error: unrecognized option -std=c++20" >&2\nexit 1\n')
    compiler.chmod(0o755)
    text = failure(SPCCL_TORCH_GLUE="compile", XDG_CACHE_HOME=str(tmp_path / "cache"), CXX=str(compiler))
    assert "unrecognized option" in text and "too old for C++20" in text and "glue.cpp" in text
    assert not list((tmp_path / "cache").rglob("*.so*"))


def test_key_depends_on_sources_and_compiler(monkeypatch, tmp_path):
    first = _torch_glue._key(torch, "")
    assert torch.__version__ in first and first == _torch_glue._key(torch, "")
    assert first != _torch_glue._key(torch, "clang++")
    for file in _torch_glue.SOURCES.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    monkeypatch.setattr(_torch_glue, "SOURCES", tmp_path)
    assert _torch_glue._key(torch, "") == first
    (tmp_path / "work.cpp").write_text("changed")
    assert _torch_glue._key(torch, "") != first
    (tmp_path / "glue.cpp").unlink()
    with pytest.raises(_torch_glue.GlueError, match="incomplete: reinstall"):
        _torch_glue._key(torch, "")


def test_glue_needs_neither_python_nor_cuda():
    """What makes one file serve every Python and both builds of a torch version."""
    library = _torch_glue.load()
    data = library.read_bytes()
    for word in (b"libpython", b"libcudart", b"libtorch_python", b"libtorch_cuda", b"PyGILState"):
        assert word not in data, word
