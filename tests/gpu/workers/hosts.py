"""Cases of groups on several hosts that the other workers do not have: what else the process does beside them."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from gpu_common import DEVICE, main
from workers.common import RANK, WORLD

from spccl import backend

N = 4 << 20


def sparse_ones() -> torch.Tensor:
    x = torch.zeros(N, device=DEVICE)
    x[::100] = 1.0
    return x


def check(x: torch.Tensor, factor: int = WORLD) -> None:
    torch.cuda.synchronize()
    assert torch.equal(x, sparse_ones() * factor)


def full_queue() -> None:
    """Rank 0 launches 5000 kernels behind a collective that its peers start a second later."""
    x, y = sparse_ones(), torch.zeros(16, device=DEVICE)
    dist.barrier()
    if RANK != 0:
        time.sleep(1)
    dist.all_reduce(x)
    for _ in range(5000):
        y += 1
    check(x)
    assert float(y[0]) == 5000.0


def first_use_of_a_kernel() -> None:
    """CUDA loads a kernel at its first launch, and may hold a lock meanwhile that calls of other threads need."""
    x = sparse_ones()
    y = torch.rand(1000, device=DEVICE, dtype=torch.float64)
    dist.barrier()
    if RANK != 0:
        time.sleep(1)
    work = dist.all_reduce(x, async_op=True)
    z = torch.special.bessel_j1(torch.erfinv(y * 0.5)).cumsum(0)
    work.wait()
    check(x)
    assert bool(torch.isfinite(z).all())


def graph_after_a_pause() -> None:
    """Proxies sleep while nothing runs, and a replay calls nothing that could wake them."""
    x = sparse_ones()
    dist.all_reduce(x.clone())
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        dist.all_reduce(x)
    for pause in (0.0, 0.0, 1.0):
        x.copy_(sparse_ones())
        dist.barrier()
        time.sleep(pause)
        graph.replay()
        check(x)


def figures() -> dict:
    """What describe_group says of a group on several hosts."""
    x = sparse_ones()
    dist.all_reduce(x)
    check(x)
    text = backend.describe_group()
    assert "; GPU: " in text and " over tcp, rings in pinned memory" in text, text
    assert "MiB" in text and "proxies: " in text, text
    return {"text": text}


if __name__ == "__main__":
    main([full_queue, first_use_of_a_kernel, graph_after_a_pause, figures])
