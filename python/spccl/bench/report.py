"""Result rows: table, CSV, JSON, and facts about the machine. Only this file computes bandwidths."""

from __future__ import annotations

import csv
import dataclasses
import importlib
import io
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from .cases import ELEM_BYTES, Case


@dataclasses.dataclass(frozen=True)
class Row:
    """One measured case. Times are microseconds per call of the slowest rank, medians over the iterations.

    size_bytes: dense bytes of the larger buffer of a rank. count: elements of the smaller buffer.
    wire_bytes: bytes that one rank sent per call, mean over the ranks. dense_bytes: bytes that the same messages
        would have if they were dense.
    wrong, peer_wrong: elements that differed from the expected result, checked before timing.
    ratio: time of the peer / time of spccl. ratio_p10, ratio_p90: over pairs of neighbouring iterations.
    schedule, format: what SPCCL_SCHEDULE and SPCCL_FORMAT forced; "auto": spccl chose.
    """

    collective: str
    via: str
    ranks: int
    size_bytes: int
    count: int
    dtype: str
    op: str
    sparsity: float
    format_mix: str
    wire_bytes: int
    dense_bytes: int
    time_us: float
    time_p10_us: float
    time_p90_us: float
    algbw_gbs: float
    busbw_gbs: float
    peer: str
    peer_time_us: float | None
    peer_p10_us: float | None
    peer_p90_us: float | None
    ratio: float | None
    ratio_p10: float | None
    ratio_p90: float | None
    wrong: int
    peer_wrong: int | None
    iters: int
    calls_per_iter: int
    schedule: str = dataclasses.field(default="auto", kw_only=True)
    format: str = dataclasses.field(default="auto", kw_only=True)


@dataclasses.dataclass(frozen=True)
class HostRow(Row):
    """A case on emulated hosts (hosts.py).

    link_gbs: payload that one TCP connection carries over a link, 1e9 bytes/s, measured before the cases.
    host_bytes: bytes that the busiest host sent per call, with all headers. time_over_wire: time / (host_bytes / link).
    retransmits, timeouts: TCP segments sent again, and TCP retransmission time-outs, of all hosts in all timed
    iterations.
    in_flight: calls that were issued together; 0: not measured. alone_us: time of one call that was issued alone.
        first_us, last_us: time until the first and the last of `in_flight` calls were done. first_bytes: bytes that a
        host sent until its first was done. All are medians of the slowest rank or largest host, in the same run.
    """

    hosts: int
    link_gbs: float
    host_bytes: int
    time_over_wire: float
    retransmits: int
    timeouts: int
    peer_retransmits: int | None
    peer_timeouts: int | None
    in_flight: int = 0
    alone_us: float | None = None
    first_us: float | None = None
    last_us: float | None = None
    first_bytes: int | None = None


def bus_factor(collective: str, world_size: int) -> float:
    """busbw / algbw: the bytes that the busiest link must carry, per byte of the size. Source: nccl-tests,
    doc/PERFORMANCE.md."""
    n = world_size
    return {
        "all_gather": (n - 1) / n,
        "reduce_scatter": (n - 1) / n,
        "all_reduce": 2 * (n - 1) / n,
        "broadcast": 1.0,
    }[collective]


def algbw_gbs(size_bytes: int, time_s: float) -> float:
    """Dense bytes of the case per second, in 1e9 bytes/s."""
    return size_bytes / time_s / 1e9 if time_s > 0 else 0.0


def format_mix(frames: dict[str, int]) -> str:
    """{"tile": 97, "dense": 3} -> "tile 97% dense 3%", most frequent first."""
    total = sum(frames.values())
    used = sorted(((n, name) for name, n in frames.items() if n), reverse=True)
    return " ".join(f"{name} {100 * n / total:.0f}%" for n, name in used) or "-"


