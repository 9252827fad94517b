"""Results of `spccl bench` as the cells to which `spccl simulate` fits the rates of a machine."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

from .. import simulate as sim
from . import cases, hosts, report, runner

_GSO_BYTES = 64 << 10  # TCP hands a link up to so much at once
_ACK_SHARE = 66 / (2 * 1514)  # bytes of an acknowledgement, for every two full packets


def cells_of(path: Path) -> tuple[list[sim.Cell], dict[str, str]]:
    """The cells of a result of `spccl bench --hosts` (CSV or JSON) with a forced schedule, and facts of its machine.

    Raises: ValueError if there is none; the text says why.
    """
    if path.suffix == ".json":
        try:
            document = json.loads(path.read_text())
            rows, facts = document["rows"], document["machine"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path}: not a result of `spccl bench --json`: {error!r}") from error
    else:
        rows, facts = report.read_csv(path)
    cells, n_lost = [], 0
    for row in rows:
        if not row.get("hosts") or not row.get("link_gbs"):
            continue
        schedule = row.get("schedule") or "auto"
        if schedule not in sim.SCHEDULES or (schedule == "oneshot" and row["collective"] != "all_reduce"):
            continue
        n_hosts, ranks, gbs = int(row["hosts"]), int(row["ranks"]), float(row["link_gbs"])
        bits = 8e9 * gbs / sim.LINK_EFFICIENCY
        burst = hosts.burst_bytes(f"{bits / 1e6:.3f}mbit")
        # An emulated link (tbf) cuts what is larger than its burst into packets, and each second one is acknowledged.
        # The rate was measured with data one way. Where both ways are busy, acknowledgements take time from data.
        both_ways = row["collective"] != "broadcast"
        link_ns = (1 / gbs) * (1 + _ACK_SHARE if burst < _GSO_BYTES and both_ways else 1)
        network = sim.Network(
            n_hosts, ranks // n_hosts, bits, link_ns, burst,
            cores=int(facts.get("cores", 0)), shared=True,
        )  # fmt: skip
        size = int(row["size_bytes"])
        case = cases.Case(row["collective"], size, row["dtype"], row["op"], float(row["sparsity"]))
        density = runner.density(case, ranks)
        call = sim.Call(case.collective, size, case.dtype, density, format=row.get("format") or "auto")
        time_us = float(row["time_us"])
        spread = (float(row["time_p90_us"]) - float(row["time_p10_us"])) / time_us
        cells.append(sim.Cell(network, call, schedule, time_us * 1e-6, float(row["wire_bytes"]), spread, case.sparsity))
        n_lost += int(row.get("timeouts") or 0)
    if n_lost:
        warnings.warn(
            f"{path}: {n_lost} TCP time-outs: segments were lost, which the model does not have: measure with "
            "--port-queue 4M",
            stacklevel=2,
        )
    if not cells:
        raise ValueError(f"{path}: no row of emulated hosts with a schedule: measure with --hosts and --schedule")
    return cells, facts
