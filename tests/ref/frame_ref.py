"""A second reader and writer of frames, slow and plain, written from docs/FORMAT.md.

It uses no code of the library, only Python's standard library. It makes the golden files, which the library
must read in the same way. Section and rule numbers are those of docs/FORMAT.md. Arrays are `bytes`,
little-endian.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from itertools import pairwise

FORMATS = ("empty", "tile", "pici", "coo", "dense")
DTYPES = {
    1: ("float32", 4), 2: ("float16", 2), 3: ("bfloat16", 2), 4: ("float64", 8), 5: ("float8", 1),
    6: ("int8", 1), 7: ("int16", 2), 8: ("int32", 4), 9: ("int64", 8), 10: ("uint8", 1),
}  # fmt: skip
DTYPE_NUMBERS = {name: number for number, (name, _) in DTYPES.items()}
HEADER = struct.Struct("<4sBBBBQQQQQQQ")
VERBS = ("set", "add", "overwrite")


class Refused(Exception):
    """A frame or an encoded array breaks a rule of section 4."""

    def __init__(self, rule: int, text: str) -> None:
        super().__init__(f"rule {rule}: {text}")
        self.rule = rule


@dataclass(frozen=True)
class Frame:
    """One checked frame. `listed` maps the index of each listed element to its value (dense: see 3.5)."""

    format: str
    dtype: str
    is_delta: bool
    n_elems: int
    listed: dict[int, bytes]
    frame_bytes: int


def _check(ok: bool, rule: int, text: str) -> None:
    if not ok:
        raise Refused(rule, text)


# ---- sections 2 and 3: sizes and offsets ----


def section_sizes(fmt: str, n: int, k: int, e: int) -> list[int | None]:
    """Bytes of index, meta and values, without padding. None: the format has no such section."""
    if fmt == "empty":
        return [None, None, None]
    if fmt == "tile":
        return [-(-n // 256), k, e * k]
    if fmt == "pici":
        return [4 * -(-n // 4096), 8 * 64 * -(-n // 4096), e * k]
    if fmt == "coo":
        return [4 * k, None, e * k]
    return [None, None, e * n]


def layout(fmt: str, n: int, k: int, e: int) -> tuple[list[int], int]:
    """Offsets of index, meta and values (0: no such section), and the size of the frame."""
    at = 64
    offsets = []
    for size in section_sizes(fmt, n, k, e):
        if size is None:
            offsets.append(0)
        else:
            offsets.append(at)
            at = (at + size + 15) // 16 * 16
    return offsets, at


# ---- reading ----


def read_frame(encoded: bytes, at: int = 0) -> Frame:
    """Check rules 1 to 27 on the frame at byte `at`, and return its parts. Raises Refused."""
    left = len(encoded) - at
    _check(left >= 64, 1, f"{left} bytes left")
    (magic, version, fmt_no, dtype_no, flags, n, k, frame_bytes, index_off, meta_off, values_off,
     reserved) = HEADER.unpack_from(encoded, at)  # fmt: skip
    _check(magic == b"SPCF", 2, f"magic {magic!r}")
    _check(version == 1, 3, f"version {version}")
    _check(fmt_no <= 4, 4, f"format {fmt_no}")
    _check(1 <= dtype_no <= 10, 5, f"dtype {dtype_no}")
    _check(flags in (0, 1), 6, f"flags {flags:#x}")
    _check(reserved == 0, 7, f"reserved {reserved}")
    _check(n <= 2**31, 8, f"n_elems {n}")
    _check(k <= n, 9, f"nnz {k} of {n}")
    fmt = FORMATS[fmt_no]
    dtype, e = DTYPES[dtype_no]
    _check(n != 0 or fmt == "empty", 10, "n_elems 0")
    _check(fmt != "empty" or k == 0, 11, f"empty with nnz {k}")
    _check(fmt != "dense" or k == n, 12, f"dense with nnz {k} of {n}")
    _check(fmt != "dense" or flags == 0, 13, "dense delta")
    offsets, size = layout(fmt, n, k, e)
    _check(index_off == offsets[0], 14, f"index_off {index_off}")
    _check(meta_off == offsets[1], 15, f"meta_off {meta_off}")
    _check(values_off == offsets[2], 16, f"values_off {values_off}")
    _check(frame_bytes == size, 17, f"frame_bytes {frame_bytes}")
    _check(left >= size, 18, f"{left} bytes left of {size}")
    index, meta, values = _sections(encoded[at : at + size], offsets, section_sizes(fmt, n, k, e))
    elements = {"empty": _no_elements, "tile": _tile_elements, "pici": _pici_elements, "coo": _coo_elements,
                "dense": _dense_elements}[fmt](n, k, index, meta)  # fmt: skip
    listed = {element: values[i * e : (i + 1) * e] for i, element in enumerate(elements)}
    if fmt == "dense":
        listed = {element: value for element, value in listed.items() if value != bytes(e)}
    return Frame(fmt, dtype, flags == 1, n, listed, size)


def _sections(frame: bytes, offsets: list[int], sizes: list[int | None]) -> list[bytes]:
    sections = []
    for offset, size in zip(offsets, sizes, strict=True):
        if size is None:
            sections.append(b"")
            continue
        end = offset + size
        sections.append(frame[offset:end])
        padding = frame[end : (end + 15) // 16 * 16]
        _check(padding.count(0) == len(padding), 19, f"padding after byte {end}")
    return sections


def _no_elements(n: int, k: int, index: bytes, meta: bytes) -> list[int]:
    return []


def _dense_elements(n: int, k: int, index: bytes, meta: bytes) -> list[int]:
    return list(range(n))


def _tile_elements(n: int, k: int, index: bytes, meta: bytes) -> list[int]:
    _check(sum(index) == k, 20, f"counts sum to {sum(index)}, nnz {k}")
    elements: list[int] = []
    at = 0
    for block, count in enumerate(index):
        in_block = meta[at : at + count]
        at += count
        for before, this in pairwise(in_block):
            _check(this > before, 21, f"block {block}: {this} after {before}")
        elements += [block * 256 + p for p in in_block]
    for element in elements:
        _check(element < n, 22, f"element {element} of {n}")
    return elements


def _pici_elements(n: int, k: int, index: bytes, meta: bytes) -> list[int]:
    elements: list[int] = []
    for tile, (prefix,) in enumerate(struct.iter_unpack("<I", index)):
        _check(prefix == len(elements), 23, f"tile {tile}: prefix {prefix}, {len(elements)} bits before it")
        for column in range(64):
            (word,) = struct.unpack_from("<Q", meta, (tile * 64 + column) * 8)
            elements += [tile * 4096 + 64 * row + column for row in range(64) if word >> row & 1]
    _check(len(elements) == k, 24, f"{len(elements)} bits, nnz {k}")
    for element in elements:
        _check(element < n, 25, f"bit of element {element} of {n}")
    return elements


def _coo_elements(n: int, k: int, index: bytes, meta: bytes) -> list[int]:
    elements = [element for (element,) in struct.iter_unpack("<I", index)]
    for before, this in pairwise(elements):
        _check(this > before, 26, f"{this} after {before}")
    for element in elements:
        _check(element < n, 27, f"index {element} of {n}")
    return elements


def read_array(encoded: bytes) -> list[Frame]:
    """All frames of an encoded array (section 1). Raises Refused."""
    _check(len(encoded) > 0, 28, "no bytes")
    frames = []
    at = 0
    while at < len(encoded):
        frame = read_frame(encoded, at)
        frames.append(frame)
        at += frame.frame_bytes
    return frames


def decode(encoded: bytes, verb: str, dst: bytes, dtype: str) -> bytes:
    """Section 5: the contents of `dst`, an array of `dtype`, after `encoded` was applied. Raises Refused."""
    e = DTYPES[DTYPE_NUMBERS[dtype]][1]
    frames = read_array(encoded)
    n = sum(f.n_elems for f in frames)
    for frame in frames:
        _check(frame.dtype == dtype, 29, f"{frame.dtype} frame, {dtype} array")
    _check(n * e == len(dst), 30, f"{n} elements in the frames, {len(dst) // e} in the array")
    for frame in frames:
        _check(verb != "set" or not frame.is_delta, 31, "set of a delta")
    out = bytearray(dst)
    at = 0
    for frame in frames:
        if verb == "set":
            out[at * e : (at + frame.n_elems) * e] = bytes(frame.n_elems * e)
        for element, value in frame.listed.items():
            here = slice((at + element) * e, (at + element + 1) * e)
            out[here] = add(bytes(out[here]), value, dtype) if verb == "add" else value
        at += frame.n_elems
    return bytes(out)


# ---- section 5: addition of one element (integers and finite floats) ----


def add(a: bytes, b: bytes, dtype: str) -> bytes:
    """a + b of one element. The library's own tests cover NaN and infinity."""
    e = len(a)
    if dtype.startswith(("int", "uint")):
        total = int.from_bytes(a, "little") + int.from_bytes(b, "little")
        return (total % 2 ** (8 * e)).to_bytes(e, "little")
    if dtype == "float64":
        return struct.pack("<d", struct.unpack("<d", a)[0] + struct.unpack("<d", b)[0])
    # A sum of float32 numbers that is computed in float64 and then rounded to float32 is rounded correctly
    # (24 + 24 + 2 <= 53). 16-bit floats are added in float32, and the sum is rounded once.
    total = _to_float(a, dtype) + _to_float(b, dtype)
    as_f32 = struct.pack("<f", total)
    if dtype == "float32":
        return as_f32
    if dtype == "bfloat16":
        (u,) = struct.unpack("<I", as_f32)
        return struct.pack("<H", (u + 0x7FFF + (u >> 16 & 1)) >> 16 & 0xFFFF)
    if dtype == "float16":
        rounded = struct.unpack("<f", as_f32)[0]
        if abs(rounded) >= 65520.0:
            rounded = math.copysign(math.inf, rounded)
        return struct.pack("<e", rounded)
    raise ValueError(f"no add of {dtype}")


