"""spccl.fsdp.prune over 4 ranks, 2 replicas of 2 shards: each case of workers/fsdp.py and fsdp_states.py."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="spccl.fsdp is for torch, and none is installed")

from launch import check_case, run_command, run_ranks

WORKERS = Path(__file__).parent / "workers"
EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "fsdp" / "train.py"


def cases_of(worker: str) -> list[str]:
    text = (WORKERS / f"{worker}.py").read_text()
    return re.search(r"^CASES = \[(.*?)\]", text, re.M | re.S).group(1).replace(",", " ").split()


@pytest.fixture(scope="module")
def ranks():
    return run_ranks("fsdp", 4)


@pytest.fixture(scope="module")
def ranks_of_states():
    return run_ranks("fsdp_states", 4)


@pytest.mark.parametrize("case", cases_of("fsdp"))
def test_case(ranks, case):
    check_case(ranks, case)


@pytest.mark.parametrize("case", cases_of("fsdp_states"))
def test_states(ranks_of_states, case):
    check_case(ranks_of_states, case)


def test_ranks_end_well(ranks, ranks_of_states):
    for some in (ranks, ranks_of_states):
        assert {r.returncode for r in some} == {0}, "\n".join(r.report() for r in some)


@pytest.mark.slow
def test_example():
    """examples/fsdp as a user runs it. A rank's shard has about 170 kB, and little of it travels."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4", str(EXAMPLE)]
    settings = dict(os.environ, OMP_NUM_THREADS="1")
    status, output = run_command([*command, "--recipe", "prune", "--steps", "3", "--width", "48"], settings)
    assert status == 0, output
    sent = re.search(r"^validation: [\d.]+ nats.*^between replicas: (\d+) kB", output, re.M | re.S)
    assert sent and 0 < int(sent[1]) < 60, output
