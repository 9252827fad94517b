"""Rows of `spccl bench --device cuda`, their table and summary. Only this file computes floors and picks the peer."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from .cases import ELEM_BYTES, Case
from .report import Column, Measured, Row, make_row, percentiles_us, times, wrong_elems

# Rate at which one GPU sends while all GPUs write to all others: 4 H200 with 18 links each and NVSwitch.
LINK_GBS = 357.0
PEERS = ("nccl", "nccl_symm")
MIB = 1 << 20


@dataclasses.dataclass(frozen=True)
class Rates:
    """Rates of a GPU's own memory, measured in the same run. copy_gbs counts bytes read plus bytes written."""

    read_gbs: float
    write_gbs: float
    copy_gbs: float


@dataclasses.dataclass(frozen=True)
class GpuRow(Row):
    """One measured case on GPUs. `peer` is the faster of NCCL with and without symmetric windows, by the median.

    in_place: the all-gather's input is a part of its output (an all-reduce of torch is always in place).
    graph: one call was captured in a CUDA graph, which is replayed. host_us, nccl_host_us: how long a call of this
        collective occupies the calling thread. hbm_bytes: bytes that one GPU must at least read and write.
    floor_us: the shortest time that memory and links of this machine allow; of_floor: floor_us / time_us.
    target: the wanted ratio, if there is one.
    """

    device: str
    in_place: bool
    max_ctas: int
    graph: bool
    nccl_time_us: float | None
    nccl_symm_time_us: float | None
    host_us: float | None
    nccl_host_us: float | None
    hbm_bytes: int
    floor_us: float | None
    of_floor: float | None
    target: float | None

    columns: ClassVar[tuple[Column, ...]] = (
        ("collective", "", -14, "collective", ""),
        ("MiB", "", 7, lambda row: row.size_bytes / MIB, ".4g"),
        ("type", "", 8, "dtype", ""),
        ("zeros", "(%)", 6, lambda row: 100 * row.sparsity, "g"),
        ("ctas", "", 5, lambda row: row.max_ctas or "all", ""),
        ("formats", "", 20, "format_mix", ""),
        ("wire", "(MB)", 9, lambda row: row.wire_bytes / 1e6, ".3g"),
        ("time", "(us)", 9, "time_us", ".1f"),
        ("p10", "(us)", 9, "time_p10_us", ".1f"),
        ("p90", "(us)", 9, "time_p90_us", ".1f"),
        ("nccl", "(us)", 9, "nccl_time_us", ".1f"),
        ("symm", "(us)", 9, "nccl_symm_time_us", ".1f"),
        ("ratio", "", 7, lambda row: times(row.ratio), ""),
        ("wanted", "", 7, lambda row: times(row.target), ""),
        ("floor", "(us)", 8, "floor_us", ".1f"),
        ("host", "(us)", 6, "host_us", ".1f"),
        ("#wrong", "", 6, wrong_elems, ""),
    )


@dataclasses.dataclass(frozen=True)
class CodecRow:
    """Encoding or decoding of one array on one GPU. Times are in us: median, 10th and 90th percentile.

    gbs: dense bytes / time.
    of_rate: gbs / the rate that limits it, which is read for encode and write for decode. target: its wanted value.
    moved_gbs: (dense + encoded bytes) / time.
    floor_us: time to read the one array and write the other at the measured rates.
    wrong: for decode, elements that differ from the original; for encode, bytes that differ from what the CPU encodes.
    """

    what: str
    dtype: str
    sparsity: float
    dense_bytes: int
    encoded_bytes: int
    time_us: float
    time_p10_us: float
    time_p90_us: float
    gbs: float
    of_rate: float
    moved_gbs: float
    floor_us: float
    target: float | None
    wrong: int
    iters: int
    hbm_read_gbs: float
    hbm_write_gbs: float
    hbm_copy_gbs: float

    def line(self) -> str:
        """This row as one line for the terminal."""
        return (
            f"  {self.what:14} {self.dense_bytes / MIB:7.4g} {self.dtype:>8} {100 * self.sparsity:6g} "
            f"{self.time_us:9.1f} us, {self.gbs:.0f} GB/s of dense data, {self.of_rate:.2f} of the "
            f"{'read' if self.what == 'encode' else 'write'} rate (wanted {_number(self.target, 2)}), "
            f"floor {self.floor_us:.1f} us, {self.wrong} wrong"
        )


def hbm_bytes(case: Case, world_size: int, in_place: bool) -> tuple[int, int]:
    """Bytes that one GPU (reads, writes) if every input byte is read once and every output byte written once."""
    block = case.block_elems(world_size) * ELEM_BYTES[case.dtype]
    if case.collective == "all_gather":
        return block, (world_size - in_place) * block
    if case.collective == "reduce_scatter":
        return world_size * block, block
    return (block if case.collective == "all_reduce" else 0), block  # broadcast: a rank that is not the root


def dense_bytes_sent(case: Case, world_size: int) -> float:
    """Bytes that one rank would send if all frames were dense, mean over the ranks: each contribution goes to its
    owner, each result from the owner to all."""
    block = case.block_elems(world_size) * ELEM_BYTES[case.dtype]
    if case.collective in ("all_gather", "reduce_scatter"):
        return block * (world_size - 1)
    one_hop = block * (world_size - 1) / world_size
    return 2 * one_hop if case.collective == "all_reduce" else one_hop


