"""The command `spccl bench`: its options. bench/command.py runs it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from .cli_types import GroupedCommand, List, OutFile, Size, Sparsity, need
from .comm import COLLECTIVES, OPS
from .frame import DTYPES, FORMATS

_SCHEDULES = ("auto", "tune", "direct", "oneshot", "relayed", "ring", "hierarchical")
_FORMATS = ("auto", *FORMATS[1:])
_FORCED = {"schedule": "SPCCL_SCHEDULE", "format": "SPCCL_FORMAT"}  # option -> the variable that it sets

_GROUPS = (
    ("What is measured", ("collectives", "sizes", "smallest", "largest", "factor", "dtypes", "op", "sparsities")),
    ("Where", ("device", "ranks", "hosts", "rate", "transport")),
    ("How spccl sends", ("schedule", "format", "via")),
    ("How it is measured", ("peer", "iters", "warmup", "in_flight", "timeout")),
    ("On GPUs only", ("max_ctas", "graph", "out_of_place", "codec", "seconds", "codec_csv")),
    ("Results", ("csv_file", "json_file")),
)
_EXAMPLES = (
    (
        "All-reduce of 64 MiB between 4 processes, against Gloo",
        "spccl bench --collective all_reduce --sizes 64M --ranks 4",
    ),
    (
        "The same between 4 emulated hosts (root)",
        "spccl bench --collective all_reduce --sizes 64M --hosts 4 --rate 1gbit",
    ),
    ("On all GPUs of this machine, against NCCL", "spccl bench --device cuda --sizes 512M --csv gpu.csv"),
    ("The paper's ring with its format alone", "spccl bench --collective all_reduce --schedule ring --format pici"),
    ("A schedule that you wrote", "spccl bench --schedule file:mine.plan --ranks 4 --sizes 64M"),
)


class _Schedule(click.ParamType):
    """A name, or file:PATH of a plan file."""

    name = "NAME"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        kind, is_file, path = value.partition("file:")
        if kind or not is_file:
            if value not in _SCHEDULES:
                self.fail(f"{value!r}: wanted {', '.join(_SCHEDULES)}, or file:PATH of a plan file", param, ctx)
        elif path.endswith(".py"):
            plan = Path(path).with_suffix(".plan")
            self.fail(f"{path} is Python: compile it first: spccl schedule compile {path} -o {plan}", param, ctx)
        elif not Path(path).is_file():
            self.fail(f"{path!r}: there is no such file", param, ctx)
        return value


@contextlib.contextmanager
def _forced(options: dict[str, Any]) -> Iterator[None]:
    """Inside, the variables have what the options say: ranks and result files read them. Takes the options away."""
    asked = {variable: options.pop(name) for name, variable in _FORCED.items()}
    before = {variable: os.environ.get(variable) for variable in asked}
    os.environ.update({variable: value for variable, value in asked.items() if value is not None})
    try:
        yield
    finally:
        for variable, value in before.items():
            os.environ.pop(variable, None)
            if value is not None:
                os.environ[variable] = value


@click.command("bench", cls=GroupedCommand, groups=_GROUPS, examples=_EXAMPLES)
@click.option(
    "--device",
    type=click.Choice(["cpu", "cuda"]),
    default="cpu",
    show_default=True,
    help="cuda: one rank per GPU, compared with NCCL. Without options that choose cases it measures 28 cases "
    "from 16 MiB to 2 GiB, and encoding and decoding.",
)
@click.option(
    "--collective",
    "collectives",
    type=List(click.Choice(COLLECTIVES), "LIST"),
    default=("all_gather", "reduce_scatter", "all_reduce"),
    help="Comma list of all_gather, reduce_scatter, all_reduce, broadcast.  [default: the first three]",
)
@click.option("--sizes", type=List(Size(), "LIST"), help="Comma list of sizes; replaces --min, --max, --factor.")
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
@click.option("--op", type=click.Choice(OPS), default="sum", show_default=True, help="Operation of reductions.")
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
    "[default: none; with it the default of --ranks is the number of hosts]",
)
@click.option("--rate", default="1gbit", show_default=True, help="Rate of an emulated host's link, as tc writes it.")
@click.option(
    "--port-queue",
    type=Size(),
    default=0,
    help="Bytes that a port of the emulated switch queues.  [default: 5 ms of the rate, and 256K at least]",
)
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
    "--schedule",
    type=_Schedule(),
    help=f"Schedule of the collectives that have it: {', '.join(_SCHEDULES)}; or file:PATH, a plan file: then the "
    "default of --collective is what it has.  [default: SPCCL_SCHEDULE, or auto]",
)
@click.option(
    "--format",
    type=click.Choice(_FORMATS),
    metavar="NAME",
    help=f"Format of every slice: {', '.join(_FORMATS)}.  [default: SPCCL_FORMAT, or auto]",
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
    "codec_csv",
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
    ctx: click.Context, csv_file: Path | None, codec_csv: Path | None, json_file: Path | None, **options: Any
) -> None:
    """Time spccl and a dense library, Gloo or NCCL. Both run in turns. Columns are as in nccl-tests.

    The command starts its ranks on this machine, unless torchrun started it. Results are checked before timing.

    Sizes are bytes per rank, counted as in nccl-tests: the output of all_gather, the input of reduce_scatter.
    Time is that of the slowest rank, the median over iterations. `wire` is the bytes that one rank sent per call.
    ratio = time of the dense library / time of spccl.

    On GPUs the dense library is NCCL: in each case the better of its defaults and registered symmetric windows. Time is
    between two events on the stream.
    """
    need("numpy", "spccl bench", "pip install numpy")
    if options["device"] == "cuda":
        need("torch", "spccl bench --device cuda", "pip install 'torch>=2.9'")
    from .bench import command

    ctx.with_resource(_forced(options))
    unset = (click.core.ParameterSource.DEFAULT, click.core.ParameterSource.DEFAULT_MAP)
    files = {"csv": csv_file, "codec_csv": codec_csv, "json": json_file}
    given = {name for name in ctx.params if ctx.get_parameter_source(name) not in unset}
    if options["hosts"] is not None and "ranks" not in given:
        options["ranks"] = options["hosts"]
    command.bench(given, options, files)
