"""Checks that each C and C++ file includes only what its folder may see (docs/ARCHITECTURE.md).

The folder is the layer. A file may include headers of its own folder and of the folders that MAY_INCLUDE
lists for it. Includes of ours are paths from csrc (`#include "core/plan/sched.h"`); the two bindings name
headers of their own folder without a path. Also checks that the page names every file, that few files of core use each
other in a circle, and that the packages of Python do not import each other in a loop.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

from check_style import c_functions, without_comments

ROOT = Path(__file__).resolve().parent.parent
SUFFIXES = {".h", ".c", ".inc", ".hpp", ".cpp", ".cu", ".cuh"}

# Folder -> other folders whose headers its files may include. In core, a folder may include those on its left.
CORE = [f"csrc/core/{name}" for name in ("base", "format", "contract", "plan", "run", "gpu", "prune")]
GPU = [f"csrc/core/gpu/{name}" for name in ("collectives", "proxy", "channels")]
CONTRACTS = {"csrc", *CORE[:3]}
TRANSPORTS = {"csrc", "csrc/core/base", "csrc/core/contract", "csrc/transport/common"}
MAY_INCLUDE: dict[str, set[str]] = {
    "csrc": set(),
    **{folder: {"csrc", *CORE[:i]} for i, folder in enumerate(CORE)},
    CORE[5]: {"csrc", *CORE[:5], *GPU},
    CORE[6]: {"csrc", *CORE[:6], *GPU},
    GPU[0]: {"csrc", *CORE[:6], GPU[1]},
    GPU[1]: {"csrc", *CORE[:6]},
    GPU[2]: {"csrc", *CORE[:6], GPU[1]},
    "csrc/core/simulate": {"csrc", *CORE[:4]},  # nothing of ours includes it
    "csrc/kernels/cpu": CONTRACTS,
    "csrc/kernels/cuda": CONTRACTS,
    "csrc/transport/common": TRANSPORTS,
    "csrc/transport/start": TRANSPORTS,
    "csrc/transport/local": TRANSPORTS,
    "csrc/transport/net/tcp": TRANSPORTS,
    "csrc/transport/net/segments": TRANSPORTS,
    "csrc/transport/net/ib": {*TRANSPORTS, "csrc/transport/net/segments"},
    "csrc/transport/net/plugin": {*TRANSPORTS, "csrc/transport/net/segments"},
    "csrc/transport": TRANSPORTS,
    "csrc/c10d_backend": {"csrc"},
    "python/ext": {"csrc"},
}
NETWORK = ("sys/socket", "netinet/", "arpa/", "netdb", "infiniband/")
TORCH = ("torch/", "ATen/", "c10/")
# Prefix of a folder's path -> prefixes of system headers that its files must not include.
NEVER = {
    "csrc/core": (*NETWORK, *TORCH, "Python", "cuda"),
    "csrc/kernels/cpu": (*NETWORK, *TORCH, "Python", "cuda"),
    "csrc/kernels/cuda": (*NETWORK, *TORCH, "Python"),
    "csrc/transport": (*TORCH, "Python", "cuda"),
    "csrc/c10d_backend": (*NETWORK, "Python", "cuda"),
    "python/ext": (*NETWORK, *TORCH, "cuda"),
}
# CMake writes this header into the build folder.
GENERATED = {"no_cuda_why.h": "csrc/kernels/cuda/device_none.c"}
# The most files of a circle: A uses B ... uses A. A file is a .c with its header. It uses another if it includes its
# header or calls one of its functions. The first prefix that fits counts.
MAX_CIRCLE = {"csrc/core/gpu/": 4, "csrc/core/": 7}


def tracked() -> list[str]:
    """The C and C++ files that git tracks in these folders; without a repository, all that are there."""
    tops = sorted({"/".join(folder.split("/")[:2]) for folder in MAY_INCLUDE if "/" in folder} | {"csrc"})
    listing = subprocess.run(["git", "ls-files", *tops], cwd=ROOT, capture_output=True, text=True)
    if listing.returncode == 0:
        names = listing.stdout.splitlines()
    else:
        names = [p.relative_to(ROOT).as_posix() for top in tops for p in (ROOT / top).rglob("*") if p.is_file()]
    return sorted({n for n in names if Path(n).suffix in SUFFIXES and (ROOT / n).is_file()})


def refusal(user: str, quoted: str | None, system: str | None) -> str | None:
    """Why the file `user` must not have this include; None if it may."""
    folder = Path(user).parent.as_posix()
    if system is not None:
        never = next((prefixes for top, prefixes in NEVER.items() if folder.startswith(top)), ())
        return f"<{system}> must not be used in {folder}" if system.startswith(never) and never else None
    if quoted in GENERATED:
        return None if user == GENERATED[quoted] else f'"{quoted}": only {GENERATED[quoted]} may include it'
    beside = folder in ("csrc/c10d_backend", "python/ext") and (ROOT / folder / (quoted or "")).is_file()
    target = f"{folder}/{quoted}" if beside else f"csrc/{quoted}"
    if not (ROOT / target).is_file():
        return f'no file csrc/{quoted}: write the path from csrc, as in "core/plan/sched.h"'
    seen = Path(target).parent.as_posix()
    if seen != folder and seen not in MAY_INCLUDE[folder]:
        return f'"{quoted}": {folder} may include {", ".join(sorted(MAY_INCLUDE[folder])) or "nothing"}'
    return None


def python_loops() -> list[str]:
    """Parts of python/spccl (folders; modules beside them) that import each other, imports in functions included."""
    top = ROOT / "python/spccl"
    files = {p: p.relative_to(top).parts for p in top.rglob("*.py")}
    parts = {names[0].removesuffix(".py") for names in files.values()}
    uses: dict[str, set[str]] = {part: set() for part in parts}
    parts.add("_ext")  # compiled
    for path, names in files.items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                base = ["spccl", *names[:-1]][: len(names) - node.level + 1] if node.level else []
                dotted = [*base, *(node.module or "").split(".")]
                targets = [[x for x in dotted if x] + [alias.name] for alias in node.names]
            else:
                targets = [a.name.split(".") for a in node.names] if isinstance(node, ast.Import) else []
            used = {t[1] if len(t) > 1 and t[1] in parts else "__init__" for t in targets if t[0] == "spccl"}
            uses[names[0].removesuffix(".py")] |= used
    left = set(uses)
    while free := {part for part in left if not uses[part] & left - {part}}:
        left -= free
    while idle := {part for part in left if not any(part in uses[other] for other in left - {part})}:
        left -= idle
    return [f"python/spccl: {part} is in a loop of imports, over {sorted(uses[part] & left)}" for part in sorted(left)]


def named_files(page: str) -> set[str]:
    """The names of files in backquotes. `tcp.{h,c}` and `{pici,coo}_avx2.c` stand for two each."""
    found, todo = set(), re.findall(r"`([^`\n]+)`", page)
    while todo:
        name = todo.pop()
        braces = re.search(r"\{([^}]*)\}", name)
        if braces:
            todo += [name[: braces.start()] + part + name[braces.end() :] for part in braces[1].split(",")]
        else:
            found.add(name.rpartition("/")[2])
    return found


def circles(names: list[str]) -> list[list[str]]:
    """The circles of files in core, without their suffixes; the longest is first."""
    text = {n: (ROOT / n).read_text() for n in names if n.startswith("csrc/core/") and n.endswith((".c", ".h"))}
    owner = {f[0]: n[:-2] for n, t in text.items() for f in c_functions(t) if f[0].startswith("sp")}
    uses: dict[str, set[str]] = {n[:-2]: set() for n in text}
    for name, t in text.items():
        uses[name[:-2]] |= {f"csrc/{i}" for i in re.findall(r'#include "(core/.*)\.h"', t)}
        if name.endswith(".c"):
            uses[name[:-2]] |= {owner[w] for w in re.findall(r"\bsp\w+", without_comments(t)) if w in owner}
    reach = {u: {u} for u in uses}
    for _ in uses:
        reach = {u: r.union(*(uses.get(v, set()) for v in r)) for u, r in reach.items()}
    found = {tuple(sorted(v for v in reach[u] if u in reach.get(v, ()))) for u in uses}
    return sorted(map(list, found), key=len, reverse=True)


def main() -> int:
    names = tracked()
    faults = []
    for name in names:
        if Path(name).parent.as_posix() not in MAY_INCLUDE:
            faults.append(f"{name}: its folder is not in MAY_INCLUDE")
            continue
        for number, line in enumerate((ROOT / name).read_text().splitlines(), 1):
            found = re.match(r'\s*#\s*include\s+(?:"([^"]+)"|<([^>]+)>)', line)
            why = refusal(name, *found.groups()) if found else None
            if why:
                faults.append(f"{name}:{number}: {why}")
    empty = sorted(set(MAY_INCLUDE) - {Path(n).parent.as_posix() for n in names})
    faults += [f"{folder}: is in MAY_INCLUDE, but has no file" for folder in empty]
    for circle in circles(names):
        most = next(n for prefix, n in MAX_CIRCLE.items() if circle[0].startswith(prefix))
        if len(circle) > most:
            faults.append(f"{len(circle)} files use each other in a circle, wanted at most {most}: {', '.join(circle)}")
    page = (ROOT / "docs/ARCHITECTURE.md").read_text()
    faults += [f"docs/ARCHITECTURE.md does not name the folder {f}/" for f in MAY_INCLUDE if f"{f}/" not in page]
    faults += python_loops()
    on_map = named_files(page)
    faults += [f"docs/ARCHITECTURE.md does not name {n}: add it" for n in names if Path(n).name not in on_map]
    print("\n".join([*faults, f"check_layers: {len(names)} files, {len(faults)} faults"]))
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
