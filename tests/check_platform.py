"""Checks which platforms cmake/platform.cmake refuses at configure time, and the words of its messages. Compares the
texts of refusals in docs/ERRORS.md with the sources that print them."""

from __future__ import annotations

import ast
import re
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

# Sources of refusals: a file, and words that the texts have which docs/ERRORS.md must show.
REFUSALS = (
    ("cmake/platform.cmake", "spccl"),
    ("python/ext/CMakeLists.txt", "free-threaded"),
    ("python/spccl/__init__.py", "free-threaded"),
    ("python/spccl/_torch_glue.py", "or later"),
    ("tools/env.py", "or newer: make"),
)


def cmake_texts(source: str) -> list[str]:
    """Texts of FATAL_ERROR as regular expressions: ${...} is any value."""
    calls = re.findall(r'FATAL_ERROR\s+((?:"[^"]*"\s*)+)\)', source)
    texts = ["".join(re.findall(r'"([^"]*)"', call)) for call in calls]
    return ["[^`]+".join(map(re.escape, re.split(r"\$\{\w+\}", text))) for text in texts]


def python_texts(source: str) -> list[str]:
    """f-strings of raise statements as regular expressions: {...} is any value."""
    raised = [node.exc for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Raise)]
    strings = [n.args[0] for n in raised if isinstance(n, ast.Call) and n.args and isinstance(n.args[0], ast.JoinedStr)]
    return ["".join(re.escape(v.value) if isinstance(v, ast.Constant) else "[^`]+" for v in s.values) for s in strings]


def text_faults() -> list[str]:
    """Refusals that docs/ERRORS.md does not have word for word, and sources without one."""
    page, faults = (ROOT / "docs/ERRORS.md").read_text(), []
    for name, words in REFUSALS:
        texts = (python_texts if name.endswith(".py") else cmake_texts)((ROOT / name).read_text())
        wanted = [text for text in texts if re.escape(words) in text]
        faults += [] if wanted else [f'{name}: no text with "{words}"']
        faults += [f"docs/ERRORS.md lacks a text of {name}: {t}" for t in wanted if not re.search(f"`{t}`", page)]
    return faults


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
    faults = [text for case in CASES if (text := fault(*case))] + text_faults()
    print("\n".join([*faults, f"check_platform: {len(CASES)} platforms, {len(faults)} faults"]))
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
