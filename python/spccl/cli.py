"""The command line: `spccl info`, `verify`, `inspect`, `plot`; `bench` is in cli_bench.py, `schedule` in
cli_schedule.py, `simulate` in cli_simulate.py.

Exit codes: 0 success; 1 a bad file, a wrong answer or a failed rank; 2 a bad argument. Needs click and rich;
numpy for verify, bench and plot; matplotlib for plot; torch for the comparison with Gloo or NCCL.
"""

from __future__ import annotations

import json
import mmap
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import click
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from . import __version__, errors
from .cli_bench import bench_command
from .cli_schedule import schedule_group
from .cli_simulate import simulate_command
from .cli_types import Fail, OutFile, need
from .frame import FORMATS, FrameInfo, iter_frames
from .info import as_json, info, verdict

_FRAMES_SHOWN = 20

# Without a terminal rich would wrap at 80 columns. Texts contain brackets and colons that are no markup.
_width = None if sys.stdout.isatty() or "COLUMNS" in os.environ else 160
_console = Console(width=_width, highlight=False, markup=False, emoji=False)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="spccl")
def main() -> None:
    """Collectives for data that is mostly zeros."""


# ---- info ----


@main.command("info")
@click.option("--json", "as_text", is_flag=True, help="Print JSON instead of tables.")
def info_command(as_text: bool) -> None:
    """Show the parts of this build and every setting.

    First it says what is ready: CPU, PyTorch, GPUs, InfiniBand. Then for each part: whether it is in, why, and how to
    get it if it is absent.
    """
    if as_text:
        click.echo(json.dumps(as_json(), indent=1))
        return
    entries = info()
    _console.print(f"spccl {__version__}")
    _console.print(verdict(entries))
    parts = _wrapping_table(("part", 21), ("state", 18), ("why, and how to get it", None))
    tables = {
        "setting": _wrapping_table(("setting (variable)", 24), ("now", 14), ("meaning", None)),
        "debug": _wrapping_table(("debug setting", 26), ("now", 14), ("may change in any release", None)),
    }
    for entry in entries:
        if entry.kind in tables:
            tables[entry.kind].add_row(entry.name, entry.value or '""', entry.why)
            continue
        # A long value would make its column, and with it the table, too wide.
        state, why = (entry.value, entry.why) if len(entry.value) <= 18 else ("", f"{entry.value}; {entry.why}")
        name = entry.name if entry.kind in ("part", "python") else f"{entry.kind} {entry.name}"
        parts.add_row(name, state, why, style="yellow" if entry.value == "absent" else None)
    for table in (parts, *tables.values()):
        _console.print(table)


