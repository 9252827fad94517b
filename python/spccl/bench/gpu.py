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
from typing import TYPE_CHECKING, Any

import numpy as np

from ..comm import REDUCING
from ..frame import FORMATS
from . import gpu_torch
from .cases import ELEM_BYTES, Case
from .gpu_report import GpuRow, Rates, make_gpu_row
from .gpu_torch import ROOT, expected_output, input_of, make_clock, same_bits, starter
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


class System:
    """One system that is measured: a process group, and the memory of its calls.

    source, target: tensors of bytes, large enough for all cases. They are allocated first, as NCCL's symmetric windows
    must be registered before use.
    """

    def __init__(self, name: str, group: Any, source: torch.Tensor, target: torch.Tensor) -> None:
        self.name, self.group, self.source, self.target = name, group, source, target


class Trial:
    """One case on one system: views of its buffers, the calls to time, and how to restore the input."""

    def __init__(self, system: System, case: Case, data: torch.Tensor, rank: int, world: int, plan: GpuPlan):
        self.system, self.case, self._data = system, case, data
        n = case.block_elems(world)
        n_out = n * (world if case.collective == "all_gather" else 1)
        flat = system.target.view(data.dtype)
        self.targets = [flat[i * n_out : (i + 1) * n_out] for i in range(case.calls())]
        self._refill = case.collective == "all_reduce" or (case.collective == "broadcast" and rank == ROOT)
        self._own = None
        source = data
        if case.collective == "all_gather" and plan.in_place:
            self._own = slice(rank * n, (rank + 1) * n)
        elif not self._refill:
            source = system.source.view(data.dtype)[: data.numel()]
            source.copy_(data)
        self.calls: list[Callable[[], Any]] = []
        for target in self.targets:
            mine = source if self._own is None else target[self._own]
            self.calls.append(starter(case, system.group, mine, target))
        for target in self.targets:
            self.reset(target)
            if self._own is not None:
                target[self._own].copy_(data)

    def reset(self, target: torch.Tensor) -> None:
        """Restore the input that a call has overwritten."""
        if self._refill:
            target.copy_(self._data)

    def wrong(self, wanted: torch.Tensor) -> int:
        """Poison the output, run once, and count the elements that differ from the expected ones."""
        target = self.targets[0]
        gpu_torch.poison(target)
        self.reset(target)
        if self._own is not None:
            target[self._own].copy_(self._data)
        self.calls[0]()
        return target.numel() - same_bits(target, wanted)


def iterations(seconds_left: float | None, rows_left: int, seconds_each: float, most: int) -> int:
    """Number of iterations of the next row. The rows that are left divide the time that is left equally. At least
    _LEAST_ITERS; 0 = leave the row out."""
    if seconds_left is None:
        return most
    if seconds_left <= 0:
        return 0
    affordable = seconds_left / max(rows_left, 1) / max(seconds_each, 1e-9)
    return max(min(int(affordable), most), min(_LEAST_ITERS, most))


