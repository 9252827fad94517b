"""Errors on a GPU end in an exception that names the rank and the reason. Afterwards the GPU and new groups work."""

from __future__ import annotations

import pytest
from gpu_launch import check_case, run_gpus

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("n_gpus", [2, 4])
@pytest.mark.parametrize("scene", ["killed_peer", "killed_peer_blocking_wait"])
def test_killed_peer(scene, n_gpus):
    blocking = {"SPCCL_BLOCKING_WAIT": "1"} if "blocking" in scene else {}
    ranks = run_gpus("faults", n_gpus, scene, timeout_s=120, **blocking)
    assert ranks[-1].returncode == -9, ranks[-1].report()
    for reported in check_case(ranks[:-1], scene):
        assert reported["seconds"] < 20, reported
        # Some ranks notice the death themselves, and tell the others. The errors of all name the dead rank.
        assert "SPCCL_ERR_PEER" in reported["text"] or "SPCCL_ERR_ABORTED" in reported["text"], reported
        assert f"rank {n_gpus - 1}" in reported["text"], reported


@pytest.mark.parametrize("n_gpus", [2, 4])
@pytest.mark.parametrize(("scene", "most_s"), [("aborted", 15), ("missing_rank", 20), ("short_wait", 20)])
def test_scene(scene, most_s, n_gpus):
    for reported in check_case(run_gpus("faults", n_gpus, scene, timeout_s=120), scene):
        assert reported["seconds"] < most_s, reported


@pytest.mark.parametrize("path", ["nccl", "stage"])
def test_gpus_that_do_not_reach_each_other(path):
    """SPCCL_CUDA_ROUTE forces what is used for such GPUs."""
    for reported in check_case(run_gpus("faults", 2, "fallback", SPCCL_CUDA_ROUTE=path), "fallback"):
        assert reported["text"].startswith(f"{path}: "), reported
        assert "rank 0: GPU collectives are turned off" in reported["text"], reported


def test_one_rank_without_the_engine():
    """If one rank turns the engine off, all ranks use the fallback, and the reason names that rank."""
    for reported in check_case(
        run_gpus("faults", 2, "one_without_engine", SPCCL_CUDA_ROUTE="auto+stage"), "one_without_engine"
    ):
        assert reported["text"].startswith("stage: "), reported
        assert "rank 1: GPU collectives are turned off" in reported["text"], reported
