"""The DDP hook on 1 and 2 GPUs: limits of thread blocks, whole steps in a captured graph, what a bucket launches."""

from __future__ import annotations

import pytest
from gpu_launch import check_case, run_gpus

pytestmark = pytest.mark.gpu
CASES = [
    "limited_calls",
    "ddp_limited",
    "ddp_step_in_a_graph",
    "scaled_step_in_a_graph",
    "pruned_inside_the_all_reduce",
    "launches_per_bucket",
    "bad_input",
]


@pytest.fixture(scope="module", params=[1, 2], ids=lambda n: f"{n} GPUs")
def ranks(request):
    # The same cuBLAS kernels inside and outside of captures.
    return run_gpus("pruned", request.param, CUBLAS_WORKSPACE_CONFIG=":4096:8")


@pytest.mark.parametrize("case", CASES)
def test_case(ranks, case):
    check_case(ranks, case)


def test_ranks_that_give_other_limits():
    for reported in check_case(run_gpus("faults", 2, "other_limit", timeout_s=120), "other_limit"):
        assert reported["seconds"] < 20, reported
        assert "max_ctas 2" in reported["text"] and "max_ctas 1" in reported["text"], reported
        assert "rank 0" in reported["text"] and "rank 1" in reported["text"], reported
