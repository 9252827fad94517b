"""The command `spccl bench --device cuda`: turns its options into a plan, and writes the results. Needs torch."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import click
import torch

from .. import errors
from .._launch import RanksFailed
from . import cases, gpu, gpu_codec, gpu_report, report
from .runner import under_torchrun

_CPU_ONLY = ("transport", "via", "hosts", "rate", "in_flight")
_CHOOSES_CASES = ("collectives", "sizes", "smallest", "largest", "factor", "dtypes", "op", "sparsities", "max_ctas")
_SIZE = 512 << 20
_CODEC_DTYPES, _CODEC_SPARSITIES = ("float32", "bfloat16"), (0.999, 0.99, 0.9, 0.5, 0.0)


@dataclasses.dataclass
class _Received:
    """Results and facts that rank 0 has sent so far."""

    facts: dict[str, str]
    rows: list[gpu_report.GpuRow] = dataclasses.field(default_factory=list)
    codec: list[gpu_report.CodecRow] = dataclasses.field(default_factory=list)
    left_out: list[cases.Case] = dataclasses.field(default_factory=list)

    def take(self, message: tuple[str, Any]) -> None:
        kind, value = message
        if kind == "facts":
            self.facts |= value
            for key, text in self.facts.items():
                click.echo(f"# {key}: {text}")
            click.echo(gpu_report.GpuRow.head())
        elif kind == "row":
            self.rows.append(value)
            click.echo(value.line())
        elif kind == "codec":
            self.codec.append(value)
            click.echo(value.line())
        else:
            self.left_out += value


def bench(given: dict[str, Any], options: dict[str, Any], files: dict[str, Path | None]) -> None:
    """Run the command.

    Args:
        given: the options that were given on the command line.
        options: all options, with their defaults.
        files: the paths of the files csv, codec_csv and json; None = that file is not written.

    Raises: click.ClickException.
    """
    plan = plan_of(given, options)
    torchrun = under_torchrun()
    ranks = int(os.environ["WORLD_SIZE"]) if torchrun else n_ranks("spccl bench", given.get("ranks"))
    try:
        cases.check_sizes(plan.cases, ranks)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--sizes") from error
    received = _Received(report.machine() | {"command": report.command()})
    failure = None
    try:
        if torchrun:
            gpu.run_gpus_here(plan, received.take)
            if os.environ["RANK"] != "0":
                return
        else:
            gpu.run_gpus(plan, ranks, deadline_s=options["timeout"], on_message=received.take)
    except (RanksFailed, errors.Error) as error:
        failure = str(error)
        received.facts["failed"] = failure.replace("\n", "; ")
    if received.rows or received.codec or failure is None:  # keep what was measured before a failure
        _write_files(received, files)
        click.echo(gpu_report.summary(received.rows, received.codec, received.left_out))
    if failure is not None:
        raise click.ClickException(f"spccl bench failed:\n{failure}")
    wrong = sum(r.wrong + (r.peer_wrong or 0) for r in received.rows) + sum(c.wrong for c in received.codec)
    if wrong:
        raise click.ClickException(f"{wrong} element(s) were wrong")
    if received.left_out:
        raise click.ClickException(f"{len(received.left_out)} case(s) were not measured: --seconds was too short")


def _write_files(received: _Received, files: dict[str, Path | None]) -> None:
    texts = {
        "csv": lambda: report.to_csv(received.rows, received.facts),
        "codec_csv": lambda: report.to_csv(received.codec, received.facts),
        "json": lambda: report.to_json([*received.rows, *received.codec], received.facts),
    }
    for name, text in texts.items():
        path = files[name]
        if path is not None:
            path.write_text(text())
            click.echo(f"# written: {path}")


def n_ranks(command: str, asked: int | None) -> int:
    """Number of processes to start: `asked`, else one per GPU. Raises: ClickException if there are fewer GPUs."""
    found = torch.cuda.device_count()
    wanted = asked or max(found, 1)
    if found < wanted:
        raise click.ClickException(
            f"{command} --device cuda: {wanted} GPU(s) wanted, torch {torch.__version__} sees {found}"
            + ("" if torch.version.cuda else "; this torch was built without CUDA")
        )
    return wanted


def plan_of(given: dict[str, Any], options: dict[str, Any]) -> gpu.GpuPlan:
    """The options as a plan. Without options that choose cases the plan has all cases of bench/notes/gpu-results.md
    with their targets, and the codec. Raises click.BadParameter for options that `--device cuda` does not have."""
    for name in _CPU_ONLY:
        if name in given:
            raise click.BadParameter("is for --device cpu", param_hint=f"--{name}")
    if given.get("peer") == "gloo":
        raise click.BadParameter("gloo needs --device cpu; with --device cuda use nccl or none", param_hint="--peer")
    if options["op"] == "avg":
        raise click.BadParameter("NCCL rounds avg differently, so results would differ: use sum", param_hint="--op")
    if "float8" in options["dtypes"] and set(cases.REDUCING) & set(options["collectives"]):
        raise click.BadParameter(
            "float8 has no arithmetic, so it cannot be reduced: choose all_gather or broadcast", param_hint="--dtype"
        )
    whole_table = not set(_CHOOSES_CASES) & set(given)
    chosen = tuple(cases.gpu_targets()) if whole_table else _chosen(given, options)
    with_codec = given.get("codec", whole_table)
    return gpu.GpuPlan(
        cases=chosen,
        codec=gpu_codec.codec_cases(_CODEC_DTYPES, _CODEC_SPARSITIES, _SIZE) if with_codec else (),
        with_peers=options["peer"] != "none",
        iters=options["iters"],
        warmup=options["warmup"],
        seconds=options["seconds"],
        in_place=not options["out_of_place"],
        graph=options["graph"],
        timeout_s=min(options["timeout"], 120.0),
    )


def _chosen(given: dict[str, Any], options: dict[str, Any]) -> tuple[cases.Case, ...]:
    sizes: Any = given.get("sizes")
    if sizes is None and {"smallest", "largest", "factor"} & set(given):
        try:
            sizes = cases.sizes(options["smallest"], options["largest"], options["factor"])
        except ValueError as error:
            raise click.BadParameter(str(error), param_hint="--min, --max, --factor") from error
    found = cases.cases(
        options["collectives"],
        sizes or (_SIZE,),
        options["dtypes"],
        options["op"],
        options["sparsities"],
        options["max_ctas"],
    )
    wanted = {(c.collective, c.size_bytes, c.dtype, c.op, c.sparsity, c.max_ctas): c for c in cases.gpu_targets()}
    return tuple(wanted.get((c.collective, c.size_bytes, c.dtype, c.op, c.sparsity, c.max_ctas), c) for c in found)
