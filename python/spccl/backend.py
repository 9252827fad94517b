"""spccl as a backend of torch.distributed, for CPU tensors.

    import torch.distributed as dist
    dist.init_process_group("spccl")                 # or "cpu:spccl", "cpu:spccl,cuda:nccl"
    dist.all_reduce(tensor)

An installed spccl registers itself when torch is imported (entry point `torch.backends`); otherwise
`import spccl` does, or `register()`. All-gather, reduce-scatter, all-reduce and broadcast are spccl's, also
all-reduce of torch.sparse_coo; everything else is handed to a Gloo group over the same ranks.
Source: docs/TORCH.md.
"""

from __future__ import annotations

import atexit
import dataclasses
import functools
import os
import warnings
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from . import _torch_glue

if TYPE_CHECKING:
    import torch.distributed as dist

NAME = "spccl"
FORMATS = {"auto": -1, "tile": 1, "pici": 2, "coo": 3, "dense": 4}  # spccl_format in spccl.h


@dataclasses.dataclass(frozen=True)
class Options:
    """Settings of one group: `init_process_group("spccl", pg_options=spccl.backend.Options(format="pici"))`.

    All ranks give the same. The SPCCL_* variables win over these.

    Attributes:
        timeout: deadline of each collective, if another than the group's `timeout` is wanted.
        format: "auto", or the format of every slice: "tile", "pici", "coo", "dense". Never changes a result.
        slice_bytes: dense bytes per slice; 0 = chosen by spccl.
        transports: comma list tried in order for each pair of ranks, such as "shm,tcp"; "" = default.
        n_sockets: TCP sockets per peer; 0 = default.
    """

    timeout: timedelta | None = None
    format: str = "auto"
    slice_bytes: int = 0
    transports: str = ""
    n_sockets: int = 0

    def __post_init__(self) -> None:
        if self.format not in FORMATS:
            raise ValueError(f"spccl: Options.format={self.format!r}, wanted one of {', '.join(FORMATS)}")
        for name in ("slice_bytes", "n_sockets"):
            value = getattr(self, name)
            if not isinstance(value, int) or not 0 <= value < 2**32:
                raise ValueError(f"spccl: Options.{name}={value!r}, wanted a whole number from 0 to 4294967295")
        if self.timeout is not None and self.timeout <= timedelta(0):
            raise ValueError(f"spccl: Options.timeout={self.timeout!r}, wanted more than 0")


@dataclasses.dataclass(frozen=True)
class GroupStats:
    """Counters of one rank of one group since it was made; only what spccl itself carried.

    Attributes:
        n_collectives: calls.
        dense_bytes_sent: bytes that the payloads would have been, dense.
        wire_bytes_sent, wire_bytes_received: bytes that travelled: frames and envelopes.
        frames_sent: number of slices by format.
        buffer_bytes: memory that the communicators hold now.
    """

    n_collectives: int
    dense_bytes_sent: int
    wire_bytes_sent: int
    wire_bytes_received: int
    frames_sent: dict[str, int]
    buffer_bytes: int


def register() -> None:
    """Make the name "spccl" known to torch.distributed. Cheap, and a second call does nothing.

    Raises: RuntimeError if this torch was built without torch.distributed.
    """
    import torch.distributed as dist

    if not dist.is_available():
        raise RuntimeError("spccl: this torch was built without torch.distributed")
    if NAME.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu", "cuda"])


def autoload() -> None:
    """Entry point `torch.backends`: torch calls it at the end of `import torch`. Never raises.

    An exception here would make `import torch` fail, so a failure is only told.
    """
    try:
        register()
    except Exception as error:
        warnings.warn(
            f'spccl: backend="spccl" is not available in torch.distributed: {type(error).__name__}: {error}',
            RuntimeWarning,
            stacklevel=2,
        )


def stats(group: dist.ProcessGroup | None = None) -> GroupStats:
    """What spccl has sent and received for `group` (default: the world) on this rank.

    Raises: ValueError if the group's CPU backend is not spccl.
    """
    import torch

    boxed = _boxed(group)  # first: the ops are there only once a group is
    n = list(torch.ops.spccl.stats(boxed))
    names = ("empty", "tile", "pici", "coo", "dense")
    return GroupStats(*n[:4], frames_sent=dict(zip(names, n[4:9], strict=True)), buffer_bytes=n[9])


