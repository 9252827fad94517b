"""State of a `SparseSync`: save and load on one rank, and change the number of ranks.

The state is per rank: save one file per rank, and load the same rank's file. A run that resumes so continues bit for
bit. After `consolidate()` local and global weights are the same, and the state of any one rank serves all ranks of any
world size; only the moments of the inner optimizer then come from that rank.

{"state", "param_groups": those of the inner optimizer, "sparse_sync": {
    "version", "world_size", "rank", "steps", "exchanges", "seed", "look_ahead", "consolidated",
    "shard": (number, how many) in each process group over which DTensor parameters are sharded,
    "hosts", "memory": see `spccl.optim.host_states`,
    "names", "shapes": of each trained parameter, in the optimizer's order; a name is None where the optimizer was given
        parameters without names,
    "parameters": one for each of them: {"index", "global": z, "local": w or None where the state is consolidated,
        "velocity": u or None, "prune": [6] int64, "kept": with bits=1 or sum_density, of what this rank keeps of sums
        of the parameter: {"first", "values", "stride"}: the elements from "first" on in the order of the memory, and
        the strides of that; with sum_density "state" [6] int64 too; None where nothing is kept}}}

w - z and "kept" are look_ahead times what is unsent. A run with another look-ahead converts it.

z, w and u have the parameter's shape (of a DTensor that of this rank's part), whatever memory format the parameter has.
So a run with another memory format may load them. Version 1 had them flat, in the order of the parameter's memory. Its
states load, except those with parameters of 4 or 5 dimensions: these can have several memory formats.

Parameters are found by their place in the optimizer. A name or shape that differs is refused. Two parameters of one
shape that changed places can be told apart only if the optimizer was given named parameters
(`AdamW(model.named_parameters())`), in both runs.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch

from spccl._pruning import hosts
from spccl._pruning.hook_state import plain_name, require_one_shard
from spccl._pruning.sums import shaped_kept

from . import host_states
from .bucket import local_part, own_memory

if TYPE_CHECKING:
    from collections.abc import Iterable

    from .sync import SparseSync

VERSION = 2
KEY = "sparse_sync"


@torch.no_grad()
def save(sync: SparseSync) -> dict[str, Any]:
    """The state of this rank. Its tensors for the weights are copies.

    "consolidated": this rank's local and global weights are equal. Then "local" is None.
    """
    sync.transfers.advance()
    parameters, kept = [], _save_kept(sync)
    for bucket in sync.buckets:
        if not bucket.in_globals:
            bucket.absorb(sync.transfers.scratch[bucket.device, bucket.globals.dtype])
            bucket.publish()
        velocities = [None] * len(bucket.weights) if bucket.velocity is None else bucket.split(bucket.velocity)
        for place, (w, velocity) in enumerate(zip(bucket.weights, velocities, strict=True)):
            common, own = bucket.values(place)
            velocity = None if velocity is None else velocity.clone()
            is_part = sync.host is not None
            if w.index in sync.whole:
                (common, velocity), is_part = sync.whole[w.index], False
                own = common
            named = {"global": common, "local": own, "velocity": velocity}
            if not is_part:
                named = {n: None if x is None else _shaped(x, w.param).contiguous() for n, x in named.items()}
            parameters.append({"index": w.index, **named, "prune": w.state.clone(), "kept": kept.get(w.index)})
    parameters.sort(key=lambda entry: entry["index"])
    consolidated = not kept and all(torch.equal(entry["local"], entry["global"]) for entry in parameters)
    if consolidated:
        for entry in parameters:
            entry["local"] = None
    mine = {
        "version": VERSION,
        "world_size": sync.ranks.world_size,
        "rank": sync.ranks.rank,
        "steps": sync.steps,
        "exchanges": sync.exchanges,
        "seed": sync.settings.seed,
        "look_ahead": sync.settings.look_ahead,
        "consolidated": consolidated,
        "shard": sync._shards.place,
        "hosts": None if sync.whole else hosts.numbers(sync.ranks.hosts),
        "memory": host_states.memory_of(sync),
        "names": [plain_name(w.name) if sync._named else None for w in sync._weights],
        "shapes": [tuple(w.param.shape) for w in sync._weights],
        "parameters": parameters,
    }
    return {**sync.inner.state_dict(), KEY: mine}


def _save_kept(sync: SparseSync) -> dict[int, dict[str, Any]]:
    """What this rank keeps of sums, by index of the parameter; empty if all of it is 0."""
    if all(kept.is_empty() for kept in sync.transfers.kept.values()):
        return {}
    stride = {w.index: own_memory(w.param).stride() for w in sync._weights}
    parts = [part for kept in sync.transfers.kept.values() for part in kept.parts]
    return {int(part.name): {**part.save(), "stride": stride[int(part.name)]} for part in parts}


def _shaped(flat: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    """A view, with the shape of this rank's part of `param`, of a tensor [numel] in the order of its memory."""
    part = own_memory(param)
    return flat.as_strided(part.shape, part.stride())


