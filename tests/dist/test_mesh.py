"""Four ranks: meshes of two dimensions, callbacks that wait, uneven ranks, torch's optimizers and compiler."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="torch.distributed is what is tested here")

from launch import check_case, run_ranks

CASES = [
    "callback_waits_for_another",
    "callbacks_in_order",
    "power_sgd",
    "ddp_join",
    "ddp_rank_without_rows",
    "groups_of_a_mesh",
    "hsdp",
    "dtensor_2d",
    "zero_optimizer",
    "compiled",
    "data_loader_workers",
    "groups_in_threads",
]


@pytest.fixture(scope="module")
def ranks():
    return run_ranks("mesh", 4)


@pytest.mark.parametrize("case", CASES)
def test_case(ranks, case):
    check_case(ranks, case)


def test_all_ranks_end(ranks):
    assert [r.returncode for r in ranks] == [0] * len(ranks), "\n".join(r.report() for r in ranks)
