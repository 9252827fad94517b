"""Which ranks prune with each other: all of a group, or hosts, whose ranks average first.

With hosts, a rank has two groups: its host, and its *place*: the ranks that come at the same position of their host.
Each rank owns a part of every parameter, prunes it, and exchanges it with the ranks of its place.
"""

from __future__ import annotations

import dataclasses
import warnings
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from spccl import _ext, backend

from .checks import Rule, is_whole, outside, require

if TYPE_CHECKING:
    from collections.abc import Sequence

MODE: Rule = (lambda x: x in ("auto", "off", "on"), "'auto', 'off' or 'on'")
ALIGN = 8  # elements: 16 bytes of 2-byte values, which the GPU's kernels want


class Hosts(NamedTuple):
    """The hosts of a group's ranks.

    why        a sentence for stats(): what was decided
    n_pruning  ranks that prune with each other: hosts, or all ranks
    per_host   ranks of each host that average first; 1: none do
    host       this rank's number among those that prune with each other
    place      this rank's number on its host
    of_rank    (host, place) of each rank of the group
    inner      the group of this host; None where per_host is 1
    across     the group of this place; where per_host is 1, the whole group, None for one rank alone
    """

    why: str
    n_pruning: int
    per_host: int
    host: int
    place: int
    of_rank: tuple[tuple[int, int], ...]
    inner: dist.ProcessGroup | None
    across: dist.ProcessGroup | None


def alone(group: dist.ProcessGroup | None, rank: int, n_ranks: int, why: str) -> Hosts:
    """All ranks prune with each other."""
    return Hosts(why, n_ranks, 1, rank, 0, tuple((r, 0) for r in range(n_ranks)), None, group)


def find(who: str, mode: str, group: dist.ProcessGroup | None, device: torch.device | None = None) -> Hosts:
    """Decide, and make the groups, on all ranks of `group`. None as `group`: one rank alone.

    Args: device: of what is exchanged; None: the host.
    Raises: ValueError for a `mode` that is none; on all ranks if they differ in `mode`, or hosts were asked for where
        they are uneven.
    """
    require(who, "hosts", mode, MODE[0](mode), MODE[1])
    n_ranks, rank = (1, 0) if group is None else (group.size(), group.rank())
    if n_ranks == 1 or not is_known(group):
        one = "one rank" if n_ranks == 1 else "off: torch.distributed does not know the group"
        _refuse(who, mode, one)
        return alone(group, rank, n_ranks, one)
    everyone: list[Any] = [None] * n_ranks
    dist.all_gather_object(everyone, (mode, _ext.get_host()), group=group)
    modes = [theirs for theirs, _ in everyone]
    if len(set(modes)) > 1:
        differ = ", ".join(f"{m!r} on rank {modes.index(m)}" for m in dict.fromkeys(modes))
        raise ValueError(f"{who}: ranks differ: hosts is {differ}; give the same on all ranks")
    if mode == "off":
        return alone(group, rank, n_ranks, "off: asked for")
    of_rank, fault = _sort([host for _, host in everyone])
    if fault is not None:
        _refuse(who, mode, fault)
        return alone(group, rank, n_ranks, f"off: {fault}")
    host, place = of_rank[rank]
    per_host = 1 + max(p for _, p in of_rank)
    n_hosts = n_ranks // per_host
    inner, across = _groups_of(who, group, of_rank, rank, device)
    why = f"{n_hosts} hosts of {per_host} ranks: those of a host average, hosts prune"
    return Hosts(why, n_hosts, per_host, host, place, of_rank, inner, across)


def is_known(group: dist.ProcessGroup) -> bool:
    """Whether torch.distributed knows the group, which may be all there is."""
    return group in dist.distributed_c10d._world.pg_map


def _refuse(who: str, mode: str, found: str) -> None:
    if mode == "on":
        raise ValueError(
            f"{who}: hosts='on' with {found}, wanted 2 hosts or more with the same number of ranks on each, 2 or more; "
            "start as many ranks on each host, or leave the setting out"
        )


def _sort(hosts: Sequence[bytes]) -> tuple[tuple[tuple[int, int], ...], str | None]:
    """((host, place) of each rank, why there is nothing to average inside hosts; None: there is)."""
    number: dict[bytes, int] = {}
    counts: list[int] = []
    of_rank = []
    for host in hosts:
        n = number.setdefault(host, len(number))
        counts += [0] * (n == len(counts))
        of_rank.append((n, counts[n]))
        counts[n] += 1
    fault = None
    if len(counts) == 1:
        fault = f"one host of {len(hosts)} ranks"
    elif max(counts) == 1:
        fault = f"{len(counts)} hosts of one rank"
    elif min(counts) != max(counts):
        fault = f"uneven hosts: {min(counts)} to {max(counts)} ranks on each of {len(counts)} hosts"
    return tuple(of_rank), fault


