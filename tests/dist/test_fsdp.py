"""spccl.fsdp.prune over 4 ranks, 2 replicas of 2 shards: each case of workers/fsdp.py."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="spccl.fsdp is for torch, and none is installed")

from launch import check_case, run_ranks

WORKER = Path(__file__).parent / "workers" / "fsdp.py"
CASES = re.search(r"^CASES = \[(.*?)\]", WORKER.read_text(), re.M | re.S).group(1).replace(",", " ").split()


@pytest.fixture(scope="module")
def ranks():
    return run_ranks("fsdp", 4)


@pytest.mark.parametrize("case", CASES)
def test_case(ranks, case):
    check_case(ranks, case)


def test_ranks_end_well(ranks):
    assert {r.returncode for r in ranks} == {0}, "\n".join(r.report() for r in ranks)
