"""Schedules that users write: which rank sends which chunk to whom. docs/SCHEDULES.md is the language in one page.

    @all_reduce
    def ring(t: Topology) -> None:
        for c in range(t.ranks):
            x = t.input((c + 1) % t.ranks, c)
            ...

A function is traced once for each number of ranks, shape of hosts and root. `_schedule_plan` turns what it did into the
steps of a plan; `compile_file` gives the text that SPCCL_SCHEDULE=file:PATH runs. No torch, no numpy.
"""

from __future__ import annotations

import dataclasses
import runpy
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, overload

from . import _schedule_plan as plan
from ._schedule_plan import ScheduleError, Value

__all__ = [
    "Schedule",
    "ScheduleError",
    "Topology",
    "Value",
    "all_gather",
    "all_reduce",
    "broadcast",
    "compile_file",
    "compile_schedule",
    "load",
    "reduce_scatter",
]


class Skip(Exception):
    """This schedule is not for this topology."""


class Topology:
    """The group, and where chunks begin. Ranks lie host by host: rank r is on host r // per_host.

    Attributes: ranks, hosts, per_host, chunks (of the array, or of one rank's block), root (of a broadcast; else -1).
    """

    def __init__(self, collective: str, ranks: int, hosts: int = 1, root: int = -1) -> None:
        if not 2 <= ranks <= 64:
            raise ScheduleError(
                f"{ranks} ranks: wanted 2 to 64; one rank sends nothing, and the check has sets of 64 ranks"
            )
        if hosts < 1 or ranks % hosts:
            raise ScheduleError(f"{ranks} ranks on {hosts} hosts: wanted as many ranks on each host")
        self.ranks, self.hosts, self.per_host = ranks, hosts, ranks // hosts
        self.root = root
        self.chunks = ranks
        self.trace = plan.Trace(collective, ranks)

    def input(self, rank: int, chunk: int = 0, *, block: int | None = None) -> Value:
        """The chunk of the rank's input. reduce_scatter: of the block that goes to rank `block`."""
        return self.trace.input(rank, chunk, block, self.chunks, self.root)

    def reduce(self, rank: int, values: Iterable[Value]) -> Value:
        """On `rank`: the sum of the values, of any ranks, in this order from +0.0."""
        return self.trace.sum(rank, list(values))

    def skip(self, why: str) -> None:
        """Leave this topology out: the file gets no plan for it."""
        raise Skip(why)


@dataclasses.dataclass(frozen=True)
class Schedule:
    """One function of a file: what its decorator made of it."""

    collective: str
    name: str
    function: Callable[[Topology], None]
    chunks: int | Callable[[Topology], int] | None

    def trace(self, ranks: int, hosts: int = 1, root: int = -1) -> Topology:
        """Run the function. Raises: ScheduleError, Skip."""
        t = Topology(self.collective, ranks, hosts, root)
        if self.chunks is not None:
            t.chunks = self.chunks(t) if callable(self.chunks) else self.chunks
        elif self.collective in ("all_gather", "reduce_scatter"):
            t.chunks = 1
        if not 1 <= t.chunks <= 1024:
            raise ScheduleError(f"{self.name}: {t.chunks} chunks, wanted 1 to 1024")
        self.function(t)
        return t


Function = Callable[[Topology], None]


def _decorator(collective: str) -> Any:
    @overload
    def decorate(function: Function, /) -> Schedule: ...
    @overload
    def decorate(*, chunks: int | Callable[[Topology], int]) -> Callable[[Function], Schedule]: ...
    def decorate(
        function: Function | None = None, /, *, chunks: int | Callable[[Topology], int] | None = None
    ) -> Schedule | Callable[[Function], Schedule]:
        def made(f: Function) -> Schedule:
            return Schedule(collective, f.__name__, f, chunks)

        return made if function is None else made(function)

    decorate.__doc__ = (
        f"Marks a function as a schedule of {collective}. chunks: their number, or a function that gives it."
    )
    return decorate


all_reduce = _decorator("all_reduce")
all_gather = _decorator("all_gather")
reduce_scatter = _decorator("reduce_scatter")
broadcast = _decorator("broadcast")


def load(path: Path) -> list[Schedule]:
    """The schedules of a file of Python, in their order. It runs the file.

    Raises: ScheduleError if the file has none.
    """
    found = [v for v in runpy.run_path(str(path), run_name="schedule").values() if isinstance(v, Schedule)]
    if not found:
        raise ScheduleError(f"{path}: no function has a decorator of spccl.schedule, such as @all_reduce")
    return found


def compile_schedule(schedule: Schedule, ranks: int, hosts: int | None = None) -> list[str]:
    """Texts of the plans for one topology: one, or one for each root of a broadcast. [] if the schedule skips it.

    Args: hosts: None: the plan fits any hosts.
    Raises: ScheduleError.
    """
    texts = []
    for root in range(ranks) if schedule.collective == "broadcast" else [-1]:
        try:
            t = schedule.trace(ranks, hosts or 1, root)
        except Skip:
            return []
        shape = f"{t.hosts}x{t.per_host}" if hosts else "any"
        texts.append(plan.compile_trace(t.trace, schedule.name, shape, t.chunks, root))
    return texts


def compile_file(path: Path, topologies: Sequence[tuple[int, int | None]]) -> str:
    """The plan file for the schedules of a file of Python. topologies: (ranks, hosts or None for any).

    Raises: ScheduleError (also if no schedule takes any of the topologies).
    """
    texts = [text for s in load(path) for ranks, hosts in topologies for text in compile_schedule(s, ranks, hosts)]
    if not texts:
        raise ScheduleError(f"{path}: it skips every topology: {', '.join(map(str, topologies))}")
    return "".join(["spccl-plan 1\n", *texts, "end\n"])
