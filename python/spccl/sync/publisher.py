"""`Publisher`: writes the versions of a model to a folder."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import weakref
from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import torch

from spccl.errors import ArgumentError, MismatchError, StateError

from . import _encode, _folder, _route, _staged, delta
from ._base import Base
from ._encode import Writer
from ._lock import Lock
from ._source import Folder
from ._tensors import Model, Named, Tensors, dtype_name
from .manifest import Entry, Latest, Manifest, sha256
from .subscriber import LEAST_STAGING_BYTES, Subscriber


class _Link(NamedTuple):
    """What a publisher remembers of an older version."""

    version: int
    delta_bytes: int
    has_anchor: bool

    @classmethod
    def of(cls, manifest: Manifest) -> _Link:
        return cls(manifest.version, manifest.delta_bytes, bool(manifest.anchor))


class Publisher:
    """Writes what changed in a model's weights as versions in a folder, for any number of `Subscriber`.

        push = spccl.sync.Publisher("/shared/run1", model, wire_dtype=torch.bfloat16)
        ...
        optimizer.step()
        version = push.publish()

    The first version is an anchor: the weights themselves. A later one is a delta: what differs from the version
    before, of which this object keeps a copy (`base`). Where the deltas since the last anchor are more than
    `anchor_share` of the weights, the version has an anchor too. Versions appear whole or not at all.

    A folder has one publisher: the lock names it. A publisher that starts in a folder with versions reads the newest
    one as its base and goes on from there.

    Args:
        folder: on a disk that the receivers see, or that `after_write` copies. It is made if it is not there. Or a
            group with the receivers: see `GroupPublisher`.
        tensors: a model, or tensors by name; tied weights travel once. On one device, dense.
        wire_dtype: float32 tensors are rounded to this dtype, bfloat16 or float16, or those that a mapping names. None:
            all travel as they are.
        keep: versions that stay, with the anchor before them and what lies between.
        anchor_share: see above; 0: every version has an anchor.
        staging_bytes: the most bytes of encoded changes in memory; None: 1/8 of the weights, at least 4 MiB.
        key: of the checksums, 64 bits; None: chosen at random with version 1.
        base: where the copy of the last version is: "device", with the tensors; "pinned", in pinned memory of the host,
            for tensors on a GPU; or a model or tensors, with the names, shapes and dtypes that travel, on the tensors'
            device: the live copy of float32 masters. Then there is no other one: `publish` compares the rounded masters
            with it, and overwrites it when the version is in place. Nothing else may write to it. In a folder that has
            versions it becomes the newest one here.
        raw: True: deltas hold the new values as they are, for readers that have no old ones; up to twice the bytes.
        before_write, after_write: called with the folder's path before a version is written, with the version's path
            when it is there. What `after_write` raises passes through: the version stays published.

    One thread at a time, one process: ranks that hold shards gather the weights on one of them first. `close`, or a
    `with` block, gives the lock back. Source: docs/SYNC.md.
    """

    def __init__(
        self,
        folder: str | Path,
        tensors: Tensors,
        *,
        wire_dtype: torch.dtype | Mapping[str, torch.dtype] | None = None,
        keep: int = 4,
        anchor_share: float = 0.5,
        staging_bytes: int | None = None,
        key: int | None = None,
        base: str | Tensors = "device",
        raw: bool = False,
        before_write: Callable[[Path], object] | None = None,
        after_write: Callable[[Path], object] | None = None,
    ):
        if keep < 1 or anchor_share < 0:
            raise ArgumentError(f"publisher: keep={keep}, anchor_share={anchor_share}: wanted at least 1, at least 0")
        _folder.need_safetensors()
        self.folder = Path(folder)
        self._source = Folder(self.folder)
        self.keep, self.anchor_share, self.raw = keep, anchor_share, raw
        self.before_write, self.after_write = before_write, after_write
        self._begin(tensors, wire_dtype, staging_bytes, key, base)
        self._latest: Latest | None = None
        self._pending: Latest | None = None  # what `latest` may be after a publish that failed
        self._chain: list[_Link] = []
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            found = _folder.read_latest(self.folder)
            self._lock = Lock(self.folder, 1 if found is None else found.epoch + 1)
        except OSError as error:
            raise _folder.system_error("publisher", self.folder, error) from error
        self._finalizer = weakref.finalize(self, self._lock.release)
        try:
            self._clean()
            self._seed(key)
        except BaseException:
            self.close()
            raise

    def __new__(cls, folder: object = None, *_args: object, **_kwargs: object) -> Publisher:
        if cls is Publisher and not isinstance(folder, (str, os.PathLike)):
            from .group import GroupPublisher

            cls = GroupPublisher
        return object.__new__(cls)

    def _begin(
        self, tensors: Tensors, wire_dtype: Any, staging_bytes: int | None, key: int | None, base: str | Tensors
    ) -> None:
        """The part that does not depend on where versions go."""
        if key is not None and not 0 <= key < 1 << 64:
            raise ArgumentError(f"publisher: key={key}: wanted 64 bits")
        self._model = Model("publisher", tensors)
        self._tensors = self._model.named()
        self._dtypes = [_wire_dtype(one, wire_dtype) for one in self._tensors]
        self._check_names(wire_dtype)
        pairs = zip(self._tensors, self._dtypes, strict=True)
        self.weights_bytes = sum(one.tensor.numel() * dtype.itemsize for one, dtype in pairs)
        self.staging_bytes = (
            max(self.weights_bytes // 8, LEAST_STAGING_BYTES) if staging_bytes is None else staging_bytes
        )
        self._key = secrets.randbits(64) if key is None else key
        self._kinds = [entry.kind for entry in self._entries()]
        self._cuts = _encode.Cuts()
        self._all_whole = False  # whether all receivers hold whole tensors; a folder does not know its receivers
        self.base: list[torch.Tensor] = []
        self._base = Base(base, self._entries(), self._tensors)
        self._have: _route.Have | None = None  # what `base` holds
        self._stats: dict[str, int] = {}

    def __enter__(self) -> Publisher:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Give the lock back. Versions stay."""
        self._finalizer()

    @property
    def version(self) -> int | None:
        """The newest version of the folder; None: there is none yet."""
        return None if self._latest is None else self._latest.version

    @property
    def epoch(self) -> int:
        """Counts the publishers of this folder."""
        return self._lock.epoch

    def stats(self) -> dict[str, int]:
        """Memory: base_bytes (0: a live copy is the base), staging_bytes (the most). Of the last `publish`, once there
        is one: version, delta_bytes, anchor_bytes (0: it has none), elements, changed (elements)."""
        base_bytes = 0 if self._base.is_live else sum(x.numel() * x.itemsize for x in self.base)
        return {"base_bytes": base_bytes, "staging_bytes": self.staging_bytes, **self._stats}

    def _check_names(self, wire_dtype: object) -> None:
        names = {name for one in self._tensors for name in one.names}
        unknown = sorted(set(wire_dtype) - names) if isinstance(wire_dtype, Mapping) else []
        if unknown:
            raise ArgumentError(f"publisher: wire_dtype names {unknown[0]!r}, which is none of the tensors")

    def _clean(self) -> None:
        """Remove what a publisher that was killed left: unfinished files, a version that `latest` does not name yet.

        Raises: StateError if there are other versions behind the one that `latest` names.
        """
        try:
            _folder.remove_unfinished(self.folder)
            latest = _folder.read_latest(self.folder)
            newest = 0 if latest is None else latest.version
            later = [version for version in _folder.versions_in(self.folder) if version > newest]
            if later not in ([], [newest + 1]):
                raise StateError(
                    f"publisher: {self.folder / _folder.LATEST} names version {newest or 'none'}, the folder has "
                    f"{later[-1]}: put `latest` back, or remove the versions that it does not name"
                )
            for version in later:
                _folder.remove_version(self.folder, version)
        except OSError as error:
            raise _folder.system_error("publisher", self.folder, error) from error

    def _seed(self, key: int | None) -> None:
        """Take the newest version of the folder as the base, as a receiver reads it."""
        self._have, self._latest = None, _folder.read_latest(self.folder)
        if self._latest is None:
            return
        newest = self._source.manifest(self._latest.version, self._latest.sha256)
        _require_same(self.folder, newest, self._entries())
        if key not in (None, newest.key):
            raise ArgumentError(f"publisher: key={key:#x}, {self.folder} has {newest.key:#x}: leave it out")
        self._take_base(self._now())
        bases = zip(self._tensors, self.base, strict=True)
        places = {one.name: [delta.Place.whole(x)] if x.numel() else [] for one, x in bases}
        reader = Subscriber(self.folder, places=places, staging_bytes=self.staging_bytes)
        reader.apply(self._latest.version)
        self._have, self._key = reader._have, newest.key
        self._chain = self._read_chain(newest)

    def _read_chain(self, manifest: Manifest) -> list[_Link]:
        """The versions back to the oldest one that is there, oldest first."""
        chain = [_Link.of(manifest)]
        there = set(_folder.versions_in(self.folder))
        while manifest.parent in there:
            manifest = self._source.manifest(manifest.parent, str(manifest.parent_sha256))
            chain.append(_Link.of(manifest))
        return chain[::-1]

    def _entries(self) -> list[Entry]:
        pairs = zip(self._tensors, self._dtypes, strict=True)
        return [Entry(one.name, one.also, dtype_name(dtype), tuple(one.tensor.shape), None, 0) for one, dtype in pairs]

    def _take_base(self, now: _encode.Pairs) -> None:
        """`base` becomes memory with any values, or the live copy as it is."""
        if self._base.is_live:
            self.base = self._base.find(self._entries(), self._tensors)
        elif not self.base:
            self._cuts = _encode.Cuts()  # it may hold one that was lost
            self.base = self._base.make([x for x, _ in now], self._dtypes)

    def _now(self) -> list[tuple[torch.Tensor, torch.dtype]]:
        """The tensors as they are, and their dtypes on the wire.

        Raises: MismatchError if a tensor has another name, shape, dtype or device than when this publisher was made.
        """
        now = self._model.named()  # a model may have other parameters now
        for was, one in zip_longest(self._tensors, now) if now is not self._tensors else ():
            if was is None or one is None or _kind(was) != _kind(one):
                name = (was or one).name
                raise MismatchError(f"publisher: tensor {name!r} is {one and _kind(one)} now, was {was and _kind(was)}")
        self._tensors = now
        return [(one.tensor.detach(), dtype) for one, dtype in zip(now, self._dtypes, strict=True)]

    @torch.no_grad()
    def publish(self) -> int:
        """Write the tensors as the next version. Returns its number.

        Raises: StateError if the lock or the folder is another publisher's now, or if the tensors change meanwhile;
            SystemCallError, for example on a full disk. `version` says which one is the newest then: the one before,
            or, where the last steps failed (the base takes over the change, old versions are removed, `after_write`),
            the new one.
        """
        self._require_mine()
        if self.before_write is not None:
            self.before_write(self.folder)
        if self._latest is not None and (self._have is None or self._have.version != self._latest.version):
            self._seed(None)  # the last publish failed after the version was in place
        version = 1 if self._latest is None else self._latest.version + 1
        work = self.folder / f"{_folder.UNFINISHED}{_folder.version_name(version)}"
        writer = Writer(lambda *file: _folder.write_tensors(work, *file), self._key, self.staging_bytes, self.raw)
        try:
            shutil.rmtree(work, ignore_errors=True)  # of a publish whose files could not be removed
            os.mkdir(work)
            manifest = self._write(writer, version)
            data = manifest.dump()
            _folder.write_bytes(work / _folder.MANIFEST, data)
            _folder.sync_folder(work)
            self._require_mine()
            self._put_in_place(work, manifest, Latest(version, self.epoch, sha256(data)))
        except BaseException as error:
            shutil.rmtree(work, ignore_errors=True)
            if isinstance(error, OSError) and not hasattr(error, "status"):
                raise _folder.system_error("publisher", work, error) from error
            raise
        self._stats = _stats(manifest)
        self._advance(writer, manifest)
        self._remove_old(manifest)
        if self.after_write is not None:
            self.after_write(self.folder / _folder.version_name(version))
        return version

    def _require_mine(self) -> None:
        if not self._finalizer.alive:
            raise StateError(f"publisher: {self.folder}: it is closed")
        self._lock.require()
        found = _folder.read_latest(self.folder)
        if found is not None and found == self._pending:
            self._latest = found  # a publish raised, though its last rename had succeeded
        if found != self._latest:
            raise StateError(
                f"publisher: {self.folder / _folder.LATEST} is {found}, wanted {self._latest}: changed by others"
            )

    def _write(self, writer: Writer, version: int) -> Manifest:
        """The files of a version, by `writer`."""
        now = self._now()
        before = self._have
        if before is None:
            rows = [(None, found, ()) for found in self._first(now)]
        else:
            if self._base.is_live:
                self._take_base(now)
                self._require_untouched()
            cuts = self._cuts.find(self._tensors, now, self.base, self.staging_bytes, self._key, self._all_whole)
            parts = writer.delta(now, self.base, cuts)
            rows = [
                (old.sum, _encode.sum_after(old, found), found)
                for old, found in zip(before.entries, parts, strict=True)
            ]
        entries = tuple(Entry(*kind, *row) for kind, row in zip(self._kinds, rows, strict=True))
        anchor = ()
        if before is None or self._wants_anchor(writer):
            anchor = writer.anchor(entries, self._weights(now))
        parent = None if before is None else before.version
        parent_sha256 = None if before is None else before.sha256
        return Manifest(version, self.epoch, self._key, parent, parent_sha256, entries, tuple(writer.files), anchor)

    def _first(self, now: _encode.Pairs) -> list[int]:
        """Of weights of which receivers have nothing yet: their sums. A base of this object's own takes them now."""
        self._take_base(now)
        if self._base.is_live:
            return [self._sum(_encode.rounded(x, dtype)) for x, dtype in now]
        self._fill(now)
        return _encode.sums_of(self.base, self._key)

    def _fill(self, now: _encode.Pairs) -> None:
        """Write all of the base."""
        for base, (x, dtype) in zip(self.base, now, strict=True):
            base.copy_(_encode.rounded(x, dtype))

    def _weights(self, now: _encode.Pairs) -> _encode.Pairs:
        """What an anchor is made of. The first version's is the base, so that a change of tensors meanwhile is none."""
        return now if self._have is not None or self._base.is_live else [(x, x.dtype) for x in self.base]

    def _require_untouched(self) -> None:
        """Raises: MismatchError if others wrote to the live copy: a change that it has already would not be sent. The
        next publish begins with what receivers have."""
        try:
            self._verify_base()
        except MismatchError as error:
            self._have = None
            raise MismatchError(f"{error}: others wrote to the live copy, which only publish may overwrite") from error

    def _sum(self, x: torch.Tensor) -> int:
        return _encode.sum_of(x, self._key)

    def _wants_anchor(self, writer: Writer) -> bool:
        """Whether the deltas since the last anchor, this one included, are many bytes."""
        n_bytes = sum(file.bytes for file in writer.files)
        for link in reversed(self._chain):
            if link.has_anchor:
                break
            n_bytes += link.delta_bytes
        return n_bytes > self.anchor_share * self.weights_bytes

    def _put_in_place(self, work: Path, manifest: Manifest, latest: Latest) -> None:
        """The version appears under its name, then `latest` names it."""
        place = self.folder / _folder.version_name(manifest.version)
        if os.path.lexists(place):  # of a publish that could not take back its name; `latest` does not name it
            _folder.remove_version(self.folder, manifest.version)
        os.rename(work, place)
        self._pending = latest
        try:
            _folder.sync_folder(self.folder)
            _folder.replace_latest(self.folder, latest)
        except BaseException:
            with contextlib.suppress(OSError):
                if _folder.read_latest(self.folder) == self._latest:
                    os.rename(place, work)
            raise
        self._latest = latest
        _folder.sync_folder(self.folder)

    def _advance(self, writer: Writer, manifest: Manifest) -> None:
        """The base becomes the version that is in place now. If this fails, the next publish reads it again."""
        before, self._have = self._have, None
        have = _route.Have(manifest.version, self._latest.sha256, manifest.tensors)
        if before is None:
            self._fill_live(manifest)
        elif writer.kept is not None:
            self._change_of_base(writer.kept, manifest, have.sha256).apply()
        else:
            step = _route.Step(manifest, have.sha256, False)
            files = _staged.open_files(self._source, [step])
            try:
                _staged.commit_large(files, [step], self._base.boxes(manifest.tensors, self.base))
            finally:
                _staged.close_files(files)
        self._base.settle(self.base)
        self._have = have

    def _fill_live(self, manifest: Manifest) -> None:
        """A live copy becomes the first version, now that receivers have it. Raises: StateError as `publish`."""
        if not self._base.is_live:
            return
        self._fill(self._now())
        sums = _encode.sums_of(self.base, self._key)
        for entry, found in zip(manifest.tensors, sums, strict=True):
            if found != entry.sum:
                raise StateError(f"publisher: tensor {entry.name!r} was changed while it was published")

    def _change_of_base(self, frames: torch.Tensor, manifest: Manifest, sha256: str) -> _staged.Change:
        """The base's change to a version. Args: frames: all of it."""
        if self.base:
            frames = frames.to(self.base[0].device)
        step = _route.Step(manifest, sha256, False)
        wanted = _staged.needed(step, self._base.boxes(manifest.tensors, self.base))
        return _staged.change_of(step, wanted, _staged.frames_of(frames, manifest))

    def _remove_old(self, newest: Manifest) -> None:
        """Remove versions before the anchor that the oldest kept version needs."""
        self._chain.append(_Link.of(newest))
        oldest = newest.version - self.keep + 1
        first = max((link.version for link in self._chain if link.has_anchor and link.version <= oldest), default=0)
        self._chain = [link for link in self._chain if link.version >= first]
        try:
            for version in _folder.versions_in(self.folder):
                if version < first:
                    _folder.remove_version(self.folder, version)
        except OSError as error:
            raise _folder.system_error("publisher", self.folder, error) from error

    def verify(self) -> int | None:
        """Read all: the files from the last anchor on, and the base. Returns the newest version; None: there is none.

        Raises: FormatError that names a file; MismatchError that names a tensor whose copy in the base was changed;
            StateError if a live copy has another version, as others wrote to it or the last `publish` failed.
        """
        self._require_mine()
        if self._latest is None:
            return None
        if self._have is None or self._have.version != self._latest.version:
            if self._base.is_live:
                raise StateError(
                    f"publisher: verify: the live copy is not version {self._latest.version}; publish is next"
                )
            self._seed(None)
        route = _route.find_route(self._source, self._latest, self._latest.version, None)
        _route.require_chain(self._source, route, None)
        _staged.close_files(_staged.open_files(self._source, route))
        self._verify_base()
        return self._latest.version

    def _verify_base(self) -> None:
        sums = _encode.sums_of(self.base, self._key)
        for entry, found in zip(self._have.entries, sums, strict=True):
            if found != entry.sum:
                raise MismatchError(f"publisher: tensor {entry.name!r}: the base is not version {self._have.version}")


