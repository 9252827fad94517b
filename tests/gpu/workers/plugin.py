"""NCCL and spccl load the same NCCL net plugin in one process, in the order of argv[1], and both move GPU tensors.

The plugin changes the environment of the process that loads it (TEST_NET_ENV=1). spccl must put the changes back. NCCL
does not, which shows that the plugin makes them.
"""

from __future__ import annotations

import ctypes
import os
import sys
import traceback

import torch
import torch.distributed as dist
from gpu_common import DEVICE, start
from workers.common import RANK, WORLD, report

from spccl import backend

CHANGED = {"TEST_NET_ADDED": b"1", "NCCL_PROTO": b"simple", "TEST_NET_KEPT": None}
BEFORE = {"TEST_NET_ADDED": None, "NCCL_PROTO": None, "TEST_NET_KEPT": b"kept"}
LIBC = ctypes.CDLL(None)
LIBC.getenv.restype = ctypes.c_char_p


def environment() -> dict[str, bytes | None]:
    """The process's own, which os.environ does not follow."""
    return {name: LIBC.getenv(name.encode()) for name in BEFORE}


def reset() -> None:
    for name, value in BEFORE.items():
        if value is None:
            LIBC.unsetenv(name.encode())
        else:
            LIBC.setenv(name.encode(), value, 1)


def sums(group: dist.ProcessGroup, n: int) -> None:
    """All-reduces of small integers, whose sums float32 holds exactly: [n], one element in ten is not 0."""
    for repeat in range(5):
        x = torch.zeros(n, device=DEVICE)
        x[::10] = RANK + 1.0 + repeat
        dist.all_reduce(x, group=group)
        want = torch.zeros(n, device=DEVICE)
        want[::10] = sum(r + 1.0 + repeat for r in range(WORLD))
        torch.cuda.synchronize()
        assert torch.equal(x, want), (repeat, n, x[:11], want[:11])


def check_spccl(group: dist.ProcessGroup) -> str:
    for n in (1, 1000, 1 << 20, 10_000_001):
        sums(group, n)
    stats = backend.cuda_stats(group)
    assert stats.path == "engine", stats
    link = backend.describe_link(1 - RANK, group)
    assert "plugin Test Sockets v12" in link, link
    return link


def check_nccl(group: dist.ProcessGroup) -> None:
    for n in (1, 1000, 1 << 20, 10_000_001):
        sums(group, n)


def nccl_first() -> dict:
    start("nccl")
    check_nccl(dist.group.WORLD)
    assert environment() == CHANGED, environment()
    reset()
    group = dist.new_group(backend="spccl")
    link = check_spccl(group)
    assert environment() == BEFORE, environment()
    check_nccl(dist.group.WORLD)
    check_spccl(group)
    return {"link": link}


def spccl_first() -> dict:
    reset()
    start("spccl")
    link = check_spccl(dist.group.WORLD)
    assert environment() == BEFORE, environment()
    group = dist.new_group(backend="nccl")
    check_nccl(group)
    assert environment() == CHANGED, environment()
    check_spccl(dist.group.WORLD)
    check_nccl(group)
    return {"link": link}


if __name__ == "__main__":
    case = {"nccl_first": nccl_first, "spccl_first": spccl_first}[sys.argv[1]]
    try:
        found = case()
    except BaseException:
        report(case.__name__, ok=False, error=traceback.format_exc())
        os._exit(1)
    report(case.__name__, ok=True, **found)
    dist.destroy_process_group()
