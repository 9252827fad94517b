"""Checks that libspccl.so exports exactly what libspccl.map lists and the public headers declare (csrc/*.h).

check_symbols.py path/to/libspccl.so
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def declared() -> set[str]:
    """Functions of the public headers. SPCCL_API marks each of them."""
    headers = "".join(path.read_text() for path in sorted((ROOT / "csrc").glob("*.h")))
    text = re.sub(r"/\*.*?\*/", "", headers, flags=re.DOTALL)
    return set(re.findall(r"^SPCCL_API\b[^;(]*?\b(\w+)\s*\(", text, re.MULTILINE))


def listed() -> set[str]:
    text = re.sub(r"#.*", "", (ROOT / "libspccl.map").read_text())
    return set(re.findall(r"(\w+);", text.split("global:")[1].split("local:")[0]))


def exported(library: Path) -> set[str]:
    cmd = ["nm", "-D", "--defined-only", library]
    text = subprocess.run(cmd, check=True, capture_output=True, text=True).stdout
    rows = [line.split() for line in text.splitlines()]
    return {row[2].split("@")[0] for row in rows if row[1] != "A"}  # A: the version node itself


def main() -> int:
    sets = {"csrc/*.h": declared(), "libspccl.map": listed(), sys.argv[1]: exported(Path(sys.argv[1]))}
    every = set.union(*sets.values())
    faults = [f"{name}: not in {where}" for where, names in sets.items() for name in sorted(every - names)]
    print("\n".join([*faults, f"check_symbols: {len(every)} names, {len(faults)} faults"]))
    return 1 if faults or not every else 0


if __name__ == "__main__":
    sys.exit(main())
