"""Every command of docs/CLUSTER.md, on two emulated hosts with Debian's /etc/hosts (root, iproute2).

The hosts are network namespaces with a host name and an /etc/hosts of their own (debian_host.py). They share the file
system. A script takes the place of ssh. Slurm's daemons run in the namespaces, with their files in a temporary folder.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the page starts programs with torch")

from spccl.bench import hosts

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/CLUSTER.md").read_text()
ENTER = [sys.executable, str(Path(__file__).with_name("debian_host.py"))]
ADDRESSES = {"192.168.1.10": hosts.address(0), "192.168.1.11": hosts.address(1)}
DEADLINE_S = 200
NO_HOSTS = hosts.why_not()
pytestmark = [pytest.mark.slow, pytest.mark.skipif(NO_HOSTS is not None, reason=f"emulated hosts: {NO_HOSTS}")]


def needs(package: str, *commands: str) -> pytest.MarkDecorator:
    missing = [c for c in commands if shutil.which(c) is None]
    return pytest.mark.skipif(bool(missing), reason=f"no {', '.join(missing)} (Debian: apt-get install {package})")


needs_mpi = needs("openmpi-bin libopenmpi-dev", "mpirun", "mpicc")
needs_slurm = needs("slurmd slurmctld slurm-client munge", "srun", "slurmd", "slurmctld", "munged")


def commands() -> list[tuple[str, str]]:
    """The page's commands in order: where ("first PC", "second PC", "both PCs") and the line."""
    found = []
    for block in re.findall(r"```sh\n(.*?)```", PAGE, re.S):
        where = ""
        for line in block.splitlines():
            if line.startswith("# "):
                where = line[2:]
            else:
                found.append((where, line))
    return found


class Pcs:
    """Two hosts, and a folder in which the page's commands run."""

    def __init__(self, names: list[str], folder: Path) -> None:
        self.names, self.folder = names, folder
        self.done: set[str] = set()  # lines of the page that have run
        agent = folder / "agent"  # in place of ssh. mpirun passes the host, then a line for its shell
        agent.write_text(
            f'#!/bin/sh\ncase $1 in {hosts.address(0)}) pc="{names[0]} pc1" ;; *) pc="{names[1]} pc2" ;; esac\n'
            f'shift\nexec {shlex.join(ENTER)} $pc sh -c "$*"\n'
        )
        agent.chmod(0o755)
        self.env = dict(
            os.environ,
            OMP_NUM_THREADS="1",
            PATH=os.path.dirname(sys.executable) + os.pathsep + os.environ["PATH"],
            OMPI_MCA_plm_rsh_agent=str(agent),
            OMPI_ALLOW_RUN_AS_ROOT="1",
            OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1",
        )
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "SPCCL_TCP_ADDR", "SPCCL_RENDEZVOUS_ADDR"):
            self.env.pop(name, None)

    def on(self, pc: int, *words: str, **more: object) -> subprocess.Popen:
        """Start a command on a host."""
        how: dict = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "env": self.env, **more}
        return subprocess.Popen(
            [*ENTER, self.names[pc], f"pc{pc + 1}", *words], cwd=self.folder, start_new_session=True, **how
        )

    def run(self, lines: list[tuple[str, str]], **env: str) -> str:
        """Run lines of the page: those of one host as one script, both hosts at the same time. Returns all output."""
        self.done.update(line for _, line in lines)
        scripts = []
        for mine in ("first PC", "second PC"):
            text = "\n".join(line for where, line in lines if where in (mine, "both PCs"))
            for theirs, ours in ADDRESSES.items():
                text = text.replace(theirs, ours)
            scripts.append(text)
        started = [self.on(pc, "sh", "-ec", text, env={**self.env, **env}) for pc, text in enumerate(scripts) if text]
        try:
            outputs = [p.communicate(timeout=DEADLINE_S)[0] for p in started]
        finally:
            for p in started:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(p.pid, signal.SIGKILL)
        assert [p.returncode for p in started] == [0] * len(started), "\n".join(outputs)
        return "\n".join(outputs)


def containing(*words: str) -> list[tuple[str, str]]:
    lines = [(where, line) for where, line in commands() if all(w in line for w in words)]
    assert lines, f"the page has no command with {words}"
    return lines


@pytest.fixture(scope="module")
def pcs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pcs")
    example = re.search(r"```python\n(# example\.py: .*?)```", (ROOT / "README.md").read_text(), re.S)
    (folder / "example.py").write_text(example[1])
    (folder / "examples").symlink_to(ROOT / "examples")
    with hosts.emulated(2, "1gbit") as names:
        yield Pcs(names, folder)


@pytest.fixture(scope="module")
def program(pcs):
    """The folder has all_reduce_mpi."""
    lines = containing("spccl=") + containing("mpicc ")
    pcs.run([("first PC", line) for _, line in lines])  # both hosts have one file system


def check_example(output: str) -> None:
    for rank in range(2):
        assert f"rank {rank}: 167773 nonzeros, each 2" in output, output


