"""An exchange of `SparseSync` that ends during the next forward pass, with the same bits as without.

A forward pre-hook of each module waits for the buckets that hold the module's parameters, and applies their averages.
So a parameter is up to date before the module uses it. A module of torch.nn that is no container waits for all
parameters below it, because some (MultiheadAttention) use those of their children. A module's state_dict() waits too.

Other uses of a parameter before its owner has run need `SparseSync.wait()`. If a gradient reaches a parameter whose
bucket was never waited for, the backward pass raises an error.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from .bucket import Bucket

_CONTAINERS = (torch.nn.Sequential, torch.nn.ModuleList, torch.nn.ModuleDict)


def check_module(model: object) -> None:
    """Raises: TypeError for what is no module, or one whose hooks torch.compile would leave out."""
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"SparseSync: overlap is a {type(model).__name__}, wanted the model (torch.nn.Module), or None")
    if any(type(m).__name__ == "OptimizedModule" for m in model.modules()):
        raise TypeError("SparseSync: overlap is a compiled module, wanted one that is not: leave overlap out")


def install(model: torch.nn.Module, buckets: list[Bucket], finish: Callable, pending: Mapping[int, Any]) -> None:
    """Add hooks to the modules and parameters of `model`.

    Args:
        finish: called with numbers of buckets; ends what is pending of them.
        pending: what is under way, by number of the bucket.
    Raises: ValueError if a trained parameter is in no module of `model`.
    """
    place = {id(w.param): i for i, bucket in enumerate(buckets) for w in bucket.weights}
    found = {id(p) for p in model.parameters()}
    for bucket in buckets:
        for w in bucket.weights:
            if id(w.param) not in found:
                raise ValueError(
                    f"SparseSync: parameter {w.name} of shape {tuple(w.param.shape)} is in no module of overlap; pass "
                    "the whole model"
                )
    for module in model.modules():
        builtin = type(module).__module__.startswith("torch.nn.modules") and not isinstance(module, _CONTAINERS)
        own = sorted({place[id(p)] for p in module.parameters(recurse=builtin) if id(p) in place})
        if own:
            module.register_forward_pre_hook(_before_forward(finish, own))
            module.register_state_dict_pre_hook(_before_state_dict(finish, own))
    for i, bucket in enumerate(buckets):
        for w in bucket.weights:
            w.param.register_post_accumulate_grad_hook(_after_gradient(w.name, i, pending))


def _before_forward(finish: Callable, own: list[int]) -> Callable:
    def hook(module: torch.nn.Module, args: Any) -> None:
        finish(own)

    return hook


def _before_state_dict(finish: Callable, own: list[int]) -> Callable:
    def hook(module: torch.nn.Module, prefix: str, keep_vars: bool) -> None:
        finish(own)

    return hook


def _after_gradient(name: str, bucket: int, pending: Mapping[int, Any]) -> Callable:
    def hook(param: torch.Tensor) -> None:
        if bucket in pending:
            raise RuntimeError(
                f"SparseSync: parameter {name} has a gradient, and the exchange before was not waited for: it was used "
                "outside the forward pass of the module that owns it. Call opt.wait() before such a use, or leave "
                "overlap out"
            )

    return hook
