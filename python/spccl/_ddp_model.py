"""The DDP module under a model, and the parameters that it trains: for `spccl.ddp`."""

import gc

import torch

from ._hook_state import Layout, contiguous, plain_name


def find_ddp(model: torch.nn.Module) -> torch.nn.parallel.DistributedDataParallel:
    """The one DistributedDataParallel that `model` is or contains. Wrappers keep what they wrap as a submodule."""
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"PrunedGradients.register: got a {type(model).__name__}, wanted DistributedDataParallel")
    found = [m for m in model.modules() if isinstance(m, torch.nn.parallel.DistributedDataParallel)]
    if not found:
        raise TypeError(
            f"PrunedGradients.register: got a {type(model).__name__} with no DistributedDataParallel in it; wrap the "
            "model in DistributedDataParallel first (Accelerate: call prepare() first; Trainer: use "
            "spccl.integrations.PrunedGradientsCallback)"
        )
    if len(found) > 1:
        raise TypeError(
            f"PrunedGradients.register: the {type(model).__name__} contains {len(found)} DistributedDataParallel "
            "modules, wanted 1; register one object on each"
        )
    return found[0]


def refuse_second_hook(model: torch.nn.parallel.DistributedDataParallel) -> None:
    """Raises: RuntimeError if the model has a communication hook. DDP takes one, and its error names neither."""
    for hook, _ in vars(model).get("_comm_hooks", ()):
        raise RuntimeError(
            "PrunedGradients.register: this DistributedDataParallel already has the communication hook "
            f"{getattr(hook, '__name__', hook)}, and takes only one; leave one of the two out, or wrap the model in a "
            "new DistributedDataParallel"
        )


def find_ddp_by_hook(state: object) -> torch.nn.parallel.DistributedDataParallel:
    """The one DistributedDataParallel with `state` as state of its communication hook.

    Searches this process's objects. Raises: RuntimeError if no model, or more than one, has this state.
    """
    kind = torch.nn.parallel.DistributedDataParallel
    models = [
        thing
        for thing in gc.get_objects()
        if issubclass(type(thing), kind) and any(s is state for _, s in vars(thing).get("_comm_hooks", ()))
    ]
    if len(models) != 1:
        raise RuntimeError(
            f"PrunedGradients: {len(models)} DistributedDataParallel modules have this object as state of a hook, "
            "wanted 1; call PrunedGradients(...).register(model), with one object per model"
        )
    return models[0]


def trained(model: torch.nn.parallel.DistributedDataParallel) -> list[tuple[str, torch.nn.Parameter]]:
    """Names and parameters that DDP reduces. A compiled module's prefix is taken off, so that a checkpoint fits
    the model compiled and not."""
    named = model.module.named_parameters()
    return [(plain_name(name), param) for name, param in named if param.requires_grad]


def layouts(model: torch.nn.parallel.DistributedDataParallel) -> dict[str, Layout]:
    """How each parameter's gradient lies in a bucket of DDP: as the parameter does, if that has no gaps."""
    return {name: _layout(param) for name, param in trained(model)}


def _layout(param: torch.Tensor) -> Layout:
    size = 1
    for stride, n in sorted((s, n) for s, n in zip(param.stride(), param.shape, strict=True) if n != 1):
        if stride != size:  # gaps, or elements that share memory: then DDP's bucket is contiguous
            return contiguous(param.shape)
        size *= n
    return Layout(param.shape, param.stride())
