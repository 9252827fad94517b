"""Deltas of lists of tensors: find what changed, encode, check, apply, undo, and checksums.

A thin face of the functions spccl_delta_* of spccl.h, which says more; docs/FORMAT.md, section 11, has the bytes. Each
function takes a whole list, because a model has thousands of tensors. Tensors are on the CPU. Errors are those of
`spccl.errors`; their text names the entry, such as "sources[3]".
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from spccl import _ext
from spccl.errors import ArgumentError, Status, UnsupportedError

# spccl_dtype of spccl.h. Every 8-bit float is carried as bytes; so is bool.
_NUMBERS = {
    torch.float32: 1,
    torch.float16: 2,
    torch.bfloat16: 3,
    torch.float64: 4,
    torch.int8: 6,
    torch.int16: 7,
    torch.int32: 8,
    torch.int64: 9,
    torch.uint8: 10,
    torch.bool: 10,
}
_FLOAT8 = 5
_MASK = 2**64 - 1
# The structs of spccl.h: spccl_delta_source, spccl_delta_target, spccl_delta_place.
_SOURCE = struct.Struct("<QQQQiiQ")
_TARGET = struct.Struct("<QQQQQQQiI")
_PLACE = struct.Struct("<QQQQQQQ")


@dataclass(frozen=True)
class Source:
    """A tensor, or a part of one, and what receivers have of it.

    Attributes:
        x: what it is now, contiguous; of base's dtype, or float32 where that is bfloat16 or float16.
        base: what receivers have, contiguous, as many elements as x. Its dtype is that of the delta.
        first: place of element 0 in its tensor, for checksums.
    """

    x: torch.Tensor
    base: torch.Tensor
    first: int = 0


@dataclass(frozen=True)
class Frame:
    """The delta of one source: `bytes` bytes from `offset` on of `out`.

    Attributes:
        nnz: elements that changed.
        sum_change: what to add to the tensor's checksum, mod 2^64.
    """

    offset: int
    bytes: int
    nnz: int
    sum_change: int


@dataclass(frozen=True)
class Place:
    """Where a box of a tensor lies: rows row_first to row_first + n_rows, columns col_first to col_first + n_cols, of
    the tensor seen as rows of row_elems. Row r, column c of the box is dst_row_elems * r + c elements behind the first
    element of `dst`.
    """

    dst: torch.Tensor
    row_elems: int
    row_first: int
    n_rows: int
    col_first: int
    n_cols: int
    dst_row_elems: int

    @staticmethod
    def whole(dst: torch.Tensor) -> Place:
        """The place of a whole contiguous tensor."""
        n = dst.numel()
        return Place(dst, max(n, 1), 0, 1, 0, n, max(n, 1))


@dataclass(frozen=True)
class Target:
    """A frame, and where its elements lie. Elements that are in no place are passed over.

    Attributes:
        frame: [bytes] uint8, exactly one frame; any bytes are safe.
        n_elems, dtype, first: as it was encoded.
    """

    frame: torch.Tensor
    n_elems: int
    dtype: torch.dtype
    places: Sequence[Place] = field(default_factory=tuple)
    first: int = 0


def _error(cls: type[ArgumentError] | type[UnsupportedError], status: Status, text: str) -> Exception:
    error = cls(text)
    error.status = status
    return error


def _bad(text: str) -> Exception:
    return _error(ArgumentError, Status.ARG, text)


def _number(dtype: torch.dtype, what: str) -> int:
    if dtype in _NUMBERS:
        return _NUMBERS[dtype]
    if dtype.itemsize == 1:
        return _FLOAT8
    raise _error(ArgumentError, Status.DTYPE, f"{what}: got {dtype}; wanted a dtype of spccl")


def _on_cpu(tensor: torch.Tensor, what: str) -> None:
    if tensor.device.type != "cpu":
        raise _error(UnsupportedError, Status.UNSUPPORTED, f"{what}: on {tensor.device}; wanted a CPU tensor")
    if tensor.layout != torch.strided:
        raise _bad(f"{what}: layout {tensor.layout}; wanted a dense tensor")


def _flat(tensor: torch.Tensor, what: str) -> None:
    _on_cpu(tensor, what)
    if not tensor.is_contiguous():
        raise _bad(f"{what}: strides {tuple(tensor.stride())}; wanted a contiguous tensor")


def _bytes(tensor: torch.Tensor, what: str) -> None:
    _flat(tensor, what)
    if tensor.dtype != torch.uint8:
        raise _bad(f"{what}: got {tensor.dtype}; wanted uint8")


def _pack_sources(sources: Sequence[Source], key: int) -> bytes:
    packed = bytearray()
    for i, s in enumerate(sources):
        _flat(s.x, f"encode: sources[{i}].x")
        _flat(s.base, f"encode: sources[{i}].base")
        if s.x.numel() != s.base.numel():
            raise _bad(f"encode: sources[{i}]: x has {s.x.numel()} elements, base has {s.base.numel()}")
        x_dtype = _number(s.x.dtype, f"encode: sources[{i}].x")
        dtype = _number(s.base.dtype, f"encode: sources[{i}].base")
        if x_dtype == dtype and s.x.dtype != s.base.dtype:
            raise _bad(f"encode: sources[{i}]: x is {s.x.dtype}, base is {s.base.dtype}")
        packed += _SOURCE.pack(
            s.x.data_ptr(), s.base.data_ptr(), s.x.numel(), s.first & _MASK, x_dtype, dtype, key & _MASK
        )
    return bytes(packed)


def _pack_place(p: Place, dtype: torch.dtype, what: str) -> bytes:
    """Memory outside of dst's storage is refused."""
    _on_cpu(p.dst, f"{what}.dst")
    numbers = (p.row_elems, p.row_first, p.n_rows, p.col_first, p.n_cols, p.dst_row_elems)
    if min(numbers) < 0 or max(numbers) > 2**62:
        raise _bad(f"{what}: got {numbers}; wanted numbers from 0 on")
    if p.dst.dtype != dtype:
        raise _bad(f"{what}.dst: got {p.dst.dtype}; wanted {dtype}, as its target")
    left = p.dst.untyped_storage().nbytes() // dtype.itemsize - p.dst.storage_offset()
    extent = (p.n_rows - 1) * p.dst_row_elems + p.n_cols if p.n_rows > 0 and p.n_cols > 0 else 0
    if extent > left:
        raise _bad(f"{what}: its box ends at element {extent} of dst, whose memory has {left}")
    return _PLACE.pack(p.dst.data_ptr(), *numbers)


