"""spccl as a backend of torch.distributed, for CPU and CUDA tensors.

    import torch.distributed as dist
    dist.init_process_group("spccl")                 # or "cuda:spccl", "cpu:gloo,cuda:spccl", "cpu:spccl,cuda:nccl"
    dist.all_reduce(tensor)

An installed spccl registers itself when torch is imported (entry point `torch.backends`); otherwise
`import spccl` does, or `register()`. spccl runs all-gather, reduce-scatter, all-reduce (of torch.sparse_coo
too) and broadcast. A Gloo or NCCL group over the same ranks runs everything else. Source: docs/TORCH.md.
"""

from __future__ import annotations

import atexit
import dataclasses
import functools
import os
import warnings
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from . import _torch_glue, _torch_inner, _torch_join, _torch_settings
from ._group_stats import CudaStats, GroupStats, description
from ._torch_settings import ORDERS, ROUTES
from .frame import FORMATS as FORMAT_NAMES

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

NAME = "spccl"
AVERAGING = (NAME, "nccl")  # backends with ReduceOp.AVG
FORMATS = {"auto": -1} | {name: i for i, name in enumerate(FORMAT_NAMES) if i > 0}  # spccl_format in spccl.h
DEFAULT_TIMEOUT = timedelta(seconds=600)


@dataclasses.dataclass(frozen=True)
class Options:
    """Settings of one group: `init_process_group("spccl", pg_options=spccl.backend.Options(format="pici"))`.

    All ranks pass the same values. An SPCCL_* variable that is set replaces the value given here, but for the
    timeout: SPCCL_TIMEOUT_MS has no effect on groups of torch.

    Attributes:
        timeout: deadline of each collective; None = the group's `timeout`.
        format: "auto", or the format of every slice: "tile", "pici", "coo", "dense". Never changes a result.
        slice_bytes: dense bytes per slice; 0 = spccl chooses.
        transports: comma list, tried in order for each pair of ranks, such as "shm,tcp"; "" = default.
        n_sockets: TCP sockets per peer and queue; 0 = default.
        max_ctas: most thread blocks (one per multiprocessor) of a CUDA collective; 0 = all.
        inbox_bytes: most bytes of GPU memory for the data that peers send; 0 = default.
        cuda_fallback, cuda_engine: of earlier versions; use cuda_route. They act for one more release, and read as what
            cuda_route means.
        order: "device": the collectives of all groups of a GPU are in one collective order, as kernels that wait
            for peers need it. "group": each group has an order of its own. Variable: SPCCL_ORDER.
        blocking_wait: CUDA calls and Work.wait() return when the GPU is done, and raise if it failed. Variable:
            SPCCL_BLOCKING_WAIT=1.
        cuda_route: what runs CUDA collectives: "auto", "spccl", "one-host", these with "+stage", "nccl" or "stage".
            docs/SETTINGS.md says what each means. Variable: SPCCL_CUDA_ROUTE.
    """

    timeout: timedelta | None = None
    format: str = "auto"
    slice_bytes: int = 0
    transports: str = ""
    n_sockets: int = 0
    max_ctas: int = 0
    inbox_bytes: int = 0
    cuda_fallback: dataclasses.InitVar[str | None] = None
    order: str = "device"
    blocking_wait: bool = False
    cuda_engine: dataclasses.InitVar[bool | None] = None
    cuda_route: str = "auto"

    def __post_init__(self, cuda_fallback: str | None, cuda_engine: bool | None) -> None:
        if isinstance(cuda_engine, _OldFlag):
            cuda_engine = None
        if isinstance(cuda_fallback, _OldText):
            cuda_fallback = None
        if cuda_fallback not in (None, "nccl", "stage"):
            raise ValueError(f"spccl: Options.cuda_fallback={cuda_fallback!r}, wanted one of nccl, stage")
        if cuda_fallback is not None or cuda_engine is not None:
            route = _torch_settings.merge_old(self.cuda_route, cuda_engine, cuda_fallback)
            object.__setattr__(self, "cuda_route", route)
            warnings.warn(
                f"spccl: Options.cuda_fallback and cuda_engine go in the next release: write cuda_route={route!r}",
                FutureWarning,
                stacklevel=3,
            )
        for name, allowed in (("format", FORMATS), ("order", ORDERS), ("cuda_route", ROUTES)):
            if getattr(self, name) not in allowed:
                raise ValueError(f"spccl: Options.{name}={getattr(self, name)!r}, wanted one of {', '.join(allowed)}")
        for name, bits in (("slice_bytes", 32), ("n_sockets", 32), ("max_ctas", 32), ("inbox_bytes", 48)):
            value = getattr(self, name)
            if not isinstance(value, int) or not 0 <= value < 2**bits:
                raise ValueError(f"spccl: Options.{name}={value!r}, wanted a whole number from 0 to {2**bits - 1}")
        if self.timeout is not None and self.timeout <= timedelta(0):
            raise ValueError(f"spccl: Options.timeout={self.timeout!r}, wanted more than 0")


