"""Plans from files on CUDA tensors: chunks with any owners, relays, and what is refused. Ranks may share a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
from gpu_launch import check_case, run_gpus

from spccl import schedule

pytestmark = pytest.mark.gpu
EXAMPLES = Path(__file__).parents[2] / "examples/schedules"
CASES = ["all_reduce_values", "broadcast_values", "in_place_and_layouts", "any_size_density_and_pattern"]
# Rank 0 owns no chunk, the others several, in falling order.
OWNERS = """
from spccl.schedule import all_reduce, broadcast


def owner(t, c):
    return t.ranks - 1 - c % (t.ranks - 1)


@all_reduce(chunks=7)
def owned(t):
    for c in range(7):
        total = t.reduce(owner(t, c), [t.input(r, c) for r in range(t.ranks)])
        total.output()
        for r in range(t.ranks):
            if r != owner(t, c):
                total.copy(r).output()


@broadcast(chunks=3)
def spread(t):
    for c in range(3):
        x = t.input(t.root, c)
        if owner(t, c) != t.root:
            x = x.copy(owner(t, c))
            x.output()
        for r in range(t.ranks):
            if r not in (t.root, owner(t, c)):
                x.copy(r).output()
"""


def _plan(tmp_path, source: Path, ranks: int, hosts: int | None = None) -> str:
    path = tmp_path / f"{source.stem}.plan"
    path.write_text(schedule.compile_file(source, [(ranks, hosts)]))
    return f"file:{path}"


@pytest.mark.parametrize("n_ranks", [2, 3, 4])
def test_owners(tmp_path, n_ranks):
    source = tmp_path / "owners.py"
    source.write_text(OWNERS)
    ranks = run_gpus("values", n_ranks, *CASES, SPCCL_SCHEDULE=_plan(tmp_path, source, n_ranks))
    for case in CASES:
        check_case(ranks, case)


def test_relays(tmp_path):
    hosts = {"RANKS_PER_HOST": "2", "SPCCL_CUDA_ROUTE": "spccl"}
    plan = _plan(tmp_path, EXAMPLES / "two_step_gather.py", 4, 2)
    check_case(run_gpus("values", 4, "all_gather_values", SPCCL_SCHEDULE=plan, **hosts), "all_gather_values")


@pytest.mark.parametrize("route", ["auto", "auto+stage"])
def test_a_plan_that_gpus_cannot_run(tmp_path, route):
    """An error by its step; with +stage host memory, for this collective only."""
    plan = _plan(tmp_path, EXAMPLES / "ring.py", 2)
    check_case(run_gpus("plans", 2, "ring", SPCCL_SCHEDULE=plan, SPCCL_CUDA_ROUTE=route), "ring")
