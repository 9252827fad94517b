"""Runs named stages, several at a time, and prints a table of the results. A failed stage does not stop others.

The output of a stage that failed is printed whole; of one that passed, only its line. All output is in build/logs.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from env import BUILD, EnvError, cpu_seconds, gather_output, is_stamped, kill_children, say, write_stamp

# In CI a skipped stage is a failure, except these. name -> why it may be skipped there.
MAY_BE_SKIPPED_IN_CI: dict[str, str] = {}


class Skip(Exception):
    """The stage cannot run here. The text says what is missing."""


@dataclass(frozen=True)
class Stage:
    name: str
    fn: Callable[[], str]  # returns one line for the table; raises Skip or EnvError
    about: str
    uses: str = ""  # a build folder or .venv; stages that use the same one never run at the same time
    after: str = ""  # a stage that must have ended first, if it runs too

    @property
    def stamp(self) -> Path:
        """The file that holds the hash of the sources with which this stage passed."""
        return BUILD / "passed" / self.name


@dataclass(frozen=True)
class Result:
    stage: Stage
    outcome: str  # "passed", "before", "skipped" or "FAILED"; "before": it passed in an earlier run
    seconds: float
    cpu_seconds: float  # of its commands; unlike `seconds`, comparable between busy and idle machines
    note: str


def run_stage(stage: Stage) -> Result:
    start, cpu_start = time.monotonic(), cpu_seconds()
    try:
        outcome, note = "passed", stage.fn()
    except Skip as skip:
        outcome, note = "skipped", str(skip)
        if os.environ.get("CI") and stage.name not in MAY_BE_SKIPPED_IN_CI:
            outcome = "FAILED"
            say(f"{stage.name}: skipped, which CI does not allow: {note}")
    except EnvError as err:
        outcome, note = "FAILED", str(err).splitlines()[-1]
        say(str(err))
    except Exception as err:  # an error in the stage's own code must not lose the results of other stages
        outcome, note = "FAILED", f"{type(err).__name__}: {err}"
        say(note)
    return Result(stage, outcome, time.monotonic() - start, cpu_seconds() - cpu_start, note)


class _Queue:
    """Stages that are not started yet. A worker takes the first one that can start."""

    def __init__(self, stages: Sequence[Stage]) -> None:
        self.n_stages, self.n_ended, self.start = len(stages), 0, time.monotonic()
        self.waiting = list(stages)
        self.results: dict[str, Result] = {}
        self.used: set[str] = set()
        self.unfinished = {stage.name for stage in stages}
        self.changed = threading.Condition()

    def take(self) -> Stage | None:
        """The next stage; None if none is left. Waits until one of them can start."""
        with self.changed:
            while self.waiting:
                for stage in self.waiting:
                    if stage.uses not in self.used and stage.after not in self.unfinished:
                        self.waiting.remove(stage)
                        self.used |= {stage.uses} - {""}
                        return stage
                self.changed.wait()
        return None

    def work(self) -> None:
        """Run stages until none is left. Print a line when a stage starts and when it ends, and the output of one that
        failed."""
        while (stage := self.take()) is not None:
            say(f"{self._clock()} {stage.name}: {stage.about}")
            with gather_output() as output:
                result = run_stage(stage)
            with self.changed:
                self.results[stage.name] = result
                self.n_ended += 1
                self.used.discard(stage.uses)
                self.unfinished.discard(stage.name)
                self.changed.notify_all()
                if result.outcome == "FAILED":
                    say("\n".join(["", *output, ""]))
                ended = f"{self.n_ended} of {self.n_stages}"
                say(f"{self._clock()} {stage.name}: {result.outcome} ({result.seconds:.0f} s); {ended} stages ended")

    def _clock(self) -> str:
        """Minutes and seconds since the first stage started."""
        return "[{:2d}:{:02d}]".format(*divmod(int(time.monotonic() - self.start), 60))


def run_stages(stages: Sequence[Stage], at_once: int, sources: str = "", repeat: bool = True) -> bool:
    """Run all stages, at most `at_once` at a time, and print the table. Returns True if none failed.

    Args:
        sources: hash of the sources. A stage that passes is remembered with it; "" remembers nothing.
        repeat: run also the stages that have passed with these sources.
    """
    start = time.monotonic()
    before = [] if repeat else [s for s in stages if is_stamped(s.stamp, sources)]
    done = _run_side_by_side([s for s in stages if s not in before], at_once)
    results = [done.get(s.name) or Result(s, "before", 0, 0, "passed in an earlier run, same sources") for s in stages]
    for r in results:
        if sources and r.outcome == "passed":
            write_stamp(r.stage.stamp, sources)
    width = max(len(r.stage.name) for r in results)
    say(f"\n{'stage':{width}}  {'result':7}  {'time':>7}  {'CPU':>7}  notes")
    for r in results:
        say(f"{r.stage.name:{width}}  {r.outcome:7}  {r.seconds:5.0f} s  {r.cpu_seconds:5.0f} s  {r.note}")
    count = {kind: sum(r.outcome == kind for r in results) for kind in ("passed", "before", "FAILED", "skipped")}
    total = time.monotonic() - start
    earlier = f", {count['before']} passed before" if count["before"] else ""
    summary = f"{count['passed']} stages passed{earlier}, {count['FAILED']} failed, {count['skipped']} skipped"
    say(f"{summary}, {total:.0f} s, {sum(r.cpu_seconds for r in results):.0f} s of CPU time")
    return count["FAILED"] == 0


def _run_side_by_side(stages: Sequence[Stage], at_once: int) -> dict[str, Result]:
    """Returns name of stage -> its result."""
    queue = _Queue(stages)
    workers = [threading.Thread(target=queue.work, daemon=True) for _ in range(at_once)]
    for worker in workers:
        worker.start()
    try:
        for worker in workers:
            worker.join()
    except BaseException:  # Ctrl-C does not reach the workers' commands, which have process groups of their own
        with queue.changed:
            queue.waiting.clear()
        kill_children()
        raise
    return queue.results
