"""The DDP hook over ranks: each case of workers/ddp_hook.py and ddp_features.py, on Gloo and on spccl."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="the DDP hook is for torch, and none is installed")

from launch import over_ranks

GLOO = pytest.param("gloo-2", marks=pytest.mark.slow)
test_case, test_ranks_end_well = over_ranks("ddp_hook", GLOO, "spccl-2", "spccl-3")
EIGHT = pytest.param("spccl-8", marks=pytest.mark.slow)
test_hosts, test_ranks_of_hosts_end_well = over_ranks("ddp_hosts", "spccl-4", EIGHT)  # 2 and 4 hosts of 2 ranks
test_feature, test_ranks_of_features_end_well = over_ranks("ddp_features", "gloo-2", "spccl-2")
