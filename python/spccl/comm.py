"""Communicators: one rank's membership of one group, and its collectives."""

from __future__ import annotations

import dataclasses
import datetime
from types import TracebackType
from typing import Any

from . import _ext
from .frame import dtype_name

COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "broadcast")
REDUCING = ("reduce_scatter", "all_reduce")
OPS = ("sum", "avg", "min", "max", "prod")
_MOST_SECONDS = 1e9  # 31 years: fits int64 as nanoseconds


def get_unique_id() -> bytes:
    """Make the id of a new group: 128 bytes. The caller passes them to all ranks by any means.

    This process serves the rendezvous until the group has formed, or until no rank was connected for
    `SPCCL_TIMEOUT_MS`. An id is good for one group. The rendezvous listens on every address of this host;
    SPCCL_RENDEZVOUS_ADDR names one address or interface.
    Returns: 128 bytes, which contain a secret.
    Raises: SystemCallError, SettingError.
    """
    return _ext.get_unique_id()


@dataclasses.dataclass(frozen=True)
class Stats:
    """Counters of one rank since its communicator was made.

    Attributes:
        n_collectives: calls.
        dense_bytes_sent: bytes that the sent payloads would have if they were dense.
        wire_bytes_sent, wire_bytes_received: bytes on the wire, headers included.
        buffer_bytes: bytes of host memory that the communicator holds now.
        n_frames_sent: number of frames by format.
    """

    n_collectives: int
    dense_bytes_sent: int
    wire_bytes_sent: int
    wire_bytes_received: int
    buffer_bytes: int
    n_frames_sent: dict[str, int]

    def since(self, before: Stats) -> Stats:
        """What was counted after `before` was read; `buffer_bytes` stays the present value."""
        return Stats(
            self.n_collectives - before.n_collectives,
            self.dense_bytes_sent - before.dense_bytes_sent,
            self.wire_bytes_sent - before.wire_bytes_sent,
            self.wire_bytes_received - before.wire_bytes_received,
            self.buffer_bytes,
            {name: n - before.n_frames_sent[name] for name, n in self.n_frames_sent.items()},
        )


