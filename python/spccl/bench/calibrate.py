"""Results of `spccl bench` as the cells to which `spccl simulate` fits the rates of a machine."""

from __future__ import annotations

import json
from pathlib import Path

from .. import simulate as sim
from . import cases, hosts, report, runner

_GSO_BYTES = 64 << 10  # TCP hands so much to a link at once
_ACK_SHARE = 66 / (2 * 1514)  # of a link whose packets pass one by one, where each second one is acknowledged


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
    cells = []
    for row in rows:
        if not row.get("hosts") or not row.get("link_gbs"):
            continue
        schedule = row.get("schedule") or "auto"
        if schedule not in sim.SCHEDULES or (schedule == "oneshot" and row["collective"] != "all_reduce"):
            continue
        n_hosts, ranks, gbs = int(row["hosts"]), int(row["ranks"]), float(row["link_gbs"])
        bits = 8e9 * gbs / sim.LINK_EFFICIENCY
        burst = hosts.burst_bytes(f"{bits / 1e6:.3f}mbit")
        # tbf cuts into packets what is larger than its burst. Both ways of a link are busy, so acknowledgements take
        # time from data. The rate was measured with data one way.
        link_ns = (1 / gbs) * (1 + _ACK_SHARE if burst < _GSO_BYTES else 1)
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
    if not cells:
        raise ValueError(f"{path}: no row of emulated hosts with a schedule: measure with --hosts and --schedule")
    return cells, facts
