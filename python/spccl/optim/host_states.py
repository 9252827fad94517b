"""States of a `SparseSync` where hosts prune: a rank's state has its part of each parameter.

Such a state has the entry "hosts": {"per_host", "host", "place"}: ranks of each host, and this rank's numbers. Its
tensors "global", "local" and "velocity" are flat parts, in the order of the parameter's memory. `memory_of` says that
order, for all states.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from spccl._pruning import hosts

from .bucket import own_memory

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .sync import SparseSync

_TENSORS = ("global", "local", "velocity")


def memory_of(sync: SparseSync) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """How each parameter lies in memory: (shape, strides) of this rank's part of a DTensor."""
    return [(tuple(own_memory(w.param).shape), tuple(own_memory(w.param).stride())) for w in sync._weights]


def whole(key: str, states: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """States of whole parameters, one for each rank that pruned. Raises: see `hosts.whole`."""

    def join(ours: list[dict[str, Any]], host: int, n_hosts: int) -> dict[str, Any]:
        return {**ours[0], key: _join([state[key] for state in ours], host, n_hosts)}

    return hosts.whole("SparseSync", states, join, lambda state: state[key])


def _join(parts: list[dict[str, Any]], host: int, n_hosts: int) -> dict[str, Any]:
    """One state of a host's whole parameters from those of its ranks, in the order of their places."""
    parameters = []
    consolidated = all(part["consolidated"] for part in parts)
    for i, (shape, strides) in enumerate(parts[0]["memory"]):
        entries = [part["parameters"][i] for part in parts]
        joined = dict(entries[0])
        for name in _TENSORS:
            given = [e["global"] if e[name] is None and name == "local" else e[name] for e in entries]
            is_there = given[0] is not None and not (name == "local" and consolidated)
            joined[name] = hosts.joined(given).as_strided(shape, strides).contiguous() if is_there else None
        joined["kept"] = _join_kept(entries, strides)
        parameters.append(joined)
    return {**parts[0], "world_size": n_hosts, "rank": host, "hosts": None, "consolidated": consolidated,
            "parameters": parameters}  # fmt: skip


def _join_kept(entries: list[dict[str, Any]], strides: Sequence[int]) -> dict[str, Any] | None:
    """What the ranks of a host keep of the sums of one parameter, as its entry "kept"."""
    kept = [torch.zeros_like(entry["global"]) for entry in entries]
    for flat, entry in zip(kept, entries, strict=True):
        if entry.get("kept") is not None:
            first, values = entry["kept"]["first"], entry["kept"]["values"]
            flat[first : first + values.numel()] = values.to(flat.device)
    values = hosts.joined(kept)
    return {"first": 0, "values": values, "stride": strides} if values.any() else None


def cut(mine: dict[str, Any], world_size: int, rank: int, per_host: int) -> dict[str, Any]:
    """The entry "sparse_sync" of `rank`, of hosts of `per_host` ranks, from that of its host's whole parameters."""
    host, place = divmod(rank, per_host)
    memory, parameters = mine.get("memory") or [None] * len(mine["parameters"]), []
    for entry, layout in zip(mine["parameters"], memory, strict=True):
        span = hosts.part(entry["global"].numel(), per_host, place)
        flats = {n: part_of(entry[n], layout, span) for n in _TENSORS if entry[n] is not None}
        parameters.append({**entry, **flats})
    memory = [
        layout or (tuple(entry["global"].shape), entry["global"].stride())
        for layout, entry in zip(memory, mine["parameters"], strict=True)
    ]
    numbers = {"per_host": per_host, "host": host, "place": place}
    return {**mine, "world_size": world_size, "rank": rank, "hosts": numbers,
            "memory": memory, "parameters": parameters}  # fmt: skip


def part_of(shaped: torch.Tensor, layout: tuple[Any, Any] | None, span: tuple[int, int]) -> torch.Tensor:
    """A copy of a part of a tensor of a parameter's shape, in the order of the parameter's memory."""
    if layout is None:
        return shaped.contiguous().view(-1)[slice(*span)].clone()
    flat = torch.empty(math.prod(layout[0]), dtype=shaped.dtype, device=shaped.device)
    flat.as_strided(layout[0], layout[1]).copy_(shaped)
    return flat[slice(*span)].clone()


def check(who: str, sync: SparseSync, mine: dict[str, Any]) -> None:
    """Raises: ValueError for a state of another shape of hosts, or of other places or memory formats."""
    ours, theirs = hosts.numbers(sync.ranks.hosts), mine.get("hosts")
    if theirs is None and (ours is None or mine["consolidated"]):
        return
    hosts.require_same_shape(who, theirs, mine["world_size"], ours, sync.ranks.world_size)
    if mine["memory"] != memory_of(sync):
        raise ValueError(
            f"{who}: the state is of parameters with other memory formats; use those of the run that saved it, or save "
            "after consolidate()"
        )
