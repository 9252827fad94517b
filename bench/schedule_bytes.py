"""Draw the bytes that each schedule sends in an all-reduce, measured and by the cost model.

BYTES_CSV=bytes.csv build/gcc/tests/c/test_plan_cost bytes
python bench/schedule_bytes.py bytes.csv -o docs/img/schedule-bytes.png
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def panel(axis: plt.Axes, rows: list[dict[str, str]], ranks: int, per_host: int) -> None:
    """One group: lines are the model, points are measured. Bytes of all ranks over the bytes of one dense array."""
    here = [r for r in rows if (int(r["ranks"]), int(r["ranks_per_host"])) == (ranks, per_host)]
    schedules = list(dict.fromkeys(r["schedule"] for r in here))
    for number, schedule in enumerate(schedules):
        points = [r for r in here if r["schedule"] == schedule]
        density = [1 / int(r["one_in"]) for r in points]
        measured, model = (
            [float(r[f"{what}_bytes"]) / float(r["array_bytes"]) / ranks for r in points]
            for what in ("measured", "model")
        )
        color = plt.get_cmap("tab10")(number)
        line = ("-", "--", ":")[number % 3]  # some schedules send the same bytes
        axis.plot(density, model, color=color, linestyle=line, linewidth=1.6, label=schedule)
        axis.plot(density, measured, color=color, marker="o", markersize=4, linestyle="none")
    hosts = f"{ranks // per_host} hosts of {per_host}" if per_host else "one host"
    axis.set_title(f"{ranks} ranks, {hosts}", fontsize=10)
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_xlabel("density of a contribution")
    axis.grid(alpha=0.3, which="both")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("-o", "--output", type=Path, required=True)
    args = parser.parse_args()
    with args.file.open() as file:
        rows = [r for r in csv.DictReader(file) if r["collective"] == "all_reduce"]
    groups = list(dict.fromkeys((int(r["ranks"]), int(r["ranks_per_host"])) for r in rows))
    shown = [g for g in groups if g in ((4, 2), (8, 0), (16, 4))]
    figure, axes = plt.subplots(1, len(shown), figsize=(4.2 * len(shown), 4), sharey=True, layout="constrained")
    for axis, group in zip(axes, shown, strict=True):
        panel(axis, rows, *group)
    axes[0].set_ylabel("bytes sent per rank / bytes of a dense array")
    axes[0].legend(title="lines: model; points: measured", fontsize=8, title_fontsize=8)
    figure.savefig(args.output, dpi=100)


if __name__ == "__main__":
    main()
