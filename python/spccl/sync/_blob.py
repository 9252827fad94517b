"""The bytes of a version's file, checked once and held until they are applied, and the safetensors in them.

A receiver reads safetensors with this file alone, so that what it decodes is what it hashed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import stat
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from spccl.errors import FormatError, OutOfMemoryError, SystemCallError

from . import delta
from .manifest import File, Manifest, parse, sha256

_MOST_HEADER_BYTES = 100_000_000  # of safetensors
_MOST_OPEN = 256  # files that stay open between stage and commit
_BLOCK_BYTES = 1 << 22
_DTYPES = {  # safetensors' names of the dtypes in manifest.DTYPES
    **{f"F{n}": f"float{n}" for n in (16, 32, 64)},
    **{f"I{n}": f"int{n}" for n in (8, 16, 32, 64)},
    **{f"U{n}": f"uint{n}" for n in (8, 16, 32, 64)},
    "BF16": "bfloat16",
    "BOOL": "bool",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2": "float8_e5m2",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
}


def not_whole(text: str) -> FormatError:
    """The error of a file that may still be on its way: `Subscriber` waits for it, if it has time."""
    error = FormatError(text)
    error.not_whole = True
    return error


def system_error(who: str, path: object, error: Exception) -> SystemCallError | OutOfMemoryError:
    """An error of a system call, or of safetensors, as spccl's."""
    if isinstance(error, MemoryError):
        return OutOfMemoryError(f"{who}: {path}: out of memory")
    made = SystemCallError(f"{who}: {path}: {error}")
    made.errno = getattr(error, "errno", None)
    return made


class Blob:
    """Bytes that a manifest describes. `where`: their name in errors."""

    where: str
    n_bytes: int

    def read(self, first: int, n_bytes: int) -> torch.Tensor:
        """Some of them, [n_bytes] uint8 on the CPU."""
        raise NotImplementedError

    def close(self) -> None:
        """Give back what holds them."""


class InMemory(Blob):
    """Bytes that lie in a tensor, [n_bytes] uint8 on the CPU."""

    def __init__(self, where: str, data: torch.Tensor):
        self.where, self.data, self.n_bytes = where, data, data.numel()

    def read(self, first: int, n_bytes: int) -> torch.Tensor:
        return self.data[first : first + n_bytes]

    def check(self, file: File) -> InMemory:
        """Raises: FormatError if size or hash are not those of the manifest."""
        _check_size(self.where, self.n_bytes, file)
        _check_hash(self.where, _sha256(self.data), file)
        return self


class Frames(InMemory):
    """The frames of a delta as they are, [n_bytes] uint8 on any device, from a multiple of 8 bytes on."""

    def check(self, file: File) -> Frames:
        _check_size(self.where, self.n_bytes, file)
        by_sum = file.sha256.startswith(_BY_SUM)
        _check_hash(self.where, _sum_digest(self.data) if by_sum else _sha256(self.data), file)
        return self


_BY_SUM = "0" * 48  # no SHA-256 that is met in practice begins so


def digest(frames: torch.Tensor) -> str:
    """What `File.sha256` says of frames: their SHA-256; on a GPU, where all are of one group, a checksum of 64 bits."""
    return _sha256(frames) if frames.device.type == "cpu" else _sum_digest(frames)


def _sha256(data: torch.Tensor) -> str:
    return hashlib.sha256(memoryview(data.cpu().numpy())).hexdigest()


def _sum_digest(data: torch.Tensor) -> str:
    return f"{_BY_SUM}{delta.checksum(data, 0):016x}"


class OnDisk(Blob):
    """A file that stays open, so that it is read though its name is gone. Of many, the later ones are opened again.

    A file that was changed in place since it was hashed is refused.
    """

    _n_open = 0

    def __init__(self, path: str):
        self.where = path
        self._opened = open_regular(path)
        OnDisk._n_open += 1
        self._identity = _identity(self._opened)
        self.n_bytes = os.fstat(self._opened).st_size

    def check(self, file: File) -> OnDisk:
        """Raises: FormatError if size or hash are not those of the manifest."""
        try:
            _check_size(self.where, self.n_bytes, file)
            digest = hashlib.sha256()
            for first in range(0, self.n_bytes, _BLOCK_BYTES):
                block = self.read(first, min(_BLOCK_BYTES, self.n_bytes - first))
                digest.update(memoryview(block.numpy()))
            _check_hash(self.where, digest.hexdigest(), file)
        except BaseException:
            self.close()
            raise
        if OnDisk._n_open > _MOST_OPEN:
            self.close()
        return self

    def read(self, first: int, n_bytes: int) -> torch.Tensor:
        out = torch.empty(n_bytes, dtype=torch.uint8)
        left, at = memoryview(out.numpy()), first
        with self._file() as opened:
            while left:
                n = os.preadv(opened, [left], at)
                if n == 0:
                    break
                left, at = left[n:], at + n
            if left or _identity(opened) != self._identity:
                raise FormatError(f"{self.where}: changed while it was read")
        return out

    @contextlib.contextmanager
    def _file(self) -> Iterator[int]:
        if self._opened is not None:
            yield self._opened
            return
        opened = open_regular(self.where)
        try:
            yield opened
        finally:
            os.close(opened)

    def close(self) -> None:
        opened, self._opened = self._opened, None
        if opened is not None:
            OnDisk._n_open -= 1
            os.close(opened)

    def __del__(self) -> None:
        if hasattr(self, "_identity"):
            self.close()


