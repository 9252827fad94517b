"""The environment that `make` works in: paths, stamps, commands, .venv, and spccl installed in it.

It uses only Python's standard library, because it runs before anything is installed. No step runs twice: each
has a stamp file with a hash of all that the step depends on.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
BUILD = ROOT / "build"
LOGS = BUILD / "logs"
DIST = BUILD / "dist"  # the wheel that is installed in .venv
REQUIREMENTS = ROOT / "tools" / "requirements.txt"
FRAMEWORKS = ROOT / "tools" / "frameworks.txt"
PACKAGE_SOURCES = ("cmake", "csrc", "python", "CMakeLists.txt", "pyproject.toml", "libspccl.map", "README.md")
MIN_PYTHON, MIN_CMAKE = (3, 11), (3, 22)


class EnvError(Exception):
    """Something that the set-up needs is missing, or failed. The text says what to do."""


# Per thread: .lines printed since gather_output() began, .cpu_s of the thread's commands.
_gathered = threading.local()


def say(text: str = "") -> None:
    lines = getattr(_gathered, "lines", None)
    if lines is None:
        print(text, flush=True)
    else:
        lines.append(text)


def cpu_seconds() -> float:
    """CPU time of all commands that this thread has run."""
    return getattr(_gathered, "cpu_s", 0.0)


@contextlib.contextmanager
def gather_output() -> Iterator[list[str]]:
    """Collect what this thread would print in the block. Gives the list of lines."""
    _gathered.lines = []
    try:
        yield _gathered.lines
    finally:
        _gathered.lines = None


# ---- stamps ----------------------------------------------------------------------------------------------


def files_under(paths: Iterable[str]) -> list[Path]:
    """All files at and under `paths` (relative to ROOT), sorted, without caches."""
    found = []
    for name in paths:
        top = ROOT / name
        walk = [top] if top.is_file() else sorted(top.rglob("*"))
        found += [p for p in walk if p.is_file() and "__pycache__" not in p.parts]
    return found


def tracked_files() -> list[Path]:
    """The files of this checkout that git does not ignore; without git, all in the folders of sources."""
    command = ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    asked = subprocess.run(command, capture_output=True, text=True) if (ROOT / ".git").exists() else None
    if asked is None or asked.returncode != 0:
        return files_under(["CMakeLists.txt", "bench", "cmake", "csrc", "docs", "examples", "python", "tests", "tools"])
    return [p for name in sorted(asked.stdout.split("\0")) if name and (p := ROOT / name).is_file()]


def digest(*parts: object) -> str:
    """Hash of the parts: of a path its name, mode and content, of other values their text."""
    h = hashlib.sha256()
    for part in parts:
        if isinstance(part, Path):
            h.update(f"{part}\0{part.stat().st_mode:o}\0".encode())
            h.update(part.read_bytes())
        else:
            h.update(str(part).encode())
        h.update(b"\0")
    return h.hexdigest()


def sources() -> str:
    """Hash of every file that git knows: what a test reads."""
    return digest(*tracked_files())


def is_stamped(stamp: Path, key: str) -> bool:
    return stamp.is_file() and stamp.read_text() == key


def write_stamp(stamp: Path, key: str) -> None:
    stamp.parent.mkdir(parents=True, exist_ok=True)
    stamp.write_text(key)


# ---- running commands ------------------------------------------------------------------------------------


def child_env(**extra: str) -> dict[str, str]:
    """The environment of every command: .venv is first on PATH, and no other site-packages are used."""
    foreign = ("PYTHONPATH", "PYTHONHOME", "MAKEFLAGS", "DESTDIR")
    env = {k: v for k, v in os.environ.items() if k not in foreign}
    env["PATH"] = f"{VENV / 'bin'}{os.pathsep}{env.get('PATH', os.defpath)}"
    env["VIRTUAL_ENV"] = str(VENV)
    env.update(PYTHONNOUSERSITE="1", PYTHONUNBUFFERED="1")
    env.update(PIP_DISABLE_PIP_VERSION_CHECK="1", PIP_NO_INPUT="1")
    if shutil.which("ccache"):  # several builds compile the same files with the same options
        env.update(CMAKE_C_COMPILER_LAUNCHER="ccache", CMAKE_CXX_COMPILER_LAUNCHER="ccache")
        env.setdefault("CCACHE_DIR", str(BUILD / "ccache"))
    env.update(extra)
    return env


def run(
    cmd: Sequence[object],
    log: str,
    *,
    show: bool = False,
    env: dict[str, str] | None = None,
    cwd: Path = ROOT,
    timeout_s: float = 1800,
) -> tuple[int, list[str]]:
    """Run `cmd`. Its output goes to build/logs/<log>.log; with `show`, to the terminal too.

    Returns: exit status, lines of output. After `timeout_s` the whole process group is killed, and the status is
    124.
    """
    LOGS.mkdir(parents=True, exist_ok=True)
    argv = [str(c) for c in cmd]
    lines: list[str] = []
    with open(LOGS / f"{log}.log", "a") as out:
        out.write(f"$ {' '.join(argv)}\n")
        proc = subprocess.Popen(
            argv,
            cwd=cwd,
            env=env or child_env(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,  # Linux shares the cores equally between sessions: so stages get equal parts
        )
        _children.add(proc)
        expired = threading.Event()
        timer = threading.Timer(timeout_s, lambda: (expired.set(), _kill_group(proc)))
        timer.start()
        try:
            assert proc.stdout is not None
            for line in proc.stdout:
                out.write(line)
                lines.append(line.rstrip("\n"))
                if show:
                    say(line.rstrip("\n"))
            _, wait_status, usage = os.wait4(proc.pid, 0)
            status = proc.returncode = os.waitstatus_to_exitcode(wait_status)
            _gathered.cpu_s = cpu_seconds() + usage.ru_utime + usage.ru_stime
        finally:
            timer.cancel()
            _kill_group(proc)  # end the command's children too, whether it ended, failed or was interrupted
            _children.discard(proc)
        if expired.is_set():
            status = 124
            lines.append(f"{argv[0]}: killed after {timeout_s:.0f} s")
        out.write(f"exit status {status}\n")
    return status, lines


_children: set[subprocess.Popen[str]] = set()  # running commands of all threads


def kill_children() -> None:
    """Kill every running command that run() has started."""
    for proc in list(_children):
        _kill_group(proc)


def _kill_group(proc: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(proc.pid, signal.SIGKILL)


def must_run(what: str, cmd: Sequence[object], log: str, **kwargs: object) -> list[str]:
    """Run `cmd`; on failure raise EnvError with the end of its output."""
    status, lines = run(cmd, log, **kwargs)  # type: ignore[arg-type]
    if status != 0:
        tail = [] if kwargs.get("show") else lines[-40:]
        last = f"{what}: exit status {status}; all output is in build/logs/{log}.log"
        raise EnvError("\n".join([*tail, last]))
    return lines


# ---- tools of the machine --------------------------------------------------------------------------------


def has_gpu() -> bool:
    """True if there is an NVIDIA driver with a GPU. Looks only at device files, so it needs no library."""
    return Path("/dev/nvidiactl").exists() and any(Path("/dev").glob("nvidia[0-9]*"))


def find_nvcc() -> str | None:
    """The CUDA compiler. csrc/kernels/cuda/cuda.cmake searches the same paths."""
    homes = (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda")
    paths = [os.environ.get("CUDACXX"), shutil.which("nvcc"), *(f"{home}/bin/nvcc" for home in homes if home)]
    return next((path for path in paths if path and shutil.which(path)), None)


def cuda_here() -> str:
    """SPCCL_CUDA for builds that only this machine runs: OFF without a GPU, to save the time of nvcc."""
    return "AUTO" if has_gpu() else "OFF"


def apt_prefix() -> list[str] | None:
    """The command for apt-get; None if this user is not root and has no sudo without a password."""
    if os.environ.get("NO_APT") or not shutil.which("apt-get"):
        return None
    if os.geteuid() == 0:
        return ["apt-get"]
    sudo = shutil.which("sudo")
    if sudo is None:
        return None
    asked = subprocess.run([sudo, "-n", "true"], capture_output=True, stdin=subprocess.DEVNULL)
    return [sudo, "-n", "apt-get"] if asked.returncode == 0 else None


_apt_lock = threading.Lock()  # only one apt-get can run at a time


def apt_install(packages: Sequence[str], why: str) -> bool:
    """Install Debian packages. Returns False if this user may not, or if it failed."""
    apt = apt_prefix()
    if apt is None:
        return False
    say(f"set-up: apt-get install {' '.join(packages)} ({why})")
    env = child_env(DEBIAN_FRONTEND="noninteractive")
    with _apt_lock:
        run([*apt, "update"], "apt", env=env)
        return run([*apt, "install", "-y", "--no-install-recommends", *packages], "apt", env=env)[0] == 0


def system_cmake_ok() -> bool:
    """True if a cmake of MIN_CMAKE or later is on PATH."""
    cmake = shutil.which("cmake")
    if cmake is None:
        return False
    text = subprocess.run([cmake, "--version"], capture_output=True, text=True).stdout
    found = re.search(r"version (\d+)\.(\d+)", text)
    return found is not None and tuple(map(int, found.groups())) >= MIN_CMAKE


def check_machine() -> None:
    """Raise an EnvError if Python or the compilers are too old or missing."""
    if sys.version_info < MIN_PYTHON:
        raise EnvError(
            f"Python {sys.version.split()[0]} at {sys.executable}: spccl needs 3.11 or newer: "
            "make PYTHON=python3.11 ..."
        )
    missing = [tool for tool in ("gcc", "g++") if shutil.which(tool) is None]
    if missing and not apt_install(["build-essential"], "no " + " and no ".join(missing)):
        raise EnvError(f"not found: {', '.join(missing)} (Debian: apt-get install build-essential)")
    if shutil.which("ccache") is None:
        apt_install(["ccache"], "to compile no file twice")
    if not _has_python_headers() and not apt_install(["python3-dev"], "no Python.h"):
        raise EnvError(
            f"no Python.h for {sys.executable}\n"
            "  Debian: apt-get install python3-dev\n"
            "  or use a Python that has it: make PYTHON=..."
        )


def _has_python_headers() -> bool:
    import sysconfig

    return Path(sysconfig.get_path("include"), "Python.h").is_file()


# ---- .venv -----------------------------------------------------------------------------------------------


def read_specs(path: Path) -> list[str]:
    lines = (line.split("#")[0].strip() for line in path.read_text().splitlines())
    return [line for line in lines if line]


def requirements() -> list[str]:
    specs = read_specs(REQUIREMENTS)
    torch = os.environ.get("TORCH_SPEC")
    if torch:
        specs = [torch if spec.startswith("torch==") else spec for spec in specs]
    return specs if system_cmake_ok() else [*specs, "cmake>=3.22"]


def make_venv(path: Path) -> None:
    """Make a new virtual environment at `path`; an old one is replaced."""
    if subprocess.run([sys.executable, "-c", "import venv, ensurepip"], capture_output=True).returncode != 0:
        package = f"python{sys.version_info[0]}.{sys.version_info[1]}-venv"
        if not apt_install([package], "Python has no ensurepip"):
            raise EnvError(
                f"{sys.executable} cannot make virtual environments: it has no ensurepip\n"
                f"  Debian: apt-get install {package}\n"
                "  or use a Python that has it: make PYTHON=..."
            )
    must_run("making the virtual environment", [sys.executable, "-m", "venv", "--clear", path], "setup")


def ensure_venv() -> str:
    """Install tools/requirements.txt in .venv. Returns a hash of the requirements."""
    specs = requirements()
    key = digest(*specs, sys.version, os.path.realpath(sys.executable), str(VENV))
    stamp = VENV / ".stamp"
    if not is_stamped(stamp, key):
        check_machine()
        say("set-up: .venv with torch and the test tools (once; a few minutes)")
        start = time.monotonic()
        make_venv(VENV)
        install = [VENV / "bin/python", "-m", "pip", "install", "--no-compile", *specs]
        must_run("pip install", install, "setup", timeout_s=3600)
        write_stamp(stamp, key)
        say(f"set-up: .venv is ready ({time.monotonic() - start:.0f} s)")
    return key


def ensure_compilers() -> None:
    """What C needs. The stage "set-up" makes .venv while C compiles, unless CMake or ninja must come from .venv."""
    if not VENV.exists():
        check_machine()
    if not system_cmake_ok() or shutil.which("ninja") is None:
        ensure_venv()


def ensure_frameworks() -> str | None:
    """Install tools/frameworks.txt in .venv. Returns why that failed; None if it did not.

    A failure, such as a registry that does not answer, is no error: the tests of the frameworks are then skipped.
    """
    key = digest(ensure_venv(), *read_specs(FRAMEWORKS))
    stamp = VENV / ".stamp-frameworks"
    if is_stamped(stamp, key):
        return None
    say("set-up: accelerate, transformers and lightning for their tests (once)")
    start = time.monotonic()
    options = ["--no-deps", "--no-compile", "--only-binary=:all:", "--retries=1"]  # --no-deps: .venv keeps its torch
    install = [VENV / "bin/python", "-m", "pip", "install", *options, "-r", FRAMEWORKS]
    status, lines = run(install, "frameworks", timeout_s=180)
    if status != 0:
        errors = [line for line in lines if line.startswith("ERROR")]
        reason = f"pip install -r tools/frameworks.txt: {errors[-1] if errors else f'exit status {status}'}"
        say(f"set-up: {reason}: their tests will be skipped; all output is in build/logs/frameworks.log")
        return reason
    write_stamp(stamp, key)
    say(f"set-up: the frameworks are installed ({time.monotonic() - start:.0f} s)")
    return None


def ensure_spccl() -> None:
    """Install spccl in .venv, with the glue for its torch; only if a source changed.

    The build folder stays, so only files that depend on a change are compiled again.
    """
    venv_key = ensure_venv()
    key = digest(venv_key, cuda_here(), *files_under(PACKAGE_SOURCES))
    stamp = VENV / ".stamp-spccl"
    if is_stamped(stamp, key):
        return
    stamp.unlink(missing_ok=True)
    say("set-up: building spccl into .venv")
    start = time.monotonic()
    python = VENV / "bin/python"
    # SPCCL_WERROR: the options of the stage gcc, so that ccache has its files.
    defines = ["SPCCL_PREBUILD_TORCH=ON", "SPCCL_WERROR=ON", f"SPCCL_CUDA={cuda_here()}"]
    wheel = build_wheel(python, "wheel", defines, DIST)
    install = [python, "-m", "pip", "install", "--no-deps", "--force-reinstall", wheel]
    must_run("pip install", install, "spccl")
    write_stamp(stamp, key)
    say(f"set-up: spccl is installed ({time.monotonic() - start:.0f} s)")


def build_wheel(
    python: Path, name: str, defines: Sequence[str], folder: Path, timeout_s: float = 1800
) -> Path:
    """Build the wheel of this tree with `python`, which has the build tools. Returns its path in `folder`.

    build/<name> stays, so only files that depend on a change are compiled again.
    """
    shutil.rmtree(folder, ignore_errors=True)
    options = [f"build-dir={BUILD / name}", *(f"cmake.define.{define}" for define in defines)]
    settings = [f"--config-settings={option}" for option in options]
    flags = ["-v", "--no-build-isolation", "--no-deps", "--wheel-dir", folder]
    parts = {"CMAKE_BUILD_PARALLEL_LEVEL": str(os.cpu_count() or 1), "VIRTUAL_ENV": str(python.parent.parent)}
    env = child_env(**parts)
    env["PATH"] = f"{python.parent}{os.pathsep}{env['PATH']}"
    command = [python, "-m", "pip", "wheel", *flags, *settings, ROOT]
    must_run("pip wheel .", command, f"build-{name}", env=env, timeout_s=timeout_s)
    (wheel,) = folder.glob("spccl-*.whl")
    return wheel
