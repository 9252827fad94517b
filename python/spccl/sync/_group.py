"""What a publisher and its receivers say to each other in a group, and where a receiver's versions are then.

All ranks of the group make the same calls in the same order:

1. `gather`: "hello", role, version. One rank is the publisher; the others are receivers. The publisher says how many
   bytes its next broadcast has, by what the last version took: a guess too small costs a second broadcast.
2. `send`: the publisher's index: which versions follow, with how many bytes, or its error; and their manifests. Then
   their frames. These go from GPU to GPU where `gather` found that all can take them so; then "room" comes before
   them, a vote on memory.
3. `gather`: "stage", whether it succeeded. If one rank failed, all raise, and nothing was written.
4. `send`: the files of an anchor, if one is due. (Before 3 where all who need it hold no version.)
5. `gather`: "commit", whether it succeeded. If one rank failed, the others take back what they wrote.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from spccl.comm import Communicator
from spccl.errors import ArgumentError, Error, FormatError, PeerError, StateError

from . import _blob, _folder
from ._source import Source
from .manifest import File, Latest, Manifest, parse_latest

_RECORD_BYTES = 512
_MOST_BYTES = 1 << 40
LEAST_HEAD_BYTES = 4096
_CPU = torch.device("cpu")


def all_gpus(records: Sequence[dict[str, Any]]) -> bool:
    """Whether frames can go from GPU to GPU: each rank has one of its own. NCCL refuses two ranks on one."""
    found = [record.get("gpu") for record in records]
    return None not in found and len(set(found)) == len(found)


class Group:
    """A `Communicator`, or a process group of torch.distributed that takes CPU tensors. `who`: for errors."""

    def __init__(self, who: str, group: Any):
        self.who, self.group = who, group
        self.broken: str | None = None  # why the ranks of a torch group may be at different calls
        self.is_native = isinstance(group, Communicator)
        if self.is_native:
            self.rank, self.size = group.rank, group.world_size
            return
        import torch.distributed as dist

        if not dist.is_available() or not isinstance(group, dist.ProcessGroup):
            raise ArgumentError(f"{who}: {type(group).__name__}: wanted a folder, a Communicator or a process group")
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    def gpu(self, device: torch.device) -> str | None:
        """The GPU, if this group can send from its memory, by a name that no other one has."""
        if device.type != "cuda" or self.is_native:
            return None
        import torch.distributed as dist

        if not dist.is_nccl_available() or all(one.type != "cuda" for one in self.group._device_types):
            return None
        return str(torch.cuda.get_device_properties(device).uuid)

    def gather(self, what: str, version: int | None, **fields: Any) -> list[dict[str, Any]]:
        """The records of all ranks, by rank. Raises: StateError if another rank is elsewhere in its calls."""
        mine = {"what": what, "version": version, **fields}
        while len(data := json.dumps(mine).encode()) > _RECORD_BYTES:
            mine["error"] = mine["error"][: len(mine["error"]) * 3 // 4]
        sent = torch.frombuffer(bytearray(data.ljust(_RECORD_BYTES)), dtype=torch.uint8)
        rows = torch.empty((self.size, _RECORD_BYTES), dtype=torch.uint8)
        with self._named(f"{what}, version {version}"):
            if self.is_native:
                self.group.all_gather(sent.numpy(), rows.numpy())
            else:
                import torch.distributed as dist

                dist.all_gather(list(rows), sent, group=self.group)
        records = [self._record(rank, row.numpy().tobytes()) for rank, row in enumerate(rows)]
        for rank, record in enumerate(records):
            if record["what"] != what:
                text = f"rank {rank} is at {record['what']!r} of version {record['version']}, this rank at {what!r}"
                self.abort(text)
                raise StateError(f"{self.who}: rank {self.rank}: {text} of version {version}")
        return records

    def _record(self, rank: int, data: bytes) -> dict[str, Any]:
        try:
            record = json.loads(data)
        except ValueError:
            record = None
        if not isinstance(record, dict) or not {"what", "version"} <= set(record):
            self.abort(f"rank {rank} sent no record")
            raise FormatError(f"{self.who}: rank {rank} sent {data[:40]!r}, which is no record of spccl.sync")
        return record

    def vote(self, what: str, version: int | None, error: BaseException | None) -> None:
        """Raises: `error`, or PeerError that names the first rank which failed."""
        text = None if error is None else f"{type(error).__name__}: {error}"
        records = self.gather(what, version, error=text)
        if error is not None:
            raise error
        for rank, record in enumerate(records):
            if record.get("error") is not None:
                raise PeerError(
                    f"{self.who}: rank {self.rank}: version {version}: rank {rank} failed to {what} it, so no rank "
                    f"does: {record['error']}"
                )

    def broadcast(self, data: torch.Tensor, root: int, what: str) -> torch.Tensor:
        """Args: data: [n] uint8; the root has the bytes; on a GPU only if all ranks have a `gpu`. what: for errors."""
        if data.numel():
            with self._named(what):
                if self.is_native:
                    self.group.broadcast(data.numpy(), root)
                else:
                    import torch.distributed as dist

                    dist.broadcast(data, dist.get_global_rank(self.group, root), group=self.group)
        return data

    def room(self, n_bytes: int, root: int, what: str, device: torch.device = _CPU) -> torch.Tensor:
        """[n_bytes] uint8 for what a rank says it sends. Raises: FormatError; what torch raises without memory."""
        if not 0 <= n_bytes <= _MOST_BYTES:
            raise FormatError(f"{self.who}: rank {root}: {what} of {n_bytes} bytes")
        return torch.empty(n_bytes, dtype=torch.uint8, device=device)

    def receive(self, n_bytes: int, root: int, what: str) -> torch.Tensor:
        return self.broadcast(self.room(n_bytes, root, what), root, what)

    def send_index(self, index: dict[str, Any], manifests: Sequence[bytes], n_head: int) -> int:
        """Args: n_head: bytes of the first broadcast, which "hello" said. Returns what would have been enough."""
        text = json.dumps(index).encode()
        data = b"".join([text, *manifests])
        data = len(text).to_bytes(8, "little") + len(data).to_bytes(8, "little") + data
        head = torch.frombuffer(bytearray(data[:n_head].ljust(n_head, b"\0")), dtype=torch.uint8)
        self.broadcast(head, self.rank, "the index")
        if len(data) > n_head:
            self.broadcast(torch.frombuffer(bytearray(data[n_head:]), dtype=torch.uint8), self.rank, "the index")
        return len(data)

    def receive_index(self, root: int, n_head: object) -> tuple[dict[str, Any], bytes]:
        """The index, and the manifests one after the other. Args: n_head: of the publisher's "hello"."""
        if type(n_head) is not int or n_head < 16:
            raise FormatError(f"{self.who}: rank {root}: an index of {str(n_head)[:40]} bytes")
        head = self.receive(n_head, root, "the index").numpy().tobytes()
        n_text, n_bytes = (int.from_bytes(head[at : at + 8], "little") for at in (0, 8))
        rest = self.receive(max(0, 16 + n_bytes - n_head), root, "the index")
        data = (head + rest.numpy().tobytes())[16 : 16 + n_bytes]
        try:
            index = json.loads(data[:n_text])
        except (ValueError, RecursionError):
            index = None
        if not isinstance(index, dict):
            raise FormatError(f"{self.who}: rank {root} sent {data[:40]!r}, which is no index of spccl.sync")
        return index, data[n_text:]

    @contextlib.contextmanager
    def _named(self, what: str) -> Iterator[None]:
        """Errors of the group say what was under way."""
        if self.broken is not None:
            raise StateError(
                f"{self.who}: rank {self.rank}: {what}: an earlier call was left half way, so make a new group and "
                f"call regroup: {self.broken}"
            )
        try:
            yield
        except BaseException as error:
            self._break(f"{what}: {type(error).__name__}: {error}")
            if not isinstance(error, (Error, RuntimeError)):
                raise
            kind = type(error) if isinstance(error, Error) else PeerError  # torch has one class for all
            raise kind(f"{self.who}: rank {self.rank}: {what}: {error}") from error

    def _break(self, text: str) -> None:
        """No further call in a torch group: it has no abort, and would match this rank's calls with others' wrongly. A
        Communicator that failed refuses calls by itself."""
        if not self.is_native and self.broken is None:
            self.broken = text

    def abort(self, text: str) -> None:
        """Let the waits of all other ranks end now, where the group can. Only `regroup` helps after this."""
        self._break(text)
        if self.is_native:
            self.group.abort(text)


