"""Where a publisher keeps what its receivers have: memory of its own, or a live copy that it overwrites."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence

import torch

from spccl.errors import ArgumentError, Error, OutOfMemoryError

from . import _staged, delta
from ._tensors import Box, Model, Named, Tensors, boxes_of_model, flat
from .manifest import Entry

_ALIGN = 64


class Base:
    """Makes the tensors of a base, one for each tensor that is published, with the dtypes that travel.

    Args: where: "device": memory where the weights are; "pinned": memory of the host that is pinned for a GPU; or a
        model or tensors: the live copy.
    """

    def __init__(self, where: str | Tensors, entries: Sequence[Entry], tensors: Sequence[Named]):
        self.is_live = not isinstance(where, str)
        self._pinned: list[torch.Tensor] = []
        self._boxes: tuple[Sequence[torch.Tensor], list[list[Box]]] = [], []
        if not self.is_live and where not in ("device", "pinned"):
            raise ArgumentError(f"publisher: base={where!r}: wanted device, pinned, or the live copy")
        self._where = where if not self.is_live else Model("publisher: base", where)
        self._found: tuple[Sequence[Named], Sequence[Named], list[torch.Tensor]] | None = None
        if self.is_live:
            self.find(entries, tensors)
        elif where == "pinned" and tensors[0].tensor.device.type != "cuda":
            raise ArgumentError("publisher: base='pinned': the tensors are in host memory: leave it out")

    def make(self, tensors: Sequence[torch.Tensor], dtypes: Sequence[torch.dtype]) -> list[torch.Tensor]:
        """Memory for the base; it has any values."""
        self._boxes = [], []  # of one that was lost
        pairs = list(zip(tensors, dtypes, strict=True))
        if self._where == "device":
            return [torch.empty(x.shape, dtype=dtype, device=x.device) for x, dtype in pairs]
        if not self._pinned:
            self._pinned = self._pin(pairs)
        return self._pinned

    def _pin(self, pairs: Sequence[tuple[torch.Tensor, torch.dtype]]) -> list[torch.Tensor]:
        """One block that is pinned as it is: torch would round the size of each tensor up to a power of two."""
        sizes = [x.numel() * dtype.itemsize for x, dtype in pairs]
        starts = [0, *itertools.accumulate(-(-size // _ALIGN) * _ALIGN for size in sizes)]
        block = torch.empty(max(starts[-1], _ALIGN), dtype=torch.uint8)
        device = pairs[0][0].device
        with torch.cuda.device(device):  # else each rank makes a context on GPU 0
            status = int(torch.cuda.cudart().cudaHostRegister(block.data_ptr(), block.numel(), 0))
        if status != 0:
            raise OutOfMemoryError(
                f"publisher: base: cudaHostRegister of {block.numel()} bytes of host memory: error {status} of CUDA"
            )
        weakref.finalize(self, _unpin, block, device).atexit = False
        return [
            block[start : start + size].view(dtype).view(x.shape)
            for start, size, (x, dtype) in zip(starts, sizes, pairs, strict=False)
        ]

    def find(self, entries: Sequence[Entry], tensors: Sequence[Named]) -> list[torch.Tensor]:
        """The live copy as it is now: a model may have other parameters than before.

        Raises: MismatchError, UnsupportedError that name the tensor which is not as published; ArgumentError.
        """
        live = self._where.named()
        if self._found is not None and self._found[0] is live and self._found[1] is tensors:
            return self._found[2]
        self._found = None
        boxes = boxes_of_model("publisher: base", entries, live)
        for one, places in zip(tensors, boxes, strict=True):
            if len(places) > 1:
                raise ArgumentError(f"publisher: base: {', '.join(one.names)} are one tensor, and apart in the base")
        spans = [(one.tensor.data_ptr(), _bytes(one.tensor), one.name, True) for one in live]
        spans += [(one.tensor.data_ptr(), _bytes(one.tensor), one.name, False) for one in tensors]
        spans = sorted(span for span in spans if span[1])
        for (start, n_bytes, name, is_base), (other, _, _, other_is_base) in itertools.pairwise(spans):
            if is_base != other_is_base and other < start + n_bytes:
                raise ArgumentError(
                    f"publisher: base: {name} lies in the memory of what is published: it never differs"
                )
        if live[0].tensor.device != tensors[0].tensor.device:
            here = tensors[0].tensor.device
            raise ArgumentError(
                f"publisher: base: on {live[0].tensor.device}, the tensors on {here}: wanted one device"
            )
        by_name = {name: one.tensor.detach() for one in live for name in one.names}
        self._found = live, tensors, [by_name[one.name] for one in tensors]
        return self._found[2]

    def boxes(self, entries: Sequence[Entry], tensors: Sequence[torch.Tensor]) -> list[list[Box]]:
        """Where the base is: the same boxes for the same list of tensors, which `make` or `find` returned."""
        if self._boxes[0] is not tensors:
            pairs = zip(entries, tensors, strict=True)
            found = [[Box(entry, delta.Place.whole(flat(x)))] if entry.numel else [] for entry, x in pairs]
            self._boxes = tensors, found
        return self._boxes[1]

    def settle(self, tensors: Sequence[torch.Tensor]) -> None:
        """Wait until a GPU has written a live copy: the trainer may use it on any stream."""
        if self.is_live and tensors:
            delta.settle(tensors[0].device)


class Follower:
    """A group's base on its way to a version, beside the receivers: its change is checked while they stage, written
    while they commit, and taken back if one of them fails. What fails here does not concern them: `error` is kept."""

    def __init__(self, change: Callable[[], _staged.Change] | None, keep_old: bool):
        self.change: _staged.Change | None = None
        self.is_begun = False
        self.error: BaseException | None = None
        if change is not None:
            try:
                found = change()
                found.check(keep_old=keep_old)
                self.change = found
            except BaseException as error:
                # Without memory for old values (torch: a plain RuntimeError) the base is written after the last vote.
                is_memory = isinstance(error, (OutOfMemoryError, MemoryError))
                is_memory |= isinstance(error, RuntimeError) and not isinstance(error, Error)
                self.error = None if is_memory else error

    def write(self) -> None:
        if self.change is not None:
            self.is_begun = True
            try:
                self.change.apply()
            except BaseException as error:
                self.error = error

    def undo(self) -> None:
        if self.is_begun:
            self.change.undo()


def _bytes(x: torch.Tensor) -> int:
    return x.numel() * x.itemsize


def _unpin(block: torch.Tensor, device: torch.device) -> None:
    with torch.cuda.device(device):
        torch.cuda.cudart().cudaHostUnregister(block.data_ptr())
