"""spccl.fsdp.prune over 4 ranks, 2 replicas of 2 shards: each case of workers/fsdp.py and fsdp_states.py."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="spccl.fsdp is for torch, and none is installed")

from launch import over_ranks, torchrun

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "fsdp" / "train.py"
test_case, test_ranks_end_well = over_ranks("fsdp", "spccl-4")
test_states, test_ranks_of_states_end_well = over_ranks("fsdp_states", "spccl-4")


@pytest.mark.slow
def test_example():
    """examples/fsdp as a user runs it. A rank's shard has about 170 kB, and little of it travels."""
    status, output = torchrun(str(EXAMPLE), "--recipe", "prune", "--steps", "3", "--width", "48", n_ranks=4)
    assert status == 0, output
    sent = re.search(r"^validation: [\d.]+ nats.*^between replicas: (\d+) kB", output, re.M | re.S)
    assert sent and 0 < int(sent[1]) < 60, output
