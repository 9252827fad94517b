"""Finds, or compiles once, the C++ glue between this spccl and the torch that is running, and loads it.

The glue is one shared library per torch minor version, without Python or CUDA in it. Tried in order:
`libspccl_torch-<major.minor>.so` in the package; the cache; the system's C++ compiler, whose result goes into
the cache ($XDG_CACHE_HOME/spccl or ~/.cache/spccl), so that it is needed once per torch and spccl version.
SPCCL_TORCH_GLUE forces one way: `prebuilt`, `compile`, or the path of a library. Knows torch's folders, but
imports torch only to load the library. Source: docs/TORCH.md, section "The glue".
"""

import ctypes
import fcntl
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent
SOURCES = PACKAGE / "c10d_src"
HEADER_FOLDER = PACKAGE / "include"
LIBRARY = PACKAGE / "libspccl.so"
COMPILE_TIMEOUT_S = 600
_FLAGS = ("-std=c++20", "-O2", "-fPIC", "-shared", "-fvisibility=hidden")

_lock = threading.Lock()
_loaded: Path | None = None


class GlueError(RuntimeError):
    """The glue for this torch could not be made or loaded; the text says why and what to do."""


def load() -> Path:
    """Make `torch.ops.spccl` callable; the first call finds or compiles the glue. Threads: any.

    Returns: the library that is loaded.
    Raises: GlueError.
    """
    global _loaded
    with _lock:
        if _loaded is None:
            import torch

            path = _choose(torch)
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


def _choose(torch) -> Path:
    """The library to load, compiled if need be."""
    forced = os.environ.get("SPCCL_TORCH_GLUE", "auto")
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
        raise GlueError(f"{path} was compiled for torch {for_torch}, this is torch {torch.__version__}: delete it")
    if header != library:
        raise GlueError(f"{path} was compiled for spccl {header}, {LIBRARY} is {library}: reinstall spccl")


# ---- compiling ---------------------------------------------------------------------------------------------


def cache_folder() -> Path:
    """Where compiled glue is kept: $XDG_CACHE_HOME/spccl, else ~/.cache/spccl."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base and os.path.isabs(base) else Path.home() / ".cache") / "spccl"


def _key(torch, compiler: str) -> str:
    """Names one result: everything that the compiled code depends on."""
    digest = hashlib.sha256()
    files = sorted(SOURCES.glob("*.[ch]pp"))
    if SOURCES / "glue.cpp" not in files or not (HEADER_FOLDER / "spccl.h").is_file():
        raise GlueError(f"{SOURCES} or {HEADER_FOLDER} is incomplete: reinstall spccl (pip install --force-reinstall)")
    for file in [*files, HEADER_FOLDER / "spccl.h"]:
        digest.update(f"{file.name}\0{file.stat().st_size}\0".encode())
        digest.update(file.read_bytes())
    digest.update("\0".join([compiler, *_FLAGS]).encode())
    git = (torch.version.git_version or "")[:12]
    return f"torch-{torch.__version__}-{git}-abi{int(torch.compiled_with_cxx11_abi())}-{digest.hexdigest()[:16]}"


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
        f"install spccl with SPCCL_PREBUILD_TORCH: pip install --no-build-isolation "
        f"-C cmake.define.SPCCL_PREBUILD_TORCH=ON spccl"
    )


def _compiled(torch) -> Path:
    """The library for this torch from the cache; compiled first if it is not there."""
    compiler = _compiler_for_key()
    folder = cache_folder() / _key(torch, compiler)
    library = folder / f"libspccl_torch-{_minor(torch.__version__)}.so"
    if library.is_file():
        return library
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / "lock", "w") as lock:
            _wait_for_lock(lock, folder)
            if not library.is_file():
                _compile(torch, _compiler(), library)
    except OSError as error:
        raise GlueError(
            f"cannot write the compiled torch glue to {folder}: {error}. Set XDG_CACHE_HOME to a folder that can be "
            f"written"
        ) from error
    return library


def _compiler_for_key() -> str:
    """$CXX is part of the key; the default is not, so that a cached result is found where no compiler is."""
    return os.environ.get("CXX", "")


def _wait_for_lock(lock, folder: Path) -> None:
    """The other ranks of this host wait here while the first one compiles."""
    deadline = time.monotonic() + COMPILE_TIMEOUT_S
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise GlueError(
                    f"another process has held {folder / 'lock'} for {COMPILE_TIMEOUT_S} s; is it hanging?"
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
    """Compile into a file beside `library`, then rename: no process ever sees half a library."""
    handle, name = tempfile.mkstemp(dir=library.parent, suffix=".so.tmp")
    os.close(handle)
    argv = command(torch, compiler, Path(name))
    print(f"spccl: compiling the torch glue once for torch {torch.__version__} (about 20 s) ...", file=sys.stderr)
    try:
        result = subprocess.run(argv, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S, check=False)
        if result.returncode != 0:
            raise GlueError(_explain(argv, result.stderr))
        os.chmod(name, 0o755)
        os.replace(name, library)
    except subprocess.TimeoutExpired:
        raise GlueError(f"compiling the torch glue took over {COMPILE_TIMEOUT_S} s: {shlex.join(argv)}") from None
    finally:
        Path(name).unlink(missing_ok=True)


def _explain(argv: list[str], output: str) -> str:
    """The compiler's own words, and what usually is behind them."""
    hint = ""
    if "c++20" in output:
        hint = " The compiler is too old for C++20: use g++ 11 or clang 14 or later (set CXX)."
    elif "No such file" in output and "torch" in output:
        hint = " This torch came without its C++ headers: install the official wheel."
    tail = "\n".join(output.strip().splitlines()[-30:])
    return f"the torch glue did not compile.{hint}\ncommand: {shlex.join(argv)}\n{tail}"
