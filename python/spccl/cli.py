"""The command line: `spccl info`, `verify`, `inspect`, `bench`, `plot`.

Exit codes: 0 success; 1 a bad file, a wrong answer or a failed rank; 2 a bad argument. Needs click and rich;
numpy for verify, bench and plot; matplotlib for plot; torch for the comparison with Gloo or NCCL.
"""

from __future__ import annotations

import importlib.util
import json
import mmap
import os
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from . import __version__, errors
from .cli_types import List, OutFile, Size, Sparsity
from .frame import DTYPES, FORMATS, FrameInfo, iter_frames
from .info import as_json, info

_COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "broadcast")
_OPS = ("sum", "avg", "min", "max", "prod")
_FRAMES_SHOWN = 20

# Without a terminal rich would wrap at 80 columns. Texts contain brackets and colons that are no markup.
_console = Console(width=None if sys.stdout.isatty() else 160, highlight=False, markup=False, emoji=False)


class _Fail(click.ClickException):
    """End the command with exit code 1 and this text."""


def _need(module: str, command: str, how: str) -> None:
    if importlib.util.find_spec(module) is None:
        raise _Fail(f"{command} needs {module}, which is not installed: {how}")


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="spccl")
def main() -> None:
    """Collectives for data that is mostly zeros."""


# ---- info ----


@main.command("info")
@click.option("--json", "as_text", is_flag=True, help="Print JSON instead of tables.")
def info_command(as_text: bool) -> None:
    """Show the parts of this build and every setting.

    For each part: whether it is in, why, and how to get it if it is absent.
    """
    if as_text:
        click.echo(json.dumps(as_json(), indent=1))
        return
    entries = info()
    parts = Table("part", "", "state", "why, and how to get it", title=f"spccl {__version__}")
    settings = Table("setting", "now", "meaning", title="settings (environment variables)")
    for entry in entries:
        if entry.kind == "setting":
            settings.add_row(entry.name, entry.value or '""', entry.why)
        else:
            style = "yellow" if entry.value == "absent" else None
            parts.add_row(entry.kind, entry.name, entry.value, entry.why, style=style)
    _console.print(parts)
    _console.print(settings)


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
    return " ".join(
        f"{name} {n} ({100 * n / frame.frame_bytes:.0f}%)" for name, n in frame.sections().items()
    )


def _show_header(frame: FrameInfo, data: Any) -> None:
    table = Table(
        "offset", "bytes", "field", "meaning", title=f"frame 0: header (byte {frame.offset} of the file)"
    )
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
        raise _Fail(f"{file}: 0 bytes, wanted at least one frame with a header of 64 bytes")
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
                table.add_row(
                    str(i), str(f.offset), kind, f.dtype, *numbers, str(f.frame_bytes), _section_text(f)
                )
            _console.print(table)
            if len(frames) > n_shown:
                _console.print(f"... and {len(frames) - n_shown} more (--frames {len(frames)} shows all)")
            _show_summary(frames)
    if error is not None:
        raise _Fail(f"{file}: {error}")


# ---- verify ----


@main.command("verify")
@click.option(
    "--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True, help="cuda: one rank per GPU."
)
@click.option(
    "--ranks", type=click.IntRange(1, 64), help="Processes to start.  [default: 2; on GPUs one for each]"
)
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
    _need("numpy", "spccl verify", "pip install numpy")
    from .bench.launch import RanksFailed
    from .verify import cases, verify

    on_gpus = device == "cuda"
    if on_gpus:
        _need("torch", "spccl verify --device cuda", "pip install 'torch>=2.9'")
        if transport is not None:
            raise click.BadParameter("is for --device cpu", param_hint="--transport")
        from .bench.gpu_cli import n_ranks
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
        raise _Fail(f"spccl verify failed:\n{error}") from error
    table = Table("collective", "dtype", "cases", "wrong", title=f"spccl {__version__}, {ranks} ranks")
    for (collective, dtype), tally in result.tallies.items():
        style = "red" if tally.n_wrong else None
        table.add_row(collective, dtype, str(tally.n_cases), str(tally.n_wrong), style=style)
    _console.print(table)
    for line in result.links:
        _console.print(line, soft_wrap=True)
    _console.print("frames sent: " + ", ".join(f"{name} {n}" for name, n in result.frames.items()))
    if result.n_wrong:
        raise _Fail("\n".join([f"{result.n_wrong} wrong answer(s), for example:", *result.examples]))
    _console.print(f"all {n_cases} cases right on every rank, bit by bit")


