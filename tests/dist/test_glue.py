"""Tests how the torch glue is found: each value of SPCCL_TORCH_GLUE, and the error if it does not work.
test_first_use.py runs the real compiler."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="the glue is for torch, and none is installed")

from spccl import _torch_glue  # noqa: E402


@pytest.fixture
def failure(monkeypatch):
    """A function that gives the text of the GlueError of a first `load` with some settings."""

    def load(**env: str) -> str:
        monkeypatch.setattr(_torch_glue, "_loaded", None)
        monkeypatch.setattr(_torch_glue, "_last_failure_s", 0.0)
        for name, value in env.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(_torch_glue.GlueError) as error:
            _torch_glue.load()
        return str(error.value)

    return load


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


def test_unknown_setting(failure):
    assert "wanted auto, prebuilt, compile, or the path" in failure(SPCCL_TORCH_GLUE="yes please")


def test_library_of_something_else(failure, tmp_path):
    other = tmp_path / "libother.so"
    other.write_bytes(b"not a library")
    text = failure(SPCCL_TORCH_GLUE=str(other))
    assert "libother.so" in text and "delete it" in text


def test_cache_that_cannot_be_written(failure, tmp_path):
    blocked = tmp_path / "a file"
    blocked.write_text("in the way")
    text = failure(SPCCL_TORCH_GLUE="compile", XDG_CACHE_HOME=str(blocked))
    assert "cannot write" in text and "XDG_CACHE_HOME" in text


def test_compiler_that_fails(failure, tmp_path):
    """The error has the compiler's words and the command line. The cache has no partial library."""
    compiler = tmp_path / "c++"
    compiler.write_text('#!/bin/sh\necho "error: unrecognized option -std=c++20" >&2\nexit 1\n')
    compiler.chmod(0o755)
    text = failure(SPCCL_TORCH_GLUE="compile", XDG_CACHE_HOME=str(tmp_path / "cache"), CXX=str(compiler))
    assert "unrecognized option" in text and "too old for C++20" in text and "glue.cpp" in text
    assert not list((tmp_path / "cache").rglob("*.so*"))


def script(path: Path, text: str) -> str:
    """An executable shell script, as $CXX."""
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


LOAD = """
import sys
from spccl import _torch_glue
try:
    print("loaded", _torch_glue.load())
except _torch_glue.GlueError as e:
    print("error:", e)
"""


