"""The parts of `spccl bench --device cuda` that use torch: data, clocks, groups, symmetric windows, facts."""

from __future__ import annotations

import contextlib
import datetime
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from .. import comm, frame, verify
from .cases import Case
from .gpu_report import LINK_GBS, Rates
from .loop import POISON, ROOT

DTYPES = {name: torch.uint8 if name == "float8" else getattr(torch, name) for name in frame.DTYPES}
OPS = {name: getattr(dist.ReduceOp, "PRODUCT" if name == "prod" else name.upper()) for name in comm.OPS}
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_CHUNK = 1 << 26  # elements that are made at a time
_HEAD_START_CYCLES, _CALL_CYCLES = 300_000, 150_000  # at 2 GHz: longer than the host needs to enqueue


# ---- data ----


def input_of(case: Case, rank: int, world: int, device: torch.device) -> torch.Tensor:
    """Rank `rank`'s input; every rank can make it. It has small integers at random indices, other ones on each rank.
    Their sums are exact in any order, so the results of every system can be checked bit by bit."""
    n = case.block_elems(world) * (world if case.collective == "reduce_scatter" else 1)
    random = torch.Generator(device).manual_seed(1_000_003 * rank + round(1e6 * case.sparsity) + n)
    x = torch.empty(n, dtype=DTYPES[case.dtype], device=device)
    high = 2 if case.op == "prod" else 4
    for part in x.split(_CHUNK):
        part.copy_(torch.randint(1, high, (part.numel(),), generator=random, device=device, dtype=torch.int8))
        part.mul_(torch.rand(part.numel(), generator=random, device=device) >= case.sparsity)
    return x


def expected_output(case: Case, rank: int, world: int, device: torch.device) -> torch.Tensor:
    """The output that rank `rank` must get, computed without any of the systems."""
    if case.collective == "all_gather":
        return torch.cat([input_of(case, r, world, device) for r in range(world)])
    if case.collective == "broadcast":
        return input_of(case, ROOT, world, device)
    n = case.block_elems(world)
    block = slice(rank * n, (rank + 1) * n) if case.collective == "reduce_scatter" else slice(None)
    total = input_of(case, 0, world, device)[block].clone()
    for r in range(1, world):
        other = input_of(case, r, world, device)[block]
        if case.op == "prod":
            total.mul_(other)
        elif case.op in ("min", "max"):
            total = torch.minimum(total, other) if case.op == "min" else torch.maximum(total, other)
        else:
            total.add_(other)
    return total


def poison(x: torch.Tensor) -> None:
    x.view(torch.uint8).fill_(POISON)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> int:
    """Number of elements with equal bits."""
    bits = _BITS[a.element_size()]
    return int((a.view(bits) == b.view(bits)).sum())


def starter(
    case: Case | verify.Case, group: Any, source: torch.Tensor, target: torch.Tensor, root: int = ROOT, **how: Any
) -> Callable[[], Any]:
    """A function that calls the case's collective once. All-reduce and broadcast use `target` alone.

    how: more arguments of the call.
    """
    op, how = OPS.get(case.op), {"group": group, **how}
    if case.collective == "all_gather":
        # torch 2.13 renamed these two and warns of the old names.
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        return lambda: gather(target, source, **how)
    if case.collective == "reduce_scatter":
        scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        return lambda: scatter(target, source, op, **how)
    if case.collective == "all_reduce":
        return lambda: dist.all_reduce(target, op, **how)
    return lambda: dist.broadcast(target, root, **how)


# ---- time ----


class CudaClock:
    """Measures time between two points of the current CUDA stream."""

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        return 1e-3 * start.elapsed_time(end)

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def let_host_run_ahead(self, n_calls: int = 1) -> None:
        torch.cuda._sleep(_HEAD_START_CYCLES + n_calls * _CALL_CYCLES)

    @contextlib.contextmanager
    def captured(self, call: Callable[[], Any]) -> Iterator[Callable[[], Any]]:
        """Capture the call in a CUDA graph; yields a function that replays it."""
        call()  # allocations of the first call must not be captured
        self.synchronize()
        graph = torch.cuda.CUDAGraph()
        # thread_local: threads of NCCL and spccl that query events do not disturb the capture.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            call()
        yield graph.replay
        self.synchronize()
        graph.reset()


# ---- groups and memory ----


def take_device(device: str, ordinal: int) -> torch.device:
    """Make GPU `ordinal` the current one. Tests use `device` "cpu". SPCCL_TEST_SHARE_GPUS=1: modulo their number."""
    if device != "cuda":
        return torch.device(device)
    found = torch.cuda.device_count()
    if found > 0 and os.environ.get("SPCCL_TEST_SHARE_GPUS") == "1":
        ordinal %= found
    if ordinal >= found:
        raise RuntimeError(f"rank {ordinal} needs GPU {ordinal}, but torch {torch.__version__} sees {found}")
    torch.cuda.set_device(ordinal)
    return torch.device("cuda", ordinal)


