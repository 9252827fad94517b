"""What the folder says of a version: `Manifest`, and `Latest`, both as JSON. A reader believes nothing in them.

{"spccl_sync": 1, "version", "epoch", "key", "parent": number or null, "parent_sha256": of its manifest, or null,
 "tensors": [{"name", "also": names of tensors in the same memory, "dtype", "shape", "sum_before": or null, "sum",
              "parts": [{"file": place in "delta", "offset", "bytes", "first", "n_elems", "nnz", "sum_change"}]}],
 "delta": [{"name", "bytes", "sha256"}], "anchor": [{"name", "bytes", "sha256", "tensors": places in "tensors"}]}

`parts` are the frames of docs/FORMAT.md, section 11, in tensor "frames" of a safetensors file; a part without change is
left out. Sums and the key are 16 hexadecimal digits. The first version, and a later one where the chain is long, has an
anchor: the tensors themselves. `Latest` has the number and the hash of the newest manifest, and each manifest that of
its parent: so a reader knows that all are of one chain, and whole.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
import re
from typing import Any

from spccl.errors import FormatError

FORMAT = 1
MOST_MANIFEST_BYTES = 1 << 28  # 1 million tensors
_MOST_ELEMS = 1 << 40  # of a frame; more in a tensor are in several
_MOST_DIMS = 64  # of torch
_MOST_COUNT = 1 << 50
_SUM = re.compile(r"[0-9a-f]{16}\Z")
_SHA256 = re.compile(r"[0-9a-f]{64}\Z")
_FILE = re.compile(r"(delta|anchor)-[0-9]{5}\.safetensors\Z")
MASK = (1 << 64) - 1
DTYPES = (
    *("float64", "float32", "bfloat16", "float16", "int64", "int32", "int16", "int8", "uint8", "uint16", "uint32"),
    *("uint64", "bool", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
)
"""Names of the dtypes that travel."""


@dataclasses.dataclass(frozen=True)
class Part:
    """A frame: what changed in elements first .. first + n_elems of a tensor. It lies at `offset` of a delta file."""

    file: int
    offset: int
    bytes: int
    first: int
    n_elems: int
    nnz: int
    sum_change: int


@dataclasses.dataclass(frozen=True)
class Entry:
    """A tensor. `also`: further names of the same memory; `sum_before`: None if the version has no parent."""

    name: str
    also: tuple[str, ...]
    dtype: str
    shape: tuple[int, ...]
    sum_before: int | None
    sum: int
    parts: tuple[Part, ...] = ()

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def kind(self) -> tuple[object, ...]:
        """What all versions of a tensor have in common."""
        return self.name, self.also, self.dtype, self.shape


@dataclasses.dataclass(frozen=True)
class File:
    """A file of a version. `tensors`: places of what an anchor's file holds."""

    name: str
    bytes: int
    sha256: str
    tensors: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Manifest:
    version: int
    epoch: int
    key: int
    parent: int | None
    parent_sha256: str | None
    tensors: tuple[Entry, ...]
    delta: tuple[File, ...]
    anchor: tuple[File, ...]

    @property
    def delta_bytes(self) -> int:
        return sum(file.bytes for file in self.delta)

    @property
    def anchor_bytes(self) -> int:
        return sum(file.bytes for file in self.anchor)

    def dump(self) -> bytes:
        tensors = [
            {
                "name": entry.name,
                "also": list(entry.also),
                "dtype": entry.dtype,
                "shape": list(entry.shape),
                "sum_before": None if entry.sum_before is None else _hex(entry.sum_before),
                "sum": _hex(entry.sum),
                "parts": [{**vars(part), "sum_change": _hex(part.sum_change)} for part in entry.parts],
            }
            for entry in self.tensors
        ]
        delta = [{"name": file.name, "bytes": file.bytes, "sha256": file.sha256} for file in self.delta]
        anchor = [{**vars(file), "tensors": list(file.tensors)} for file in self.anchor]
        whole = {**vars(self), "key": _hex(self.key), "tensors": tensors, "delta": delta, "anchor": anchor}
        return json.dumps({"spccl_sync": FORMAT, **whole}, separators=(",", ":")).encode()


