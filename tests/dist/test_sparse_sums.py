"""sum_density of SparseSync and of PrunedGradients: the cases of workers/sparse_sums.py and ddp_sums.py."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="SparseSync is for torch, and none is installed")

from launch import over_ranks

GLOO = pytest.param("gloo-2", marks=pytest.mark.slow)
test_case, test_ranks_end_well = over_ranks("sparse_sums", "spccl-4", GLOO)
test_hook_case, test_ranks_of_hooks_end_well = over_ranks("ddp_sums", "spccl-4", GLOO)
