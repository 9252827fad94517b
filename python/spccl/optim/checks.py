"""What `SparseSync` refuses, with the reason and what to do instead."""

import gc
import inspect
import math
import numbers
import sys
import warnings
import weakref
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist


def require(name: str, value: object, ok: bool, wanted: str) -> None:
    if not ok:
        raise ValueError(f"SparseSync: {name} is {value!r}, wanted {wanted}")


def is_whole(value: object, least: int, most: int = 2**32 - 1) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def is_number(value: object) -> bool:
    """Whether value is a finite number that float64 holds; not for a bool."""
    try:
        return isinstance(value, numbers.Real) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # a larger int
        return False


def is_share(value: Any) -> bool:
    return is_number(value) and 0 < value <= 1


def percent_hint(density: Any) -> str:
    """For the error about a density that may be meant as percent."""
    is_percent = is_number(density) and 1 < density <= 100
    return f"; {density} percent is density={density / 100:g}" if is_percent else ""


def warn_of_density_1(who: str, density: object) -> None:
    """Warn, at the first line outside of spccl that led here, of the integer 1, which may be meant as percent."""
    if not (isinstance(density, int) and density == 1):
        return
    frame, level = sys._getframe(), 1
    while frame.f_back is not None and frame.f_globals["__name__"].partition(".")[0] == "spccl":
        frame, level = frame.f_back, level + 1
    warnings.warn(
        f"{who}: density=1 sends every entry; one percent is density=0.01. Write density=1.0 if all entries are meant",
        stacklevel=level,
    )


def check_settings(s: Any) -> None:
    """Raises: ValueError that names the first setting of a `Settings` that is out of range or no number."""
    wanted = "in (0, 1], or a function; 0.01 is 1%" + percent_hint(s.density)
    require("density", s.density, callable(s.density) or is_share(s.density), wanted)
    require("every", s.every, is_whole(s.every, 1), "a whole number, 1 or more")
    require("warmup", s.warmup, is_whole(s.warmup, 0), "a whole number, 0 or more")
    require("warmup", s.warmup, s.warmup == 0 or not callable(s.density), "0 when density is a function")
    require("sample", s.sample, is_share(s.sample), "in (0, 1]")
    require("min_numel", s.min_numel, is_whole(s.min_numel, 1), "a whole number, 1 or more")
    require("decay", s.decay, is_share(s.decay), "in (0, 1]")
    require("outer_lr", s.outer_lr, is_number(s.outer_lr) and s.outer_lr > 0, "a finite number above 0")
    momentum = s.outer_momentum
    require("outer_momentum", momentum, is_number(momentum) and 0 <= momentum < 1, "in [0, 1)")
    moment = s.correct_second_moment
    known = moment is None or isinstance(moment, bool) or (isinstance(moment, str) and moment == "scaled")
    require("correct_second_moment", moment, known, "None, False, True or 'scaled'")
    clip = s.clip_norm
    require("clip_norm", clip, clip is None or (is_number(clip) and clip > 0), "a finite number above 0, or None")
    require("check_finite", s.check_finite, isinstance(s.check_finite, bool), "True or False")
    require("bucket_mb", s.bucket_mb, is_number(s.bucket_mb) and s.bucket_mb > 0, "a finite number above 0")
    require("check_every", s.check_every, is_whole(s.check_every, 0), "a whole number, 0 or more")
    require("norm_every", s.norm_every, is_whole(s.norm_every, 0), "a whole number, 0 or more")
    narrow = s.wire_dtype is None or s.wire_dtype is torch.bfloat16
    require("wire_dtype", s.wire_dtype, narrow, "torch.bfloat16, or None for the weights' dtype")
    chunk = s.chunk
    power = is_whole(chunk, 256) and chunk <= 4096 and chunk & (chunk - 1) == 0
    require("chunk", chunk, power or (is_whole(chunk, 0) and chunk == 0), "0, or a power of 2 from 256 to 4096")
    require("bits", s.bits, s.bits is None or is_whole(s.bits, 2, 2), "2, or None for whole values")
    require("bits", s.bits, s.bits is None or s.chunk > 0, "None without chunk: set chunk=4096")
    require("bits", s.bits, s.bits is None or s.wire_dtype is None, "None with wire_dtype: set one of them")
    require("seed", s.seed, is_whole(s.seed, 0), "a whole number from 0 to 2^32 - 1")


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


def check_param(name: str, param: torch.Tensor) -> None:
    if param.dtype not in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
        raise TypeError(
            f"SparseSync: parameter {name} is {param.dtype}, wanted float32, float64, float16 or bfloat16; leave it "
            "out of the optimizer"
        )
    if param.device.type not in ("cpu", "cuda"):
        raise ValueError(
            f"SparseSync: parameter {name} is on {param.device}, wanted host or CUDA memory; call model.to_empty() or "
            "model.to() before the optimizer is made"
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
