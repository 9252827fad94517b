"""Measures spccl on host memory, and Gloo beside it: the ranks' groups, their data, emulated hosts.

An untimed barrier, on a communicator of its own, is before each timed iteration.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import os
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np

from .. import verify
from .._launch import Rank
from ..comm import Communicator, get_unique_id
from ..frame import FORMATS, numpy_dtype
from . import hosts
from .cases import Case
from .loop import ROOT, HostClock, Loop, Trial
from .report import HostRow, Row, make_row
from .start import BasePlan


@dataclasses.dataclass(frozen=True)
class Plan(BasePlan):
    """Measures spccl on host memory. Spawned ranks find each other by `unique_ids` and `store_file`."""

    via: str = "native"  # or "torch"
    peer: str = "gloo"  # or "none"
    transports: str | None = None
    n_hosts: int = 0  # emulated hosts (hosts.py) that the ranks are spread over; 0: all ranks run on this machine
    rate: str = ""  # of an emulated host's link
    port_queue: int = 0  # bytes, of a port of the emulated switch; 0: as a small switch
    in_flight: int = 0  # with n_hosts: also time the first of so many calls that are issued together; 0: do not
    unique_ids: tuple[bytes, ...] = ()
    host_names: tuple[str, ...] = ()
    link_rate: float = 0.0  # measured, bytes per second

    @property
    def needs_torch(self) -> bool:
        return self.via == "torch" or self.peer == "gloo" or self.n_hosts > 0  # torch's file store

    def prepared(self, stack: contextlib.ExitStack) -> BasePlan:
        plan = super().prepared(stack)
        if not self.n_hosts:
            return dataclasses.replace(plan, unique_ids=(get_unique_id(), get_unique_id()))
        names = stack.enter_context(hosts.emulated(self.n_hosts, self.rate, self.port_queue))
        return dataclasses.replace(plan, host_names=tuple(names), link_rate=hosts.measured_rate(names))

    def enter_host(self, rank: Rank) -> None:
        if self.host_names:
            hosts.enter(self.host_names[rank.rank // (rank.world_size // self.n_hosts)])
            os.environ["GLOO_SOCKET_IFNAME"] = hosts.IFNAME  # of the Gloo to compare with; spccl needs no setting

    def run(self, rank: int, world_size: int, ordinal: int, store: Any, send: Callable[[Any], None]) -> list[Row]:
        def communicator(i: int, name: str, transports: str | None) -> Communicator:
            how: dict[str, Any] = {"unique_id": self.unique_ids[i]} if self.unique_ids else {"store": store}
            return Communicator(rank, world_size, name=name, transports=transports, timeout=self.timeout_s, **how)

        rows = []
        with contextlib.ExitStack() as stack:
            bench = _Bench(rank, world_size, self, stack.enter_context(communicator(0, "bench-control", None)))
            gloo, ours = _torch_groups(rank, world_size, self, store) if self.needs_torch else (None, None)
            ours = ours or Native(stack.enter_context(communicator(1, "bench", self.transports)))
            for case in self.cases:
                rows.append(bench.run(case, ours, gloo if self.peer == "gloo" else None))
                send(("row", rows[-1]))
            bench.line_up()  # no rank may leave while others still communicate with it
            if self.needs_torch:
                import torch.distributed as dist

                dist.destroy_process_group()
        return rows


class Native:
    """spccl through its own Communicator."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm

    def sent(self) -> list[float]:
        """Bytes sent so far, their bytes if they were dense, frames by format."""
        s = self._comm.stats()
        return [s.wire_bytes_sent, s.dense_bytes_sent, *(s.n_frames_sent[name] for name in FORMATS)]

    def prepare(self, case: Case, source: Any, target: Any, async_op: bool = False) -> Callable[[], Any]:
        start = target if case.collective == "all_reduce" else source
        return verify.bound(self._comm, case, start, target, ROOT, async_op=async_op)


class Torch:
    """A process group of torch.distributed: spccl's, or the dense library's."""

    def __init__(self, group: Any) -> None:
        self._group = group

    def sent(self) -> list[float]:
        from . import gpu_torch

        return gpu_torch.counters(self._group)()

    def prepare(self, case: Case, source: Any, target: Any) -> Callable[[], Any]:
        import torch

        from . import gpu_torch

        x, y = (torch.from_numpy(array).view(gpu_torch.DTYPES[case.dtype]) for array in (source, target))
        return gpu_torch.starter(case, self._group, x, y)


# ---- data ----


def _base(case: Case, n_elems: int) -> np.ndarray:
    """[n_elems] small whole numbers: their sums are exact in any order, so the peer's results can be checked too."""
    rng = np.random.default_rng([n_elems, round(1e6 * case.sparsity)])
    high = 2 if case.op == "prod" else 4
    values = rng.integers(1, high, n_elems, np.int8)
    values[rng.random(n_elems, np.float32) < case.sparsity] = 0
    if case.dtype == "bfloat16":
        return verify.from_float(values.astype(np.float32), case.dtype)
    return values.astype(numpy_dtype(case.dtype))


def density(case: Case, world_size: int) -> float:
    """The fraction of a rank's input that is not zero. It differs from 1 - case.sparsity by chance."""
    n = case.block_elems(world_size) * (world_size if case.collective == "reduce_scatter" else 1)
    return float(np.count_nonzero(_base(case, n)) / n)


def _input(base: np.ndarray, rank: int) -> np.ndarray:
    """Rank `rank`'s input: `base`, shifted by another distance on each rank, so that the nonzeros differ."""
    return np.roll(base, 7919 * rank)


# ---- one case ----


