"""`Replica`: one worker of a server that several processes make up, and the votes between them.

All workers stage a version and vote; then all write it and vote again. A worker that fails makes all of them keep, or
take back, what they had. Which server it is does not matter here: vllm.py has the one for vLLM.
"""

from __future__ import annotations

import dataclasses
import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch

from spccl.errors import Error, FormatError, MismatchError, PeerError, StateError, TimeoutError, UnsupportedError

from ._source import Folder, Source
from ._tensors import boxes_of_plan
from .manifest import MASK, Manifest
from .record import Plan, prove, record
from .subscriber import Subscriber

# These words in an error tell the client: the server may go on serving; an update was begun and not finished.
INTACT = "every worker holds what it held before"
OPEN = "an update was begun and not finished"
BROKEN = "restart the server"  # also in an error: no later call can work
MOST_NAMES = 3  # of an error
MOST_WAIT_S = 5.0  # for the files of a published version, where a disk or a copy is late: the server may be paused
_VOTE_SHARE = 0.2  # of a request's time: a worker that reads too slowly says so before the others give up on it
_LEAST_POLL_S, _MOST_POLL_S = 0.0002, 0.01  # of the workers' store


def agreed(error: Error) -> Error:
    """Mark an error that every worker has, and knows that the others have: one of them may report it for all."""
    error.agreed = True
    return error


def is_agreed(error: BaseException) -> bool:
    return getattr(error, "agreed", False)


class Workers(Protocol):
    """The processes of one server."""

    rank: int
    size: int

    def exchange(self, answer: str, timeout_s: float) -> list[str]:
        """The answers of all workers, by rank. After an error no more. Raises: TimeoutError, PeerError."""


class OneWorker:
    """A server that is one process."""

    rank, size = 0, 1

    def exchange(self, answer: str, timeout_s: float) -> list[str]:
        return [answer]


class TorchWorkers:
    """The ranks of a group of torch.distributed. They exchange answers through the group's store, by number.

    The server's own collectives use the group: one of ours that a rank gave up would stay in it, and the next one would
    take its messages. A key of the store that nobody reads harms nothing.
    """

    _n_made: ClassVar[dict[str, int]] = {}  # by the group's name, the same on all ranks

    def __init__(self, group: Any):
        self.rank, self.size = torch.distributed.get_rank(group), torch.distributed.get_world_size(group)
        n = self._n_made[group.group_name] = self._n_made.get(group.group_name, 0) + 1
        store = torch.distributed.distributed_c10d._get_process_group_store(group)
        self._store = torch.distributed.PrefixStore(f"spccl.sync/{n}", store)
        self._n = 0

    def exchange(self, answer: str, timeout_s: float) -> list[str]:
        try:
            return self._exchange(answer, time.monotonic() + timeout_s)
        except RuntimeError as error:  # a store whose process is gone
            raise PeerError(f"sync: worker {self.rank}: no answers of the other workers: {error}") from error

    def _exchange(self, answer: str, deadline: float) -> list[str]:
        self._n += 1
        keys = [f"{self._n}/{rank}" for rank in range(self.size)]
        self._store.set(keys[self.rank], answer)
        pause_s = _LEAST_POLL_S
        while not self._store.check(keys):
            if self._store.check(["gave up"]):
                raise TimeoutError(f"sync: worker {self.rank}: {self._store.get('gave up').decode()}")
            if time.monotonic() >= deadline:
                late = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
                text = f"worker {self.rank} gave up: of {self.size} workers {late} did not answer"
                self._store.set("gave up", text)
                raise TimeoutError(f"sync: {text}")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _MOST_POLL_S)
        if self._store.check(["gave up"]):  # whoever did holds another result
            raise TimeoutError(f"sync: worker {self.rank}: {self._store.get('gave up').decode()}")
        answers = [self._store.get(key).decode() for key in keys]
        if self._n > 1:  # all have read it: they answered this one
            self._store.delete_key(f"{self._n - 1}/{self.rank}")
        return answers


class _Staging(threading.Thread):
    """Stages a version beside the server's own work, so that a wait for it can end."""

    def __init__(self, pull: Subscriber, version: int, timeout_s: float):
        super().__init__(name="spccl-stage", daemon=True)
        self.pull, self.version, self.timeout_s = pull, version, timeout_s
        self.error: BaseException | None = None
        self.was_late = False  # an update gave up waiting for it

    def run(self) -> None:
        try:
            self.pull.stage(self.version, timeout_s=self.timeout_s)
        except BaseException as error:
            self.error = error