def _ms(timeout: float | datetime.timedelta | None, unset: int, least: str = "above 0") -> int:
    """Seconds or timedelta -> whole milliseconds, rounded up: a short wait must not become 0.

    Args: unset: what None becomes. least: "above 0", or "0 or more".
    """
    if timeout is None:
        return unset
    seconds = timeout.total_seconds() if isinstance(timeout, datetime.timedelta) else float(timeout)
    if not (seconds > 0 or (seconds == 0 and least == "0 or more")) or seconds > _MOST_SECONDS:
        raise _ext.ArgumentError(f"timeout: got {timeout!r}; wanted seconds {least} and at most {_MOST_SECONDS:.0e}")
    return -int(-seconds * 1000 // 1)


class Request:
    """One collective under way. Made by `async_op=True`.

    spccl keeps the collective's arrays alive until the collective is done, also if the Request is dropped. Do
    not use the arrays before that.
    """

    __slots__ = ("_request",)

    def __init__(self, request: _ext.Request) -> None:
        self._request = request

    def done(self) -> bool:
        """Whether the collective has ended, with success or not. Never blocks."""
        return self._request.done()

    def wait(self, timeout: float | datetime.timedelta | None = None) -> None:
        """Wait until the collective is done.

        Args: timeout: seconds or timedelta, 0 or more; None: until the communicator's own deadline.
        Raises: TimeoutError after `timeout` (the collective goes on). PeerError, MismatchError, AbortedError,
            FormatError or TimeoutError if the collective failed: the communicator is then broken; close it.
        """
        self._request.wait(_ms(timeout, -1, "0 or more"))

    @property
    def error(self) -> _ext.Error | None:
        """The exception that the collective ended with; None while it is under way and after success."""
        return self._request.error


class Communicator:
    """One rank's membership of one group. Use it as a context manager, or call `close`.

    All ranks must make the same calls in the same order, each from one thread at a time. Several collectives
    may be in flight. An array is any object with the buffer protocol or DLPack, in host memory, C-contiguous.
    Its shape does not matter: spccl takes it as flat. Reductions add in rank order from +0.0, float16 and
    bfloat16 in float32 with one rounding. So every rank and every run gets the same bits, whatever format or
    transport carried them. With schedule="ring" or "hierarchical", or a plan file, they may add in another order,
    which is the same on all ranks and in all runs.
    Source: docs/ALGORITHMS.md.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        *,
        store: Any = None,
        unique_id: bytes | None = None,
        name: str | None = None,
        timeout: float | datetime.timedelta | None = None,
        format: str = "auto",
        slice_bytes: int = 0,
        transports: str | None = None,
        n_sockets: int = 0,
        secret: bytes | None = None,
        schedule: str | None = None,
        host_id: str | None = None,
    ) -> None:
        """Join a group; returns when every link of this rank is up.

        Args:
            rank: number of this rank, 0 to world_size - 1.
            world_size: number of ranks in the group.
            store: a key-value store that all ranks reach: a torch.distributed.Store, or an object with its
                set(key, bytes), get(key) -> bytes and wait([key], timedelta). Used only until this returns.
            unique_id: instead of a store: the 128 bytes of `get_unique_id`, the same on every rank.
            name: name of the group, for error texts and for keys in the store; "world" if None. Two groups on
                one store need two names.
            timeout: deadline of joining and of each collective: seconds or timedelta, above 0; None =
                SPCCL_TIMEOUT_MS, 600 s by default.
            format: "auto", or the format of every slice: "empty", "tile", "pici", "coo", "dense".
            slice_bytes: dense bytes per slice; 0 = spccl chooses by the size of the array.
            transports: comma list, tried in order for each pair of ranks, such as "shm,tcp"; None = all of this
                build.
            n_sockets: TCP sockets per peer and queue; 0 = spccl chooses.
            secret: 32 bytes that all ranks know; None: rank 0 makes a secret and passes it by the store.
            schedule: "direct", "oneshot", "relayed", "ring", "hierarchical", "file:PATH" of a plan file
                (docs/SCHEDULES.md), "tune", or "tune:PATH" of a profile, the same on all ranks. None: the one of least
                cost for each call, of the first three; "tune": corrected by the times of calls; "tune:PATH": and what
                was learnt is kept in PATH (docs/ALGORITHMS.md). SPCCL_SCHEDULE wins.
            host_id: ranks with another name count as on another host; None: found. SPCCL_HOST_ID wins.
        Raises: TimeoutError (a rank did not come), AuthError, UnreachableError, PeerError, MismatchError,
            SettingError, ArgumentError.
        """
        self._comm = _ext.Communicator(
            rank,
            world_size,
            store=store,
            unique_id=unique_id,
            name=name,
            timeout_ms=_ms(timeout, 0),
            format=format,
            slice_bytes=slice_bytes,
            transports=transports,
            n_sockets=n_sockets,
            secret=secret,
            schedule=schedule,
            host_id=host_id,
        )
        self._channels: list[Any] = []  # open sets: the memory that they hold lives as long as the communicator

    @property
    def rank(self) -> int:
        """Number of this rank in the group, 0 to world_size - 1."""
        return self._comm.rank

    @property
    def world_size(self) -> int:
        """Number of ranks in the group."""
        return self._comm.world_size

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._comm.closed

    def all_gather(self, input: Any, output: Any, *, dtype: Any = None, async_op: bool = False) -> Request | None:
        """output[r * n : (r + 1) * n] = rank r's input.

        Args:
            input: n elements, host memory. It is exactly this rank's part of `output` (in place), or does not
                overlap `output`.
            output: world_size * n elements, host memory, writable, same dtype.
            dtype: the dtype to read both arrays as, as in `spccl.encode`; any dtype.
            async_op: return a Request at once.
        Returns: a Request if `async_op`, else None.
        Raises: ArgumentError, StateError. PeerError, TimeoutError, MismatchError, AbortedError and FormatError
            come from here or from `Request.wait`; the communicator is then broken.
        """
        return _request(self._comm.all_gather(input, output, dtype=dtype_name(dtype), async_op=async_op))

    def reduce_scatter(
        self, input: Any, output: Any, op: str = "sum", *, dtype: Any = None, async_op: bool = False
    ) -> Request | None:
        """output = the reduction, over all ranks, of block number `rank` of their inputs.

        Args:
            input: world_size * n elements, host memory.
            output: n elements, host memory, writable, same dtype. It is exactly this rank's block of `input` (in
                place), or does not overlap `input`.
            op: "sum", "avg", "min", "max" or "prod". Elements that are zero count as zeros.
            dtype, async_op: as in `all_gather`; float8 is refused, because spccl has no arithmetic for it.
        Returns, raises: as `all_gather`.
        """
        return _request(self._comm.reduce_scatter(input, output, op, dtype=dtype_name(dtype), async_op=async_op))

    def all_reduce(
        self, input: Any, output: Any = None, op: str = "sum", *, dtype: Any = None, async_op: bool = False
    ) -> Request | None:
        """output = the reduction of every rank's input; the same bits on every rank.

        Args:
            input: n elements, host memory.
            output: n elements, host memory, writable, same dtype; None: in place, in `input`.
            op, dtype, async_op: as in `reduce_scatter`.
        Returns, raises: as `all_gather`.
        """
        return _request(self._comm.all_reduce(input, output, op, dtype=dtype_name(dtype), async_op=async_op))

    def broadcast(self, buffer: Any, root: int = 0, *, dtype: Any = None, async_op: bool = False) -> Request | None:
        """Copy the root's buffer into every other rank's buffer.

        Args:
            buffer: n elements, host memory; writable except on the root.
            root: rank that has the data.
            dtype, async_op: as in `all_gather`.
        Returns, raises: as `all_gather`.
        """
        return _request(self._comm.broadcast(buffer, root, dtype=dtype_name(dtype), async_op=async_op))

    def abort(self, reason: str | None = None) -> None:
        """Break the communicator at once: every wait on it, here and on the peers, ends with AbortedError.

        Threads: any.

        Args: reason: one line for the error texts, here and on the peers.
        """
        self._comm.abort(reason)

    def async_error(self) -> _ext.Error | None:
        """The first error that broke this communicator; None while it works. Threads: any."""
        return self._comm.async_error()

    def set_timeout(self, timeout: float | datetime.timedelta) -> None:
        """Set the deadline of later collectives: seconds or timedelta, above 0."""
        self._comm.set_timeout(_ms(timeout, 0))

    def stats(self) -> Stats:
        """Counters since the communicator was made."""
        return Stats(**self._comm.stats())

    def describe_links(self) -> dict[int, str]:
        """For each other rank: which transport carries the traffic to it, and why."""
        comm = self._comm
        return {peer: comm.describe_link(peer) for peer in range(comm.world_size) if peer != comm.rank}

    def describe_schedules(self) -> list[str]:
        """One line for each kind of call so far (collective, elements, dtype): which schedule it takes, and why.

        "all_reduce of 1000 float32: oneshot (assumed 100% and 100% nonzero; direct 4.39 us; oneshot 2.839 us)": the
        call; the schedule, after "forced " if SPCCL_SCHEDULE names it, or which plan of a plan file, and whether GPUs
        can run it, or that the file has none; densities of an input and of the sum, "measured" in earlier calls or
        "assumed"; the time that each candidate is estimated to take; what the tuner does: "tuning", or "tuned", and the
        slice size. They are as they were when one of them last changed. 64 kinds are kept.
        Empty before the first call.
        Raises: StateError after close().
        """
        return self._comm.describe_schedules()

    def attach_gpu(self, device: int = -1) -> None:
        """Attach a GPU, for `spccl.channels`. All ranks call it, at the same place in their calls. Experimental.

        Args: device: CUDA ordinal of this rank's GPU; -1 = the current one of the calling thread.
        Raises: UnsupportedError (the library or the host has no CUDA), UnreachableError, DeviceError, StateError.
        """
        self._comm.attach_gpu(device)

    def wait_gpu(self, stream: int = 0, timeout: float | datetime.timedelta | None = None) -> None:
        """Wait until a stream of the attached GPU is done, or the communicator is broken. Experimental.

        Args: stream: a cudaStream_t as a number (torch: `stream.cuda_stream`); 0 = the default stream. timeout: seconds
            or timedelta; None = the communicator's.
        Raises: TimeoutError; what a wait of a kernel with channels failed with: the communicator is then broken.
        """
        self._comm.wait_gpu(stream, _ms(timeout, -1, "0 or more"))

    def close(self) -> None:
        """Wait until the collectives under way have ended (within their deadlines), then leave the group. Idempotent.

        Raises: StateError if another thread is inside a call.
        """
        self._comm.close()
        self._channels.clear()

    def __enter__(self) -> Communicator:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # After an exception this rank makes no more calls. With abort() the peers fail now, not at their deadline.
        if error is not None and not self.closed:
            self.abort(f"rank {self.rank} left its `with` block: {type(error).__name__}: {error}")
        self.close()

    def __repr__(self) -> str:
        if self.closed:
            return "<spccl.Communicator closed>"
        return f"<spccl.Communicator rank {self.rank} of {self.world_size}>"


def _request(request: _ext.Request | None) -> Request | None:
    return None if request is None else Request(request)
