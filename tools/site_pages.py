"""The site of `make docs`: gathers the pages, writes the API reference, and has mkdocs check and build it.

Pages are the Markdown files of the repository, each in its own place, with every file that they link to. The reference
of Python comes from docstrings, that of C from the comments and declarations of the public headers.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from env import BUILD, ROOT, EnvError, child_env, digest, is_stamped, make_venv, must_run, say, write_stamp

FOLDER = BUILD / "docs"
PAGES, VENV = FOLDER / "pages", FOLDER / "venv"
REQUIREMENTS = ROOT / "tools/docs.txt"
SOURCES = ("*.md", "docs/*.md", "bench/*.md", "bench/*/*.md", "examples/*/*.md", "tests/*/README.md")
HEADERS = ("spccl.h", "spccl_channel.h", "spccl_device.cuh", "spccl_experimental.h")
# What users import, in the order of the page; in backend and the like all that is public.
PYTHON = (
    ("Arrays and groups", ("encode", "decode", "inspect", "FrameInfo", "Communicator", "Request", "Stats", "info")),
    ("torch.distributed", ("backend",)),
    ("Training", ("ddp", "fsdp", "optim.SparseSync", "optim.Geometric")),
    ("Weight sync", ("sync.Publisher", "sync.Subscriber", "sync.Place")),
    ("Frameworks", ("integrations._trainer", "integrations._accelerate", "integrations._lightning")),
    ("Errors", ("errors",)),
)
_LINK = re.compile(r"\]\(([^)\s#]+)(#[^)\s]*)?\)")


def build_site() -> Path:
    """Make the site, or raise EnvError for a link that leads nowhere. Returns its first page."""
    _ensure_venv()
    shutil.rmtree(PAGES, ignore_errors=True)
    for page in sorted({path for pattern in SOURCES for path in ROOT.glob(pattern)}):
        _gather(page)
    (PAGES / "api").mkdir()
    (PAGES / "api/python.md").write_text(_python_page())
    for header in HEADERS:
        (PAGES / f"api/{header}.md").write_text(header_page(header, (ROOT / "csrc" / header).read_text()))
    # Not --quiet: then --strict counts no warnings, and a broken link passes.
    command = [VENV / "bin/mkdocs", "build", "--strict", "-f", ROOT / "mkdocs.yml"]
    must_run("mkdocs", command, "docs", env=child_env(NO_MKDOCS_2_WARNING="1"))
    return FOLDER / "site/index.html"


def _ensure_venv() -> None:
    key = digest(REQUIREMENTS.read_text())
    if not is_stamped(VENV / ".stamp", key):
        say("set-up: build/docs/venv with mkdocs (once)")
        make_venv(VENV)
        must_run(
            "pip install", [VENV / "bin/python", "-m", "pip", "install", "-r", REQUIREMENTS], "docs", timeout_s=900
        )
        write_stamp(VENV / ".stamp", key)


def _gather(page: Path) -> None:
    """Copy a page, and the files that it links to and that are no pages. What is missing there mkdocs reports."""
    text = page.read_text()
    _copy(page, text)
    for target, _ in _LINK.findall(re.sub(r"```.*?```|`[^`\n]*`", "", text, flags=re.S)):
        linked = (page.parent / target).resolve()
        if "://" not in target and linked.suffix != ".md" and linked.is_file():
            _copy(linked, None)


def _copy(path: Path, text: str | None) -> None:
    copy = PAGES / path.relative_to(ROOT)
    copy.parent.mkdir(parents=True, exist_ok=True)
    if text is None:
        shutil.copyfile(path, copy)
    else:
        copy.write_text(text)


def _python_page() -> str:
    parts = ["# Python reference\n"]
    for title, names in PYTHON:
        parts.append(f"\n## {title}\n")
        parts += [f"\n::: spccl.{name}\n    options: {{heading_level: 3}}\n" for name in names]
    return "".join(parts)


# ---- C ---------------------------------------------------------------------------------------------------


def header_page(name: str, text: str) -> str:
    """The page of a header: a heading for each section, and for each declaration its comment and itself."""
    out, shown_names = [f"# {name}\n"], set()
    guard = re.search(r"^#(?:ifndef|pragma once)", text, re.M)
    intro = text[: guard.start()] if guard else ""
    out.append("\n" + _prose(intro) + "\n")
    for block in _blocks(text[len(intro) :]):
        section = re.match(r"/[/*] ---- (.*?)(?: -{4,}.*)?(?:\n|$)", block)
        if section is not None:
            out.append(f"\n## {section[1]}\n")
            block = block[section.end() :].strip("\n")
        names = _declared(block)
        if not names:
            if block.startswith(("/*", "//")) and not re.search(r"^(?![ /*])\S", block, re.M):
                out.append("\n" + _prose(block) + "\n")
            continue
        shown_names |= set(names)
        out.append(f"\n### {', '.join(names[:4])}{' ...' if len(names) > 4 else ''}\n")
        shown = re.sub(r"\)\n\{\n.*?^\}", ");", block, flags=re.S | re.M)  # inline functions without their bodies
        out.append(f"\n```c\n{shown}\n```\n")
    missing = set(re.findall(r"^SPCCL_API .*?\b(spccl_\w+)\(", text, re.M)) - shown_names
    if missing:
        raise EnvError(f"docs: the page of {name} lacks {', '.join(sorted(missing))}; mend tools/site_pages.py")
    return "".join(out)


def _blocks(text: str) -> list[str]:
    """Pieces between empty lines outside of comments and braces."""
    pieces: list[list[str]] = [[]]
    depth, in_comment = 0, False
    for line in text.split("\n"):
        if not line.strip() and depth <= 0 and not in_comment:
            pieces.append([])
            continue
        pieces[-1].append(line)
        bare = re.sub(r"//.*|/\*.*?\*/", "", line)
        in_comment = ("/*" in bare or in_comment) and "*/" not in bare
        if 'extern "C"' not in line and not in_comment:
            depth = max(0, depth + bare.count("{") - bare.count("}"))
    return ["\n".join(piece) for piece in pieces if piece]


def _declared(block: str) -> list[str]:
    """Names that a block declares: functions, types, macros of users; not what only compilers read."""
    code = re.sub(r"//[^\n]*|/\*.*?\*/", "", block, flags=re.S)
    names = re.findall(r"^#define (SPCCL_\w+)", code, re.M)
    names += re.findall(r"\b(spccl_\w+)\s*\(", re.sub(r"\{.*?\}", "", code, flags=re.S))
    names += re.findall(r"(?:^\}|^typedef struct \w+)\s*(spccl_\w+)\s*;", code, re.M)
    hidden = {"SPCCL_API", "SPCCL_H", "SPCCL_CHANNEL_H", "SPCCL_DEVICE_CUH", "SPCCL_EXPERIMENTAL_H"}
    return [name for name in dict.fromkeys(names) if name not in hidden]


def _prose(comment: str) -> str:
    """A comment without its marks. Its lines stay, as some are tables."""
    text = re.sub(r"^\s*/\*+ ?|\s*\*/\s*$", "", comment.strip())
    return "```text\n" + re.sub(r"^ ?(?:\*|//) ?", "", text, flags=re.M) + "\n```"
