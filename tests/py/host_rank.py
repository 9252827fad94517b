"""One rank of host_cluster.py: `host_rank.py NAMESPACE DESCRIPTOR`. Does what the test asks over the descriptor.

A command is (number, name, arguments); the reply is (number, result). Each command runs in a thread, so that two groups
can work at once.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from spccl import Communicator, get_unique_id
from spccl.bench import hosts

groups: dict[str, Communicator] = {}


def failure(work: Any) -> tuple[str, str, float]:
    """Run `work` until it raises. Returns the exception's type and text, and seconds."""
    start = time.monotonic()
    try:
        work()
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - start
    return "ok", "", time.monotonic() - start


def unique_id() -> bytes:
    return get_unique_id()


def join(
    group: str, rank: int, n: int, uid: bytes, env: dict[str, str], timeout: float, options: dict[str, Any]
) -> tuple[str, str, float]:
    os.environ.update(env)

    def work() -> None:
        groups[group] = Communicator(rank, n, unique_id=uid, name=group, timeout=timeout, **options)

    try:
        return failure(work)
    finally:
        for name in env:
            del os.environ[name]


def links(group: str) -> dict[int, str]:
    return groups[group].describe_links()


def reduce(group: str, n_elems: int) -> tuple[str, str, float]:
    """One all-reduce of known values, with the result checked."""
    comm = groups[group]
    array = np.zeros(n_elems, np.float32)
    array[:: comm.rank + 2] = comm.rank + 1
    want = np.zeros(n_elems, np.float32)
    for rank in range(comm.world_size):
        want[:: rank + 2] += rank + 1

    def work() -> None:
        comm.all_reduce(array)
        if not np.array_equal(array, want):
            raise AssertionError("wrong sum")

    return failure(work)


def reduce_strided(group: str, n_elems: int, one_in: int) -> tuple[str, str, float]:
    """One all-reduce in which all ranks have their values at the same places, with the result checked."""
    comm = groups[group]
    array = np.zeros(n_elems, np.float32)
    array[::one_in] = comm.rank + 1
    want = np.zeros(n_elems, np.float32)
    want[::one_in] = comm.world_size * (comm.world_size + 1) // 2

    def work() -> None:
        comm.all_reduce(array)
        if not np.array_equal(array, want):
            raise AssertionError("wrong sum")

    return failure(work)


def sent() -> int:
    """Bytes out of this host since it was made."""
    return hosts.counters().tx_bytes


def loop(group: str, n_elems: int) -> tuple[str, str, float]:
    """All-reduces until one fails."""

    def work() -> None:
        array = np.zeros(n_elems, np.float32)
        array[::10] = 1.0
        while True:
            groups[group].all_reduce(array)
            np.minimum(array, 1.0, out=array)

    return failure(work)


def set_timeout(group: str, seconds: float) -> None:
    groups[group].set_timeout(seconds)


def leave(group: str) -> None:
    groups.pop(group).close()


def listening() -> list[int]:
    """Ports on which some process of this host listens."""
    ports = set()
    for name in ("tcp", "tcp6"):
        with open(f"/proc/thread-self/net/{name}") as file:
            for line in list(file)[1:]:
                words = line.split()
                if words[3] == "0A":
                    ports.add(int(words[1].rsplit(":", 1)[1], 16))
    return sorted(ports)


def main() -> None:
    hosts.enter(sys.argv[1])
    pipe = Connection(int(sys.argv[2]))
    lock = threading.Lock()

    def run(number: int, name: str, args: tuple[Any, ...]) -> None:
        result = globals()[name](*args)
        with lock:
            pipe.send((number, result))

    while True:
        try:
            number, name, args = pipe.recv()
        except EOFError:
            os._exit(0)  # the test is over
        threading.Thread(target=run, args=(number, name, args), daemon=True).start()


if __name__ == "__main__":
    main()
