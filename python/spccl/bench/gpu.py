"""`spccl bench --device cuda`: measures spccl and NCCL in turns through torch.distributed, one process per GPU.

Before anything is timed, the output of each system is poisoned and its result compared with the expected one. Each
timed call is between two CUDA events. Before the first event a sleep kernel lets the host run ahead, and a tiny
NCCL all-reduce makes the GPUs start together; neither is timed. The time of an iteration is that of the slowest rank.
The same code runs on CPU tensors, with Gloo and the host's clock, so that it can be tested without a GPU.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..comm import REDUCING
from . import gpu_torch, loop
from .cases import ELEM_BYTES, Case
from .gpu_report import GpuRow, Rates, make_gpu_row
from .gpu_torch import expected_output, input_of, same_bits, starter
from .report import Measured
from .start import BasePlan

if TYPE_CHECKING:
    import torch

_LEAST_ITERS = 5
_HOST_BATCH = 100  # calls enqueued in a row: fewer than the driver's queue holds, because a full queue blocks
_HOST_CASE_BYTES = 128 << 10  # at this size an iteration makes one call (Case.calls)


@dataclasses.dataclass(frozen=True)
class GpuPlan(BasePlan):
    """Measures spccl on GPU memory. `run` sends ("facts", dict) first, ("codec", CodecRow) too, and
    ("left out", [Case]) at the end.

    seconds: budget for timing, without start-up. When it is spent, the remaining rows are left out. None: no limit.
    in_place: the all-gather's input is a part of its output.
    host_calls: number of calls from which the cost of a call on the host is measured; 0 = not measured.
    codec: arrays that the GPU of rank 0 encodes and decodes, before the collectives are measured.
    """

    codec: tuple[Case, ...] = ()
    device: str = "cuda"
    with_peers: bool = True
    seconds: float | None = None
    in_place: bool = True
    graph: bool = False
    host_calls: int = 1000

    def run(self, rank: int, world_size: int, ordinal: int, store: Any, send: Callable[[Any], None]) -> list[GpuRow]:
        return _run_cases(rank, world_size, ordinal, self, store, send)


class System(NamedTuple):
    """One system that is measured: a process group, and the memory of its calls.

    source, target: tensors of bytes, large enough for all cases. They are allocated first, as NCCL's symmetric windows
    must be registered before use.
    """

    name: str
    group: Any
    source: torch.Tensor
    target: torch.Tensor


class Trial(loop.Trial):
    """One case on one system: views of its buffers, the calls to time, and how to restore the input."""

    def __init__(self, system: System, case: Case, data: torch.Tensor, rank: int, world: int, plan: GpuPlan):
        n, n_out = case.block_elems(world), case.out_elems(world)
        flat = system.target.view(data.dtype)
        own = slice(rank * n, (rank + 1) * n) if case.collective == "all_gather" and plan.in_place else None
        targets = [flat[i * n_out : (i + 1) * n_out] for i in range(case.calls())]
        super().__init__(system.name, case, rank, data, targets, own)
        source = data
        if own is None and not self._refill:
            source = system.source.view(data.dtype)[: data.numel()]
            source.copy_(data)
        for target in targets:
            self.calls.append(starter(case, system.group, source if own is None else target[own], target))
            self.fill(target)

    def poison(self, target: torch.Tensor) -> None:
        gpu_torch.poison(target)

    def differing(self, target: torch.Tensor, expected: torch.Tensor) -> int:
        return target.numel() - same_bits(target, expected)


def iterations(seconds_left: float | None, rows_left: int, seconds_each: float, most: int) -> int:
    """Number of iterations of the next row. The rows that are left divide the time that is left equally. At least
    _LEAST_ITERS; 0 = leave the row out."""
    if seconds_left is None:
        return most
    if seconds_left <= 0:
        return 0
    affordable = seconds_left / max(rows_left, 1) / max(seconds_each, 1e-9)
    return max(min(int(affordable), most), min(_LEAST_ITERS, most))


class Bench(loop.Loop):
    """The measurement on one rank."""

    least_warmup = 1

    def __init__(self, rank: int, world: int, plan: GpuPlan, control: Any, align: Any) -> None:
        """control: a Gloo group for CPU tensors. align: a group whose all-reduce makes the devices start together."""
        import torch

        super().__init__(rank, world, plan, gpu_torch.CudaClock() if plan.device == "cuda" else loop.HostClock())
        self.plan, self._control, self._align = plan, control, align
        self.device = torch.device(plan.device, torch.cuda.current_device() if plan.device == "cuda" else None)
        self._token = torch.zeros(1, device=self.device)
        self._host: dict[tuple[str, str, int], float] = {}
        self._deadline = None if plan.seconds is None else time.monotonic() + plan.seconds
        self._rows_left = len(plan.cases)

    def gather(self, values: Any) -> np.ndarray:
        import torch
        import torch.distributed as dist

        mine = torch.from_numpy(np.ascontiguousarray(values, np.float64))
        every = [torch.empty_like(mine) for _ in range(self.world_size)]
        dist.all_gather(every, mine, group=self._control)
        return torch.stack(every).numpy()

    def line_up(self, n_calls: int) -> None:
        import torch.distributed as dist

        self.clock.let_host_run_ahead(n_calls)
        dist.all_reduce(self._token, group=self._align)

    def run(self, case: Case, systems: list[System], read: Any, rows_left: int) -> Measured | None:
        """Measure a case. Returns None if the budget is spent. Rank 0's clock decides that for all ranks."""
        left, self._rows_left = self._seconds_left(), rows_left
        if self.gather([1.0 if left is None or left > 0 else 0.0])[0, 0] == 0:
            return None
        place = (self.rank, self.world_size)
        data = input_of(case, *place, self.device)
        trials = [Trial(system, case, data, *place, self.plan) for system in systems]
        with contextlib.ExitStack() as stack:
            if self.plan.graph:
                for trial in trials:
                    trial.calls = [stack.enter_context(self.clock.captured(call)) for call in trial.calls]
            measured = self.measure(trials, lambda: expected_output(case, *place, self.device), read)
        timed = [system for system in systems if system.name != "nccl_symm" and self.plan.host_calls]
        return dataclasses.replace(measured, host={system.name: self._host_cost(case, system) for system in timed})

    def _seconds_left(self) -> float | None:
        return None if self._deadline is None else self._deadline - time.monotonic()

    def warmed_up(self, seconds_each: float) -> int:
        left = self._seconds_left()
        # Data, check and warm-up of a row together take about as long as ten iterations.
        half = None if left is None else max(left, 0.001) / 2
        return int(self.gather([float(iterations(half, self._rows_left, seconds_each, self.plan.iters))])[0, 0])

    def _host_cost(self, case: Case, system: System) -> float:
        """Seconds for which one call occupies the calling thread: the median over batches, of the slowest rank. It is
        measured once per collective, because it does not depend on the size."""
        key = (case.collective, system.name, case.max_ctas)
        if key not in self._host:
            small = dataclasses.replace(case, size_bytes=_HOST_CASE_BYTES, sparsity=0.99)
            data = input_of(small, self.rank, self.world_size, self.device)
            call = Trial(system, small, data, self.rank, self.world_size, self.plan).calls[0]
            batch = min(_HOST_BATCH, self.plan.host_calls)
            costs = []
            for _ in range(max(self.plan.host_calls // batch, 1) + 1):
                self.clock.synchronize()
                self.gather([0.0])
                start = time.perf_counter()
                for _ in range(batch):
                    call()
                costs.append((time.perf_counter() - start) / batch)
            self.clock.synchronize()
            self._host[key] = float(self.gather([np.median(costs[1:])]).max())
        return self._host[key]


# ---- all cases on one rank ----


def _buffer_bytes(plan: GpuPlan, world: int) -> tuple[int, int]:
    """Bytes of (source, target) that are enough for every case."""
    source = target = _HOST_CASE_BYTES
    for case in plan.cases:
        block = case.block_elems(world) * ELEM_BYTES[case.dtype]
        source = max(source, block * case.n_blocks(world))
        target = max(target, block * case.n_blocks(world) * case.calls())
    return -(-source // 512) * 512, -(-target // 512) * 512


def _run_cases(
    rank: int, world: int, ordinal: int, plan: GpuPlan, store: Any, send: Callable[[Any], None]
) -> list[GpuRow]:
    import torch.distributed as dist

    timeout = datetime.timedelta(seconds=plan.timeout_s)
    device = gpu_torch.take_device(plan.device, ordinal)
    backend = "cpu:gloo,cuda:nccl" if plan.device == "cuda" else "gloo"
    where = dist.PrefixStore("bench", store)
    dist.init_process_group(backend, store=where, rank=rank, world_size=world, timeout=timeout)
    rows: list[GpuRow] = []
    left_out: list[Case] = []
    with contextlib.ExitStack() as stack:
        source, target = gpu_torch.buffers(device, *_buffer_bytes(plan, world))
        align = dist.group.WORLD
        dist.all_reduce(source[:4].float(), group=align)  # makes the connections
        peers = [System("nccl", align, source, target)] if plan.with_peers else []
        facts = {"peers": "none"}
        if plan.with_peers:
            symm, why = _symmetric(stack, plan, timeout, source.numel(), target.numel())
            peers += symm
            facts["peers"] = "nccl, nccl_symm" if symm else f"nccl; nccl_symm skipped: {why}"
        bench = Bench(rank, world, plan, dist.new_group(backend="gloo", timeout=timeout), align)
        rates = gpu_torch.rates(device) if plan.device == "cuda" else None
        send(("facts", facts | gpu_torch.facts(device, world, rates)))
        if plan.codec and rank == 0:
            _measure_codec(plan, rates, send)
        groups: dict[int, Any] = {}
        for i, case in enumerate(plan.cases):
            if case.max_ctas not in groups:
                groups[case.max_ctas] = gpu_torch.spccl_group(timeout, max_ctas=case.max_ctas)
            ours = System("spccl", groups[case.max_ctas], source, target)
            read = gpu_torch.counters(ours.group, plan.device)
            measured = bench.run(case, [ours, *peers], read, len(plan.cases) - i)
            if measured is None:
                left_out.append(case)
                continue
            rows.append(_row(case, measured, world, plan, rates))
            send(("row", rows[-1]))
        bench.clock.synchronize()
        bench.gather([0.0])  # no rank may leave while others still communicate with it
    dist.destroy_process_group()
    send(("left out", left_out))
    return rows


def _measure_codec(plan: GpuPlan, rates: Rates | None, send: Callable[[Any], None]) -> None:
    from . import gpu_codec

    if rates is None:
        raise ValueError("the codec can only be measured on GPUs")
    gpu_codec.measure(rates, plan.codec, plan.iters, lambda row: send(("codec", row)))


def _row(case: Case, measured: Measured, world: int, plan: GpuPlan, rates: Rates | None) -> GpuRow:
    in_place = plan.in_place if case.collective == "all_gather" else case.collective not in REDUCING[:1]
    return make_gpu_row(
        case,
        measured,
        world_size=world,
        device=plan.device,
        in_place=in_place,
        graph=plan.graph,
        rates=rates,
    )


def _symmetric(
    stack: contextlib.ExitStack, plan: GpuPlan, timeout: datetime.timedelta, source: int, target: int
) -> tuple[list[System], str]:
    """NCCL with registered symmetric windows, or the reason why some rank cannot have them."""
    if plan.device != "cuda":
        return [], "only CUDA memory can be in windows"
    made, why = gpu_torch.symmetric_group(timeout, source, target)
    if made is None:
        return [], why
    stack.callback(made.close)
    return [System("nccl_symm", made.group, made.source, made.target)], ""
