"""What goes wrong on a GPU ends in an exception that says who and why; the GPU and new groups work afterwards."""

from __future__ import annotations

import pytest
from gpu_launch import check_case, run_gpus

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("n_gpus", [2, 4])
@pytest.mark.parametrize("scene", ["killed_peer", "killed_peer_blocking_wait"])
def test_killed_peer(scene, n_gpus):
    blocking = {"SPCCL_BLOCKING_WAIT": "1"} if "blocking" in scene else {}
    ranks = run_gpus("faults", n_gpus, scene, timeout_s=120, **blocking)
    assert ranks[-1].returncode == -9, ranks[-1].told()
    for told in check_case(ranks[:-1], scene):
        assert told["seconds"] < 20, told
        # Some see it themselves, the others hear of it from these: the dead rank is named by all.
        assert "SPCCL_ERR_PEER" in told["text"] or "SPCCL_ERR_ABORTED" in told["text"], told
        assert f"rank {n_gpus - 1}" in told["text"], told


@pytest.mark.parametrize("n_gpus", [2, 4])
@pytest.mark.parametrize(("scene", "most_s"), [("aborted", 15), ("missing_rank", 20), ("short_wait", 20)])
def test_scene(scene, most_s, n_gpus):
    for told in check_case(run_gpus("faults", n_gpus, scene, timeout_s=120), scene):
        assert told["seconds"] < most_s, told


@pytest.mark.parametrize("path", ["nccl", "stage"])
def test_gpus_that_do_not_reach_each_other(path):
    """What is done then, forced by SPCCL_CUDA_ENGINE=0."""
    for told in check_case(
        run_gpus("faults", 2, "fallback", SPCCL_CUDA_FALLBACK=path, SPCCL_CUDA_ENGINE="0"), "fallback"
    ):
        assert told["text"].startswith(f"{path}: ") and "rank 0: it keeps its GPU out" in told["text"], told


def test_one_rank_without_the_engine():
    """All ranks take the fallback then, and know whose setting it is."""
    for told in check_case(
        run_gpus("faults", 2, "one_without_engine", SPCCL_CUDA_FALLBACK="stage"), "one_without_engine"
    ):
        assert told["text"].startswith("stage: ") and "rank 1: it keeps its GPU out" in told["text"], told
