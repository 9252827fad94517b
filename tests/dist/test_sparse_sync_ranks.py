"""spccl.optim.SparseSync over ranks: each case of workers/sparse_sync.py, on spccl and on Gloo."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="SparseSync is for torch, and none is installed")

from launch import check_case, over_ranks, run_ranks

GLOO = pytest.param("gloo-2", marks=pytest.mark.slow)
test_case, test_ranks_end_well = over_ranks("sparse_sync", "spccl-2", "spccl-4", GLOO)
# 2 replicas of 2 FSDP2 shards: the local parts of DTensors are exchanged between the replicas.
test_fsdp2_shards, test_ranks_of_fsdp2_end_well = over_ranks("sparse_fsdp", "spccl-4")
# 2 hosts of 2 ranks, by SPCCL_HOST_ID; 4 hosts of 2.
EIGHT = pytest.param("spccl-8", marks=pytest.mark.slow)
test_hosts, test_ranks_of_hosts_end_well = over_ranks("sparse_hosts", "spccl-4", EIGHT)


@pytest.mark.slow
def test_a_rank_dies_and_comes_back(tmp_path):
    """Two ranks train 12 steps and save every 4; rank 1 dies in step 7. Started again they end with the same bits as
    two that never stopped."""

    def train(folder: str, die_at: int) -> list:
        env = {"SPCCL_TEST_CHECKPOINTS": str(tmp_path / folder), "SPCCL_TEST_DIE_AT": str(die_at)}
        return run_ranks("sparse_sync", 2, "train", env={"SPCCL_TEST_BACKEND": "spccl", **env})

    straight = check_case(train("straight", 0), "train")
    died = train("stopped", 7)
    assert all(r.returncode != 0 for r in died)
    assert "rank 1 is gone" in died[0].output, died[0].report()
    back = check_case(train("stopped", 0), "train")
    assert [r["began"] for r in back] == [4, 4]
    assert [r["weights"] for r in back] == [r["weights"] for r in straight]
