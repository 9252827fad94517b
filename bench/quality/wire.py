"""Bytes of frames, computed from counts: what an all-reduce of mostly-zero vectors sends.

Source: docs/FORMAT.md, section 3, and docs/ALGORITHMS.md ("The direct schedule"). tests/py/test_quality.py compares
`frame_bytes` with `spccl.encode`.
"""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor

Size = TypeVar("Size", int, Tensor)
HEADER_BYTES, ENVELOPE_BYTES = 64, 32


def _padded(n_bytes: Size) -> Size:
    return (n_bytes + 15) // 16 * 16


def frame_bytes(nnz: Tensor, n_elems: int, elem_bytes: int, full_block: Tensor) -> Tensor:
    """Size of the smallest frame of each slice of `n_elems` elements, of which `nnz` (int64) are not zero.

    `full_block` tells in which slices a block of 256 elements has no zero: the format tile cannot hold those.
    """
    values = _padded(nnz * elem_bytes)
    n_tiles, n_blocks = -(-n_elems // 4096), -(-n_elems // 256)
    pici = _padded(4 * n_tiles) + 512 * n_tiles + values
    coo = _padded(nnz * 4) + values
    tile = _padded(n_blocks) + _padded(nnz) + values
    dense = torch.full_like(nnz, n_elems * elem_bytes)
    best = torch.minimum(torch.minimum(pici, coo), dense)
    best = torch.where(full_block, best, torch.minimum(best, tile))
    return HEADER_BYTES + torch.where(nnz == 0, torch.zeros_like(nnz), best)


def slice_stats(listed: Tensor, slice_elems: int) -> tuple[Tensor, Tensor]:
    """(nnz, full_block) of each slice, for `listed` [..., n] bool whose n is a multiple of `slice_elems`."""
    blocks = listed.unflatten(-1, (-1, slice_elems // 256, 256)).sum(-1)
    return blocks.sum(-1), (blocks == 256).any(-1)


def all_reduce_bytes(sent: Tensor, results: Tensor, elem_bytes: int) -> Tensor:
    """Bytes that one rank sends in an all-reduce, averaged over ranks.

    Args:
        sent: which elements each rank contributes, [ranks, n] bool.
        results: which elements of the sum are not zero, [n] bool.
    """
    ranks, slice_elems = sent.shape[0], 131072 // elem_bytes
    total = torch.zeros((), dtype=torch.float64, device=sent.device)
    for listed, weight in ((sent, 1 / ranks), (results[None], 1.0)):
        nnz, full = slice_stats(listed, slice_elems)
        total += (frame_bytes(nnz, slice_elems, elem_bytes, full) + ENVELOPE_BYTES).sum() * weight
    return total * (ranks - 1) / ranks


def chunk_bytes(n_sent: Tensor, n_elems: int) -> Tensor:
    """Size of one chunk with at most `n_sent` (int64) of `n_elems` elements listed, in two bits each (FORMAT.md, 9)."""
    low_bits = (n_elems // n_sent.clamp(min=1)).double().log2().floor().long()
    elias_fano = _bytes_of(n_sent * low_bits) + _bytes_of(n_sent + n_elems // 2**low_bits)
    index = torch.minimum(elias_fano, torch.full_like(n_sent, n_elems // 8))
    return 4 + index + _bytes_of(2 * n_sent)


def one_bit_bytes(n_elems: int, chunk: int, ranks: int) -> float:
    """Bytes that one rank sends in an all-reduce of one bit per element and a float32 magnitude per `chunk` elements:
    shards to their owners and back, in dense frames of 128 KiB."""
    n_bytes = -(-n_elems // 8) + 4 * -(-n_elems // chunk)
    slices = -(-n_bytes // 131072)
    return (n_bytes + slices * (HEADER_BYTES + ENVELOPE_BYTES)) * 2 * (ranks - 1) / ranks


def _bytes_of(n_bits: Tensor) -> Tensor:
    return (n_bits + 7) // 8


def all_gather_bytes(n_bytes: Tensor, ranks: int) -> Tensor:
    """Bytes that one rank sends in an all-gather of `n_bytes` (int64) of its own: dense frames of 128 KiB."""
    slices = (n_bytes + 131071) // 131072
    return (_padded(n_bytes) + slices * (HEADER_BYTES + ENVELOPE_BYTES)) * (ranks - 1)


def dense_bytes(n_elems: int, ranks: int) -> float:
    """Bytes that one rank sends in an all-reduce of `n_elems` float32 elements."""
    return 4.0 * n_elems * 2 * (ranks - 1) / ranks
