"""Checks that every C and C++ file includes only what stands above it in the map of docs/ARCHITECTURE.md.

A file may include (1) its own header, (2) units listed before it in its own group, (3) headers of the groups
that its group names. A file that is not in the map, and a unit of the map without a file, are errors too.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SUFFIXES = {".h", ".c", ".inc", ".hpp", ".cpp", ".cu", ".cuh"}
NO_NETWORK = ("sys/socket", "netinet/", "arpa/", "netdb", "infiniband/")
NO_BINDINGS = ("Python", "torch/", "ATen/", "c10/", "cuda")


@dataclass(frozen=True)
class Group:
    name: str
    folder: str
    may_include: tuple[str, ...]  # names of groups
    # In order; each sees the ones before it. "mem" is mem.h and mem.c (mem.hpp, ...); a header that another
    # unit of the group needs before the .c file stands with its suffix.
    units: str
    never: tuple[str, ...] = ()  # system headers that begin so


MAP = (
    Group("contract", "csrc", (), "spccl", NO_NETWORK + NO_BINDINGS),
    Group(
        "base",
        "csrc/core",
        ("contract",),
        "bits clock status env log mem dtype trace",
        NO_NETWORK + NO_BINDINGS,
    ),
    Group(
        "contracts",
        "csrc/core",
        ("contract", "base"),
        "format kernel_table transport rendezvous codec inbox gpu gpu_share",
        NO_NETWORK + NO_BINDINGS,
    ),
    Group(
        "planning",
        "csrc/core",
        ("contract", "base", "contracts"),
        "sched.h sched_build sched.c sched_direct sched_oneshot sched_check tune tune_coll.h tune_gpu",
        NO_NETWORK + NO_BINDINGS,
    ),
    Group(
        "running",
        "csrc/core",
        ("contract", "base", "contracts", "planning"),
        "boot exec.h exec_steps exec_reduce exec.c tune_coll.c comm.h gpu_comm.h comm.c engine request "
        "coll_check coll gpu_comm.c gpu_watch gpu_attach gpu_coll gpu_stream unique_id stream info",
        NO_NETWORK + NO_BINDINGS,
    ),
    Group(
        "kernels",
        "csrc/kernels",
        ("contract", "base", "contracts"),
        "cpu_feature kernels elem reduce transpose simd_avx2 simd_avx512 transpose_avx512 flat.h "
        "bulk.inc pici.inc coo.inc tile.inc "
        "scan_scalar dense_scalar pici_scalar coo_scalar tile_scalar reduce_scalar "
        "scan_avx2 bulk_avx2 pici_avx2 coo_avx2 tile_avx2 "
        "scan_avx512 bulk_avx512 pici_avx512 coo_avx512 tile_avx512 dispatch "
        "cuda_check kernels_cuda device_cuda memory_cuda device_none "
        "ptx.cuh elem.cuh slice.cuh frame.cuh encode.cuh decode.cuh share.cuh wait.cuh outbox.cuh inlet.cuh roles.cuh "
        "fused.cuh reduce.cuh codec.cuh columns.cuh encode_cuda decode_cuda direct_cuda gather_cuda "
        "reduce_float_cuda reduce_half_cuda reduce_int_cuda reduce_small_int_cuda",
        (*NO_NETWORK, "Python", "torch/"),
    ),
    Group(
        "transport",
        "csrc/transport",
        ("contract", "base", "contracts"),
        "auth spsc sock host forks handshake acceptor ringlink transports inproc shm.h shm_connect shm.c "
        "mirror tcp_stream tcp.h tcp_address tcp_connect tcp.c "
        "rendezvous_wire rendezvous_server rendezvous registry fault nvlink",
        NO_BINDINGS,
    ),
    Group(
        "c10d_backend",
        "csrc/c10d_backend",
        ("contract",),
        "torch_compat serial_thread tensor comm order work sparse cuda backend coalesced delegate ops glue",
        (*NO_NETWORK, "Python", "cuda"),
    ),
    Group(
        "ext",
        "python/ext",
        ("contract",),
        "module.h py_error py_buffer py_frame py_store py_request py_comm py_coll module.c",
        NO_NETWORK + NO_BINDINGS[1:],
    ),
)


# Headers that CMake makes in the build folder, and the file that may include each.
MADE = {"no_cuda_why.h": "device_none.c"}


def place(path: Path) -> tuple[Group, int] | None:
    """The group of a file and its place in it, or None if the map does not name it."""
    folder = path.parent.relative_to(ROOT).as_posix()
    for group in MAP:
        units = group.units.split()
        for name in (path.name, path.stem):
            if group.folder == folder and name in units:
                return group, units.index(name)
    return None


def resolve(name: str, user: Path) -> Path | None:
    """The file that `#include "name"` in `user` means: beside it, else in csrc or one of its folders."""
    for folder in (user.parent, ROOT / "csrc", *(ROOT / g.folder for g in MAP)):
        path = (folder / name).resolve()
        if path.is_file():
            return path
    return None


def refusal(user: Path, quoted: str | None, system: str | None) -> str | None:
    """Why `user` may not have this include, or None if it may."""
    group, index = place(user)  # type: ignore[misc]
    if system is not None:
        bad = any(system.startswith(prefix) for prefix in group.never)
        return f"<{system}> does not belong into {group.name}" if bad else None
    if quoted in MADE:
        return None if user.name == MADE[quoted] else f'"{quoted}" is for {MADE[quoted]}'
    target = resolve(quoted or "", user)
    if target is None:
        return f'"{quoted}" is not a file of ours'
    where = place(target)
    if where is None:
        return f'"{quoted}" is not in the map'
    if where[0].name == group.name:
        return f'"{quoted}" stands below {user.stem} in {group.name}' if where[1] > index else None
    if where[0].name not in group.may_include:
        allowed = ", ".join(group.may_include) or "nothing"
        return f'"{quoted}" is {where[0].name}, and {group.name} may include {allowed}'
    return None


def expand_braces(text: str) -> str:
    """`{a,b}_{x,y}.c` -> "a_x.c b_x.c a_y.c b_y.c": the page names families of files so."""
    names = re.findall(r"`[^`]*\{[^`]*`", text)
    while any("{" in name for name in names):
        name = next(name for name in names if "{" in name)
        names.remove(name)
        head, choices, tail = re.match(r"([^{]*)\{([^}]*)\}(.*)", name).groups()
        names += [head + choice + tail for choice in choices.split(",")]
    return " ".join([text, *names])


def main() -> int:
    folders = sorted({g.folder for g in MAP})
    files = [p for f in folders for p in sorted((ROOT / f).glob("*")) if p.suffix in SUFFIXES]
    faults = []
    for path in files:
        name = path.relative_to(ROOT)
        if place(path) is None:
            faults.append(f"{name}: not in the map: add it to MAP here and to docs/ARCHITECTURE.md")
            continue
        for number, line in enumerate(path.read_text().splitlines(), 1):
            found = re.match(r'\s*#\s*include\s+(?:"([^"]+)"|<([^>]+)>)', line)
            why = refusal(path, *found.groups()) if found else None
            if why:
                faults.append(f"{name}:{number}: {why}")
    stems = {(p.parent.relative_to(ROOT).as_posix(), n) for p in files for n in (p.stem, p.name)}
    units = [(group.folder, unit) for group in MAP for unit in group.units.split()]
    faults += [f"{f}/{u}: in the map, but there is no such file" for f, u in units if (f, u) not in stems]
    page = ROOT / "docs/ARCHITECTURE.md"
    text = expand_braces(page.read_text() if page.exists() else "")
    faults += [f"docs/ARCHITECTURE.md does not name {f}/{u}" for f, u in units if Path(u).stem not in text]
    print("\n".join([*faults, f"check_layers: {len(files)} files, {len(faults)} faults"]))
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