@torch.no_grad()
def load(sync: SparseSync, state: dict[str, Any]) -> None:
    """Continue from a state: of the same rank and world size, or consolidated.

    The model gets this rank's local weights. Before anything is changed the state is checked.
    Raises: ValueError if it is not a state of SparseSync, of another version, model, rank or world size, or of version
        1 with a parameter of 4 or 5 dimensions.
    """
    mine = state.get(KEY)
    if isinstance(mine, dict) and mine.get("apart"):
        sync._step_to_load = int(mine["steps"])
        return
    if isinstance(mine, dict) and mine.get("version") == 1:
        mine = _from_version_1(sync, mine)
    fault = None
    try:
        _check(sync, mine)
    except (ValueError, RuntimeError) as error:
        fault = error
    if sync.host is not None:
        sync.host.require_fine(fault)
    elif fault is not None:
        raise fault
    sync._shards.forget_gathered()
    sync._step_to_load = None
    entries = {entry["index"]: entry for entry in mine["parameters"]}
    sync.inner.load_state_dict({key: value for key, value in state.items() if key != KEY})
    _use_memory_formats(sync)
    for bucket in sync.buckets:
        velocities = [None] * len(bucket.weights) if bucket.velocity is None else bucket.split(bucket.velocity)
        for place, (w, velocity) in enumerate(zip(bucket.weights, velocities, strict=True)):
            entry = entries[w.index]
            into = [(bucket.global_parts[place], entry["global"]), (bucket.locals[place], _local(sync, mine, entry))]
            into += [] if velocity is None else [(velocity, entry["velocity"])]
            for flat, given in into:
                if sync.host is None:
                    _shaped(flat, w.param).copy_(given)
                elif mine.get("hosts") is None:  # consolidated, of whole parameters
                    part = own_memory(w.param)
                    flat.copy_(host_states.part_of(given, (part.shape, part.stride()), w.span))
                else:
                    flat.copy_(given)
            w.state.copy_(entry["prune"])
        bucket.publish()
    for kept in sync.transfers.kept.values():
        kept.clear(int(mine["exchanges"]))
        for part in kept.parts:
            saved = entries[int(part.name)].get("kept")
            if saved is not None:
                part.load({**saved, "values": saved["values"] * _look_ahead_factor(sync, mine)})
    sync.whole = {}
    if sync.host is not None:
        sync.host.gather()
    sync.steps, sync.exchanges = int(mine["steps"]), int(mine["exchanges"])
    sync._check_next = True
    sync._tally.reset()


def _look_ahead_factor(sync: SparseSync, mine: dict[str, Any]) -> float:
    """This run's look-ahead over that of the state."""
    return sync.settings.look_ahead / mine.get("look_ahead", 1.0)


def _local(sync: SparseSync, mine: dict[str, Any], entry: dict[str, Any]) -> torch.Tensor:
    """The local weights of a parameter, with this run's look-ahead."""
    if entry["local"] is None:
        return entry["global"]
    factor = _look_ahead_factor(sync, mine)
    return entry["local"] if factor == 1 else torch.lerp(entry["global"], entry["local"], factor)


def _from_version_1(sync: SparseSync, mine: dict[str, Any]) -> dict[str, Any]:
    """A state of version 1 as one of this version. Its tensors are taken in the order of this run's memory.

    Raises: ValueError for a parameter that torch can hold in several memory formats: the state does not tell which.
    """
    params, parameters = {w.index: w.param for w in sync._weights}, []
    for entry in mine["parameters"]:
        param, shape = params.get(entry["index"]), tuple(entry["shape"])
        if len(shape) in (4, 5):
            raise ValueError(
                f"SparseSync.load_state_dict: rank {sync.ranks.rank}: got a state of version 1, which does not tell in "
                f"which memory format parameter {entry['index']} of shape {shape} was; end that run with the spccl "
                "that saved the state, or begin a new SparseSync from the weights in the model's file"
            )
        fits = param is not None and param.shape == shape and own_memory(param).numel() == entry["global"].numel()
        flat = {key: entry[key] for key in ("global", "local", "velocity") if fits and entry[key] is not None}
        parameters.append({**entry, **{key: _shaped(value, param) for key, value in flat.items()}})
    shapes = [entry["shape"] for entry in parameters]
    return {**mine, "version": VERSION, "names": [None] * len(shapes), "shapes": shapes, "parameters": parameters}


