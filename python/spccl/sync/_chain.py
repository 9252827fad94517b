"""Several versions in one commit: all are checked before the first write.

The first is checked at the tensors. A later one starts from what those before it leave, so it is checked in copies of
the tensors, a few parts at a time, to which those before it were applied.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import torch

from . import delta
from ._staged import Change
from ._tensors import Box


@dataclasses.dataclass
class _Range:
    """Elements of a box that several changes meet, with the places of these changes' targets in their lists."""

    box: Box
    first: int
    end: int
    targets: list[list[int]]  # of each change

    @property
    def n_bytes(self) -> int:
        p = self.box.cut(self.first, self.end - self.first)
        return p.n_rows * p.n_cols * p.dst.itemsize

    def copied(self) -> delta.Place:
        """A place in a copy of what lies there."""
        p = self.box.cut(self.first, self.end - self.first)
        copy = torch.empty((p.n_rows, p.n_cols), dtype=p.dst.dtype, device=p.dst.device).copy_(p.dst)
        return dataclasses.replace(p, dst=copy.view(-1), dst_row_elems=p.n_cols)


def check_chain(changes: Sequence[Change], most_bytes: int) -> None:
    """Check all changes of a commit. Nothing is written to the tensors.

    Args: most_bytes: of copies at a time. Where a single one is larger, all but the first change are left to `commit`.
    Raises: as Change.check.
    """
    changes[0].check(keep_old=True)
    batches = list(_batches(_ranges(changes), most_bytes)) if len(changes) > 1 else []
    if not all(batches):
        return
    for batch in batches:
        _check_batch(changes, batch)
    for change in changes[1:]:
        change.end_checks()


def _ranges(changes: Sequence[Change]) -> Iterator[_Range]:
    """What later changes meet, by boxes: elements of parts that overlap are one range."""
    spans: dict[Box, list[tuple[int, int, int, int]]] = {}
    for number, change in enumerate(changes):
        for target, (box, part) in enumerate(change.parts):
            spans.setdefault(box, []).append((part.first, part.first + part.n_elems, number, target))
    for box, found in spans.items():
        current: _Range | None = None
        for first, end, number, target in sorted(found):
            if current is None or first >= current.end:
                if current is not None and any(current.targets[1:]):
                    yield current
                current = _Range(box, first, end, [[] for _ in changes])
            current.end = max(current.end, end)
            current.targets[number].append(target)
        if current is not None and any(current.targets[1:]):
            yield current


def _batches(ranges: Iterator[_Range], most_bytes: int) -> Iterator[list[_Range]]:
    """Ranges whose copies take at most so many bytes; an empty list if one takes more."""
    batch: list[_Range] = []
    left = most_bytes
    for found in ranges:
        n_bytes = found.n_bytes
        if n_bytes > most_bytes:
            yield []
            return
        if n_bytes > left:
            yield batch
            batch, left = [], most_bytes
        batch.append(found)
        left -= n_bytes
    if batch:
        yield batch


def _check_batch(changes: Sequence[Change], batch: Sequence[_Range]) -> None:
    copies = [found.copied() for found in batch]
    for number, change in enumerate(changes):
        pairs = [(t, place) for found, place in zip(batch, copies, strict=True) for t in found.targets[number]]
        if not pairs:
            continue
        targets = [change.targets.targets[t]._replace(places=[place]) for t, place in pairs]
        packed = delta.Packed(targets, change.targets.key)
        if number:
            change.check_some([t for t, _ in pairs], packed)
        if number < len(changes) - 1:
            delta.apply(packed)
