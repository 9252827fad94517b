"""Checks that each header compiles alone, when it is included twice, with warnings as errors.

Internal headers compile as C11. The public headers compile also as C++11. Headers for GPUs (*.cuh) compile with
nvcc, if it is found.
"""

from __future__ import annotations

import functools
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STRICT = ("-Wall", "-Wextra", "-Wpedantic", "-Wshadow", "-Wconversion", "-Werror", "-fsyntax-only")
C = ("gcc", "-x", "c", "-std=c11", "-D_GNU_SOURCE", *STRICT, "-Wstrict-prototypes", "-Wvla")
PUBLIC_C = ("gcc", "-x", "c", "-std=c11", *STRICT, "-Wstrict-prototypes", "-Wvla")
PUBLIC_CXX = ("g++", "-x", "c++", "-std=c++11", *STRICT)
INTERNAL_DIRS = ("csrc/core", "csrc/kernels", "csrc/transport", "tests/c", "tests/fuzz", "bench", "examples/channels")
# A header may define static functions that this check does not use.
RELAXED = ("-Wno-unused-function",)
ISA_FLAGS = {
    # -O2: without it the compiler's intrinsics are macros, and the warnings apply to their contents.
    "avx2": ("-O2", "-march=x86-64-v3"),
    "avx512": ("-O2", "-march=x86-64-v4", "-mavx512vbmi", "-mavx512vbmi2"),
}
NVCC_FLAGS = (
    *("-x", "cu", "-std=c++17", "-arch=sm_90", "-cubin", "-o", os.devnull),
    *("-Werror=all-warnings", "-diag-suppress=177"),  # 177: the unused static function
)
# These include headers of the CUDA toolkit, which may be absent here. The CUDA build compiles them.
FOREIGN = {"cuda_check.h", "device_cuda.h"}
# Headers that need one which Debian's libibverbs-dev has. Where it is absent, transport ib is left out of builds too.
VERBS = "infiniband/verbs.h"
NEED_VERBS = {"ib_library.h", "stand_in_verbs.h"}
# Header -> a header that must come before it.
AFTER = {"offset_list.h": "simd_avx2.h"}


# Folders whose headers are not compiled alone, and why.
NOT_ALONE = {
    "csrc/c10d_backend": "they include torch's headers, 10 s each; glue.cpp compiles them together",
    "tests/gpusim": "they replace nvcc's own headers, and kernels follow them",
}


def tracked() -> set[str]:
    """The headers that this check must compile: git tracks them; without a repository, they are in our folders."""
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listing.returncode == 0:
        names = listing.stdout.split("\0")
    else:
        tops = ("csrc", "python", "tests", "bench", "examples")
        names = [p.relative_to(ROOT).as_posix() for top in tops for p in (ROOT / top).rglob("*")]
    names = [n for n in names if n.endswith((".h", ".hpp", ".cuh"))]
    if not find_nvcc():
        names = [n for n in names if not n.endswith(".cuh")]
    return {n for n in names if (ROOT / n).is_file() and not n.startswith(tuple(NOT_ALONE))}


def jobs() -> list[tuple[Path, list[str]]]:
    """(header, compiler command without input) of every check."""
    folder = f"-I{ROOT / 'csrc'}"
    found = [
        (header, [*compiler, folder])
        for header in sorted((ROOT / "csrc").glob("*.h"))
        for compiler in (PUBLIC_C, PUBLIC_CXX)
    ]
    # Headers of the tests include CUDA's headers: they get those of the GPU in software.
    examples = f"-I{ROOT / 'examples/channels'}"
    inside = [f"-I{ROOT / 'csrc'}", examples, f"-isystem{ROOT / 'tests/gpusim/include'}"]
    for folder in INTERNAL_DIRS:
        for header in sorted((ROOT / folder).rglob("*.h")):
            first = AFTER.get(header.name)
            isa = _isa_flags(header.name)
            if _is_foreign(header.name) or _other_cpu(header.name):
                continue
            prelude = ("-include", str(header.with_name(first))) if first else ()
            found.append((header, [*C, *RELAXED, *inside, *isa, *prelude]))
    nvcc = find_nvcc()
    if nvcc:
        cuda = [*sorted((ROOT / "csrc").glob("*.cuh"))]
        cuda += [h for folder in ("csrc/kernels", "bench") for h in sorted((ROOT / folder).rglob("*.cuh"))]
        found += [(h, [nvcc, *NVCC_FLAGS, inside[0]]) for h in cuda]
    python = [f"-isystem{sysconfig.get_path('include')}", "-DPy_LIMITED_API=0x030B0000", f"-I{ROOT / 'csrc'}"]
    found += [(h, [*C, *RELAXED, *python]) for h in sorted((ROOT / "python/ext").rglob("*.h"))]
    return found


def find_nvcc() -> str | None:
    """The CUDA compiler on PATH or in /usr/local/cuda."""
    return shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")


@functools.cache
def have_verbs() -> bool:
    """Does the C compiler find the header of libibverbs?"""
    command = ["gcc", "-x", "c", "-fsyntax-only", "-"]
    return subprocess.run(command, input=f"#include <{VERBS}>\n", capture_output=True, text=True).returncode == 0


def _is_foreign(name: str) -> bool:
    return name in FOREIGN or (name in NEED_VERBS and not have_verbs())


def _isa_flags(name: str) -> tuple[str, ...]:
    """Compiler flags for a header of one instruction set; empty for other headers."""
    return ISA_FLAGS.get(AFTER.get(Path(name).name, name).removesuffix(".h").rpartition("_")[2], ())


def _other_cpu(name: str) -> bool:
    return bool(_isa_flags(name)) and platform.machine() != "x86_64"


def compile_alone(job: tuple[Path, list[str]]) -> str | None:
    """The compiler's messages, or None if there are none."""
    header, command = job
    source = f'#include "{header}"\n#include "{header}"\nint spccl_not_empty;\n'
    done = subprocess.run([*command, "-"], input=source, capture_output=True, text=True)
    return None if done.returncode == 0 else f"{header.relative_to(ROOT)} ({command[0]}):\n{done.stderr}"


def main() -> int:
    work = jobs()
    seen = {header.relative_to(ROOT).as_posix() for header, _ in work}
    left_out = {n for n in tracked() - seen if not _is_foreign(Path(n).name) and not _other_cpu(n)}
    with ThreadPoolExecutor() as pool:
        faults = [text for text in pool.map(compile_alone, work) if text]
    faults += [f"{name}: this check did not compile it" for name in sorted(left_out)]
    if not find_nvcc():
        print("check_headers: no nvcc: *.cuh were not compiled")
    if not have_verbs():
        print(f"check_headers: no {VERBS} (Debian: libibverbs-dev): {', '.join(sorted(NEED_VERBS))} were not compiled")
    print("\n".join([*faults, f"check_headers: {len(work)} compilations, {len(faults)} faults"]))
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
