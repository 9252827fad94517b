"""A rank's state in a file beside a framework's checkpoint, the global weights for the framework's own file, numbers
for its log, and settings that spoil training."""

from __future__ import annotations

import contextlib
import gc
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from spccl.ddp import PrunedGradients
    from spccl.optim import SparseSync


def is_sparse_sync(part: object) -> bool:
    from spccl.optim import SparseSync

    return isinstance(part, SparseSync)


def save_state(part: PrunedGradients | SparseSync, folder: Path, rank: int, world_size: int) -> None:
    """Write this rank's state of `part` to `folder`/spccl-rank-RANK-of-WORLD_SIZE.pt. Every rank calls it.

    The file gets its name when it is whole. Then the files that earlier saves of this rank left there with another
    number of ranks are removed; rank 0 also removes those of ranks that there are no more.

    Args:
        folder: made if it is not there. All ranks see it.
        rank, world_size: this rank's number and the number of ranks that save, in the whole job.
    Raises: OSError if the folder cannot be written; an older file of this rank is then still whole.
    """
    import torch

    from spccl.optim import checkpoint

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    state = checkpoint.save(part) if is_sparse_sync(part) else part.state_dict()
    mine = folder / _name(rank, world_size)
    unfinished = mine.with_suffix(".unfinished")
    try:
        torch.save(state, unfinished)
        os.replace(unfinished, mine)
    finally:
        unfinished.unlink(missing_ok=True)
    for saved, n_ranks, file in _files_in(folder):
        gone = rank == 0 and saved >= world_size
        if n_ranks != world_size and (saved == rank or gone):
            file.unlink(missing_ok=True)


def _name(rank: int, world_size: int) -> str:
    return f"spccl-rank-{rank}-of-{world_size}.pt"


def _files_in(folder: Path) -> list[tuple[int, int, Path]]:
    """(rank, world size, file) of each state in `folder`, in rank order."""
    found = ((re.fullmatch(r"spccl-rank-(\d+)-of-(\d+)\.pt", file.name), file) for file in folder.glob("spccl-rank-*"))
    return sorted((int(name[1]), int(name[2]), file) for name, file in found if name)


def load_state(part: PrunedGradients | SparseSync, folder: Path, rank: int, world_size: int) -> None:
    """Load this rank's state from `folder`, saved by `save_state` on any number of ranks.

    With the same number of ranks that is the file spccl-rank-RANK-of-WORLD_SIZE.pt; with another one, or if other hosts
    pruned, all files are read.

    Args: rank, world_size: this rank's number and the number of ranks now, in the whole job.
    Raises: FileNotFoundError if the folder has no state; ValueError that names the folder if the states of some ranks
        are missing, are of several steps or do not fit `part`; OSError if a file cannot be read.
    """
    import torch

    folder = Path(folder)
    mine = folder / _name(rank, world_size)
    per_host = _per_host(part)
    if mine.is_file():
        state = torch.load(mine, weights_only=True, map_location="cpu")
        numbers = state.get("sparse_sync", state).get("hosts") or {"per_host": 1}
        serves_all = numbers["per_host"] == 1 and state.get("sparse_sync", {}).get("consolidated")
        if per_host in (None, numbers["per_host"]) or serves_all:
            _load(part, folder, state)
            return
    files = _files_in(folder)
    if not files:
        kind = type(part).__name__
        raise FileNotFoundError(
            f"{kind}: {folder} has no spccl-rank-*.pt, wanted the states that the ranks of a run with {kind} saved "
            f"there; to begin {kind} with that checkpoint's model, load the model alone and start a new run"
        )
    # Mapped: of the other ranks' states, memory holds only what is read now.
    if mine.is_file():  # of other hosts; files of another number of ranks are older
        files = [row for row in files if row[1] == world_size]
    states = [torch.load(file, weights_only=True, map_location="cpu", mmap=True) for _, _, file in files]
    try:
        state = _copied(part.reshard(states, world_size, ranks=[rank], per_host=per_host or 1)[0])
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from error
    _load(part, folder, state)


def _per_host(part: PrunedGradients | SparseSync) -> int | None:
    """Ranks of each host where hosts prune; 1: all ranks do; None: a hook that is on no model yet."""
    found = part.ranks.hosts if is_sparse_sync(part) else part._hosts
    return None if found is None else found.per_host


