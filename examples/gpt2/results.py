"""Runs of measure.py -> rows: medians with their spread, a table and a CSV with machine and commit."""

import csv
import sys
from dataclasses import dataclass, fields
from pathlib import Path
from statistics import median
from typing import Any, get_type_hints

import torch
from modes import MODES
from rich.console import Console
from rich.table import Table

from spccl.bench import report


@dataclass(frozen=True)
class Run:
    """One run of one mode. What was not measured is None."""

    step_ms: float
    compute_ms: float
    prune_ms: float | None
    n_buckets: int
    density_sent: float
    hook_us: float | None
    memory_gib: float | None
    loss: float


@dataclass(frozen=True)
class Row:
    """One mode: medians over the runs; _min and _max are the least and the greatest of the runs.

    compute_ms: the step without exchange (no_sync). exposed_ms: step_ms - compute_ms of the same run.
    prune_ms: what the hook adds to a step in a group of one rank, which exchanges nothing. It is a part of exposed_ms.
    prune_ms may be of fewer runs than the rest (--prune-rounds). max_ctas: the hook's; 0: not limited.
    density, density_sent: asked for, and sent in the last step of a run, over all pruned parameters; 1 is dense.
    hook_us: time of the host in the hook per bucket. memory_gib: peak of torch's allocator, of the step.
    loss: mean over ranks, of the last timed step of the last run.
    """

    size: str
    n_parameters: int
    variant: str
    device: str
    ranks: int
    micro_batch: int
    context: int
    mode: str
    bucket_mb: int
    n_buckets: int
    runs: int
    steps: int
    step_ms: float
    step_min_ms: float
    step_max_ms: float
    compute_ms: float
    compute_min_ms: float
    compute_max_ms: float
    exposed_ms: float
    exposed_min_ms: float
    exposed_max_ms: float
    prune_ms: float | None
    prune_min_ms: float | None
    prune_max_ms: float | None
    density: float
    density_sent: float
    max_ctas: int
    hook_us: float | None
    memory_gib: float | None
    loss: float


def slowest(ranks: list[Run]) -> Run:
    """One run from those of all ranks: the greatest of each value, and the mean of density and loss."""
    merged = {}
    for field in fields(Run):
        values = [getattr(rank, field.name) for rank in ranks]
        if field.name in ("density_sent", "loss"):
            merged[field.name] = sum(values) / len(values)
        else:
            merged[field.name] = None if None in values else max(values)
    return Run(**merged)


def make_row(setting: dict[str, Any], mode: str, bucket_mb: int, runs: list[Run]) -> Row:
    exposed = [run.step_ms - run.compute_ms for run in runs]
    return Row(
        mode=mode,
        bucket_mb=bucket_mb,
        n_buckets=runs[-1].n_buckets,
        runs=len(runs),
        **_spread("step", [run.step_ms for run in runs]),
        **_spread("compute", [run.compute_ms for run in runs]),
        **_spread("exposed", exposed),
        **_spread("prune", [run.prune_ms for run in runs if run.prune_ms is not None] or [None]),
        density_sent=round(median(run.density_sent for run in runs), 7),
        hook_us=_median([run.hook_us for run in runs]),
        memory_gib=_median([run.memory_gib for run in runs]),
        loss=round(runs[-1].loss, 6),
        **(setting | ({} if MODES[mode].hook is not None else {"density": 1.0, "max_ctas": 0})),
    )


def _median(values: list[float | None]) -> float | None:
    return None if None in values else round(median(values), 3)


def _spread(name: str, values: list[float | None]) -> dict[str, float | None]:
    numbers = [None] * 3 if None in values else [round(f(values), 3) for f in (median, min, max)]
    return dict(zip((f"{name}_ms", f"{name}_min_ms", f"{name}_max_ms"), numbers, strict=True))


