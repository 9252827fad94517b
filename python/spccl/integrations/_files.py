"""A rank's state in a file beside a framework's checkpoint, the global weights for the framework's own file, and
settings that spoil training."""

from __future__ import annotations

import contextlib
import gc
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from spccl.ddp import PrunedGradients
    from spccl.optim import SparseSync


def is_sparse_sync(part: object) -> bool:
    from spccl.optim import SparseSync

    return isinstance(part, SparseSync)


def save_state(part: PrunedGradients | SparseSync, folder: Path, rank: int, world_size: int) -> None:
    """Write this rank's state of `part` into `folder`, which all ranks see. Every rank calls it."""
    import torch

    from spccl.optim import checkpoint

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    state = checkpoint.save(part) if is_sparse_sync(part) else part.state_dict()
    torch.save(state, folder / f"spccl-rank-{rank}-of-{world_size}.pt")


def load_state(part: PrunedGradients | SparseSync, folder: Path, rank: int, world_size: int) -> None:
    """Load this rank's state from `folder`, saved by `save_state` on any number of ranks.

    Without a file PrunedGradients warns and goes on. A SparseSync that was given the optimizer's part of that
    checkpoint refuses its next step.
    Raises: ValueError if the states of some ranks are missing.
    """
    import torch

    folder = Path(folder)
    mine = folder / f"spccl-rank-{rank}-of-{world_size}.pt"
    if mine.is_file():
        part.load_state_dict(torch.load(mine, weights_only=True, map_location="cpu"))
        return
    files = list(folder.glob("spccl-rank-*-of-*.pt"))
    if not files:
        then = "its next step() refuses" if is_sparse_sync(part) else "training goes on without what was not sent yet"
        warnings.warn(f"{type(part).__name__}: {folder} has no spccl-rank-*.pt: {then}", stacklevel=3)
        return
    files.sort(key=lambda file: int(file.name.split("-")[2]))
    states = [torch.load(file, weights_only=True, map_location="cpu") for file in files]
    part.load_state_dict(part.reshard(states, world_size)[rank])


def with_global_weights(sync: SparseSync, state_dict: dict[str, Any]) -> dict[str, Any]:
    """A model's state dict with copies of the global weights in place of the parameters that `sync` trains.

    Tied weights share memory in the result too.
    """
    from spccl.optim.sync import own_pointer

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


def fights(hook: PrunedGradients, max_grad_norm: float | None, optimizer: Any) -> list[str]:
    """Settings of a training loop that spoil training with pruned gradients: one sentence for each.

    Args:
        hook: the hook that the loop uses.
        max_grad_norm: the norm at which the loop clips the averaged gradient; 0 or None = no clipping.
        optimizer: torch.optim.Optimizer, or Accelerate's wrapper of one; None if unknown.
    """
    optimizer = getattr(optimizer, "optimizer", optimizer)
    kind = type(optimizer).__name__
    defaults = getattr(optimizer, "defaults", {})
    texts = []
    if max_grad_norm:
        texts.append(
            f"max_grad_norm={max_grad_norm} clips sums of pruned entries as if they were gradients; set it to 0 "
            f"and pass clip_norm={max_grad_norm} to PrunedGradients"
        )
    if "adam" in kind.lower():
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
