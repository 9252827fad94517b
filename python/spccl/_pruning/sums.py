"""Sums that are pruned again: the owner of a shard adds the average over the ranks to what it kept of earlier ones,
sends the largest entries to all ranks, and keeps the rest.

Knows no process group: `spccl.optim` and `spccl.ddp` scatter the sums and gather what is sent. Symbols as in
`spccl.prune`: the gradient g is the average, the residual v is what is kept.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from spccl import prune

_ALIGN = 8  # elements: shards of 16-bit values begin at multiples of 16 bytes


def shard_elems(length: int, n_ranks: int, padded: bool) -> int:
    """Elements of a rank's shard of a bucket [length].

    Args: padded: the shards of all ranks hold the bucket, and a padding behind it; else the bucket holds the shards.
    """
    share = length / (n_ranks * _ALIGN)
    return (math.ceil(share) if padded else int(share)) * _ALIGN


class Piece(NamedTuple):
    """A parameter in a bucket: its elements there. `pruned`: not sent whole."""

    name: str
    begin: int
    numel: int
    pruned: bool

    @classmethod
    def of(cls, state: prune.ParamState, begin: int) -> Piece:
        return cls(state.name, begin, state.numel, state.pruned)


class Part(NamedTuple):
    """What this rank keeps of one parameter: `values` are its elements from `first` on, in the order of its memory, and
    None if nothing is kept. Where sums are pruned, `state` has their loss scale; with bits=1 it is None."""

    name: str
    first: int
    values: torch.Tensor | None
    state: prune.ParamState | None = None

    def save(self) -> dict[str, Any]:
        """Without the loss scale. Copies."""
        assert self.values is not None
        saved = {"first": self.first, "values": self.values.clone()}
        if self.state is not None:
            saved["values"] /= self.state.loss_scale()
            saved["state"] = self.state.state.clone()
        return saved

    def load(self, saved: dict[str, Any]) -> bool:
        """Go on from what `save` returned. False, and nothing is changed, if that is of other elements."""
        if not self.fits(saved):
            return False
        self.values.copy_(saved["values"])
        if self.state is not None:
            self.state.state.copy_(saved.get("state", self.state.state))  # bits=1 has none
            self.state.state.view(torch.float64)[prune.LOSS_SCALE] = 1.0
        return True

    def fits(self, saved: dict[str, Any]) -> bool:
        return self.values is not None and (saved["first"], len(saved["values"])) == (self.first, len(self.values))


class KeptSums:
    """What one rank keeps of the sums of its shard of a bucket.

    Args:
        pieces: the parameters of the bucket, by begin.
        first, numel: the shard's elements in the bucket. It may end behind the bucket.
        dtype: of the sums, float32 or float64.
        keeps: False: what is not sent is dropped.
    """

    def __init__(
        self,
        pieces: Sequence[Piece],
        first: int,
        numel: int,
        dtype: torch.dtype,
        device: torch.device,
        keeps: bool = True,
    ):
        self.numel = numel
        found = list(pieces_in(pieces, first, numel))
        self.states = torch.zeros(max(1, len(found)), prune.STATE_COLUMNS, dtype=torch.int64, device=device)
        self.parts: list[Part] = []
        segments, covered = [], torch.zeros(numel, dtype=torch.bool)
        for row, (piece, begin, end) in zip(self.states, found, strict=False):
            state = prune.ParamState(piece.name, end - begin, piece.pruned, row)
            state.prepare(dtype, keeps, False)
            self.parts.append(Part(piece.name, begin - piece.begin, state.residual, state))
            segments.append((begin - first, state))
            covered[begin - first : end - first] = True
        self._gaps = (~covered).nonzero().view(-1).to(device) if not bool(covered.all()) else None
        self._plan = prune.Plan(segments, numel, dtype, device) if segments else None

    def prune(
        self,
        sums: torch.Tensor,
        rule: prune.Rule,
        sent: torch.Tensor | None = None,
        loss_scale: torch.Tensor | None = None,
    ) -> None:
        """Take the averages `sums` [numel]. What is sent goes to `sent` [numel], of 16 bits; None: it replaces them.

        Args: loss_scale: [1] float32, the scale that the averages contain.
        """
        if self._gaps is not None:
            (sums if sent is None else sent).index_fill_(0, self._gaps, 0.0)
        if self._plan is not None:
            self._plan.run(sums, rule, loss_scale=loss_scale, sent=sent)

    def clear(self, exchanges: int) -> None:
        """Keep nothing, after so many exchanges."""
        for part in self.parts:
            part.state.state.zero_()
            part.state.state[prune.STEP] = exchanges
            if part.values is not None:
                part.values.zero_()

    def is_empty(self) -> bool:
        """Whether nothing is kept. Waits for the device."""
        return not any(bool(part.values.any()) for part in self.parts if part.values is not None)


def pieces_in(pieces: Sequence[Piece], first: int, numel: int) -> Iterator[tuple[Piece, int, int]]:
    """The pieces in [first, first + numel), each with the first and the last but one of its elements there."""
    for piece in pieces:
        begin, end = max(first, piece.begin), min(first + numel, piece.begin + piece.numel)
        if begin < end:
            yield piece, begin, end


def shaped_kept(saved: dict[str, Any], shape: torch.Size) -> torch.Tensor:
    """What an owner kept of a parameter (`Part.save`, and "stride" of the parameter), 0 elsewhere, with its shape."""
    flat = saved["values"].new_zeros(shape.numel())
    flat[saved["first"] : saved["first"] + saved["values"].numel()] = saved["values"]
    return flat.as_strided(shape, saved["stride"])


def density_sums(kept: Iterable[KeptSums]) -> float | None:
    """Share of the entries of these shards that the last calls sent; None without shards. Waits for the device."""
    parts = [part.state for k in kept for part in k.parts]
    if not parts:
        return None
    return sum(int(p.state[prune.N_SENT]) for p in parts) / sum(p.numel for p in parts)
