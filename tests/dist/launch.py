"""Starts the ranks of a test as processes, and collects their reports. No process is left at the end.

A worker is a Python file in workers/ that calls `workers.common.main(CASES)`: it joins a group, runs its cases
in order, and prints one line of JSON per case. `run_ranks` starts N processes of a worker with a rendezvous file of
their own, so they need no port that another test could take.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import multiprocessing
import multiprocessing.forkserver
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import types
from dataclasses import dataclass, field
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
MARK = "@case "
SETTINGS = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


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

    def report(self) -> str:
        return f"--- rank {self.rank}: exit {self.returncode}\n{self.output[-4000:]}"


def run_ranks(
    worker: str,
    n_ranks: int,
    *args: str,
    timeout_s: float = 600,
    env: dict[str, str] | None = None,
) -> list[Rank]:
    """Run `workers/<worker>.py *args` as `n_ranks` processes. Returns when all have ended or were killed."""
    script = str(HERE / "workers" / f"{worker}.py")
    context = _fork_server()
    with tempfile.TemporaryDirectory(prefix="spccl-test-") as folder:
        processes = []
        try:
            for rank in range(n_ranks):
                settings = dict(
                    os.environ,
                    RANK=str(rank),
                    WORLD_SIZE=str(n_ranks),
                    SPCCL_TEST_FOLDER=folder,
                    **SETTINGS,
                    PYTHONPATH=os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]),
                    **(env or {}),
                )
                log = str(Path(folder) / f"log-{rank}")
                process = context.Process(target=_rank_main, args=(script, args, settings, log))
                process.start()
                processes.append(process)
            codes = _wait(processes, timeout_s)
        finally:
            for process in processes:
                _kill_rank(process)
        ranks = []
        for rank, code in enumerate(codes):
            log_file = Path(folder) / f"log-{rank}"
            output = log_file.read_text(errors="replace") if log_file.exists() else ""
            ranks.append(Rank(rank, code, output, _cases(output)))
        return ranks


def _fork_server() -> multiprocessing.context.ForkServerContext:
    """The context that forks ranks from one process, which has imported torch. An import of torch takes 2 s of CPU
    time, that of torch._dynamo, which DDP and optimizers need, 1.7 s, and a fork 10 ms.

    That process makes no group and uses no GPU. spccl reads its settings when it makes a group, so the settings of
    each rank count.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["pytest", "torch.distributed", "torch._dynamo"])
    before = dict(os.environ)
    os.environ.update(SETTINGS)  # libgomp reads its variables when it is loaded
    try:
        multiprocessing.forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(before)
    return context


def _rank_main(script: str, args: tuple[str, ...], settings: dict[str, str], log: str) -> None:
    """Behave as `python script *args` would, with the output in `log`. Never returns."""
    os.setpgid(0, 0)  # not a session, which would get the same share of the cores as a whole stage of the test run
    fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    sys.stdout.reconfigure(write_through=True)
    os.environ.clear()
    os.environ.update(settings)
    sys.path[:0] = [os.path.dirname(script), str(HERE)]
    sys.argv = [script, *args]
    main = types.ModuleType("__main__")
    main.__file__ = script
    sys.modules["__main__"] = main
    status = 0
    try:
        exec(compile(Path(script).read_bytes(), script, "exec"), main.__dict__)
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        status = 1
    # After a return multiprocessing would call _exit. Py_Exit runs destructors and exit handlers while threads still
    # run, and these are tested too.
    ctypes.pythonapi.Py_Exit(status)


def _wait(processes: list[multiprocessing.process.BaseProcess], timeout_s: float) -> list[int | None]:
    """Wait for all ranks; returns their exit codes. After the first failure the other ranks get 60 s to end."""
    deadline = time.monotonic() + timeout_s
    hurried = False
    while time.monotonic() < deadline:
        codes = [p.exitcode for p in processes]
        if all(code is not None for code in codes):
            return codes
        if not hurried and any(codes):
            hurried, deadline = True, min(deadline, time.monotonic() + 60)
        time.sleep(0.02)
    return [p.exitcode for p in processes]


def _kill_rank(process: multiprocessing.process.BaseProcess) -> None:
    """End a rank and all processes that it started. A rank leads a process group of its own."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.join()


def _kill_group(process: subprocess.Popen) -> None:
    """End a launcher and all processes of its group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def run_command(command: list[str], env: dict[str, str], timeout_s: float = 600) -> tuple[int, str]:
    """Run a launcher such as torchrun. Returns its exit status and all that it printed.

    After `timeout_s` the launcher gets SIGTERM first, so that it ends its ranks: they lead sessions of their own,
    which this process does not know.
    """
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=env, process_group=0
        )
        try:
            process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(40)
        finally:
            _kill_group(process)
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
    """The reports of `case`, one per rank. Fails the test, with the output of all ranks, if the case failed on one."""
    bad = [r for r in ranks if not r.cases.get(case, {}).get("ok", False)]
    if bad:
        texts = [f"rank {r.rank}: {r.cases.get(case, {}).get('error', 'never reported')}" for r in bad]
        raise AssertionError("\n".join([f"case {case} failed", *texts, *(r.report() for r in ranks)]))
    return [r.cases[case] for r in ranks]


def cases_of(worker: str) -> list[str]:
    """The names of the cases that a worker gives to `main`, in their order."""
    text = (HERE / "workers" / f"{worker}.py").read_text()
    return re.search(r"^(?:CASES = |main\(\s*)\[(.*?)\]", text, re.M | re.S)[1].replace(",", " ").split()


def over_ranks(worker: str, *runs, cases: list[str] | None = None) -> tuple:
    """A test of each case of a worker, and one that all its ranks end well, for each run. A module names both:

        test_case, test_ranks_end_well = over_ranks("sparse_sync", "spccl-2", "spccl-4")

    Args: runs: "BACKEND-RANKS", as such or in pytest.param. cases: those to run; None: all.
    """
    found = [run if hasattr(run, "marks") else pytest.param(run) for run in runs]

    params = []  # both tests get the same objects: so pytest starts the ranks once
    for run in found:
        backend, _, n_ranks = run.values[0].rpartition("-")
        settings = {"SPCCL_TEST_BACKEND": backend}
        start = functools.partial(run_ranks, worker, int(n_ranks), *(cases or ()), env=settings)
        params.append(pytest.param(start, marks=run.marks, id=run.values[0]))
    each_run = pytest.mark.parametrize("ranks", params, indirect=True)

    @each_run
    @pytest.mark.parametrize("case", cases or cases_of(worker))
    def test_case(ranks, case):
        check_case(ranks, case)

    @each_run
    def test_ranks_end_well(ranks, request):
        """On spccl always. On Gloo a process with Python DDP hooks may abort after its last line, torch's own hooks
        too: a thread of Gloo's then drops the last reference to a tensor that Python has seen, while Python is ending.
        """
        fine = {0, -6} if worker.startswith("ddp_") and "gloo" in request.node.name else {0}
        assert {r.returncode for r in ranks} <= fine, "\n".join(r.report() for r in ranks)

    return test_case, test_ranks_end_well


def torchrun(*program: str, n_ranks: int = 2, **settings: str) -> tuple[int, str]:
    """Run a program under torchrun on a free port. Returns its exit status and output."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={n_ranks}"]
    return run_command([*command, *program], dict(os.environ, OMP_NUM_THREADS="1", **settings))