def floor_s(read: float, written: float, wire: float, rates: Rates) -> float:
    """Least seconds in which one GPU can move these bytes: the longer of the times of memory and of the links."""
    memory = read / rates.read_gbs + written / rates.write_gbs
    return max(memory, wire / LINK_GBS) / 1e9


def make_gpu_row(
    case: Case, m: Measured, *, world_size: int, device: str, in_place: bool, graph: bool, rates: Rates | None
) -> GpuRow:
    """Make a row. Its peer is the one with the smaller median, or "none"."""
    medians = {name: float(np.median(m.times[name])) for name in PEERS if name in m.times}
    peer = min(medians, key=lambda name: medians[name]) if medians else "none"
    dense = dense_bytes_sent(case, world_size)
    base = make_row(case, m, via="torch", world_size=world_size, peer=peer, dense_bytes=dense)
    read, written = hbm_bytes(case, world_size, in_place)
    floor = None if rates is None else 1e6 * floor_s(read, written, m.wire_bytes, rates)

    def us(seconds: float | None) -> float | None:
        return None if seconds is None else 1e6 * seconds

    return GpuRow(
        **vars(base),
        device=device,
        in_place=in_place,
        max_ctas=case.max_ctas,
        graph=graph,
        nccl_time_us=us(medians.get("nccl")),
        nccl_symm_time_us=us(medians.get("nccl_symm")),
        host_us=us(m.host.get("spccl")),
        nccl_host_us=us(m.host.get("nccl")),
        hbm_bytes=read + written,
        floor_us=floor,
        of_floor=None if floor is None else floor / base.time_us,
        target=case.target,
    )


def make_codec_row(
    what: str, case: Case, encoded_bytes: int, seconds: Sequence[float], wrong: int, rates: Rates
) -> CodecRow:
    """Make a row. what: "encode" or "decode". seconds: of each iteration."""
    dense, median = case.size_bytes, float(np.median(seconds))
    read, written = (dense, encoded_bytes) if what == "encode" else (encoded_bytes, dense)
    gbs = dense / median / 1e9
    wanted = 0.85 if case.sparsity >= 0.9 else 0.6 if case.sparsity >= 0.5 else None
    return CodecRow(
        what=what,
        dtype=case.dtype,
        sparsity=case.sparsity,
        dense_bytes=dense,
        encoded_bytes=encoded_bytes,
        **percentiles_us(seconds),
        gbs=gbs,
        of_rate=gbs / (rates.read_gbs if what == "encode" else rates.write_gbs),
        moved_gbs=(dense + encoded_bytes) / median / 1e9,
        floor_us=1e-3 * (read / rates.read_gbs + written / rates.write_gbs),
        target=wanted,
        wrong=wrong,
        iters=len(seconds),
        **{f"hbm_{name}": rate for name, rate in vars(rates).items()},
    )


# ---- the end of the output ----


def _number(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def summary(rows: Sequence[GpuRow], codec: Sequence[CodecRow], left_out: Sequence[Any]) -> str:
    """Ratios by sparsity, the codec's fractions of the memory rates, and the cases that were left out."""
    zeros = sorted({r.sparsity for r in (*rows, *codec)}, reverse=True)
    text = [
        "# summary: time of the faster NCCL / time of spccl, by sparsity; < marks values below their target",
        f"{'':36}" + " ".join(f"{f'{100 * z:g}%':>7}" for z in zeros),
    ]
    table: dict[str, dict[float, tuple[float | None, float | None]]] = {}
    for r in rows:
        name = f"{r.collective} {r.dtype} {r.size_bytes / MIB:.4g}M" + (f" {r.max_ctas} CTAs" if r.max_ctas else "")
        table.setdefault(name, {})[r.sparsity] = (r.ratio, r.target)
    for c in codec:
        name = f"{c.what} {c.dtype} {c.dense_bytes / MIB:.4g}M, of rate"
        table.setdefault(name, {})[c.sparsity] = (c.of_rate, c.target)
    for name, cells in table.items():
        text.append(f"{name:36}" + " ".join(_cell(*cells.get(z, (None, None))) for z in zeros).rstrip())
    hosts = {(r.collective, r.max_ctas): (r.host_us, r.nccl_host_us) for r in rows if r.host_us is not None}
    for (collective, ctas), (ours, nccl) in hosts.items():
        if not ctas:
            text.append(f"host cost of one {collective}: {_number(ours)} us (NCCL {_number(nccl)} us)")
    text += [f"# not measured, because the time of --seconds was spent: {case}" for case in left_out]
    wrong = sum(map(wrong_elems, rows)) + sum(c.wrong for c in codec)
    text.append(f"{len(rows) + len(codec)} rows, {len(left_out)} left out, {wrong} wrong elements")
    return "\n".join(text)


def _cell(value: float | None, target: float | None) -> str:
    if value is None:
        return f"{'-':>7}"
    return f"{value:6.2f}" + ("<" if target is not None and value < target else " ")
