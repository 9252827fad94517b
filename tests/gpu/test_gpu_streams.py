"""Order and lifetime on 1, 2 and 4 GPUs: streams, futures, groups, graphs. Also the host's cost of a call."""

from __future__ import annotations

import pytest
from gpu_launch import check_case, run_gpus

pytestmark = pytest.mark.gpu
CASES = [
    "waits_for_the_producer",
    "wait_makes_the_stream_wait",
    "futures",
    "dropped",
    "two_hundred_in_flight",
    "graph_replay",
    "first_collective_in_a_graph",
    "barrier",
    "host_cost",
]


@pytest.fixture(scope="module", params=[1, 2, 4], ids=lambda n: f"{n} GPUs")
def ranks(request):
    return run_gpus("streams", request.param)


@pytest.mark.parametrize("case", CASES)
def test_case(ranks, case):
    check_case(ranks, case)


def test_host_cost(ranks):
    """The goal is 25 us. Twice that is a failure, however busy the machine is."""
    for reported in check_case(ranks, "host_cost"):
        assert reported["spccl_us"] < 50, reported


def test_order_of_each_group_alone():
    cases = ["waits_for_the_producer", "futures", "graph_replay"]
    ranks = run_gpus("streams", 2, *cases, SPCCL_ORDER="group")
    for case in cases:
        check_case(ranks, case)
