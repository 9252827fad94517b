"""Finds or compiles the torch glue, the C++ between libspccl and the torch that is running, and loads it.

The glue is one shared library for each torch minor version and machine; it contains no Python and no CUDA.
`load` takes the first of these that exists:
  1. `libspccl_torch-<major.minor>.so` in the package
  2. the library in the cache: $XDG_CACHE_HOME/spccl, else ~/.cache/spccl. If other users may write there: in a
     folder of this user beside the temporary files
  3. a new library, compiled by the system's C++ compiler into the cache
So the glue is compiled once for each pair of torch and spccl versions. SPCCL_TORCH_GLUE forces one way:
`prebuilt`, `compile`, or the path of a library. Imports torch only to load the library. Source: docs/TORCH.md,
section "The glue".
"""

import contextlib
import ctypes
import fcntl
import functools
import hashlib
import os
import platform
import re
import shlex
import shutil
import stat
import struct
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from pathlib import Path

from . import _torch_settings

PACKAGE = Path(__file__).resolve().parent
SOURCES = PACKAGE / "c10d_src"
HEADER_FOLDER = PACKAGE / "include"
LIBRARY = PACKAGE / "libspccl.so"
COMPILE_TIMEOUT_S = 600
OLDEST_TORCH = (2, 9)
PROC = Path("/proc")
_FLAGS = ("-std=c++20", "-O2", "-fPIC", "-shared", "-fvisibility=hidden")

_lock = threading.Lock()
_loaded: Path | None = None
_imported_s = time.time()
_last_failure_s = 0.0  # time.time() when compiling last failed in this process


class GlueError(RuntimeError):
    """The glue for this torch could not be compiled or loaded; the text says why and what to do."""


def load() -> Path:
    """Make `torch.ops.spccl` callable; the first call finds or compiles the glue. Threads: any.

    Returns: the library that is loaded.
    Raises: GlueError.
    """
    global _loaded
    with _lock:
        if _loaded is None:
            import torch

            check_torch_version(torch.__version__)
            path = _choose(torch)
            _check_elf(path)
            ctypes.CDLL(str(LIBRARY))  # by its full path, so that the glue finds it by name
            try:
                torch.ops.load_library(str(path))
            except OSError as error:
                raise GlueError(
                    f"{path}: {error}. It was made for another torch or another machine: delete it, then try again"
                ) from error
            _check(torch, path)
            _loaded = path
        return _loaded


def check_torch_version(version: str) -> None:
    """Refuse a torch that is too old for the glue. A torch newer than the tested ones is accepted: the compiler
    then decides.

    Raises: GlueError.
    """
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers and (int(numbers[1]), int(numbers[2])) < OLDEST_TORCH:
        wanted = ".".join(map(str, OLDEST_TORCH))
        raise GlueError(
            f'spccl: this is torch {version}; backend="spccl" needs torch {wanted} or later: '
            f'pip install "torch>={wanted}"'
        )


def _choose(torch) -> Path:
    """The library to load. Compiles it if there is none."""
    forced = _torch_settings.GLUE.text()
    prebuilt = PACKAGE / f"libspccl_torch-{_minor(torch.__version__)}.so"
    if forced == "prebuilt" or (forced == "auto" and prebuilt.is_file()):
        if not prebuilt.is_file():
            raise GlueError(f"SPCCL_TORCH_GLUE=prebuilt, but {prebuilt} does not exist; unset it to compile")
        return prebuilt
    if forced in ("auto", "compile"):
        return _compiled(torch)
    if Path(forced).is_file():
        return Path(forced).resolve()
    raise GlueError(f"SPCCL_TORCH_GLUE={forced!r}: wanted auto, prebuilt, compile, or the path of a library")


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def _check(torch, path: Path) -> None:
    """Refuse a library that was compiled for another torch: its tables of virtual functions may differ."""
    for_torch, header, library = torch.ops.spccl.build_info().split(" ")
    if _minor(for_torch) != _minor(torch.__version__):
        raise GlueError(
            f"{path} was compiled for torch {for_torch}, this is torch {torch.__version__}: delete that file, then "
            "try again"
        )
    if header != library:
        raise GlueError(f"{path} was compiled for spccl {header}, {LIBRARY} is {library}: reinstall spccl")


