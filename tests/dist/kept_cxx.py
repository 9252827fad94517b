"""A C++ compiler for tests that compile the torch glue. It keeps its results, so unchanged sources compile once.

    python kept_cxx.py COMPILER ARGUMENTS... -o OUTPUT

Results are in $SPCCL_TEST_CACHE. Their names are hashes of all that they depend on: the compiler, the arguments,
torch's folder, and the content of the sources and of all headers beside them. `compiler()` returns the value for
CXX; without the variable it returns the plain compiler. Several processes may use one folder at the same time: each
holds a lock while it reads or changes the folder, but not while it compiles.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

N_KEPT = 8
LOCK = "lock"


def compiler(plain: str) -> str:
    if not os.environ.get("SPCCL_TEST_CACHE"):
        return plain
    return shlex.join([sys.executable, __file__, *shlex.split(plain)])


def key(arguments: list[str]) -> str:
    """Hash of the command and of the files that it reads. Headers of torch and the system count only by the names of
    their folders."""
    digest = hashlib.sha256()
    version = subprocess.run([arguments[0], "--version"], capture_output=True, text=True, check=True).stdout
    digest.update(version.encode())
    for word in arguments:
        path = Path(word.removeprefix("-I"))
        if path.suffix == ".cpp" and path.is_file():
            files = [path, *sorted(path.parent.glob("*.[ch]pp"))]
        elif word.startswith("-I") and path.is_dir():
            files = sorted(path.glob("*.[ch]pp")) + sorted(path.glob("*.h"))
        else:
            files = []
        digest.update(word.encode() + b"\0")
        for file in files:
            digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:24]


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    with open(folder / LOCK, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def take(kept: Path, output: Path) -> bool:
    """Copy a result that was kept. False: there is none."""
    with locked(kept.parent):
        found = kept.is_file()
        if found:
            shutil.copyfile(kept, output)
        return found


def keep(output: Path, kept: Path) -> None:
    """Copy a result to the cache, and delete the oldest ones."""
    folder = kept.parent
    with locked(folder):
        part = folder / "part"  # no other process sees it: it would need the lock
        shutil.copyfile(output, part)
        part.replace(kept)
        results = sorted((p for p in folder.iterdir() if p.name != LOCK), key=lambda p: p.stat().st_mtime)
        for old in results[:-N_KEPT]:
            old.unlink()


def main() -> int:
    arguments = sys.argv[1:]
    if "-o" not in arguments:
        return subprocess.call(arguments)
    output = Path(arguments[arguments.index("-o") + 1])
    at = arguments.index("-o") + 1
    folder = Path(os.environ["SPCCL_TEST_CACHE"])
    folder.mkdir(parents=True, exist_ok=True)
    kept = folder / key([*arguments[:at], *arguments[at + 1 :]])
    if take(kept, output):
        return 0
    status = subprocess.call(arguments)
    if status == 0:
        keep(output, kept)
    return status


if __name__ == "__main__":
    sys.exit(main())
