"""An exchange of `SparseSync` that ends during the next forward pass, with the same bits as without.

A forward pre-hook of each module waits for the buckets that hold the module's parameters, and applies their averages.
It comes before the module's other hooks, which may compute a weight from parameters (weight_norm, spectral_norm,
torch.nn.utils.prune). A module of torch.nn that is no container waits for all parameters below it, because some
(MultiheadAttention) use those of their children. A module without forward(), such as ParameterList, is never called, so
the module above it waits. state_dict() and load_state_dict() of a module wait too. Where hosts prune they refuse,
because the ranks of a host wait together.

`module.compile()` keeps these hooks; `torch.compile(module)` calls only some of them and is refused.

Other uses of a parameter before its owner has run need `SparseSync.wait()`. If a gradient reaches a parameter whose
bucket was never waited for, the backward pass raises an error.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from .bucket import Weight
    from .transfers import Transfers

_installed = WeakIdKeyDictionary()  # parameter -> weak reference to the Overlap whose hooks its module has


def check_module(model: object) -> None:
    """Raises: TypeError for what is no module, or one whose hooks torch.compile would leave out."""
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"SparseSync: overlap is a {type(model).__name__}, wanted the model (torch.nn.Module), or None")
    if any(type(m).__name__ == "OptimizedModule" for m in model.modules()):
        raise TypeError("SparseSync: overlap is a compiled module, wanted one that is not: leave overlap out")


def check_weights(model: torch.nn.Module, weights: Iterable[Weight], sharded: str | None) -> None:
    """Raises: ValueError if parameter `sharded` is a DTensor, or a trained parameter is in no module of `model`."""
    if sharded is not None:
        raise ValueError(f"SparseSync: overlap with parameter {sharded}, which is sharded (FSDP2); leave overlap out")
    found = {id(p) for p in model.parameters()}
    for w in weights:
        if id(w.param) not in found:
            raise ValueError(
                f"SparseSync: parameter {w.name} of shape {tuple(w.param.shape)} is in no module of overlap; pass "
                "the whole model"
            )


def close_earlier(weights: Iterable[Weight]) -> None:
    """End the overlap of each earlier `SparseSync` that trains one of these parameters.

    What is pending of it would otherwise be added to the weights of the new one, during a forward pass.
    """
    for w in weights:
        earlier = _installed.get(w.param)
        overlap = earlier() if earlier is not None else None
        if overlap is not None:
            overlap.close()


class Overlap:
    """The hooks of one `SparseSync` on the modules and parameters of `model`.

    Args: transfers: what is under way. From now on `start` leaves every bucket pending.
    """

    def __init__(self, model: torch.nn.Module, transfers: Transfers):
        handles: list[Any] = []
        transfers.end_later()
        buckets = transfers.buckets
        place = {id(w.param): i for i, bucket in enumerate(buckets) for w in bucket.members}
        for module in model.modules():
            own = sorted({place[id(p)] for p in _used_by(module) if id(p) in place})
            if own:
                wait = _Wait(weakref.ref(transfers), own)
                handles.append(module.register_forward_pre_hook(wait, prepend=True))
                alone = _WaitAlone(weakref.ref(transfers), own)
                handles.append(module.register_state_dict_pre_hook(alone))
                handles.append(module.register_load_state_dict_pre_hook(alone))
        for i, bucket in enumerate(buckets):
            for w in bucket.members:
                after = _RefusePending(w.name, i, transfers.pending)
                handles.append(w.param.register_post_accumulate_grad_hook(after))
                _installed[w.param] = weakref.ref(self)
        self._finalizer = weakref.finalize(self, _close, transfers, handles)
        self._finalizer.atexit = False  # then the group may be gone

    def close(self) -> None:
        """End what is pending, and remove the hooks. Later exchanges of this `SparseSync` end in its step().

        The end of this object does the same.
        """
        self._finalizer()


def _close(transfers: Transfers, handles: list[Any]) -> None:
    try:
        transfers.finish(list(transfers.pending))
    finally:
        transfers.end_at_once()
        for handle in handles:
            handle.remove()


def _used_by(module: torch.nn.Module) -> Iterator[torch.nn.Parameter]:
    """The parameters that forward() of the module may use, other than through modules that it calls."""
    yield from module.parameters(recurse=_is_builtin(module))
    for child in module.children():
        if not _has_forward(child):
            yield from _used_by(child)


def _is_builtin(module: torch.nn.Module) -> bool:
    """Whether torch.nn has written forward() of the module, and it may use parameters of its children."""
    torchs = type(module).__module__.startswith("torch.nn.modules")
    return torchs and _has_forward(module) and not isinstance(module, torch.nn.Sequential)


def _has_forward(module: torch.nn.Module) -> bool:
    return type(module).forward is not torch.nn.Module.forward or "forward" in vars(module)


class _Hook:
    """A hook of a module or parameter. A copy of the model, or one that torch.save wrote, has one that does nothing."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _no_hook, ()


def _no_hook() -> Callable:
    return _do_nothing


def _do_nothing(*args: Any) -> None:
    pass


class _Wait(_Hook):
    """For before a module's forward(), whatever it is called with."""

    def __init__(self, transfers: weakref.ref[Transfers], own: list[int]):
        self._transfers, self._own = transfers, own

    def __call__(self, *args: Any) -> None:
        under_way = self._transfers()
        if under_way is not None:
            under_way.finish(self._own)


class _WaitAlone(_Wait):
    """For before a module's state_dict() or load_state_dict(), which one rank of a host may call alone."""

    def __call__(self, *args: Any) -> None:
        under_way = self._transfers()
        if under_way is not None and under_way.host is not None and not under_way.pending.keys().isdisjoint(self._own):
            raise RuntimeError(
                "SparseSync: state_dict() or load_state_dict() of a module while an exchange is under way, which the "
                "ranks of a host end together. Call opt.wait() on all ranks of the host before it, or save inside "
                "`with opt.global_weights()`, which all of them enter"
            )
        super().__call__()


class _RefusePending(_Hook):
    """For after a parameter's gradient."""

    def __init__(self, name: str, bucket: int, pending: Mapping[int, Any]):
        self._name, self._bucket, self._pending = name, bucket, pending

    def __call__(self, param: torch.Tensor) -> None:
        if self._bucket in self._pending:
            raise RuntimeError(
                f"SparseSync: parameter {self._name} has a gradient, and the exchange before was not waited for: it "
                "was used outside the forward pass of the module that owns it. Call opt.wait() before such a use, or "
                "leave overlap out"
            )