@dataclasses.dataclass(frozen=True)
class Latest:
    """The file `latest`: the newest version, and the hash of its manifest."""

    version: int
    epoch: int
    sha256: str

    def dump(self) -> bytes:
        return json.dumps({"spccl_sync": FORMAT, **vars(self)}).encode()


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _hex(value: int) -> str:
    return f"{value & MASK:016x}"


@functools.cache
def _fields(names: str) -> frozenset[str]:
    return frozenset(names.split())


class _Reader:
    """Takes fields out of one JSON object, each of the type and within the bounds that are asked for."""

    def __init__(self, where: str, data: object, names: str):
        self.where, self.data = where, data
        wanted = _fields(names)
        if not isinstance(data, dict) or data.keys() != wanted:
            got = sorted(data) if isinstance(data, dict) else type(data).__name__
            raise self.fault(f"has {ascii(got)[:200]}, wanted the fields {sorted(wanted)}")

    def fault(self, text: str) -> FormatError:
        return FormatError(f"{self.where}: {text}")

    def number(self, name: str, least: int = 0, most: int = _MOST_COUNT) -> int:
        value = self.data[name]
        if type(value) is not int or not least <= value <= most:
            raise self.fault(f"{name} is {_short(value)}, wanted a number from {least} to {most}")
        return value

    def text(self, name: str, pattern: re.Pattern[str]) -> str:
        value = self.data[name]
        if not isinstance(value, str) or not pattern.match(value):
            raise self.fault(f"{name} is {_short(value)}, wanted {pattern.pattern}")
        return value

    def sum(self, name: str) -> int:
        return int(self.text(name, _SUM), 16)

    def items(self, name: str) -> list[Any]:
        if not isinstance(self.data[name], list):
            raise self.fault(f"{name} is {_short(self.data[name])}, wanted a list")
        return self.data[name]

    def absent(self, name: str) -> bool:
        return self.data[name] is None


def _short(value: object) -> str:
    return ascii(value)[:80]


def _object(where: str, data: bytes) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{where}: not JSON: {ascii(str(error))[:200]}") from error


_NAME = re.compile(r"[^\x00\ud800-\udfff]{1,4096}\Z")  # surrogates have no UTF-8


def parse_latest(where: str, data: bytes) -> Latest:
    """Raises: FormatError that begins with `where`."""
    read = _Reader(where, _object(where, data), "spccl_sync version epoch sha256")
    read.number("spccl_sync", FORMAT, FORMAT)
    return Latest(read.number("version", 1), read.number("epoch", 1), read.text("sha256", _SHA256))


def parse(where: str, data: bytes) -> Manifest:
    """Raises: FormatError that begins with `where` and names the tensor or file."""
    top = "spccl_sync version epoch key parent parent_sha256 tensors delta anchor"
    read = _Reader(where, _object(where, data), top)
    read.number("spccl_sync", FORMAT, FORMAT)
    version = read.number("version", 1)
    first = read.absent("parent")
    delta = _files(where, "delta", read.items("delta"))
    anchor = _files(where, "anchor", read.items("anchor"))
    tensors = tuple(_entry(where, data, delta, first) for data in read.items("tensors"))
    manifest = Manifest(
        version,
        read.number("epoch", 1),
        read.sum("key"),
        None if first else read.number("parent", version - 1, version - 1),
        None if first else read.text("parent_sha256", _SHA256),
        tensors,
        delta,
        anchor,
    )
    if first and (delta or not read.absent("parent_sha256")):
        raise read.fault(f"version {version} has no parent, wanted an anchor alone")
    if first and not anchor and any(entry.numel for entry in tensors):
        raise read.fault(f"version {version} has no parent and no anchor")
    names = [name for entry in tensors for name in (entry.name, *entry.also)]
    if len(set(names)) != len(names):
        seen: set[str] = set()
        twice = next(name for name in names if name in seen or seen.add(name))  # add returns None
        raise read.fault(f"tensor {_short(twice)} is there twice")
    _check_anchor(read, manifest)
    return manifest


