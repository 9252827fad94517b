"""Weight sync for verl 0.9: its checkpoint engine "delta_sharded", with files of spccl from trainer to rollout workers.

    checkpoint_engine:
      backend: delta_sharded
      custom_backend_module: spccl.sync.verl
      engine_kwargs: {delta_sharded: {folder: /shared/run1}}

Rank 0 of the trainer gathers the weights and publishes them in the folder. Each rollout worker reads it, and hands what
changed to verl's own consumer as positions and values, which the consumer writes. Importing this module registers it.
docs/SYNC.md says what holds then, and what does not.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from verl.checkpoint_engine.base import CheckpointEngineRegistry
from verl.checkpoint_engine.delta_checkpoint_engine import DeltaShardedCheckpointEngine
from verl.checkpoint_engine.delta_sync.encode import checksum

from spccl.errors import ArgumentError, FormatError, MismatchError, StateError, TimeoutError, UnsupportedError

from . import _blob, _folder, _staged, delta
from ._route import Step
from ._source import Folder
from ._tensors import bits, dtype_name, frame_dtype
from .manifest import Entry, Part
from .publisher import Publisher

_POLL_S = 0.02
_ENTRY_ELEMS = 64 << 20  # most changes of one entry of a flush: verl's MAX_ENTRY_ELEMS


class _Piece(NamedTuple):
    """What a flush says of a tensor. positions: None: `values` are all of it."""

    name: str
    shape: tuple[int, ...]
    values: torch.Tensor
    positions: torch.Tensor | None

    @property
    def n_bytes(self) -> int:
        return self.values.nbytes + (0 if self.positions is None else self.positions.nbytes)


@CheckpointEngineRegistry.register("delta_sharded")  # verl asks for this name where it expects changes
class SpcclDeltaCheckpointEngine(DeltaShardedCheckpointEngine):
    """One object in each worker of trainer and rollout. In each step verl's manager calls prepare, build_topology,
    init_process_group, send_weights beside receive_weights, finalize.

    A rollout worker that has the version before gets the changes, any other one all weights: a new worker, and one
    whose consumer did not take all that it was handed.

    Args:
        bucket_size, is_master, rollout_dtype: of verl. A bucket is the most bytes handed over at a time, or one tensor.
        folder: on a disk that all of them see.
        timeout_s: the most time that a rollout worker waits for a version.
        keep, staging_bytes: of `Publisher`.
    """

    def __init__(
        self,
        bucket_size: int,
        *,
        folder: str,
        is_master: bool = False,
        timeout_s: float = 600.0,
        keep: int = 4,
        staging_bytes: int | None = None,
        **options: Any,
    ):
        super().__init__(bucket_size, is_master=is_master, **options)
        if self.verify_every:
            raise UnsupportedError(f"verl: verify_every={self.verify_every}: this engine has no sweep: leave it out")
        if not timeout_s > 0:
            raise ArgumentError(f"verl: timeout_s={timeout_s}: wanted a time above 0")
        self.folder, self.timeout_s = Path(folder), timeout_s
        self._options = {"keep": keep, "staging_bytes": staging_bytes}
        self._weights: dict[str, torch.Tensor] = {}  # of rank 0 of the trainer
        self._push: Publisher | None = None
        self._have: tuple[int, str] | None = None  # of a rollout worker: the version that its consumer has
        self._version, self._is_whole = 0, True

    def _start_zmq_server(self) -> None:
        """No socket: files carry the weights."""

    # ---- as verl's manager calls them ----

    def prepare(self) -> dict[str, Any]:
        latest = _folder.read_latest(self.folder) if self.is_master and self.folder.exists() else None
        return {"latest": None if latest is None else (latest.version, latest.sha256), "have": self._have}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        latest = metadata[0]["latest"]
        is_whole = any(found["have"] != latest for found in metadata[actor_wg_world_size:]) or latest is None
        version = 1 if latest is None else latest[0] + 1

        def arguments(ranks: list[int]) -> dict[str, list[Any]]:
            return {"rank": ranks, "version": [version] * len(ranks), "is_whole": [is_whole] * len(ranks)}

        actors = [0, *[-1] * (actor_wg_world_size - 1)]
        return arguments(actors), arguments(list(range(1, rollout_world_size + 1)))

    def init_process_group(self, rank: int, version: int, is_whole: bool) -> None:
        """Args: is_whole: some rollout worker needs all weights."""
        self.rank, self._version, self._is_whole = rank, version, is_whole

    def finalize(self) -> None:
        """Nothing: there is no group, and what was read is closed."""

    # ---- trainer ----

    @torch.no_grad()
    async def send_weights(self, engine: Any, global_steps: int | None = None) -> dict[str, float] | None:
        """Publish the weights of a training engine. All ranks of the trainer call it: gathering is collective.

        Raises: as Publisher.publish; MismatchError for a tensor that comes twice, or not in each version.
        """
        if self.rank > 0:
            raise StateError(f"verl: rank {self.rank} is a rollout worker: wanted a trainer's")
        exported, _ = engine.get_per_tensor_param()
        seen: set[str] = set()
        failed: Exception | None = None
        for name, x in exported:  # to its end: the other ranks gather with this one
            if self.is_master and failed is None:
                try:
                    self._take(name, x, seen)
                except Exception as error:
                    failed = error
        if failed is not None:
            raise failed
        if not self.is_master:
            return None
        missing = sorted(self._weights.keys() - seen)
        if missing:
            raise MismatchError(f"verl: tensor {missing[0]!r}: earlier exports had it, this one does not")
        if self._push is None:
            self._push = Publisher(self.folder, self._weights, raw=True, **self._options)
        self._push.anchor_share = 0.0 if self._is_whole else 0.5  # else no version would ever be removed
        found = self._push.publish()
        if found != self._version:
            raise StateError(f"verl: {self.folder} has version {found} now, wanted {self._version}: who publishes too?")
        stats = self._push.stats()
        return {
            "checkpoint_engine/changed_ratio": stats["changed"] / max(1, stats["elements"]),
            "checkpoint_engine/changed_elems": float(stats["changed"]),
            "checkpoint_engine/payload_mbytes": (stats["delta_bytes"] + stats["anchor_bytes"]) / (1 << 20),
        }

    def _take(self, name: str, x: torch.Tensor, seen: set[str]) -> None:
        """A tensor of the export, in memory of the host that stays."""
        if name in seen:
            raise MismatchError(f"verl: tensor {name!r}: the export has it twice")
        seen.add(name)
        x = x.detach()
        if x.is_floating_point():
            x = x.to(self.rollout_dtype)
        there = self._weights.get(name)
        if there is None and self._push is None:
            there = self._weights[name] = torch.empty(x.shape, dtype=x.dtype)
        if there is None or (there.shape, there.dtype) != (x.shape, x.dtype):
            raise MismatchError(f"verl: tensor {name!r}: earlier exports did not have it, or as another kind of tensor")
        there.copy_(x)

    # ---- rollout worker ----

    def receive_weights(self, global_steps: int | None = None) -> Iterator[tuple[list[tuple[str, torch.Tensor]], bool]]:
        """Hand over a version, in verl's layout: (tensors, whether they are the last). Nothing, if nothing changed.

        All files are read and their hashes checked before the first one.
        Raises: TimeoutError; FormatError for what is missing or damaged; StateError.
        """
        if self.rank < 1:
            raise StateError(f"verl: rank {self.rank} is the trainer's: wanted a rollout worker")
        have, self._have = self._have, None  # until the consumer has taken all
        step, files = self._open(have)
        try:
            pieces = self._whole(step, files) if step.from_anchor else self._changes(step, files)
            before: list[_Piece] = []
            for bucket in _buckets(pieces, self.bucket_size):
                if before:
                    yield _flush(before), False
                before = bucket
            if before:
                yield _flush(before), True
        finally:
            _staged.close_files(files)
        self._have = step.version, step.sha256

    def _open(self, have: tuple[int, str] | None) -> tuple[Step, _staged.Files]:
        """Wait for the version. Its files, checked."""
        source, deadline = Folder(self.folder), time.monotonic() + self.timeout_s
        while True:
            try:
                latest = source.latest()
                if latest is not None and latest.version >= self._version:
                    break
            except FormatError as error:
                if not hasattr(error, "not_whole") or time.monotonic() >= deadline:
                    raise
            if time.monotonic() >= deadline:
                raise TimeoutError(f"verl: {self.folder}: no version {self._version} within {self.timeout_s:g} s")
            time.sleep(_POLL_S)
        if latest.version != self._version:
            raise StateError(f"verl: {self.folder} has version {latest.version}, wanted {self._version}")
        manifest = source.manifest(latest.version, latest.sha256)
        is_delta = have is not None and have == (manifest.parent, manifest.parent_sha256)
        if not is_delta and not manifest.anchor:
            raise StateError(f"verl: version {latest.version} has changes only, and this worker has no version before")
        step = Step(manifest, latest.sha256, not is_delta)
        return step, _staged.open_files(source, [step])

    def _whole(self, step: Step, files: _staged.Files) -> Iterator[_Piece]:
        for file in step.manifest.anchor:
            blob = files[step.version, file.name]
            for place, header in _staged.anchor_headers(blob, step, file):
                entry = step.manifest.tensors[place]
                yield _Piece(entry.name, entry.shape, _blob.tensor(blob, header).view(-1), None)

    def _changes(self, step: Step, files: _staged.Files) -> Iterator[_Piece]:
        for place, file in enumerate(step.manifest.delta):
            frames = _staged.read_frames(files[step.version, file.name], step, place)
            for entry in step.manifest.tensors:
                for part in entry.parts:
                    if part.file == place:
                        yield _piece(entry, part, frames[part.offset : part.offset + part.bytes])


def _piece(entry: Entry, part: Part, frame: torch.Tensor) -> _Piece:
    """The changes of a frame of raw values. It is written over zeros and over ones: changes are where both agree."""
    if entry.numel >= 1 << 31:
        raise UnsupportedError(f"verl: tensor {entry.name!r}: {entry.numel} elements: verl has positions below 2^31")
    dtype = getattr(torch, entry.dtype)
    zeros, ones = (
        torch.full((part.n_elems * dtype.itemsize,), byte, dtype=torch.uint8).view(frame_dtype(dtype))
        for byte in (0, 0xFF)
    )
    targets = [delta.Target(frame, part.n_elems, x.dtype, [delta.Place.whole(x)]) for x in (zeros, ones)]
    delta.apply(targets)
    found = torch.nonzero(bits(zeros) == bits(ones)).view(-1)
    if found.numel() != part.nnz:
        raise FormatError(f"verl: tensor {entry.name!r}: its changes are coded: wanted raw=True of the publisher")
    positions = (found + part.first).to(torch.int32)
    return _Piece(entry.name, entry.shape, zeros.view(dtype)[found], positions)


def _buckets(pieces: Iterator[_Piece], most_bytes: int) -> Iterator[list[_Piece]]:
    """Pieces of one dtype, together of at most so many bytes, or one piece."""
    bucket: list[_Piece] = []
    n_bytes = 0
    for piece in pieces:
        if bucket and (n_bytes + piece.n_bytes > most_bytes or piece.values.dtype != bucket[0].values.dtype):
            yield bucket
            bucket, n_bytes = [], 0
        bucket.append(piece)
        n_bytes += piece.n_bytes
    if bucket:
        yield bucket


def _flush(bucket: Sequence[_Piece]) -> list[tuple[str, torch.Tensor]]:
    """What verl's consumers take as named tensors, where they take it from. The parts of a tensor are one entry, as its
    loader for SGLang makes a whole tensor of each entry, and may call load_weights for it."""
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    is_dense = bucket[0].positions is None
    values = torch.cat([piece.values for piece in bucket]).to(device)
    params: list[dict[str, Any]] = []
    pos_end = val_end = 0
    for piece in bucket:
        pos_start, val_start = pos_end, val_end
        pos_end += 0 if piece.positions is None else piece.positions.nbytes
        val_end += piece.values.numel()
        last = params[-1] if params else None
        if last is not None and last["name"] == piece.name and val_end - last["val_start"] <= _ENTRY_ELEMS:
            last.update(pos_end=pos_end, val_end=val_end)
            continue
        at = {"pos_start": pos_start, "pos_end": pos_end, "pos_width": 4, "val_start": val_start, "val_end": val_end}
        params.append({"name": piece.name, "dtype": dtype_name(values.dtype), "shape": list(piece.shape), **at})
    positions = torch.empty(0, dtype=torch.uint8, device=device)
    if not is_dense:
        positions = torch.cat([piece.positions for piece in bucket if piece.positions is not None])
        positions = positions.view(torch.uint8).to(device)
    spec = {"encoding": "dense" if is_dense else "indices", "params": params, "checksum": checksum(positions, values)}
    told = torch.frombuffer(bytearray(json.dumps(spec).encode()), dtype=torch.uint8).to(device)
    named = [("__delta_spec__", told), ("__values__", values)]
    return named if is_dense else [*named, ("__positions__", positions)]
