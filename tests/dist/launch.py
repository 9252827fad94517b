"""Starts the ranks of a test as processes, gathers what they say, and leaves none of them behind.

A worker is a Python file in workers/ that calls `workers.common.main(CASES)`: it joins a group, runs its cases
in order, and prints one line of JSON per case. `run_ranks` starts N of them with a rendezvous file of their
own; nothing listens on a port that another test could take.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
MARK = "@case "


@dataclass
class Rank:
    """How one rank ended.

    Attributes:
        returncode: exit status; negative = signal; None = still running at the time-out, then killed.
        cases: name of case -> what it reported: {"ok": bool, "error": text, ...}.
    """

    rank: int
    returncode: int | None
    output: str
    cases: dict[str, dict] = field(default_factory=dict)

    def told(self) -> str:
        return f"--- rank {self.rank}: exit {self.returncode}\n{self.output[-4000:]}"


def run_ranks(
    worker: str,
    n_ranks: int,
    *args: str,
    timeout_s: float = 240,
    env: dict[str, str] | None = None,
) -> list[Rank]:
    """Run `workers/<worker>.py *args` as `n_ranks` processes; returns when all have ended or were killed."""
    with tempfile.TemporaryDirectory(prefix="spccl-test-") as folder:
        processes = []
        for rank in range(n_ranks):
            settings = dict(
                os.environ,
                RANK=str(rank),
                WORLD_SIZE=str(n_ranks),
                SPCCL_TEST_FOLDER=folder,
                OMP_NUM_THREADS="1",
                PYTHONUNBUFFERED="1",
                GLOO_SOCKET_IFNAME="lo",
                PYTHONPATH=os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]),
                **(env or {}),
            )
            log = open(Path(folder) / f"log-{rank}", "w+")  # noqa: SIM115 (closed below)
            processes.append(
                (
                    subprocess.Popen(
                        [sys.executable, str(HERE / "workers" / f"{worker}.py"), *args],
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        env=settings,
                        start_new_session=True,
                    ),
                    log,
                )
            )
        try:
            codes = _wait([p for p, _ in processes], timeout_s)
        finally:
            for process, _ in processes:
                _kill_session(process)
        ranks = []
        for rank, (_, log) in enumerate(processes):
            log.seek(0)
            output = log.read()
            log.close()
            ranks.append(Rank(rank, codes[rank], output, _cases(output)))
        return ranks


def _wait(processes: list[subprocess.Popen], timeout_s: float) -> list[int | None]:
    """Exit codes; once one rank has failed the others get 60 s to notice."""
    deadline = time.monotonic() + timeout_s
    hurried = False
    while time.monotonic() < deadline:
        codes = [p.poll() for p in processes]
        if all(code is not None for code in codes):
            return codes
        if not hurried and any(codes):
            hurried, deadline = True, min(deadline, time.monotonic() + 60)
        time.sleep(0.02)
    return [p.poll() for p in processes]


def _kill_session(process: subprocess.Popen) -> None:
    """End a rank and whatever it started (it leads its own session)."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def run_command(command: list[str], env: dict[str, str], timeout_s: float = 200) -> tuple[int, str]:
    """Run a launcher such as torchrun; returns exit status and all it printed.

    At the time-out it is asked to end first: its ranks lead sessions of their own, and only it knows them.
    """
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=env, start_new_session=True
        )
        try:
            process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(40)
        finally:
            _kill_session(process)
        log.seek(0)
        return process.returncode, log.read()


def _cases(output: str) -> dict[str, dict]:
    cases = {}
    for line in output.splitlines():
        if line.startswith(MARK):
            report = json.loads(line[len(MARK) :])
            cases[report.pop("case")] = report
    return cases


def check_case(ranks: list[Rank], case: str) -> list[dict]:
    """The reports of `case`, one per rank. Fails the test with all ranks' output unless it passed on each."""
    bad = [r for r in ranks if not r.cases.get(case, {}).get("ok", False)]
    if bad:
        texts = [f"rank {r.rank}: {r.cases.get(case, {}).get('error', 'never reported')}" for r in bad]
        raise AssertionError("\n".join([f"case {case} failed", *texts, *(r.told() for r in ranks)]))
    return [r.cases[case] for r in ranks]