def _wrapping_table(*columns: tuple[str, int | None]) -> Table:
    """A table that fits 80 columns: (title, most columns; None = what is left). Nothing is cut off."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False, expand=True)
    for title, width in columns:
        table.add_column(title, width=width, ratio=None if width else 1, overflow="fold")
    return table


# ---- inspect ----

_FIELDS = (
    (0, 4, "magic", lambda f: '"SPCF"'),
    (4, 1, "version", lambda f: str(f.version)),
    (5, 1, "format", lambda f: f.format),
    (6, 1, "dtype", lambda f: f.dtype),
    (7, 1, "flags", lambda f: "delta: encoded against a base" if f.is_delta else "none"),
    (8, 8, "n_elems", lambda f: f"{f.n_elems} elements in this slice"),
    (16, 8, "nnz", lambda f: f"{f.nnz} of them listed"),
    (24, 8, "frame_bytes", lambda f: f"{f.frame_bytes} bytes, header and padding included"),
    (32, 8, "index_off", lambda f: f"index section at {f.index_off}" if f.index_off else "no index section"),
    (40, 8, "meta_off", lambda f: f"meta section at {f.meta_off}" if f.meta_off else "no meta section"),
    (48, 8, "values_off", lambda f: f"values at {f.values_off}" if f.values_off else "no values"),
    (56, 8, "reserved", lambda f: "zero"),
)


def _section_text(frame: FrameInfo) -> str:
    return " ".join(f"{name} {n} ({100 * n / frame.frame_bytes:.0f}%)" for name, n in frame.sections().items())


def _show_header(frame: FrameInfo, data: Any) -> None:
    table = Table("offset", "bytes", "field", "meaning", title=f"frame 0: header (byte {frame.offset} of the file)")
    for offset, size, name, meaning in _FIELDS:
        at = frame.offset + offset
        table.add_row(str(offset), bytes(data[at : at + size]).hex(" "), name, meaning(frame))
    _console.print(table)


def _show_summary(frames: list[FrameInfo]) -> None:
    n_elems, nnz = sum(f.n_elems for f in frames), sum(f.nnz for f in frames)
    n_bytes = sum(f.frame_bytes for f in frames)
    mix = Counter(f.format for f in frames)
    by_bytes = Counter({name: sum(f.frame_bytes for f in frames if f.format == name) for name in mix})
    dtypes = sorted({f.dtype for f in frames})
    _console.print(
        f"{len(frames)} frame(s), {n_elems} elements of {', '.join(dtypes)}, {nnz} listed "
        f"({100 * nnz / max(n_elems, 1):.3g}%), {n_bytes} bytes"
    )
    _console.print(
        "formats: "
        + ", ".join(
            f"{name} {mix[name]} frame(s) {100 * by_bytes[name] / n_bytes:.0f}% of the bytes"
            for name in FORMATS
            if name in mix
        )
    )


@main.command("inspect")
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "--frames",
    "n_shown",
    type=click.IntRange(min=0),
    default=_FRAMES_SHOWN,
    show_default=True,
    help="Number of frames to list.",
)
@click.option("--json", "as_text", is_flag=True, help="Print JSON: every frame.")
def inspect_command(file: Path, n_shown: int, as_text: bool) -> None:
    """Check and explain the frames of an encoded array.

    FILE holds what spccl.encode returned.

    Exit code 1 if a frame does not follow docs/FORMAT.md. The frames before it are shown.
    """
    if file.stat().st_size == 0:
        raise Fail(f"{file}: 0 bytes, wanted at least one frame with a header of 64 bytes")
    frames: list[FrameInfo] = []
    error: errors.FormatError | None = None
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as data:
        try:
            frames.extend(iter_frames(data))
        except errors.FormatError as caught:
            error = caught
        if as_text:
            document = {
                "file": str(file),
                "frames": [vars(f) | {"sections": f.sections()} for f in frames],
                "error": None if error is None else str(error),
            }
            click.echo(json.dumps(document, indent=1))
        elif frames:
            _show_header(frames[0], data)
            table = Table("frame", "at byte", "format", "dtype", "elements", "listed", "bytes", "sections")
            for i, f in enumerate(frames[:n_shown]):
                kind = f"{f.format} (delta)" if f.is_delta else f.format
                numbers = (str(f.n_elems), f"{f.nnz} ({100 * f.nnz / max(f.n_elems, 1):.3g}%)")
                table.add_row(str(i), str(f.offset), kind, f.dtype, *numbers, str(f.frame_bytes), _section_text(f))
            _console.print(table)
            if len(frames) > n_shown:
                _console.print(f"... and {len(frames) - n_shown} more (--frames {len(frames)} shows all)")
            _show_summary(frames)
    if error is not None:
        raise Fail(f"{file}: {error}")


# ---- verify ----


@main.command("verify")
@click.option(
    "--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True, help="cuda: one rank per GPU."
)
@click.option("--ranks", type=click.IntRange(1, 64), help="Processes to start.  [default: 2; on GPUs one for each]")
@click.option("--transport", help='Comma list such as "shm" or "tcp"; default: the library\'s choice.')
@click.option(
    "--timeout",
    type=click.FloatRange(min=1),
    default=300.0,
    show_default=True,
    help="Seconds for the whole command.",
)
def verify_command(device: str, ranks: int | None, transport: str | None, timeout: float) -> None:
    """Self-test: run every collective on this machine.

    Tests every dtype, op, size and sparsity.

    numpy computes the expected results in the documented order. Exit code 1 if any bit differs.
    """
    need("numpy", "spccl verify", "pip install numpy")
    from ._launch import RanksFailed
    from .verify import cases, verify

    on_gpus = device == "cuda"
    if on_gpus:
        need("torch", "spccl verify --device cuda", "pip install 'torch>=2.9'")
        if transport is not None:
            raise click.BadParameter("is for --device cpu", param_hint="--transport")
        from .bench.command import n_ranks
        from .bench.gpu_verify import verify_gpus

        ranks = n_ranks("spccl verify", ranks)
    ranks = ranks or 2
    n_cases = sum(1 for _ in cases())
    try:
        with Progress(console=Console(stderr=True), transient=True) as progress:
            task = progress.add_task(f"{ranks} ranks", total=n_cases)
            how: dict[str, Any] = {
                "deadline_s": timeout,
                "on_progress": lambda n: progress.update(task, completed=n),
            }
            result = verify_gpus(ranks, **how) if on_gpus else verify(ranks, transport, **how)
    except (RanksFailed, errors.Error) as error:
        raise Fail(f"spccl verify failed:\n{error}") from error
    table = Table("collective", "dtype", "cases", "wrong", title=f"spccl {__version__}, {ranks} ranks")
    for (collective, dtype), tally in result.tallies.items():
        style = "red" if tally.n_wrong else None
        table.add_row(collective, dtype, str(tally.n_cases), str(tally.n_wrong), style=style)
    _console.print(table)
    for line in result.links:
        _console.print(line, soft_wrap=True)
    _console.print("frames sent: " + ", ".join(f"{name} {n}" for name, n in result.frames.items()))
    if result.n_wrong:
        raise Fail("\n".join([f"{result.n_wrong} wrong answer(s), for example:", *result.examples]))
    _console.print(f"all {n_cases} cases right on every rank, bit by bit")


# ---- plot ----


@main.command("plot")
@click.argument(
    "sources",
    nargs=-1,
    required=True,
    metavar="CSV...",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
)
@click.option(
    "-o",
    "--output",
    type=OutFile(),
    required=True,
    help="Figure: .png, .svg or .pdf.",
)
def plot_command(sources: tuple[Path, ...], output: Path) -> None:
    """Draw the speed-up over sparsity.

    One panel for each collective. CSV: a file of `spccl bench --csv`.

    Give a file of `spccl bench --device cuda` alone. Its figure shows 512 MiB of float32, the roofline of the
    machine, and the results of the paper that the pici format comes from.
    """
    need("numpy", "spccl plot", "pip install numpy")
    from .plot import gpu_speedup_with_roofline, is_gpu_result, speedup_over_sparsity

    try:
        if not any(is_gpu_result(source) for source in sources):
            n_points = speedup_over_sparsity(sources, output)
        elif len(sources) == 1:
            n_points = gpu_speedup_with_roofline(sources[0], output)
        else:
            raise ValueError(f"{len(sources)} files, wanted one: a file of results on GPUs is drawn alone")
    except (ValueError, OSError, ModuleNotFoundError) as error:
        raise Fail(str(error)) from error
    click.echo(f"{n_points} points drawn in {output}")


main.add_command(bench_command)
main.add_command(schedule_group)
main.add_command(simulate_command)

if __name__ == "__main__":
    main()
