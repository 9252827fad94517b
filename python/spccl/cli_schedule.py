"""`spccl schedule compile`, `check`, `show`: schedules that users write (docs/SCHEDULES.md)."""

from __future__ import annotations

import dataclasses
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from . import _ext, errors
from . import simulate as sim
from ._schedule_show import as_rows, draw, parse
from .cli_types import Fail, OutFile, Size, Sparsity, need
from .schedule import ScheduleError, compile_file

_KEPT_KIB = 256  # of a slice of float32 with its message: sp_op_order_init

Topologies = list[tuple[int, int | None]]


class _Topology(click.ParamType):
    """ "2,4,8" or "2x4,4x2": numbers of ranks, or hosts x ranks per host."""

    name = "LIST"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Topologies:
        if not isinstance(value, str):
            return value
        made: Topologies = []
        for word in value.split(","):
            hosts, x, per_host = word.partition("x")
            if not hosts.isdecimal() or (x and not per_host.isdecimal()):
                self.fail(f"{word!r}: wanted numbers of ranks, as in 2,4,8, or hosts, as in 2x4", param, ctx)
            made.append((int(hosts) * int(per_host), int(hosts)) if x else (int(hosts), None))
        return made


_source = click.argument("source", metavar="FILE", type=click.Path(exists=True, dir_okay=False, path_type=Path))
_ranks = click.option(
    "--ranks",
    type=_Topology(),
    help="For a FILE of Python: numbers of ranks on any hosts.  [default: 2,4,8, or none with --hosts]",
)
_hosts = click.option("--hosts", type=_Topology(), help="For a FILE of Python: shapes, as in 2x4: 2 hosts of 4 ranks.")


@click.group("schedule")
def schedule_group() -> None:
    """Compile, check and draw schedules that you write.

    docs/SCHEDULES.md has the language in one page. FILE is Python (.py), or a plan file.
    """


def _text_of(source: Path, ranks: Topologies | None, hosts: Topologies | None) -> str:
    """The plan file: read, or compiled from Python."""
    if source.suffix == ".py":
        try:
            return compile_file(source, [*(ranks or []), *(hosts or [])] or [(n, None) for n in (2, 4, 8)])
        except ScheduleError as error:
            raise Fail(f"{_place(source, error)}: {error}") from error
        except Exception as error:
            place = _place(source, error)
            if place == str(source):  # a fault of ours
                raise
            raise Fail(f"{place}: {type(error).__name__}: {error}") from error
    try:
        return source.read_text(encoding="ascii")
    except UnicodeDecodeError as error:
        raise Fail(f"{source}: it is not ASCII text: {error}") from error


def _place(source: Path, error: Exception) -> str:
    """The file, and its line if the error comes from there."""
    lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == str(source)]
    if isinstance(error, SyntaxError) and error.filename == str(source):
        lines.append(error.lineno)
    return f"{source}, line {lines[-1]}" if lines else str(source)


def check_text(text: str) -> list[dict[str, Any]]:
    """What the check says of each plan of a file. Raises: errors.SettingError (plan, rank, step, reason)."""
    plans: list[dict[str, Any]] = []
    data = text.encode()
    while True:
        try:
            plans.append(_ext.plan_check(data, len(plans)))
        except errors.ArgumentError:
            return plans


def checked(source: Path, text: str | None = None) -> list[dict[str, Any]]:
    """What the check says of each plan of a plan file, or of its text. Raises: Fail."""
    text = _text_of(source, None, None) if text is None else text
    try:
        return check_text(text)
    except errors.SettingError as error:
        raise Fail(f"{source}: {error}") from error


@schedule_group.command("compile")
@_source
@click.option("-o", "--output", type=OutFile(), required=True, help="The plan file to write.")
@_ranks
@_hosts
def compile_command(source: Path, output: Path, ranks: Topologies | None, hosts: Topologies | None) -> None:
    """Write the plan file of a schedule in Python.

    It runs FILE once for each topology. SPCCL_SCHEDULE=file:OUTPUT runs the plans.
    """
    text = _text_of(source, ranks, hosts)
    plans = checked(source, text)
    output.write_text(text, encoding="ascii")
    click.echo(f"{len(plans)} plan(s) in {output}, {len(text)} bytes")