def _use_memory_formats(sync: SparseSync) -> None:
    """Give each moment the memory format of its parameter, which `moments` relies on. torch keeps the state's."""
    for w in sync._weights:
        kept, strides = sync.inner.state.get(w.param, {}), own_memory(w.param).stride()
        for key, value in kept.items():
            is_moment = isinstance(value, torch.Tensor) and value.shape == w.param.shape
            if is_moment and local_part(value).stride() != strides:
                kept[key] = torch.empty_like(w.param, dtype=value.dtype).copy_(value)


def mark(sync: SparseSync) -> dict[str, Any]:
    """What stands for the state where a framework saves one optimizer state for all ranks: the step, and no tensors.

    `load` of it makes step() refuse until the state of that step is loaded too.
    """
    return {"state": {}, "param_groups": [], KEY: {"version": VERSION, "apart": True, "steps": sync.steps}}


def refuse_torch_checkpoint(sync: SparseSync) -> None:
    """Raises: RuntimeError if torch's get_optimizer_state_dict() asks for the state.

    It keeps "state" and "param_groups" of what state_dict() returns and drops the rest, so it would save no weights of
    this object. Its file would also have the moments of one rank for all ranks. Its caller alone tells it apart.
    """
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") == "torch.distributed.checkpoint.state_dict":
            raise RuntimeError(
                f"SparseSync.state_dict: rank {sync.ranks.rank}: torch's get_optimizer_state_dict() would drop this "
                "rank's local and global weights, so that no run could resume; save opt.state_dict() in a file of each "
                "rank (spccl.integrations.save_state), and the model inside `with opt.global_weights()`"
            )
        frame = frame.f_back


def require_loaded(sync: SparseSync) -> None:
    """Raises: RuntimeError if a mark was loaded, and the state that it stands for was not."""
    if sync._step_to_load not in (None, sync.steps):
        raise RuntimeError(
            f"SparseSync.step: rank {sync.ranks.rank}: a checkpoint of step {sync._step_to_load} was loaded, without "
            f"this rank's state: this object is at step {sync.steps}. The state is in the file spccl-rank-*.pt beside "
            "the checkpoint; load it with the part of spccl.integrations that saved it (docs/FRAMEWORKS.md)"
        )
    sync._step_to_load = None


def _check(sync: SparseSync, mine: dict[str, Any] | None) -> None:
    who = f"SparseSync.load_state_dict: rank {sync.ranks.rank}"
    if sync.in_globals:
        raise RuntimeError(f"{who}: called inside `with opt.global_weights()`; end that block first")
    if not isinstance(mine, dict) or mine.get("version") != VERSION:
        got = f"version {mine.get('version')!r}" if isinstance(mine, dict) else f"a state without {KEY!r}"
        raise ValueError(f"{who}: got {got}, wanted what SparseSync.state_dict() of version {VERSION} or 1 returned")
    host_states.check(who, sync, mine)
    world_size, rank = sync.ranks.world_size, sync.ranks.rank
    if not mine["consolidated"] and mine["world_size"] != world_size:
        raise ValueError(
            f"{who}: got the state of one of {mine['world_size']} ranks, this group has {world_size}; pass all ranks' "
            f"states through SparseSync.reshard(states, {world_size}), or save after consolidate()"
        )
    if not mine["consolidated"] and mine["rank"] != rank:
        raise ValueError(f"{who}: got the state of rank {mine['rank']}; load the file that this rank saved")
    theirs, ours = tuple(mine.get("shard", sync._shards.place)), sync._shards.place
    if theirs != ours:
        raise ValueError(
            f"{who}: got the state of shard {theirs}, this rank has {ours} (number, of how many); load the file that "
            "this rank saved. States cannot be moved to another number of shards"
        )
    if mine["seed"] != sync.settings.seed:
        raise ValueError(f"{who}: got a state with seed {mine['seed']}, this object has {sync.settings.seed}")
    _require_same_parameters(who, sync, mine)
    wants = sync.settings.outer_momentum > 0
    if any(wants != (entry["velocity"] is not None) for entry in mine["parameters"]):
        raise ValueError(
            f"{who}: outer_momentum is {sync.settings.outer_momentum}, the state is "
            f"{'without' if wants else 'with'} outer momentum; use the settings of the run that saved it"
        )
    _require_same_shards(who, sync, mine)


def _require_same_shards(who: str, sync: SparseSync, mine: dict[str, Any]) -> None:
    """Raises: ValueError if the state has what its rank kept of other elements' sums than this rank owns."""
    parts = {int(part.name): part for kept in sync.transfers.kept.values() for part in kept.parts}
    stride = {w.index: own_memory(w.param).stride() for w in sync._weights}
    for entry in mine["parameters"]:
        saved, part = entry.get("kept"), parts.get(entry["index"])
        if saved is None:
            continue
        if part is None or not part.fits(saved) or tuple(saved["stride"]) != stride[entry["index"]]:
            raise ValueError(
                f"{who}: the state has what the rank kept of sums of parameter {entry['index']}, elements "
                f"{saved['first']} to {saved['first'] + saved['values'].numel()}, which this rank does not own: bits, "
                "sum_density, bucket_mb or the memory format is another one; pass all ranks' states through "
                "SparseSync.reshard, or save after consolidate()"
            )