def show(rows: list[Row]) -> None:
    """Print the table, and below it the ratio of the best pruned exchange to the best dense one."""
    first = rows[0]
    title = (
        f"GPT-2 {first.size}, {first.n_parameters / 1e6:.1f} M parameters, {first.ranks} x {first.device}, "
        f"{first.variant}, {first.micro_batch} x {first.context} tokens per rank; "
        f"ms, median (least to greatest) of {first.runs} runs"
    )
    table = Table(title=title, title_justify="left")
    table.add_column("exchange")
    heads = ("bucket\nMB", "step", "compute alone", "exposed:\nstep - compute", "of it\npruning", "density\nsent")
    for head in (*heads, "hook, us of\nhost/bucket", "memory\nGiB", "loss"):
        table.add_column(head, justify="right")
    for row in rows:
        table.add_row(
            MODES[row.mode].title,
            str(row.bucket_mb),
            _cell(row.step_ms, row.step_min_ms, row.step_max_ms),
            _cell(row.compute_ms, row.compute_min_ms, row.compute_max_ms),
            _cell(row.exposed_ms, row.exposed_min_ms, row.exposed_max_ms),
            _cell(row.prune_ms, row.prune_min_ms, row.prune_max_ms),
            f"{row.density_sent:.3%}",
            "-" if row.hook_us is None else f"{row.hook_us:.0f}",
            "-" if row.memory_gib is None else f"{row.memory_gib:.1f}",
            f"{row.loss:.3f}",
        )
    # A log has no width: do not cut the table there.
    console = Console() if sys.stdout.isatty() else Console(width=170)
    console.print(table)
    console.print(summary(rows), highlight=False, soft_wrap=True)


def _cell(middle: float | None, least: float | None, greatest: float | None) -> str:
    return "-" if middle is None else f"{middle:.1f} ({least:.1f} to {greatest:.1f})"


def summary(rows: list[Row]) -> str:
    """One sentence: the least exposed exchange, pruned over dense, each at its best bucket size."""
    if rows[0].ranks == 1:
        return "One rank exchanges nothing: what is exposed is the work of DDP and of the hook."
    dense = [row for row in rows if MODES[row.mode].hook is None]
    pruned = [row for row in rows if row.mode == "pruned"]
    if not dense or not pruned:
        return "No ratio: it needs a dense mode and the mode pruned."
    a, b = (min(some, key=lambda row: row.exposed_ms) for some in (dense, pruned))
    text = (
        f"Exposed, best bucket size of each: dense {a.exposed_ms:.1f} ms ({a.mode}, {a.bucket_mb} MB), "
        f"pruned {b.exposed_ms:.1f} ms ({b.bucket_mb} MB)"
    )
    if min(a.exposed_ms, b.exposed_ms) <= 0:
        return f"{text}; too little to give a ratio."
    return f"{text}, ratio {b.exposed_ms / a.exposed_ms:.2f}."


def write_csv(path: Path, rows: list[Row]) -> None:
    """Facts about the machine and the commit as "# key: value" lines, then the rows."""
    facts = report.machine() | {"command": report.command().replace("spccl", Path(sys.argv[0]).name, 1)}
    if rows[0].device == "cuda":
        gpu = torch.cuda.get_device_properties(0)
        facts["gpu"] = f"{rows[0].ranks} x {gpu.name}, {gpu.total_memory / 2**30:.0f} GiB"
        facts["cuda"] = str(torch.version.cuda)
        facts["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    path.write_text(report.to_csv(rows, facts))


def read_csv(path: Path) -> tuple[list[Row], dict[str, str]]:
    """Rows and facts of a file of `write_csv`. Raises: ValueError if it is another file."""
    lines = path.read_text().splitlines()
    facts = dict(line[2:].split(": ", 1) for line in lines if line.startswith("# ") and ": " in line)
    found = list(csv.DictReader(line for line in lines if not line.startswith("#")))
    if not found or set(found[0]) != {field.name for field in fields(Row)}:
        raise ValueError(f"{path}: not a CSV of measure.py, or of another version")
    kinds = get_type_hints(Row)
    return [Row(**{name: _value(kinds[name], text) for name, text in row.items()}) for row in found], facts


def _value(kind: type, text: str) -> str | int | float | None:
    if kind in (str, int):
        return kind(text)
    return float(text) if text else None
