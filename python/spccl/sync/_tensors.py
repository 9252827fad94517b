"""Named tensors of a model, in what spccl.sync needs: names and ties, bits, the places where a receiver has them."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from spccl._pruning.hook_state import plain_name
from spccl.errors import ArgumentError, MismatchError, UnsupportedError

from . import delta
from ._pack import PackedPlace
from .manifest import DTYPES, MASK, Entry

if TYPE_CHECKING:
    from .delta import Place

Tensors = torch.nn.Module | Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]

_MOST_COMPARED = 256  # boxes of a tensor
_INTS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_IN_FRAMES = (torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int8, *_INTS.values())


@functools.cache
def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def frame_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of a tensor's frames: its own, or integers of its size."""
    return dtype if dtype in _IN_FRAMES else _INTS[dtype.itemsize]


def bits(x: torch.Tensor) -> torch.Tensor:
    """The same memory as integers, for comparing."""
    return x.view(_INTS[x.dtype.itemsize])


def flat(x: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor as delta.py takes it: the same memory, [numel]."""
    dtype, x = frame_dtype(x.dtype), x.detach()
    return (x if x.dtype == dtype else x.view(dtype)).view(-1)


@dataclasses.dataclass(frozen=True, eq=False)
class Named:
    """A tensor, and all its names. `tensor` may be a parameter: a model may give it other memory later."""

    name: str
    also: tuple[str, ...]
    tensor: torch.Tensor

    @property
    def names(self) -> tuple[str, ...]:
        return self.name, *self.also


def named_tensors(who: str, pairs: Iterable[tuple[str, torch.Tensor]]) -> list[Named]:
    """Tensors by name. What lies in the same memory comes once.

    Raises: ArgumentError that names the tensor, UnsupportedError for tensors that are not dense or of several devices.
    """
    names: dict[tuple[object, ...], list[str]] = {}  # of each memory
    tensors: dict[tuple[object, ...], torch.Tensor] = {}
    for name, x in pairs:
        _check(who, name, x)
        tie = (x.data_ptr(), x.dtype, x.shape, x.stride()) if x.numel() else ("empty", name)
        names.setdefault(tie, []).append(name)
        tensors[tie] = x
    result = [Named(found[0], tuple(found[1:]), tensors[tie]) for tie, found in names.items()]
    everything = [name for one in result for name in one.names]
    if len(set(everything)) != len(everything):
        raise ArgumentError(f"{who}: two tensors have the same name")
    if not result:
        raise ArgumentError(f"{who}: no tensors")
    devices = {one.tensor.device for one in result}
    if len(devices) > 1:
        raise UnsupportedError(f"{who}: tensors on {', '.join(sorted(map(str, devices)))}, wanted one device")
    return result


def _of_model(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and saved buffers. Not those of state_dict(), because its hooks may give copies."""
    for prefix, module in model.named_modules(remove_duplicate=False):
        saved = [(n, x) for n, x in module._buffers.items() if n not in module._non_persistent_buffers_set]
        for name, x in [*module._parameters.items(), *saved]:
            if x is not None:
                yield plain_name(f"{prefix}.{name}" if prefix else name), x


def memory_of(x: torch.Tensor) -> tuple[object, ...]:
    """What tells that a dense tensor is where it was, and what it was."""
    return x.data_ptr(), x.storage_offset(), x.untyped_storage().nbytes(), x.dtype, x.shape, x.stride()


class Model:
    """A model, or tensors by name, whose tensors are looked for again and again: a model may have other ones later."""

    def __init__(self, who: str, given: Tensors):
        is_model = isinstance(given, torch.nn.Module)
        self._given = given if is_model else list(given.items() if isinstance(given, Mapping) else given)
        self._who = who
        self._pairs: list[tuple[str, torch.Tensor]] = []
        self._memory: list[tuple[object, ...]] = []
        self._found: list[Named] = []

    def _all(self) -> Iterable[tuple[str, torch.Tensor]]:
        return _of_model(self._given) if isinstance(self._given, torch.nn.Module) else self._given

    def device(self) -> torch.device:
        """That of the first tensor."""
        return next((x.device for _, x in self._all()), torch.device("cpu"))

    def named(self) -> list[Named]:
        """The same list as before, if all are the same objects in the same memory. Raises: as `named_tensors`."""
        pairs = list(self._all())
        if (
            not self._found
            or len(pairs) != len(self._pairs)
            or any(x is not y or name != was for (name, x), (was, y) in zip(pairs, self._pairs, strict=True))
            or [memory_of(x) for _, x in pairs] != self._memory
        ):
            self._found = []
            found = named_tensors(self._who, pairs)
            self._pairs, self._memory, self._found = pairs, [memory_of(x) for _, x in pairs], found
        return self._found


def _check(who: str, name: object, x: object) -> None:
    if not isinstance(name, str) or not 0 < len(name) <= 4096 or "\0" in name:
        raise ArgumentError(f"{who}: {name!r} is no name")
    if not isinstance(x, torch.Tensor):
        raise ArgumentError(f"{who}: {name} is a {type(x).__name__}, wanted a tensor")
    if type(x).__name__ == "DTensor" or x.layout != torch.strided or x.device.type == "meta":
        raise UnsupportedError(
            f"{who}: {name} is sharded, sparse or without memory: give a dense tensor of this process"
        )
    if dtype_name(x.dtype) not in DTYPES:
        raise UnsupportedError(f"{who}: {name} has dtype {x.dtype}, wanted one of {', '.join(DTYPES)}")


def require_apart(who: str, tensors: Sequence[Named]) -> None:
    """Raises: ArgumentError if two receivers share a part of their memory: one would overwrite the other."""
    spans = sorted((one.tensor.data_ptr(), one.tensor.numel() * one.tensor.itemsize, one.name) for one in tensors)
    spans = [span for span in spans if span[1]]
    for (start, n_bytes, name), (other, _, other_name) in itertools.pairwise(spans):
        if other < start + n_bytes:
            raise ArgumentError(f"{who}: {name} and {other_name} share memory, but are not the same tensor")


class Box:
    """A place of a tensor at a receiver, and the sum of what lies there. `place.dst` has the dtype of the frames."""

    def __init__(self, entry: Entry, place: Place):
        self.entry, self.place = entry, PackedPlace.of(place, f"tensor {entry.name!r}: place")
        self.part = place.row_elems, place.row_first, place.n_rows, place.col_first, place.n_cols
        self.is_whole = place.n_rows * place.n_cols == entry.numel
        self.sum = 0

    def view(self) -> torch.Tensor:
        """The memory of the receiver, [n_rows, n_cols]."""
        p = self.place
        return p.dst.as_strided((p.n_rows, p.n_cols), (p.dst_row_elems, 1), p.dst.storage_offset())

    def of(self, x: torch.Tensor) -> torch.Tensor:
        """The box of a whole contiguous tensor, [n_rows, n_cols]."""
        p = self.place
        rows = flat(x).view(-1, p.row_elems)
        return rows[p.row_first : p.row_first + p.n_rows, p.col_first : p.col_first + p.n_cols]

    def _before(self, element: int) -> int:
        """How many elements here are before this one of the tensor."""
        p = self.place
        row, col = divmod(element, p.row_elems)
        rows = min(max(row - p.row_first, 0), p.n_rows)
        is_here = p.row_first <= row < p.row_first + p.n_rows
        return rows * p.n_cols + (min(max(col - p.col_first, 0), p.n_cols) if is_here else 0)

    def n_within(self, first: int, n_elems: int) -> int:
        """How many of these elements of the tensor lie here."""
        if self.is_whole:
            return n_elems
        return self._before(first + n_elems) - self._before(first)

    def cut(self, first: int, n_elems: int) -> Place:
        """The place of these elements of the tensor, and of few others: whole rows, if they are of several."""
        p = self.place
        rows = (
            max(p.row_first, first // p.row_elems),
            min(p.row_first + p.n_rows, (first + n_elems - 1) // p.row_elems + 1),
        )
        cols = p.col_first, p.col_first + p.n_cols
        if rows[1] - rows[0] == 1:
            start = rows[0] * p.row_elems
            cols = max(cols[0], first - start), min(cols[1], first + n_elems - start)
        dst = self.view()[rows[0] - p.row_first : rows[1] - p.row_first, cols[0] - p.col_first : cols[1] - p.col_first]
        return delta.Place(dst, p.row_elems, rows[0], rows[1] - rows[0], cols[0], cols[1] - cols[0], p.dst_row_elems)

    def read_sum(self, key: int) -> int:
        """The sum of what lies here now."""
        p, view = self.place, self.view()
        first = p.row_first * p.row_elems + p.col_first
        if p.n_cols == p.row_elems == p.dst_row_elems or p.n_rows == 1:
            return delta.checksum(view.reshape(-1), key, first)
        rows = (delta.checksum(row, key, first + i * p.row_elems) for i, row in enumerate(view))
        return sum(rows) & MASK


def apart(boxes: Sequence[Box]) -> list[Box]:
    """Boxes of a tensor, each part of it once; none if two parts overlap otherwise, or may."""
    found = list({box.part: box for box in boxes}.values())
    if len(found) == 1:
        return found
    if len({box.place.row_elems for box in found}) > 1 or len(found) > _MOST_COMPARED:
        return []
    for a, b in itertools.combinations((box.place for box in found), 2):
        rows = a.row_first < b.row_first + b.n_rows and b.row_first < a.row_first + a.n_rows
        if rows and a.col_first < b.col_first + b.n_cols and b.col_first < a.col_first + a.n_cols:
            return []
    return found


def boxes_of_model(who: str, entries: Sequence[Entry], tensors: Sequence[Named]) -> list[list[Box]]:
    """Boxes of each entry where the receiver has the publisher's names and shapes.

    Raises: MismatchError that names the tensor.
    """
    mine = {name: one for one in tensors for name in one.names}
    theirs = {name: entry for entry in entries for name in (entry.name, *entry.also)}
    for name in [*theirs, *mine]:
        if name not in mine or name not in theirs:
            has, lacks = ("publisher", "receiver") if name in theirs else ("receiver", "publisher")
            raise MismatchError(f"{who}: tensor {name!r}: the {has} has it, the {lacks} does not")
    owner: dict[str, str] = {}
    result = []
    for entry in entries:
        boxes = {}
        for name in (entry.name, *entry.also):
            one = mine[name]
            x = one.tensor.detach()
            if (dtype_name(x.dtype), tuple(x.shape)) != (entry.dtype, entry.shape):
                got = f"{dtype_name(x.dtype)} {list(x.shape)}"
                raise MismatchError(
                    f"{who}: tensor {name!r} is {got}, the publisher's {entry.dtype} {list(entry.shape)}"
                )
            if owner.setdefault(one.name, entry.name) != entry.name:
                raise MismatchError(
                    f"{who}: tensors {one.name!r} and {name!r} are one here, the publisher's are two: they may differ"
                )
            if not x.is_contiguous():
                raise UnsupportedError(f"{who}: tensor {name!r} is not contiguous: make it so, or pass places=")
            if entry.numel:
                boxes[one.name] = Box(entry, delta.Place.whole(flat(x)))
        result.append(list(boxes.values()))
    return result


def boxes_of_plan(who: str, entries: Sequence[Entry], plan: Any) -> list[list[Box]]:
    """Boxes of each entry by a plan: a mapping of each name to its places, none if this rank has no part of it.

    Raises: MismatchError that names the tensor.
    """
    theirs = {name for entry in entries for name in (entry.name, *entry.also)}
    unknown = sorted(set(plan) - theirs)
    if unknown:
        raise MismatchError(f"{who}: tensor {unknown[0]!r}: the plan has it, the publisher does not")
    result = []
    for entry in entries:
        known = [name for name in (entry.name, *entry.also) if name in plan]
        if not known and entry.numel:
            raise MismatchError(f"{who}: tensor {entry.name!r}: the publisher has it, the plan does not")
        boxes = {}
        for name in known:
            for place in plan[name]:
                _check_place(f"{who}: tensor {name!r}", entry, place)
                in_frames = dataclasses.replace(place, dst=place.dst.detach().view(frame_dtype(place.dst.dtype)))
                box = Box(entry, in_frames)
                other = boxes.setdefault(place.dst.data_ptr(), box)  # tied names may have the same place
                if (other.part, other.place.dst_row_elems) != (box.part, place.dst_row_elems):
                    raise MismatchError(f"{who}: tensor {name!r}: two of its places begin at the same memory")
        result.append(list(boxes.values()) if entry.numel else [])
    return result


def _check_place(who: str, entry: Entry, place: Place) -> None:
    if dtype_name(place.dst.dtype) != entry.dtype:
        raise MismatchError(f"{who} is {dtype_name(place.dst.dtype)}, the publisher's {entry.dtype}")
    rows = entry.numel // place.row_elems if place.row_elems > 0 else -1
    fits = (
        rows * place.row_elems == entry.numel
        and 0 <= place.row_first <= place.row_first + place.n_rows <= rows
        and 0 <= place.col_first <= place.col_first + place.n_cols <= place.row_elems
        and place.n_cols <= place.dst_row_elems
        and place.n_rows * place.n_cols > 0
    )
    if not fits:
        raise MismatchError(
            f"{who}: a place of {place.n_rows} x {place.n_cols} elements does not lie in {list(entry.shape)}"
        )
