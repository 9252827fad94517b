"""Draw the README's figure from the committed results: what each way to use spccl saves.

    python bench/win_figure.py -o docs/img/win.png
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

RESULTS = Path(__file__).parent / "results"
HOSTS, GPT2, LOSSES = "netns-4-tcp.csv", "h200-x2-gpt2-xl-tcp.csv", ("quality-25m.csv", "quality-25m-every-16.csv")
OURS, OTHERS = "tab:blue", "silver"
# Names of recipes in the CSVs -> what the legend says. Seed 0.
RECIPES = {
    "dense": "dense AdamW",
    "top 8.3%": "SparseSync, 8.3%",
    "top 2.4%": "SparseSync, 2.45%",
    "H16 chunk 2bit 8.5%": "SparseSync, 8.5% in 2 bits, every 16 steps",
}


def rows_of(name: str) -> list[dict[str, str]]:
    lines = (RESULTS / name).read_text().splitlines()
    return list(csv.DictReader(line for line in lines if not line.startswith("#")))


def bars(axis: plt.Axes, labels: list[str], dense: list[float], ours: list[float], names: tuple[str, str]) -> None:
    """Pairs of bars; above ours how many times as fast."""
    places = range(len(labels))
    axis.bar([p - 0.2 for p in places], dense, 0.4, color=OTHERS, label=names[0])
    drawn = axis.bar([p + 0.2 for p in places], ours, 0.4, color=OURS, label=names[1])
    axis.bar_label(drawn, [f"{a / b:.2g}×" for a, b in zip(dense, ours, strict=True)], fontweight="bold")
    axis.set_xticks(places, labels)
    axis.set_ylim(0, 1.3 * max(dense))
    axis.legend(loc="upper right")


def all_reduce(axis: plt.Axes) -> None:
    rows = {float(r["sparsity"]): r for r in rows_of(HOSTS) if r["collective"] == "all_reduce"}
    shown = (0.99, 0.9, 0.0)
    times = [[float(rows[zeros][name]) / 1e3 for zeros in shown] for name in ("peer_time_us", "time_us")]
    bars(axis, [f"{100 * zeros:g}% zeros" for zeros in shown], *times, ("Gloo", "spccl"))
    axis.set_ylabel("time of a call, ms")
    axis.set_title("emulated: all-reduce of 64 MiB,\n4 hosts at 1 Gbit/s, CPU tensors")


def gpt2_step(axis: plt.Axes) -> None:
    best = {mode: min(float(r["step_ms"]) for r in rows_of(GPT2) if r["mode"] == mode) for mode in ("tuned", "pruned")}
    bars(axis, ["GPT-2 XL"], [best["tuned"]], [best["pruned"]], ("dense DDP, NCCL", "99% pruned, spccl"))
    axis.set_ylabel("time of a step, ms")
    axis.set_xlim(-1, 1)
    axis.set_title("measured: one step of DDP with SGD,\n2 H200 over TCP (loopback)")


def losses(axis: plt.Axes) -> None:
    rows = [r for name in LOSSES for r in rows_of(name) if r["seed"] == "0" and r["step"] == r["steps"]]
    for i, (name, text) in enumerate(RECIPES.items()):
        row = next(r for r in rows if r["name"] == name)
        place = float(row["saving"]), float(row["loss"])
        axis.plot(*place, "o", color=OTHERS if i == 0 else OURS, markersize=10)
        label = f"{text}\n{place[0]:.3g}×: {place[1]:.3f}"
        axis.annotate(label, place, (0, -34 if i == 1 else 9), textcoords="offset points", ha="center")
    axis.set_xscale("log")
    axis.set_xlim(0.3, 8000)
    axis.set_ylim(0.66, 0.76)
    axis.set_xlabel("times fewer bytes than dense, whole run")
    axis.set_ylabel("validation loss, nats per byte")
    axis.set_title("simulated: loss after 5000 steps with AdamW,\nGPT of 25.7 M parameters, 4 ranks")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, required=True)
    args = parser.parse_args()
    figure, axes = plt.subplots(1, 3, figsize=(14, 4.2), width_ratios=(1.2, 0.8, 1.6), layout="constrained")
    for axis, draw in zip(axes, (all_reduce, gpt2_step, losses), strict=True):
        draw(axis)
        axis.spines[["top", "right"]].set_visible(False)
    figure.supxlabel(f"bench/results: {HOSTS}; {GPT2}; {', '.join(LOSSES)}", fontsize=10)
    figure.savefig(args.output, dpi=100)


if __name__ == "__main__":
    main()
