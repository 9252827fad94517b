"""GPUs of several hosts: ranks of one machine whose hosts have different names. Between them all goes over TCP."""

from __future__ import annotations

import pytest
from gpu_launch import check_case, run_gpus

pytestmark = pytest.mark.gpu
HOSTS = {"SPCCL_CUDA_ROUTE": "spccl"}
SHAPES = [(2, 1), (4, 2), (4, 1)]  # ranks, ranks per host
VALUES = [
    "all_reduce_values",
    "reduce_scatter_values",
    "all_gather_values",
    "broadcast_values",
    "special_bits",
    "any_size_density_and_pattern",
    "large",
    "in_place_and_layouts",
]


@pytest.fixture(scope="module", params=SHAPES, ids=lambda s: f"{s[0] // s[1]} x {s[1]}")
def ranks(request):
    n_ranks, per_host = request.param
    return run_gpus("values", n_ranks, *VALUES, RANKS_PER_HOST=str(per_host), **HOSTS)


@pytest.mark.parametrize("case", VALUES)
def test_case(ranks, case):
    check_case(ranks, case)


@pytest.mark.parametrize(("n_ranks", "per_host"), SHAPES)
def test_killed_peer(n_ranks, per_host):
    ranks = run_gpus("faults", n_ranks, "killed_peer", timeout_s=120, RANKS_PER_HOST=str(per_host), **HOSTS)
    assert ranks[-1].returncode == -9, ranks[-1].report()
    for reported in check_case(ranks[:-1], "killed_peer"):
        assert reported["seconds"] < 20, reported
        assert "SPCCL_ERR_PEER" in reported["text"] or "SPCCL_ERR_ABORTED" in reported["text"], reported
        assert f"rank {n_ranks - 1}" in reported["text"], reported


@pytest.mark.parametrize(("n_ranks", "per_host"), SHAPES)
@pytest.mark.parametrize("scene", ["aborted", "missing_rank", "short_wait"])
def test_scene(scene, n_ranks, per_host):
    ranks = run_gpus("faults", n_ranks, scene, timeout_s=120, RANKS_PER_HOST=str(per_host), **HOSTS)
    for reported in check_case(ranks, scene):
        assert reported["seconds"] < 20, reported


@pytest.mark.parametrize(("n_ranks", "per_host"), SHAPES)
def test_launches_behind_a_collective(n_ranks, per_host):
    """More launches than the driver queues, and the first use of a kernel, while a collective waits for a peer."""
    ranks = run_gpus("hosts", n_ranks, timeout_s=120, RANKS_PER_HOST=str(per_host), **HOSTS)
    for case in ("full_queue", "first_use_of_a_kernel", "graph_after_a_pause", "figures"):
        check_case(ranks, case)