def check_program(output: str) -> None:
    for rank in range(2):
        assert f"rank {rank} of 2: 0 wrong of 4194304; to rank {1 - rank}: tcp: other host" in output, output


def test_torchrun(pcs):
    output = pcs.run(containing("torchrun "), SPCCL_LOG="info")
    check_example(output)
    links = f"link to rank 1: tcp: other host ({hosts.address(0)} to {hosts.address(1)})"
    assert links in output, output


@needs_mpi
def test_mpirun(pcs, program):
    page = re.search(r"\n```\n(rank 0 of 2.*?)```", PAGE, re.S)[1]
    for theirs, ours in ADDRESSES.items():
        page = page.replace(theirs, ours)
    [plain] = [c for c in containing("mpirun -n 2") if c[1].endswith(".11 ./all_reduce_mpi")]
    assert sorted(pcs.run([plain]).splitlines()) == sorted(page.splitlines())
    [chosen] = containing("mpirun -n 2", "SPCCL_TCP_ADDR")
    output = pcs.run([chosen])
    check_program(output)
    assert "info: link to rank" in output, output


@needs_mpi
def test_mpirun_of_torch(pcs):
    check_example(pcs.run(containing("mpirun ", "example.py")))


# ---- Slurm ----

SLURM_CONF = """\
ClusterName=two
SlurmctldHost=pc1({address0})
AuthInfo=socket={folder}/munge.socket
SlurmUser=root
StateSaveLocation={folder}
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/linear
NodeName=pc1 NodeAddr={address0} CPUs=2
NodeName=pc2 NodeAddr={address1} CPUs=2
PartitionName=all Nodes=pc1,pc2 Default=YES
"""


def wait_for(ready, what: str, folder: Path) -> None:
    end = time.monotonic() + 60
    while not ready():
        if time.monotonic() > end:
            logs = "\n".join(f"--- {p.name}\n{p.read_text()[-2000:]}" for p in sorted(folder.glob("*.log")))
            pytest.fail(f"{what} after 60 s\n{logs}")
        time.sleep(0.1)


@pytest.fixture(scope="module")
def slurm(pcs):
    """Slurm over the two hosts: a controller on pc1, a daemon on each, munge for both. Yields the settings."""
    folder = pcs.folder / "slurm"
    folder.mkdir()
    (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
    text = SLURM_CONF.format(folder=folder, address0=hosts.address(0), address1=hosts.address(1))
    (folder / "slurm.conf").write_text(text)
    (folder / "munge.key").write_bytes(os.urandom(128))
    (folder / "munge.key").chmod(0o400)
    env = {**pcs.env, "SLURM_CONF": str(folder / "slurm.conf")}
    names = {"socket": "socket", "key-file": "key", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
    files = [f"--{option}={folder}/munge.{name}" for option, name in names.items()]
    with contextlib.ExitStack() as stack:

        def start(pc: int, *words: str) -> None:
            log = stack.enter_context(open(folder / f"{words[0]}-{pc}.log", "w"))
            daemon = pcs.on(pc, *words, stdout=log, env=env)
            stack.callback(daemon.wait)
            stack.callback(os.killpg, daemon.pid, signal.SIGKILL)

        start(0, "munged", "--foreground", "--force", *files)
        wait_for((folder / "munge.socket").exists, "no munge", folder)
        start(0, "slurmctld", "-D")
        for pc in range(2):
            start(pc, "slurmd", "-D", "-N", f"pc{pc + 1}")

        def both_idle() -> bool:
            with pcs.on(0, "sinfo", "-h", "-o", "%t %D", env=env) as asked:
                return "idle 2" in asked.communicate(timeout=60)[0]

        wait_for(both_idle, "no two idle nodes", folder)
        yield {"SLURM_CONF": env["SLURM_CONF"]}


@needs_slurm
def test_srun(pcs, slurm):
    check_example(pcs.run(containing("srun ", "example.py"), **slurm))


@needs_slurm
@needs_mpi
def test_salloc(pcs, program, slurm):
    check_program(pcs.run(containing("salloc "), **slurm))


# ---- the page itself ----


def test_every_command_was_run(pcs, request):
    """A new command of the page needs a test."""
    ran = [item for item in request.session.items if item.fspath == request.node.fspath]
    if len(ran) < 7 or shutil.which("srun") is None or shutil.which("mpirun") is None:
        pytest.skip("not all tests of this file ran")
    assert pcs.done == {line for _, line in commands()}


def test_texts_of_failures():
    """The texts of the table are those of the sources."""
    table = PAGE[PAGE.index("## What a failure looks like") :]
    rows = re.findall(r"^\| (`[^|]*) \|", table, re.M)
    sources = [p.read_text() for p in [*(ROOT / "csrc").rglob("*.c"), *(ROOT / "python").rglob("*.py")]]
    sources = [re.sub(r'"\s*\n\s*f?"', "", text) for text in sources]  # texts that go over several lines
    texts = [text for row in rows if "(of torch)" not in row for text in re.findall("`([^`]*)`", row)]
    assert len(texts) >= 9
    for text in texts:
        assert any(text in source for source in sources), f"no source has the text {text!r}"
