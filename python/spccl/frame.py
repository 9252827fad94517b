"""Arrays to bytes and back: `encode`, `decode`, `inspect`.

An array is any object with the buffer protocol (numpy array, array.array, bytes, memoryview) or DLPack (torch
tensor), C-contiguous, in host memory. Only `decode` without `out` needs numpy, for the new array.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from . import _ext

ITEM_BYTES = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float64": 8,
    "float8": 1,
    "int8": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
    "uint8": 1,
}
"""Bytes of an element, by dtype."""
DTYPES = tuple(ITEM_BYTES)
"""Names of all dtypes."""
# numpy has no bfloat16 and no float8: their bits come back as unsigned integers of the same size.
_NUMPY_NAMES = {name: name for name in DTYPES} | {"bfloat16": "uint16", "float8": "uint8"}
DEFAULT_MAX_BYTES = 1 << 30
"""Default of `max_bytes` of `decode`, the most bytes that it allocates for a new array: 1 GiB."""
FORMATS = ("empty", "tile", "pici", "coo", "dense")
"""Names of all formats; `"auto"` picks one of them for each slice."""

_MISSING: Any = object()


@dataclasses.dataclass(frozen=True)
class FrameInfo:
    """The header of one frame. Source: docs/FORMAT.md, section 2.

    `offset` counts bytes from the start of the encoded array. `index_off`, `meta_off` and `values_off` count
    bytes from the start of the frame; 0 means that the frame has no such section.
    """

    offset: int
    version: int
    format: str
    dtype: str
    is_delta: bool
    n_elems: int
    nnz: int
    frame_bytes: int
    index_off: int
    meta_off: int
    values_off: int

    def sections(self) -> dict[str, int]:
        """Bytes of each part of the frame, padding included; they add up to `frame_bytes`."""
        starts = {"header": 0, "index": self.index_off, "meta": self.meta_off, "values": self.values_off}
        present = [(name, off) for name, off in starts.items() if name == "header" or off != 0]
        ends = [off for _, off in present[1:]] + [self.frame_bytes]
        return {name: end - off for (name, off), end in zip(present, ends, strict=True)}


def dtype_name(dtype: Any) -> str | None:
    """The name that spccl has for a dtype: a string, a torch.dtype or a numpy dtype. None stays None.

    Every float8 of torch becomes "float8": spccl carries them as bytes.
    Raises: nothing. The function that gets the name refuses an unknown one.
    """
    if dtype is None:
        return None
    # numpy.dtype("int8") has a name, numpy.int8 a __name__; str(torch.int8) is "torch.int8".
    name = getattr(dtype, "name", None) or getattr(dtype, "__name__", None) or dtype
    name = str(name).removeprefix("torch.")
    return "float8" if name.startswith("float8") else name


def numpy_dtype(dtype: str) -> Any:
    """The numpy dtype that holds a spccl dtype: bfloat16 as uint16, float8 as uint8.

    Raises: ModuleNotFoundError if numpy is not installed.
    """
    return _numpy().dtype(_NUMPY_NAMES[dtype])


def _numpy() -> Any:
    try:
        import numpy
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "spccl: a new array needs numpy, which is not installed: pip install numpy, or pass out="
        ) from error
    return numpy


def encode(
    x: Any, *, base: Any = None, format: str = "auto", dtype: Any = None, slice_elems: int = 0
) -> bytes:
    """Encode an array as frames, one for each slice.

    Args:
        x: array of any shape, in host memory, C-contiguous. It is encoded as a flat array.
        base: array with the dtype and number of elements of `x`. Then the frames list only the elements of `x`
            that differ from `base` in any bit (a delta).
        format: "auto" (each slice takes the smallest), or "tile", "pici", "coo", "dense" for every slice.
        dtype: the dtype to read the memory as: a name, a torch dtype or a numpy dtype. Needed if the array's
            library lacks the dtype: "bfloat16" for bits in uint16, "float8" for bits in uint8. None: the
            array's own.
        slice_elems: elements per frame, a multiple of 2048; 0 = 65536.
    Returns: the encoded array. -0.0, NaN payloads, infinities and denormals keep their bits.
    Raises: ArgumentError (dtype, size or layout of the argument that the text names), UnsupportedError (the
        forced format cannot hold a slice, or `x` is a CUDA tensor), OutOfMemoryError.
    Source: docs/FORMAT.md.
    """
    return _ext.encode(x, base=base, format=format, dtype=dtype_name(dtype), slice_elems=slice_elems)


def decode(
    encoded: Any = _MISSING,
    out: Any = None,
    verb: str = "set",
    dtype: Any = None,
    *,
    max_bytes: int = DEFAULT_MAX_BYTES,
    stream: Any = _MISSING,
) -> Any:
    """Apply an encoded array to an array.

    Args:
        encoded: bytes from `encode`, or from any other source: every frame is checked completely.
        out: writable array in host memory with the encoded array's dtype and number of elements, any shape. It
            may be a torch parameter that requires grad, but no result of autograd.
            None: a new flat numpy array of the encoded array's dtype (bfloat16 bits in uint16, float8 bits in
            uint8).
        verb: "set": elements that are not listed become zero. "add": listed elements are added. "overwrite":
            listed elements are replaced, the others stay; a delta is applied in this way.
        dtype: the dtype to read `out` as, as in `encode`.
        max_bytes: most bytes of the new array; unused where `out` is given. A few hundred encoded bytes can
            stand for gigabytes of zeros, so raise it only for bytes that you trust.
        stream: the former name of `encoded`, still accepted.
    Returns: `out`, or the new array.
    Raises: FormatError (bad bytes, or another dtype or length than `out`; the frames before the bad one are
        decoded into `out`, the bad one and those after it are not), ArgumentError (also if the new array would
        have more than `max_bytes`), UnsupportedError (verb "add" of float8).
    Source: docs/FORMAT.md.
    """
    encoded = _renamed("decode", encoded, stream)
    if out is None:
        if verb in ("add", "overwrite"):
            raise _ext.ArgumentError(
                f'decode: verb "{verb}" changes an array that exists; pass out=, or use verb "set"'
            )
        dtype, n_elems = _shape(encoded, max_bytes)
        out = _numpy().empty(n_elems, numpy_dtype(dtype))
    _ext.decode(encoded, out, verb, dtype_name(dtype))
    return out


def _renamed(function: str, encoded: Any, stream: Any) -> Any:
    """The argument that has two names. Raises TypeError, as Python does, if both or neither are given."""
    if (encoded is _MISSING) == (stream is _MISSING):
        what = "both 'encoded' and" if stream is not _MISSING else "neither 'encoded' nor"
        raise TypeError(f"{function}() got {what} 'stream', its former name; wanted 'encoded'")
    return stream if encoded is _MISSING else encoded


def _shape(encoded: Any, max_bytes: int) -> tuple[str, int]:
    """The dtype and number of elements of an encoded array.

    Raises: ArgumentError if the decoded array would have more than `max_bytes`.
    """
    dtype, n_elems = None, 0
    for frame in iter_frames(encoded):
        dtype = dtype or frame.dtype
        if frame.dtype != dtype:
            raise _ext.FormatError(
                f"encoded: the frame at byte {frame.offset} has dtype {frame.dtype}, those before it "
                f"{dtype}; one array has one dtype"
            )
        n_elems += frame.n_elems
        if n_elems * ITEM_BYTES[dtype] > max_bytes:
            raise _ext.ArgumentError(
                f"decode: the frames up to byte {frame.offset + frame.frame_bytes} stand for {n_elems} elements of "
                f"{dtype}, {n_elems * ITEM_BYTES[dtype]} bytes; wanted at most max_bytes={max_bytes}. For bytes "
                "that you trust pass a larger max_bytes=, or pass out="
            )
    assert dtype is not None  # iter_frames yields a frame or raises
    return dtype, n_elems


def iter_frames(encoded: Any) -> Iterator[FrameInfo]:
    """Yield what `inspect` returns, one frame at a time. It yields the frames before a bad one, then raises."""
    offset, n_bytes = 0, memoryview(encoded).nbytes
    while offset < n_bytes or offset == 0:
        frame = FrameInfo(**_ext.inspect(encoded, offset))
        offset += frame.frame_bytes
        yield frame


def inspect(encoded: Any = _MISSING, *, stream: Any = _MISSING) -> list[FrameInfo]:
    """Check every frame of an encoded array completely and describe it.

    Args:
        encoded: bytes-like, one frame or several back to back.
        stream: the former name of `encoded`, still accepted.
    Returns: the frames in order.
    Raises: FormatError. Its text says at which byte the bad frame starts, what was found and what was wanted.
    Source: docs/FORMAT.md.
    """
    return list(iter_frames(_renamed("inspect", encoded, stream)))
