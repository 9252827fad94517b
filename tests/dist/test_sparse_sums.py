"""sum_density of SparseSync and of PrunedGradients: the cases of workers/sparse_sums.py and ddp_sums.py."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="SparseSync is for torch, and none is installed")

from launch import check_case, over_ranks, run_ranks

GLOO = pytest.param("gloo-2", marks=pytest.mark.slow)
test_case, test_ranks_end_well = over_ranks("sparse_sums", "spccl-4", GLOO)
test_hook_case, test_ranks_of_hooks_end_well = over_ranks("ddp_sums", "spccl-4", GLOO)


@pytest.mark.slow
def test_bytes_of_16_ranks():
    """About as many as of 4. Without sum_density they are 3.6 times as many: the sums fill in."""
    saving = []
    for n in (4, 16):
        # auto sends small shards dense over shared memory
        env = {"SPCCL_TEST_BACKEND": "spccl", "SPCCL_FORMAT": "tile"}
        reports = check_case(run_ranks("sparse_sums", n, "sends_few_bytes", env=env), "sends_few_bytes")
        saving.append(reports[0]["saving"])
    assert saving[0] > 31, saving
    assert saving[1] > 0.9 * saving[0], saving
