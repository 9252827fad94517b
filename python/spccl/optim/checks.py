"""What `SparseSync` refuses, with the reason and what to do instead."""

import gc
import inspect
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from spccl._pruning.checks import require

from .bucket import Weight, own_memory, own_pointer


def check_group(group: object) -> None:
    """Raises: TypeError if `group` is not a process group. What new_group() gives ranks outside the group passes."""
    outside = dist.is_available() and group is dist.GroupMember.NON_GROUP_MEMBER
    if group is None or outside or (dist.is_available() and isinstance(group, dist.ProcessGroup)):
        return
    raise TypeError(
        f"SparseSync: group is {group!r}, a {type(group).__name__}, wanted a torch.distributed process group, such as "
        "what new_group() returns, or None for all ranks"
    )


def check_optimizer(optimizer: object) -> None:
    """Raises: TypeError for what is no torch optimizer, one that needs a closure, and ZeroRedundancyOptimizer."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            f"SparseSync: got a {type(optimizer).__name__}, wanted a torch.optim.Optimizer: "
            "SparseSync(torch.optim.AdamW(model.parameters(), lr=3e-4), density=0.01)"
        )
    if any(kind.__name__ == "ZeroRedundancyOptimizer" for kind in type(optimizer).__mro__):
        raise TypeError(
            "SparseSync: got a ZeroRedundancyOptimizer: it steps each parameter on one rank, with that rank's "
            "gradient, and sends the result to all, so the other ranks' gradients would be lost. Give SparseSync the "
            "optimizer itself, such as torch.optim.AdamW(model.parameters()); to shard its state use FSDP2 inside "
            "each replica"
        )
    needed = [
        p.name
        for p in inspect.signature(optimizer.step).parameters.values()
        if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    if needed:
        raise TypeError(
            f"SparseSync: got {type(optimizer).__name__}, whose step() needs {', '.join(needed)}: it evaluates the "
            "model in its step, and ranks could do so different numbers of times; wanted an optimizer whose step() "
            "needs no closure, such as AdamW or SGD"
        )


def refuse_density(density: object, bits: int | None) -> None:
    """Raises: ValueError for a density that was given with bits=1."""
    require("SparseSync", "density", density, density is None or bits != 1, "None with bits=1, which prunes nothing")


def device_of(optimizer: torch.optim.Optimizer) -> torch.device | None:
    """That of its first parameter; None if it has none."""
    return next((p.device for group in optimizer.param_groups for p in group["params"]), None)


def check_param(name: str, param: torch.Tensor, bits: int | None) -> None:
    if param.dtype not in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
        raise TypeError(
            f"SparseSync: parameter {name} is {param.dtype}, wanted float32, float64, float16 or bfloat16; leave it "
            "out of the optimizer"
        )
    if bits == 1 and param.dtype == torch.float64:
        raise ValueError(
            f"SparseSync: bits=1 with parameter {name} of float64, wanted float32, float16 or bfloat16; leave bits out"
        )
    if param.device.type not in ("cpu", "cuda"):
        raise ValueError(
            f"SparseSync: parameter {name} is on {param.device}, wanted host or CUDA memory; call model.to_empty() or "
            "model.to() before the optimizer is made"
        )


def require_same_parameters(optimizer: torch.optim.Optimizer, weights: Sequence[Weight]) -> None:
    """Raises: RuntimeError unless the optimizer's trained parameters are these, in the same memory."""
    present = [p for group in optimizer.param_groups for p in group["params"]]
    ours = {id(w.param) for w in weights}
    for p in present:
        if p.requires_grad and own_memory(p).numel() and id(p) not in ours:
            raise RuntimeError(
                f"SparseSync.step: the optimizer has a parameter of shape {tuple(p.shape)} that was not there, or did "
                "not require a gradient, when SparseSync was made; make a new SparseSync after changing the optimizer, "
                "on all ranks at the same step"
            )
    theirs = {id(p) for p in present}
    for w in weights:
        if id(w.param) not in theirs:
            raise RuntimeError(
                f"SparseSync.step: parameter {w.name} of shape {tuple(w.param.shape)} was removed from the optimizer "
                "after SparseSync was made; make a new SparseSync after changing the optimizer, on all ranks at the "
                "same step"
            )
        if own_pointer(w.param) != w.pointer:
            raise RuntimeError(
                f"SparseSync.step: parameter {w.name} has other memory than when SparseSync was made; call model.to() "
                "and the like before the optimizer is made"
            )


def refuse_ddp(params: Iterable[torch.Tensor], members: set[int]) -> None:
    """Raises: RuntimeError if a DistributedDataParallel module has one of these parameters, and averages its gradient
    over ranks among `members`, over which SparseSync averages."""
    trained = {id(p) for p in params}
    for model in _living(torch.nn.parallel.DistributedDataParallel):
        named, ignored = model.module.named_parameters(), model.parameters_to_ignore
        if not any(id(p) in trained for name, p in named if name not in ignored):
            continue
        try:
            both = sorted(members.intersection(dist.get_process_group_ranks(model.process_group)))
        except KeyError:  # torch.distributed does not know the group: another library's, or destroyed
            continue
        if len(both) > 1:
            raise RuntimeError(
                f"SparseSync.step: a DistributedDataParallel module averages the gradients over ranks {both}, and "
                "SparseSync averages the changes of the weights over the same ranks; use one of the two. For "
                "SparseSync make no DistributedDataParallel (Accelerate: prepare_model(model, evaluation_mode=True)); "
                "for pruned gradients under DistributedDataParallel and SGD use spccl.ddp.PrunedGradients"
            )


def refuse_unscaled(
    inner: torch.optim.Optimizer, sync: torch.optim.Optimizer, last: "weakref.ref[torch.amp.GradScaler] | None"
) -> "weakref.ref[torch.amp.GradScaler] | None":
    """The GradScaler whose step() calls that of `sync`. It is searched for only if it is not that of the `last` call.

    Raises: RuntimeError if its unscale_() was called with `inner` in this step.
    """
    scaler = last() if last is not None else None
    if scaler is None or id(sync) not in scaler._per_optimizer_states:
        calling = [s for s in _living(torch.amp.GradScaler) if id(sync) in s._per_optimizer_states]
        if not calling:
            return None
        scaler, last = calling[0], weakref.ref(calling[0])
    state = scaler._per_optimizer_states.get(id(inner))
    if state is not None and state["stage"].name == "UNSCALED":
        raise RuntimeError(
            f"SparseSync.step: scaler.unscale_() was called with the inner {type(inner).__name__}, and "
            "scaler.step() with the SparseSync, which would unscale the gradients again; give both the SparseSync"
        )
    return last


def _living(kind: type) -> list[Any]:
    """The objects of a class or its subclasses that this process uses. Takes some 10 ms."""
    for attempt in range(2):
        if not any(issubclass(t, kind) for t in set(map(type, gc.get_objects()))):
            return []
        if attempt == 0:
            gc.collect()  # what nobody refers to any more does not count
    return [x for x in gc.get_objects() if issubclass(type(x), kind)]
