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
import itertools
import json
import math
import re
import struct
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from spccl.errors import FormatError

FORMAT = 1
MOST_MANIFEST_BYTES = 1 << 28  # 1 million tensors
_MOST_ELEMS = 1 << 40  # of a frame; more in a tensor are in several
_MOST_DIMS = 64  # of torch
_MOST_COUNT = 1 << 50
_SUM, _SUMS = re.compile(r"[0-9a-f]{16}\Z"), re.compile(r"[0-9a-f]*\Z")
_SHA256 = re.compile(r"[0-9a-f]{64}\Z")
_FILE = re.compile(r"(delta|anchor)-[0-9]{5}\.safetensors\Z")
MASK = (1 << 64) - 1
DTYPES = (
    *("float64", "float32", "bfloat16", "float16", "int64", "int32", "int16", "int8", "uint8", "uint16", "uint32"),
    *("uint64", "bool", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
)
"""Names of the dtypes that travel."""


class Part(NamedTuple):
    """A frame: what changed in elements first .. first + n_elems of a tensor. It lies at `offset` of a delta file."""

    file: int
    offset: int
    bytes: int
    first: int
    n_elems: int
    nnz: int
    sum_change: int


class Entry(NamedTuple):
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
        return self[:4]


class File(NamedTuple):
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
        delta = [{"name": file.name, "bytes": file.bytes, "sha256": file.sha256} for file in self.delta]
        anchor = [{**file._asdict(), "tensors": list(file.tensors)} for file in self.anchor]
        whole = {**vars(self), "key": _hex(self.key), "tensors": [], "delta": delta, "anchor": anchor}
        text = json.dumps({"spccl_sync": FORMAT, **whole}, separators=(",", ":"))
        tensors = ",".join(map(_dumped, self.tensors))
        return text.replace('"tensors":[]', f'"tensors":[{tensors}]', 1).encode()


def _dumped(entry: Entry) -> str:
    """JSON of an entry. A model has hundreds of parts, and the numbers of each need no general writer."""
    before = "null" if entry.sum_before is None else f'"{entry.sum_before:016x}"'
    parts = ",".join([_PART % part for part in entry.parts])
    return f'{_dumped_kind(entry.kind)},"sum_before":{before},"sum":"{entry.sum:016x}","parts":[{parts}]}}'


_PART = '{"file":%d,"offset":%d,"bytes":%d,"first":%d,"n_elems":%d,"nnz":%d,"sum_change":"%016x"}'


@functools.lru_cache(1 << 14)
def _dumped_kind(kind: tuple[object, ...]) -> str:
    """The part of an entry's JSON that is the same in all versions, without its end."""
    return json.dumps(dict(zip(Entry._fields, kind, strict=False)), separators=(",", ":"))[:-1]


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


class _Rows:
    """Takes fields out of JSON objects of one kind, each of the type and within the bounds that are asked for. A field
    of all objects is checked at once: a model has hundreds of parts, and a check of each alone takes longer.

    Args: where: the place of an object in errors.
    """

    def __init__(self, where: Callable[[int], str], rows: Sequence[Any], names: Sequence[str]):
        self.where, self.rows = where, rows
        wanted = set(names)
        for i, row in enumerate(rows):
            if not isinstance(row, dict) or row.keys() != wanted:
                got = sorted(row) if isinstance(row, dict) else type(row).__name__
                raise self.fault(i, f"has {ascii(got)[:200]}, wanted the fields {sorted(wanted)}")

    def fault(self, i: int, text: str) -> FormatError:
        return FormatError(f"{self.where(i)}: {text}")

    def all(self, name: str) -> list[Any]:
        return [row[name] for row in self.rows]

    def require(self, name: str, fits: Callable[[Any], bool], wanted: str) -> None:
        """Raises: what names the first object whose field does not fit."""
        values = self.all(name)
        if not all(map(fits, values)):
            i, value = next((i, value) for i, value in enumerate(values) if not fits(value))
            raise self.fault(i, f"{name} is {_short(value)}, wanted {wanted}")

    def numbers(self, name: str, least: int = 0, most: int = _MOST_COUNT) -> list[int]:
        values = self.all(name)
        if not _are_numbers(values, least, most):
            fits = lambda x: type(x) is int and least <= x <= most  # noqa: E731
            self.require(name, fits, f"a number from {least} to {most}")
        return values

    def texts(self, name: str, pattern: re.Pattern[str]) -> list[str]:
        values = self.all(name)
        if values and (set(map(type, values)) != {str} or not all(map(pattern.match, values))):
            self.require(name, lambda x: isinstance(x, str) and bool(pattern.match(x)), pattern.pattern)
        return values

    def sums(self, name: str) -> list[int]:
        values = self.all(name)
        if not set(map(type, values)) <= {str} or not set(map(len, values)) <= {16} or not _SUMS.match("".join(values)):
            self.texts(name, _SUM)
        return list(struct.unpack(f">{len(values)}Q", bytes.fromhex("".join(values))))

    def lists(self, name: str) -> list[list[Any]]:
        values = self.all(name)
        if not set(map(type, values)) <= {list}:
            self.require(name, lambda x: isinstance(x, list), "a list")
        return values


class _Row(_Rows):
    """One object."""

    def __init__(self, where: str, data: object, names: str):
        super().__init__(lambda _: where, [data], names.split())

    def number(self, name: str, least: int = 0, most: int = _MOST_COUNT) -> int:
        return self.numbers(name, least, most)[0]

    def text(self, name: str, pattern: re.Pattern[str]) -> str:
        return self.texts(name, pattern)[0]

    def absent(self, name: str) -> bool:
        return self.rows[0][name] is None


def _are_numbers(values: Sequence[Any], least: int, most: int) -> bool:
    return not values or (set(map(type, values)) == {int} and min(values) >= least and max(values) <= most)


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
    read = _Row(where, _object(where, data), "spccl_sync version epoch sha256")
    read.number("spccl_sync", FORMAT, FORMAT)
    return Latest(read.number("version", 1), read.number("epoch", 1), read.text("sha256", _SHA256))


def parse(where: str, data: bytes) -> Manifest:
    """Raises: FormatError that begins with `where` and names the tensor or file."""
    top = "spccl_sync version epoch key parent parent_sha256 tensors delta anchor"
    read = _Row(where, _object(where, data), top)
    read.number("spccl_sync", FORMAT, FORMAT)
    version = read.number("version", 1)
    first = read.absent("parent")
    delta = _files(where, "delta", read.lists("delta")[0])
    anchor = _files(where, "anchor", read.lists("anchor")[0])
    manifest = Manifest(
        version,
        read.number("epoch", 1),
        read.sums("key")[0],
        None if first else read.number("parent", version - 1, version - 1),
        None if first else read.text("parent_sha256", _SHA256),
        _entries(where, read.lists("tensors")[0], delta, first),
        delta,
        anchor,
    )
    if first and (delta or not read.absent("parent_sha256")):
        raise read.fault(0, f"version {version} has no parent, wanted an anchor alone")
    if first and not anchor and any(entry.numel for entry in manifest.tensors):
        raise read.fault(0, f"version {version} has no parent and no anchor")
    names = [name for entry in manifest.tensors for name in (entry.name, *entry.also)]
    if len(set(names)) != len(names):
        seen: set[str] = set()
        twice = next(name for name in names if name in seen or seen.add(name))  # add returns None
        raise read.fault(0, f"tensor {_short(twice)} is there twice")
    _check_anchor(read, manifest)
    return manifest


def _files(where: str, kind: str, data: list[Any]) -> tuple[File, ...]:
    is_anchor = kind == "anchor"
    read = _Rows(lambda i: f"{where}: {kind} {i + 1}", data, File._fields if is_anchor else File._fields[:3])
    for i, name in enumerate(read.texts("name", _FILE)):
        if name != file_name(kind, i + 1):
            raise read.fault(i, f"name is {_short(name)}, wanted {file_name(kind, i + 1)}")
    tensors = map(tuple, read.lists("tensors")) if is_anchor else [()] * len(data)
    return tuple(map(File, read.all("name"), read.numbers("bytes"), read.texts("sha256", _SHA256), tensors))


def file_name(kind: str, number: int) -> str:
    return f"{kind}-{number:05d}.safetensors"


def _is_shape(shape: list[Any]) -> bool:
    return len(shape) <= _MOST_DIMS and _are_numbers(shape, 0, _MOST_COUNT)


def _entries(where: str, data: list[Any], delta: tuple[File, ...], first: bool) -> tuple[Entry, ...]:
    read = _Rows(lambda _: f"{where}: a tensor", data, Entry._fields)
    names = read.texts("name", _NAME)
    read.where = lambda i: f"{where}: tensor {_short(names[i])}"
    also, shapes = read.lists("also"), read.lists("shape")
    if any(also):
        read.require("also", lambda x: all(isinstance(name, str) and _NAME.match(name) for name in x), "names")
    n_dims = max(map(len, shapes), default=0)
    if n_dims > _MOST_DIMS or not _are_numbers([n for shape in shapes for n in shape], 0, _MOST_COUNT):
        read.require("shape", _is_shape, f"at most {_MOST_DIMS} numbers")
    read.require("dtype", DTYPES.__contains__, f"one of {', '.join(DTYPES)}")
    read.require("sum_before", lambda x: first == (x is None), "one where there is a parent")
    before = [None] * len(data) if first else read.sums("sum_before")
    n_parts = list(map(len, read.lists("parts")))
    parts = iter(_parts(read, n_parts, delta))
    own = (tuple(itertools.islice(parts, n)) for n in n_parts)
    kinds = names, map(tuple, also), read.all("dtype"), map(tuple, shapes)
    entries = tuple(map(Entry, *kinds, before, read.sums("sum"), own))
    for i, entry in enumerate(entries):
        end, sum_after, numel = 0, entry.sum_before, entry.numel
        if numel > _MOST_COUNT:
            raise read.fault(i, f"shape is {_short(shapes[i])}, wanted at most {_MOST_COUNT} elements")
        for _, _, _, start, n_elems, _, change in entry.parts:
            if start < end or start + n_elems > numel:
                raise read.fault(i, f"a part at {start} of {n_elems} elements overlaps, or lies outside")
            end = start + n_elems
            sum_after = change if sum_after is None else sum_after + change
        if not first and sum_after & MASK != entry.sum:
            raise read.fault(i, "sum is not sum_before and the changes of its parts")
    return entries


def _parts(tensors: _Rows, n_parts: Sequence[int], delta: tuple[File, ...]) -> list[Part]:
    """Those of all tensors, in order. Args: n_parts: of each tensor."""
    owner = [i for i, n in enumerate(n_parts) for _ in range(n)]
    data = [part for parts in tensors.all("parts") for part in parts]
    read = _Rows(lambda i: f"{tensors.where(owner[i])}: a part", data, Part._fields)
    columns = [
        read.numbers("file", 0, len(delta) - 1),
        read.numbers("offset"),
        read.numbers("bytes", 32),
        read.numbers("first"),
        read.numbers("n_elems", 1, _MOST_ELEMS),
        read.numbers("nnz", 1),
        read.sums("sum_change"),
    ]
    parts = list(map(Part, *columns))
    sizes = [file.bytes for file in delta]
    for i, (file, offset, n_bytes, _, n_elems, nnz, _) in enumerate(parts):
        if offset % 8 or offset + n_bytes > sizes[file]:
            raise read.fault(i, f"{n_bytes} bytes at {offset} are not in {delta[file].name} of {sizes[file]} bytes")
        if nnz > n_elems:
            raise read.fault(i, f"nnz is {nnz}, wanted a number from 1 to {n_elems}")
    return parts


def _check_anchor(read: _Rows, manifest: Manifest) -> None:
    """An anchor holds each tensor once."""
    if not manifest.anchor:
        return
    places = [place for file in manifest.anchor for place in file.tensors]
    wanted = [place for place, entry in enumerate(manifest.tensors) if entry.numel]
    if not all(type(place) is int for place in places) or sorted(places) != wanted:
        raise read.fault(0, f"the anchor's files hold tensors {_short(places)}, wanted each of {len(wanted)} once")