def open_regular(path: str) -> int:
    """A file for reading; a pipe or a device, which might never end, is refused. Raises: FormatError, OSError."""
    opened = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if stat.S_ISREG(os.fstat(opened).st_mode):
        return opened
    os.close(opened)
    raise FormatError(f"{path}: not a regular file")


def _identity(opened: int) -> tuple[int, ...]:
    """What tells whether a file is the same and unchanged. Not ctime: removing a name changes that."""
    found = os.fstat(opened)
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def _check_size(where: str, n_bytes: int, file: File) -> None:
    if n_bytes != file.bytes:
        text = f"{where}: {n_bytes} bytes, wanted {file.bytes}: cut short, or not copied whole"
        raise not_whole(text) if n_bytes < file.bytes else FormatError(text)


def _check_hash(where: str, found: str, file: File) -> None:
    if found != file.sha256 and found.startswith(_BY_SUM):
        raise FormatError(f"{where}: its checksum is {found[48:]}, wanted {file.sha256[48:]}: damaged")
    if found != file.sha256:
        raise FormatError(f"{where}: its SHA-256 is {found[:16]}..., wanted {file.sha256[:16]}...: damaged")


def checked_manifest(where: str, data: bytes, version: int, wanted: str) -> Manifest:
    """Args: wanted: the hash that the next version or `latest` says.
    Raises: FormatError if the bytes have another hash, or break a rule."""
    found = sha256(data)
    if found != wanted:
        text = f"{where}: its SHA-256 is {found[:16]}..., wanted {wanted[:16]}...: damaged, or of another run"
        raise not_whole(text)
    manifest = parse(where, data)
    if manifest.version != version:
        raise FormatError(f"{where}: is version {manifest.version}")
    return manifest


class Header(NamedTuple):
    """A tensor of a safetensors file: its bytes are `n_bytes` from `first` on."""

    dtype: str
    shape: tuple[int, ...]
    first: int
    n_bytes: int


def headers(blob: Blob) -> dict[str, Header]:
    """What a safetensors file holds. Raises: FormatError."""
    if blob.n_bytes < 8:
        raise FormatError(f"{blob.where}: {blob.n_bytes} bytes are no safetensors file")
    n = int.from_bytes(blob.read(0, 8).numpy().tobytes(), "little")
    if n > min(blob.n_bytes - 8, _MOST_HEADER_BYTES):
        raise FormatError(f"{blob.where}: a safetensors header of {n} bytes does not fit")
    try:
        found = json.loads(blob.read(8, n).numpy().tobytes())
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{blob.where}: its header is not JSON: {ascii(str(error))[:200]}") from error
    if not isinstance(found, dict):
        raise FormatError(f"{blob.where}: its header is no JSON object")
    found.pop("__metadata__", None)
    return {name: _header(blob, name, entry, 8 + n) for name, entry in found.items()}


def _header(blob: Blob, name: str, entry: Any, start: int) -> Header:
    def is_numbers(value: Any) -> bool:
        return isinstance(value, list) and all(type(x) is int and 0 <= x < 1 << 50 for x in value)

    fits = (
        isinstance(entry, dict)
        and isinstance(entry.get("dtype"), str)
        and entry["dtype"] in _DTYPES
        and is_numbers(entry.get("shape"))
        and len(entry["shape"]) <= 64
        and is_numbers(entry.get("data_offsets"))
        and len(entry["data_offsets"]) == 2
    )
    if fits:
        dtype, (first, end) = _DTYPES[entry["dtype"]], entry["data_offsets"]
        n_bytes = math.prod(entry["shape"]) * getattr(torch, dtype).itemsize
        if first + n_bytes == end <= blob.n_bytes - start:
            return Header(dtype, tuple(entry["shape"]), start + first, n_bytes)
    raise FormatError(f"{blob.where}: tensor {name[:80]!a} is {ascii(entry)[:200]}, which is no tensor in this file")


def tensor(blob: Blob, header: Header) -> torch.Tensor:
    """A tensor of a safetensors file, on the CPU."""
    data = blob.read(header.first, header.n_bytes)
    if data.storage_offset() % 8:  # in memory, behind a header of any length
        data = data.clone()
    return data.view(getattr(torch, header.dtype)).view(header.shape)


def dumped(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """The bytes of a safetensors file of CPU tensors, [n_bytes] uint8."""
    names = {dtype: name for name, dtype in _DTYPES.items()}
    order = sorted(tensors, key=lambda name: -tensors[name].itemsize)  # so that all are aligned
    head, end = {}, 0
    for name in order:
        x = tensors[name]
        first, end = end, end + x.numel() * x.itemsize
        dtype = names[str(x.dtype).removeprefix("torch.")]
        head[name] = {"dtype": dtype, "shape": list(x.shape), "data_offsets": [first, end]}
    text = json.dumps(head, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    out = torch.empty(8 + len(text) + end, dtype=torch.uint8)
    out[:8] = torch.frombuffer(bytearray(len(text).to_bytes(8, "little")), dtype=torch.uint8)
    out[8 : 8 + len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    at = 8 + len(text)
    for name in order:
        data = tensors[name].detach().contiguous().reshape(-1).view(torch.uint8)
        out[at : at + data.numel()] = data
        at += data.numel()
    return out


def file_of(name: str, data: torch.Tensor, places: tuple[int, ...]) -> File:
    """What a manifest says of a file. Args: data: its bytes."""
    return File(name, data.numel(), _sha256(data), places)