class _OldFlag(int):
    """What Options.cuda_engine reads as. `dataclasses.replace` passes it on, and it then counts as not given."""

    __repr__ = __str__ = lambda self: str(bool(self))


class _OldText(str):
    """The same, of Options.cuda_fallback."""


Options.cuda_engine = property(lambda self: _OldFlag(self.cuda_route not in ("nccl", "stage")))
Options.cuda_fallback = property(lambda self: _OldText("stage" if self.cuda_route.endswith("stage") else "nccl"))


def register() -> None:
    """Make the name "spccl" known to torch.distributed. A second call does nothing.

    Raises: RuntimeError if this torch was built without torch.distributed.
    """
    import torch.distributed as dist

    if not dist.is_available():
        raise RuntimeError("spccl: this torch was built without torch.distributed")
    if NAME.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu", "cuda"])


def autoload() -> None:
    """Entry point `torch.backends`: torch calls it at the end of `import torch`. Never raises.

    An exception here would make `import torch` fail, so a failure becomes a warning.
    """
    try:
        register()
    except Exception as error:
        warnings.warn(
            f'spccl: backend="spccl" is not available in torch.distributed: {type(error).__name__}: {error}',
            RuntimeWarning,
            stacklevel=2,
        )


def has_ops(group: dist.ProcessGroup | None, device: torch.device) -> bool:
    """Whether spccl's own ops serve tensors of `device` in this group. Not with TORCH_DISTRIBUTED_DEBUG=DETAIL, which
    hides the backend behind torch's checks."""
    import torch.distributed as dist

    return name_for(group, device) == NAME and dist.get_debug_level() != dist.DebugLevel.DETAIL


def stats(group: dist.ProcessGroup | None = None) -> GroupStats:
    """Counters of `group` (default: the world) on this rank.

    Raises: ValueError if no backend of the group is spccl.
    """
    import torch

    handle = boxed(group)  # before the op: making a group loads the ops
    n = list(torch.ops.spccl.stats(handle))
    return GroupStats(*n[:4], frames_sent=dict(zip(FORMAT_NAMES, n[4:9], strict=True)), buffer_bytes=n[9])


def cuda_stats(group: dist.ProcessGroup | None = None) -> CudaStats:
    """State and counters of `group` (default: the world) on this rank's GPU. Waits for a small copy from the GPU, but
    for no stream.

    Raises: ValueError if no backend of the group is spccl.
    """
    import torch

    handle = boxed(group)
    path, _, why = torch.ops.spccl.cuda_route(handle).partition(": ")
    n = list(torch.ops.spccl.cuda_stats(handle))
    return CudaStats(path, why, *n[:5], dict(zip(FORMAT_NAMES, n[5:10], strict=True)), *n[10:])