class _Bench(Loop):
    """Runs the cases on one rank."""

    def __init__(self, rank: int, world_size: int, plan: Plan, control: Communicator) -> None:
        super().__init__(rank, world_size, plan, HostClock())
        self.plan, self.control = plan, control
        self._token = np.zeros(1, np.int8)
        self._counted: dict[str, list[hosts.Counters]] = defaultdict(list)

    def line_up(self, n_calls: int = 1) -> None:
        self.control.all_reduce(self._token)

    def gather(self, values: Any) -> np.ndarray:
        out = np.empty(self.world_size * len(values), np.float64)
        self.control.all_gather(np.ascontiguousarray(values, np.float64), out)
        return out.reshape(self.world_size, -1)

    def run(self, case: Case, ours: Native | Torch, peer: Torch | None) -> Row:
        n = case.block_elems(self.world_size)
        base = _base(case, n * (self.world_size if case.collective == "reduce_scatter" else 1))
        source = _input(base, self.rank)
        systems: dict[str, Native | Torch] = {"spccl": ours} | ({} if peer is None else {self.plan.peer: peer})
        targets = [np.empty(case.out_elems(self.world_size), source.dtype) for _ in range(case.calls())]
        trials = [Trial(name, case, self.rank, source, targets) for name in systems]
        for trial, system in zip(trials, systems.values(), strict=True):
            trial.calls = [system.prepare(case, source, target) for target in targets]
        inputs = (_input(base, r) for r in range(self.world_size))
        m = self.measure(trials, lambda: verify.expected(case, list(inputs), self.rank, ROOT), ours.sent)
        how: dict[str, Any] = {"via": self.plan.via, "world_size": self.world_size, "peer": self.plan.peer}
        row = make_row(case, m, dense_bytes=m.dense_bytes, **how)
        if not self.plan.n_hosts:
            return row
        row = self._with_network(row, [self._counted.pop(name)[-self.plan.iters :] for name in systems])
        if isinstance(ours, Native) and self.plan.in_flight:
            return self._with_in_flight(row, case, source, ours)
        return row

    def iteration(self, trial: Trial) -> tuple[Any, Any]:
        """Also notes what this rank's host counted."""
        if self.plan.n_hosts == 0:
            return super().iteration(trial)
        before = hosts.counters()
        marks = super().iteration(trial)
        self.line_up()  # all ranks are done
        self._counted[trial.name].append(hosts.counters().since(before))
        return marks

    def _with_network(self, row: Row, counted: list[list[hosts.Counters]]) -> HostRow:
        """Add what the hosts counted, by system and iteration. Of the ranks of a host only the first counts."""
        is_first = self.rank % (self.world_size // self.plan.n_hosts) == 0
        everyone = np.stack([self.gather(is_first * np.sum(one, axis=0)) for one in counted])  # [systems, ranks, 3]
        busiest = everyone[:, :, 0].max(axis=1) / self.plan.iters / row.calls_per_iter
        counts = everyone[:, :, 1:].sum(axis=1)
        return HostRow(
            **dataclasses.asdict(row),
            hosts=self.plan.n_hosts,
            link_gbs=self.plan.link_rate / 1e9,
            host_bytes=round(busiest[0]),
            time_over_wire=row.time_us / 1e6 / (busiest[0] / self.plan.link_rate),
            retransmits=round(counts[0, 0]),
            timeouts=round(counts[0, 1]),
            peer_retransmits=round(counts[1, 0]) if len(counts) > 1 else None,
            peer_timeouts=round(counts[1, 1]) if len(counts) > 1 else None,
        )

    def _with_in_flight(self, row: HostRow, case: Case, source: np.ndarray, ours: Native) -> HostRow:
        """Add the times of one call alone, and of the first and the last of `in_flight` calls, in turns."""
        n = self.plan.in_flight
        targets = [np.empty(case.out_elems(self.world_size), source.dtype) for _ in range(n)]
        trial = Trial("spccl", case, self.rank, source, targets)
        trial.calls = [ours.prepare(case, source, target, async_op=True) for target in targets]
        times = np.empty((4, self.plan.iters))
        for i in range(-self.plan.warmup, self.plan.iters):
            _, alone, _ = self._together(trial, 1)
            first, last, n_bytes = self._together(trial, n)
            if i >= 0:
                times[:, i] = alone, first, last, n_bytes
        alone, first, last, n_bytes = (np.median(self.gather(one).max(axis=0)) for one in times)
        return dataclasses.replace(
            row,
            in_flight=n,
            alone_us=1e6 * alone,
            first_us=1e6 * first,
            last_us=1e6 * last,
            first_bytes=round(n_bytes),
        )

    def _together(self, trial: Trial, n: int) -> tuple[float, float, int]:
        """Issue n calls at once. Seconds until the first and until the last is done, and the bytes that this rank's
        host sent until the first was done."""
        for target in trial.targets[:n]:
            trial.reset(target)
        self.line_up()
        before = hosts.counters()
        start = time.perf_counter()
        requests = [call() for call in trial.calls[:n]]
        requests[0].wait()
        first = time.perf_counter() - start
        n_bytes = hosts.counters().since(before).tx_bytes
        for request in requests[1:]:
            request.wait()
        return first, time.perf_counter() - start, n_bytes


# ---- groups ----


def _torch_groups(rank: int, world_size: int, plan: Plan, store: Any) -> tuple[Torch, Torch | None]:
    """The Gloo group, and spccl's if it is measured through torch."""
    import torch.distributed as dist

    timeout = datetime.timedelta(seconds=plan.timeout_s)
    dist.init_process_group(
        "gloo", store=dist.PrefixStore("bench", store), rank=rank, world_size=world_size, timeout=timeout
    )
    gloo = Torch(dist.group.WORLD)
    if plan.via != "torch":
        return gloo, None
    from . import gpu_torch

    return gloo, Torch(gpu_torch.spccl_group(timeout, transports=plan.transports or ""))
