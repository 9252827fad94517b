"""Which optimizers suit pruned gradients: what a hook refuses when it is registered, or warns of at the first step."""

import warnings
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook


def is_adam_like(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer divides by a running second moment, or takes signs of a running first one: those with
    `betas` (Adam, AdamW, Lion, fused ones of other projects), and torch's others."""
    others = (torch.optim.RMSprop, torch.optim.Adagrad, torch.optim.Adadelta, torch.optim.Adafactor)
    return isinstance(optimizer, others) or any("betas" in group for group in optimizer.param_groups)


def refuse_adam(who: str, optimizer: torch.optim.Optimizer, instead: str) -> None:
    """Raises: ValueError if pruned gradients do not suit the optimizer. Accelerate's wrapper of one is looked into.

    Args: instead: how SparseSync is used here.
    """
    optimizer = getattr(optimizer, "optimizer", optimizer)
    if is_adam_like(optimizer):
        kind = type(optimizer).__name__
        raise ValueError(
            f"{who}: got {kind} as optimizer, wanted SGD: {kind} takes the zeros of a pruned "
            "gradient for small gradients and its large entries for noise (with AdamW a GPT ended at a loss of 2.01, "
            f"dense at 0.68). Use spccl.optim.SparseSync({kind}(...), density=0.01) {instead}, or pass "
            "allow_adam=True (docs/TRAINING.md)"
        )


def refuse_momentum(who: str, momentum: float, optimizer: torch.optim.Optimizer) -> None:
    """Raises: ValueError if both the hook, with `momentum`, and the optimizer apply momentum."""
    optimizer = getattr(optimizer, "optimizer", optimizer)
    for group in optimizer.param_groups:
        if momentum and group.get("momentum"):
            raise ValueError(
                f"{who}: momentum={group['momentum']} in {type(optimizer).__name__} and momentum={momentum} in the "
                "hook, wanted one of them: the hook's, with momentum=0 in the optimizer (docs/TRAINING.md)"
            )


# Hooks that no optimizer was named for, until one has stepped: (ids of the parameters, how SparseSync is used instead).
_unseen: "weakref.WeakKeyDictionary[Any, tuple[set[int], str]]" = weakref.WeakKeyDictionary()
_watches = False


def warn_at_first_step(hook: Any, params: Iterable[torch.Tensor], instead: str) -> None:
    """Warn if the first optimizer that steps one of `params` does not suit `hook`, a `PruningHook`.

    torch calls `_warn_of_unsuited` before each step of any optimizer. A compiled step is not looked at.
    Args: instead: how SparseSync is used here.
    """
    global _watches
    if not _watches:
        register_optimizer_step_pre_hook(_warn_of_unsuited)
        _watches = True
    _unseen[hook] = {id(param) for param in params}, instead


def _warn_of_unsuited(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if torch.compiler.is_compiling() or not _unseen:
        return
    for hook, (params, instead) in list(_unseen.items()):
        if any(id(param) in params for group in optimizer.param_groups for param in group["params"]):
            del _unseen[hook]
            who = f"{hook._by}: the first optimizer step"
            try:
                refuse_adam(who, optimizer, instead)
                refuse_momentum(who, hook.momentum, optimizer)
            except ValueError as error:
                warnings.warn(str(error), stacklevel=4)
