"""Groups of some of the ranks, on hosts that they share or not, without and with a bound device (device_id)."""

from __future__ import annotations

import pytest
from gpu_launch import check_case, run_gpus

pytestmark = pytest.mark.gpu
HOSTS = {"SPCCL_CUDA_ROUTE": "spccl"}
SHAPES = [(2, 1, "0"), (4, 2, "0"), (4, 2, "1"), (4, 1, "0")]  # ranks, ranks per host, bound
CASES = ["values_and_links", "in_flight_at_once", "in_one_graph", "meshes", "ended_one_by_one"]


def name_of(shape: tuple[int, int, str]) -> str:
    n_ranks, per_host, bind = shape
    return f"{n_ranks // per_host}x{per_host}{'-bound' if bind == '1' else ''}"


@pytest.fixture(scope="module", params=SHAPES, ids=name_of)
def ranks(request):
    n_ranks, per_host, bind = request.param
    return run_gpus("groups", n_ranks, RANKS_PER_HOST=str(per_host), BIND=bind, **HOSTS)


@pytest.mark.parametrize("case", CASES)
def test_case(ranks, case):
    check_case(ranks, case)


@pytest.mark.parametrize(("n_ranks", "per_host"), [(2, 1), (4, 2), (4, 1)])
def test_killed_rank(n_ranks, per_host):
    ranks = run_gpus("groups", n_ranks, "killed_rank", timeout_s=120, RANKS_PER_HOST=str(per_host), **HOSTS)
    assert ranks[-1].returncode == -9, ranks[-1].report()
    check_case(ranks[:-1], "killed_rank")
