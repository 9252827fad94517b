"""Two ranks: a child of fork uses its parent's group."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="torch.distributed is what is tested here")

from launch import check_case, run_ranks

CASES = ["child_uses_group", "child_waits_for_pending_work", "child_destroys_group", "forks_while_busy"]


@pytest.fixture(scope="module")
def ranks():
    return run_ranks("forks", 2)


@pytest.mark.parametrize("case", CASES)
def test_case(ranks, case):
    check_case(ranks, case)


def test_all_ranks_end(ranks):
    assert [r.returncode for r in ranks] == [0] * len(ranks), "\n".join(r.report() for r in ranks)
