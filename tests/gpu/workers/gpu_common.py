"""Shared by all GPU workers: the device, joining a group, running cases, and two references for results.

One reference is the result computed in rank order. The other is the same call on CPU tensors of the same group, which
must give the same bits.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Callable

import torch
import torch.distributed as dist
from workers import common
from workers.common import RANK, WORLD, report, same_bits

N_GPUS = torch.cuda.device_count()
DEVICE = torch.device("cuda", RANK % max(N_GPUS, 1))
if 0 < N_GPUS < WORLD:  # SPCCL_TEST_SHARE_GPUS
    # NCCL refuses two ranks on one GPU of one host. With names of their own they are on several, and take sockets.
    os.environ["NCCL_HOSTID"] = f"rank {RANK}"
# This many ranks count as on one host; without it all do.
if "RANKS_PER_HOST" in os.environ:
    os.environ["SPCCL_HOST_ID"] = f"host {RANK // int(os.environ['RANKS_PER_HOST'])}"


def start(backend: str = "spccl", *, bind: bool = False, timeout_s: float = 60, name: str = "store", **kwargs: object):
    """Join the group with this rank's GPU. bind: give torch the device_id."""
    torch.cuda.set_device(DEVICE)
    common.join(backend, timeout_s, name, **({"device_id": DEVICE} if bind else {}), **kwargs)


def main(cases: list[Callable[[], dict | None]], *, bind: bool = False, engine: bool = True) -> None:
    """Run all cases, or those named on the command line. Exits with 1 at the first case that fails.

    engine: the cases must have been moved by spccl's own kernels, not by a fallback.
    """
    from spccl import backend

    wanted = sys.argv[1:]
    start(bind=bind)
    for case in cases:
        if wanted and case.__name__ not in wanted:
            continue
        started = time.monotonic()
        try:
            extra = case() or {}
            torch.cuda.synchronize()
            if engine:
                stats = backend.cuda_stats()
                assert stats.path == "engine" and stats.device == DEVICE.index, stats
        except BaseException:
            report(case.__name__, ok=False, error=traceback.format_exc())
            os._exit(1)  # the peers then see that the links are closed, and end
        report(case.__name__, ok=True, seconds=round(time.monotonic() - started, 3), **extra)
    dist.destroy_process_group()


def cuda(x: torch.Tensor, offset: int = 0) -> torch.Tensor:
    """A copy of x on this rank's GPU that starts `offset` elements after the start of its allocation."""
    whole = torch.empty(x.numel() + offset, dtype=x.dtype, device=DEVICE)
    return whole[offset:].view(x.shape).copy_(x)


def same(got: torch.Tensor, want: torch.Tensor, what: str) -> None:
    same_bits(got.cpu(), want.cpu(), what)


def patterned(
    kind: str,
    rank: int,
    world: int,
    numel: int,
    density: float,
    dtype: torch.dtype,
    seed: int,
    device: torch.device | str = "cpu",
) -> torch.Tensor:
    """Rank `rank`'s input [numel] on `device`, with nonzeros in the pattern `kind`."""
    g = torch.Generator(device).manual_seed(7919 * seed + rank)
    if kind == "one slice":
        keep = torch.zeros(numel, dtype=torch.bool, device=device)
        first = int(torch.randint(max(1, numel), (1,), generator=torch.Generator().manual_seed(seed)))
        keep[first : first + 4096] = True
    elif kind == "one rank empty":
        keep = torch.rand(numel, generator=g, device=device) < density
        if rank == seed % world:
            keep[:] = False
    elif kind == "alternating":
        keep = torch.arange(numel, device=device) % 2 == rank % 2
    elif kind == "one rank full":
        keep = torch.full((numel,), rank == seed % world, device=device)
    elif kind == "ends":
        keep = torch.zeros(numel, dtype=torch.bool, device=device)
        keep[:1] = keep[-1:] = True
    else:
        keep = torch.rand(numel, generator=g, device=device) < density
    if dtype.is_floating_point:
        x = torch.randn(numel, generator=g, dtype=torch.float32, device=device)
        x = torch.where(torch.rand(numel, generator=g, device=device) < 0.01, -0.0, x)
    else:
        x = torch.randint(0 if dtype == torch.uint8 else -100, 100, (numel,), generator=g, device=device)
    return torch.where(keep, x, torch.zeros((), dtype=x.dtype, device=device)).to(dtype)


KINDS = ("random", "one slice", "one rank empty", "alternating", "one rank full", "ends")
