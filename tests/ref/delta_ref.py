"""A second reader and writer of frames of version 2, slow and plain, written from docs/FORMAT.md, section 11.

As frame_ref.py, it uses no code of the library. Arrays are `bytes`, little-endian; bits of a section are one int.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from itertools import pairwise

from frame_ref import DTYPE_NUMBERS, DTYPES, Refused

HEADER = struct.Struct("<4sBBBBQQQ")
SLICE = 65536
WIDTHS = (0, 2, 4, 8, 16)
M64 = 2**64 - 1


@dataclass(frozen=True)
class Delta:
    """A checked frame. `changes` maps the number of each listed element to (is its value a difference, the number)."""

    dtype: str
    n_elems: int
    changes: dict[int, tuple[bool, int]]
    frame_bytes: int


def _check(ok: bool, rule: int, text: str) -> None:
    if not ok:
        raise Refused(rule, text)


# ---- 11.2: sizes ----


def words(n_bits: int) -> int:
    """Bytes of a section of so many bits."""
    return -(-n_bits // 32) * 4


def index_layout(c: int, k: int) -> tuple[int | None, int, int]:
    """(l, or None for a bitmap; bits of low; bits of high)."""
    low = max(b for b in range(17) if k * 2**b <= c)
    bits = k * low, k + -(-c // 2**low)
    if words(bits[0]) + words(bits[1]) >= words(c):
        return None, 0, c
    return low, *bits


# ---- reading ----


class _Sections:
    """Takes the sections of a slice from the frame, one after the other."""

    def __init__(self, frame: bytes, at: int, end: int) -> None:
        self.frame, self.at, self.end = frame, at, end

    def take(self, n_bits: int) -> int:
        start, self.at = self.at, self.at + words(n_bits)
        _check(self.at <= self.end, 15, f"a section ends at {self.at}, the slice at {self.end}")
        value = int.from_bytes(self.frame[start : self.at], "little")
        _check(value >> n_bits == 0, 20, f"padding of the section at {start}")
        return value


def _pieces(section: int, n: int, width: int) -> list[int]:
    digits = f"{section:0{n * width}b}" if n * width else ""  # not by shifts: they would take n**2 steps
    return [int(digits[(n - 1 - i) * width : (n - i) * width] or "0", 2) for i in range(n)]


def _read_slice(take: _Sections, c: int, k: int, code: int, e: int) -> dict[int, tuple[bool, int]]:
    low_bits, n_low, n_high = index_layout(c, k)
    low, high = take.take(n_low), take.take(n_high)
    ones = [bit for bit, one in enumerate(_pieces(high, n_high, 1)) if one]
    _check(len(ones) == k, 17, f"{len(ones)} bits, count {k}")
    places = ones
    if low_bits is not None:
        lower = _pieces(low, k, low_bits)
        places = [(bit - j) * 2**low_bits + lower[j] for j, bit in enumerate(ones)]
    _check(all(a < b for a, b in pairwise(places)), 18, "places do not rise")
    _check(places[-1] < c, 19, f"place {places[-1]} of {c}")
    w = WIDTHS[code]
    codes = _pieces(take.take(k * w), k, w)
    escape = 2**w - 1
    n_raw = k if code == 0 else codes.count(escape)
    raw = iter(_pieces(take.take(8 * e * n_raw), n_raw, 8 * e))
    changes = {}
    for place, number in zip(places, codes, strict=True):
        difference = number // 2 + 1 if number % 2 == 0 else -(number // 2) - 1
        changes[place] = (False, next(raw)) if code == 0 or number == escape else (True, difference)
    return changes


def read_frame(encoded: bytes) -> Delta:
    """Check all rules on the frame at the start of `encoded`. Raises Refused."""
    _check(len(encoded) >= 32, 1, f"{len(encoded)} bytes left")
    magic, version, fmt, dtype_no, flags, n, nnz, frame_bytes = HEADER.unpack_from(encoded)
    _check(magic == b"SPCF", 2, f"magic {magic!r}")
    _check(version == 2, 3, f"version {version}")
    _check(fmt == 5, 4, f"format {fmt}")
    _check(1 <= dtype_no <= 10, 5, f"dtype {dtype_no}")
    _check(flags == 1, 6, f"flags {flags:#x}")
    _check(n <= 2**40, 7, f"n_elems {n}")
    _check(nnz <= n, 8, f"nnz {nnz} of {n}")
    n_slices = -(-n // SLICE)
    start = 32 + 8 * n_slices
    _check(frame_bytes % 8 == 0 and start <= frame_bytes <= 2**34, 9, f"frame_bytes {frame_bytes}")
    _check(len(encoded) >= frame_bytes, 10, f"{len(encoded)} bytes left of {frame_bytes}")
    dtype, e = DTYPES[dtype_no]
    entries = []
    for s in range(n_slices):
        word, offset = struct.unpack_from("<II", encoded, 32 + 8 * s)
        k, code, c = word & 0x1FFFF, word >> 20 & 15, min(SLICE, n - s * SLICE)
        _check(k <= c, 11, f"slice {s}: {k} of {c}")
        _check(code <= 4 and WIDTHS[code] < 8 * e and (k > 0 or code == 0), 12, f"slice {s}: code {code}")
        _check(word & 0xFF0E0000 == 0, 13, f"slice {s}: entry {word:#x}")
        entries.append((c, k, code, 4 * offset))
    _check(sum(k for _, k, _, _ in entries) == nnz, 14, "counts")
    changes: dict[int, tuple[bool, int]] = {}
    for s, (c, k, code, offset) in enumerate(entries):
        _check(offset == start, 15, f"slice {s} at {offset}, wanted {start}")
        take = _Sections(encoded, start, frame_bytes)
        if k:
            found = _read_slice(take, c, k, code, e)
            changes |= {s * SLICE + place: change for place, change in found.items()}
        start = take.at
    _check((start + 7) // 8 * 8 == frame_bytes, 15, f"slices end at {start}, frame_bytes {frame_bytes}")
    _check(not any(encoded[start:frame_bytes]), 16, f"padding after byte {start}")
    return Delta(dtype, n, changes, frame_bytes)


def apply(frame: Delta, base: bytes) -> bytes:
    e = DTYPES[DTYPE_NUMBERS[frame.dtype]][1]
    assert len(base) == frame.n_elems * e
    out = bytearray(base)
    for i, (is_difference, number) in frame.changes.items():
        here = slice(i * e, (i + 1) * e)
        if is_difference:
            number += int.from_bytes(base[here], "little")
        out[here] = (number % 2 ** (8 * e)).to_bytes(e, "little")
    return bytes(out)


# ---- 11.4: checksums ----


def hash_of(key: int, i: int, bits: int) -> int:
    x = (i + 1) * 0x9E3779B97F4A7C15 + key & M64
    x ^= bits * 0xD6E8FEB86659FD93 & M64
    x = (x ^ x >> 32) * 0xD6E8FEB86659FD93 & M64
    return x ^ x >> 32


def checksum(x: bytes, dtype: str, key: int, first: int = 0) -> int:
    e = DTYPES[DTYPE_NUMBERS[dtype]][1]
    return sum(hash_of(key, first + i // e, int.from_bytes(x[i : i + e], "little")) for i in range(0, len(x), e)) & M64


# ---- writing ----


def _section(numbers: list[int], width: int) -> bytes:
    digits = "".join(f"{number:0{width}b}" for number in reversed(numbers)) if width else ""
    value = int(digits or "0", 2)
    return value.to_bytes(words(len(numbers) * width), "little")


def _write_slice(x: list[int], base: list[int], e: int, code: int | None) -> tuple[int, int, bytes]:
    """(k, code, bytes) of a slice. code None: the one of fewest bytes."""
    places = [i for i, (now, old) in enumerate(zip(x, base, strict=True)) if now != old]
    k = len(places)
    if k == 0:
        return 0, 0, b""
    numbers = []
    for i in places:
        d = (x[i] - base[i]) % 2 ** (8 * e)
        numbers.append(2 * d - 2 if d < 2 ** (8 * e - 1) else 2 * (2 ** (8 * e) - d) - 1)
    choices = []
    for number, w in enumerate(WIDTHS):
        if w < 8 * e and (code is None or code == number):
            raw = [x[i] for i, d in zip(places, numbers, strict=True) if d >= 2**w - 1]
            codes = [min(d, 2**w - 1) for d in numbers]
            choices.append((number, _section(codes, w) + _section(raw, 8 * e)))
    code, values = min(choices, key=lambda choice: len(choice[1]))
    low_bits, _, n_high = index_layout(len(x), k)
    low = _section([p % 2**low_bits for p in places], low_bits) if low_bits else b""
    set_bits = set(places if low_bits is None else [j + p // 2**low_bits for j, p in enumerate(places)])
    high = _section([int(bit in set_bits) for bit in range(n_high)], 1)
    return k, code, low + high + values


def encode(dtype: str, x: bytes, base: bytes, code: int | None = None) -> bytes:
    """The frame of x against base; with `code`, that one in all slices (0: raw)."""
    e = DTYPES[DTYPE_NUMBERS[dtype]][1]
    now, old = ([int.from_bytes(a[i : i + e], "little") for i in range(0, len(a), e)] for a in (x, base))
    slices = [_write_slice(now[s : s + SLICE], old[s : s + SLICE], e, code) for s in range(0, len(now), SLICE)]
    at, table = 32 + 8 * len(slices), b""
    for k, used, data in slices:
        table += struct.pack("<II", k | used << 20, at // 4)
        at += len(data)
    size = (at + 7) // 8 * 8
    head = HEADER.pack(b"SPCF", 2, 5, DTYPE_NUMBERS[dtype], 1, len(now), sum(k for k, _, _ in slices), size)
    frame = (head + table + b"".join(data for _, _, data in slices)).ljust(size, b"\0")
    assert apply(read_frame(frame), base) == x
    return frame