def _to_float(raw: bytes, dtype: str) -> float:
    if dtype == "bfloat16":
        return struct.unpack("<f", b"\0\0" + raw)[0]
    return struct.unpack("<e" if dtype == "float16" else "<f", raw)[0]


# ---- writing ----


def write_frame(fmt: str, dtype: str, n: int, listed: dict[int, bytes], is_delta: bool = False) -> bytes:
    """One frame. `listed` maps the index of each listed element to the bytes of its value."""
    e = DTYPES[DTYPE_NUMBERS[dtype]][1]
    elements = sorted(listed) if fmt != "dense" else list(range(n))
    index = meta = b""
    if fmt == "tile":
        counts = [0] * -(-n // 256)
        for element in elements:
            counts[element // 256] += 1
        index, meta = bytes(counts), bytes(element % 256 for element in elements)
    elif fmt == "pici":
        n_tiles = -(-n // 4096)
        words = [0] * (64 * n_tiles)
        prefixes = [sum(element < 4096 * tile for element in elements) for tile in range(n_tiles)]
        for element in elements:
            words[element // 4096 * 64 + element % 64] |= 1 << (element % 4096 // 64)
        index, meta = struct.pack(f"<{n_tiles}I", *prefixes), struct.pack(f"<{64 * n_tiles}Q", *words)
        elements.sort(key=lambda element: (element // 4096, element % 64, element % 4096 // 64))
    elif fmt == "coo":
        index = struct.pack(f"<{len(elements)}I", *elements)
    values = b"".join(listed.get(element, bytes(e)) for element in elements)
    offsets, size = layout(fmt, n, len(elements), e)
    frame = bytearray(size)
    numbers = (FORMATS.index(fmt), DTYPE_NUMBERS[dtype], int(is_delta), n, len(elements), size, *offsets, 0)
    HEADER.pack_into(frame, 0, b"SPCF", 1, *numbers)
    for offset, section in zip(offsets, (index, meta, values), strict=True):
        frame[offset : offset + len(section)] = section if offset else b""
    assert read_frame(bytes(frame)).listed == listed
    return bytes(frame)


def encode(fmt: str, dtype: str, x: bytes, base: bytes | None = None) -> bytes:
    """One frame that lists the elements of x that differ in any bit from `base` (None: from zero)."""
    e = DTYPES[DTYPE_NUMBERS[dtype]][1]
    n = len(x) // e
    zero = bytes(e)
    listed = {}
    for i in range(n):
        value = x[i * e : (i + 1) * e]
        if value != (zero if base is None else base[i * e : (i + 1) * e]):
            listed[i] = value
    return write_frame(fmt, dtype, n, listed, base is not None)
