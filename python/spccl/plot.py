"""Figures from the CSV files of `spccl bench`. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .bench.report import read_csv


def _figure_module() -> Any:
    try:
        import matplotlib
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "spccl plot needs matplotlib, which is not installed: pip install 'spccl[plot]'"
        ) from error
    matplotlib.use("Agg")
    import matplotlib.pyplot

    return matplotlib.pyplot


def speedup_over_sparsity(sources: Sequence[Path], output: Path) -> int:
    """One panel per collective: time of the dense peer / time of spccl, over the share of zeros.

    A line per (ranks, size, dtype, way in); bars from p10 to p90; the line at 1 is the peer. The caption
    names the source files and their machines.

    Args: output: its ending picks the kind (.png, .svg, .pdf).
    Returns: number of points drawn. Raises: ValueError if a file is no result or has no peer's times.
    """
    plt = _figure_module()
    lines: dict[str, dict[str, list[tuple[float, float, float, float]]]] = {}
    captions, n_points = [], 0
    for source in sources:
        rows, facts = read_csv(source)
        with_peer = [row for row in rows if row["ratio"]]
        if not with_peer:
            raise ValueError(f"{source}: no row has a peer's time; measure with --peer gloo")
        for row in with_peer:
            size = int(row["size_bytes"])
            text = f"{size / 2**20:.4g} MiB" if size >= 1 << 20 else f"{size / 1024:.4g} KiB"
            label = f"{row['ranks']} ranks, {text} {row['dtype']}, {row['via']} against {row['peer']}"
            point = (
                float(row["sparsity"]),
                float(row["ratio"]),
                float(row["ratio_p10"]),
                float(row["ratio_p90"]),
            )
            lines.setdefault(row["collective"], {}).setdefault(label, []).append(point)
            n_points += 1
        captions.append(
            f"{source.name}: {facts.get('cpu', '?')}, {facts.get('cores', '?')} cores, "
            f"commit {facts.get('commit', '?')}"
        )
    figure, panels = plt.subplots(
        1, len(lines), figsize=(4.6 * len(lines), 4.4), squeeze=False, layout="constrained"
    )
    for panel, (collective, by_label) in zip(panels[0], lines.items(), strict=True):
        zeros = sorted({point[0] for points in by_label.values() for point in points})
        for label, points in by_label.items():
            points.sort()
            places = [zeros.index(point[0]) for point in points]
            ratio = [point[1] for point in points]
            spread = [
                [max(0.0, point[1] - point[2]) for point in points],
                [max(0.0, point[3] - point[1]) for point in points],
            ]
            panel.errorbar(places, ratio, yerr=spread, marker="o", capsize=3, label=label)
        panel.axhline(1.0, color="grey", linewidth=1)
        panel.set_yscale("log", base=2)
        panel.yaxis.set_major_formatter("{x:g}×")
        panel.set_xticks(range(len(zeros)), [f"{100 * zero:g}%" for zero in zeros])
        panel.set_title(collective)
        panel.set_xlabel("zeros in the input")
        panel.legend(fontsize="x-small")
    panels[0][0].set_ylabel("speed-up over the dense peer, same run")
    figure.supxlabel("\n".join(captions), fontsize="x-small")
    figure.savefig(output, dpi=150)
    plt.close(figure)
    return n_points
