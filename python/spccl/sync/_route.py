"""Which versions a receiver takes: the deltas since what it has, or an anchor and the deltas after it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from spccl.errors import ArgumentError, FormatError, StateError

from . import _folder
from ._source import Source
from .manifest import Entry, Latest, Manifest


@dataclasses.dataclass(frozen=True)
class Have:
    """The version that a receiver has, the hash of its manifest, its tensors."""

    version: int
    sha256: str
    entries: tuple[Entry, ...]


@dataclasses.dataclass(frozen=True)
class Step:
    """One version of a route: its anchor is read, or its delta is applied."""

    manifest: Manifest
    sha256: str
    from_anchor: bool

    @property
    def version(self) -> int:
        return self.manifest.version

    @property
    def have(self) -> Have:
        return Have(self.version, self.sha256, self.manifest.tensors)


def find_route(source: Source, latest: Latest, version: int, have: Have | None) -> list[Step]:
    """The route of fewest bytes from `have` to `version`; empty if the receiver has it.

    Goes back from the newest version, each manifest by the hash that the one after it says. It stops where the deltas
    back to `have` are more bytes than an anchor.
    Args: have: None: the receiver has nothing that a delta could change.
    Raises: ArgumentError if the folder does not have `version`; FormatError if a manifest is missing or damaged.
    """
    require_there(source, latest, version)
    number, wanted = latest.version, latest.sha256
    back: list[Step] = []  # deltas, newest first
    from_anchor: list[Step] | None = None
    n_bytes = 0.0
    while have is None or number != have.version or wanted != have.sha256 or number > version:
        if from_anchor is not None and (
            have is None or number <= have.version or n_bytes >= _bytes(source, from_anchor)
        ):
            return from_anchor
        try:
            manifest = source.manifest(number, wanted)
        except FormatError:
            if from_anchor is not None:
                return from_anchor
            raise
        if number == latest.version and manifest.epoch != latest.epoch:
            raise FormatError(f"{source}/{_folder.LATEST}: epoch {latest.epoch}, its manifest says {manifest.epoch}")
        if number <= version:
            back.append(Step(manifest, wanted, False))
            n_bytes += source.delta_bytes(manifest)
            if from_anchor is None and source.anchor_bytes(manifest) < math.inf:
                from_anchor = [Step(manifest, wanted, True), *reversed(back[:-1])]
        if manifest.parent is None:
            return _required(source, version, from_anchor)
        number, wanted = manifest.parent, str(manifest.parent_sha256)
    if from_anchor is not None and _bytes(source, from_anchor) < n_bytes:
        return from_anchor
    return back[::-1]


def _bytes(source: Source, route: Sequence[Step]) -> float:
    sizes = (source.anchor_bytes(s.manifest) if s.from_anchor else source.delta_bytes(s.manifest) for s in route)
    return sum(sizes)


def _required(source: Source, version: int, route: list[Step] | None) -> list[Step]:
    if route is None:
        raise FormatError(f"{source}: version {version} has no anchor before it")
    return route


def require_there(source: Source, latest: Latest, version: int | None) -> None:
    """Raises: ArgumentError if the versions up to the newest are without this one."""
    if version is None or version == latest.version:
        return
    there = [number for number in source.versions() if number <= latest.version]
    if version not in there:
        raise ArgumentError(f"sync: {source} does not have version {version}; it has {there}")


def require_chain(source: Source, route: Sequence[Step], have: Have | None) -> None:
    """Raises: FormatError if the versions of a route have other tensors or keys, or sums that do not follow."""
    before = None if have is None or route[0].from_anchor else have.entries
    key = route[0].manifest.key
    for step in route:
        where = source.where(step.version, _folder.MANIFEST)
        entries = step.manifest.tensors
        if step.manifest.key != key:
            raise FormatError(f"{where}: key {step.manifest.key:016x}, version {route[0].version} has {key:016x}")
        if before is not None and [e.kind for e in before] != [e.kind for e in entries]:
            raise FormatError(f"{where}: names, dtypes or shapes are not those of version {step.version - 1}")
        for old, new in zip(before or (), entries, strict=before is not None):
            if new.sum_before != old.sum:
                raise FormatError(f"{where}: tensor {new.name!a}: sum_before is not version {step.version - 1}'s sum")
        before = entries


def require_latest(source: Source, latest: Latest | None) -> Latest:
    if latest is None:
        raise StateError(f"sync: {source} has no version yet: the publisher has not published")
    return latest