class limit_ctas:
    """Context: the CUDA collectives that this rank calls on `group` inside use at most `max_ctas` thread blocks.

        with spccl.backend.limit_ctas(32):
            dist.all_reduce(gradient)

    The other multiprocessors are free for other kernels. All ranks give the same number; otherwise the group breaks,
    and the error names ranks and numbers. A captured collective keeps its limit when the graph is replayed. The limit
    is for spccl's GPU engine: CPU tensors and collectives that go to NCCL ignore it. Contexts can be nested, and one
    object can be entered again and again. One thread at a time may use a group.

    Args:
        max_ctas: 1 or more, and at most `cuda_stats(group).n_ctas`; 0 = that many.
        group: default: the world.
    Raises: ValueError if no backend of the group is spccl, or `max_ctas` is below 0; at the next CUDA collective if
        it is above the group's number.
    """

    def __init__(self, max_ctas: int, group: dist.ProcessGroup | None = None):
        if not isinstance(max_ctas, int) or max_ctas < 0:
            raise ValueError(f"spccl: limit_ctas: max_ctas={max_ctas!r}, wanted an int of 0 or more")
        self._max_ctas = max_ctas
        self._boxed = boxed(group)
        self._before: list[int] = []

    def __enter__(self) -> None:
        import torch

        self._before.append(torch.ops.spccl.limit_ctas(self._boxed, self._max_ctas))

    def __exit__(self, *exc_info: object) -> None:
        import torch

        torch.ops.spccl.limit_ctas(self._boxed, self._before.pop())


def describe_link(peer: int, group: dist.ProcessGroup | None = None) -> str:
    """One line that says which transport carries the traffic to rank `peer` of `group`, and why.

    Raises: ValueError if no backend of the group is spccl, or `peer` is not one of its ranks.
    """
    import torch

    handle = boxed(group)
    return torch.ops.spccl.describe_link(handle, peer)


def describe_group(group: dist.ProcessGroup | None = None) -> str:
    """Lines that say what `group` (default: the world) takes on this rank: who moves CUDA tensors, the memory and
    proxies for them, and how each peer is reached. Complete after the group's first CUDA collective.

    Raises: ValueError if no backend of the group is spccl.
    """
    import torch.distributed as dist

    rank, n_ranks = dist.get_rank(group), dist.get_world_size(group)
    links = {peer: describe_link(peer, group) for peer in range(n_ranks) if peer != rank}
    return description(rank, n_ranks, cuda_stats(group), links)


def name_for(group: dist.ProcessGroup, device: torch.device) -> str:
    """Name of the backend that serves `device` in a group, "cpu:gloo,cuda:spccl" groups included."""
    return group._get_backend(device).name()


def names_of(group: dist.ProcessGroup) -> list[str]:
    """Names of a group's backends, one for each kind of device."""
    return [name_for(group, device) for device in group._device_types]


def boxed(group: dist.ProcessGroup | None) -> Any:
    """`group` (default: the world) as the ops of the glue take it.

    With TORCH_DISTRIBUTED_DEBUG=DETAIL torch wraps the backend, and the ops do not know the wrapper. They then get a
    group that has the backend itself. Only the ops see that group.
    """
    import torch
    import torch.distributed as dist

    group = dist.group.WORLD if group is None else group
    if group is None:
        raise ValueError("spccl: there is no default group: call torch.distributed.init_process_group first")
    names = names_of(group)
    if NAME not in names:
        raise ValueError(f"spccl: the backends of this group are {', '.join(names)}, wanted 'spccl'")
    wrapped = {d: getattr(group._get_backend(d), "wrapped_pg", None) for d in group._device_types}
    if all(backend is None for backend in wrapped.values()):
        return group.boxed()
    bare = dist.ProcessGroup(group.rank(), group.size())
    for device, backend in wrapped.items():
        if backend is not None and backend.name() == NAME:
            bare._register_backend(torch.device(device), dist.ProcessGroup.BackendType.CUSTOM, backend)
    return bare.boxed()


_in_force: dict[str, Options] = {}  # by the name of a group; a later group of that name replaces it


def options_of(group: dist.ProcessGroup) -> Options | None:
    """The options with which `group` was made, variables and timeout included; None if no backend of it is spccl."""
    return _in_force.get(group.group_name) if NAME in names_of(group) else None


# ---- making a group ------------------------------------------------------------------------------------------


