"""One bit per value over ranks: each case of workers/sparse_signs.py, on spccl and on Gloo."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="SparseSync is for torch, and none is installed")

from launch import check_case, over_ranks, run_ranks

GLOO = pytest.param("gloo-3", marks=pytest.mark.slow)
FIVE = pytest.param("spccl-5", marks=pytest.mark.slow)
test_case, test_ranks_end_well = over_ranks("sparse_signs", "spccl-2", "spccl-4", FIVE, GLOO)


@pytest.mark.slow
def test_bytes_of_16_ranks():
    """As many as of 4: an all-gather of everybody's rows would be 4 times as many."""
    ranks = run_ranks("sparse_signs", 16, "sends_few_bytes", env={"SPCCL_TEST_BACKEND": "spccl"})
    check_case(ranks, "sends_few_bytes")