def _require_same_parameters(who: str, sync: SparseSync, mine: dict[str, Any]) -> None:
    """Raises: ValueError that names the first parameter whose name or shape in the state is another one, or that is
    missing there or here."""
    kept = zip(mine["parameters"], mine["names"], mine["shapes"], strict=True)
    theirs = {entry["index"]: (name, tuple(shape), tuple(entry["global"].shape)) for entry, name, shape in kept}
    shapes = {w.index: tuple(own_memory(w.param).shape) for w in sync._weights}
    if mine.get("hosts") is not None:
        shapes = {w.index: (w.numel,) for bucket in sync.buckets for w in bucket.weights}
    ours = {
        w.index: (plain_name(w.name) if sync._named else None, tuple(w.param.shape), shapes[w.index])
        for w in sync._weights
    }
    for index in sorted({*theirs, *ours}):
        found = [side.get(index, (None, None, None)) for side in (theirs, ours)]
        names = {name for name, _, _ in found if name is not None}
        if len(names) > 1 or found[0][1:] != found[1][1:]:
            saved, here = map(_describe, found)
            raise ValueError(
                f"{who}: the state is of another model: parameter {index} is {saved} in the state and {here} here "
                f"({len(theirs)} and {len(ours)} parameters); make the optimizer with the parameters of the run that "
                "saved the state, in the same order"
            )


def _describe(parameter: tuple[str | None, Any, Any]) -> str:
    name, shape, part = parameter
    if shape is None:
        return "absent"
    is_shard = part != shape and len(part) == len(shape)  # else both are equal, or flat of version 1
    text = f"of shape {shape}" + (f" ({part} on this rank)" if is_shard else "")
    return text if name is None else f"{name} {text}"


def reshard(
    states: list[dict[str, Any]], world_size: int, ranks: Iterable[int] | None = None, *, per_host: int = 1
) -> list[dict[str, Any]]:
    """States for `world_size` ranks from those of all ranks of another world size, in rank order, or of other hosts.

    Of n ranks that prune, new rank r gets the inner optimizer's state of old rank r % len(states), and as unsent part
    the sum of those of old ranks r, r + n, ... times n / len(states). So the average over ranks of what is unsent
    stays. Where hosts prune, hosts count in the place of these ranks. What owners kept of sums becomes part of what is
    unsent, of every rank.

    Args: ranks: the new ranks whose states are made; None: all. per_host: ranks of each new host where hosts will
        prune, numbered host by host; 1: all ranks prune.
    Raises: ValueError if a rank's state is missing, or the states differ in step or shard, or `per_host` does not
        divide `world_size`.
    """
    parts = [state.get(KEY) for state in states]
    if not parts or world_size < 1 or any(part is None for part in parts):
        raise ValueError(f"SparseSync.reshard: got {len(states)} states for {world_size} ranks, wanted states of "
                         "SparseSync.state_dict()")  # fmt: skip
    n_pruning = hosts.n_pruning("SparseSync", world_size, per_host)
    states = host_states.whole(KEY, states)
    parts = [state[KEY] for state in states]
    found = [(part["world_size"], part["rank"], part["steps"]) for part in parts]
    if found != [(len(parts), rank, parts[0]["steps"]) for rank in range(len(parts))]:
        raise ValueError(
            "SparseSync.reshard: wanted the states of all ranks at one step, in rank order, got "
            f"{found} as (ranks, rank, step)"
        )
    require_one_shard("SparseSync", (part.get("shard", ()) for part in parts))
    factor = n_pruning / len(parts)
    new = []
    for rank in range(world_size) if ranks is None else ranks:
        number = rank // per_host
        parameters = []
        for place, entry in enumerate(parts[0]["parameters"]):
            common = entry["global"]
            unsent = torch.zeros_like(common)
            for part in parts[number::n_pruning]:
                theirs = part["parameters"][place]
                if theirs["local"] is not None:
                    unsent += theirs["local"].to(common.device) - common
            unsent *= factor
            for part in parts:
                kept = part["parameters"][place].get("kept")
                if kept is not None:
                    unsent += shaped_kept(kept, unsent.shape).to(unsent.device, unsent.dtype)
            parameters.append({**entry, "local": common + unsent, "kept": None})
        mine = {**parts[0], "world_size": world_size, "rank": rank, "consolidated": False, "parameters": parameters}
        mine = mine if per_host == 1 else host_states.cut(mine, world_size, rank, per_host)
        new.append({**states[number % len(states)], KEY: mine})
    return new