class Replica:
    """The weights of one worker of a server, over a folder of versions.

    Each call is made on all workers, as the server's own calls to its workers are. Every wait has a deadline.

    Args:
        who: the server, for errors.
        model: has `load_weights` and named_parameters, in the state in which it serves.
        checkpoint: gives what the model has loaded, as (name, tensor), each time that it is called.
        workers: all processes of the server.
        require: raises if an update in place would not reach all that the model computes with.
    """

    def __init__(
        self,
        who: str,
        model: Any,
        checkpoint: Callable[[], Iterable[tuple[str, torch.Tensor]]],
        workers: Workers,
        require: Callable[[], object],
    ):
        self.require = require
        self.who, self.model, self.checkpoint, self.workers = who, model, checkpoint, workers
        self._plan: Plan | None = None
        self._pull: Subscriber | None = None
        self._staging: _Staging | None = None
        self._n_votes = 0
        self._is_mixed = False  # some worker may hold other weights than others
        self._broken = ""  # why no vote is possible any more

    @property
    def version(self) -> int | None:
        """The version that this worker holds."""
        return None if self._pull is None else self._pull.version

    def open(self, folder: str | Path, timeout_s: float, is_updating: bool = False) -> bool:
        """Take the versions of this folder from now on. Changes no weights.

        The first time the plan is recorded from the model's load_weights, and compared with the weights.
        Args: is_updating: whether this worker is between start and finish of an update.
        Returns: whether some worker is.
        Raises: StateError on all workers if one of them fails; the text has its reason.
        """
        self._require_votes(f"open {folder}")
        deadline = time.monotonic() + timeout_s
        error, shares, pull = None, {}, self._pull
        if pull is None or pull.folder != Path(folder):
            try:
                pull, shares = self._open(Path(folder), timeout_s)
            except Exception as failure:
                error = failure
        answers = self._vote(f"open {folder}", error, [is_updating, shares], _left(deadline))
        self._require_whole([shares for _, shares in answers])
        if pull is not self._pull:
            self._pull, self._staging = pull, None
        return any(updating for updating, _ in answers)

    def _open(self, folder: Path, timeout_s: float) -> tuple[Subscriber, dict[str, Any]]:
        self.require()
        manifest = _newest(Folder(folder), min(MOST_WAIT_S, timeout_s / 2))
        if self._plan is None:
            self._plan = plan_of(self.model, self.checkpoint, manifest)
        boxes_of_plan(self.who, manifest.tensors, self._plan)  # raises if the folder has other tensors
        numel = {name: entry.numel for entry in manifest.tensors for name in (entry.name, *entry.also)}
        parts = {
            name: [[p.row_elems, p.row_first, p.n_rows, p.col_first, p.n_cols] for p in places]
            for name, places in self._plan.items()
            if places and all(p.n_rows * p.n_cols < numel[name] for p in places)
        }
        return Subscriber(folder, places=self._plan), {n: [numel[n], found] for n, found in parts.items()}

    def _require_whole(self, answers: list[Any]) -> None:
        """Raises: StateError if of some tensor the workers have a part only: its sum could not be compared."""
        numel: dict[str, int] = {}
        found: dict[str, set[tuple[int, ...]]] = {}
        for answer in answers:
            for name, (n, parts) in answer.items():
                numel[name] = n
                found.setdefault(name, set()).update(map(tuple, parts))
        for name, parts in found.items():
            n = sum(rows * cols for _, _, rows, _, cols in parts)
            if n != numel[name]:
                raise self._failure("open", f"tensor {name!r}: the workers hold {n} of its {numel[name]} elements")

    def stage(self, version: int, timeout_s: float) -> None:
        """Begin to read and check a version, and return at once. `update` waits for it. Raises: as `open`."""
        self._require_votes(f"version {version}: begin to stage")
        deadline, error = time.monotonic() + timeout_s, None
        try:
            self._begin(version, timeout_s, deadline - timeout_s * _VOTE_SHARE)
        except Exception as failure:
            error = failure
        self._vote(f"version {version}: begin to stage", error, None, _left(deadline), still=not self._is_mixed)

    def _begin(self, version: int, timeout_s: float, deadline: float) -> None:
        pull, staging = self._need_pull(), self._staging
        if staging is not None and staging.version == version and staging.is_alive():
            return
        self._join(deadline)
        self.require()
        self._staging = _Staging(pull, version, max(0.0, min(MOST_WAIT_S, timeout_s / 2, deadline - time.monotonic())))
        self._staging.start()

    def _join(self, deadline: float) -> None:
        if self._staging is not None:
            self._staging.join(max(0.0, deadline - time.monotonic()))
            if self._staging.is_alive():
                raise TimeoutError(f"{self.who}: version {self._staging.version}: it was not read in time")

    def update(self, version: int, timeout_s: float) -> None:
        """Put a version into the weights of all workers, or of none. What `stage` has read is not read again.

        Raises: StateError on all workers if one of them fails; the text has its reason. If it contains INTACT, all
            workers have the weights that they had. Else they may hold a mixture: the server must not serve.
        """
        self._require_votes(f"version {version}: stage")
        deadline = time.monotonic() + timeout_s
        before, error, manifest_hash = self.version, None, ""
        try:
            manifest_hash = self._staged(version, timeout_s, deadline - timeout_s * _VOTE_SHARE)
        except Exception as failure:
            error = failure
        what = f"version {version}: stage"
        try:
            found = self._vote(what, error, manifest_hash, _left(deadline), still=not self._is_mixed)
            if len(set(found)) > 1:
                raise self._failure(what, "the workers' folders have different files", still=not self._is_mixed)
        except BaseException:
            self._abandon()
            raise
        self._write(version, before, deadline)

    def _abandon(self) -> None:
        """Drop what is staged. A thread that still reads goes on: the next update waits for it."""
        if self._staging is not None and self._staging.is_alive():
            self._staging.was_late = True
            return
        self._staging = None
        if self._pull is not None:
            self._pull.abandon()

    def _staged(self, version: int, timeout_s: float, deadline: float) -> str:
        """Wait until a version is staged. Returns the hash of its manifest."""
        pull, staging = self._need_pull(), self._staging
        if staging is None or staging.version != version or (staging.was_late and staging.error is not None):
            self._begin(version, timeout_s, deadline)
        self._join(deadline)
        assert self._staging is not None
        staging, self._staging = self._staging, None
        if staging.error is not None:
            raise staging.error
        self.require()  # again, because some layers derive weights when they are used first
        return pull.staged

    def _write(self, version: int, before: int | None, deadline: float) -> None:
        pull = self._need_pull()
        was_mixed, self._is_mixed = self._is_mixed, True  # while this writes, and if it fails
        error, parts = None, {}
        try:
            pull.commit()  # ends when a GPU has written, so its errors count in the vote
            parts = {
                name: [whole, [[*part, s] for part, s in found.items()]]
                for name, (found, whole) in pull.parts().items()
            }
        except BaseException as failure:
            error = failure
        what = f"version {version}: write"
        try:
            answers = self._vote(what, error, parts, _left(deadline))
            self._require_sums(what, answers)
        except BaseException as failure:
            self._take_back(what, version, before, failure, deadline)
            if was_mixed:
                raise
            self._is_mixed = False
            raise agreed(StateError(f"{failure}; {INTACT}")) from failure
        self._is_mixed = False

    def _take_back(self, what: str, version: int, before: int | None, why: BaseException, deadline: float) -> None:
        """All workers return to what they held. Raises: what `why` says, if one of them cannot."""
        pull, error = self._need_pull(), None
        try:
            if pull.version == version != before:
                pull.rollback()
            elif pull.version != before or before is None:
                raise StateError(
                    "its weights are a mixture: an anchor, or a change too large to undo, was half written"
                )
        except BaseException as failure:
            error = failure
        try:
            self._vote(f"{what}: take back", error, None, _left(deadline))
        except BaseException as failure:
            error = StateError(f"{why}; {failure}; the next update begins with an anchor")
            raise (agreed(error) if is_agreed(failure) else error) from why

    def _require_sums(self, what: str, answers: list[Any]) -> None:
        """Tensors of which each worker has a part: the sums of all parts must be the publisher's."""
        whole: dict[str, int] = {}
        found: dict[str, dict[tuple[int, ...], int]] = {}
        for answer in answers:
            for name, (total, parts) in answer.items():
                mine = found.setdefault(name, {})
                for *part, s in parts:
                    if mine.setdefault(tuple(part), s) != s:
                        raise self._failure(what, f"tensor {name!r}: two workers hold other bits of the same part")
                if whole.setdefault(name, total) != total:
                    raise self._failure(what, f"tensor {name!r}: the workers hold different versions")
        for name, parts in found.items():
            if sum(parts.values()) & MASK != whole[name]:
                raise self._failure(what, f"tensor {name!r}: the workers' parts are not the publisher's tensor")

    def _vote(self, what: str, error: BaseException | None, value: Any, timeout_s: float, still: bool = False) -> list:
        """Exchange what each worker found. Raises: StateError on all workers if one of them has an error."""
        self._n_votes += 1
        text = None if error is None else f"{type(error).__name__}: {error}"
        answer = json.dumps({"vote": [self._n_votes, what], "error": text, "value": value})
        answers = self._exchange(what, answer, timeout_s)
        failed = [f"worker {rank} of {len(answers)}: {a['error']}" for rank, a in enumerate(answers) if a["error"]]
        if len({str(a["vote"]) for a in answers}) > 1:
            failed.append(f"the workers voted on {', '.join(sorted({str(a['vote']) for a in answers}))}")
        if failed:
            raise self._failure(what, "; ".join(dict.fromkeys(failed)), still) from error
        return [a["value"] for a in answers]

    def _exchange(self, what: str, answer: str, timeout_s: float) -> list[dict[str, Any]]:
        """After a vote that did not end, this worker does not know what the others did: it votes no more."""
        self._require_votes(what)
        try:
            answers = [json.loads(one) for one in self.workers.exchange(answer, timeout_s)]
            if not all(isinstance(one, dict) and {"vote", "error", "value"} <= one.keys() for one in answers):
                raise ValueError("an answer of a worker is no vote")
        except BaseException as failure:
            self._broken = f"{type(failure).__name__}: {failure}"
            if not isinstance(failure, (Error, ValueError)):
                raise
            kind = type(failure) if isinstance(failure, Error) else StateError
            raise kind(f"{self.who}: {what}: {failure}; {BROKEN}") from failure
        return answers

    def _require_votes(self, what: str) -> None:
        if self._broken:
            raise StateError(f"{self.who}: {what}: a vote before it did not end: {self._broken}; {BROKEN}")

    def _failure(self, what: str, why: str, still: bool = False) -> StateError:
        return agreed(StateError(f"{self.who}: {what}: {why}" + (f"; {INTACT}" if still else "")))

    def _need_pull(self) -> Subscriber:
        if self._pull is None:
            raise StateError(f"{self.who}: no folder is open: the client says which one before the first update")
        return self._pull

    def close(self) -> None:
        """Drop the folder. The weights stay."""
        self._pull = self._staging = None