def _wire_dtype(one: Named, wanted: torch.dtype | Mapping[str, torch.dtype] | None) -> torch.dtype:
    have = one.tensor.dtype
    if isinstance(wanted, Mapping):
        dtype = next((wanted[name] for name in one.names if name in wanted), have)
    else:
        dtype = wanted if wanted is not None and have == torch.float32 else have
    if dtype != have and (have != torch.float32 or dtype not in (torch.float16, torch.bfloat16)):
        raise ArgumentError(
            f"publisher: tensor {one.name!r} is {dtype_name(have)}, wire_dtype {dtype_name(dtype)}: wanted float32 as "
            "bfloat16 or float16"
        )
    return dtype


def _stats(manifest: Manifest) -> dict[str, int]:
    return {
        "version": manifest.version,
        "delta_bytes": manifest.delta_bytes,
        "anchor_bytes": manifest.anchor_bytes,
        "elements": sum(entry.numel for entry in manifest.tensors),
        "changed": sum(part.nnz for entry in manifest.tensors for part in entry.parts),
    }


def _kind(one: Named) -> tuple[object, ...]:
    return *one.names, dtype_name(one.tensor.dtype), list(one.tensor.shape), one.tensor.device.type


def _require_same(folder: Path, newest: Manifest, mine: Sequence[Entry]) -> None:
    """Raises: MismatchError that names the tensor in which a model differs from the versions of a folder."""
    theirs = {entry.name: entry for entry in newest.tensors}
    for entry in mine:
        found = theirs.pop(entry.name, None)
        if found is None or found.kind != entry.kind:
            has = "no such tensor" if found is None else f"{found.dtype} {list(found.shape)} {list(found.also)}"
            got = f"{entry.dtype} {list(entry.shape)} {list(entry.also)}"
            raise MismatchError(f"publisher: tensor {entry.name!r} is {got}, {folder} has {has}: take another folder")
    if theirs or [e.name for e in mine] != [e.name for e in newest.tensors]:
        name = next(iter(theirs), mine[0].name)
        raise MismatchError(f"publisher: tensor {name!r}: {folder} has it, or in another order: take another folder")
