"""Figures from the CSV files of `spccl bench`. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from .bench.report import read_csv

# Hough et al. (SpCCL): the best speed-ups over dense NCCL at 99% zeros, on A100 with Slingshot 11.
PAPER = {"all_gather": 5.25, "reduce_scatter": 2.5, "all_reduce": 2.66}
PAPER_SPARSITY = 0.99
MIB = 1 << 20


def _figure_module() -> Any:
    try:
        import matplotlib
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "spccl plot needs matplotlib, which is not installed: pip install 'matplotlib>=3.7'"
        ) from error
    matplotlib.use("Agg")
    import matplotlib.pyplot

    return matplotlib.pyplot


def _panels(plt: Any, collectives: Sequence[str], height: float, **more: Any) -> tuple[Any, list[Any]]:
    """A figure with one panel for each collective."""
    size = (4.6 * len(collectives), height)
    figure, panels = plt.subplots(1, len(collectives), figsize=size, squeeze=False, layout="constrained", **more)
    return figure, panels[0]


def _draw(panel: Any, zeros: Sequence[float], points: Iterable[tuple[float, ...]], label: str) -> None:
    """Draw ratios with bars from p10 to p90. zeros: all places of the axis. points: (sparsity, ratio, p10, p90)."""
    import numpy as np

    at, ratio, low, high = np.array(sorted(points)).T
    spread = np.maximum(0.0, [ratio - low, high - ratio])
    panel.errorbar([zeros.index(zero) for zero in at], ratio, yerr=spread, marker="o", capsize=3, label=label)


def _finish(panel: Any, collective: str, zeros: Sequence[float]) -> None:
    panel.axhline(1.0, color="grey", linewidth=1)
    panel.set_yscale("log", base=2)
    panel.yaxis.set_major_formatter("{x:g}×")
    panel.set_xticks(range(len(zeros)), [f"{100 * zero:g}%" for zero in zeros])
    panel.set_title(collective)
    panel.set_xlabel("zeros in the input")
    panel.legend(fontsize="x-small")


def _point(row: dict[str, str]) -> tuple[float, ...]:
    return tuple(float(row[name]) for name in ("sparsity", "ratio", "ratio_p10", "ratio_p90"))


def speedup_over_sparsity(sources: Sequence[Path], output: Path) -> int:
    """Draw one panel per collective: time of the dense library / time of spccl, over the fraction of zeros.

    There is a line for each (ranks, size, dtype, via). Bars go from p10 to p90; the line at 1 is the peer. The
    caption names the source files and their machines.

    Args:
        sources: CSV files of `spccl bench --csv`.
        output: file to write; its ending picks the kind (.png, .svg, .pdf).
    Returns: number of points drawn.
    Raises: ValueError if a file is not of `spccl bench --csv` or has no times of a peer.
    """
    plt = _figure_module()
    lines: dict[str, dict[str, list[tuple[float, ...]]]] = {}
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
            lines.setdefault(row["collective"], {}).setdefault(label, []).append(_point(row))
            n_points += 1
        captions.append(
            f"{source.name}: {facts.get('cpu', '?')}, {facts.get('cores', '?')} cores, "
            f"commit {facts.get('commit', '?')}"
        )
    figure, panels = _panels(plt, list(lines), 4.4)
    for panel, (collective, by_label) in zip(panels, lines.items(), strict=True):
        zeros = sorted({point[0] for points in by_label.values() for point in points})
        for label, points in by_label.items():
            _draw(panel, zeros, points, label)
        _finish(panel, collective, zeros)
    panels[0].set_ylabel("speed-up over the dense library, same run")
    figure.supxlabel("\n".join(captions), fontsize="x-small")
    figure.savefig(output, dpi=150)
    plt.close(figure)
    return n_points


def is_gpu_result(source: Path) -> bool:
    """Whether `spccl bench --device cuda` wrote the file. Raises: ValueError if `spccl bench` did not write it."""
    rows, _ = read_csv(source)
    return any(row.get("device") == "cuda" for row in rows)


def gpu_points(
    rows: Sequence[dict[str, str]], size_bytes: int, dtype: str
) -> dict[str, dict[float, tuple[float, ...]]]:
    """The points to draw, as {collective: {sparsity: (ratio, its p10, its p90, roofline)}}.

    They come from the rows of that size and dtype without a limit to the thread blocks. The roofline is the peer's
    time divided by the row's floor, the least time at the rates of memory and links.
    Raises: ValueError if there is no such row; the text lists the sizes and dtypes that exist.
    """
    found: dict[str, dict[float, tuple[float, ...]]] = {}
    there = set()
    for row in rows:
        size = int(row["size_bytes"])
        there.add(f"{size / MIB:g} MiB {row['dtype']}")
        # Sizes are rounded down to whole elements per rank.
        close = size_bytes - 4096 < size <= size_bytes
        if not close or row["dtype"] != dtype or int(row["max_ctas"]) != 0 or not row["ratio"] or not row["floor_us"]:
            continue
        roofline = float(row["peer_time_us"]) / float(row["floor_us"])
        zeros, *ratios = _point(row)
        found.setdefault(row["collective"], {})[zeros] = (*ratios, roofline)
    if not found:
        wanted = f"{size_bytes / MIB:g} MiB {dtype}"
        raise ValueError(f"no row of {wanted} with a peer's time and a floor; there is {', '.join(sorted(there))}")
    return found


def gpu_speedup_with_roofline(
    source: Path, output: Path, *, size_bytes: int = 512 * MIB, dtype: str = "float32"
) -> int:
    """Draw one panel per collective: time of the better NCCL / time of spccl, over the fraction of zeros.

    Each panel also shows the roofline of the machine and the paper's best speed-up. The caption names the file, the
    machine and the command.

    Args:
        source: CSV file of `spccl bench --device cuda --csv`.
        output: file to write; its ending picks the kind (.png, .svg, .pdf).
        size_bytes, dtype: the rows to draw.
    Returns: number of points drawn.
    Raises: ValueError if the file has no results on GPUs or no such rows.
    """
    plt = _figure_module()
    rows, facts = read_csv(source)
    try:
        found = gpu_points([row for row in rows if row.get("device") == "cuda"], size_bytes, dtype)
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from error
    figure, panels = _panels(plt, list(found), 4.6, sharey=True)
    for panel, (collective, points) in zip(panels, found.items(), strict=True):
        zeros = sorted(points)
        roofline = [points[zero][3] for zero in zeros]
        panel.plot(range(len(zeros)), roofline, ".--", color="grey", label="roofline of this machine")
        _draw(panel, zeros, [(zero, *points[zero][:3]) for zero in zeros], "spccl, p10 to p90")
        if PAPER_SPARSITY in zeros and collective in PAPER:
            at, best = zeros.index(PAPER_SPARSITY), PAPER[collective]
            panel.plot(at, best, "*", color="black", markersize=11, label="the paper, up to")
        _finish(panel, collective, zeros)
    panels[0].set_ylabel("speed-up over NCCL, same run")
    world = rows[0]["ranks"]
    figure.suptitle(f"{size_bytes / MIB:g} MiB {dtype}, {world} GPUs")
    rates = ", ".join(f"{name} {facts[key]}" for name, key in _RATES if key in facts)
    versions = ", ".join(f"{name} {facts.get(name, '?')}" for name in ("driver", "cuda", "nccl", "torch", "commit"))
    figure.supxlabel(
        f"{source.name}: {facts.get('gpu', '?')}, {versions}\n{facts.get('command', '?')}\n"
        "NCCL: the better of its defaults and symmetric windows; roofline: NCCL's time / max(time of memory, links); "
        f"GB/s: {rates or '?'}.\nPaper: Hough et al. (SpCCL), its best figures at 99%, A100 and Slingshot 11",
        fontsize="x-small",
    )
    figure.savefig(output, dpi=150)
    plt.close(figure)
    return sum(len(points) for points in found.values())


_RATES = (("read", "hbm_read_gbs"), ("write", "hbm_write_gbs"), ("link", "link_gbs"))


# ---- spccl simulate ----

# Shares of zeros at which the paper's ring becomes dense, with pici: SpCCL, section IV.C.
_THRESHOLDS = (("in a host", 0.6), ("between hosts", 0.5), ("results", 0.1))


def simulated(found: Any, network: Any, call: Any, source: str, output: Path) -> int:
    """Draw what `spccl simulate` found: time over size, over density, and over the number of ranks.

    The panel of densities also shows the fill-in, which is the density of the sum of all ranks, and the densities at
    which the paper's ring becomes dense.

    Args:
        found: {"size" | "density" | "ranks": {schedule: [(x, seconds)]}}.
        network, call: of simulate.py.
        source: where the rates come from, for the caption.
    Returns: number of points drawn.
    """
    plt = _figure_module()
    figure, panels = _panels(plt, ("size", "density", "ranks"), 4.4)
    labels = {"size": "bytes of the array", "density": "density of a contribution", "ranks": "ranks"}
    names = sorted({name for by_schedule in found.values() for name in by_schedule})
    n_points = 0
    for panel, axis in zip(panels, labels, strict=True):
        for schedule, points in sorted(found[axis].items()):
            xs, ys = zip(*sorted(points), strict=True)
            panel.plot(xs, [1e3 * y for y in ys], marker=".", color=f"C{names.index(schedule)}", label=schedule)
            n_points += len(xs)
        panel.set_xscale("log", base=10 if axis == "density" else 2)
        panel.set_yscale("log")
        panel.set_xlabel(labels[axis])
        panel.grid(alpha=0.3)
        panel.legend(fontsize="x-small", loc="upper left")
    panels[0].set_ylabel("time, ms")
    panels[0].set_title(f"{call.collective}, {100 * (1 - call.density):g}% zeros", fontsize=10)
    panels[1].set_title(f"{call.size_bytes / MIB:g} MiB {call.dtype}", fontsize=10)
    panels[2].set_title(f"{network.per_host} ranks a host", fontsize=10)
    xs = sorted({x for points in found["density"].values() for x, _ in points})
    fill = panels[1].twinx()
    fill.plot(xs, [1 - (1 - x) ** network.ranks for x in xs], color="grey", linestyle="--", linewidth=1)
    fill.set_ylabel("density of the sum (dashed)")
    for name, zeros in _THRESHOLDS:
        panels[1].axvline(1 - zeros, color="grey", linestyle=":", linewidth=1)
        panels[1].text(1 - zeros, panels[1].get_ylim()[0], f" {name}", rotation=90, fontsize="xx-small", va="bottom")
    figure.supxlabel(
        f"simulated: {network.hosts} hosts of {network.per_host} ranks, {network.bits / 1e9:g} Gbit/s a host; "
        f"CPU engine; rates: {source}",
        fontsize="x-small",
    )
    figure.savefig(output, dpi=110)
    plt.close(figure)
    return n_points