# ---- bench ----


def _write(path: Path | None, text: Callable[[], str]) -> None:
    if path is not None:
        path.write_text(text())
        click.echo(f"# written: {path}")


@main.command("bench")
@click.option(
    "--device",
    type=click.Choice(["cpu", "cuda"]),
    default="cpu",
    show_default=True,
    help="cuda: one rank per GPU, compared with NCCL. Without options that choose cases: all "
    "cases of bench/notes/gpu-results.md, and the codec.",
)
@click.option(
    "--collective",
    "collectives",
    type=List(click.Choice(_COLLECTIVES), "LIST"),
    default=("all_gather", "reduce_scatter", "all_reduce"),
    help="Comma list of all_gather, reduce_scatter, all_reduce, broadcast.  [default: the first three]",
)
@click.option(
    "--sizes", type=List(Size(), "LIST"), help="Comma list of sizes; replaces --min, --max, --factor."
)
@click.option("--min", "smallest", type=Size(), default=64 << 10, help="Smallest size.  [default: 64K]")
@click.option("--max", "largest", type=Size(), default=16 << 20, help="Largest size.  [default: 16M]")
@click.option(
    "--factor", type=click.IntRange(min=2), default=16, show_default=True, help="Factor from one size to the next."
)
@click.option(
    "--dtype",
    "dtypes",
    type=List(click.Choice(DTYPES), "LIST"),
    default=("float32",),
    help="Comma list of dtypes.  [default: float32]",
)
@click.option("--op", type=click.Choice(_OPS), default="sum", show_default=True, help="Operation of reductions.")
@click.option(
    "--sparsity",
    "sparsities",
    type=List(Sparsity(), "LIST"),
    default=(0.99, 0.9, 0.5, 0.0),
    help="Comma list of fractions of zeros: 0.99 or 99%.  [default: 0.99,0.9,0.5,0]",
)
@click.option(
    "--ranks",
    type=click.IntRange(1, 64),
    default=2,
    help="Processes to start.  [default: 2; on GPUs one for each]",
)
@click.option(
    "--hosts",
    type=click.IntRange(2, 64),
    help="Spread the ranks over so many emulated hosts: network namespaces with shaped links (root, iproute2).  "
    "[default: none; with it --ranks is the number of hosts]",
)
@click.option("--rate", default="1gbit", show_default=True, help="Rate of an emulated host's link, as tc writes it.")
@click.option(
    "--in-flight",
    type=click.IntRange(2, 8),
    help="With --hosts: also issue so many calls together, and say when the first is done.",
)
@click.option("--transport", help='Comma list such as "shm" or "tcp"; default: the library\'s choice.')
@click.option("--iters", type=click.IntRange(min=1), default=20, show_default=True, help="Timed iterations.")
@click.option("--warmup", type=click.IntRange(min=0), default=3, show_default=True, help="Untimed iterations before.")
@click.option(
    "--peer",
    type=click.Choice(["gloo", "nccl", "none"]),
    help="Dense library to compare with, timed in turns with spccl.  [default: gloo if torch is installed; on GPUs "
    "nccl]",
)
@click.option(
    "--via",
    type=click.Choice(["torch", "native"]),
    default="native",
    show_default=True,
    help="torch: call spccl through torch.distributed; native: through spccl.Communicator.",
)
@click.option(
    "--max-ctas",
    type=List(click.IntRange(0, 1 << 16), "LIST"),
    default=(0,),
    help="GPUs: comma list of limits to spccl's thread blocks, 0 = all.  [default: 0]",
)
@click.option("--graph", is_flag=True, help="GPUs: time replays of a captured CUDA graph.")
@click.option("--out-of-place", is_flag=True, help="GPUs: the input of all_gather is not a part of its output.")
@click.option(
    "--seconds",
    type=click.FloatRange(min=1),
    help="GPUs: most time for measuring. It first lowers the iterations, to 5 at least, and then leaves out cases.  "
    "[default: no limit]",
)
@click.option(
    "--codec/--no-codec",
    default=None,
    help="GPUs: measure encode and decode.  [default: only without options that choose cases]",
)
@click.option("--csv", "csv_file", type=OutFile(), help="Write rows here.")
@click.option(
    "--codec-csv",
    "codec_file",
    type=OutFile(),
    help="GPUs: write the rows of encode and decode here.",
)
@click.option("--json", "json_file", type=OutFile(), help="Write rows here.")
@click.option(
    "--timeout",
    type=click.FloatRange(min=1),
    default=1800.0,
    show_default=True,
    help="Seconds for the whole command.",
)
@click.pass_context
def bench_command(
    ctx: click.Context, csv_file: Path | None, codec_file: Path | None, json_file: Path | None, **options: Any
) -> None:
    """Time spccl and a dense library, Gloo or NCCL. Both run in turns. Columns are as in nccl-tests.

    The command starts its ranks on this machine, unless torchrun started it. Results are checked before timing.

    Sizes are bytes per rank, counted as in nccl-tests: the output of all_gather, the input of reduce_scatter.
    Time is that of the slowest rank, the median over iterations. `wire` is the bytes that one rank sent per call.
    ratio = time of the dense library / time of spccl.

    On GPUs the dense library is NCCL: in each case the better of its defaults and registered symmetric windows. Time is
    between two events on the stream.
    """
    _need("numpy", "spccl bench", "pip install numpy")
    unset = (click.core.ParameterSource.DEFAULT, click.core.ParameterSource.DEFAULT_MAP)
    given = {name: value for name, value in options.items() if ctx.get_parameter_source(name) not in unset}
    if codec_file is not None:
        given["codec_csv"] = codec_file
    if options["device"] == "cuda":
        _need("torch", "spccl bench --device cuda", "pip install 'torch>=2.9'")
        from .bench import gpu_cli

        if codec_file is not None:
            given.setdefault("codec", True)
        gpu_cli.bench(given, options, {"csv": csv_file, "codec_csv": codec_file, "json": json_file})
        return
    for name in ("max_ctas", "graph", "out_of_place", "seconds", "codec", "codec_csv"):
        if name in given:
            raise click.BadParameter("is for --device cuda", param_hint="--" + name.replace("_", "-"))
    if options["peer"] == "nccl":
        raise click.BadParameter(
            "nccl needs --device cuda; with --device cpu use gloo or none", param_hint="--peer"
        )
    from .bench import cpu_cli, report, runner
    from .bench.hosts import CannotEmulate
    from .bench.launch import RanksFailed

    if options["hosts"] is not None and "ranks" not in given:
        options["ranks"] = options["hosts"]
    plan = cpu_cli.plan_of(options)

    def on_row(row: report.Row) -> None:
        click.echo(report.table_line(row))

    torchrun = runner.under_torchrun()
    is_first = not torchrun or os.environ["RANK"] == "0"
    facts: dict[str, str] = {}
    if is_first:
        facts = report.machine() | {"command": report.command()}
        for key, value in facts.items():
            click.echo(f"# {key}: {value}")
        click.echo(report.table_head(plan.peer, with_hosts=plan.n_hosts > 0))
    try:
        if torchrun:
            rows = runner.run_here(plan, on_row)
        else:
            rows = runner.run_spawned(plan, options["ranks"], deadline_s=options["timeout"], on_row=on_row)
    except (RanksFailed, CannotEmulate, errors.Error) as error:
        raise _Fail(f"spccl bench failed:\n{error}") from error
    if is_first:
        _write(csv_file, lambda: report.to_csv(rows, facts))
        _write(json_file, lambda: report.to_json(rows, facts))
    wrong = sum(row.wrong + (row.peer_wrong or 0) for row in rows)
    if wrong:
        raise _Fail(f"{wrong} element(s) were wrong: see column #wrong")


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
    _need("numpy", "spccl plot", "pip install numpy")
    from .plot import gpu_speedup_with_roofline, is_gpu_result, speedup_over_sparsity

    try:
        if not any(is_gpu_result(source) for source in sources):
            n_points = speedup_over_sparsity(sources, output)
        elif len(sources) == 1:
            n_points = gpu_speedup_with_roofline(sources[0], output)
        else:
            raise ValueError(f"{len(sources)} files, wanted one: a file of results on GPUs is drawn alone")
    except (ValueError, OSError, ModuleNotFoundError) as error:
        raise _Fail(str(error)) from error
    click.echo(f"{n_points} points drawn in {output}")


if __name__ == "__main__":
    main()
