"""`Publisher` and `Subscriber` over a group of processes: a spccl Communicator, or a process group of torch.

_group.py has the order of the calls.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from spccl.errors import ArgumentError, Error, PeerError, StateError

from . import _blob, _route, _staged
from ._base import Follower
from ._encode import Writer
from ._group import LEAST_HEAD_BYTES, Group, Received, all_gpus
from ._source import Source
from ._tensors import Tensors
from .manifest import File, Latest, Manifest, sha256
from .publisher import Publisher, _stats
from .subscriber import Subscriber


class _Sent(NamedTuple):
    """A version that was made: its manifest, the bytes and hash of that, the delta's frames (None: too large)."""

    manifest: Manifest
    data: bytes
    sha256: str
    delta: torch.Tensor | None


class GroupPublisher(Publisher):
    """A `Publisher` whose receivers are the other ranks of its group. Each of them has a `Subscriber`.

        push = spccl.sync.Publisher(group, model, wire_dtype=torch.bfloat16)
        version = push.publish()                          # while the receivers call apply()

    `publish` ends when all receivers have the version, or raises on all ranks, and none has it. A receiver that has no
    version, or one before those that are kept, gets the weights themselves.

    Args:
        folder: a `Communicator`, or a process group of torch.distributed that takes CPU tensors. If it takes CUDA
            tensors too ("spccl", "cpu:gloo,cuda:nccl"), and all ranks' tensors are on GPUs of their own, frames go from
            GPU to GPU.
        tensors, wire_dtype, staging_bytes, key, base: as of `Publisher`. A change of more than `staging_bytes` is sent
            as the weights themselves.
        keep: deltas that are kept for receivers that failed to take them, of at most `staging_bytes` together, where
            the tensors are (of a GPU: in its memory).

    Waits end at the group's deadline. Source: docs/SYNC.md.
    """

    def __init__(
        self,
        folder: Any,
        tensors: Tensors,
        *,
        wire_dtype: torch.dtype | Mapping[str, torch.dtype] | None = None,
        keep: int = 4,
        staging_bytes: int | None = None,
        key: int | None = None,
        base: str | Tensors = "device",
    ):
        if keep < 0:
            raise ArgumentError(f"publisher: keep={keep}: wanted at least 0")
        self.keep = keep
        self._group = Group("publisher", folder)
        self._begin(tensors, wire_dtype, staging_bytes, key, base)
        self._sent: list[_Sent] = []  # oldest first
        self._needs_anchor = False
        self._n_head = LEAST_HEAD_BYTES  # of the broadcast with the index and the manifests
        self._number: int | None = None  # of the last version that all took; the base may lack it

    def close(self) -> None:
        """Nothing: the group is the caller's."""

    def regroup(self, group: Any) -> None:
        """Go on in another group, for example with more receivers, or after a rank was lost."""
        self._group = Group("publisher", group)

    @property
    def version(self) -> int | None:
        """The last version that all receivers took; None: none yet."""
        return self._number

    @property
    def epoch(self) -> int:
        return 1

    def stats(self) -> dict[str, int]:
        """As `Publisher.stats`, and kept_bytes: of deltas that are kept."""
        return {**super().stats(), "kept_bytes": sum(one.delta.numel() for one in self._sent)}

    @torch.no_grad()
    def publish(self) -> int:
        """Send the tensors as the next version to all receivers, which call `stage` and `commit`. Returns its number.

        Raises: PeerError that names the rank which failed to stage or commit it, the version and why; no rank has it
            then, and the next `publish` has both changes. What the group raises if a rank is gone or late. If only the
            base could not take over the change, `version` is the new one, which all receivers have, and the next
            `publish` sends the weights themselves.
        """
        group, version = self._group, (self._number or 0) + 1
        here = self._tensors[0].tensor.device if self._tensors else torch.device("cpu")
        hellos = group.gather("hello", version, role="publisher", sha256=None, gpu=group.gpu(here), n_head=self._n_head)
        receivers = [record for rank, record in enumerate(hellos) if rank != group.rank]
        _require_roles(group, hellos)
        was_whole, self._all_whole = self._all_whole, all(record.get("whole") is True for record in receivers)
        if was_whole and not self._all_whole:
            self._sent = []  # their parts may be too large for a shard
        writer = Writer(self._file, self._key, self.staging_bytes)
        try:
            older = self._older(receivers)
            self._delta, self._needs_anchor = None, not all(map(self._knows, receivers))
            manifest = self._write(writer, version)
            data = manifest.dump()
            new = _Sent(manifest, data, sha256(data), self._delta)
        except BaseException as error:
            group.send_index({"error": f"{type(error).__name__}: {error}"}, [], self._n_head)
            raise
        # Receivers that hold no version take the anchor before the others pause. Those that hold one must keep it.
        is_for_new = (self._have is None or new.delta is not None) and all(
            record["version"] is None for record in receivers if not self._knows(record)
        )
        anchor_first = bool(manifest.anchor) and is_for_new
        wire = here if all_gpus(hellos) else torch.device("cpu")
        try:
            self._send([*older, new], anchor_first, wire)
        except PeerError:  # a rank has no memory for the frames: all have heard it
            raise
        except BaseException as error:
            group.abort(f"{type(error).__name__}: {error}")  # receivers wait for the rest
            raise
        if anchor_first:
            self._send_anchor(manifest)
        follower = self._follower(writer, new)
        try:
            group.vote("stage", version, None)
            if not anchor_first:
                self._send_anchor(manifest)
            if not self._base.is_live:  # a live copy, which others may read, shows no version that is taken back
                follower.write()
            group.vote("commit", version, None)
        except BaseException:
            self._stay(follower)
            raise
        self._number = version
        self._advance_group(writer, new, follower)
        self._stats = _stats(manifest)
        return version

    def _require_untouched(self) -> None:
        try:
            super()._require_untouched()
        except BaseException:
            self._sent = []  # the next version is the weights themselves
            raise

    def _knows(self, record: dict[str, Any]) -> bool:
        """Whether a receiver has a version of which the deltas to the base are kept."""
        known = {(one.manifest.version, one.sha256) for one in self._sent}
        known |= {(one.manifest.parent, one.manifest.parent_sha256) for one in self._sent}
        if self._have is not None:
            known.add((self._have.version, self._have.sha256))
        return (record["version"], record.get("sha256")) in known

    def _older(self, receivers: Sequence[dict[str, Any]]) -> list[_Sent]:
        """The kept versions that a receiver lacks which does not need the weights themselves."""
        behind = [record["version"] for record in receivers if self._knows(record)]
        return [one for one in self._sent if behind and one.manifest.version > min(behind)]

    def _wants_anchor(self, writer: Writer) -> bool:
        return self._needs_anchor or len(writer.files) > 1

    def _file(self, name: str, tensors: dict[str, torch.Tensor], places: tuple[int, ...]) -> File:
        """The frames of a delta of one file are kept. Those of a larger one and an anchor are made again when sent."""
        if not name.startswith("delta"):
            return _blob.file_of(name, _blob.dumped(tensors), places)
        frames = tensors["frames"]
        self._delta = frames.clone() if name.endswith("-00001.safetensors") else None
        return File(name, frames.numel(), _blob.digest(frames), places)

    def _send(self, versions: Sequence[_Sent], anchor_first: bool, wire: torch.device) -> None:
        """Args: wire: where frames are sent from."""
        group, newest = self._group, versions[-1]
        latest = Latest(newest.manifest.version, self.epoch, newest.sha256)
        rows = [
            {
                "version": one.manifest.version,
                "bytes": len(one.data),
                "files": [] if one.delta is None else [one.delta.numel()],
            }
            for one in versions
        ]
        sizes = [file.bytes for file in newest.manifest.anchor]
        index = {"latest": json.loads(latest.dump()), "versions": rows, "anchor": sizes, "anchor_first": anchor_first}
        n_bytes = group.send_index(index, [one.data for one in versions], self._n_head)
        self._n_head = max(LEAST_HEAD_BYTES, n_bytes + n_bytes // 8)
        if wire.type != "cpu":
            group.vote("room", newest.manifest.version, None)
        for one in versions:
            if one.delta is not None:
                group.broadcast(one.delta.to(wire), group.rank, f"version {one.manifest.version}")

    def _send_anchor(self, manifest: Manifest) -> None:
        if not manifest.anchor:
            return
        left = list(manifest.anchor)

        def send(name: str, tensors: dict[str, torch.Tensor], places: tuple[int, ...]) -> File:
            data = _blob.dumped(tensors)
            file = _blob.file_of(name, data, places)
            if file != left.pop(0):
                raise StateError(f"publisher: version {manifest.version}: tensors were changed while it was sent")
            self._group.broadcast(data, self._group.rank, f"version {manifest.version}")
            return file

        try:
            Writer(send, self._key, self.staging_bytes).anchor(manifest.tensors, self._weights(self._now()))
        except BaseException as error:
            self._group.abort(f"{type(error).__name__}: {error}")  # receivers wait for the rest
            raise

    def _follower(self, writer: Writer, new: _Sent) -> Follower:
        is_small = self._have is not None and writer.kept is not None
        change = lambda: self._change_of_base(writer.kept, new.manifest, new.sha256)  # noqa: E731
        return Follower(change if is_small else None, keep_old=not self._base.is_live)

    def _stay(self, follower: Follower) -> None:
        """The base is again what it was. If it cannot be, it is lost, and the next publish makes one of new weights.
        Raises: an interrupt that came while it was written."""
        have, sent, self._have, self._sent = self._have, self._sent, None, []
        try:
            follower.undo()
        except Exception:
            self.base = []
        else:
            self._have, self._sent = have, sent
        if follower.error is not None and not isinstance(follower.error, Exception):
            raise follower.error

    def _advance_group(self, writer: Writer, new: _Sent, follower: Follower) -> None:
        """The base becomes what the receivers have now. If this fails, the next publish makes one of new weights."""
        before, sent = self._have, self._sent
        self._have, self._sent = None, []
        try:
            if before is None:
                self._fill_live(new.manifest)
            else:
                self._advance_base(writer, new, follower)
        except BaseException:
            self.base = []
            raise
        self._sent = [*sent, new] if new.delta is not None else []
        self._have = _route.Have(new.manifest.version, new.sha256, new.manifest.tensors)
        while len(self._sent) > self.keep or self.stats()["kept_bytes"] > self.staging_bytes:
            del self._sent[0]

    def _advance_base(self, writer: Writer, new: _Sent, follower: Follower) -> None:
        if not follower.is_begun:
            follower.write()
        if follower.error is not None:
            raise follower.error
        if not follower.is_begun and writer.kept is not None:
            self._change_of_base(writer.kept, new.manifest, new.sha256).apply()
        elif not follower.is_begun:
            self._fill(self._now())
        self._base.settle(self.base)

    def verify(self) -> int | None:
        """Read the base. Raises: MismatchError that names a tensor of it that was changed; StateError: there is none,
        because the last `publish` could not make it."""
        if self._have is not None:
            self._verify_base()
        elif self._number is not None:
            raise StateError(f"publisher: verify: the base is lost, and version {self._number + 1} will make a new one")
        return self.version


class GroupSubscriber(Subscriber):
    """A `Subscriber` whose publisher is another rank of its group.

        pull = spccl.sync.Subscriber(group, model)
        version = pull.apply()                            # while the publisher calls publish()

    `stage` takes part in one `publish` and in the vote of all receivers; then follows `commit`, or `abandon`, which
    makes the others take back the version. A receiver that holds no version may get the weights themselves; they are
    written by `stage` if it is the only kind that needs them.

    Args: folder: the group. tensors, places, staging_bytes: as of `Subscriber`.
    """

    def __init__(
        self,
        folder: Any,
        tensors: Tensors | None = None,
        *,
        places: Mapping[str, Sequence[Any]] | None = None,
        staging_bytes: int | None = None,
    ):
        self._group = Group("subscriber", folder)
        self._root = -1
        self._begin(_NoVersions(), tensors, places, staging_bytes)
        self._is_open = False  # between stage and commit

    def regroup(self, group: Any) -> None:
        """Go on in another group, with the version that the tensors hold."""
        self.abandon()
        self._group = Group("subscriber", group)

    def stage(self, version: int | None = None, *, timeout_s: float = 0.0) -> int:
        """Take the version that the publisher sends. No tensor that holds a version changes. Returns its number.

        Raises: ArgumentError for a version or timeout_s: in a group there is the newest, and the group's deadline.
            PeerError that names the rank which failed, and why; FormatError, MismatchError as over a folder, of this
            rank alone: then the others raise PeerError.
        """
        if version is not None or timeout_s:
            raise ArgumentError("subscriber: in a group the version is the newest, and the deadline the group's")
        self.abandon()
        group = self._group
        hello = {"version": None, "sha256": None} if self._have is None else vars(self._have)
        here = self._device()
        is_whole = self._plan is None
        fields = {"role": "receiver", "sha256": hello["sha256"], "gpu": group.gpu(here), "whole": is_whole}
        hellos = group.gather("hello", hello["version"], **fields)
        self._root = _require_roles(group, hellos)
        self._undo = None  # given back, and tensors looked for, while the publisher encodes
        self._at = None
        with contextlib.suppress(Exception):  # _stage looks again, and raises it
            self._at = self._memory()
        number = hellos[self._root]["version"]
        device = here if all_gpus(hellos) else torch.device("cpu")
        self._source = source = self._receive(number, hellos[self._root].get("n_head"), device)
        error: BaseException | None = None
        try:
            self._stage(source.latest(), source.latest().version)
        except Exception as found:
            error = found
        self._at = None
        if source.anchor_first:
            error = self._take_anchor(error)
        try:
            group.vote("stage", number, error)
        except BaseException:
            self._staged = None
            raise
        self._is_open = True
        return number

    def _device(self) -> torch.device:
        """That of the tensors."""
        if self._plan is not None:
            return next((p.dst.device for found in self._plan.values() for p in found), torch.device("cpu"))
        return self._model.device()

    def _receive(self, number: int, n_head: object, device: torch.device) -> Received:
        group, error = self._group, None
        try:
            index, manifests = group.receive_index(self._root, n_head)
        except BaseException as found:
            group.abort(f"{type(found).__name__}: {found}")
            raise
        if "error" in index:
            raise PeerError(f"subscriber: rank {self._root} could not make version {number}: {index['error']}")
        try:
            received = Received(group, self._root, index, manifests, self.synced, device)
        except Exception as found:
            error = found
        if device.type != "cpu":
            group.vote("room", number, error)
        try:
            if error is not None:
                raise error
            received.take(group, self._root)
        except BaseException as found:
            group.abort(f"{type(found).__name__}: {found}")
            raise
        return received

    def _open_files(self, route: Sequence[_route.Step]) -> _staged.Files:
        """An anchor's files come later, one after the other."""
        return {} if route[0].from_anchor else super()._open_files(route)

    @torch.inference_mode()
    def _take_anchor(self, error: BaseException | None) -> BaseException | None:
        """Take part in sending an anchor; write it, if this rank needs it. Returns what failed first."""
        source, staged = self._source, self._staged
        step = staged.route[0] if staged is not None and staged.route and staged.route[0].from_anchor else None
        if step is not None:
            self._have = None
        for number, n_bytes in enumerate(source.anchor_sizes):
            data = self._group.receive(n_bytes, self._root, "an anchor")
            if step is None or error is not None:
                continue
            try:
                file = step.manifest.anchor[number]
                blob = _blob.InMemory(source.where(step.version, file.name), data).check(file)
                _staged.write_anchor(blob, step, file, staged.boxes)
            except Exception as found:
                error = found
        return error

    def commit(self) -> int:
        """Write what is staged, if all receivers do. Returns the version.

        Raises: StateError if nothing is staged; PeerError that names the rank which failed: then this one has taken
            back what it wrote. Where that was an anchor it is not `synced`, and gets another one.
        """
        if self._staged is None:
            raise StateError("subscriber: commit without stage")
        self._is_open = False
        version, error = self._source.latest().version, None
        if not self._source.anchor_first:
            error = self._take_anchor(None)
        try:
            if error is None:
                super().commit()
        except Exception as found:
            error = found
        try:
            self._group.vote("commit", version, error)
        except BaseException:
            if error is None:
                self._take_back()
            raise
        finally:
            self._staged, self._source = None, _NoVersions()
        return version

    def _write_large(self, staged: _staged.Staged) -> None:
        if not staged.route[0].from_anchor:
            super()._write_large(staged)

    def _take_back(self) -> None:
        if self._undo is not None:
            self.rollback()
        else:
            self._have = None

    def abandon(self) -> None:
        """Drop what is staged. If all had staged it, the others take it back and raise."""
        if not self._is_open:
            self._staged = None
            return
        self._is_open, self._staged = False, None
        version = self._source.latest().version
        source, self._source = self._source, _NoVersions()
        with contextlib.suppress(Error):
            for n_bytes in source.anchor_sizes if not source.anchor_first else ():
                self._group.receive(n_bytes, self._root, "an anchor")
            self._group.vote("commit", version, PeerError(f"rank {self._group.rank} abandoned it"))

    def adopt(self, version: int | None = None) -> int:
        """Not in a group."""
        raise StateError("subscriber: adopt: a group has no versions to compare with")


class _NoVersions(Source):
    """Of a receiver between two versions."""

    def __str__(self) -> str:
        return "the group"


def _require_roles(group: Group, hellos: Sequence[dict[str, Any]]) -> int:
    """The rank of the publisher. Raises: StateError unless there is one."""
    found = [rank for rank, record in enumerate(hellos) if record.get("role") == "publisher"]
    if len(found) != 1:
        text = f"{group.who}: ranks {found} are publishers, wanted one of {len(hellos)}"
        raise StateError(text)
    return found[0]
