"""One-sided channels on real GPUs: the program of examples/channels, compiled by nvcc. Not run on hardware yet."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from gpu_launch import needs

import spccl

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).resolve().parent.parent.parent
EXAMPLE = ROOT / "examples/channels"


@pytest.fixture(scope="module")
def ring(tmp_path_factory):
    needs(1)
    nvcc = shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")
    if nvcc is None:
        pytest.skip("no nvcc on PATH or in /usr/local/cuda/bin")
    library = Path(spccl.__file__).parent / "libspccl.so"
    program = tmp_path_factory.mktemp("channels") / "ring"
    sources = [EXAMPLE / "ring.c", EXAMPLE / "ring_kernel.cu"]
    include = library.parent / "include"
    headers = include if include.is_dir() else ROOT / "csrc"
    command = [nvcc, "-arch=native", f"-I{headers}", "-o", program, *sources, library, "-lpthread"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return program, library.parent


@pytest.mark.parametrize("kind", ["memory", "port"])
@pytest.mark.parametrize("n_ranks", [2, 3, 4, 8])
def test_ring(ring, n_ranks, kind):
    """Rank r is on GPU r modulo their number, so one GPU is enough."""
    program, folder = ring
    # Ranks are threads: no kernel may be loaded while another waits, and each stream needs its own hardware queue.
    settings = {"CUDA_MODULE_LOADING": "EAGER", "CUDA_DEVICE_MAX_CONNECTIONS": "32"}
    env = dict(os.environ, LD_LIBRARY_PATH=str(folder), **settings)
    done = subprocess.run([program, str(n_ranks), kind], capture_output=True, text=True, timeout=120, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(": 0 wrong of") == n_ranks, done.stdout
