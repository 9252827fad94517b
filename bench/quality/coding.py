"""Values as they are after a trip in few bits: bfloat16, two levels per chunk, one bit."""

from __future__ import annotations

import torch
from model import TILE
from torch import Tensor


def rounded(x: Tensor, wire: str) -> Tensor:
    """Finite float32 values as they are after a cast to `wire` ("float32" or "bfloat16") and back.

    torch.compile drops such a pair of casts inside a kernel, so the bits are rounded here.
    """
    if wire == "float32":
        return x
    bits = x.view(torch.int32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000).view(torch.float32)


def two_levels(sent: Tensor, whole: Tensor) -> Tensor:
    """Two bits per value: sign and level. A chunk has two levels: the means of the magnitudes below and above the
    mean. Levels are bfloat16. Chunks in `whole` stay as they are."""
    value = sent.unflatten(-1, (-1, TILE))
    size, there = value.abs(), value != 0
    mean = size.sum(-1, keepdim=True) / there.sum(-1, keepdim=True).clamp(min=1)
    high = size >= mean
    levels = [
        rounded((size * part).sum(-1, keepdim=True) / part.sum(-1, keepdim=True).clamp(min=1), "bfloat16")
        for part in (there & ~high, there & high)
    ]
    coded = torch.where(high, levels[1], levels[0]) * value.sign()
    return torch.where(whole[None, :, None], value, coded).flatten(-2)


def signs(value: Tensor, whole: Tensor, chunk: int, magnitude: str) -> Tensor:
    """One bit per value: its sign, times the mean or rms magnitude of its `chunk`. Tiles in `whole` are rounded to
    bfloat16. Zeros, which only the padding of a matrix has, stay zeros and do not count."""
    parts = value.unflatten(-1, (-1, chunk))
    there = (parts != 0).sum(-1, keepdim=True).clamp(min=1)
    if magnitude == "rms":
        level = (parts.square().sum(-1, keepdim=True) / there).sqrt()
    else:
        level = parts.abs().sum(-1, keepdim=True) / there
    coded = (parts.sign() * level).flatten(-2).unflatten(-1, (-1, TILE))
    exact = rounded(value, "bfloat16").unflatten(-1, (-1, TILE))
    return torch.where(whole[:, None], exact, coded).flatten(-2)
