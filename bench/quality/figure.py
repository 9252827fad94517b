"""Draw loss over steps and over bytes from the CSVs of run.py.

    python bench/quality/figure.py bench/results/quality-25m.csv -o docs/img/quality.png --names dense "top 8.3%"
"""

from __future__ import annotations

import argparse
import csv
import textwrap
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def read(paths: list[Path]) -> tuple[dict[str, dict[int, list[dict[str, float]]]], list[str]]:
    """Rows by name and seed, in steps' order, and the facts in the files' first lines."""
    curves: dict[str, dict[int, list[dict[str, float]]]] = {}
    facts = []
    for path in paths:
        lines = path.read_text().splitlines()
        facts.append(f"{path.name}: " + "; ".join(line[2:] for line in lines if line.startswith("#")))
        for row in csv.DictReader(line for line in lines if not line.startswith("#")):
            numbers = {key: float(value) for key, value in row.items() if key != "name" and value}
            curves.setdefault(row["name"], {}).setdefault(int(row["seed"]), []).append(numbers)
    return {name: dict(sorted(seeds.items())) for name, seeds in curves.items()}, facts


def label(name: str, seeds: dict[int, list[dict[str, float]]]) -> str:
    """Name, seeds, loss of each at the end and how many times fewer bytes than a dense all-reduce of float32."""
    ends = [f"{rows[-1]['loss']:.4f}" if ended(rows) else "cut off" for rows in seeds.values()]
    last = next(iter(seeds.values()))[-1]
    return f"{name}: {', '.join(ends)} at {last['saving']:.3g}×"


def ended(rows: list[dict[str, float]]) -> bool:
    return rows[-1]["step"] == rows[-1]["steps"]


def drawn(rows: list[dict[str, float]]) -> list[dict[str, float]]:
    """The rows but the last step, which is evaluated on more text than the others."""
    return rows[:-1] if ended(rows) else rows


def draw(curves: dict[str, dict[int, list[dict[str, float]]]], output: Path, caption: str, top: float) -> None:
    figure, axes = plt.subplots(1, 2, figsize=(12, 5.2), sharey=True)
    colors = plt.get_cmap("tab10")
    for number, (name, seeds) in enumerate(curves.items()):
        for seed, rows in seeds.items():
            rows = drawn(rows)
            losses = [row["loss"] for row in rows]
            style = {"color": colors(number % 10), "linestyle": "-" if number < 10 else "--"}
            style |= {"linewidth": 1.3, "alpha": 0.9, "label": label(name, seeds) if seed == min(seeds) else None}
            axes[0].plot([row["step"] for row in rows], losses, **style)
            axes[1].plot([row["bytes_per_param"] for row in rows], losses, **style)
    axes[0].set_xlabel("step")
    axes[0].set_ylabel("validation loss, nats per byte")
    axes[1].set_xlabel("bytes sent per rank and parameter, whole run so far")
    axes[1].set_xscale("log")
    lowest = min(row["loss"] for seeds in curves.values() for rows in seeds.values() for row in rows)
    axes[0].set_ylim(lowest - 0.02, top)
    for axis in axes:
        axis.grid(alpha=0.3)
    axes[0].legend(fontsize=8, title="loss after the last step (2048 windows, not drawn), saving")
    lines = textwrap.wrap(caption, 260)
    figure.text(0.01, 0.005, "\n".join(lines), fontsize=6)
    figure.tight_layout(rect=(0, 0.01 + 0.02 * len(lines), 1, 1))
    figure.savefig(output, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--names", nargs="+", help="in the order of the legend; default all")
    parser.add_argument("--top", type=float, default=1.6, help="largest loss that is drawn")
    args = parser.parse_args()
    curves, facts = read(args.files)
    names = args.names or list(curves)
    draw({name: curves[name] for name in names}, args.output, "\n".join(facts), args.top)


if __name__ == "__main__":
    main()
