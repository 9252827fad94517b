"""spccl.optim.SparseSync over ranks: each case of workers/sparse_sync.py, on spccl and on Gloo."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="SparseSync is for torch, and none is installed")

from launch import check_case, run_ranks


def cases_of(worker: str) -> list[str]:
    text = (Path(__file__).parent / "workers" / f"{worker}.py").read_text()
    return re.search(r"^CASES = \[(.*?)\]", text, re.M | re.S).group(1).replace(",", " ").split()


@pytest.fixture(scope="module", params=["spccl-2", "spccl-4", pytest.param("gloo-2", marks=pytest.mark.slow)])
def ranks(request):
    backend, n_ranks = request.param.split("-")
    return run_ranks("sparse_sync", int(n_ranks), env={"SPCCL_TEST_BACKEND": backend})


@pytest.mark.parametrize("case", cases_of("sparse_sync"))
def test_case(ranks, case):
    check_case(ranks, case)


def test_ranks_end_well(ranks):
    assert {r.returncode for r in ranks} == {0}, "\n".join(r.report() for r in ranks)


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


@pytest.fixture(scope="module")
def shards():
    return run_ranks("sparse_fsdp", 4)


@pytest.mark.parametrize("case", cases_of("sparse_fsdp"))
def test_fsdp2_shards(shards, case):
    """2 replicas of 2 FSDP2 shards: the local parts of DTensors are exchanged between the replicas."""
    check_case(shards, case)