def make_row(
    case: Case,
    *,
    via: str,
    world_size: int,
    ours_s: np.ndarray,
    peer: str,
    peer_s: np.ndarray | None,
    wrong: int,
    peer_wrong: int | None,
    wire_bytes: float,
    dense_bytes: float,
    frames: dict[str, int],
) -> Row:
    """Make a row. ours_s, peer_s: [iters] seconds per call of the slowest rank; entries of equal index are a pair."""
    p10, median, p90 = np.percentile(ours_s, [10, 50, 90])
    block = case.block_elems(world_size)
    blocks = world_size if case.collective in ("all_gather", "reduce_scatter") else 1
    size = block * blocks * ELEM_BYTES[case.dtype]
    peer_us: list[float | None] = [None] * 3
    ratios: list[float | None] = [None] * 3
    if peer_s is not None:
        peer_us = [float(1e6 * t) for t in np.percentile(peer_s, [10, 50, 90])]
        paired = np.percentile(peer_s / ours_s, [10, 90])
        ratios = [float(paired[0]), float(np.median(peer_s) / median), float(paired[1])]
    algbw = algbw_gbs(size, float(median))
    return Row(
        collective=case.collective,
        via=via,
        ranks=world_size,
        size_bytes=size,
        count=block,
        dtype=case.dtype,
        op=case.op,
        sparsity=case.sparsity,
        format_mix=format_mix(frames),
        wire_bytes=round(wire_bytes),
        dense_bytes=round(dense_bytes),
        time_us=float(1e6 * median),
        time_p10_us=float(1e6 * p10),
        time_p90_us=float(1e6 * p90),
        algbw_gbs=algbw,
        busbw_gbs=algbw * bus_factor(case.collective, world_size),
        peer=peer,
        peer_time_us=peer_us[1],
        peer_p10_us=peer_us[0],
        peer_p90_us=peer_us[2],
        ratio=ratios[1],
        ratio_p10=ratios[0],
        ratio_p90=ratios[2],
        wrong=wrong,
        peer_wrong=peer_wrong,
        iters=len(ours_s),
        calls_per_iter=case.calls(),
        schedule=os.environ.get("SPCCL_SCHEDULE") or "auto",
        format=os.environ.get("SPCCL_FORMAT") or "auto",
    )


# ---- the table on the terminal: columns of nccl-tests and some more ----

_COLUMNS = (
    ("collective", 14, "<"),
    ("size", 11, ">"),
    ("count", 11, ">"),
    ("type", 8, ">"),
    ("op", 5, ">"),
    ("zeros", 7, ">"),
    ("formats", 20, ">"),
    ("wire", 11, ">"),
    ("time", 10, ">"),
    ("p10", 10, ">"),
    ("p90", 10, ">"),
    ("algbw", 8, ">"),
    ("busbw", 8, ">"),
    ("peer", 10, ">"),
    ("ratio", 7, ">"),
    ("#wrong", 6, ">"),
)
_UNITS = ("", "(B)", "(elements)", "", "", "(%)", "", "(B/rank)", "(us)", "(us)", "(us)", "(GB/s)", "(GB/s)")


def _line(cells: Iterable[str]) -> str:
    return " ".join(f"{cell:{align}{width}}" for cell, (_, width, align) in zip(cells, _COLUMNS, strict=True)).rstrip()


_HOST_COLUMNS = ("t/wire", "resent", "timeouts", "peer's")


def _host_cells(cells: Iterable[str]) -> str:
    return "".join(f" {cell:>8}" for cell in cells)


def table_head(peer: str, with_hosts: bool = False) -> str:
    """Two lines that name the columns. with_hosts: also those of emulated hosts."""
    names = [peer if name == "peer" else name for name, _, _ in _COLUMNS]
    units = [*_UNITS, "(us)" if peer != "none" else "", "", ""]
    more = _host_cells(_HOST_COLUMNS) if with_hosts else ""
    return "# " + _line(names) + more + "\n# " + _line(units)


def table_line(row: Row) -> str:
    """One row, under `table_head`."""
    more = ""
    if isinstance(row, HostRow):
        peer = "-" if row.peer_retransmits is None else f"{row.peer_retransmits}/{row.peer_timeouts}"
        more = _host_cells((f"{row.time_over_wire:.2f}", f"{row.retransmits}", f"{row.timeouts}", peer))
        if row.alone_us and row.first_us and row.last_us and row.first_bytes:
            more += (
                f"\n#   {row.in_flight} in flight: the first is done after {row.first_us:.1f} us, the last after "
                f"{row.last_us:.1f} us; one alone takes {row.alone_us:.1f} us; first / alone = "
                f"{row.first_us / row.alone_us:.2f} in time, {row.first_bytes / row.host_bytes:.2f} in bytes"
            )
    cells = [
        row.collective,
        str(row.size_bytes),
        str(row.count),
        row.dtype,
        row.op,
        f"{100 * row.sparsity:g}",
        row.format_mix,
        str(row.wire_bytes),
        f"{row.time_us:.1f}",
        f"{row.time_p10_us:.1f}",
        f"{row.time_p90_us:.1f}",
        f"{row.algbw_gbs:.2f}",
        f"{row.busbw_gbs:.2f}",
        "-" if row.peer_time_us is None else f"{row.peer_time_us:.1f}",
        "-" if row.ratio is None else f"{row.ratio:.2f}x",
        str(row.wrong + (row.peer_wrong or 0)),
    ]
    return "  " + _line(cells) + more


