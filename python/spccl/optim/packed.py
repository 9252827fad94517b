"""Two bits per value: how the changes of a bucket travel in an all-gather. The layout is in docs/FORMAT.md, section 9.

A sum of values of two bits needs more than two bits, so an all-reduce cannot carry them. Each rank sends its own to all
others, and every rank adds all of them in rank order. All ranks get the same bits: each does the same float32 additions
in the same order. A row's size follows from density and chunk alone, so ranks need not tell each other sizes.

How many elements are listed is known on the device alone. So on CUDA the host waits for the device once when it packs a
bucket, and twice for each rank whose bytes it unpacks: for the places of the ones, and for the check of what came.
"""

from __future__ import annotations

import math

import torch


class Layout:
    """Sizes of a packed row, for `chunk` elements of which at most `n_sent` are listed.

    Attributes:
        low_bits: bits of a place that the low part holds; None: the index is a bit per element.
        low, high, codes: first bit of each part, counted behind the levels.
        row_bytes: of a row.
    """

    def __init__(self, chunk: int, density: float):
        self.chunk = chunk
        self.n_sent = max(1, min(chunk, math.floor(density * chunk + 0.5)))
        self.low_bits: int | None = (chunk // self.n_sent).bit_length() - 1
        low, high = _bytes_of(self.n_sent * self.low_bits), _bytes_of(self.n_sent + (chunk >> self.low_bits))
        if low + high >= chunk // 8:
            self.low_bits, low, high = None, 0, chunk // 8
        self.low, self.high, self.codes = 0, 8 * low, 8 * (low + high)
        self.n_bits = 8 * (low + high + _bytes_of(2 * self.n_sent))
        self.row_bytes = _LEVEL_BYTES + self.n_bits // 8


_LEVEL_BYTES = 4


def _bytes_of(n_bits: int) -> int:
    return (n_bits + 7) // 8


def packed_bytes(length: int, n_chunked: int, layout: Layout, element_bytes: int) -> int:
    """Bytes of a bucket of `length` elements, of which the first `n_chunked` are rows of chunks."""
    return n_chunked // layout.chunk * layout.row_bytes + (length - n_chunked) * element_bytes


def _starts(row: torch.Tensor, n_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(number of each entry within its row, entries of each row), for sorted rows."""
    counts = torch.zeros(n_rows, dtype=torch.int64, device=row.device).scatter_add_(0, row, torch.ones_like(row))
    first = counts.cumsum(0) - counts
    return torch.arange(row.numel(), device=row.device) - first[row], counts


def pack(values: torch.Tensor, n_chunked: int, layout: Layout) -> torch.Tensor:
    """What `Bucket.select` wrote with two levels, as bytes [packed_bytes()].

    Args:
        values: [length]; each chunk of the first `n_chunked` has at most layout.n_sent entries and two magnitudes.
    """
    table = values[:n_chunked].view(-1, layout.chunk)
    row, col = table.nonzero(as_tuple=True)
    place, _ = _starts(row, len(table))
    value = table[row, col].float()
    size = value.abs()
    levels = torch.zeros(len(table), 2, device=values.device)
    levels[:, 1].scatter_reduce_(0, row, size, "amax")
    levels[:, 0].copy_(levels[:, 1]).scatter_reduce_(0, row, size, "amin")
    bits = torch.zeros(len(table), layout.n_bits, dtype=torch.uint8, device=values.device)
    if layout.low_bits is None:
        bits[row, layout.high + col] = 1
    else:
        bits[row, layout.high + place + (col >> layout.low_bits)] = 1
        for b in range(layout.low_bits):
            bits[row, place * layout.low_bits + b] = (col >> b & 1).to(torch.uint8)
    bits[row, layout.codes + 2 * place] = (size == levels[row, 1]).to(torch.uint8)
    bits[row, layout.codes + 2 * place + 1] = (value < 0).to(torch.uint8)
    shifts = torch.arange(8, dtype=torch.uint8, device=values.device)
    packed = (bits.view(len(table), layout.n_bits // 8, 8) << shifts).sum(-1, dtype=torch.uint8)
    head = levels.to(torch.bfloat16).view(torch.uint8)
    rows = torch.cat([head, packed], 1).flatten()
    return torch.cat([rows, values[n_chunked:].contiguous().view(torch.uint8)])


def add_packed(packed: torch.Tensor, out: torch.Tensor, n_chunked: int, layout: Layout, rank: int) -> None:
    """Add what `rank` has packed to `out` [length].

    Raises: RuntimeError if the bytes are no packed bucket.
    """
    n_rows = n_chunked // layout.chunk
    rows = packed[: n_rows * layout.row_bytes].view(n_rows, layout.row_bytes)
    levels = rows[:, :_LEVEL_BYTES].flatten().clone().view(torch.bfloat16).view(n_rows, 2).to(out.dtype)
    shifts = torch.arange(8, dtype=torch.uint8, device=packed.device)
    bits = (rows[:, _LEVEL_BYTES:, None] >> shifts & 1).view(n_rows, layout.n_bits)
    row, col = bits[:, layout.high : layout.codes].nonzero(as_tuple=True)
    place, counts = _starts(row, n_rows)
    place.clamp_(max=layout.n_sent - 1)  # more are refused below
    if layout.low_bits is not None:
        col = (col - place) << layout.low_bits
        for b in range(layout.low_bits):
            col += bits[row, place * layout.low_bits + b].long() << b
    most, last = torch.stack([counts.max(), col.max()]).tolist() if row.numel() else (0, 0)
    if most > layout.n_sent or last >= layout.chunk:
        raise RuntimeError(
            f"SparseSync: what rank {rank} sent lists {most} elements of a chunk or one beyond it, wanted at most "
            f"{layout.n_sent} of {layout.chunk}; its bytes were damaged, or ranks run different versions of spccl"
        )
    upper, negative = (bits[row, layout.codes + 2 * place + i].long() for i in (0, 1))
    value = levels[row, upper]
    flat = row * layout.chunk + col
    out[flat] = out[flat] + torch.where(negative == 1, -value, value)
    tail = packed[n_rows * layout.row_bytes :]
    out[n_chunked:] += tail.clone().view(out.dtype)  # a copy, so that it is aligned