def load_in_processes(n: int, **env: str) -> list[str]:
    """Load the glue in `n` processes that start together. Returns what each printed."""
    settings = dict(os.environ, SPCCL_TORCH_GLUE="compile", **env)
    running = [
        subprocess.Popen(
            [sys.executable, "-c", LOAD], env=settings, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        for _ in range(n)
    ]
    outputs = []
    for process in running:
        out, err = process.communicate(timeout=500)
        assert process.returncode == 0, f"exit {process.returncode}\n{out}\n{err}"
        outputs.append(out)
    return outputs


def test_damaged_library_in_the_cache_is_made_again(monkeypatch, tmp_path):
    """A damaged library in the cache is compiled again. Loading a truncated one would end the process by SIGBUS; one
    with a changed byte may do anything."""
    compiler = script(tmp_path / "c++", f'for last; do :; done; echo x >> "{tmp_path}/calls"; cp "{built()}" "$last"')
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", compiler)
    library = _torch_glue.cached_library(torch)
    damage = (
        (lambda library: None, 1),  # there is none yet
        (lambda library: None, 1),  # not damaged: taken from the cache
        (lambda library: os.truncate(library, library.stat().st_size // 2), 2),
        (lambda library: library.write_bytes(library.read_bytes()[:-1] + b"!"), 3),
        (lambda library: library.with_name(library.name + ".sha256").unlink(), 4),
    )
    for hurt, n_calls in damage:
        hurt(library)
        assert _torch_glue._compiled(torch) == library
        assert library.read_bytes() == built().read_bytes()
        assert (tmp_path / "calls").read_text().count("x") == n_calls
    os.truncate(library, 1000)
    (output,) = load_in_processes(1, XDG_CACHE_HOME=str(tmp_path / "cache"), CXX=compiler)
    assert output.strip() == f"loaded {library}", output


def built() -> Path:
    """The glue that this environment uses."""
    return _torch_glue.load()


def test_a_library_that_was_cut_off_is_refused(failure, tmp_path):
    cut = tmp_path / "libcut.so"
    cut.write_bytes(built().read_bytes()[:-1000])
    text = failure(SPCCL_TORCH_GLUE=str(cut))
    assert "libcut.so" in text and "cut off" in text


@pytest.mark.slow
def test_ranks_of_one_start_compile_once_and_share_the_failure(tmp_path):
    """The compiler runs once, not once per rank. Every rank's error has its words. The next job tries again."""
    waits = f'test $(ls -l /proc/[0-9]*/fd 2>/dev/null | grep -c "{tmp_path}/cache.*/lock$") -ge 2'  # for the lock
    until_other = f"for i in $(seq 300); do {waits} && break; sleep 0.1; done"
    fails = 'echo "ld: no space on device" >&2; exit 1'
    compiler = script(tmp_path / "c++", f'echo x >> "{tmp_path}/calls"; {until_other}; {fails}')
    env = {"XDG_CACHE_HOME": str(tmp_path / "cache"), "CXX": compiler}
    for n_starts in (1, 2):
        outputs = load_in_processes(2, **env)
        assert all("error:" in text and "no space on device" in text for text in outputs), outputs
        assert sum("another process of this job" in text for text in outputs) == 1, outputs
        assert (tmp_path / "calls").read_text().count("x") == n_starts
    leftovers = [p.name for p in (tmp_path / "cache").rglob("*.tmp")]
    assert not leftovers, leftovers


def test_a_failure_on_another_host_is_not_this_hosts(monkeypatch, tmp_path):
    """Hosts that share a cache may have different compilers: each tries for itself. Ranks of one host share a failure,
    whatever the clock of the file server says. A library that compiled removes the notes of all hosts."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", script(tmp_path / "c++", f'echo x >> "{tmp_path}/calls"; exit 1'))
    monkeypatch.setattr(_torch_glue, "_last_failure_s", 0.0)
    (text,) = load_in_processes(1, XDG_CACHE_HOME=str(tmp_path / "cache"), CXX=os.environ["CXX"])
    assert "did not compile" in text and "another process" not in text
    (note,) = (tmp_path / "cache").rglob("*.failed")
    os.utime(note, (1, 1))
    with pytest.raises(_torch_glue.GlueError, match="another process of this job"):
        _torch_glue._compiled(torch)
    monkeypatch.setattr(_torch_glue, "_last_failure_s", 0.0)
    monkeypatch.setattr(platform, "node", lambda: "another-host")
    with pytest.raises(_torch_glue.GlueError, match="the torch glue did not compile"):
        _torch_glue._compiled(torch)
    assert (tmp_path / "calls").read_text().count("x") == 2
    assert len(list((tmp_path / "cache").rglob("*.failed"))) == 2
    script(tmp_path / "c++", f'for last; do :; done; cp "{built()}" "$last"')
    _torch_glue._compiled(torch)
    assert not list((tmp_path / "cache").rglob("*.failed"))


def test_without_proc(monkeypatch, tmp_path):
    """Where /proc cannot be read, a failure after the import of spccl counts as one of the same job."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", script(tmp_path / "c++", "exit 1"))
    monkeypatch.setattr(_torch_glue, "PROC", tmp_path / "nothing")
    monkeypatch.setattr(_torch_glue, "_last_failure_s", 0.0)
    with pytest.raises(_torch_glue.GlueError, match="the torch glue did not compile"):
        _torch_glue._compiled(torch)
    monkeypatch.setattr(_torch_glue, "_last_failure_s", 0.0)  # as in another process that started before
    with pytest.raises(_torch_glue.GlueError, match="another process of this job"):
        _torch_glue._compiled(torch)
    monkeypatch.setattr(_torch_glue, "_last_failure_s", 0.0)
    monkeypatch.setattr(_torch_glue, "_imported_s", time.time() + 1)  # as in a later job
    with pytest.raises(_torch_glue.GlueError, match=r"^the torch glue did not compile"):
        _torch_glue._compiled(torch)


def test_compiler_that_does_not_start(failure, tmp_path):
    """A compiler that the system cannot start is named as the fault; it says nothing about the cache."""
    compiler = tmp_path / "c++"
    compiler.write_bytes(b"no program")
    compiler.chmod(0o755)
    text = failure(SPCCL_TORCH_GLUE="compile", XDG_CACHE_HOME=str(tmp_path / "cache"), CXX=str(compiler))
    assert f"cannot run the C++ compiler {compiler}" in text and "Exec format error" in text and "set CXX" in text


def test_a_process_that_failed_may_try_again(monkeypatch, tmp_path):
    """A process can compile after an earlier failure, as in a notebook after a compiler was installed."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", script(tmp_path / "c++", f'echo x >> "{tmp_path}/calls"; exit 1'))
    for n_calls in (1, 2):
        with pytest.raises(_torch_glue.GlueError, match="did not compile"):
            _torch_glue._compiled(torch)
        assert (tmp_path / "calls").read_text().count("x") == n_calls


def test_leftovers_of_a_killed_compiler_are_removed(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", script(tmp_path / "c++", f'for last; do :; done; cp "{built()}" "$last"'))
    library = _torch_glue.cached_library(torch)
    library.parent.mkdir(parents=True)
    (library.parent / "tmpkilled.so.tmp").write_bytes(b"half")
    assert _torch_glue._compiled(torch) == library
    assert sorted(p.suffix for p in library.parent.iterdir()) == ["", ".sha256", ".so"]


@pytest.fixture
def temporary(monkeypatch, tmp_path):
    """The folder of temporary files, and one above a cache. $CXX gives a library without compiling."""
    for name in ("tmp", "home"):
        (tmp_path / name).mkdir(mode=0o700)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("CXX", script(tmp_path / "c++", f'for last; do :; done; cp "{built()}" "$last"'))
    return tmp_path / "tmp"


def other_owner(monkeypatch, *paths: Path) -> None:
    """Make `paths` look as if user 12345 owned them."""
    real = os.stat

    def stat_of(path, *args, **kwargs):
        status = real(path, *args, **kwargs)
        return os.stat_result([*status[:4], 12345, *status[5:]]) if Path(path) in paths else status

    monkeypatch.setattr(os, "stat", stat_of)


def is_in(folder: Path) -> bool:
    return _torch_glue._compiled(torch).is_relative_to(folder)


@pytest.mark.parametrize("writer", ["parent", "cache", "key", "mode", "group"])
def test_cache_that_others_can_write_to_is_not_used(monkeypatch, temporary, writer):
    """A library that another user put into a shared cache would be loaded as this user's code."""
    library = _torch_glue._compiled(torch)
    home = library.parents[2]
    assert home == temporary.parent / "home" and is_in(home)
    _torch_glue._library_folder.cache_clear()
    place = {"parent": home, "cache": library.parents[1], "key": library.parent}
    if writer in place:
        other_owner(monkeypatch, place[writer])
    elif writer == "mode":
        home.chmod(0o777)
    else:
        monkeypatch.setattr(Path, "chmod", lambda path, mode: None)  # as on file systems without modes
        os.chmod(library.parent, 0o775)
    with pytest.warns(RuntimeWarning, match=f"{home}.*spccl-{os.geteuid()} instead") as warned:
        own = _torch_glue.cached_library(torch).parents[1]
        assert is_in(temporary) and is_in(own)
    assert len(warned) == 1
    assert own.name == f"spccl-{os.geteuid()}" and own.stat().st_mode & 0o777 == 0o700
    _torch_glue._library_folder.cache_clear()
    other_owner(monkeypatch, *([home, own] if writer == "mode" else [*place.values(), own]))
    with pytest.raises(_torch_glue.GlueError, match=f"no folder is safe.*{home}.*{own}"):
        _torch_glue._compiled(torch)


@pytest.mark.parametrize("mode", [0o1777, 0o755, 0o775])
def test_cache_in_a_folder_where_only_this_user_can_rename(temporary, recwarn, mode):
    """The usual modes of ~/.cache and of /tmp need no other folder. What an older version left is made private."""
    home = temporary.parent / "home"
    home.chmod(mode)
    library = _torch_glue._compiled(torch)
    assert library.parents[2] == home
    for folder in library.parents[:2]:
        assert folder.stat().st_mode & 0o777 == 0o700
        folder.chmod(0o775)
    library.chmod(0o777)
    _torch_glue._library_folder.cache_clear()
    assert _torch_glue.is_whole(library) is False  # another user may have written it
    assert _torch_glue._compiled(torch) == library and _torch_glue.is_whole(library)
    for folder in library.parents[:2]:
        assert folder.stat().st_mode & 0o777 == 0o700
    assert not recwarn.list


@pytest.mark.parametrize("version", ["2.8.0", "2.8.0+cu126", "1.13.1", "2.0.0a0+git1234"])
def test_old_torch_is_refused(version):
    with pytest.raises(_torch_glue.GlueError, match=r"needs torch 2\.9 or later.*torch>=2\.9"):
        _torch_glue.check_torch_version(version)


@pytest.mark.parametrize("version", ["2.9.0", "2.9.1+cu128", "2.10.0", "2.13.0+cpu", "2.14.0a0+git1", "3.0.0"])
def test_later_torch_is_taken(version):
    assert _torch_glue.check_torch_version(version) is None


def test_key_depends_on_sources_compiler_and_machine(monkeypatch, tmp_path):
    first = _torch_glue._key(torch, "")
    monkeypatch.setattr(platform, "machine", lambda: "aarch64x")
    assert "aarch64x" in _torch_glue._key(torch, "") != first
    monkeypatch.undo()
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
    """The glue needs no Python library and no CUDA library, so one file serves every Python and every torch build."""
    library = _torch_glue.load()
    data = library.read_bytes()
    for word in (b"libpython", b"libcudart", b"libtorch_python", b"libtorch_cuda", b"PyGILState"):
        assert word not in data, word