_made: WeakKeyDictionary[dist.ProcessGroup, dict[Any, tuple[Any, Any]]] = WeakKeyDictionary()


def _groups_of(
    who: str,
    group: dist.ProcessGroup,
    of_rank: tuple[tuple[int, int], ...],
    rank: int,
    device: torch.device | None,
) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """The groups of this host and of this place. Made once for a group, in one order on all ranks."""
    kept = _made.setdefault(group, {})
    key = of_rank, None if device is None else device.type
    if key not in kept:
        members = dist.get_process_group_ranks(group)
        host, place = of_rank[rank]
        places = _lists(members, [p for _, p in of_rank])
        inner = _make(group, _lists(members, [h for h, _ in of_rank]))[host]
        across = _make(group, places, _ROUTE)[place]
        on_gpu = device is not None and device.type == "cuda" and backend.name_for(across, device) == backend.NAME
        if on_gpu and (why := why_not_proven(group, across, device)) is not None:
            warnings.warn(
                f"{who}: between hosts NCCL carries the exchange, dense, because {why}; SPCCL_CUDA_ROUTE=nccl says so "
                "without a trial",
                stacklevel=outside(),
            )
            across = _make(group, places, "nccl")[place]
        kept[key] = inner, across
    return kept[key]


# What is exchanged between hosts is known to be sparse. So spccl's kernels carry it over every network, also where
# "auto" gives a user's group to NCCL.
_ROUTE = "spccl"
_PROOF_ELEMS, _PROOF_S = 1 << 16, 60


def why_not_proven(group: dist.ProcessGroup, across: dist.ProcessGroup, device: torch.device) -> str | None:
    """Exchange a sparse array once on the GPUs and once on the hosts, and compare the bits, on all ranks of `group`.

    Returns: None if they are the same on all ranks, or something else than spccl's kernels moves CUDA tensors, which
        has said so; else why not.
    """
    try:
        fault = _fault_of_exchange(across, device)
    except RuntimeError as error:  # DistBackendError
        fault = str(error).splitlines()[0]
    everyone: list[str | None] = [None] * group.size()
    dist.all_gather_object(everyone, fault, group=group)
    return next((f"rank {rank}: {text}" for rank, text in enumerate(everyone) if text is not None), None)


def _fault_of_exchange(across: dist.ProcessGroup, device: torch.device) -> str | None:
    draw = torch.Generator().manual_seed(across.rank())
    values = torch.randn(_PROOF_ELEMS, generator=draw)
    values[torch.rand(_PROOF_ELEMS, generator=draw) > 0.02] = 0
    fault = None
    for dtype in (torch.float32, torch.bfloat16):  # all ranks make all calls, whatever one finds
        by_gpu, by_host = values.to(device, dtype, copy=True), values.to(dtype, copy=True)
        work = dist.all_reduce(by_gpu, op=dist.ReduceOp.AVG, group=across, async_op=True)
        work.wait(timedelta(seconds=_PROOF_S))
        if device.type == "cuda" and backend.cuda_stats(across).path != "engine":
            return None
        dist.all_reduce(by_host, op=dist.ReduceOp.AVG, group=across)
        wrong = int((by_gpu.cpu() != by_host).sum())
        if wrong and fault is None:
            fault = f"{wrong} of {_PROOF_ELEMS} elements of {dtype} differ from those that the hosts exchange"
    return fault


def _lists(members: Sequence[int], numbers: Sequence[int]) -> list[list[int]]:
    """The members with each number, in the order of the numbers."""
    lists: list[list[int]] = [[] for _ in range(1 + max(numbers))]
    for member, number in zip(members, numbers, strict=True):
        lists[number].append(member)
    return lists