def _copied(state: Any) -> Any:
    """A nested state with copies of its tensors, so that none is mapped from a file."""
    import torch

    if isinstance(state, torch.Tensor):
        return state.clone()
    if isinstance(state, dict):
        return {key: _copied(value) for key, value in state.items()}
    return type(state)(map(_copied, state)) if isinstance(state, (list, tuple)) else state


def _load(part: PrunedGradients | SparseSync, folder: Path, state: dict[str, Any]) -> None:
    try:
        part.load_state_dict(state)
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from error


def figures(part: PrunedGradients | SparseSync, prefix: str = "spccl") -> dict[str, float]:
    """The numbers of a part's statistics, for a log, as PREFIX/NAME. Waits for the device."""
    return {
        f"{prefix}/{name}": value
        for name, value in part.stats().items()
        if isinstance(value, (int, float)) and not isinstance(value, bool)
    }


def with_global_weights(sync: SparseSync, state_dict: dict[str, Any], is_writer: bool = True) -> dict[str, Any]:
    """A model's state dict with copies of the global weights in place of the parameters that `sync` trains.

    Tied weights share memory in the result too. Every rank calls it, because a host's ranks have parts of the global
    weights where hosts prune.

    Args: is_writer: whether this rank needs the result; else it may be `state_dict` itself.
    """
    from spccl.optim.bucket import own_pointer

    if not is_writer and sync.host is None:
        return state_dict
    trained = {w.pointer for bucket in sync.buckets for w in bucket.weights}
    copies: dict[tuple[object, ...], Any] = {}
    result = type(state_dict)(state_dict)
    with contextlib.nullcontext() if sync.in_globals else sync.global_weights():
        for name, value in state_dict.items():
            if hasattr(value, "data_ptr") and own_pointer(value) in trained:
                key = (own_pointer(value), tuple(value.shape), value.stride())
                if key not in copies:
                    copies[key] = value.detach().clone()
                result[name] = copies[key]
    return result


def use_global_weights(sync: SparseSync) -> None:
    """Put the global weights into the model until `use_own_weights`. step() refuses meanwhile."""
    if not sync.in_globals:
        sync._swap(True)


def use_own_weights(sync: SparseSync) -> None:
    if sync.in_globals:
        sync._swap(False)


def has_ddp(model: Any) -> bool:
    import torch

    return any(isinstance(m, torch.nn.parallel.DistributedDataParallel) for m in model.modules())


def in_ddp(sync: SparseSync) -> bool:
    """Whether a DistributedDataParallel module of this process has weights of `sync`. Searches all objects."""
    import torch

    kind = torch.nn.parallel.DistributedDataParallel
    trained = {id(w.param) for bucket in sync.buckets for w in bucket.weights}
    models = [thing for thing in gc.get_objects() if issubclass(type(thing), kind)]
    return any(id(param) in trained for model in models for param in model.parameters())


def conflicting_settings(hook: PrunedGradients, max_grad_norm: float | None, optimizer: Any) -> list[str]:
    """Settings of a training loop that spoil training with pruned gradients: one sentence for each.

    Args:
        hook: the hook that the loop uses.
        max_grad_norm: the norm at which the loop clips the averaged gradient; 0 or None = no clipping.
        optimizer: torch.optim.Optimizer, or Accelerate's wrapper of one; None if unknown.
    """
    from spccl._pruning.optimizers import is_adam_like

    optimizer = getattr(optimizer, "optimizer", optimizer)
    kind = type(optimizer).__name__
    defaults = getattr(optimizer, "defaults", {})
    texts = []
    if max_grad_norm:
        texts.append(
            f"max_grad_norm={max_grad_norm} clips sums of pruned entries as if they were gradients; set it to 0 "
            f"and pass clip_norm={max_grad_norm} to PrunedGradients"
        )
    if optimizer is not None and is_adam_like(optimizer):
        texts.append(
            f"{kind} does not converge on pruned gradients; use SGD, or spccl.optim.SparseSync in place of "
            "DDP (docs/TRAINING.md has the measurement)"
        )
    if hook.momentum and defaults.get("momentum"):
        texts.append(
            f"momentum={defaults['momentum']} in {kind} and momentum={hook.momentum} in PrunedGradients: set the "
            "optimizer's to 0"
        )
    return texts


def clips_own_gradient(norm: float, ranks: int) -> str:
    """What a framework's clipping means under SparseSync."""
    return (
        f"the framework clips at {norm} the norm of each rank's own gradient, which is up to sqrt({ranks}) times "
        f"longer than the average of the ranks' gradients; set that to 0 and pass clip_norm={norm} to SparseSync"
    )
