"""The command `spccl bench --device cpu`: turns its options into a plan."""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import click

from . import cases, hosts, runner


def plan_of(o: dict[str, Any]) -> runner.Plan:
    """The options of `spccl bench` as a plan. Raises click.BadParameter for options that contradict each other."""
    has_torch = importlib.util.find_spec("torch") is not None
    peer = o["peer"] or ("gloo" if has_torch else "none")
    if (peer == "gloo" or o["via"] == "torch") and not has_torch:
        raise click.ClickException(
            "--peer gloo and --via torch need torch, which is not installed: pip install 'torch>=2.9'"
        )
    if peer == "gloo" and o["op"] == "avg":
        raise click.BadParameter("Gloo has no avg: use --peer none, or another --op", param_hint="--op")
    if "float8" in o["dtypes"] and not {"reduce_scatter", "all_reduce"}.isdisjoint(o["collectives"]):
        raise click.BadParameter(
            "float8 has no arithmetic, so it cannot be reduced: choose all_gather or broadcast", param_hint="--dtype"
        )
    try:
        sizes = o["sizes"] or cases.sizes(o["smallest"], o["largest"], o["factor"])
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--min, --max, --factor") from error
    _check_hosts(o, has_torch)
    chosen = tuple(cases.cases(o["collectives"], sizes, o["dtypes"], o["op"], o["sparsities"]))
    try:
        cases.check_sizes(chosen, int(os.environ["WORLD_SIZE"]) if runner.under_torchrun() else o["ranks"])
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--sizes" if o["sizes"] else "--min") from error
    return runner.Plan(
        cases=chosen,
        via=o["via"],
        peer=peer,
        transports=o["transport"],
        iters=o["iters"],
        warmup=o["warmup"],
        timeout_s=min(o["timeout"], 120.0),
        n_hosts=o["hosts"] or 0,
        rate=o["rate"],
        in_flight=o["in_flight"] or 0,
    )


def _check_hosts(o: dict[str, Any], has_torch: bool) -> None:
    if o["in_flight"] is not None and (o["hosts"] is None or o["via"] != "native"):
        raise click.BadParameter("needs --hosts, and --via native", param_hint="--in-flight")
    if o["hosts"] is None:
        return
    if runner.under_torchrun():
        raise click.BadParameter("starts its own ranks: do not use it under torchrun", param_hint="--hosts")
    if o["ranks"] % o["hosts"] != 0:
        raise click.BadParameter(
            f"{o['ranks']} ranks cannot be spread evenly over {o['hosts']} hosts", param_hint="--ranks"
        )
    try:
        hosts.bits_per_second(o["rate"])
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--rate") from error
    reason = hosts.why_not()
    if reason is None and not has_torch:
        reason = "the ranks of emulated hosts meet through torch's file store: pip install 'torch>=2.9'"
    if reason is not None:
        raise click.ClickException(f"--hosts: {reason}")