def _bytes_of(p: dict[str, Any], text: str, i: int, call: sim.Call) -> str:
    """Bytes of messages that the rank sends which sends most; "-": more messages than are simulated."""
    if p["n_ranks"] == 1:
        return "0 MB"
    call = dataclasses.replace(call, root=max(p["root"], 0))
    hosts = p["n_hosts"] or 1
    network = sim.Network(hosts, p["n_ranks"] // hosts, 1e10)
    try:
        predicted = sim.predict(network, call, p["name"], sim.Machine(), plan=(text.encode(), i))
    except errors.UnsupportedError:
        return "-"
    return f"{predicted.rank_bytes / 1e6:.4g} MB"


def _refused_beside(plans: Sequence[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """By index: plans that GPUs run, but not in a group with the other plan given here, which relays results."""
    found: dict[int, dict[str, Any]] = {}
    for i, p in enumerate(plans):
        for other in plans:
            if (p["gpu_results"], other["gpu_results"]) != ("direct", "relayed") or p["n_ranks"] != other["n_ranks"]:
                continue
            same_call = [q for q in plans if all(q[key] == p[key] for key in ("collective", "root", "n_ranks"))]
            used = p if p["n_hosts"] else next((q for q in same_call if q["n_hosts"] == other["n_hosts"]), p)
            if used is p and p["n_hosts"] in (0, other["n_hosts"]):
                found.setdefault(i, other)
    return found


@schedule_group.command("check")
@_source
@_ranks
@_hosts
@click.option("--size", type=Size(), default=4 << 20, help="Of the array that the bytes are for.  [default: 4M]")
@click.option("--sparsity", type=Sparsity(), default=0.99, help="Its fraction of zeros.  [default: 0.99]")
def check_command(source: Path, ranks: Topologies | None, hosts: Topologies | None, size: int, sparsity: float) -> None:
    """Prove every plan of a file right, or name rank, step and reason.

    Bytes are those of `spccl simulate`: messages of float32 at that sparsity, nonzeros independent.

    Exit code 1 if a plan is refused.
    """
    text = _text_of(source, ranks, hosts)
    plans = checked(source, text)
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    titles = ("plan", "collective", "ranks", "hosts", "root", "adds in", "steps", "hops", "sends", "bytes", "keeps")
    for title in (*titles, "GPUs"):
        table.add_column(title, justify="left" if title in ("plan", "collective", "adds in") else "right")
    refused = _refused_beside(plans)
    for i, p in enumerate(plans):
        whole = p["n_chunks"] * (p["n_ranks"] if p["collective"] in ("all_gather", "reduce_scatter") else 1)
        order = "-" if p["collective"] in ("all_gather", "broadcast") else "rank order"
        if not p["rank_order"]:
            order = "its own order"
        table.add_row(
            p["name"],
            p["collective"],
            str(p["n_ranks"]),
            str(p["n_hosts"] or "any"),
            str(p["root"]) if p["root"] >= 0 else "",
            order,
            str(p["n_steps"]),
            str(p["n_hops"]),
            f"{p['chunks_sent'] / whole:.3g} N",
            _bytes_of(p, text, i, sim.Call(p["collective"], size, density=1 - sparsity)),
            f"{p['kept_slices'] * _KEPT_KIB} KiB",
            "no" if p["no_gpus"] else f"not on {refused[i]['n_hosts']} hosts" if i in refused else "yes",
        )
    Console(width=None if sys.stdout.isatty() else 140, highlight=False).print(table)
    click.echo(
        "steps: of the rank with most. hops: messages one after the other. sends: dense bytes of the rank that sends\n"
        f"most; N: bytes of the whole array. bytes: what that rank sends of {size} bytes, {100 * sparsity:g}% zeros.\n"
        "keeps: memory of a rank for one call of float32."
    )
    for i, p in enumerate(plans):
        root = f", root {p['root']}" if p["root"] >= 0 else ""
        about = f"{p['name']} ({p['collective']}), {p['n_ranks']} ranks{root}"
        if p["no_gpus"]:
            click.echo(f"not on GPUs: {about}: {p['no_gpus']}")
        elif i in refused:
            other = refused[i]
            click.echo(
                f"not on GPUs of {other['n_hosts']} hosts: {about}: owners send results directly; "
                f"{other['name']} ({other['collective']}) relays them, and GPUs of a group do one or the other"
            )
    click.echo(f"{len(plans)} plan(s) right, for every rank")


@schedule_group.command("show")
@_source
@_ranks
@_hosts
@click.option("--plan", "name", help="Only plans with this name.")
@click.option("-o", "--output", type=OutFile(), help="Figure of one plan: .png, .svg or .pdf; else text.")
def show_command(
    source: Path, ranks: Topologies | None, hosts: Topologies | None, name: str | None, output: Path | None
) -> None:
    """Draw plans: ranks over rounds.

    A round is one message later. Text: "3 >1" sends chunk 3 to rank 1; "=3 <0" takes it; "+3 <0,2" adds what ranks 0
    and 2 sent. Figure: an arrow is a message, a circle adds, a square is output, a colour is a chunk.
    """
    text = _text_of(source, ranks, hosts)
    checked(source, text)
    plans = [p for p in parse(text) if name is None or p.head[2] == name]
    if not plans:
        raise Fail(f"{source}: no plan is called {name}")
    if output is not None:
        need("matplotlib", "spccl schedule show -o", "pip install matplotlib")
        try:
            draw(plans[0], output)
        except (ValueError, OSError) as error:
            raise Fail(str(error)) from error
        click.echo(f"{plans[0].title}: drawn in {output}")
        return
    console = Console(width=None if sys.stdout.isatty() else 160, highlight=False, markup=False)
    for plan in plans:
        rows = as_rows(plan)
        table = Table(title=plan.title, box=SIMPLE_HEAD, show_lines=True, title_justify="left")
        for title in ("rank", *(f"round {i}" for i in range(len(rows[0]) - 1))):
            table.add_column(title)
        for row in rows:
            table.add_row(*row)
        console.print(table)
