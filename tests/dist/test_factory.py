"""spccl.backend.make_process_group: groups outside of init_process_group."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="torch.distributed is what is tested here")

from launch import check_case, run_ranks

CASES = ["without_a_default_group", "fewer_ranks_on_the_same_store", "bad_arguments"]


@pytest.fixture(scope="module")
def ranks():
    return run_ranks("factory", 3)


@pytest.mark.parametrize("case", CASES)
def test_case(ranks, case):
    check_case(ranks, case)


def test_all_ranks_end(ranks):
    assert [r.returncode for r in ranks] == [0] * len(ranks), "\n".join(r.report() for r in ranks)
