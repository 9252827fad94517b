"""The DDP module under a model, the parameters that it trains, and optimizers that pruning does not suit: for
`spccl.ddp`."""

import gc

import torch


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


def plain_name(name: str) -> str:
    """A parameter's name without the prefix of torch.compile."""
    return name.replace("_orig_mod.", "")


def trained_numels(model: torch.nn.parallel.DistributedDataParallel) -> dict[str, int]:
    return {name: param.numel() for name, param in trained(model)}


def is_adam_like(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer divides by a running second moment, or takes signs of a running first one: those with
    `betas` (Adam, AdamW, Lion, fused ones of other projects), and torch's others."""
    others = (torch.optim.RMSprop, torch.optim.Adagrad, torch.optim.Adadelta, torch.optim.Adafactor)
    return isinstance(optimizer, others) or any("betas" in group for group in optimizer.param_groups)


def refuse_adam(optimizer: torch.optim.Optimizer) -> None:
    """Raises: ValueError if pruned gradients do not suit the optimizer. Accelerate's wrapper of one is looked into."""
    optimizer = getattr(optimizer, "optimizer", optimizer)
    if is_adam_like(optimizer):
        kind = type(optimizer).__name__
        raise ValueError(
            f"PrunedGradients.register: got {kind} as optimizer, wanted SGD: {kind} takes the zeros of a pruned "
            "gradient for small gradients and its large entries for noise (with AdamW a GPT ended at a loss of 2.61, "
            f"dense at 0.82). Use spccl.optim.SparseSync({kind}(...), density=0.01) without DDP, or pass "
            "allow_adam=True (docs/TRAINING.md)"
        )
