"""Pruned gradients and SparseSync for FSDP2 on 2 GPUs (2 replicas of 1 shard) and 4 (2 of 2)."""

from __future__ import annotations

import pytest
from gpu_launch import check_case, run_gpus

pytestmark = pytest.mark.gpu
CASES = ["density_one_equals_torch", "nothing_is_lost", "clips_and_resumes", "sparse_sync_between_replicas"]


@pytest.fixture(scope="module", params=[2, 4], ids=lambda n: f"{n} GPUs")
def ranks(request):
    return run_gpus("fsdp", request.param, CUBLAS_WORKSPACE_CONFIG=":4096:8")


@pytest.mark.parametrize("case", CASES)
def test_case(ranks, case):
    check_case(ranks, case)