class Bench:
    """The measurement on one rank."""

    def __init__(self, rank: int, world: int, plan: GpuPlan, control: Any, align: Any) -> None:
        """control: a Gloo group for CPU tensors. align: a group whose all-reduce makes the devices start together."""
        import torch

        self.rank, self.world, self.plan, self._control, self._align = rank, world, plan, control, align
        self.clock = make_clock(plan.device)
        self._token = torch.zeros(1, device=self.clock.device)
        self._host: dict[tuple[str, str, int], float] = {}
        self._deadline = None if plan.seconds is None else time.monotonic() + plan.seconds

    # ---- communication between the ranks ----

    def gather(self, values: Any) -> np.ndarray:
        """The values of all ranks, [world, len(values)] float64, on every rank."""
        import torch
        import torch.distributed as dist

        mine = torch.from_numpy(np.ascontiguousarray(values, np.float64))
        every = [torch.empty_like(mine) for _ in range(self.world)]
        dist.all_gather(every, mine, group=self._control)
        return torch.stack(every).numpy()

    def line_up(self, n_calls: int) -> None:
        import torch.distributed as dist

        self.clock.let_host_run_ahead(n_calls)
        dist.all_reduce(self._token, group=self._align)

    # ---- one case ----

    def run(self, case: Case, systems: list[System], stats: Any, rows_left: int) -> Measured | None:
        """Measure a case. Returns None if the budget is spent. Rank 0's clock decides that for all ranks."""
        left = None if self._deadline is None else self._deadline - time.monotonic()
        if self.gather([1.0 if left is None or left > 0 else 0.0])[0, 0] == 0:
            return None
        data = input_of(case, self.rank, self.world, self.clock.device)
        trials = [Trial(s, case, data, self.rank, self.world, self.plan) for s in systems]
        wanted = expected_output(case, self.rank, self.world, self.clock.device)
        with contextlib.ExitStack() as stack:
            if self.plan.graph:
                for trial in trials:
                    trial.calls = [stack.enter_context(self.clock.captured(call)) for call in trial.calls]
            wrong = [float(trial.wrong(wanted)) for trial in trials]
            self.clock.synchronize()
            del wanted
            times, n_calls, sent = self._time(trials, stats, rows_left)
        return self._measured(case, trials, times, wrong, [x / n_calls for x in sent])

    def _time(self, trials: list[Trial], stats: Any, rows_left: int) -> tuple[list[np.ndarray], int, list[float]]:
        """Returns: by system, [iters] seconds on this rank; the number of timed calls of spccl; by how much each of
        spccl's counters rose."""
        before_warmup = time.monotonic()
        for i in range(max(self.plan.warmup, 1)):
            self._round(trials, i)
        self.clock.synchronize()
        each = (time.monotonic() - before_warmup) / max(self.plan.warmup, 1)
        left = None if self._deadline is None else self._deadline - time.monotonic()
        # Data, check and warm-up of a row together take about as long as ten iterations.
        iters = iterations(None if left is None else max(left, 0.001) / 2, rows_left, each, self.plan.iters)
        iters = int(self.gather([float(iters)])[0, 0])
        before = stats()
        rounds = [self._round(trials, i) for i in range(iters)]
        self.clock.synchronize()
        after = stats()
        times = [
            np.array([self.clock.seconds(*one[s]) / len(trials[s].calls) for one in rounds])
            for s in range(len(trials))
        ]
        return times, iters * len(trials[0].calls), [b - a for a, b in zip(before, after, strict=True)]

    def _round(self, trials: list[Trial], i: int) -> list[Any]:
        """Run every system once. The order alternates, because data that one system leaves in caches helps the next."""
        marks: list[Any] = [None] * len(trials)
        order = range(len(trials))
        for s in order if i % 2 == 0 else reversed(order):
            trial = trials[s]
            for target in trial.targets:
                trial.reset(target)
            self.line_up(len(trial.calls))
            start = self.clock.mark()
            for call in trial.calls:
                call()
            marks[s] = (start, self.clock.mark())
        return marks

    def _measured(
        self, case: Case, trials: list[Trial], times: list[np.ndarray], wrong: list[float], sent: list[float]
    ) -> Measured:
        names = [trial.system.name for trial in trials]
        slowest = [self.gather(one).max(axis=0) for one in times]
        total = self.gather([*wrong, *sent]).sum(axis=0)
        wrongs, counters = total[: len(wrong)], total[len(wrong) :]
        host = {}
        for trial in trials:
            if trial.system.name != "nccl_symm" and self.plan.host_calls:
                host[trial.system.name] = self._host_cost(case, trial.system)
        return Measured(
            times=dict(zip(names, slowest, strict=True)),
            wrong={name: int(n) for name, n in zip(names, wrongs, strict=True)},
            wire_bytes=counters[0] / self.world,
            frames={name: round(1000 * n) for name, n in zip(FORMATS, counters[1:], strict=True)},
            host=host,
        )

    def _host_cost(self, case: Case, system: System) -> float:
        """Seconds for which one call occupies the calling thread: the median over batches, of the slowest rank. It is
        measured once per collective, because it does not depend on the size."""
        key = (case.collective, system.name, case.max_ctas)
        if key not in self._host:
            small = dataclasses.replace(case, size_bytes=_HOST_CASE_BYTES, sparsity=0.99)
            data = input_of(small, self.rank, self.world, self.clock.device)
            call = Trial(system, small, data, self.rank, self.world, self.plan).calls[0]
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
                groups[case.max_ctas] = gpu_torch.spccl_group(case.max_ctas, timeout)
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
