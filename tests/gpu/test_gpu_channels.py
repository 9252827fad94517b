"""One-sided channels on real GPUs: the programs of examples/channels, compiled by nvcc, and from Python and
Triton.

Rank r is on GPU r modulo their number, so one GPU is enough.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from gpu_launch import needs

import spccl

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).resolve().parent.parent.parent
EXAMPLE = ROOT / "examples/channels"
LIBRARY = Path(spccl.__file__).parent / "libspccl.so"


def compile_with_nvcc(output: Path, *args: object) -> Path:
    nvcc = shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")
    if nvcc is None:
        pytest.skip("no nvcc on PATH or in /usr/local/cuda/bin")
    include = LIBRARY.parent / "include"
    headers = include if include.is_dir() else ROOT / "csrc"
    command = [nvcc, "-arch=native", f"-I{headers}", "-o", output, *args]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return output


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    needs(1)
    return tmp_path_factory.mktemp("channels")


@pytest.fixture(scope="module")
def programs(folder):
    return {
        name: compile_with_nvcc(
            folder / name, EXAMPLE / f"{name}.c", EXAMPLE / f"{name}_kernel.cu", LIBRARY, "-lpthread"
        )
        for name in ("ring", "all_pairs")
    }


@pytest.fixture(scope="module")
def kernels(folder):
    """The kernels for ctypes. cudart is shared: Python calls it too."""
    sources = [EXAMPLE / "all_pairs_kernel.cu", EXAMPLE / "ring_kernel.cu"]
    return compile_with_nvcc(
        folder / "kernels.so", "-shared", "-Xcompiler", "-fPIC", "-cudart", "shared", *sources
    )


def run(*command: object) -> str:
    # Ranks are threads: no kernel may be loaded while another waits, and each stream needs its own hardware queue.
    settings = {"CUDA_MODULE_LOADING": "EAGER", "CUDA_DEVICE_MAX_CONNECTIONS": "32"}
    env = dict(os.environ, LD_LIBRARY_PATH=str(LIBRARY.parent), **settings)
    done = subprocess.run([str(arg) for arg in command], capture_output=True, text=True, timeout=120, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("kind", ["memory", "port"])
@pytest.mark.parametrize("n_ranks", [2, 3, 4, 8])
def test_ring(programs, n_ranks, kind):
    output = run(programs["ring"], n_ranks, kind)
    assert output.count(": 0 wrong of") == n_ranks, output


@pytest.mark.parametrize("n_ranks", [2, 3, 4, 8])
def test_all_pairs(programs, n_ranks):
    """The all-reduce of 16 KiB with packets: what the compiler and real memory make of a store of 16 bytes."""
    output = run(programs["all_pairs"], n_ranks)
    assert output.count(": 0 wrong of") == n_ranks, output


@pytest.mark.parametrize("n_ranks", [2, 4])
def test_from_python(kernels, n_ranks):
    """spccl.channels: kernels take the structs of ctypes by value, and by address in an array."""
    output = run(sys.executable, EXAMPLE / "all_pairs.py", kernels, n_ranks)
    assert output.count("all-reduce 0 wrong, ring 0 wrong") == n_ranks, output


def test_triton(folder):
    """A Triton kernel stores, signals and waits with the addresses of a channel. Two processes."""
    pytest.importorskip("triton")
    output = run(sys.executable, EXAMPLE / "triton_exchange.py")
    assert output.count(": 0 wrong of") == 2, output
