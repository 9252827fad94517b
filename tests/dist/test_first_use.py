"""Tests an installed package without glue for its torch. The first process group compiles the glue into the cache,
once for all ranks of a job. Later jobs take it from the cache."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the glue is for torch, and none is installed")

import kept_cxx

from spccl import _torch_glue

N_RANKS = 2
RANK_CODE = """
import datetime, sys
import torch, torch.distributed as dist
rank, world_size = int(sys.argv[1]), int(sys.argv[2])
store = dist.FileStore(sys.argv[3], world_size)
wait = datetime.timedelta(seconds=450)
dist.init_process_group("spccl", store=store, rank=rank, world_size=world_size, timeout=wait)
x = torch.zeros(10_000)
x[rank::100] = rank + 1
dist.all_reduce(x)
assert x[:3].tolist() == [1, 2, 0], x[:3]
from spccl import _torch_glue
print(_torch_glue.load())
dist.destroy_process_group()
"""


def run_job(folder: Path, name: str) -> list[str]:
    """Run a job of N_RANKS processes with its cache in `folder`. Returns the path of the library that each loaded."""
    env = dict(os.environ, SPCCL_TORCH_GLUE="compile", XDG_CACHE_HOME=str(folder / "the cache"))
    env["CXX"] = kept_cxx.compiler(_torch_glue._compiler())
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK_CODE, str(rank), str(N_RANKS), str(folder / name)],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(N_RANKS)
    ]
    try:
        ended = [(*rank.communicate(timeout=500), rank.returncode) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    for out, err, status in ended:
        assert status == 0, f"exit {status}\n{out}\n{err}"
    return [out.strip() for out, _, _ in ended]


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_compiles_once_and_is_kept(tmp_path):
    first = run_job(tmp_path, "first")
    (library,) = {Path(path) for path in first}
    assert tmp_path in library.parents, f"{library} is not in the cache of this test"
    made = library.stat()
    again = run_job(tmp_path, "second")
    assert {Path(path) for path in again} == {library}
    assert (library.stat().st_ino, library.stat().st_mtime_ns) == (made.st_ino, made.st_mtime_ns), "compiled again"
    assert list(tmp_path.rglob("libspccl_torch-*.so")) == [library]


def test_without_compiler_says_what_to_do(tmp_path):
    """Without prebuilt glue and without a compiler, the error names the compiler and says how to install one."""
    env = dict(os.environ, SPCCL_TORCH_GLUE="compile", XDG_CACHE_HOME=str(tmp_path), CXX=str(tmp_path / "no-such-c++"))
    command = [sys.executable, "-c", RANK_CODE, "0", "1", str(tmp_path / "store")]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=500)
    assert done.returncode != 0
    assert "no-such-c++" in done.stderr and "apt-get install g++" in done.stderr, done.stderr
