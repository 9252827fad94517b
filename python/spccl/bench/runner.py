"""Runs cases: checks the results, warms up, then times spccl and a dense library in turns, in the same run.

An untimed barrier, on a communicator of its own, is before each timed iteration. The time of an iteration is that
of the slowest rank. Up to 64 KiB an iteration is a batch of calls (`Case.calls`), and its time is divided by their
number.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from .. import verify
from .._launch import Rank
from ..comm import Communicator, get_unique_id
from ..frame import FORMATS, numpy_dtype
from . import hosts
from .cases import Case
from .report import HostRow, Measured, Row, make_row
from .start import BasePlan

ROOT = 0  # of broadcasts


@dataclasses.dataclass(frozen=True)
class Plan(BasePlan):
    """Measures spccl on host memory. Spawned ranks find each other by `unique_ids` and `store_file`."""

    via: str = "native"  # or "torch"
    peer: str = "gloo"  # or "none"
    transports: str | None = None
    n_hosts: int = 0  # emulated hosts (hosts.py) that the ranks are spread over; 0: all ranks run on this machine
    rate: str = ""  # of an emulated host's link
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
        names = stack.enter_context(hosts.emulated(self.n_hosts, self.rate))
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
            bench.barrier()  # no rank may leave while others still communicate with it
            if self.needs_torch:
                import torch.distributed as dist

                dist.destroy_process_group()
        return rows


class Native:
    """spccl through its own Communicator."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm

    def sent(self) -> np.ndarray:
        """[2 + formats]: bytes sent so far, their bytes if they were dense, frames by format."""
        s = self._comm.stats()
        return np.array([s.wire_bytes_sent, s.dense_bytes_sent, *(s.n_frames_sent[name] for name in FORMATS)])

    def prepare(self, case: Case, source: Any, target: Any, async_op: bool = False) -> Callable[[], Any]:
        comm = self._comm
        kwargs: dict[str, Any] = {"dtype": case.dtype, "async_op": async_op}
        if case.collective == "all_gather":
            return lambda: comm.all_gather(source, target, **kwargs)
        if case.collective == "reduce_scatter":
            return lambda: comm.reduce_scatter(source, target, case.op, **kwargs)
        if case.collective == "all_reduce":
            return lambda: comm.all_reduce(target, None, case.op, **kwargs)
        return lambda: comm.broadcast(target, ROOT, **kwargs)


class Torch:
    """A process group of torch.distributed: spccl's, or the dense library's."""

    def __init__(self, group: Any) -> None:
        self._group = group

    def sent(self) -> np.ndarray:
        from .. import backend

        s = backend.stats(self._group)
        return np.array([s.wire_bytes_sent, s.dense_bytes_sent, *(s.frames_sent[name] for name in FORMATS)])

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


def _input(base: np.ndarray, rank: int) -> np.ndarray:
    """Rank `rank`'s input: `base`, shifted by another distance on each rank, so that the nonzeros differ."""
    return np.roll(base, 7919 * rank)


# ---- one case ----