def make_process_group(
    store: Any,
    rank: int,
    world_size: int,
    *,
    name: str = "spccl",
    timeout: timedelta = DEFAULT_TIMEOUT,
    options: Options | None = None,
) -> dist.ProcessGroup:
    """Make a process group without init_process_group, for CPU and CUDA tensors. All its ranks call this.

    It is for frameworks that make new groups when workers come and go (torchft), and for programs without a
    default group. torch.distributed does not know the group: pass it as `process_group=` to
    DistributedDataParallel, or call its methods (`group.allreduce(...)`). Functions that look up ranks, such as
    `dist.get_rank(group)` and `dist.broadcast(..., group)`, do not take the group. docs/FRAMEWORKS.md has the
    lines for torchft.

    Args:
        store: torch.distributed.Store that all ranks of the group reach.
        rank: number of this rank in the group, 0 to world_size - 1.
        world_size: number of ranks in the group.
        name: name of the group, for error texts and for keys in the store. Two groups that exist at the same time
            on one store need two names.
        timeout: deadline of joining and of each collective.
        options: settings of the group.
    Returns: the group, when all ranks have joined. `group.shutdown()` or dropping it frees it.
    Raises: TypeError, ValueError for a bad argument; DistBackendError if a rank does not join in time.
    """
    import torch
    import torch.distributed as dist

    if not isinstance(store, dist.Store):
        kind = type(store).__name__
        raise TypeError(f"spccl: make_process_group: store is a {kind}, wanted a torch.distributed.Store")
    if not 0 <= rank < world_size:
        raise ValueError(f"spccl: make_process_group: rank {rank} of {world_size}, wanted 0 to world_size - 1")
    if timeout <= timedelta(0):
        raise ValueError(f"spccl: make_process_group: timeout={timeout!r}, wanted more than 0")
    member = _Member(store, rank, world_size, name, list(range(world_size)))
    backend = _join(member, timeout, _options_of(options))
    custom = dist.ProcessGroup.BackendType.CUSTOM
    group = dist.ProcessGroup(store, rank, world_size)
    group._set_default_backend(custom)
    for device in ("cpu", "cuda"):
        group._register_backend(torch.device(device), custom, backend)
    group._set_group_name(name)
    return group


def _create(opts: Any, pg_options: Any = None) -> dist.Backend:
    """torch.distributed calls this once per group and rank, on all ranks of the group."""
    ranks = list(opts.global_ranks_in_group)
    _torch_join.check_rank(opts.group_rank, opts.group_size)
    member = _Member(opts.store, opts.group_rank, opts.group_size, str(opts.group_id), ranks)
    return _join(member, _as_timedelta(opts.timeout), _options_of(pg_options))


@dataclasses.dataclass(frozen=True)
class _Member:
    """One rank of one group. `global_ranks` holds the global rank of each rank of the group."""

    store: Any
    rank: int
    size: int
    name: str
    global_ranks: list[int]


def _join(member: _Member, timeout: timedelta, options: Options) -> dist.Backend:
    """Make this rank's backend of the group; returns when all ranks have joined."""
    import torch
    import torch.distributed as dist

    options = _with_environment(options)
    _torch_glue.load()
    _settle_callbacks_at_exit()
    _torch_inner.offer()
    _offer_split()
    timeout_ms = max(1, int((options.timeout or timeout).total_seconds() * 1000))
    bare = dist.ProcessGroup(_store_of_this_join(dist, member.store, member.rank), member.rank, member.size)
    with _torch_join.naming_absent_ranks(member, timeout_ms):
        group = torch.ops.spccl.make_process_group(
            bare.boxed(),
            member.name,
            member.global_ranks,
            {
                "timeout_ms": timeout_ms,
                "format": FORMATS[options.format],
                "slice_bytes": options.slice_bytes,
                "n_sockets": options.n_sockets,
                "stage": int(options.cuda_route.endswith("stage")),
                "order_per_group": int(options.order == "group"),
                "blocking_wait": int(options.blocking_wait),
                "max_ctas": options.max_ctas,
                "inbox_bytes": options.inbox_bytes,
                "cuda_engine": int(options.cuda_route not in ("nccl", "stage")),
                "between_hosts": {"spccl": 1, "one-host": 2}.get(options.cuda_route.removesuffix("+stage"), 0),
            },
            options.transports,
        )
    _in_force[member.name] = dataclasses.replace(options, timeout=timedelta(milliseconds=timeout_ms))
    return dist.ProcessGroup.unbox(group)._get_backend(torch.device("cpu"))


