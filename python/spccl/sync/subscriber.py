"""`Subscriber`: a receiver of the versions that a `Publisher` writes to a folder."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from spccl.errors import ArgumentError, FormatError, MismatchError, StateError, TimeoutError

from . import _chain, _folder, _route, _staged
from ._source import Folder, Source
from ._tensors import Box, Model, Named, Tensors, boxes_of_model, boxes_of_plan, memory_of, require_apart
from .manifest import MASK, Entry, Latest

LEAST_STAGING_BYTES = 4 << 20
_LEAST_POLL_S, _MOST_POLL_S = 0.02, 1.0


class Subscriber:
    """Puts the versions of a folder into a model, bit for bit, in place.

        pull = spccl.sync.Subscriber("/shared/run1", model)
        version = pull.apply()

    `apply` is `stage`, which reads and checks and changes no tensor, and `commit`, which writes. Between the two the
    workers of one replica can vote. A change of at most `staging_bytes` lies in memory and is written whole or not at
    all. A larger one and an anchor are checked on the disk first; if writing them fails, `synced` is False, the tensors
    hold a mixture, and the next `apply` begins with an anchor.

    Args:
        folder: of the publisher; or a group with it: see `GroupSubscriber`.
        tensors: a model, or tensors by name, with the publisher's names, shapes and (wire) dtypes, contiguous. Not read
            if there are `places`.
        places: for receivers that rename, fuse or shard: a mapping of each of the publisher's names to a list of
            `Place`; several: the tensor is there several times, none: not on this rank.
        staging_bytes: the most bytes of frames and old values in memory; None: 1/8 of the tensors, at least 4 MiB.
        before_read: called with the folder's path before each `stage`, for example to copy from object storage.

    One thread at a time. Source: docs/SYNC.md.
    """

    def __init__(
        self,
        folder: str | Path,
        tensors: Tensors | None = None,
        *,
        places: Mapping[str, Sequence[Any]] | None = None,
        staging_bytes: int | None = None,
        before_read: Callable[[Path], object] | None = None,
    ):
        _folder.need_safetensors()
        self.folder = Path(folder)
        self.before_read = before_read
        self._begin(Folder(self.folder), tensors, places, staging_bytes)

    def __new__(cls, folder: object = None, *_args: object, **_kwargs: object) -> Subscriber:
        if cls is Subscriber and not isinstance(folder, (str, os.PathLike)):
            from .group import GroupSubscriber

            cls = GroupSubscriber
        return object.__new__(cls)

    def _begin(self, source: Source, tensors: Tensors | None, places: Any, staging_bytes: int | None) -> None:
        self._source = source
        self._plan = places
        self._model: Model | None = None
        # Kinds of entries, what `_memory` returned, and the boxes that were found for both.
        self._found: tuple[list[Any], list[Any], list[list[Box]]] | None = None
        self._at: list[Any] | None = None  # what `_memory` returned, if a stage that is under way has called it
        if places is None:
            if tensors is None:
                raise ArgumentError("subscriber: neither tensors nor places")
            self._model = Model("subscriber", tensors)
            n_bytes = sum(one.tensor.numel() * one.tensor.itemsize for one in self._named())
        else:
            n_bytes = sum(p.n_rows * p.n_cols * p.dst.itemsize for found in places.values() for p in found)
        self.staging_bytes = max(n_bytes // 8, LEAST_STAGING_BYTES) if staging_bytes is None else staging_bytes
        self._have: _route.Have | None = None
        self._key = 0
        self._boxes: list[list[Box]] = []
        self._staged: _staged.Staged | None = None
        self._undo: tuple[_route.Have, list[_staged.Change]] | None = None

    def _named(self) -> list[Named]:
        """The tensors as they are now: a model may have other parameters than before."""
        found = self._model.named()
        require_apart("subscriber", found)
        return found

    @property
    def version(self) -> int | None:
        """The version in the tensors; None: none yet, or a mixture."""
        return None if self._have is None else self._have.version

    @property
    def synced(self) -> bool:
        """Whether the tensors hold a version. Replicas that do not must not serve."""
        return self._have is not None

    def apply(self, version: int | None = None, *, timeout_s: float = 0.0) -> int:
        """Put a version into the tensors. Returns its number.

        Args:
            version: None: the newest.
            timeout_s: how long to wait for it to be published.
        Raises: as `stage` and `commit`.
        """
        self.stage(version, timeout_s=timeout_s)
        return self.commit()

    def stage(self, version: int | None = None, *, timeout_s: float = 0.0) -> int:
        """Read and check a version. No tensor changes. Returns its number. The version staged before is dropped.

        Raises: StateError if there is no version yet; ArgumentError if the folder does not have this one; TimeoutError;
            FormatError for what is missing or damaged in the folder; MismatchError that names a tensor of another name,
            shape or dtype, or one that something else has changed; SystemCallError.
        """
        self.abandon()
        self._undo = None
        deadline, pause_s = time.monotonic() + timeout_s, _LEAST_POLL_S
        while True:
            if self.before_read is not None:
                self.before_read(self.folder)
            try:
                latest = self._source.latest()
                if latest is not None and (version is None or latest.version >= version):
                    return self._stage_newest(latest, version)
            except FormatError as error:
                if not hasattr(error, "not_whole") or time.monotonic() >= deadline:
                    raise
            else:
                if time.monotonic() >= deadline:
                    self._give_up(latest, version, timeout_s)
            time.sleep(min(pause_s, max(0.0, deadline - time.monotonic())))
            pause_s = min(2 * pause_s, _MOST_POLL_S)

    def _give_up(self, latest: Latest | None, version: int | None, timeout_s: float) -> None:
        """Raise what says that a version was not published."""
        if timeout_s > 0:
            newest = "none" if latest is None else str(latest.version)
            wanted = "a version" if version is None else f"version {version}"
            raise TimeoutError(
                f"subscriber: {self.folder}: waited {timeout_s:g} s for {wanted}, the newest is {newest}"
            )
        _route.require_there(self._source, _route.require_latest(self._source, latest), version)

    def _stage_newest(self, latest: Latest, version: int | None) -> int:
        for _ in range(3):
            try:
                return self._stage(latest, latest.version if version is None else version)
            except FormatError:
                newer = self._source.latest()
                if version is not None or newer is None or newer == latest:
                    raise
                latest = newer  # the publisher removed what was being read
        return self._stage(latest, latest.version)

    def _stage(self, latest: Latest, version: int) -> int:
        route = _route.find_route(self._source, latest, version, self._have)
        if not route:
            self._staged = _staged.Staged([], [], self._boxes, {})
            return version
        _route.require_chain(self._source, route, self._have)
        boxes = self._find_boxes(route[0].manifest.tensors)
        wanted = [_staged.needed(step, boxes) for step in route if not step.from_anchor]
        left = self.staging_bytes - _staged.staged_bytes(wanted)
        if not route[0].from_anchor and left >= 0:
            changes = [
                _staged.read_change(self._source, step, found) for step, found in zip(route, wanted, strict=True)
            ]
            _chain.check_chain(changes, max(left, self.staging_bytes // 4))
            self._staged = _staged.Staged(route, changes, boxes, {})
        else:
            self._staged = _staged.Staged(route, None, boxes, self._open_files(route))
        return version

    def _open_files(self, route: Sequence[_route.Step]) -> _staged.Files:
        return _staged.open_files(self._source, route)

    def _find_boxes(self, entries: Sequence[Entry]) -> list[list[Box]]:
        """Where the tensors are now, with the sums of what they hold. The same boxes as before, if none moved."""
        kinds = [entry.kind for entry in entries]
        if self._found is not None and self._found[0] == kinds and self._found[1] == (self._at or self._memory()):
            boxes = self._found[2]
        else:
            self._found = None
            if self._plan is None:
                boxes = boxes_of_model("subscriber", entries, self._named())
            else:
                boxes = boxes_of_plan("subscriber", entries, self._plan)
            self._found = kinds, self._memory(), boxes
        same = boxes is self._boxes
        if not same and self._have is not None and [e.kind for e in self._have.entries] == kinds:
            for before, now in zip(self._boxes, boxes, strict=True):
                for old, new in zip(before, now, strict=True):
                    new.sum = old.sum
        return boxes

    def _memory(self) -> list[Any]:
        """What is the same as long as no tensor moves."""
        if self._model is not None:
            return self._model.named()
        return [
            (name, *list(vars(place).values())[1:], *memory_of(place.dst))  # without dst, which == would read
            for name in self._plan
            for place in self._plan[name]
        ]

    def abandon(self) -> None:
        """Drop what is staged."""
        staged, self._staged = self._staged, None
        if staged is not None:
            _staged.close_files(staged.files)

    @torch.inference_mode()  # so that weights that were made in that mode can be written
    def commit(self) -> int:
        """Write what is staged to the tensors, and on a GPU wait until it is there. Returns the version.

        Raises: StateError if nothing is staged. TimeoutError, MismatchError, DeviceError and others: after a change in
            memory the tensors are as before; after a large one or an anchor `synced` is False.
        """
        if self._staged is None:
            raise StateError("subscriber: commit without stage")
        staged, self._staged = self._staged, None
        route, changes, boxes, _ = staged
        if not route:
            return int(self._have.version)
        before = self._have
        self._have = None  # while this writes, and if it fails
        if changes is None:
            self._write_large(staged)
        else:
            begun: list[_staged.Change] = []
            sums = [(box, box.sum) for places in boxes for box in places]
            try:
                _staged.commit_small(changes, begun)
                self._settle(boxes)
                for change in changes:
                    change.count()
            except BaseException:
                _staged.undo_all(begun)
                _staged.settle(boxes)
                for box, found in sums:
                    box.sum = found
                self._have = before
                raise
            self._undo = before, changes
        self._finish(route[-1], boxes, read_all=changes is None)
        return route[-1].version

    def _settle(self, boxes: _staged.Boxes) -> None:
        """What is written is there, for every stream; a GPU's error is raised."""
        _staged.settle(boxes)

    def _write_large(self, staged: _staged.Staged) -> None:
        """Write what cannot be undone. If this raises, the tensors hold a mixture."""
        try:
            _staged.commit_large(staged.files, staged.route, staged.boxes)
        finally:
            _staged.close_files(staged.files)

    def _finish(self, step: _route.Step, boxes: list[list[Box]], read_all: bool) -> None:
        """The boxes hold the version of `step`. After a large change that is read back whole."""
        for entry, places in zip(step.manifest.tensors, boxes, strict=True):
            for box in places:
                box.entry = entry
        if read_all:
            _staged.check_sums(step.version, step.manifest.key, boxes)
        self._have, self._boxes, self._key = step.have, boxes, step.manifest.key

    @torch.inference_mode()
    def rollback(self) -> int:
        """Undo the last `commit`, until the next `stage`. Returns the version that the tensors hold again.

        Raises: StateError if the commit was of an anchor or a large change, or there was none.
        """
        if self._undo is None:
            raise StateError(
                "subscriber: nothing to roll back: no commit, or one that was too large to keep old values"
            )
        (before, changes), self._undo = self._undo, None
        self._have = None
        _staged.undo_all(changes)
        self._settle(self._boxes)
        for change in changes:
            change.count(-1)
        self._have = before
        for entry, places in zip(before.entries, self._boxes, strict=True):
            for box in places:
                box.entry = entry
        return before.version

    def verify(self) -> int:
        """Read all tensors and compare them with what the version says. Returns the version.

        Raises: MismatchError that names a tensor; `synced` is then False. StateError if there is no version.
        """
        if self._have is None:
            raise StateError("subscriber: verify: the tensors hold no version")
        version, have, self._have = self._have.version, self._have, None
        _staged.check_sums(version, self._key, self._boxes)
        self._have = have
        return version

    def adopt(self, version: int | None = None) -> int:
        """Say that the tensors hold a version already, because they were loaded by other means. They are read whole.

        A tensor of which this rank has only a part is not compared here: see `sums`.
        Raises: as `stage`; MismatchError that names a tensor with other bits.
        """
        self.abandon()
        latest = _route.require_latest(self._source, self._source.latest())
        route = _route.find_route(self._source, latest, latest.version if version is None else version, None)
        self._have = self._undo = None
        boxes = self._find_boxes(route[-1].manifest.tensors)
        for entry, places in zip(route[-1].manifest.tensors, boxes, strict=True):
            for box in places:
                box.sum = box.read_sum(route[-1].manifest.key)
                if box.is_whole and box.sum != entry.sum:
                    raise MismatchError(f"subscriber: tensor {entry.name!r} is not that of version {route[-1].version}")
        self._finish(route[-1], boxes, read_all=False)
        return route[-1].version

    @property
    def staged(self) -> str:
        """The SHA-256 of the manifest of what is staged: workers that staged the same version have the same one."""
        if self._staged is None:
            raise StateError("subscriber: staged: nothing is staged")
        route = self._staged.route
        return route[-1].sha256 if route else self._have.sha256

    def sums(self) -> dict[str, tuple[int, int]]:
        """Of each tensor that lies here in parts: (sum of the elements here, sum of the whole tensor).

        The sums of all parts of a tensor, each part counted once, add up to the whole one's modulo 2^64. Ranks of a
        tensor-parallel group add theirs and `rollback` if they differ. A part that lies here twice is in the sum once;
        one that two ranks have is in both sums: `parts` tells them apart.
        """
        return {name: (sum(found.values()) & MASK, whole) for name, (found, whole) in self.parts().items()}

    def parts(self) -> dict[str, tuple[dict[tuple[int, ...], int], int]]:
        """Of each tensor that lies here in parts: (the sum of each part, sum of the whole tensor).

        A part is (row_elems, row_first, n_rows, col_first, n_cols) of its `Place`.
        """
        if self._have is None:
            raise StateError("subscriber: sums: the tensors hold no version")
        pairs = ((entry, places) for entry, places in zip(self._have.entries, self._boxes, strict=True))
        return {
            entry.name: ({box.part: box.sum for box in places}, entry.sum)
            for entry, places in pairs
            if places and not any(box.is_whole for box in places)
        }
