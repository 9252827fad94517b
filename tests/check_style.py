"""Checks the rules of CONTRIBUTING.md on sizes, words and documents. The exceptions are here, each with its reason."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MAX_FILE_LINES, MAX_FUNCTION_LINES, MAX_PARAMETERS = 500, 60, 6
MAX_PROSE_COLUMNS = 100  # of *.md files
# Functions of a GPU are inlined: their parameters stay in registers, but a struct of them may not.
MAX_DEVICE_PARAMETERS = 12
C_SUFFIXES = {".c", ".h", ".inc", ".cpp", ".hpp", ".cu", ".cuh"}
LIBRARY = ("csrc/core/", "csrc/kernels/", "csrc/transport/")
ANYWHERE = ("",)

# "path" or "path:function" -> why it may be longer.
ALLOWED_SIZE: dict[str, str] = {}
# "path:function" -> why it takes more parameters. The public C API has no limit: it follows MPI and NCCL.
ALLOWED_PARAMETERS: dict[str, str] = {
    "tests/gpusim/runtime.cpp:cudaStreamGetCaptureInfo": "CUDA's own signature",
    **{
        f"tests/c/net_plugin/net_versions.c:{name}": "NCCL's own signature"
        for name in ("isend_10", "irecv_8", "irecv_9", "irecv_10")
    },
    "csrc/core/run/boot.c:store_get": "arguments of the store's callback, and the parts of the key",
    "csrc/core/format/codec.c:sp_codec_write": "the slice, the format and the result of its scan; two callers",
    "csrc/core/format/format.c:sp_frame_write_header": "one parameter per field of the header",
    "csrc/transport/start/rendezvous.c:call": "a request and its reply, for both set and get",
    "csrc/transport/local/ringlink.c:sp_ring_link_init": "two directions of a link, two parameters each",
}

# (pattern, prefixes of the paths where it is searched for, what to do instead). In the library, comments and
# string literals are not searched.
WORDS = (
    (r"\b(TODO|FIXME|XXX|HACK)\b(?!\s*\(#\d+\))", ANYWHERE, "finish it, or name an issue: (#12)"),
    (r"(?<![\w.])/(root|home/\w+|work/\w+)/", ANYWHERE, "no path of one machine"),
    (r"^\s*#\s*if\s+0\b", ANYWHERE, "no dead code"),
    (r"^(<<<<<<<|>>>>>>>) ", ANYWHERE, "a conflict marker of git"),
    (r"[ \t]+$", ANYWHERE, "no spaces at the end of a line"),
    (r"(?<![\w.>])(printf|exit|abort|system)\s*\(", LIBRARY, "the library returns errors, and logs by log.h"),
    (r"(?<![\w.>])(gets|strcpy|strcat|sprintf|alloca)\s*\(", LIBRARY, "not safe: use the bounded one"),
)


def tracked() -> list[str]:
    """The text files that git tracks; without a repository, all that are in the folder."""
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listing.returncode == 0:
        names = listing.stdout.split("\0")
    else:
        skip = {".venv", "build", "__pycache__"}
        paths = [p.relative_to(ROOT) for p in ROOT.rglob("*")]
        names = [str(p) for p in paths if not skip & set(p.parts)]
    return sorted(n for n in names if n and (ROOT / n).is_file() and _is_text(ROOT / n))


def _is_text(path: Path) -> bool:
    try:
        path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return False
    data = {"golden", "corpus"} & set(path.parts)
    return not data and path.suffix not in (".svg", ".json")


def without_comments(text: str) -> str:
    """C text with comments and literals replaced by spaces. Lines keep their numbers."""
    pattern = r'/\*.*?\*/|//[^\n]*|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\''
    return re.sub(pattern, lambda m: re.sub(r"[^\n]", " ", m.group()), text, flags=re.DOTALL)


def c_functions(text: str) -> Iterator[tuple[str, int, int, int, int]]:
    """(name, first line, number of lines, number of parameters, most parameters allowed) of each function whose
    definition starts at column 0."""
    directive = r"^\s*#(?:.*\\\n)*.*$"
    code = re.sub(directive, lambda m: "\n" * m.group().count("\n"), without_comments(text), flags=re.M)
    head_pattern = r"^[A-Za-z_][\w\s*&:<>,]*[\s*&]([\w:~]+)\s*\(([^;{}]*)\)[^;{}()]*\{"
    for head in re.finditer(head_pattern, code, re.MULTILINE):
        depth, end = 0, head.end() - 1
        for end in range(head.end() - 1, len(code)):
            depth += {"{": 1, "}": -1}.get(code[end], 0)
            if depth == 0:
                break
        parameters = head.group(2).strip()
        count = 0 if parameters in ("", "void") else _split_commas(parameters)
        first = code.count("\n", 0, head.start()) + 1
        most = MAX_DEVICE_PARAMETERS if "__device__" in head.group() else MAX_PARAMETERS
        yield head.group(1), first, code.count("\n", head.start(), end) + 1, count, most


def _split_commas(parameters: str) -> int:
    depth = count = 0
    for char in parameters:
        depth += {"(": 1, "<": 1, ")": -1, ">": -1}.get(char, 0)
        count += char == "," and depth == 0
    return count + 1


def py_functions(text: str) -> Iterator[tuple[str, int, int, int, int]]:
    """As c_functions, for Python. Signature and docstring do not count as lines."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            documented = ast.get_docstring(node, clean=False) is not None and len(node.body) > 1
            lines = (node.end_lineno or node.lineno) - node.body[documented].lineno + 1
            count = len(node.args.posonlyargs) + len(node.args.args)
            yield node.name, node.lineno, lines, count, MAX_PARAMETERS


