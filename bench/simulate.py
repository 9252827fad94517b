"""Validate `spccl simulate`: measure on emulated hosts, fit at 600 Mbit/s, compare at other rates and densities.

    sudo .venv/bin/python bench/simulate.py build/simulate          # measures, fits, compares (root; about 20 minutes)
    .venv/bin/python bench/simulate.py build/simulate --no-measure  # fits and compares what was measured
    .venv/bin/python bench/simulate.py build/simulate --publish bench/results

FOLDER gets the CSV files of `spccl bench`, the calibration and the comparison. All-reduce and all-gather of 16 MiB of
float32, 4 hosts of 2 ranks, the five schedules. Bytes do not depend on the load of the machine, times do: measure on an
idle one. Exit code 1 if bytes are off by more than 1%, or times by more than 15% (wire
time above 100 ms), 25% (below) or 10% on average.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import os
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

from spccl import simulate as sim
from spccl.bench.calibrate import cells_of

HOSTS, RANKS, SIZE = 4, 8, "16M"
PORT_QUEUE = "4M"  # of the switch: few segments are sent again; the simulation loses none
FIT_RATE, FIT_SPARSITIES = "600mbit", (0.995, 0.97, 0.8)
RATES = ("100mbit", "300mbit", "1000mbit")
SPARSITIES = (0.99, 0.95, 0.65, 0.0)  # none lies on a threshold of the ring, or where two formats cost the same
BYTES_OFF, LONG_OFF, SHORT_OFF, MEAN_OFF = 0.01, 0.15, 0.25, 0.10
LONG_S = 0.1  # of wire time
SPREAD = 0.1  # a cell above it is marked
CALIBRATION, COMPARISON, FIT = "netns-4x2-calibration.json", "netns-4x2-simulate.csv", "netns-4x2-simulate-fit.csv"


@dataclasses.dataclass(frozen=True)
class Row:
    """A line of the comparison. off: predicted over measured minus 1."""

    rate_mbit: int
    collective: str
    schedule: str
    sparsity: float
    wire_bytes: int
    predicted_bytes: int
    bytes_off: float
    time_ms: float
    predicted_ms: float
    time_off: float
    wire_ms: float
    spread: float

    def allowed(self) -> float:
        return LONG_OFF if self.wire_ms > LONG_S * 1e3 else SHORT_OFF

    def noisy(self) -> bool:
        return self.spread > SPREAD


def name_of(rate: str, schedule: str) -> str:
    return f"{rate}-{schedule}.csv"


def measure(folder: Path, rate: str, schedule: str, sparsities: tuple[float, ...], iters: int) -> None:
    """One run of `spccl bench`: all sparsities of a schedule."""
    colls = "all_reduce" if schedule == "oneshot" else "all_reduce,all_gather"
    out = folder / name_of(rate, schedule)
    command = [sys.executable, "-m", "spccl", "bench", "--hosts", str(HOSTS), "--ranks", str(RANKS), "--rate", rate,
               "--port-queue", PORT_QUEUE,
               "--collective", colls, "--sizes", SIZE, "--sparsity", ",".join(map(str, sparsities)), "--peer", "none",
               "--schedule", schedule, "--iters", str(iters), "--warmup", "2", "--csv", str(out)]  # fmt: skip
    print("#", " ".join(command[1:]), flush=True)
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def compared(cell: sim.Cell, machine: sim.Machine) -> Row:
    p = cell.predicted(machine)
    return Row(
        rate_mbit=round(cell.network.bits / 1e6 / 10) * 10,
        collective=cell.call.collective,
        schedule=cell.schedule,
        sparsity=cell.sparsity,
        wire_bytes=round(cell.wire_bytes),
        predicted_bytes=round(p.wire_bytes),
        bytes_off=round(p.wire_bytes / cell.wire_bytes - 1, 5),
        time_ms=round(cell.time_s * 1e3, 3),
        predicted_ms=round(p.time_s * 1e3, 3),
        time_off=round(p.time_s / cell.time_s - 1, 4),
        wire_ms=round(p.link_bytes * cell.network.ns_per_byte() * 1e-6, 3),
        spread=round(cell.spread, 3),
    )


def report(rows: list[Row]) -> bool:
    """Print the comparison. True if every target is met; cells with a spread of their own above 10% are marked."""
    head = f"{'Mbit/s':>7} {'collective':11} {'schedule':13} {'zeros':>6} {'bytes':>8} {'measured':>10}"
    print(f"{head} {'predicted':>10} {'off':>7}  spread")
    for r in rows:
        marks = (" noisy" if r.noisy() else "") + (" MISSED" if abs(r.time_off) > r.allowed() else "")
        where = f"{r.rate_mbit:7} {r.collective:11} {r.schedule:13} {100 * r.sparsity:5.3g}%"
        what = f"{100 * r.bytes_off:+7.2f}% {r.time_ms:7.1f} ms {r.predicted_ms:7.1f} ms {100 * r.time_off:+6.1f}%"
        print(f"{where} {what}  {100 * r.spread:.0f}%{marks}")
    bytes_off = max(abs(r.bytes_off) for r in rows)
    mean = statistics.mean(abs(r.time_off) for r in rows)
    n_noisy = sum(r.noisy() for r in rows)
    missed = [r for r in rows if abs(r.time_off) > r.allowed()]
    print(f"bytes: largest error {100 * bytes_off:.2f}%, wanted {100 * BYTES_OFF:g}%")
    print(f"time: mean error {100 * mean:.1f}%, wanted {100 * MEAN_OFF:g}%")
    print(f"{len(missed)} of {len(rows)} cells above 15% (wire time above 100 ms) or 25%")
    print(f"{n_noisy} cells with a spread above 10%")
    return bytes_off <= BYTES_OFF and mean <= MEAN_OFF and not missed


def fit(folder: Path, iters: int) -> sim.Machine:
    cells, facts = [], {}
    for schedule in sim.SCHEDULES:
        more, facts = cells_of(folder / name_of(FIT_RATE, schedule))
        cells += more
    machine = sim.fit(cells, note=lambda e: print(f"# fit: error {100 * e:.1f}%", flush=True))
    commit = facts.get("commit", "unknown")
    source = f"{len(cells)} cells of 4 emulated hosts of 2 ranks at {FIT_RATE}, commit {commit}"
    machine = dataclasses.replace(machine, source=source)
    kept = {name: facts.get(name, "unknown") for name in ("cpu", "cores", "commit", "spccl")} | {"iters": iters}
    sim.write_calibration(folder / CALIBRATION, machine, kept)
    write(folder / FIT, [compared(c, machine) for c in cells], facts)
    return machine


def write(path: Path, rows: list[Row], facts: dict[str, str]) -> None:
    with path.open("w") as file:
        file.writelines(f"# {k}: {v}\n" for k, v in facts.items() if k not in ("command", "settings"))
        file.write("# command: bench/simulate.py\n")
        writer = csv.DictWriter(file, [f.name for f in dataclasses.fields(Row)], lineterminator="\n")
        writer.writeheader()
        writer.writerows(dataclasses.asdict(r) for r in rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--no-measure", action="store_true")
    parser.add_argument("--resume", action="store_true", help="measure only what FOLDER lacks")
    parser.add_argument("--iters", type=int, default=5)
    parser.add_argument("--publish", type=Path, help="copy calibration and comparison there")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    todo = [(FIT_RATE, FIT_SPARSITIES), *((rate, SPARSITIES) for rate in RATES)]
    for rate, sparsities in todo:
        for schedule in sim.SCHEDULES:
            there = (args.folder / name_of(rate, schedule)).is_file()
            if not args.no_measure and not (args.resume and there):
                measure(args.folder, rate, schedule, sparsities, args.iters)
    machine = fit(args.folder, args.iters)
    rows, facts = [], {}
    for rate in RATES:
        for schedule in sim.SCHEDULES:
            cells, facts = cells_of(args.folder / name_of(rate, schedule))
            rows += [compared(c, machine) for c in cells]
    write(args.folder / COMPARISON, rows, facts | {"load": f"{os.getloadavg()[0]:.1f}"})
    good = report(rows)
    if args.publish is not None:
        for name in (CALIBRATION, COMPARISON, FIT):
            shutil.copy(args.folder / name, args.publish / name)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