# ---- files ----


def command() -> str:
    """The command line for the result files. Absolute paths are cut to their last part."""
    return " ".join(["spccl"] + [_without_folder(word) for word in sys.argv[1:]])


def _without_folder(word: str) -> str:
    return re.sub(r"^(-*[\w-]+=)?/.*/", r"\1", word)


def settings() -> str:
    """The variables of spccl and of the dense libraries that are set, for the result files."""
    names = sorted(name for name in os.environ if re.match("(SPCCL|NCCL|GLOO|TORCH_NCCL|OMP)_", name))
    return " ".join(_without_folder(f"{name}={os.environ[name]}") for name in names if name != "SPCCL_COMMIT") or "none"


def machine() -> dict[str, str]:
    """Facts about this machine and code: CPU, cores, memory, versions, the commit of the source tree, settings."""
    facts = {
        "cpu": _cpu_model(),
        "cores": str(len(os.sched_getaffinity(0))),
        "memory": f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.1f} GiB",
        "system": platform.platform(),
        "python": platform.python_version(),
        "commit": _commit(),
    }
    for name in ("spccl", "numpy", "torch"):
        facts[name] = _version(name)
    return facts | {"settings": settings()}


def _version(name: str) -> str:
    if name == "spccl":
        return str(importlib.import_module("spccl").__version__)
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "absent"


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or "unknown"
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")


def _commit() -> str:
    """SPCCL_COMMIT, else the commit of the source tree that has this file or the current folder, else "unknown"."""
    given = os.environ.get("SPCCL_COMMIT", "").strip()
    if given:
        return given
    for folder in (Path(__file__).resolve().parent, Path.cwd()):
        try:
            git = ["git", "-C", str(folder)]
            top = subprocess.run([*git, "rev-parse", "--show-toplevel"], capture_output=True, text=True, timeout=10)
            if top.returncode != 0 or not (Path(top.stdout.strip()) / "csrc" / "spccl.h").is_file():
                continue
            describe = [*git, "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
            commit = subprocess.run(describe, capture_output=True, text=True, timeout=10)
            if commit.returncode == 0:
                return commit.stdout.strip()
        except (OSError, subprocess.TimeoutExpired):
            continue
    return "unknown"


def to_csv(rows: Sequence[Any], facts: dict[str, str]) -> str:
    """Facts as "# key: value" lines, then the rows: dataclasses of one kind."""
    text = io.StringIO()
    for key, value in facts.items():
        text.write(f"# {key}: {value}\n")
    fields = dataclasses.fields(rows[0] if rows else Row)
    writer = csv.DictWriter(text, [field.name for field in fields], lineterminator="\n")
    writer.writeheader()
    writer.writerows(dataclasses.asdict(row) for row in rows)
    return text.getvalue()


def to_json(rows: Sequence[Any], facts: dict[str, str]) -> str:
    """{"machine": facts, "rows": [...]}."""
    document: dict[str, Any] = {"machine": facts, "rows": [dataclasses.asdict(row) for row in rows]}
    return json.dumps(document, indent=1) + "\n"


def read_csv(path: Path) -> tuple[list[dict[str, str]], dict[str, str]]:
    """Rows and facts of a file that `to_csv` wrote.

    Files of older versions lack the columns that have a default. Raises: ValueError if `to_csv` did not write the file.
    """
    lines = path.read_text().splitlines()
    facts = dict(line[2:].split(": ", 1) for line in lines if line.startswith("# ") and ": " in line)
    rows = list(csv.DictReader(line for line in lines if not line.startswith("#")))
    wanted = {field.name for field in dataclasses.fields(Row) if field.default is dataclasses.MISSING}
    if not rows or not wanted <= set(rows[0]):
        missing = ", ".join(sorted(wanted - set(rows[0] if rows else ())))
        raise ValueError(f"{path}: not a result of `spccl bench --csv`: no rows with columns {missing}")
    return rows, facts
