"""The optimizer inside a `SparseSync`: the scale of its gradients, and who may call its step()."""

from __future__ import annotations

import inspect
import weakref
from typing import TYPE_CHECKING

import torch
from torch.utils.weak import WeakIdKeyDictionary

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_steppers = WeakIdKeyDictionary()  # optimizer -> weak reference to the last Stepper that was made for it or stepped it


class Stepper:
    """Steps `optimizer` for one `SparseSync`.

    While it lives, a step() of the optimizer that somebody else calls is refused, because no exchange would follow.
    An optimizer without the hooks of torch.optim.Optimizer cannot be watched.
    """

    def __init__(self, optimizer: torch.optim.Optimizer):
        self.optimizer = optimizer
        self.stepping = False
        if optimizer not in _steppers and hasattr(optimizer, "_optimizer_step_pre_hooks"):
            optimizer.register_step_pre_hook(_refuse_others)
        _steppers[optimizer] = weakref.ref(self)

    def unscale(self, grads: Sequence[torch.Tensor], scale: torch.Tensor | None) -> torch.Tensor | None:
        """Divide the gradients by GradScaler's scale.

        Returns: `scale` if nothing was divided, because the optimizer divides in its own step, in float32 ("fused").
        Raises: ValueError for float16 gradients of an optimizer that does not: small ones would become 0.
        """
        if scale is None or self._divides_by_itself():
            return scale
        if any(g.dtype == torch.float16 for g in grads):
            kind = type(self.optimizer).__name__
            raise ValueError(
                f"SparseSync.step: GradScaler with float16 parameters and an optimizer {kind} that does not divide by "
                f"the scale itself: their gradients would be divided in float16, and small ones lost. Make {kind} with "
                "fused=True, or keep the parameters in float32 and use torch.autocast"
            )
        for g in grads:
            g.div_(scale.to(g.device))
        return None

    def step(self, scale: torch.Tensor | None = None) -> None:
        """Args: scale: what `unscale` returned; the optimizer divides its gradients by it."""
        _steppers[self.optimizer] = weakref.ref(self)
        if scale is not None:
            self.optimizer.grad_scale = scale
        self.stepping = True
        try:
            self.optimizer.step()
        finally:
            self.stepping = False
            if scale is not None:
                del self.optimizer.grad_scale

    def _divides_by_itself(self) -> bool:
        """GradScaler's own rule: the optimizer says so, and does not want the scaler in place of the scale."""
        if not getattr(self.optimizer, "_step_supports_amp_scaling", False):
            return False
        return "grad_scaler" not in inspect.signature(self.optimizer.step).parameters


@torch._disable_dynamo
def _refuse_others(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
    stepper = _steppers[optimizer]()
    if stepper is not None and not stepper.stepping:
        kind = type(optimizer).__name__
        raise RuntimeError(
            f"SparseSync: step() of the inner {kind} was called, wanted step() of the SparseSync: without it this rank "
            "sends and receives nothing. Call opt.step(), with GradScaler scaler.step(opt) and scaler.unscale_(opt); "
            f"to go on with the {kind} alone delete the SparseSync"
        )


def coalesce_gradients(params: Iterable[torch.Tensor]) -> None:
    """Add up what sparse gradients hold twice, so that their values are those of the gradient."""
    for p in params:
        if p.grad is not None and p.grad.is_sparse:
            p.grad = p.grad.coalesce()
