"""The measuring loop of `spccl bench`: checks the results, warms up, then times the systems in turns, in one run.

The ranks start each timed iteration together. Its time is that of the slowest rank. Up to 64 KiB an iteration is a
batch of calls (`Case.calls`), and its time is divided by their number.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..frame import FORMATS
from .cases import Case
from .report import Measured
from .start import BasePlan

ROOT = 0  # of broadcasts
POISON = 0xA5  # a byte that no result has, so that the check finds elements that a system does not write


class HostClock:
    """Measures calls that are done when they return."""

    def mark(self) -> float:
        return time.perf_counter()

    def seconds(self, start: float, end: float) -> float:
        return end - start

    def synchronize(self) -> None:
        pass

    def let_host_run_ahead(self, n_calls: int = 1) -> None:
        pass

    def captured(self, call: Callable[[], Any]) -> contextlib.AbstractContextManager[Callable[[], Any]]:
        raise ValueError("a CUDA graph needs a GPU: leave out --graph")


class Trial:
    """One case on one system: the calls of an iteration, the output of each, and how to restore the input.

    data: this rank's input. own: where in an output the input lies; None: elsewhere.
    """

    def __init__(
        self, name: str, case: Case, rank: int, data: Any, targets: list[Any], own: slice | None = None
    ) -> None:
        self.name, self.targets, self._data, self._own = name, targets, data, own
        self.calls: list[Callable[[], Any]] = []
        self._refill = case.collective == "all_reduce" or (case.collective == "broadcast" and rank == ROOT)

    def reset(self, target: Any) -> None:
        """Restore the input that a call has overwritten."""
        if self._refill:
            target[:] = self._data

    def fill(self, target: Any) -> None:
        """Write the input to the output, if it lies there."""
        if self._own is not None:
            target[self._own] = self._data
        self.reset(target)

    def wrong(self, expected: Any) -> int:
        """Poison the output, run once, and count the elements that differ from the expected ones."""
        self.poison(self.targets[0])
        self.fill(self.targets[0])
        self.calls[0]()
        return self.differing(self.targets[0], expected)

    def poison(self, target: Any) -> None:
        target.view(np.uint8)[:] = POISON

    def differing(self, target: Any, expected: Any) -> int:
        return int(np.count_nonzero(target != expected))


class Loop:
    """The measurement on one rank. A subclass says how the ranks communicate."""

    least_warmup = 0

    def __init__(self, rank: int, world_size: int, plan: BasePlan, clock: Any) -> None:
        self.rank, self.world_size, self.clock = rank, world_size, clock
        self._iters, self._warmup = plan.iters, max(plan.warmup, self.least_warmup)

    def gather(self, values: Any) -> np.ndarray:
        """The values of all ranks, [world_size, len(values)] float64, on every rank."""
        raise NotImplementedError

    def line_up(self, n_calls: int) -> None:
        """Make the ranks start together, before so many calls."""
        raise NotImplementedError

    def warmed_up(self, seconds_each: float) -> int:
        """Called after the warm-up, whose rounds took so long. Returns the number of iterations."""
        return self._iters

    def iteration(self, trial: Trial) -> tuple[Any, Any]:
        """Run a system once. Returns the clock's marks at start and end."""
        for target in trial.targets:
            trial.reset(target)
        self.line_up(len(trial.calls))
        start = self.clock.mark()
        for call in trial.calls:
            call()
        return start, self.clock.mark()

    def _round(self, trials: Sequence[Trial], i: int) -> dict[str, tuple[Any, Any]]:
        """Run every system once. The order alternates, because data that one system leaves in caches helps the next."""
        return {trial.name: self.iteration(trial) for trial in (trials if i % 2 == 0 else reversed(trials))}

    def measure(
        self, trials: Sequence[Trial], expected: Callable[[], Any], read: Callable[[], Sequence[float]]
    ) -> Measured:
        """Measure a case.

        Args:
            trials: one for each system, spccl's first.
            expected: makes the output that this rank must get.
            read: reads spccl's counters on this rank: bytes sent, their bytes if they were dense, frames by format.
        """
        wanted = expected()
        wrong = [trial.wrong(wanted) for trial in trials]
        self.clock.synchronize()
        del wanted
        begun = time.monotonic()
        for i in range(self._warmup):
            self._round(trials, i)
        self.clock.synchronize()
        iters = self.warmed_up((time.monotonic() - begun) / max(self._warmup, 1))
        before = read()
        rounds = [self._round(trials, i) for i in range(iters)]
        self.clock.synchronize()
        sent = np.subtract(read(), before)
        total = self.gather([*wrong, *sent]).sum(axis=0)
        wire, dense, *frames = total[len(wrong) :]
        n_calls = iters * len(trials[0].calls) * self.world_size
        times = {t.name: [self.clock.seconds(*one[t.name]) / len(t.calls) for one in rounds] for t in trials}
        return Measured(
            times={name: self.gather(mine).max(axis=0) for name, mine in times.items()},
            wrong={trial.name: int(n) for trial, n in zip(trials, total, strict=False)},
            wire_bytes=wire / n_calls,
            frames={name: int(n) for name, n in zip(FORMATS, frames, strict=True)},
            host={},
            dense_bytes=dense / n_calls,
        )
