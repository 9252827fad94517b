"""The command `spccl simulate`: what a collective would cost (docs/SIMULATE.md). simulate.py computes."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import click
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from . import errors
from . import simulate as sim
from .bench.hosts import bits_per_second
from .cli_schedule import check_text
from .cli_types import Fail, GroupedCommand, List, OutFile, Size, Sparsity, need
from .comm import COLLECTIVES
from .frame import DTYPES, FORMATS, ITEM_BYTES

_GROUPS = (
    ("Hosts", ("hosts", "ranks", "rate", "latency", "burst", "cores")),
    ("The call", ("collective", "size", "dtype", "sparsities", "overlap", "format", "root")),
    ("Schedules", ("schedules", "plan")),
    ("This CPU", ("machine", "calibrate", "save")),
    ("More", ("crossings", "growth", "model", "output", "json_file")),
)
_EXAMPLES = (
    (
        "All-reduce of 64 MiB on 64 hosts of 8 ranks",
        "spccl simulate --hosts 64 --ranks 8 --rate 25gbit --sparsity 0.99",
    ),
    (
        "With the rates of this machine, from a measurement (root)",
        "spccl bench --hosts 4 --ranks 8 --rate 600mbit --schedule direct --sizes 16M --csv direct.csv; "
        "spccl simulate --calibrate direct.csv --save machine.json --hosts 64 --ranks 8 --rate 25gbit",
    ),
    ("A step of GPT-2 XL", "spccl simulate --hosts 8 --ranks 8 --rate 100gbit --model gpt2-xl --size 25M"),
    ("Figures: crossing points, densities, growth", "spccl simulate --hosts 64 --ranks 8 --rate 25gbit -o figure.png"),
)
_SIZES = [1 << i for i in range(14, 27, 2)]  # of --crossings: 16 KiB to 64 MiB
_DENSITIES = [0.001 * 10 ** (i / 3) for i in range(10)]  # 0.1% to all


_TIME_UNITS = {"ns": 1.0, "us": 1e3, "ms": 1e6}


class _Time(click.ParamType):
    """ "20us": ns."""

    name = "TIME"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, float):
            return value
        try:
            return float(value[:-2]) * _TIME_UNITS[value[-2:]]
        except (ValueError, KeyError):
            self.fail(f"{value!r}: wanted a time such as 20us, 500ns or 1ms", param, ctx)


class _Rate(click.ParamType):
    """ "25gbit": bits per second."""

    name = "RATE"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, float):
            return value
        try:
            return bits_per_second(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


def _time_text(seconds: float) -> str:
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= scale or unit == "us":
            return f"{seconds / scale:.3g} {unit}"
    return ""


def _bytes_text(n: float) -> str:
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if n >= scale:
            return f"{n / scale:.3g} {unit}"
    return f"{n:.0f} B"


def _size_text(n: float) -> str:
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if n >= scale:
            return f"{n / scale:.3g} {unit}"
    return f"{n:.0f} B"


# ---- what is simulated ----


def _network(o: dict[str, Any]) -> sim.Network:
    network = sim.Network(
        o["hosts"], o["ranks"], o["rate"], burst_bytes=float(o["burst"]), latency_ns=o["latency"], cores=o["cores"]
    )
    if not 2 <= network.ranks <= sim.RANKS_MAX:
        raise click.BadParameter(
            f"{o['hosts']} hosts of {o['ranks']} ranks are {network.ranks} ranks, wanted 2 to {sim.RANKS_MAX}",
            param_hint="--hosts, --ranks",
        )
    if o["root"] >= network.ranks:
        raise click.BadParameter(f"{o['root']}: the last rank is {network.ranks - 1}", param_hint="--root")
    return network


def _machine(o: dict[str, Any]) -> sim.Machine:
    if o["machine"] is not None and o["calibrate"]:
        raise click.BadParameter("give --machine or --calibrate, and not both", param_hint="--machine")
    if o["save"] is not None and not o["calibrate"]:
        raise click.BadParameter("needs --calibrate", param_hint="--save")
    try:
        if o["machine"] is not None:
            return sim.read_calibration(o["machine"])
        return _calibrated(o["calibrate"], o["save"]) if o["calibrate"] else sim.Machine()
    except (ValueError, OSError) as error:
        raise Fail(str(error)) from error


def _calibrated(files: tuple[Path, ...], save: Path | None) -> sim.Machine:
    need("numpy", "spccl simulate --calibrate", "pip install numpy")
    from .bench.calibrate import cells_of

    cells, facts = [], {}
    for file in files:
        try:
            more, facts = cells_of(file)
        except (KeyError, TypeError, AttributeError, ArithmeticError) as error:
            raise ValueError(f"{file}: not a result of `spccl bench`: {error!r}") from error
        cells += more
    machine = sim.fit(cells)
    commit = facts.get("commit", "unknown")
    machine = dataclasses.replace(
        machine, source=f"{len(cells)} cells of {', '.join(f.name for f in files)}, commit {commit}"
    )
    off = [abs(c.predicted(machine).time_s / c.time_s - 1) for c in cells]
    click.echo(
        f"# fitted to {len(cells)} cells: mean error of the time {100 * sum(off) / len(off):.1f}%, "
        f"largest {100 * max(off):.1f}%"
    )
    if save is not None:
        kept = {name: facts.get(name, "unknown") for name in ("cpu", "cores", "commit", "spccl")}
        sim.write_calibration(save, machine, kept)
        click.echo(f"# written: {save}")
    return machine


Plan = tuple[str, bytes, int]  # what it is called, the text of its file, its number there


def _plans(o: dict[str, Any], network: sim.Network) -> list[Plan]:
    """The plans of --plan for these ranks, hosts and collective. Raises: Fail if a file has none."""
    found: list[Plan] = []
    for file in o["plan"]:
        try:
            text = file.read_text(encoding="ascii")
            heads = check_text(text)
        except (errors.SettingError, UnicodeDecodeError) as error:
            raise Fail(f"{file}: {error}") from error
        fitting = [
            (f"{p['name']} ({file.name})", text.encode(), i)
            for i, p in enumerate(heads)
            if p["collective"] == o["collective"]
            and p["n_ranks"] == network.ranks
            and p["n_hosts"] in (0, network.hosts)
            and p["root"] in (-1, o["root"])
        ]
        if not fitting:
            there = ", ".join(sorted({f"{p['collective']} of {p['n_ranks']}" for p in heads}))
            raise Fail(f"{file}: no plan for {o['collective']} of {network.ranks} ranks; it has {there}")
        found += fitting
    return found


# ---- what is printed ----


def _table(made: list[sim.Prediction], left_out: dict[str, str]) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for title in ("schedule", "time", "link", "rank", "memory", "core busy", "link busy", "adds in", "formats"):
        table.add_column(title, justify="left" if title in ("schedule", "adds in", "formats") else "right")
    for p in made:
        formats = sorted(p.formats.items(), key=lambda item: -item[1])[:2]
        known = p.schedule in sim.SCHEDULES
        order = "rank order" if p.schedule in sim.IN_RANK_ORDER else "its own order" if known else "see check"
        table.add_row(
            p.schedule,
            _time_text(p.time_s),
            _bytes_text(p.link_bytes),
            _bytes_text(p.rank_bytes),
            _size_text(p.memory_bytes),
            f"{100 * p.cpu_s / p.time_s:.0f}%",
            f"{100 * p.link_share:.0f}%",
            order,
            " ".join(f"{name} {100 * share:.0f}%" for name, share in formats),
        )
    for name, why in left_out.items():
        table.add_row(
            name, "-", "-", "-", "-", "-", "-", "", "no such collective" if " has no " in why else "too large"
        )
    return table


def _choice(made: list[sim.Prediction]) -> str:
    known = [p for p in made if p.chosen_s > 0]
    if not known:
        return ""
    chosen = min(known, key=lambda p: p.chosen_s)
    fastest = min(made, key=lambda p: p.time_s)
    text = f"fastest here: {fastest.schedule}. The library would choose {chosen.schedule}"
    return text + ("" if fastest is chosen else ", of the schedules that add in rank order, by its own model") + "."


def _crossing_lines(found: list[tuple[float, str, str]], unit: str) -> list[str]:
    shown = _size_text if unit == "size" else lambda d: f"{100 * (1 - d):.3g}% zeros"
    return [f"  {before} to {after} at {shown(x)}" for x, before, after in found] or ["  none: one schedule is fastest"]


def _more(o: dict[str, Any], network: sim.Network, call: sim.Call, machine: sim.Machine) -> dict[str, sim.Curves]:
    """Crossing points, growth, and the figure. Returns the curves."""
    found: dict[str, sim.Curves] = {}
    if o["crossings"] or o["output"] is not None:
        found["size"] = sim.over_sizes(network, call, machine, _SIZES)
        found["density"] = sim.over_densities(network, call, machine, _DENSITIES)
        for axis, title in (("size", f"over size, {100 * (1 - call.density):g}% zeros"),
                            ("density", f"over density, {_size_text(call.size_bytes)}")):  # fmt: skip
            click.echo(f"crossing points {title}:")
            click.echo("\n".join(_crossing_lines(sim.crossings(found[axis]), axis)))
    if o["growth"] or o["output"] is not None:
        hosts = [n for n in (2**i for i in range(1, 13)) if 16 <= n * network.per_host <= sim.RANKS_MAX]
        found["ranks"] = sim.over_ranks(network, call, machine, hosts)
        table = Table(title=f"growth, {network.per_host} ranks a host", box=SIMPLE_HEAD, title_justify="left")
        table.add_column("schedule")
        for n in hosts:
            table.add_column(f"{n * network.per_host} ranks", justify="right")
        for schedule, points in found["ranks"].items():
            at = dict(points)
            times = [at.get(float(n * network.per_host)) for n in hosts]
            table.add_row(schedule, *(_time_text(t) if t is not None else "-" for t in times))
        _console().print(table)
    return found


def _console() -> Console:
    return Console(width=None if sys.stdout.isatty() else 140, highlight=False, markup=False)


def _step(o: dict[str, Any], network: sim.Network, call: sim.Call, machine: sim.Machine) -> dict[str, float]:
    """A step of training: all gradients, bucket after bucket."""
    n_params = sim.MODELS[o["model"]]
    found = sim.step_seconds(network, call, machine, n_params, o["schedules"])
    n_buckets = -(-n_params * ITEM_BYTES[call.dtype] // call.size_bytes)
    click.echo(
        f"the exchange of {o['model']} ({n_params / 1e6:.0f} M parameters, {n_buckets} buckets of "
        f"{_size_text(call.size_bytes)} {call.dtype}, one after the other): "
        + ", ".join(f"{s} {_time_text(t)}" for s, t in sorted(found.items(), key=lambda item: item[1]))
    )
    return found


@click.command("simulate", cls=GroupedCommand, groups=_GROUPS, examples=_EXAMPLES)
@click.option("--hosts", type=click.IntRange(1, sim.RANKS_MAX), default=8, show_default=True, help="Hosts.")
@click.option(
    "--ranks", type=click.IntRange(1, sim.RANKS_MAX), default=8, show_default=True, help="Ranks of each host."
)
@click.option(
    "--rate", type=_Rate(), default="25gbit", show_default=True, help="Rate of a host's link, as tc writes it."
)
@click.option("--latency", type=_Time(), help="Of a link, one way, such as 20us.  [default: of the calibration]")
@click.option("--burst", type=Size(), default=0, help="Bytes that a link passes at once after a pause.  [default: 0]")
@click.option("--cores", type=click.IntRange(0, 1024), default=0, help="Cores of a host.  [default: one for each rank]")
@click.option(
    "--collective", type=click.Choice(COLLECTIVES), default="all_reduce", show_default=True, help="Collective."
)
@click.option("--size", type=Size(), default=64 << 20, help="Bytes, as spccl bench counts.  [default: 64M]")
@click.option("--dtype", type=click.Choice(DTYPES), default="float32", show_default=True, help="Of the elements.")
@click.option("--sparsity", "sparsities", type=List(Sparsity(), "LIST"), default=(0.99,),
              help="Comma list of fractions of zeros: 0.99 or 99%.  [default: 0.99]")  # fmt: skip
@click.option("--overlap", type=click.FloatRange(0, 1), default=0.0, show_default=True,
              help="Of the ranks' nonzeros: 0 independent, 1 at the same places.")  # fmt: skip
@click.option("--format", type=click.Choice(("auto", *FORMATS[1:])), default="auto", show_default=True,
              help="Format of every slice.")  # fmt: skip
@click.option("--root", type=click.IntRange(min=0), default=0, show_default=True, help="Of a broadcast.")
@click.option("--schedule", "schedules", type=List(click.Choice(sim.SCHEDULES), "LIST"), default=sim.SCHEDULES,
              help=f"Comma list of {', '.join(sim.SCHEDULES)}.  [default: all]")  # fmt: skip
@click.option("--plan", multiple=True, type=click.Path(exists=True, dir_okay=False, path_type=Path),
              help="Also the plans of this file that fit. May be given again.")  # fmt: skip
@click.option("--machine", type=click.Path(exists=True, dir_okay=False, path_type=Path),
              help="Rates of the CPU: a file of --save.  [default: those that docs/SIMULATE.md names]")  # fmt: skip
@click.option("--calibrate", multiple=True, type=click.Path(exists=True, dir_okay=False, path_type=Path),
              help="Fit the rates to this result of `spccl bench --hosts --schedule`. May be given again.")  # fmt: skip
@click.option("--save", type=OutFile(), help="Write what --calibrate found.")
@click.option(
    "--crossings", is_flag=True, help="Also where another schedule becomes the fastest, over size and density."
)
@click.option("--growth", is_flag=True, help="Also from 16 to 4096 ranks.")
@click.option(
    "--model", type=click.Choice(tuple(sim.MODELS)), help="Also the exchange of a step; --size is the bucket."
)
@click.option("-o", "--output", type=OutFile(), help="Figure of crossings and growth: .png, .svg or .pdf.")
@click.option("--json", "json_file", type=OutFile(), help="Write the numbers here.")
def simulate_command(**o: Any) -> None:
    """Predict what a collective costs on other hosts.

    It runs the plans of 2 to 4096 ranks on paper: time, bytes, memory, which schedule. It models the CPU engine: GPU
    kernels are not modelled. `link`: bytes out of the busiest host, or into it; `rank`: bytes sent by the rank that
    sends most. docs/SIMULATE.md says what is modelled, and how well. `--ranks` is of each host, that of `spccl bench`
    of all hosts.
    """
    try:
        _simulate(o)
    except errors.Error as error:
        raise Fail(str(error)) from error


def _simulate(o: dict[str, Any]) -> None:
    network, machine = _network(o), _machine(o)
    plans = _plans(o, network)
    if o["model"] and o["collective"] != "all_reduce":
        raise click.BadParameter("gradients are summed by all_reduce", param_hint="--model")
    if o["output"] is not None:
        need("matplotlib", "spccl simulate -o", "pip install matplotlib")
    click.echo(f"# CPU engine, no GPU kernels. Rates: {machine.source}")
    document: list[dict[str, Any]] = []
    found: dict[str, sim.Curves] = {}
    for sparsity in o["sparsities"]:
        call = sim.Call(
            o["collective"], o["size"], o["dtype"], 1 - sparsity, o["overlap"], o["format"], o["root"]
        )  # fmt: skip
        made, left_out = sim.predict_all(network, call, machine, o["schedules"])
        made += [sim.predict(network, call, name, machine, plan=(text, i)) for name, text, i in plans]
        made.sort(key=lambda p: p.time_s)
        click.echo(
            f"{call.collective} of {_size_text(call.size_bytes)} {call.dtype}, {100 * sparsity:g}% zeros, "
            f"{network.hosts} hosts of {network.per_host} ranks, {network.bits / 1e9:g} Gbit/s a host"
        )
        _console().print(_table(made, left_out))
        click.echo(_choice(made))
        found = _more(o, network, call, machine)
        step = _step(o, network, call, machine) if o["model"] else {}
        document.append(
            {"call": dataclasses.asdict(call), "schedules": [dataclasses.asdict(p) for p in made],
             "left_out": left_out, "curves": found, "step_seconds": step}
        )  # fmt: skip
    if o["output"] is not None:
        from .plot import simulated

        try:
            simulated(found, network, call, machine.source, o["output"])
        except (ValueError, OSError) as error:
            raise Fail(str(error)) from error
        click.echo(f"# drawn: {o['output']}")
    if o["json_file"] is not None:
        whole = {"network": dataclasses.asdict(network), "machine": dataclasses.asdict(machine), "results": document}
        o["json_file"].write_text(json.dumps(whole, indent=1) + "\n")
        click.echo(f"# written: {o['json_file']}")