def buffers(device: torch.device, source_bytes: int, target_bytes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Two arrays of zero bytes."""
    return (
        torch.zeros(source_bytes, dtype=torch.uint8, device=device),
        torch.zeros(target_bytes, dtype=torch.uint8, device=device),
    )


def spccl_group(timeout: datetime.timedelta, **options: Any) -> Any:
    """A spccl group of all ranks. options: of `backend.Options`."""
    from .. import backend

    backend.register()
    return dist.new_group(backend="spccl", timeout=timeout, pg_options=backend.Options(**options))


def counters(group: Any, device: str = "cpu") -> Callable[[], list[float]]:
    """A function that reads [bytes sent, their bytes if dense, frames by format] of a spccl group. On GPUs it does not
    know the second, and raises RuntimeError if spccl's own kernels do not run the collectives: with a fallback, NCCL
    would be compared with itself."""
    from .. import backend

    def read() -> list[float]:
        c = backend.stats(group) if device == "cpu" else backend.cuda_stats(group)
        if device != "cpu" and c.path != "engine":
            raise RuntimeError(f"spccl's kernels do not run CUDA collectives here, but {c.path!r} does: {c.why}")
        return [c.wire_bytes_sent, getattr(c, "dense_bytes_sent", 0), *(c.frames_sent[name] for name in frame.FORMATS)]

    return read


class Symmetric:
    """An NCCL group whose memory is in registered symmetric windows."""

    def __init__(self, group: Any, nccl: Any, pool: Any, source: torch.Tensor, target: torch.Tensor) -> None:
        self.group, self.source, self.target = group, source, target
        self._nccl, self._pool = nccl, pool

    def close(self) -> None:
        """All ranks must call this before the group ends."""
        torch.cuda.synchronize()
        self._nccl.deregister_mem_pool(self._pool)


def symmetric_group(
    timeout: datetime.timedelta, source_bytes: int, target_bytes: int
) -> tuple[Symmetric | None, str]:
    """A new NCCL group with windows for two buffers, or (None, reason). All ranks get a group, or none does."""
    device = torch.device("cuda", torch.cuda.current_device())
    group = dist.new_group(backend="nccl", timeout=timeout)
    token = torch.zeros(1, device=device)
    dist.all_reduce(token, group=group)  # windows need a connected communicator
    made, why = None, ""
    nccl = group._get_backend(device)
    if _everybody(hasattr(nccl, "register_mem_pool") and hasattr(torch.cuda, "MemPool")):
        try:
            pool = torch.cuda.MemPool(nccl.mem_allocator)
            with torch.cuda.use_mem_pool(pool, device=device):
                source, target = buffers(device, source_bytes, target_bytes)
            nccl.register_mem_pool(pool, symm=True)
            made = Symmetric(group, nccl, pool, source, target)
        except (RuntimeError, TypeError, AttributeError) as error:
            why = f"{type(error).__name__}: {error}".splitlines()[0]
    else:
        why = f"torch {torch.__version__} cannot register memory pools with NCCL"
    if not _everybody(made is not None):
        return None, why or "another rank could not register its windows"
    return made, ""


def _everybody(yes: bool) -> bool:
    """Whether `yes` is true on all ranks."""
    vote = torch.tensor([float(yes)])
    dist.all_reduce(vote, dist.ReduceOp.MIN)  # in the world group Gloo runs collectives of CPU tensors
    return bool(vote.item())


# ---- facts ----


def _driver() -> str:
    """Version of the driver's kernel module."""
    try:
        line = Path("/proc/driver/nvidia/version").read_text().splitlines()[0]
    except (OSError, IndexError):
        return "unknown"
    return next((word for word in line.split() if word[:1].isdigit() and "." in word), "unknown")


def facts(device: torch.device, world: int, rates: Rates | None) -> dict[str, str]:
    """Facts about the GPUs and settings, which are printed and stored with the results."""
    settings = [f"{k}={v}" for k, v in sorted(os.environ.items()) if k.startswith(("NCCL_", "SPCCL_", "TORCH_"))]
    found = {"settings": " ".join(settings) or "none"}
    if device.type != "cuda" or rates is None:
        return found
    p = torch.cuda.get_device_properties(device)
    return found | {
        "gpu": f"{world} x {p.name}, {p.multi_processor_count} SMs, {p.total_memory / 2**30:.0f} GiB",
        "driver": _driver(),
        "cuda": str(torch.version.cuda),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        "hbm_read_gbs": f"{rates.read_gbs:.0f}",
        "hbm_write_gbs": f"{rates.write_gbs:.0f}",
        "hbm_copy_gbs": f"{rates.copy_gbs:.0f}",
        "link_gbs": f"{LINK_GBS:.0f}",
    }


def stream_seconds(call: Callable[[], Any], iters: int = 20, before: Callable[[], Any] | None = None) -> list[float]:
    """Seconds of each of `iters` calls on the current stream, after three untimed calls. `before` is not timed."""
    clock = CudaClock()
    marks = []
    for _ in range(iters + 3):
        if before is not None:
            before()
        clock.let_host_run_ahead()
        start = clock.mark()
        call()
        marks.append((start, clock.mark()))
    clock.synchronize()
    return [clock.seconds(*pair) for pair in marks[3:]]


def rates(device: torch.device, n_bytes: int = 2 << 30) -> Rates:
    """The best rates of torch's own kernels, by the median, on arrays far larger than the cache. sum and max read,
    fill and memset write, a copy reads and writes."""
    x = torch.zeros(n_bytes // 4, device=device)
    y = torch.empty_like(x)

    def best(*calls: Callable[[], Any]) -> float:
        return n_bytes / min(sorted(stream_seconds(call))[10] for call in calls) / 1e9

    return Rates(
        read_gbs=best(lambda: x.sum(), lambda: x.amax(), lambda: x.view(torch.int32).amax()),
        write_gbs=best(lambda: y.zero_(), lambda: y.fill_(1.5)),
        copy_gbs=2 * best(lambda: y.copy_(x)),
    )
