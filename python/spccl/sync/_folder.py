"""The folder of a run: names, whole files that appear by rename, hashes, safetensors files.

    v000007/manifest.json, delta-00001.safetensors, ..., anchor-00001.safetensors, ...    a version
    latest            the newest version: number and hash of its manifest
    publisher.lock    see _lock.py
    .unfinished-*     what a publisher is writing or removing; the next one removes what is left

A version is written under a name .unfinished-*, synced to the disk, and renamed. `latest` names it after that.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from spccl.errors import FormatError, UnsupportedError

from ._blob import not_whole, open_regular, system_error
from .manifest import File, Latest, parse_latest

if TYPE_CHECKING:
    import torch

UNFINISHED = ".unfinished-"
LATEST, MANIFEST = "latest", "manifest.json"
_VERSION = re.compile(r"v([0-9]{6,15})\Z")


def version_name(version: int) -> str:
    return f"v{version:06d}"


def versions_in(folder: Path) -> list[int]:
    """The numbers of the versions whose folders are there."""
    found = (_VERSION.match(name) for name in os.listdir(folder))
    return sorted(int(match[1]) for match in found if match)


def read_bytes(path: str | Path, most: int) -> bytes:
    """A small file. Raises: FormatError if it is none, or longer than `most`; FileNotFoundError."""
    with open(open_regular(str(path)), "rb") as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise FormatError(f"{path}: more than {most} bytes")
    return data


def write_bytes(path: Path, data: bytes) -> None:
    """A small file, synced to the disk."""
    with open(path, "xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Names in a folder reach the disk."""
    opened = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def replace_latest(folder: Path, latest: Latest) -> None:
    made = folder / f"{UNFINISHED}latest"
    made.unlink(missing_ok=True)
    write_bytes(made, latest.dump())
    os.replace(made, folder / LATEST)


def remove_version(folder: Path, version: int) -> None:
    """A version's folder. It goes under its name at once, so that no reader finds half of it."""
    gone = folder / f"{UNFINISHED}gone-{version_name(version)}"
    shutil.rmtree(gone, ignore_errors=True)
    os.rename(folder / version_name(version), gone)
    shutil.rmtree(gone)


def remove_unfinished(folder: Path) -> None:
    """What earlier publishers of this folder left. Only the holder of the lock may call it."""
    for name in os.listdir(folder):
        if name.startswith(UNFINISHED):
            path = folder / name
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)


def read_latest(folder: Path) -> Latest | None:
    """None: no version was published yet. Raises: FormatError, SystemCallError."""
    path = folder / LATEST
    try:
        return parse_latest(str(path), read_bytes(path, 4096))
    except FileNotFoundError:
        return None
    except FormatError as error:
        raise not_whole(str(error)) from error
    except OSError as error:
        raise system_error("sync", path, error) from error


def need_safetensors() -> None:
    """Raises: UnsupportedError that says what to install."""
    try:
        import numpy  # noqa: F401 (safetensors writes torch tensors with it)
        import safetensors
        import safetensors.torch
    except ImportError as error:
        text = f'spccl.sync needs safetensors and numpy: pip install "safetensors>=0.8" numpy ({error})'
        raise UnsupportedError(text) from error
    if not hasattr(safetensors, "TensorSpec"):
        found = f"this is {safetensors.__version__}"
        raise UnsupportedError(f'spccl.sync needs safetensors 0.8 or later, {found}: pip install "safetensors>=0.8"')


def write_tensors(folder: Path, name: str, tensors: dict[str, torch.Tensor], places: tuple[int, ...]) -> File:
    """A safetensors file, synced to the disk and read back for its hash. Args: places: `File.tensors`."""
    import safetensors
    import safetensors.torch

    path = folder / name
    try:
        safetensors.torch.save_file({name: x.cpu() for name, x in tensors.items()}, path)
        os.chmod(path, 0o666 & os.stat(path.parent).st_mode)  # safetensors makes it readable for this user alone
        opened = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        with open(opened, "rb") as file:
            os.fsync(opened)
            return File(path.name, os.fstat(opened).st_size, hashlib.file_digest(file, "sha256").hexdigest(), places)
    except (OSError, safetensors.SafetensorError, MemoryError) as error:
        raise system_error("publisher", path, error) from error