class Packed:
    """A list of targets, packed once for `check`, `apply` and `undo`: packing thousands takes longer than writing few
    elements to each. Their memory must stay where it is.

    Args: key: of `check`.
    Raises: ArgumentError, UnsupportedError, as the calls for the list itself.
    """

    def __init__(self, targets: Sequence[Target], key: int):
        self.targets, self.key = tuple(targets), key
        self.packed = _pack_targets("pack", self.targets, key)
        self.old_bytes = old_bytes(self.targets)


def _pack_targets(call: str, targets: Sequence[Target] | Packed, key: int | None = None) -> tuple[bytes, bytes]:
    """Targets and places; a target's pointer to places is 0, and the extension fills it in."""
    if isinstance(targets, Packed):
        if key not in (None, targets.key):
            raise _bad(f"{call}: key {key}; wanted {targets.key}, which the targets were packed with")
        return targets.packed
    key = key or 0
    packed, places = bytearray(), bytearray()
    for i, t in enumerate(targets):
        what = f"{call}: targets[{i}]"
        _bytes(t.frame, f"{what}.frame")
        number = _number(t.dtype, what)
        for p, place in enumerate(t.places):
            places += _pack_place(place, t.dtype, f"{what}.places[{p}]")
        if not 0 <= t.n_elems <= _MASK:
            raise _bad(f"{what}: n_elems {t.n_elems}")
        packed += _TARGET.pack(
            *(t.frame.data_ptr(), t.frame.numel(), t.n_elems, t.first & _MASK, 0, len(t.places), key & _MASK),
            *(number, 0),
        )
    return bytes(packed), bytes(places)


def bound(n_elems: int, dtype: torch.dtype) -> int:
    """Bytes that always suffice for the frame of one source."""
    return _ext.delta_bound(n_elems, _number(dtype, "bound"))


def encode(sources: Sequence[Source], key: int, out: torch.Tensor, raw: bool = False) -> list[Frame]:
    """Encode each source against its base, frames back to back. The base stays: `apply` of the frame advances it.

    Args:
        key: any number; of the checksums.
        out: [n] uint8; the sum of `bound` of all sources suffices.
        raw: True: all values as they are. False: as differences to the base where that is smaller; such a frame is
            applied once, to exactly that base.
    Raises: ArgumentError, OutOfMemoryError, UnsupportedError (a frame above 16 GiB).
    """
    _bytes(out, "encode: out")
    rows = _ext.delta_encode(_pack_sources(sources, key), raw, out.data_ptr(), out.numel())
    return [Frame(*row) for row in rows]


def old_bytes(targets: Sequence[Target] | Packed) -> int:
    """Bytes that `old` of `check` needs. It reads the headers of the frames; `check` checks them."""
    if isinstance(targets, Packed):
        return targets.old_bytes
    total = 0
    for t in targets:
        nnz = int.from_bytes(t.frame[16:24].tolist(), "little") if t.frame.numel() >= 24 else 0
        total += (min(nnz, t.n_elems) * t.dtype.itemsize + 7) // 8 * 8
    return total


def check(targets: Sequence[Target] | Packed, key: int, old: torch.Tensor | None = None) -> list[int]:
    """Check all frames completely, and look at what lies at the places now. Writes no place.

    Args:
        old: uint8 [old_bytes(targets)]: gets the old values, for `undo`; None: they are not kept.
    Returns: the sum change of each target, of the elements that lie at a place. An element at several places counts
        once.
    Raises: FormatError (a bad frame; one of another dtype or length; places of one element with different bits),
        ArgumentError, OutOfMemoryError.
    """
    if old is not None:
        _bytes(old, "check: old")
    packed, places = _pack_targets("check", targets, key)
    return _ext.delta_check(packed, places, 0 if old is None else old.data_ptr(), 0 if old is None else old.numel())


def apply(targets: Sequence[Target] | Packed) -> None:
    """Write the new values to the places. After `check` of the same frames it does not fail.

    Raises: as `check`; then part of the places may have been written, and `undo` restores them.
    """
    _ext.delta_apply(*_pack_targets("apply", targets))


def undo(targets: Sequence[Target] | Packed, old: torch.Tensor) -> None:
    """Put back what `check` stored in `old`, whether all, some or none of the targets had been applied."""
    _bytes(old, "undo: old")
    n_bytes = old_bytes(targets)
    if old.numel() < n_bytes:
        raise _bad(f"undo: old has {old.numel()} bytes; wanted {n_bytes}, as check wrote")
    _ext.delta_undo(*_pack_targets("undo", targets), old.data_ptr(), n_bytes)


def checksum(x: torch.Tensor, key: int, first: int = 0) -> int:
    """Checksum of a contiguous tensor, or of its part from element `first` on. Checksums of parts add up mod 2^64."""
    _flat(x, "checksum: x")
    return _ext.delta_checksum(x.data_ptr(), x.numel(), _number(x.dtype, "checksum: x"), first & _MASK, key & _MASK)