@functools.cache
def _offer_split() -> None:
    """Make split_group and new_group work where a device is bound. Changes torch's own classes, once.

    torch expects two attributes of a backend that supports splitting; in Python only torch's own backends have them.
    split_group copies `options`. `perform_nocolor_split` is for ranks outside of the new group: NCCL needs it, spccl
    does not.
    """
    import torch

    base = torch._C._distributed_c10d.Backend

    class SplitOptions(base.Options):
        def __deepcopy__(self, memo: dict[int, Any]) -> SplitOptions:
            return SplitOptions(self.backend, self._timeout)

    if not hasattr(base, "options"):
        base.options = property(lambda self: SplitOptions(self.name()))
    if not hasattr(base, "perform_nocolor_split"):
        base.perform_nocolor_split = lambda self, device: None
    _keep_nccl_from_splitting_us()


def _keep_nccl_from_splitting_us() -> None:
    """Make new_group(backend="nccl") work where the default group is spccl's and has a bound device.

    torch then passes the default group's backend to the new NCCL as the communicator to split, if the backend
    supports splitting. torch does not ask whether the backend is NCCL, and NCCL's options refuse any other
    backend with a TypeError. This function replaces torch's choice by one that leaves out spccl's backends.
    """
    from torch.distributed import distributed_c10d

    choose = getattr(distributed_c10d, "_get_split_source", None)
    if choose is None:  # a later torch; 2.9 to 2.13 have this function
        return

    def choose_unless_ours(group: Any) -> Any:
        source = choose(group)
        return None if source is not None and source.name() == NAME else source

    distributed_c10d._get_split_source = functools.wraps(choose)(choose_unless_ours)


@functools.cache
def _settle_callbacks_at_exit() -> None:
    """At exit, wait for callbacks of futures: a thread that takes the GIL after Python has ended would crash."""
    import torch

    atexit.register(torch.ops.spccl.prepare_exit, 10_000)


def _options_of(pg_options: Any) -> Options:
    if pg_options is None:
        return Options()
    if isinstance(pg_options, Options):
        return pg_options
    raise TypeError(f"spccl: pg_options is a {type(pg_options).__name__}, wanted spccl.backend.Options")


def _with_environment(options: Options) -> Options:
    """`options`, with the values that the environment sets."""
    found: dict[str, Any] = {"cuda_route": _torch_settings.route_in_force(options.cuda_route)}
    for field, setting in _torch_settings.OPTIONS.items():
        value = setting.given()
        if value is not None:
            found[field] = value == "1" if setting.choices == ("0", "1") else value
    return dataclasses.replace(options, **found)


def _as_timedelta(timeout: Any) -> timedelta:
    """torch passes the group's timeout as a timedelta, some versions as seconds."""
    return timeout if isinstance(timeout, timedelta) else timedelta(seconds=float(timeout))


def _store_of_this_join(dist: Any, store: Any, rank: int) -> Any:
    """`store` with a prefix under which no earlier group of the same name has written.

    After destroy_process_group and a new init_process_group torch may pass the same store with the same prefix,
    because torchrun's agent keeps the store. It still holds the addresses of the old group. So every rank counts
    its own joins in the store, and the count is the prefix. The ranks of one group have the same count.
    """
    count = store.add(f"spccl/joins/{rank}", 1)
    return dist.PrefixStore(f"spccl/{count}/", store)


if os.environ.get("TORCH_DISTRIBUTED_USE_TORCHCOMMS", "0") not in ("", "0"):
    warnings.warn(
        "spccl: TORCH_DISTRIBUTED_USE_TORCHCOMMS makes torch.distributed ignore out-of-tree backends; "
        'unset it to use backend="spccl"',
        RuntimeWarning,
        stacklevel=2,
    )
