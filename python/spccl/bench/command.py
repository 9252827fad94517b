"""The command `spccl bench`: turns its options into a plan, runs it, prints the rows and writes the result files."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import click

from .. import comm, errors
from .._launch import RanksFailed
from ..cli_schedule import checked
from ..cli_types import Fail
from . import cases, gpu_report, hosts, loop, report, runner, start

_ONLY = {  # options that only one device has
    "cpu": ("transport", "via", "hosts", "rate", "port_queue", "in_flight"),
    "cuda": ("max_ctas", "graph", "out_of_place", "seconds", "codec", "codec_csv"),
}
_PEERS = {"cpu": "gloo", "cuda": "nccl"}
_CHOOSES_SIZES = ("smallest", "largest", "factor")
_CHOOSES_CASES = ("collectives", "sizes", *_CHOOSES_SIZES, "dtypes", "op", "sparsities", "max_ctas")
_GPU_SIZE = 512 << 20
_CODEC_DTYPES, _CODEC_SPARSITIES = ("float32", "bfloat16"), (0.999, 0.99, 0.9, 0.5, 0.0)


@dataclasses.dataclass
class _Results:
    """Facts, rows and cases left out, as rank 0 sends them. They are printed as they come."""

    head: str  # of the table
    facts: dict[str, str]
    rows: list[report.Row] = dataclasses.field(default_factory=list)
    codec: list[gpu_report.CodecRow] = dataclasses.field(default_factory=list)
    left_out: list[cases.Case] = dataclasses.field(default_factory=list)

    def take(self, message: tuple[str, Any]) -> None:
        kind, value = message
        if kind == "facts":
            self.facts |= value
            for key, text in self.facts.items():
                click.echo(f"# {key}: {text}")
            click.echo(self.head)
        elif kind == "left out":
            self.left_out += value
        else:
            (self.rows if kind == "row" else self.codec).append(value)
            click.echo(value.line())

    def write(self, files: dict[str, Path | None]) -> None:
        texts: dict[str, Callable[[], str]] = {
            "csv": lambda: report.to_csv(self.rows, self.facts),
            "codec_csv": lambda: report.to_csv(self.codec, self.facts),
            "json": lambda: report.to_json([*self.rows, *self.codec], self.facts),
        }
        for name, path in files.items():
            if path is not None:
                path.write_text(texts[name]())
                click.echo(f"# written: {path}")


def bench(given: Collection[str], options: dict[str, Any], files: dict[str, Path | None]) -> None:
    """Run the command.

    Args:
        given: names of the options that were given on the command line.
        options: all options, with their defaults.
        files: the paths of the files csv, codec_csv and json; None = that file is not written.

    Raises: click.ClickException.
    """
    on_gpus, torchrun = options["device"] == "cuda", start.under_torchrun()
    if not on_gpus:
        options["collectives"] = _collectives_of_file(given, options)
    plan = plan_of(given, options)
    if torchrun:
        ranks = int(os.environ["WORLD_SIZE"])
    elif on_gpus:
        ranks = n_ranks("spccl bench", options["ranks"] if "ranks" in given else None)
    else:
        ranks = options["ranks"]
    with _bad_option("--sizes" if "sizes" in given else "--min"):
        cases.check_sizes(plan.cases, ranks)
    kind = gpu_report.GpuRow if on_gpus else report.HostRow if options["hosts"] else report.Row
    head = kind.head("" if on_gpus else plan.peer)
    results = _Results(head, report.machine() | {"command": report.command()})
    is_first = not torchrun or os.environ["RANK"] == "0"
    if is_first and not on_gpus:  # GPUs send facts of their own
        results.take(("facts", {}))
    failure = None
    try:
        if torchrun:
            start.run_here(plan, results.take)
        else:
            start.run_spawned(plan, ranks, deadline_s=options["timeout"], on_message=results.take)
    except (RanksFailed, hosts.CannotEmulate, errors.Error) as error:
        failure = str(error)
        results.facts["failed"] = failure.replace("\n", "; ")
    if results.rows or results.codec or (is_first and failure is None):  # keep what was measured before a failure
        results.write(files)
        if on_gpus:
            click.echo(gpu_report.summary(results.rows, results.codec, results.left_out))
    if failure is not None:
        raise Fail(f"spccl bench failed:\n{failure}")
    wrong = sum(map(report.wrong_elems, results.rows)) + sum(c.wrong for c in results.codec)
    if wrong:
        raise Fail(f"{wrong} element(s) were wrong: see column #wrong")
    if results.left_out:
        raise Fail(f"{len(results.left_out)} case(s) were not measured: --seconds was too short")


def _group(ranks: int, n_hosts: int | None) -> str:
    return f"{ranks} ranks" + (f" on {n_hosts} hosts" if n_hosts else "")


def _collectives_of_file(given: Collection[str], o: dict[str, Any]) -> Sequence[str]:
    """What to measure if SPCCL_SCHEDULE names a plan file: unless asked otherwise, what it has for these ranks.
    All else would be the automatic choice under the file's name.

    Raises: click.BadParameter, Fail (the file is refused).
    """
    kind, is_file, path = os.environ.get("SPCCL_SCHEDULE", "").partition("file:")
    if kind or not is_file:
        return o["collectives"]
    ranks = int(os.environ["WORLD_SIZE"]) if start.under_torchrun() else o["ranks"]
    plans = checked(Path(path))
    fits = {
        str(p["collective"])
        for p in plans
        if p["n_ranks"] == ranks
        and (p["n_hosts"] in (0, o["hosts"] or 1) or start.under_torchrun())
        and p["root"] in (-1, loop.ROOT)
    }
    wanted = o["collectives"] if "collectives" in given else [c for c in comm.COLLECTIVES if c in fits]
    missing = [c for c in wanted if c not in fits]
    if missing or not wanted:
        has = [f"{p['collective']} of {_group(p['n_ranks'], p['n_hosts'])}" for p in plans]
        raise click.BadParameter(
            f"{path} has no plan for {', '.join(missing) or 'any collective'} of {_group(ranks, o['hosts'])}; "
            f"it has {', '.join(dict.fromkeys(has))}: compile it for these ranks, or choose others",
            param_hint="--schedule",
        )
    return wanted


@contextlib.contextmanager
def _bad_option(names: str) -> Iterator[None]:
    """A ValueError inside becomes a fault of these options."""
    try:
        yield
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint=names) from error


def n_ranks(command: str, asked: int | None) -> int:
    """Number of processes to start: `asked`, else one per GPU. Raises: Fail if there are fewer GPUs. Needs torch."""
    import torch

    found = torch.cuda.device_count()
    wanted = asked or max(found, 1)
    if found < wanted:
        raise Fail(
            f"{command} --device cuda: {wanted} GPU(s) wanted, torch {torch.__version__} sees {found}"
            + ("" if torch.version.cuda else "; this torch was built without CUDA")
        )
    return wanted


def plan_of(given: Collection[str], o: dict[str, Any]) -> start.BasePlan:
    """The options `o` as a plan. On GPUs, without options that choose cases, the plan has all cases of
    bench/notes/gpu-results.md with their targets, and the codec. Needs torch then.

    Raises: click.BadParameter for options that contradict each other or that the device does not have.
    """
    device = o["device"]
    other = "cpu" if device == "cuda" else "cuda"
    for name in _ONLY[other]:
        if name in given:
            raise click.BadParameter(f"is for --device {other}", param_hint="--" + name.replace("_", "-"))
    if "peer" in given and o["peer"] == _PEERS[other]:
        text = f"{o['peer']} needs --device {other}; with --device {device} use {_PEERS[device]} or none"
        raise click.BadParameter(text, param_hint="--peer")
    if "float8" in o["dtypes"] and set(comm.REDUCING) & set(o["collectives"]):
        raise click.BadParameter(
            "float8 has no arithmetic, so it cannot be reduced: choose all_gather or broadcast", param_hint="--dtype"
        )
    sizes = o["sizes"] if "sizes" in given else (_GPU_SIZE,)
    if "sizes" not in given and (device == "cpu" or set(_CHOOSES_SIZES) & set(given)):
        with _bad_option("--min, --max, --factor"):
            sizes = cases.sizes(o["smallest"], o["largest"], o["factor"])
    chosen = tuple(cases.cases(o["collectives"], sizes, o["dtypes"], o["op"], o["sparsities"], o["max_ctas"]))
    how = {"iters": o["iters"], "warmup": o["warmup"], "timeout_s": min(o["timeout"], 120.0)}
    return _gpu_plan(given, o, chosen, how) if device == "cuda" else _cpu_plan(o, chosen, how)


def _gpu_plan(
    given: Collection[str], o: dict[str, Any], chosen: Sequence[cases.Case], how: dict[str, Any]
) -> start.BasePlan:
    from . import gpu, gpu_codec

    if o["op"] == "avg":
        raise click.BadParameter("NCCL rounds avg differently, so results would differ: use sum", param_hint="--op")
    whole_table = not set(_CHOOSES_CASES) & set(given)
    targets = {dataclasses.replace(case, target=None): case for case in cases.gpu_targets()}
    with_codec = o["codec"] if "codec" in given else whole_table or "codec_csv" in given
    return gpu.GpuPlan(
        tuple(targets.values()) if whole_table else tuple(targets.get(case, case) for case in chosen),
        codec=gpu_codec.codec_cases(_CODEC_DTYPES, _CODEC_SPARSITIES, _GPU_SIZE) if with_codec else (),
        with_peers=o["peer"] != "none",
        seconds=o["seconds"],
        in_place=not o["out_of_place"],
        graph=o["graph"],
        **how,
    )


def _cpu_plan(o: dict[str, Any], chosen: tuple[cases.Case, ...], how: dict[str, Any]) -> runner.Plan:
    has_torch = importlib.util.find_spec("torch") is not None
    peer = o["peer"] or ("gloo" if has_torch else "none")
    if (peer == "gloo" or o["via"] == "torch") and not has_torch:
        raise Fail("--peer gloo and --via torch need torch, which is not installed: pip install 'torch>=2.9'")
    if peer == "gloo" and o["op"] == "avg":
        raise click.BadParameter("Gloo has no avg: use --peer none, or another --op", param_hint="--op")
    _check_hosts(o, has_torch)
    return runner.Plan(
        chosen,
        via=o["via"],
        peer=peer,
        transports=o["transport"],
        n_hosts=o["hosts"] or 0,
        rate=o["rate"],
        port_queue=o["port_queue"],
        in_flight=o["in_flight"] or 0,
        **how,
    )


def _check_hosts(o: dict[str, Any], has_torch: bool) -> None:
    if o["in_flight"] is not None and (o["hosts"] is None or o["via"] != "native"):
        raise click.BadParameter("needs --hosts, and --via native", param_hint="--in-flight")
    if o["port_queue"] and (o["hosts"] is None or o["port_queue"] > 1 << 30):
        raise click.BadParameter("needs --hosts, and at most 1G", param_hint="--port-queue")
    if o["hosts"] is None:
        return
    if start.under_torchrun():
        raise click.BadParameter("starts its own ranks: do not use it under torchrun", param_hint="--hosts")
    if o["ranks"] % o["hosts"] != 0:
        raise click.BadParameter(
            f"{o['ranks']} ranks cannot be spread evenly over {o['hosts']} hosts", param_hint="--ranks"
        )
    with _bad_option("--rate"):
        hosts.bits_per_second(o["rate"])
    reason = hosts.why_not()
    if reason is None and not has_torch:
        reason = "the ranks of emulated hosts meet through torch's file store: pip install 'torch>=2.9'"
    if reason is not None:
        raise Fail(f"--hosts: {reason}")
