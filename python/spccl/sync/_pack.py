"""Sources, frames, places and targets of delta.py, checked and packed as the structs of spccl.h."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

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
MASK = 2**64 - 1

# The structs of spccl.h: spccl_delta_source, spccl_delta_target, spccl_delta_place.
_SOURCE = struct.Struct("<QQQQiiQ")
TARGET = struct.Struct("<QQQQQQQiI")
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


class PackedSources:
    """A list of sources, packed once for several calls of `encode`. Their memory must stay where it is.

    Raises: ArgumentError, UnsupportedError, as `encode`.
    """

    def __init__(self, sources: Sequence[Source], key: int):
        self.key = key
        self.device = sources[0].x.device if sources else torch.device("cpu")
        self.packed = pack_sources(sources, key, self.device)
        self._n = len(sources)

    def __len__(self) -> int:
        return self._n


class Frame(NamedTuple):
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
class PackedPlace(Place):
    """A place that was checked and packed once; so is each copy. Its memory must stay where it is."""

    packed: bytes = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "packed", _checked_place(self, self.dst.dtype, "place", self.dst.device))

    @staticmethod
    def of(p: Place, what: str) -> PackedPlace:
        """Args: what: for errors. Raises: ArgumentError, UnsupportedError, as the calls for a list of targets."""
        pack_place(p, p.dst.dtype, what, p.dst.device)
        return PackedPlace(p.dst, p.row_elems, p.row_first, p.n_rows, p.col_first, p.n_cols, p.dst_row_elems)


class Target(NamedTuple):
    """A frame, and where its elements lie. Elements that are in no place are passed over.

    Attributes:
        frame: uint8, has exactly one frame in its `n_bytes` bytes from `start` on (None: all of them); any are safe.
        n_elems, dtype, first: as it was encoded.
    """

    frame: torch.Tensor
    n_elems: int
    dtype: torch.dtype
    places: Sequence[Place] = ()
    first: int = 0
    start: int = 0
    n_bytes: int | None = None


def error(cls: type[ArgumentError] | type[UnsupportedError], status: Status, text: str) -> Exception:
    error = cls(text)
    error.status = status
    return error


def bad(text: str) -> Exception:
    return error(ArgumentError, Status.ARG, text)


def number(dtype: torch.dtype, what: str) -> int:
    if dtype in _NUMBERS:
        return _NUMBERS[dtype]
    if dtype.itemsize == 1:
        return _FLOAT8
    raise error(ArgumentError, Status.DTYPE, f"{what}: got {dtype}; wanted a dtype of spccl")


def dense(tensor: torch.Tensor, what: str, device: torch.device | None) -> torch.device:
    """Returns the tensor's device, which must be `device` if that is not None."""
    if tensor.device.type not in ("cpu", "cuda"):
        text = f"{what}: on {tensor.device}; wanted a tensor on a CPU or a CUDA GPU"
        raise error(UnsupportedError, Status.UNSUPPORTED, text)
    if device is not None and tensor.device != device:
        raise bad(f"{what}: on {tensor.device}; wanted {device}, as the tensors before")
    if tensor.layout != torch.strided:
        raise bad(f"{what}: layout {tensor.layout}; wanted a dense tensor")
    return tensor.device


def flat(tensor: torch.Tensor, what: str, device: torch.device | None = None) -> torch.device:
    device = dense(tensor, what, device)
    if not tensor.is_contiguous():
        raise bad(f"{what}: strides {tuple(tensor.stride())}; wanted a contiguous tensor")
    return device


def as_bytes(tensor: torch.Tensor, what: str, device: torch.device | None = None) -> torch.device:
    device = flat(tensor, what, device)
    if tensor.dtype != torch.uint8:
        raise bad(f"{what}: got {tensor.dtype}; wanted uint8")
    return device


def pack_sources(sources: Sequence[Source], key: int, device: torch.device) -> bytes:
    packed = bytearray()
    for i, s in enumerate(sources):
        flat(s.x, f"encode: sources[{i}].x", device)
        flat(s.base, f"encode: sources[{i}].base", device)
        if s.x.numel() != s.base.numel():
            raise bad(f"encode: sources[{i}]: x has {s.x.numel()} elements, base has {s.base.numel()}")
        x_dtype = number(s.x.dtype, f"encode: sources[{i}].x")
        dtype = number(s.base.dtype, f"encode: sources[{i}].base")
        if x_dtype == dtype and s.x.dtype != s.base.dtype:
            raise bad(f"encode: sources[{i}]: x is {s.x.dtype}, base is {s.base.dtype}")
        packed += _SOURCE.pack(
            s.x.data_ptr(), s.base.data_ptr(), s.x.numel(), s.first & MASK, x_dtype, dtype, key & MASK
        )
    return bytes(packed)


def pack_place(p: Place, dtype: torch.dtype, what: str, device: torch.device) -> bytes:
    """Memory outside of dst's storage is refused."""
    if type(p) is PackedPlace and p.dst.dtype == dtype and p.dst.device == device:
        return p.packed
    return _checked_place(p, dtype, what, device)


def _checked_place(p: Place, dtype: torch.dtype, what: str, device: torch.device) -> bytes:
    dense(p.dst, f"{what}.dst", device)
    numbers = (p.row_elems, p.row_first, p.n_rows, p.col_first, p.n_cols, p.dst_row_elems)
    if min(numbers) < 0 or max(numbers) > 2**62:
        raise bad(f"{what}: got {numbers}; wanted numbers from 0 on")
    if p.dst.dtype != dtype:
        raise bad(f"{what}.dst: got {p.dst.dtype}; wanted {dtype}, as its target")
    left = p.dst.untyped_storage().nbytes() // dtype.itemsize - p.dst.storage_offset()
    extent = (p.n_rows - 1) * p.dst_row_elems + p.n_cols if p.n_rows > 0 and p.n_cols > 0 else 0
    if extent > left:
        raise bad(f"{what}: its box ends at element {extent} of dst, whose memory has {left}")
    return _PLACE.pack(p.dst.data_ptr(), *numbers)
