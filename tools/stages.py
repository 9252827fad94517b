"""Runs named stages, several at a time, and prints a table of the results. A failed stage does not stop others."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from env import EnvError, cpu_seconds, gather_output, kill_children, say


class Skip(Exception):
    """The stage cannot run here. The text says what is missing."""


@dataclass(frozen=True)
class Stage:
    name: str
    fn: Callable[[], str]  # returns one line for the table; raises Skip or EnvError
    about: str
    uses: str = ""  # a build folder or .venv; stages that use the same one never run at the same time


@dataclass(frozen=True)
class Result:
    stage: Stage
    outcome: str  # "passed", "skipped" or "FAILED"
    seconds: float
    cpu_seconds: float  # of its commands; unlike `seconds`, comparable between busy and idle machines
    note: str


def run_stage(stage: Stage) -> Result:
    say(f"\n==== {stage.name}: {stage.about}")
    start, cpu_start = time.monotonic(), cpu_seconds()
    try:
        outcome, note = "passed", stage.fn()
    except Skip as skip:
        outcome, note = "skipped", str(skip)
        say(f"skipped: {note}")
    except EnvError as err:
        outcome, note = "FAILED", str(err).splitlines()[-1]
        say(str(err))
    except Exception as err:  # an error in the stage's own code must not lose the results of other stages
        outcome, note = "FAILED", f"{type(err).__name__}: {err}"
        say(note)
    return Result(stage, outcome, time.monotonic() - start, cpu_seconds() - cpu_start, note)


class _Queue:
    """Stages that are not started yet. A worker takes the first one whose `uses` is not in use."""

    def __init__(self, stages: Sequence[Stage]) -> None:
        self.waiting = list(stages)
        self.results: dict[str, Result] = {}
        self.used: set[str] = set()
        self.changed = threading.Condition()

    def take(self) -> Stage | None:
        """The next stage; None if none is left. Waits until the `uses` of one of them is not in use."""
        with self.changed:
            while self.waiting:
                for stage in self.waiting:
                    if stage.uses not in self.used:
                        self.waiting.remove(stage)
                        self.used |= {stage.uses} - {""}
                        return stage
                self.changed.wait()
        return None

    def work(self) -> None:
        """Run stages until none is left. Each stage's output is printed in one piece when the stage ends."""
        while (stage := self.take()) is not None:
            say(f"{stage.name}: running")
            with gather_output():
                result = run_stage(stage)
            with self.changed:
                self.results[stage.name] = result
                self.used.discard(stage.uses)
                self.changed.notify_all()


def run_stages(stages: Sequence[Stage], at_once: int) -> bool:
    """Run all stages, at most `at_once` at a time, and print the table. Returns True if none failed."""
    start = time.monotonic()
    if at_once > 1 and len(stages) > 1:
        results = _run_side_by_side(stages, at_once)
    else:
        results = [run_stage(stage) for stage in stages]
    width = max(len(r.stage.name) for r in results)
    say(f"\n{'stage':{width}}  {'result':7}  {'time':>7}  {'CPU':>7}  notes")
    for r in results:
        say(f"{r.stage.name:{width}}  {r.outcome:7}  {r.seconds:5.0f} s  {r.cpu_seconds:5.0f} s  {r.note}")
    count = {kind: sum(r.outcome == kind for r in results) for kind in ("passed", "FAILED", "skipped")}
    total = time.monotonic() - start
    summary = f"{count['passed']} stages passed, {count['FAILED']} failed, {count['skipped']} skipped"
    say(f"{summary}, {total:.0f} s, {sum(r.cpu_seconds for r in results):.0f} s of CPU time")
    return count["FAILED"] == 0


def _run_side_by_side(stages: Sequence[Stage], at_once: int) -> list[Result]:
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
    return [queue.results[stage.name] for stage in stages]
