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
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from .cases import ELEM_BYTES, Case

Column = tuple[str, str, int, str | Callable[[Any], Any], str]  # name, unit, width, field or value of a row, format


def wrong_elems(row: Any) -> int:
    return row.wrong + (row.peer_wrong or 0)


def times(ratio: float | None) -> str | None:
    return None if ratio is None else f"{ratio:.2f}x"


def _peer_resent(row: HostRow) -> str | None:
    return None if row.peer_retransmits is None else f"{row.peer_retransmits}/{row.peer_timeouts}"


def _line(cells: Sequence[tuple[str, int]]) -> str:
    """Texts, each in its width: right-aligned, or left-aligned if the width is negative."""
    return " ".join(text.ljust(-width) if width < 0 else text.rjust(width) for text, width in cells).rstrip()


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

    # The table on the terminal: columns of nccl-tests and some more. None is written as "-".
    columns: ClassVar[tuple[Column, ...]] = (
        ("collective", "", -14, "collective", ""),
        ("size", "(B)", 11, "size_bytes", ""),
        ("count", "(elements)", 11, "count", ""),
        ("type", "", 8, "dtype", ""),
        ("op", "", 5, "op", ""),
        ("zeros", "(%)", 7, lambda row: 100 * row.sparsity, "g"),
        ("formats", "", 20, "format_mix", ""),
        ("wire", "(B/rank)", 11, "wire_bytes", ""),
        ("time", "(us)", 10, "time_us", ".1f"),
        ("p10", "(us)", 10, "time_p10_us", ".1f"),
        ("p90", "(us)", 10, "time_p90_us", ".1f"),
        ("algbw", "(GB/s)", 8, "algbw_gbs", ".2f"),
        ("busbw", "(GB/s)", 8, "busbw_gbs", ".2f"),
        ("peer", "(us)", 10, "peer_time_us", ".1f"),
        ("ratio", "", 7, lambda row: times(row.ratio), ""),
        ("#wrong", "", 6, wrong_elems, ""),
    )

    @classmethod
    def head(cls, peer: str = "peer") -> str:
        """Two lines that name the columns of `line`, and their units. peer: name of the dense library, or "none"."""
        columns = [c if c[0] != "peer" else (peer, "" if peer == "none" else c[1], *c[2:]) for c in cls.columns]
        return "".join(("# ", _line([(c[0], c[2]) for c in columns]), "\n# ", _line([(c[1], c[2]) for c in columns])))

    def line(self) -> str:
        """This row as one line of the table."""
        cells = []
        for _, _, width, value, form in self.columns:
            found = getattr(self, value) if isinstance(value, str) else value(self)
            cells.append(("-" if found is None else format(found, form), width))
        return "  " + _line(cells)


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

    columns: ClassVar[tuple[Column, ...]] = (
        *Row.columns,
        ("t/wire", "", 8, "time_over_wire", ".2f"),
        ("resent", "", 8, "retransmits", ""),
        ("timeouts", "", 8, "timeouts", ""),
        ("peer's", "", 8, _peer_resent, ""),
    )

    def line(self) -> str:
        text = super().line()
        if self.alone_us and self.first_us and self.last_us and self.first_bytes:
            text += (
                f"\n#   {self.in_flight} in flight: the first is done after {self.first_us:.1f} us, the last after "
                f"{self.last_us:.1f} us; one alone takes {self.alone_us:.1f} us; first / alone = "
                f"{self.first_us / self.alone_us:.2f} in time, {self.first_bytes / self.host_bytes:.2f} in bytes"
            )
        return text


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


def percentiles_us(seconds: Any) -> dict[str, float]:
    """Median, 10th and 90th percentile, as a row's fields."""
    p10, median, p90 = (float(1e6 * t) for t in np.percentile(seconds, [10, 50, 90]))
    return {"time_us": median, "time_p10_us": p10, "time_p90_us": p90}


@dataclasses.dataclass(frozen=True)
class Measured:
    """The measurements of one case.

    times: by system, [iters] seconds per call of the slowest rank; one system is "spccl".
    wrong: by system, wrong elements of all ranks.
    wire_bytes: bytes that spccl sent per call, mean over the ranks.
    frames: by format, frames that all ranks sent, or a multiple.
    host: by system, seconds for which one call occupies the calling thread.
    dense_bytes: as wire_bytes, if the messages were dense; 0: not counted.
    """

    times: dict[str, np.ndarray]
    wrong: dict[str, int]
    wire_bytes: float
    frames: dict[str, int]
    host: dict[str, float]
    dense_bytes: float = 0.0


def make_row(case: Case, m: Measured, *, via: str, world_size: int, peer: str, dense_bytes: float) -> Row:
    """Make a row. peer: the system in `m` to compare with, or "none". Times of equal index are a pair."""
    ours_s, peer_s = m.times["spccl"], m.times.get(peer)
    others = [n for name, n in m.wrong.items() if name != "spccl"]
    block = case.block_elems(world_size)
    size = block * case.n_blocks(world_size) * ELEM_BYTES[case.dtype]
    ratios: dict[str, float | None] = dict.fromkeys(("ratio", "ratio_p10", "ratio_p90"))
    peer_us: dict[str, float | None] = dict.fromkeys(("peer_time_us", "peer_p10_us", "peer_p90_us"))
    if peer_s is not None:
        p10, p90 = np.percentile(peer_s / ours_s, [10, 90])
        median = np.median(peer_s) / np.median(ours_s)
        ratios = {"ratio": float(median), "ratio_p10": float(p10), "ratio_p90": float(p90)}
        peer_us = dict(zip(peer_us, percentiles_us(peer_s).values(), strict=True))
    algbw = algbw_gbs(size, float(np.median(ours_s)))
    return Row(
        **{name: getattr(case, name) for name in ("collective", "dtype", "op", "sparsity")},
        **percentiles_us(ours_s),
        **peer_us,
        **ratios,
        via=via,
        ranks=world_size,
        size_bytes=size,
        count=block,
        format_mix=format_mix(m.frames),
        wire_bytes=round(m.wire_bytes),
        dense_bytes=round(dense_bytes),
        algbw_gbs=algbw,
        busbw_gbs=algbw * bus_factor(case.collective, world_size),
        peer=peer,
        wrong=m.wrong["spccl"],
        peer_wrong=sum(others) if others else None,
        iters=len(ours_s),
        calls_per_iter=case.calls(),
        schedule=os.environ.get("SPCCL_SCHEDULE") or "auto",
        format=os.environ.get("SPCCL_FORMAT") or "auto",
    )


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
