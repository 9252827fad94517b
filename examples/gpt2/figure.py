"""Draw CSVs of measure.py: a bar per mode and bucket size, of computing, pruning and the rest of the exchange.

    python figure.py gpt2-xl-graph.csv [more.csv] [-o gpt2.png]

The parts of a bar are medians. The black line goes from the least to the greatest step of the runs.
"""

import argparse
from pathlib import Path

import results
from modes import MODES
from results import Row


def draw(sources: list[Path], output: Path) -> int:
    """One panel per file. Returns the number of bars. Raises: ValueError if measure.py did not write a file."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    files, captions = [results.read_csv(source) for source in sources], []
    height = 2.3 + 0.32 * max(len(rows) for rows, _ in files)
    figure, panels = pyplot.subplots(
        1, len(files), figsize=(6.4 * len(files), height), squeeze=False, layout="constrained"
    )
    for panel, source, (rows, facts) in zip(panels[0], sources, files, strict=True):
        draw_bars(panel, rows)
        first = rows[0]
        panel.set_title(f"GPT-2 {first.size}, {first.ranks} x {first.device}, {first.variant}")
        machine = facts.get("gpu") or f"{facts.get('cpu', '?')}, {facts.get('cores', '?')} cores"
        panel.set_xlabel(f"ms per step, medians of {first.runs} runs")
        captions.append(f"{source.name}: {machine}, commit {facts.get('commit', '?')}")
    figure.legend(*panels[0][0].get_legend_handles_labels(), loc="outside upper center", ncols=3, frameon=False)
    figure.supxlabel("\n".join(captions), fontsize="x-small")
    figure.savefig(output, dpi=150)
    pyplot.close(figure)
    return sum(len(rows) for rows, _ in files)


def draw_bars(panel, rows: list[Row]) -> None:
    places = range(len(rows))
    compute = [row.compute_ms for row in rows]
    prune = [min(max(row.prune_ms or 0.0, 0.0), max(row.exposed_ms, 0.0)) for row in rows]
    rest = [max(row.exposed_ms, 0.0) - part for row, part in zip(rows, prune, strict=True)]
    panel.barh(places, compute, color="#c8ccd4", label="computing alone")
    panel.barh(places, prune, left=compute, color="#e0a458", label="pruning")
    lefts = [a + b for a, b in zip(compute, prune, strict=True)]
    panel.barh(places, rest, left=lefts, color="#d1603d", label="rest of the exposed exchange")
    panel.hlines(places, [row.step_min_ms for row in rows], [row.step_max_ms for row in rows], color="black")
    panel.set_yticks(places, [f"{MODES[row.mode].title}, {row.bucket_mb} MB" for row in rows])
    panel.invert_yaxis()
    panel.spines[["top", "right"]].set_visible(False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", nargs="+", type=Path, metavar="CSV")
    parser.add_argument("-o", "--output", type=Path, default=Path("gpt2.png"))
    args = parser.parse_args()
    print(f"wrote {args.output}: {draw(args.sources, args.output)} bars")


if __name__ == "__main__":
    main()
