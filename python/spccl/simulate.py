"""What a collective would cost on hosts that are not there: `spccl simulate` (docs/SIMULATE.md).

The simulator is C (csrc/core/simulate). Here are the rates of a machine, fitted to results of `spccl bench`, and the
curves that the command prints and draws. It models the CPU engine, no GPU kernels.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from . import _ext, errors
from .frame import ITEM_BYTES

SCHEDULES = ("direct", "relayed", "oneshot", "ring", "hierarchical")
IN_RANK_ORDER = ("direct", "relayed", "oneshot")  # the library chooses among these
CALIBRATION_VERSION = 1
RANKS_MAX = 4096
MERGED_ABOVE = 64  # ranks: ROUNDED_ABOVE of simulate.c
# Payload over all bytes of an Ethernet frame of 1514 bytes: headers of Ethernet, IP and TCP with time stamps.
LINK_EFFICIENCY = 1448 / 1514
# GPT-2 by its parameters, as Hugging Face counts them.
MODELS = {"gpt2": 124_439_808, "gpt2-medium": 354_823_168, "gpt2-large": 774_030_080, "gpt2-xl": 1_557_611_200}


class CalibrationError(ValueError):
    """A file that is no calibration, or one of another version. The text names the file and what is wrong."""


@dataclasses.dataclass(frozen=True)
class Machine:
    """Rates of a CPU, in ns (spccl_experimental.h says of what), and where they come from.

    latency_ns: of a link, one way. source: what the rates were fitted to.
    """

    pass_ns: float = 0.062
    codec_factor: float = 0.74
    send_ns: float = 0.28
    receive_ns: float = 0.34
    local_ns: float = 0.1
    local_message_ns: float = 600.0
    remote_message_ns: float = 4800.0
    wake_ns: float = 12400.0
    latency_ns: float = 33600.0
    source: str = "15 cells of 4 emulated hosts, 1 Gbit/s, AMD EPYC (docs/SIMULATE.md)"

    @staticmethod
    def rate_names() -> tuple[str, ...]:
        return tuple(f.name for f in dataclasses.fields(Machine) if f.name != "source")

    def rates(self) -> dict[str, float]:
        return {name: getattr(self, name) for name in self.rate_names()}


def read_calibration(path: Path) -> Machine:
    """The machine of a file that `write_calibration` wrote. Raises: CalibrationError, OSError."""
    try:
        document = json.loads(path.read_text())
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CalibrationError(f"{path}: not a calibration of spccl simulate: it is no JSON: {error}") from error
    version = document.get("spccl_calibration") if isinstance(document, dict) else None
    if version is None:
        raise CalibrationError(f'{path}: not a calibration of spccl simulate: it has no "spccl_calibration"')
    if version != CALIBRATION_VERSION:
        raise CalibrationError(
            f"{path}: a calibration of version {version}, wanted {CALIBRATION_VERSION}: fit it again with --calibrate"
        )
    if document.get("engine") != "cpu":
        raise CalibrationError(f"{path}: a calibration of engine {document.get('engine')!r}, wanted 'cpu'")
    rates = document.get("rates")
    for name in Machine.rate_names():
        value = rates.get(name) if isinstance(rates, dict) else None
        number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        if not number or not 0 < value <= 1e12:
            raise CalibrationError(f"{path}: its rate {name} is {value!r}, wanted a number above 0 and up to 1e12")
    return Machine(**{n: float(rates[n]) for n in Machine.rate_names()}, source=str(document.get("source", path.name)))


def write_calibration(path: Path, machine: Machine, facts: dict[str, Any]) -> None:
    """facts: of the measurement, such as cpu and commit."""
    document = {"spccl_calibration": CALIBRATION_VERSION, "engine": "cpu", "source": machine.source, **facts}
    path.write_text(json.dumps(document | {"rates": machine.rates()}, indent=1) + "\n")


@dataclasses.dataclass(frozen=True)
class Network:
    """Hosts and their links. Rank r is on host r // per_host.

    bits: of a link per second. link_ns: time per byte of payload; 0: from `bits`. cores: of a host, 0: one for each
    rank. shared: all hosts have these cores together, as emulated hosts do.
    """

    hosts: int
    per_host: int
    bits: float
    link_ns: float = 0.0
    burst_bytes: float = 0.0
    latency_ns: float | None = None
    cores: int = 0
    shared: bool = False

    @property
    def ranks(self) -> int:
        return self.hosts * self.per_host

    def ns_per_byte(self) -> float:
        return self.link_ns or 8e9 / (self.bits * LINK_EFFICIENCY)


@dataclasses.dataclass(frozen=True)
class Call:
    """A collective. size_bytes: as `spccl bench` counts, the larger buffer of a rank. density: of a contribution."""

    collective: str
    size_bytes: int
    dtype: str = "float32"
    density: float = 1.0
    overlap: float = 0.0
    format: str = "auto"
    root: int = 0

    def n_elems(self, ranks: int) -> int:
        blocks = ranks if self.collective in ("all_gather", "reduce_scatter") else 1
        return max(self.size_bytes // ITEM_BYTES[self.dtype] // blocks, 1)


@dataclasses.dataclass(frozen=True)
class Prediction:
    """What a call takes. Bytes are those of messages, without the headers of the network.

    link_bytes: out of the host that sends most, or into the one that gets most. rank_bytes: of the rank that sends
    most. wire_bytes: mean over the ranks. memory_bytes, cpu_s: of a rank. chosen_s: what the library expects when it
    chooses; 0: it never chooses this. formats: share of the bytes.
    """

    schedule: str
    time_s: float
    link_bytes: float
    rank_bytes: float
    wire_bytes: float
    memory_bytes: float
    cpu_s: float
    link_share: float
    chosen_s: float
    formats: dict[str, float]
    simulated: int


def predict(
    network: Network,
    call: Call,
    schedule: str,
    machine: Machine,
    *,
    plan: tuple[bytes, int] | None = None,
    merge: int = 0,
) -> Prediction:
    """Simulate a call. plan: text of a plan file and the number of its plan; `schedule` is then only its name.

    Raises: errors.ArgumentError, errors.UnsupportedError (too large), errors.SettingError (the plan).
    """
    rates = machine.rates() | ({} if network.latency_ns is None else {"latency_ns": network.latency_ns})
    which: dict[str, Any] = {"schedule": schedule} if plan is None else {"plan_text": plan[0], "plan_index": plan[1]}
    out = _ext.simulate(
        collective=call.collective,
        format=call.format,
        n_elems=call.n_elems(network.ranks),
        dtype=call.dtype,
        n_ranks=network.ranks,
        per_host=network.per_host,
        root=call.root,
        merge=merge,
        cores=network.cores,
        shared=int(network.shared),
        density=call.density,
        overlap=call.overlap,
        link_ns=network.ns_per_byte(),
        burst_bytes=network.burst_bytes,
        **which,
        **rates,
    )
    time_s, total = out["time_ns"] * 1e-9, out["wire_bytes"] or 1.0
    return Prediction(
        schedule,
        time_s=time_s,
        link_bytes=out["link_bytes"],
        rank_bytes=out["rank_bytes"],
        wire_bytes=out["wire_bytes"] / network.ranks,
        memory_bytes=out["memory_bytes"],
        cpu_s=out["cpu_ns"] * 1e-9,
        link_share=out["link_bytes"] * network.ns_per_byte() * 1e-9 / time_s,
        chosen_s=out["chosen_ns"] * 1e-9,
        formats={name: b / total for name, b in out["format_bytes"].items() if b},
        simulated=out["n_simulated"],
    )


def predict_all(
    network: Network, call: Call, machine: Machine, schedules: Iterable[str] = SCHEDULES, merge: int = 0
) -> tuple[list[Prediction], dict[str, str]]:
    """Every schedule that can be simulated, the fastest first; and of the others why not."""
    made, left_out = [], {}
    for schedule in schedules:
        try:
            made.append(predict(network, call, schedule, machine, merge=merge))
        except errors.UnsupportedError as error:
            left_out[schedule] = str(error)
    return sorted(made, key=lambda p: p.time_s), left_out


# ---- curves ----

Curves = dict[str, list[tuple[float, float]]]  # by schedule: (x, seconds)


def curves(network: Network, machine: Machine, calls: Iterable[tuple[float, Call]]) -> Curves:
    """The time of each schedule for each call, which stands at an x."""
    found: Curves = {}
    for x, call in calls:
        for p in predict_all(network, call, machine, merge=1)[0]:
            found.setdefault(p.schedule, []).append((x, p.time_s))
    return found


def crossings(found: Curves) -> list[tuple[float, str, str]]:
    """Where another schedule becomes the fastest: (x, before, after), x between two points by their logarithms."""
    xs = sorted({x for points in found.values() for x, _ in points})
    by_x = {x: {s: dict(points)[x] for s, points in found.items() if x in dict(points)} for x in xs}
    made = []
    for x0, x1 in itertools.pairwise(xs):
        before, after = (min(by_x[x], key=by_x[x].__getitem__) for x in (x0, x1))
        if before == after or before not in by_x[x1] or after not in by_x[x0]:
            continue
        gap0, gap1 = (math.log(by_x[x][after] / by_x[x][before]) for x in (x0, x1))
        share = gap0 / (gap0 - gap1) if gap0 != gap1 else 0.5
        made.append((math.exp(math.log(x0) + share * (math.log(x1) - math.log(x0))), before, after))
    return made


def over_sizes(network: Network, call: Call, machine: Machine, sizes: Sequence[int]) -> Curves:
    least = (
        64 * ITEM_BYTES[call.dtype] * network.ranks if network.ranks > MERGED_ABOVE else 0
    )  # rounded below: simulate.c
    return curves(network, machine, ((float(s), dataclasses.replace(call, size_bytes=s)) for s in sizes if s >= least))


def over_densities(network: Network, call: Call, machine: Machine, densities: Sequence[float]) -> Curves:
    return curves(network, machine, ((d, dataclasses.replace(call, density=d)) for d in densities))


def over_ranks(network: Network, call: Call, machine: Machine, hosts: Sequence[int]) -> Curves:
    """More hosts with equally many ranks. Without oneshot, which sends everything to all."""
    found: Curves = {}
    for n in hosts:
        grown = dataclasses.replace(network, hosts=n)
        for p in predict_all(grown, call, machine, ("direct", "relayed", "ring", "hierarchical"), merge=1)[0]:
            found.setdefault(p.schedule, []).append((float(grown.ranks), p.time_s))
    return found


# ---- a step of training ----


def step_seconds(
    network: Network, call: Call, machine: Machine, n_params: int, schedules: Iterable[str]
) -> dict[str, float]:
    """All-reduces of all gradients, bucket after bucket (call.size_bytes each), by schedule. Nothing overlaps."""
    whole, rest = divmod(n_params * ITEM_BYTES[call.dtype], call.size_bytes)
    parts = [(call, whole), (dataclasses.replace(call, size_bytes=rest), 1)]
    found: dict[str, float] = {}
    for schedule in schedules:
        try:
            found[schedule] = sum(
                n * predict(network, part, schedule, machine).time_s for part, n in parts if n and part.size_bytes
            )
        except errors.UnsupportedError:
            continue
    return found


# ---- calibration ----


@dataclasses.dataclass(frozen=True)
class Cell:
    """A measured call on emulated hosts. spread: p90 - p10 over the median. sparsity: as it was asked for; call.density
    is that of the data."""

    network: Network
    call: Call
    schedule: str
    time_s: float
    wire_bytes: float
    spread: float
    sparsity: float

    def predicted(self, machine: Machine) -> Prediction:
        return predict(self.network, self.call, self.schedule, machine)


def _loss(cells: Sequence[Cell], machine: Machine, start: Machine) -> float:
    """Mean square of the logarithm of predicted over measured, and a little for each rate that moves without need."""
    errors_ = [math.log(c.predicted(machine).time_s / c.time_s) for c in cells]
    moved = [math.log(getattr(machine, n) / getattr(start, n)) for n in Machine.rate_names()]
    return sum(e * e for e in errors_) / len(errors_) + 1e-4 * sum(m * m for m in moved)


def fit(
    cells: Sequence[Cell],
    start: Machine | None = None,
    *,
    rounds: int = 12,
    note: Callable[[float], None] | None = None,
) -> Machine:
    """Fit the rates to measured cells: each rate in turn is multiplied or divided by a factor, which shrinks.

    note: called after each round with the root of the mean square of the relative error.
    """
    start = start or Machine()
    best, factor = start, 2.0
    least = _loss(cells, best, start)
    for _ in range(rounds):
        before = least
        for name in Machine.rate_names():
            for step in (factor, 1 / factor):
                tried = dataclasses.replace(best, **{name: getattr(best, name) * step})
                loss = _loss(cells, tried, start)
                if loss < least:
                    best, least = tried, loss
                    break
        if note is not None:
            note(math.sqrt(least))
        if least > before * 0.98:
            factor = math.sqrt(factor)
        if factor < 1.03:
            break
    return best
