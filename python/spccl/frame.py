"""Arrays to bytes and back: `encode`, `decode`, `inspect`.

Arrays are anything with the buffer protocol (numpy arrays, array.array, bytes, memoryview) or DLPack (torch
tensors), C-contiguous, in host memory. numpy is used only where a new array is asked for.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from . import _ext

# numpy has no bfloat16 and no float8: their bits come back as unsigned integers of the same size.
_NUMPY_NAMES = {
    "float32": "float32",
    "float16": "float16",
    "bfloat16": "uint16",
    "float64": "float64",
    "float8": "uint8",
    "int8": "int8",
    "int16": "int16",
    "int32": "int32",
    "int64": "int64",
    "uint8": "uint8",
}
DTYPES = tuple(_NUMPY_NAMES)
"""Names of all dtypes."""
FORMATS = ("empty", "tile", "pici", "coo", "dense")
"""Names of all formats; `"auto"` picks one of them for each slice."""


@dataclasses.dataclass(frozen=True)
class FrameInfo:
    """What one frame of a stream says of itself. Source: docs/FORMAT.md, section 2.

    `offset` counts bytes from the start of the stream; `index_off`, `meta_off` and `values_off` from the
    start of the frame, 0 = the frame has no such section.
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
    Raises: nothing; an unknown name is refused where it is used.
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
    """Encode an array as a stream of frames.

    Args:
        x: array of any shape, taken flat, in host memory, C-contiguous.
        base: array like `x`: then only the elements that differ from it in any bit are listed (a delta).
        format: "auto" (each slice takes the cheapest), or "tile", "pici", "coo", "dense" for every slice.
        dtype: what to read the memory as, where the array cannot say it: "bfloat16" for uint16 bits,
            "float8" for uint8 bits; or a torch or numpy dtype. None: the array's own.
        slice_elems: elements per frame, a multiple of 2048; 0 = 65536.
    Returns: the stream. -0.0, NaN payloads, infinities and denormals travel bit for bit.
    Raises: ArgumentError (dtype, size, layout of an argument, named in the text), UnsupportedError (the
        forced format does not fit, or a CUDA tensor), OutOfMemoryError.
    Source: docs/FORMAT.md.
    """
    return _ext.encode(x, base=base, format=format, dtype=dtype_name(dtype), slice_elems=slice_elems)


def decode(stream: Any, out: Any = None, verb: str = "set", dtype: Any = None) -> Any:
    """Apply a stream to an array.

    Args:
        stream: bytes from `encode`, or from anywhere: it is checked completely, frame by frame.
        out: writable array with exactly the stream's elements and dtype, any shape. None: a new numpy array,
            flat; its dtype is the stream's (bfloat16 comes as uint16, float8 as uint8 bits).
        verb: "set": elements not listed become zero; "add": listed ones are added; "overwrite": listed ones
            are replaced, the others stay (how a delta is applied).
        dtype: what to read `out` as, as in `encode`.
    Returns: `out`.
    Raises: FormatError (bad or foreign bytes, or another dtype or length than `out`; elements before the bad
        frame are written, those from it on are not), ArgumentError, UnsupportedError (adding float8).
    Source: docs/FORMAT.md.
    """
    if out is None:
        if verb != "set":
            raise _ext.ArgumentError(
                f'decode: verb "{verb}" changes an array that exists; pass out=, or use verb "set"'
            )
        dtype, n_elems = _shape(stream)
        out = _numpy().empty(n_elems, numpy_dtype(dtype))
    _ext.decode(stream, out, verb, dtype_name(dtype))
    return out


def _shape(stream: Any) -> tuple[str, int]:
    frames = inspect(stream)
    for frame in frames:
        if frame.dtype != frames[0].dtype:
            raise _ext.FormatError(
                f"stream: the frame at byte {frame.offset} has dtype {frame.dtype}, those before it "
                f"{frames[0].dtype}; one array has one dtype"
            )
    return frames[0].dtype, sum(frame.n_elems for frame in frames)


def iter_frames(stream: Any) -> Iterator[FrameInfo]:
    """`inspect`, one frame at a time: what comes before a bad frame is still told."""
    offset, n_bytes = 0, memoryview(stream).nbytes
    while offset < n_bytes or offset == 0:
        frame = FrameInfo(**_ext.inspect(stream, offset))
        offset += frame.frame_bytes
        yield frame


def inspect(stream: Any) -> list[FrameInfo]:
    """Check every frame of a stream completely and describe it.

    Args: stream: bytes-like, one frame or several back to back.
    Returns: the frames in order.
    Raises: FormatError: the text says at which byte the bad frame starts, what was found and what was wanted.
    Source: docs/FORMAT.md.
    """
    return list(iter_frames(stream))
