"""SparseSync with sum_density: each case of workers/sparse_sums.py, on spccl and on Gloo."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="SparseSync is for torch, and none is installed")

from launch import over_ranks

GLOO = pytest.param("gloo-2", marks=pytest.mark.slow)
test_case, test_ranks_end_well = over_ranks("sparse_sums", "spccl-4", GLOO)