# ---- compiling ---------------------------------------------------------------------------------------------


def cache_folder() -> Path:
    """The folder of compiled glue, unless other users may write there: $XDG_CACHE_HOME/spccl, else ~/.cache/spccl."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base and os.path.isabs(base) else Path.home() / ".cache") / "spccl"


@functools.cache
def _library_folder(cache: Path, key: str) -> Path:
    """The folder of a library: in `cache`, or in a folder of this user alone if others could put libraries there.

    Raises: GlueError if others may write to both.
    """
    why = _other_writer(cache, key)
    if why is None:
        return cache / key
    own = Path(tempfile.gettempdir()) / f"spccl-{os.geteuid()}"
    why_not = _other_writer(own, key)
    if why_not is not None:
        raise GlueError(
            f"no folder is safe for the compiled torch glue: {why}; {why_not}. Set XDG_CACHE_HOME to a folder to "
            "which nobody else can write"
        )
    warnings.warn(
        f"spccl: {why}, so that code of others could be loaded from there. The compiled torch glue is kept in {own} "
        "instead; set XDG_CACHE_HOME to a folder to which nobody else can write",
        RuntimeWarning,
        stacklevel=2,
    )
    return own / key


def _other_writer(cache: Path, key: str) -> str | None:
    """Who else could put a library into the folder `key` of `cache`, as a clause; None if nobody could. root may.

    `cache` and `key` belong to this user or root, and others may not write there: a umask may have allowed it, so
    this takes it from them. They may not rename things in the folder that holds `cache` either.
    """
    me = os.geteuid()
    try:
        parent = cache.parent.stat()
        if parent.st_uid not in (0, me):
            return f"{cache.parent} belongs to user {parent.st_uid}"
        others = 0o002 if parent.st_uid == me else 0o022  # many systems give each user a group
        if parent.st_mode & others and not parent.st_mode & stat.S_ISVTX:
            return f"other users may write to {cache.parent}"
        for folder in (cache, cache / key):
            for status in (folder.lstat(), folder.stat()):  # it may be a link
                if status.st_uid not in (0, me):
                    return f"{folder} belongs to user {status.st_uid}"
            if status.st_mode & 0o022 and status.st_uid == me:
                with contextlib.suppress(OSError):
                    folder.chmod(0o700)
            if folder.stat().st_mode & 0o022:
                return f"other users may write to {folder}"
    except OSError:  # it is not there, and _make_folder makes it; or that fails, and says why
        pass
    return None


def _make_folder(folder: Path) -> None:
    """Make a folder, and missing ones above it, for this user alone."""
    if not folder.parent.exists():
        _make_folder(folder.parent)
    folder.mkdir(mode=0o700, exist_ok=True)


def _key(torch, compiler: str) -> str:
    """The name of the library's folder in the cache. It contains all that the compiled code depends on, the
    machine included."""
    digest = hashlib.sha256()
    files = sorted(SOURCES.glob("*.[ch]pp"))
    if SOURCES / "glue.cpp" not in files or not (HEADER_FOLDER / "spccl.h").is_file():
        raise GlueError(f"{SOURCES} or {HEADER_FOLDER} is incomplete: reinstall spccl (pip install --force-reinstall)")
    for file in [*files, HEADER_FOLDER / "spccl.h"]:
        digest.update(f"{file.name}\0{file.stat().st_size}\0".encode())
        digest.update(file.read_bytes())
    digest.update("\0".join([compiler, *_FLAGS]).encode())
    git = (torch.version.git_version or "")[:12]
    abi = int(torch.compiled_with_cxx11_abi())
    return f"torch-{torch.__version__}-{git}-{platform.machine()}-abi{abi}-{digest.hexdigest()[:16]}"


def _compiler() -> str:
    """The C++ compiler: $CXX, else the first of c++, g++, clang++ on PATH."""
    named = os.environ.get("CXX")
    candidates = [named] if named else ["c++", "g++", "clang++"]
    for candidate in candidates:
        if shutil.which(shlex.split(candidate)[0]):
            return candidate
    raise GlueError(
        f'torch.distributed\'s backend "spccl" has to be compiled once for this torch, and no C++ compiler was found '
        f"(looked for {', '.join(candidates)}). Install one (Debian: apt-get install g++; conda: gxx), or set CXX, or "
        f"install spccl with the glue in it, from a clone of the repository: pip install --no-build-isolation "
        f"-C cmake.define.SPCCL_PREBUILD_TORCH=ON ."
    )


def cached_library(torch) -> Path:
    """The path in the cache of the library for this torch. The file need not exist."""
    folder = _library_folder(cache_folder(), _key(torch, _compiler_for_key()))
    return folder / f"libspccl_torch-{_minor(torch.__version__)}.so"


def _compiled(torch) -> Path:
    """The library for this torch from the cache; compiled first if it is missing or damaged."""
    library = cached_library(torch)
    if is_whole(library):
        return library
    folder = library.parent
    try:
        _make_folder(folder)
        why = _other_writer(folder.parent, folder.name)  # another user may have been faster
        if why is not None:
            raise GlueError(f"{why}: remove it, or set XDG_CACHE_HOME to a folder to which nobody else can write")
        with open(folder / "lock", "w") as lock:
            _wait_for_lock(lock, folder)
            if not is_whole(library):
                _compile_once(torch, library)
    except OSError as error:
        raise GlueError(
            f"cannot write the compiled torch glue to {folder}: {error}. Set XDG_CACHE_HOME to a folder that can be "
            f"written"
        ) from error
    return library


def _compile_once(torch, library: Path) -> None:
    """Compile. If another rank of this host has just failed to compile, raise its failure instead. Needs the lock.

    All ranks of a host compile the same, so all would fail as the first one did. A failure that is younger than
    this process counts as one of the same job. A process whose own attempt failed tries again at the next call.
    """
    global _last_failure_s
    failure = _failure_file(library)
    for leftover in library.parent.glob("*.tmp"):  # of a process that was killed: we hold the lock
        leftover.unlink()
    try:
        failed_s, text = _read_failure(failure)
        if failed_s > max(_process_start_s(), _last_failure_s):
            raise GlueError(f"another process of this job has just tried and failed: {text}")
        failure.unlink(missing_ok=True)
        try:
            _compile(torch, _compiler(), library)
        except GlueError as error:
            failure.write_text(f"{time.time()}\n{error}")
            raise
        for old in library.parent.glob("*.failed"):  # of all hosts: they find the library now
            old.unlink(missing_ok=True)
    except GlueError:
        _last_failure_s = time.time()
        raise


def _failure_file(library: Path) -> Path:
    """The file that notes a failed compilation. Each host has its own: hosts that share a cache may have different
    compilers. Hosts of the same name differ in the kernel's boot id."""
    try:
        boot = (PROC / "sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = ""
    host = hashlib.sha256(f"{platform.node()}\0{boot}".encode()).hexdigest()[:16]
    return library.with_name(f"{library.stem}-{host}.failed")


def _read_failure(failure: Path) -> tuple[float, str]:
    """When compiling failed on this host, as this host's time.time() counts, and the error; (0, "") if it did not.

    The time is in the file because a file server may have another clock.
    """
    try:
        failed_s, _, text = failure.read_text().partition("\n")
        return float(failed_s), text
    except (FileNotFoundError, ValueError):
        return 0.0, ""


def _process_start_s() -> float:
    """When this process started, as time.time() counts; when it imported this file if /proc cannot be read.

    Source: proc(5), field 22 of /proc/pid/stat.
    """
    try:
        ticks = int((PROC / "self/stat").read_text().rpartition(")")[2].split()[19])
        uptime_s = float((PROC / "uptime").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return _imported_s
    return time.time() - (uptime_s - ticks / os.sysconf("SC_CLK_TCK"))


def _compiler_for_key() -> str:
    """$CXX is part of the key. The default compiler is not: a machine without a compiler finds the cached library."""
    return os.environ.get("CXX", "")


def _wait_for_lock(lock, folder: Path) -> None:
    """Lock the folder. Ranks of this host wait here while the first one compiles."""
    deadline = time.monotonic() + COMPILE_TIMEOUT_S
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise GlueError(
                    f"another process has held {folder / 'lock'} for {COMPILE_TIMEOUT_S} s: end that process, then "
                    "try again"
                ) from None
            time.sleep(0.05)


def command(torch, compiler: str, output: Path) -> list[str]:
    """The command line that compiles the glue to `output`."""
    home = Path(torch.__path__[0])
    return [
        *shlex.split(compiler),
        *_FLAGS,
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        *(f"-isystem{home / 'include' / sub}" for sub in ("", "torch/csrc/api/include")),
        f"-I{HEADER_FOLDER}",
        str(SOURCES / "glue.cpp"),
        f"-L{home / 'lib'}",
        "-lc10",
        "-ltorch_cpu",
        str(LIBRARY),
        "-o",
        str(output),
    ]


def _compile(torch, compiler: str, library: Path) -> None:
    """Compile into a file beside `library`, write its digest, then rename it: no process sees a partial library."""
    handle, name = tempfile.mkstemp(dir=library.parent, suffix=".so.tmp")
    os.close(handle)
    argv = command(torch, compiler, Path(name))
    print(f"spccl: compiling the torch glue once for torch {torch.__version__} (about 20 s) ...", file=sys.stderr)
    try:
        result = _run(argv)
        if result.returncode != 0:
            raise GlueError(_explain(argv, result.stderr))
        os.chmod(name, 0o755)
        data = Path(name).read_bytes()
        _replace(_digest_file(library), f"{len(data)} {hashlib.sha256(data).hexdigest()}\n".encode())
        _flush_to_disk(name)
        os.replace(name, library)
    finally:
        Path(name).unlink(missing_ok=True)


def _run(argv: list[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(argv, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise GlueError(f"compiling the torch glue took over {COMPILE_TIMEOUT_S} s: {shlex.join(argv)}") from None
    except OSError as error:
        raise GlueError(f"cannot run the C++ compiler {argv[0]}: {error}; set CXX to one that runs") from error


def _replace(file: Path, data: bytes) -> None:
    """Replace the content of `file`. After a crash of the machine it holds the old content or `data`, no mix."""
    part = file.with_name(file.name + ".tmp")
    part.write_bytes(data)
    _flush_to_disk(part)
    os.replace(part, file)


def _flush_to_disk(path: Path | str) -> None:
    with open(path, "rb") as file:
        os.fsync(file.fileno())


# ---- is a library whole? -----------------------------------------------------------------------------------


def _digest_file(library: Path) -> Path:
    """Holds size and SHA-256 of a library in the cache."""
    return library.with_name(library.name + ".sha256")


def is_whole(library: Path) -> bool:
    """Whether a library of the cache exists, is as it was compiled, and nobody else can have written it. Loading a
    truncated library would end this process by SIGBUS."""
    try:
        status = library.stat()
        if status.st_uid not in (0, os.geteuid()) or status.st_mode & 0o022:
            return False
        size, digest = _digest_file(library).read_text().split()
        data = library.read_bytes()
    except (OSError, ValueError):
        return False
    return len(data) == int(size) and hashlib.sha256(data).hexdigest() == digest


def _check_elf(path: Path) -> None:
    """Refuse a file that is no ELF library of 64 bits, or that is truncated. The section headers are at the end of
    such a file, so a file that ends before them is truncated. Source: elf(5).

    Raises: GlueError.
    """
    with open(path, "rb") as file:
        header = file.read(64)
        size = file.seek(0, os.SEEK_END)
    wanted = 64
    if len(header) == 64 and header[:5] == b"\x7fELF\x02":
        table, entry_size, n_entries = struct.unpack_from("<Q", header, 40)[0], *struct.unpack_from("<HH", header, 58)
        wanted = table + entry_size * n_entries
    elif len(header) == 64:
        raise GlueError(f"{path} is not a library of 64 bits (ELF): delete it, then try again")
    if size < wanted:
        raise GlueError(f"{path} has {size} bytes, wanted at least {wanted}: it was cut off; delete it, then try again")


def _explain(argv: list[str], output: str) -> str:
    """The text of a failed compilation: the usual reason, the command, the compiler's last 30 lines."""
    hint = ""
    if "c++20" in output:
        hint = " The compiler is too old for C++20: use g++ 11 or clang 14 or later (set CXX)."
    elif "No such file" in output and "torch" in output:
        hint = " This torch came without its C++ headers: install the official wheel."
    tail = "\n".join(output.strip().splitlines()[-30:])
    return f"the torch glue did not compile.{hint}\ncommand: {shlex.join(argv)}\n{tail}"
