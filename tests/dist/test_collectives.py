"""Collectives that spccl runs, through torch.distributed: on 2, 3 and 4 ranks, over TCP, and in every format."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="torch.distributed is what is tested here")

from launch import check_case, run_ranks

CASES = [
    "all_reduce_values",
    "reduce_scatter_values",
    "all_gather_values",
    "broadcast_values",
    "special_values_survive_gather",
    "in_place",
    "layouts",
    "inference_mode",
    "premul_sum",
    "many_in_flight",
    "dropped_work",
    "polling",
    "futures",
    "slow_callback",
    "wait_timeout",
    "coalesced",
    "functional",
    "bad_arguments",
    "profiler_names",
    "stats_and_links",
    "sequence_and_names",
]
VALUES = CASES[:7]


@pytest.fixture(scope="module", params=[2, 3], ids=lambda n: f"{n} ranks")
def ranks(request):
    return run_ranks("collectives", request.param)


@pytest.fixture(scope="module")
def four_ranks():
    return run_ranks("collectives", 4, *VALUES)


@pytest.mark.parametrize("case", CASES)
def test_case(ranks, case):
    check_case(ranks, case)


@pytest.mark.parametrize("case", VALUES)
def test_four_ranks(four_ranks, case):
    check_case(four_ranks, case)


def test_all_ranks_end(ranks):
    assert [r.returncode for r in ranks] == [0] * len(ranks), "\n".join(r.report() for r in ranks)


def test_sparse_data_is_sent_sparse(ranks):
    for report in check_case(ranks, "stats_and_links"):
        assert report["wire"] < report["dense"] / 50, report


@pytest.mark.parametrize(
    "setting", ["SPCCL_TRANSPORTS=tcp", "SPCCL_FORMAT=pici", "SPCCL_FORMAT=coo", "SPCCL_FORMAT=dense"]
)
def test_results_do_not_depend_on(setting):
    """Another transport and any forced format give the same bits. Tile is not forced here: it refuses full blocks,
    which these inputs have. The C tests force it."""
    ranks = run_ranks("collectives", 2, *VALUES, env=dict([setting.split("=")]))
    for case in VALUES:
        check_case(ranks, case)
