"""torch's own libraries on backend="spccl": delegated calls, groups, sparse_coo, DDP, FSDP2, DTensor, checkpoints."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="torch.distributed is what is tested here")

from launch import check_case, run_ranks

CASES = [
    "delegated",
    "point_to_point",
    "mixed_order",
    "objects",
    "groups",
    "split",
    "split_again",
    "sparse_values",
    "sparse_integers",
    "sparse_async",
    "sparse_refused",
    "ddp_plain",
    "ddp_unused_parameters",
    "ddp_bucket_view",
    "ddp_no_sync",
    "ddp_static_graph",
    "ddp_sparse_embedding",
    "ddp_fp16_hook",
    "ddp_model_is_spread_by_broadcast",
    "fsdp2",
    "dtensor",
    "checkpoint",
    "destroy_and_join_again",
]


@pytest.fixture(scope="module", params=[2, 3], ids=lambda n: f"{n} ranks")
def ranks(request):
    return run_ranks("stack", request.param)


@pytest.mark.parametrize("case", CASES)
def test_case(ranks, case):
    check_case(ranks, case)


def test_all_ranks_end(ranks):
    assert [r.returncode for r in ranks] == [0] * len(ranks), "\n".join(r.report() for r in ranks)
