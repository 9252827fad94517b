"""Where a receiver's versions come from. What reads them does not know the difference."""

from __future__ import annotations

from pathlib import Path

from spccl.errors import FormatError

from . import _blob, _folder
from .manifest import MOST_MANIFEST_BYTES, File, Latest, Manifest


class Source:
    """Versions by number. str(): its name in errors."""

    def where(self, version: int, name: str) -> str:
        """The name of a version's file in errors."""
        return f"{self}/{_folder.version_name(version)}/{name}"

    def latest(self) -> Latest | None:
        """None: no version was published yet."""
        raise NotImplementedError

    def versions(self) -> list[int]:
        raise NotImplementedError

    def manifest(self, version: int, wanted: str) -> Manifest:
        """Args: wanted: the hash that the next version or `latest` says. Raises: FormatError, SystemCallError."""
        raise NotImplementedError

    def open(self, version: int, file: File) -> _blob.Blob:
        """A file whose size and hash are the manifest's; it is read later. Raises: FormatError, SystemCallError."""
        raise NotImplementedError

    def load(self, version: int, file: File) -> _blob.InMemory:
        """As `open`; it is read now."""
        raise NotImplementedError

    def delta_bytes(self, manifest: Manifest) -> float:
        """Bytes of a version's delta; infinity: it is not to be had."""
        return manifest.delta_bytes

    def anchor_bytes(self, manifest: Manifest) -> float:
        """Bytes of a version's anchor; infinity: it is not to be had."""
        return manifest.anchor_bytes if manifest.anchor else float("inf")


class Folder(Source):
    """The folder of a publisher, or a copy of it."""

    def __init__(self, path: Path):
        self.path = path

    def __str__(self) -> str:
        return str(self.path)

    def latest(self) -> Latest | None:
        return _folder.read_latest(self.path)

    def versions(self) -> list[int]:
        return _folder.versions_in(self.path)

    def manifest(self, version: int, wanted: str) -> Manifest:
        where = self.where(version, _folder.MANIFEST)
        try:
            data = _folder.read_bytes(where, MOST_MANIFEST_BYTES)
        except FileNotFoundError as error:
            raise _missing(where) from error
        except OSError as error:
            raise _blob.system_error("sync", where, error) from error
        return _blob.checked_manifest(where, data, version, wanted)

    def open(self, version: int, file: File) -> _blob.OnDisk:
        where = self.where(version, file.name)
        try:
            return _blob.OnDisk(where).check(file)
        except FileNotFoundError as error:
            raise _missing(where) from error
        except OSError as error:
            raise error if hasattr(error, "status") else _blob.system_error("sync", where, error) from error

    def load(self, version: int, file: File) -> _blob.InMemory:
        where = self.where(version, file.name)
        try:
            opened = _blob.OnDisk(where)
            try:
                data = opened.read(0, min(opened.n_bytes, file.bytes + 1))
            finally:
                opened.close()
        except FileNotFoundError as error:
            raise _missing(where) from error
        except (OSError, MemoryError) as error:
            raise error if hasattr(error, "status") else _blob.system_error("sync", where, error) from error
        return _blob.InMemory(where, data).check(file)


def _missing(where: str) -> FormatError:
    return _blob.not_whole(f"{where}: missing: the folder is not copied whole, or the version was removed")
