"""Options of Communicator: forced schedules, forced hosts; memory of a large group."""

import threading

import numpy as np
import pytest
from test_comm import TIMEOUT_S, Store, run_threads, sparse

import spccl
from spccl import verify


@pytest.mark.parametrize("schedule", ["direct", "oneshot", "relayed", "ring", "hierarchical"])
def test_schedule_and_host_id(schedule):
    """The named schedule runs, over ranks of two hosts, and adds whole numbers exactly in any order."""
    inputs = [np.rint(8 * sparse(rank, 20_000)) for rank in range(4)]
    store, described = Store(), [None] * 4

    def rank_main(rank):
        options = {"store": store, "timeout": TIMEOUT_S, "transports": "inproc", "host_id": f"host {rank // 2}"}
        with spccl.Communicator(rank, 4, schedule=schedule, **options) as comm:
            total = inputs[rank].copy()
            comm.all_reduce(total)
            assert verify.difference(total, verify.reduced(inputs, "float32", "sum")) is None
            described[rank] = comm.describe_schedules()

    threads = [threading.Thread(target=rank_main, args=(rank,), daemon=True) for rank in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * TIMEOUT_S)
    assert all(d == [d[0]] and f"forced {schedule}" in d[0] for d in described), described


def test_unknown_schedule():
    with pytest.raises(spccl.Error, match="no_such_schedule"):
        run_threads(2, lambda comm: None, schedule="no_such_schedule")


def test_memory_of_32_ranks():
    """Buffers of a rank in a group of 32 over tcp: the promise of docs/PERFORMANCE.md."""
    found = run_threads(32, lambda comm: comm.stats().buffer_bytes, transports="tcp")
    assert max(found) < 33 << 20, max(found)