def _left(deadline: float) -> float:
    return max(1.0, deadline - time.monotonic())


def _newest(source: Source, timeout_s: float) -> Manifest:
    """The newest version's manifest."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            latest = source.latest()
            if latest is not None:
                return source.manifest(latest.version, latest.sha256)
        except FormatError as error:
            if not hasattr(error, "not_whole") or time.monotonic() >= deadline:
                raise
        if time.monotonic() >= deadline:
            raise TimeoutError(f"sync: {source}: no version within {timeout_s:g} s: publish first")
        time.sleep(0.05)


def plan_of(model: Any, checkpoint: Callable[[], Iterable[tuple[str, torch.Tensor]]], manifest: Manifest) -> Plan:
    """Where the model's load_weights puts each tensor of a publisher; compared with the checkpoint that it has loaded.

    Raises: MismatchError that names a tensor or a parameter which cannot be updated in place, and says why.
    """
    published = {name: entry for entry in manifest.tensors for name in (entry.name, *entry.also)}
    listed = [(name, x.dtype, tuple(x.shape)) for name, x in checkpoint()]
    wanted = []
    for name, dtype, shape in listed:
        if name in published:
            if tuple(published[name].shape) != shape:
                theirs = list(published[name].shape)
                raise MismatchError(f"tensor {name!r} is {list(shape)} in the server's checkpoint, published {theirs}")
            dtype = getattr(torch, published[name].dtype)
        wanted.append((name, dtype, shape))
    there = {name for name, _, _ in listed}
    for entry in manifest.tensors:
        if entry.numel and there.isdisjoint((entry.name, *entry.also)):
            raise MismatchError(f"tensor {entry.name!r}: the publisher has it, the server's checkpoint does not")
    recorded = record(model.load_weights, wanted)
    if recorded.dense:
        some = [f"{name!r} ({why})" for name, why in list(recorded.dense.items())[:MOST_NAMES]]
        more = len(recorded.dense) - len(some)
        raise MismatchError(f"cannot be updated in place: {', '.join(some)}" + (f" and {more} more" if more else ""))
    prove(recorded, _cast(checkpoint(), published), model.named_parameters())
    for name, places in recorded.items():
        if places and name not in published:
            raise MismatchError(f"tensor {name!r}: the server's checkpoint has it, the publisher does not")
    return dataclasses.replace(recorded, places={n: found for n, found in recorded.items() if n in published})


def _cast(tensors: Iterable[tuple[str, torch.Tensor]], published: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """A checkpoint in the publisher's dtypes, as load_weights would have cast it."""
    for name, x in tensors:
        yield name, x.to(getattr(torch, published[name].dtype)) if name in published else x


def require_nothing_derived(who: str, model: torch.nn.Module) -> None:
    """Raises: UnsupportedError that names a matrix which is neither a parameter nor a buffer: an update in place would
    not reach it, because it was made from the weights after loading."""
    known = {x.untyped_storage().data_ptr() for x in (*model.parameters(), *model.buffers())}
    for name, module in model.named_modules():
        for key, x in vars(module).items():
            is_matrix = isinstance(x, torch.Tensor) and x.is_floating_point() and x.dim() >= 2 and key != "kv_cache"
            if is_matrix and x.numel() and x.untyped_storage().data_ptr() not in known:
                raise UnsupportedError(
                    f"{who}: layer {name!r}: its {key!r} was made from the weights after loading: cannot be updated in "
                    "place"
                )