def size_faults(name: str, text: str, used: set[str]) -> Iterator[str]:
    """Files and functions that are too long, functions with too many parameters."""
    n_lines = text.count("\n")
    is_header = name.endswith((".h", ".hpp", ".cuh"))
    if n_lines > MAX_FILE_LINES and not is_header and not _allowed(name, ALLOWED_SIZE, used):
        yield f"{name}: {n_lines} lines, at most {MAX_FILE_LINES}"
    functions = py_functions(text) if name.endswith(".py") else c_functions(text)
    for function, first, lines, parameters, most in functions:
        key = f"{name}:{function}"
        if lines > MAX_FUNCTION_LINES and not _allowed(key, ALLOWED_SIZE, used):
            yield f"{name}:{first}: {function} has {lines} lines, at most {MAX_FUNCTION_LINES}"
        public = function.startswith("spccl_") or name.endswith(".py")
        if parameters > most and not public and not _allowed(key, ALLOWED_PARAMETERS, used):
            yield f"{name}:{first}: {function} takes {parameters} parameters, at most {most}"


def _allowed(key: str, table: dict[str, str], used: set[str]) -> bool:
    used.add(key)
    return key in table


def word_faults(name: str, text: str) -> Iterator[str]:
    """Words that this file must not contain."""
    if name == "tests/check_style.py":  # it contains the patterns
        return
    code = without_comments(text) if name.startswith(LIBRARY) else ""
    for pattern, prefixes, advice in WORDS:
        if name.startswith(prefixes):
            body = code if prefixes == LIBRARY else text
            for number, line in enumerate(body.split("\n"), 1):
                if re.search(pattern, line):
                    yield f"{name}:{number}: {advice}: {line.strip()[:80]}"


def document_faults(name: str, text: str) -> Iterator[str]:
    """Lines of prose of a *.md file that are too long, and relative links to files that do not exist.

    Code blocks are not checked. Tables may be wide, and URLs do not count as columns.
    """
    in_code = False
    for number, line in enumerate(text.split("\n"), 1):
        if line.lstrip().startswith("```"):
            in_code = not in_code
            continue
        if in_code:
            continue
        n_columns = len(re.sub(r"https?://[^\s)>]+", "", line))
        if n_columns > MAX_PROSE_COLUMNS and not line.lstrip().startswith("|"):
            yield f"{name}:{number}: {n_columns} columns, at most {MAX_PROSE_COLUMNS}: {line.strip()[:60]}"
        for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`]*`", "", line)):
            path = target.partition("#")[0]
            if path and not re.match(r"[a-z]+:", path) and not (ROOT / name).parent.joinpath(path).exists():
                yield f"{name}:{number}: the link leads to {path}, which does not exist"


def name_faults(names: list[str]) -> Iterator[str]:
    """pytest refuses to collect two test files of one name."""
    seen: dict[str, str] = {}
    for name in names:
        file = Path(name).name
        if name.startswith("tests/") and file.startswith("test_") and file.endswith(".py"):
            if file in seen:
                yield f"{name}: pytest cannot collect it beside {seen[file]}: give it another name"
            seen[file] = name


def main() -> int:
    names, used, faults = tracked(), set(), []
    for name in names:
        text = (ROOT / name).read_text(encoding="utf-8")
        faults += word_faults(name, text)
        if Path(name).suffix in C_SUFFIXES or name.endswith(".py"):
            faults += size_faults(name, text, used)
        if name.endswith(".md"):
            faults += document_faults(name, text)
    stale = sorted((set(ALLOWED_SIZE) | set(ALLOWED_PARAMETERS)) - used)
    faults += name_faults(names)
    faults += [f"check_style.py: the exception for {key} is not needed: delete it" for key in stale]
    print("\n".join([*faults, f"check_style: {len(names)} files, {len(faults)} faults"]))
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