def _make(group: dist.ProcessGroup, lists: list[list[int]], route: str | None = None) -> list[Any]:
    """A group for each list. In the world all ranks make each; ranks outside of another group cannot help.

    Args: route: of CUDA tensors, where that of `group` is "auto" or "auto+stage".
    """
    names = set(backend.names_of(group))
    options = backend.options_of(group)
    if options is None:
        theirs = getattr(group._get_backend(next(iter(group._device_types))), "options", None)
        settings = {"timeout": getattr(theirs, "_timeout", None)}
    else:
        base, plus, stage = options.cuda_route.partition("+")
        if route is not None and base == "auto":
            named = "stage" if route == "nccl" and stage else route if route == "nccl" else route + plus + stage
            options = dataclasses.replace(options, cuda_route=named)
        settings = {"timeout": options.timeout, "pg_options": options if len(names) == 1 else None}
    settings["backend"] = names.pop() if len(names) == 1 else dist.get_backend_config(group)
    in_world, me = group is dist.group.WORLD, dist.get_rank()
    return [
        dist.new_group(ranks, use_local_synchronization=not in_world, **settings) if in_world or me in ranks else None
        for ranks in lists
    ]


def part(numel: int, n_places: int, place: int) -> tuple[int, int]:
    """(first element, end) of what `place` of `n_places` owns of a parameter, in the order of its memory.

    Cuts depend on the parameter alone, so that state outlives any layout of buckets, and any recipe: chunks begin anew
    in each part.
    """
    share = -(-numel // (n_places * ALIGN)) * ALIGN
    return min(place * share, numel), min((place + 1) * share, numel)


# -- states: an entry "hosts" has {"per_host", "host", "place"} of the rank that saved; without it all ranks prune ----


def numbers(h: Hosts | None) -> dict[str, int] | None:
    """The entry "hosts" of a rank's state."""
    return None if h is None or h.per_host == 1 else {"per_host": h.per_host, "host": h.host, "place": h.place}


def n_pruning(who: str, world_size: int, per_host: int) -> int:
    """Ranks that prune of `world_size` on hosts of `per_host`. Raises: ValueError if one does not divide the other."""
    if not is_whole(per_host, 1) or world_size % per_host:
        raise ValueError(f"{who}.reshard: per_host={per_host!r} for {world_size} ranks, wanted a divisor of them")
    return world_size // per_host


def whole(who: str, states: Sequence[Any], join: Any, of: Any = lambda state: state) -> list[Any]:
    """States of whole parameters, one for each rank that pruned: of hosts where their ranks averaged first.

    Args: join: (states of a host's ranks, in the order of their places; host; number of hosts) -> one state. of: where
        in a state "hosts", "world_size" and "step" or "steps" are.
    Raises: ValueError if a state is missing, or states are of several steps or shapes of hosts.
    """
    parts = [of(state) for state in states]
    if not any(part.get("hosts") for part in parts):
        return list(states)
    found = [((p.get("hosts") or {}).get("per_host", 1), p["world_size"], p.get("steps", p.get("step"))) for p in parts]
    if len(set(found)) > 1 or found[0][1] != len(states):
        raise ValueError(
            f"{who}.reshard: wanted the states of all ranks at one step, got {found} as (ranks of a host, ranks, step)"
        )
    per_host = found[0][0]
    n_hosts = len(states) // per_host
    places = {(p["hosts"]["host"], p["hosts"]["place"]): state for p, state in zip(parts, states, strict=True)}
    missing = [(h, p) for h in range(n_hosts) for p in range(per_host) if (h, p) not in places]
    if missing:
        raise ValueError(f"{who}.reshard: there is no state of {missing}, as (host, place on it)")
    return [join([places[host, place] for place in range(per_host)], host, n_hosts) for host in range(n_hosts)]


def joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The parts one after the other, on the device of the first: states of ranks may lie on the GPU of each."""
    return torch.cat([part.to(parts[0].device) for part in parts])


def require_same_shape(
    who: str, theirs: dict[str, int] | None, n_theirs: int | None, ours: dict[str, int] | None, n_ours: int
) -> None:
    """Raises: ValueError for the state of a run with other hosts, or of another place on them."""
    if (theirs is None) != (ours is None) or (ours and (theirs["per_host"], n_theirs) != (ours["per_host"], n_ours)):
        raise ValueError(
            f"{who}: got the state of one of {_describe(theirs, n_theirs)}, this run has {_describe(ours, n_ours)}; "
            f"pass all ranks' states through {who.partition('.')[0]}.reshard(states, {n_ours}, "
            f"per_host={ours['per_host'] if ours else 1})"
        )
    if theirs != ours:
        raise ValueError(
            f"{who}: got the state of place {theirs['place']} on host {theirs['host']}, this rank is place "
            f"{ours['place']} on host {ours['host']}; start the ranks host by host, as the run that saved it"
        )


def _describe(of: dict[str, int] | None, n_ranks: int | None) -> str:
    if of is None:
        return f"{n_ranks} ranks that prune"
    return f"{n_ranks // of['per_host']} hosts of {of['per_host']} ranks"
