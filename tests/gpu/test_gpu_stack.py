"""Calls that torch's own libraries make, on 1, 2 and 4 GPUs, without and with a bound device (device_id)."""

from __future__ import annotations

import pytest
from gpu_launch import check_case, run_gpus

pytestmark = pytest.mark.gpu
CASES = [
    "delegated",
    "premul_sum",
    "point_to_point",
    "coalesced",
    "functional_and_compiled",
    "sparse_coo",
    "ddp_sparse_embedding",
    "ddp_pruned",
    "ddp_pruned_as_on_the_host",
    "prune_in_a_graph",
    "fsdp2_equals_nccl",
    "meshes",
    "objects_and_host_tensors",
    "bad_input",
    "profiler_names",
]
SETTINGS = [(1, "0"), (2, "0"), (4, "0"), (4, "1")]


@pytest.fixture(scope="module", params=SETTINGS, ids=lambda p: f"{p[0]} GPUs{', bound' if p[1] == '1' else ''}")
def ranks(request):
    n_gpus, bind = request.param
    return run_gpus("stack", n_gpus, BIND=bind)


@pytest.mark.parametrize("case", CASES)
def test_case(ranks, case):
    check_case(ranks, case)


def test_all_ranks_end(ranks):
    assert [r.returncode for r in ranks] == [0] * len(ranks), "\n".join(r.report() for r in ranks)
