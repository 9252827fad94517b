"""Runs named stages one after the other and sums them up in a table. A failed stage stops no other."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from env import EnvError, say


class Skip(Exception):
    """Raised by a stage that cannot run here; the text says what is missing."""


@dataclass(frozen=True)
class Stage:
    name: str
    fn: Callable[[], str]  # returns one line for the table; raises Skip or EnvError
    about: str


@dataclass(frozen=True)
class Result:
    stage: Stage
    outcome: str  # "passed", "skipped" or "FAILED"
    seconds: float
    note: str


def run_stage(stage: Stage) -> Result:
    say(f"\n==== {stage.name}: {stage.about}")
    start = time.monotonic()
    try:
        outcome, note = "passed", stage.fn()
    except Skip as skip:
        outcome, note = "skipped", str(skip)
        say(f"skipped: {note}")
    except EnvError as err:
        outcome, note = "FAILED", str(err).splitlines()[-1]
        say(str(err))
    return Result(stage, outcome, time.monotonic() - start, note)


def run_stages(stages: Sequence[Stage]) -> bool:
    """Run them all; print the table. Returns True if none failed."""
    results = [run_stage(stage) for stage in stages]
    width = max(len(r.stage.name) for r in results)
    say(f"\n{'stage':{width}}  {'result':7}  {'time':>7}  notes")
    for r in results:
        say(f"{r.stage.name:{width}}  {r.outcome:7}  {r.seconds:5.0f} s  {r.note}")
    count = {kind: sum(r.outcome == kind for r in results) for kind in ("passed", "FAILED", "skipped")}
    total = sum(r.seconds for r in results)
    summary = f"{count['passed']} stages passed, {count['FAILED']} failed, {count['skipped']} skipped"
    say(f"{summary}, {total:.0f} s")
    return count["FAILED"] == 0