def _files(where: str, kind: str, data: list[Any]) -> tuple[File, ...]:
    result = []
    for number, item in enumerate(data, 1):
        read = _Reader(f"{where}: {kind} {number}", item, f"name bytes sha256{' tensors' * (kind == 'anchor')}")
        if read.text("name", _FILE) != file_name(kind, number):
            raise read.fault(f"name is {_short(item['name'])}, wanted {file_name(kind, number)}")
        tensors = tuple(read.items("tensors")) if kind == "anchor" else ()
        result.append(File(item["name"], read.number("bytes"), read.text("sha256", _SHA256), tensors))
    return tuple(result)


def file_name(kind: str, number: int) -> str:
    return f"{kind}-{number:05d}.safetensors"


def _entry(where: str, data: object, delta: tuple[File, ...], first: bool) -> Entry:
    read = _Reader(f"{where}: a tensor", data, "name also dtype shape sum_before sum parts")
    name = read.text("name", _NAME)
    read.where = f"{where}: tensor {_short(name)}"
    also, shape = read.items("also"), read.items("shape")
    if not all(isinstance(other, str) and _NAME.match(other) for other in also):
        raise read.fault(f"also is {_short(also)}, wanted names")
    if len(shape) > _MOST_DIMS or not all(type(n) is int and 0 <= n <= _MOST_COUNT for n in shape):
        raise read.fault(f"shape is {_short(shape)}, wanted at most {_MOST_DIMS} numbers")
    if read.data["dtype"] not in DTYPES:
        raise read.fault(f"dtype is {_short(read.data['dtype'])}, wanted one of {', '.join(DTYPES)}")
    if first != read.absent("sum_before"):
        raise read.fault(f"sum_before is {_short(read.data['sum_before'])}, wanted one where there is a parent")
    before = None if first else read.sum("sum_before")
    parts = tuple(_part(read.where, item, delta) for item in read.items("parts"))
    entry = Entry(name, tuple(also), read.data["dtype"], tuple(shape), before, read.sum("sum"), parts)
    if entry.numel > _MOST_COUNT:
        raise read.fault(f"shape is {_short(shape)}, wanted at most {_MOST_COUNT} elements")
    end = 0
    for part in parts:
        if part.first < end or part.first + part.n_elems > entry.numel:
            raise read.fault(f"a part at {part.first} of {part.n_elems} elements overlaps, or lies outside")
        end = part.first + part.n_elems
    if before is not None and (before + sum(part.sum_change for part in parts)) & MASK != entry.sum:
        raise read.fault("sum is not sum_before and the changes of its parts")
    return entry


def _part(where: str, data: object, delta: tuple[File, ...]) -> Part:
    read = _Reader(f"{where}: a part", data, "file offset bytes first n_elems nnz sum_change")
    file, n_elems = read.number("file", 0, len(delta) - 1), read.number("n_elems", 1, _MOST_ELEMS)
    offset, n_bytes = read.number("offset"), read.number("bytes", 32)
    if offset % 8 or offset + n_bytes > delta[file].bytes:
        raise read.fault(f"{n_bytes} bytes at {offset} are not in {delta[file].name} of {delta[file].bytes} bytes")
    return Part(
        file, offset, n_bytes, read.number("first"), n_elems, read.number("nnz", 1, n_elems), read.sum("sum_change")
    )


def _check_anchor(read: _Reader, manifest: Manifest) -> None:
    """An anchor holds each tensor once."""
    if not manifest.anchor:
        return
    places = [place for file in manifest.anchor for place in file.tensors]
    wanted = [place for place, entry in enumerate(manifest.tensors) if entry.numel]
    if not all(type(place) is int for place in places) or sorted(places) != wanted:
        raise read.fault(f"the anchor's files hold tensors {_short(places)}, wanted each of {len(wanted)} once")
