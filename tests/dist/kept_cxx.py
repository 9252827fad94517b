"""A C++ compiler for tests that compile the torch glue. It keeps its results, so unchanged sources compile once.

    python kept_cxx.py COMPILER ARGUMENTS... -o OUTPUT

Results are in $SPCCL_TEST_CACHE. Their names are hashes of all that they depend on: the compiler, the arguments,
torch's folder, and the content of the sources and of all headers beside them. `compiler()` returns the value for
CXX; without the variable it returns the plain compiler.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

N_KEPT = 8


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


def main() -> int:
    arguments = sys.argv[1:]
    if "-o" not in arguments:
        return subprocess.call(arguments)
    output = Path(arguments[arguments.index("-o") + 1])
    at = arguments.index("-o") + 1
    folder = Path(os.environ["SPCCL_TEST_CACHE"])
    folder.mkdir(parents=True, exist_ok=True)
    kept = folder / key([*arguments[:at], *arguments[at + 1 :]])
    if not kept.is_file():
        status = subprocess.call(arguments)
        if status != 0:
            return status
        part = kept.with_suffix(f".{os.getpid()}")
        shutil.copyfile(output, part)
        part.replace(kept)
        for old in sorted(folder.iterdir(), key=lambda p: p.stat().st_mtime)[:-N_KEPT]:
            old.unlink(missing_ok=True)
    shutil.copyfile(kept, output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