class _Bench:
    """Runs the cases on one rank."""

    def __init__(self, rank: int, world_size: int, plan: Plan, control: Communicator) -> None:
        self.rank, self.world_size, self.plan, self.control = rank, world_size, plan, control
        self._token = np.zeros(1, np.int8)

    def barrier(self) -> None:
        self.control.all_reduce(self._token)

    def gather(self, values: np.ndarray) -> np.ndarray:
        """The values of all ranks, [world_size, len(values)] float64, on every rank."""
        out = np.empty(self.world_size * len(values), np.float64)
        self.control.all_gather(np.ascontiguousarray(values, np.float64), out)
        return out.reshape(self.world_size, -1)

    def run(self, case: Case, ours: Native | Torch, peer: Torch | None) -> Row:
        n = case.block_elems(self.world_size)
        n_in = n * (self.world_size if case.collective == "reduce_scatter" else 1)
        n_out = case.out_elems(self.world_size)
        base = _base(case, n_in)
        source = _input(base, self.rank)
        targets = [np.empty(n_out, source.dtype) for _ in range(case.calls())]
        systems: list[Native | Torch] = [ours] if peer is None else [ours, peer]
        calls = [[system.prepare(case, source, target) for target in targets] for system in systems]

        expected = verify.expected(case, [_input(base, r) for r in range(self.world_size)], self.rank, ROOT)
        wrong = [self._wrong(case, source, targets[0], one[0], expected) for one in calls]
        del expected
        times = [np.empty(self.plan.iters) for _ in systems]
        network = np.zeros((len(systems), 3))
        before = ours.sent()
        for i in range(-self.plan.warmup, self.plan.iters):
            if i == 0:
                before = ours.sent()
            # The order alternates, because data that one system leaves in the caches helps the next.
            for s in range(len(systems)) if i % 2 == 0 else reversed(range(len(systems))):
                elapsed, used = self._counted(case, source, targets, calls[s])
                if i >= 0:
                    times[s][i] = elapsed / len(targets)
                    network[s] += used
        row = self._row(case, times, wrong, ours.sent() - before)
        if not self.plan.n_hosts:
            return row
        row = self._with_network(row, network)
        if isinstance(ours, Native) and self.plan.in_flight:
            return self._with_in_flight(row, case, source, ours)
        return row

    def _counted(
        self, case: Case, source: np.ndarray, targets: list[np.ndarray], calls: list[Callable[[], Any]]
    ) -> tuple[float, tuple[int, int, int]]:
        """Run one iteration. Returns seconds, and what this rank's host counted: bytes, retransmissions, time-outs.
        Of the ranks of a host only the first counts."""
        if self.plan.n_hosts == 0 or self.rank % (self.world_size // self.plan.n_hosts) != 0:
            elapsed = self._iteration(case, source, targets, calls)
            if self.plan.n_hosts:
                self.barrier()
            return elapsed, (0, 0, 0)
        before = hosts.counters()
        elapsed = self._iteration(case, source, targets, calls)
        self.barrier()  # all ranks are done
        used = hosts.counters().since(before)
        return elapsed, (used.tx_bytes, used.retransmits, used.timeouts)

    def _with_network(self, row: Row, network: np.ndarray) -> HostRow:
        """Add what the hosts counted. network: [systems, 3] sums over this rank's iterations."""
        everyone = np.stack([self.gather(one) for one in network])  # [systems, ranks, 3]
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
        calls = [ours.prepare(case, source, target, async_op=True) for target in targets]
        times = np.empty((4, self.plan.iters))
        for i in range(-self.plan.warmup, self.plan.iters):
            _, alone, _ = self._together(case, source, targets[:1], calls[:1])
            first, last, n_bytes = self._together(case, source, targets, calls)
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

    def _together(
        self, case: Case, source: np.ndarray, targets: list[np.ndarray], calls: list[Callable[[], Any]]
    ) -> tuple[float, float, int]:
        """Issue the calls at once. Seconds until the first and until the last is done, and the bytes that this rank's
        host sent until the first was done."""
        for target in targets:
            self._reset(case, source, target)
        self.barrier()
        before = hosts.counters()
        start = time.perf_counter()
        requests = [call() for call in calls]
        requests[0].wait()
        first = time.perf_counter() - start
        n_bytes = hosts.counters().since(before).tx_bytes
        for request in requests[1:]:
            request.wait()
        return first, time.perf_counter() - start, n_bytes

    def _reset(self, case: Case, source: np.ndarray, target: np.ndarray) -> None:
        if case.collective == "all_reduce" or (case.collective == "broadcast" and self.rank == ROOT):
            target[:] = source

    def _iteration(
        self, case: Case, source: np.ndarray, targets: list[np.ndarray], calls: list[Callable[[], Any]]
    ) -> float:
        for target in targets:
            self._reset(case, source, target)
        self.barrier()
        start = time.perf_counter()
        for call in calls:
            call()
        return time.perf_counter() - start

    def _wrong(
        self,
        case: Case,
        source: np.ndarray,
        target: np.ndarray,
        call: Callable[[], Any],
        expected: np.ndarray,
    ) -> int:
        target.view(np.uint8)[:] = 0xA5
        self._reset(case, source, target)
        call()
        return int(np.count_nonzero(target != expected))

    def _row(self, case: Case, times: list[np.ndarray], wrong: list[int], sent: np.ndarray) -> Row:
        names = ["spccl", self.plan.peer][: len(times)]
        slowest = [self.gather(one).max(axis=0) for one in times]
        total = self.gather(np.array([*wrong, *sent])).sum(axis=0)
        wire, dense, *frames = total[len(wrong) :]
        per_call = 1 / (self.plan.iters * case.calls() * self.world_size)
        measured = Measured(
            times=dict(zip(names, slowest, strict=True)),
            wrong={name: int(n) for name, n in zip(names, total, strict=False)},
            wire_bytes=wire * per_call,
            frames={name: int(n) for name, n in zip(FORMATS, frames, strict=True)},
            host={},
        )
        how: dict[str, Any] = {"via": self.plan.via, "world_size": self.world_size, "peer": self.plan.peer}
        return make_row(case, measured, dense_bytes=dense * per_call, **how)


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
    from .. import backend

    backend.register()
    options = backend.Options(transports=plan.transports or "")
    return gloo, Torch(dist.new_group(backend="spccl", timeout=timeout, pg_options=options))