def describe_link(peer: int, group: dist.ProcessGroup | None = None) -> str:
    """Which transport carries the traffic to rank `peer` of `group`, and why: one line.

    Raises: ValueError if the group's CPU backend is not spccl, or `peer` is not one of its ranks.
    """
    import torch

    boxed = _boxed(group)
    return torch.ops.spccl.describe_link(boxed, peer)


def _boxed(group: dist.ProcessGroup | None) -> Any:
    import torch
    import torch.distributed as dist

    group = dist.group.WORLD if group is None else group
    if group is None:
        raise ValueError("spccl: there is no default group: call torch.distributed.init_process_group first")
    name = group._get_backend(torch.device("cpu")).name()
    if name != NAME:
        raise ValueError(f"spccl: the group's CPU backend is {name!r}, wanted 'spccl'")
    return group.boxed()


# ---- making a group ------------------------------------------------------------------------------------------


def _create(opts: Any, pg_options: Any = None) -> dist.Backend:
    """torch.distributed calls this once per group and rank, on all ranks of the group."""
    import torch
    import torch.distributed as dist

    options = _options_of(pg_options)
    _torch_glue.load()
    _settle_callbacks_at_exit()
    timeout = options.timeout or _as_timedelta(opts.timeout)
    timeout_ms = max(1, int(timeout.total_seconds() * 1000))
    store = _store_of_this_join(dist, opts.store, opts.group_rank)
    scratch = dist.ProcessGroup(store, opts.group_rank, opts.group_size)
    gloo = _make_gloo(dist, store, opts, timeout)
    scratch._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
    group = torch.ops.spccl.make_process_group(
        scratch.boxed(),
        str(opts.group_id),
        list(opts.global_ranks_in_group),
        [timeout_ms, FORMATS[options.format], options.slice_bytes, options.n_sockets],
        options.transports,
    )
    return dist.ProcessGroup.unbox(group)._get_backend(torch.device("cpu"))


@functools.cache
def _settle_callbacks_at_exit() -> None:
    """Let callbacks of futures end before Python does; a thread that comes for the GIL later would crash."""
    import torch

    atexit.register(torch.ops.spccl.prepare_exit, 10_000)


def _options_of(pg_options: Any) -> Options:
    if pg_options is None:
        return Options()
    if isinstance(pg_options, Options):
        return pg_options
    raise TypeError(f"spccl: pg_options is a {type(pg_options).__name__}, wanted spccl.backend.Options")


def _as_timedelta(timeout: Any) -> timedelta:
    """torch hands the group's timeout on as a timedelta, or as seconds in some versions."""
    return timeout if isinstance(timeout, timedelta) else timedelta(seconds=float(timeout))


def _store_of_this_join(dist: Any, store: Any, rank: int) -> Any:
    """A part of `store` that no earlier group of the same name has written to.

    After destroy_process_group and a new init_process_group torch may hand out the same store with the same
    prefix (torchrun's agent keeps it): the addresses of the old group would still be there. Every rank counts
    its own joins in the store; ranks that belong together have the same count.
    """
    count = store.add(f"spccl/joins/{rank}", 1)
    return dist.PrefixStore(f"spccl/{count}/", store)


def _make_gloo(dist: Any, store: Any, opts: Any, timeout: timedelta) -> Any:
    """The inner Gloo, made as torch's own _new_process_group_helper makes one."""
    if not dist.is_gloo_available():
        raise RuntimeError("spccl: this torch was built without Gloo, to which spccl hands what is not its own")
    gloo = dist.ProcessGroupGloo(dist.PrefixStore("gloo/", store), opts.group_rank, opts.group_size, timeout=timeout)
    gloo.options.global_ranks_in_group = list(opts.global_ranks_in_group)
    gloo.options.group_name = opts.group_id
    gloo._set_sequence_number_for_group()
    return gloo


if os.environ.get("TORCH_DISTRIBUTED_USE_TORCHCOMMS", "0") not in ("", "0"):
    warnings.warn(
        "spccl: TORCH_DISTRIBUTED_USE_TORCHCOMMS makes torch.distributed ignore out-of-tree backends; "
        'unset it to use backend="spccl"',
        RuntimeWarning,
        stacklevel=2,
    )
