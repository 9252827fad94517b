"""Runs the workers of this folder, one process per GPU, with the launcher of tests/dist, or skips with the reason.

SPCCL_TEST_SHARE_GPUS=1 runs tests that need more GPUs than there are: rank r takes GPU r modulo their number. It shows
that results are right, and says nothing about times.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "dist"))

from launch import Rank, cases_of, check_case, run_ranks  # noqa: E402

__all__ = ["Rank", "cases_of", "check_case", "missing", "needs", "run_gpus"]

# NVLink multicast is off: some drivers do not support it, and no test needs it.
SETTINGS = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}


@functools.cache
def missing(n_gpus: int) -> str:
    """The reason why tests on `n_gpus` GPUs cannot run; "" if they can."""
    try:
        import torch
    except ImportError:
        return "torch is not installed"
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    shared = found > 0 and os.environ.get("SPCCL_TEST_SHARE_GPUS", "0") == "1"
    if found < n_gpus and not shared:
        return f"needs {n_gpus} GPU{'s' * (n_gpus > 1)}, torch {torch.__version__} sees {found}"
    from spccl import _torch_glue

    if ctypes.CDLL(str(_torch_glue.LIBRARY)).spccl_cuda_device_count() < found:
        return f"{_torch_glue.LIBRARY} was built without CUDA"
    return ""


def needs(n_gpus: int) -> None:
    """Skip the test that calls this unless there are `n_gpus` GPUs."""
    why = missing(n_gpus)
    if why:
        pytest.skip(why)


def run_gpus(worker: str, n_ranks: int, *args: str, timeout_s: float = 240, **env: str) -> list[Rank]:
    """run_ranks for `workers/<worker>.py` in this folder. Rank r takes GPU r, modulo the number of GPUs."""
    needs(n_ranks)
    return run_ranks(str(HERE / "workers" / worker), n_ranks, *args, timeout_s=timeout_s, env={**SETTINGS, **env})