class Received(Source):
    """The versions that a publisher sent, for one `stage`."""

    def __init__(
        self,
        group: Group,
        root: int,
        index: dict[str, Any],
        manifests: bytes,
        keeps_version: bool,
        device: torch.device = _CPU,
    ):
        """Args:
        manifests: one after the other.
        keeps_version: the receiver holds one, so an anchor that `stage` would write is not for it.
        device: of the frames.
        """
        self.name = f"rank {root}"
        self._keeps_version = keeps_version
        self._latest: Latest | None = None
        self._manifests: dict[int, bytes] = {}
        self._files: dict[tuple[int, int], torch.Tensor] = {}  # of a version and number of its delta
        self.anchor_sizes: list[int] = []
        self.anchor_first = False
        try:
            latest = json.dumps(index["latest"]).encode()
            self.anchor_sizes, self.anchor_first = list(index["anchor"]), bool(index["anchor_first"])
            rows = [(int(v["version"]), int(v["bytes"]), list(v["files"])) for v in index["versions"]]
        except (KeyError, TypeError, ValueError) as error:
            raise FormatError(f"{group.who}: {self.name}: its index is not one of spccl.sync") from error
        self._latest = parse_latest(f"{self.name}/{_folder.LATEST}", latest)
        end = 0
        for version, n_bytes, sizes in rows:
            start, end = end, end + n_bytes
            if not start <= end <= len(manifests):
                raise FormatError(f"{group.who}: {self.name}: version {version}: a manifest of {n_bytes} bytes")
            self._manifests[version] = manifests[start:end]
            for number, size in enumerate(sizes):
                self._files[version, number] = group.room(size, root, f"version {version}", device)

    def take(self, group: Group, root: int) -> None:
        """Receive the frames that the index says."""
        for (version, _), frames in self._files.items():
            group.broadcast(frames, root, f"version {version}")

    def __str__(self) -> str:
        return self.name

    def latest(self) -> Latest | None:
        return self._latest

    def versions(self) -> list[int]:
        return sorted(self._manifests)

    def manifest(self, version: int, wanted: str) -> Manifest:
        where = self.where(version, _folder.MANIFEST)
        if version not in self._manifests:
            raise FormatError(f"{where}: not sent")
        return _blob.checked_manifest(where, self._manifests[version], version, wanted)

    def delta_bytes(self, manifest: Manifest) -> float:
        n_files = sum(version == manifest.version for version, _ in self._files)
        return manifest.delta_bytes if n_files == len(manifest.delta) else float("inf")

    def anchor_bytes(self, manifest: Manifest) -> float:
        is_sent = self.anchor_sizes and manifest.version == self._latest.version
        is_sent = is_sent and not (self.anchor_first and self._keeps_version)
        return super().anchor_bytes(manifest) if is_sent else float("inf")

    def load(self, version: int, file: File) -> _blob.Frames:
        """Of a delta; it is kept once."""
        where = self.where(version, file.name)
        data = self._files.get((version, int(file.name[6:11]) - 1)) if file.name.startswith("delta") else None
        if data is None:
            raise FormatError(f"{where}: not sent")
        return _blob.Frames(where, data).check(file)

    open = load
