"""Collectives that spccl runs, through torch.distributed: on 2, 3 and 4 ranks, over TCP, and in every format."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="torch.distributed is what is tested here")

from launch import cases_of, check_case, over_ranks, run_ranks

VALUES = cases_of("collectives")[:7]
test_case, test_ranks_end_well = over_ranks("collectives", "spccl-2", "spccl-3")
test_four_ranks, test_four_ranks_end_well = over_ranks("collectives", "spccl-4", cases=VALUES)


@pytest.mark.parametrize(
    "setting", ["SPCCL_TRANSPORTS=tcp", "SPCCL_FORMAT=pici", "SPCCL_FORMAT=coo", "SPCCL_FORMAT=dense"]
)
def test_results_do_not_depend_on(setting):
    """Another transport and any forced format give the same bits. Tile is not forced here: it refuses full blocks,
    which these inputs have. The C tests force it."""
    ranks = run_ranks("collectives", 2, *VALUES, env=dict([setting.split("=")]))
    for case in VALUES:
        check_case(ranks, case)
