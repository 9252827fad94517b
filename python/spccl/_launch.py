"""Runs one function as N ranks, each a process of this machine, and collects their results and failures.

No process is left at the end. This file knows nothing of collectives.
"""

from __future__ import annotations

import dataclasses
import faulthandler
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

_GRACE_S = 5.0  # time after the first failure in which the other ranks can report theirs
_JOIN_S = 5.0  # time for a rank to exit after its last message
_SHOW_S = 1.0  # time for the ranks to write where they are, before they are killed


@dataclasses.dataclass
class Rank:
    """The first argument of a rank's function: its number, and `send`, which passes an object to the parent."""

    rank: int
    world_size: int
    send: Callable[[Any], None]


class RanksFailed(RuntimeError):
    """At least one rank failed, died or was too slow. The text describes each of them."""


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    args: tuple[Any, ...] = (),
    *,
    deadline_s: float,
    on_message: Callable[[int, Any], None] | None = None,
) -> list[Any]:
    """Call fn(Rank, *args) in `world_size` new processes and return what each returned, by rank.

    Args:
        fn: a function at the top level of a module. The function, its arguments and its results must pickle.
        deadline_s: seconds until all ranks are killed.
        on_message: called in this process with (rank, object) for each object that a rank passes to `Rank.send`.
    Raises: RanksFailed. No process is left when this returns or raises, also on Ctrl-C.
    """
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    try:
        for rank in range(world_size):
            ours, theirs = context.Pipe(duplex=False)
            pipes.append(ours)
            process = context.Process(
                target=_rank_main, args=(theirs, fn, rank, world_size, args), name=f"rank {rank}", daemon=True
            )
            process.start()
            processes.append(process)
            theirs.close()
        results = _collect(pipes, processes, deadline_s, on_message)
        end = time.monotonic() + _JOIN_S
        for process in processes:
            process.join(max(0.0, end - time.monotonic()))
        return results
    finally:
        for process in processes:
            process.kill()
            process.join()
        for pipe in pipes:
            pipe.close()


def _rank_main(
    pipe: multiprocessing.connection.Connection,
    fn: Callable[..., Any],
    rank: int,
    world_size: int,
    args: tuple[Any, ...],
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # on Ctrl-C the parent ends the ranks
    faulthandler.register(signal.SIGUSR1)
    threading.Thread(target=_die_with_parent, daemon=True).start()
    lock = threading.Lock()

    def send(kind: str, value: Any) -> None:
        with lock:
            pipe.send((kind, value))

    try:
        result = fn(Rank(rank, world_size, lambda value: send("message", value)), *args)
    except BaseException as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{os.path.basename(last.filename)}:{last.lineno}"
        send("failed", f"{type(error).__name__}: {error} ({where})")
        sys.exit(1)
    send("result", result)


def _die_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)


def _collect(
    pipes: list[Any], processes: list[Any], deadline_s: float, on_message: Callable[[int, Any], None] | None
) -> list[Any]:
    deadline = time.monotonic() + deadline_s
    results: dict[int, Any] = {}
    failures: dict[int, str] = {}
    open_pipes = {pipe: rank for rank, pipe in enumerate(pipes)}
    timed_out = False
    while open_pipes:
        left = deadline - time.monotonic()
        if left <= 0:
            timed_out = not failures
            break
        for pipe in _ready(list(open_pipes), left):
            rank = open_pipes[pipe]
            try:
                kind, value = pipe.recv()
            except EOFError:
                processes[rank].join(_JOIN_S)
                failures[rank] = f"died without a message, {_exit_text(processes[rank].exitcode)}"
                kind = "failed"
            else:
                if kind == "message":
                    if on_message is not None:
                        on_message(rank, value)
                    continue
                if kind == "result":
                    results[rank] = value
                else:
                    failures[rank] = value
            del open_pipes[pipe]
            if kind == "failed":
                deadline = min(deadline, time.monotonic() + _GRACE_S)
    if timed_out:
        _show_where(processes)
    if failures or timed_out:
        raise RanksFailed(_failure_text(failures, sorted(open_pipes.values()), len(pipes), deadline_s))
    return [results[rank] for rank in range(len(pipes))]


def _show_where(processes: list[Any]) -> None:
    """Let each rank that still runs write to stderr where its threads are."""
    for process in processes:
        if process.is_alive():
            os.kill(process.pid, signal.SIGUSR1)
    time.sleep(_SHOW_S)


def _ready(pipes: list[Any], timeout_s: float) -> list[Any]:
    return multiprocessing.connection.wait(pipes, timeout_s)


def _exit_text(code: int | None) -> str:
    if code is None:
        return "and has not exited"
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def _failure_text(failures: dict[int, str], silent: list[int], world_size: int, deadline_s: float) -> str:
    lines = [f"rank {rank} of {world_size}: {failures[rank]}" for rank in sorted(failures)]
    if silent:
        ranks = ", ".join(map(str, silent))
        reason = f"{_GRACE_S:g} s after the first failure" if failures else f"after {deadline_s:g} s"
        lines.append(f"rank(s) {ranks} of {world_size}: still running {reason}; killed")
    return "\n".join(lines)
