"""Checks which platforms cmake/platform.cmake refuses at configure time, and the words of its messages."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
GOOD = {
    "CMAKE_SYSTEM_NAME": "Linux",
    "CMAKE_SIZEOF_VOID_P": "8",
    "CMAKE_C_BYTE_ORDER": "LITTLE_ENDIAN",
    "CMAKE_C_COMPILER_ID": "GNU",
    "CMAKE_C_COMPILER_VERSION": "12.2.0",
}
# Variables that differ from GOOD, and words that the message must have. No words: the platform is accepted.
CASES: list[tuple[dict[str, str], tuple[str, ...]]] = [
    ({}, ()),
    ({"CMAKE_C_COMPILER_VERSION": "11.1.0"}, ()),
    ({"CMAKE_C_COMPILER_ID": "Clang", "CMAKE_C_COMPILER_VERSION": "13.0.1"}, ()),
    ({"CMAKE_SYSTEM_NAME": "Darwin"}, ("Linux only", "Darwin")),
    ({"CMAKE_SYSTEM_NAME": "Windows"}, ("Linux only", "Windows")),
    ({"CMAKE_SIZEOF_VOID_P": "4"}, ("64-bit", "4-byte")),
    ({"CMAKE_C_BYTE_ORDER": "BIG_ENDIAN"}, ("little-endian", "BIG_ENDIAN")),
    ({"CMAKE_C_COMPILER_VERSION": "10.5.0"}, ("GCC 11", "10.5.0")),
    ({"CMAKE_C_COMPILER_ID": "Clang", "CMAKE_C_COMPILER_VERSION": "12.0.1"}, ("Clang 13", "12.0.1")),
    ({"CMAKE_C_COMPILER_ID": "PGI"}, ("GCC or Clang", "PGI")),
]


def fault(differs: dict[str, str], words: tuple[str, ...]) -> str | None:
    """The fault of the answer to these values; None if the answer is right."""
    defines = [f"-D{name}={value}" for name, value in {**GOOD, **differs}.items()]
    command = ["cmake", *defines, "-P", str(ROOT / "cmake/platform.cmake")]
    done = subprocess.run(command, capture_output=True, text=True)
    message = " ".join(done.stderr.split())
    if not words:
        return None if done.returncode == 0 else f"{differs}: refused: {message}"
    if done.returncode == 0:
        return f"{differs}: accepted"
    missing = [word for word in words if word not in message]
    return f"{differs}: no {missing} in: {message}" if missing else None


def main() -> int:
    faults = [text for case in CASES if (text := fault(*case))]
    print("\n".join([*faults, f"check_platform: {len(CASES)} platforms, {len(faults)} faults"]))
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
