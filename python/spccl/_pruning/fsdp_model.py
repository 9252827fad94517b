"""Parameter groups of FSDP2 models: which there are, over which ranks, and how their flat gradients are laid out.

For `spccl.fsdp` and `spccl.optim`. The only file that reads what is private to torch's `fully_shard`. The names are
those of torch 2.13 and 2.14; where an older torch has another one, a comment says so.
"""

import gc
from collections.abc import Container, Iterable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from .hook_state import plain_name


def fsdp_modules(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The modules in `model` that `fully_shard` was called on."""
    from torch.distributed.fsdp import FSDPModule

    return [m for m in model.modules() if isinstance(m, FSDPModule)]


def param_groups(module: torch.nn.Module) -> list[Any]:
    """torch's FSDPParamGroup objects of one module; none where its submodules have all its parameters."""
    state = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):  # from torch 2.12 or 2.13 on
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def reshard(modules: Iterable[torch.nn.Module]) -> None:
    """Free gathered parameters, so that the next forward pass gathers the shards again."""
    for module in modules:
        module.reshard()


def modules_with(wanted: Container[int]) -> list[torch.nn.Module]:
    """The FSDP2 modules that have a sharded parameter whose id is in `wanted`. Searches this process's objects."""
    from torch.distributed.fsdp import FSDPModule

    modules = [thing for thing in gc.get_objects() if issubclass(type(thing), FSDPModule)]
    return [m for m in modules if any(id(p.sharded_param) in wanted for g in param_groups(m) for p in g.fsdp_params)]


class Part(NamedTuple):
    """A parameter's shard in the flat gradient of its group: first element, name, shape, shape of the parameter."""

    begin: int
    name: str
    shape: torch.Size
    whole: torch.Size


class Unit:
    """One parameter group of FSDP2 whose gradient shards are averaged over replicas.

    Attributes:
        index: its number in the model.
        group: torch's FSDPParamGroup.
        replicas, shards: process groups: ranks with the same shard; ranks that together have all of it.
        parts: the parameters that require a gradient, in the order of the flat gradient.
        length: elements of the flat gradient.
        split: name of a parameter that tensor parallelism has split too, or None.
        kept: [n] sum of the gradients that `set_requires_all_reduce(False)` held back, or None.
    """

    def __init__(self, index: int, module: torch.nn.Module, group: Any, replicas: dist.ProcessGroup | None):
        self.index = index
        self.module = module
        self.group = group
        self.is_hybrid = group._is_hsdp
        self.replicas = group._all_reduce_process_group if self.is_hybrid else replicas
        self.shards = group.mesh_info.shard_process_group
        self.parts: list[Part] = []
        self.length = 0
        self.split: str | None = None
        self.kept: torch.Tensor | None = None

    def take_layout(self, who: str, names: dict[int, str]) -> None:
        """Set `parts` and `length`, given the name of each parameter of the model by its id.

        torch pads each parameter's part to the size of the largest shard, with zeros.
        """
        for p in self.group.fsdp_params:
            if not p.sharded_param.requires_grad:
                continue
            name = names.get(id(p.sharded_param))
            if name is None:
                raise ValueError(
                    f"{who}: the model shares a parameter group of FSDP2 with modules outside of it (a parameter of "
                    f"shape {tuple(p.sharded_param.shape)}); pass the whole model"
                )
            if p.is_dtensor:
                self.split = name
            self.parts.append(Part(self.length, plain_name(name), p.sharded_size, p.sharded_param.shape))
            self.length += p.padded_sharded_param_size.numel()

    def install(self, hook: Any) -> None:
        """Have torch call `hook` with each reduce-scattered gradient, in place of averaging over replicas itself.

        For a mesh with replicas torch calls such a hook after its own all-reduce. It leaves that out for a group whose
        mesh has a dimension of shards alone. So the group gets the same mesh without the replicas. Shapes, DTensors
        and all-gathers come from the parameters' own mesh and from the dimension of shards, which stay.
        """
        if self.is_hybrid:
            from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo

            old = self.group.mesh_info
            new = FSDPMeshInfo(mesh=old.mesh, shard_mesh_dim=old.shard_mesh_dim)
            new.__dict__.update({k: v for k, v in vars(old).items() if k in vars(new) and k != "replicate_mesh_dim"})
            if self.group.post_forward_mesh_info == old:  # None, or of fewer ranks: stays
                self.group.post_forward_mesh_info = new
            self.group.mesh_info = new
        self.module.set_all_reduce_hook(hook)

    def hold_back(self, grad: torch.Tensor) -> bool:
        """Whether `set_requires_all_reduce(False)` is on; then `grad` is kept for later and becomes 0."""
        if self.group.all_reduce_grads:
            if self.kept is not None:
                grad += self.kept
                self.kept = None
            return False
        if self.kept is None:
            self.kept = grad.clone()
        else:
            self.kept += grad
        grad.zero_()
        return True

    def in_backward(self) -> bool:
        """Whether the backward pass of the root module has not ended: torch ends it in a callback of its own."""
        return bool(self.module._get_fsdp_state()._state_ctx.post_backward_final_callback_queued)

    def may_be_unused(self) -> bool:
        """Whether parameters may get no gradient: set_reduce_scatter_unused_params, from torch 2.13 on."""
        return bool(getattr(self.group, "reduce_scatter_unused_params", False))

    def sums(self) -> bool:
        """Whether gradients are added over replicas: with `set_gradient_divide_factor` torch has already divided."""
        return self.group.gradient_divide_factor is not None

    def forces_sum(self) -> bool:
        return bool(getattr(self.group, "force_sum_reduction_for_comms", False))

    def divisor(self, dtype: torch.dtype) -> float:
        """By what torch divides the gradient after the hook. Float16 and float64 are divided by a power of 2 near the
        root of the number of shards before the reduce-scatter, and by the rest after it."""
        factor = self.group.gradient_divide_factor or float(self.shards.size())
        if dtype in (torch.float32, torch.bfloat16):
            return factor if self.forces_sum() else 1.0
        before = 1
        while before * before < factor and factor % before == 0:
            before *= 2
        return factor / before


def find_units(who: str, model: torch.nn.Module, replicas: dist.ProcessGroup | None) -> list[Unit]:
    """The parameter groups of `model` that have replicas.

    Args: replicas: the ranks with the same shard, for groups whose mesh has one dimension.
    Raises: TypeError or ValueError for models that have none, with what to do.
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"{who}: got a {type(model).__name__}, wanted a model that fully_shard() was called on")
    modules = fsdp_modules(model)
    if not modules:
        raise TypeError(
            f"{who}: got a {type(model).__name__} with no FSDP2 module in it; call torch.distributed.fsdp.fully_shard "
            "on it first, with a mesh of 2 dimensions (DistributedDataParallel: use spccl.ddp.PrunedGradients; "
            "FullyShardedDataParallel, FSDP1, is not supported)"
        )
    if replicas is not None and dist.get_rank(replicas) < 0:
        raise ValueError(
            f"{who}: this process (rank {dist.get_rank()} of the world) is not in the group it was given; pass the "
            "group of the ranks that hold the same shard as this rank"
        )
    reshard(modules)
    units: list[Unit] = []
    seen: set[int] = set()
    for module in modules:
        groups = param_groups(module)
        for group in groups:
            if id(group) in seen or not any(p.sharded_param.requires_grad for p in group.fsdp_params):
                continue
            seen.add(id(group))
            _check_group(who, model, module, groups)
            if group._is_hsdp or replicas is not None:
                units.append(Unit(len(units), module, group, replicas))
    if not units:
        raise ValueError(
            f"{who}: no parameter of the {type(model).__name__} has replicas: each is sharded over a mesh of 1 "
            'dimension. Call fully_shard(..., mesh=init_device_mesh("cuda", (replicas, shards), '
            'mesh_dim_names=("replicate", "shard"))), or pass group=, the ranks that hold the same shard'
        )
    names = {id(p): name for name, p in model.named_parameters()}
    for unit in units:
        unit.take_layout(who, names)
        shards, copies = (dist.get_process_group_ranks(group) for group in (unit.shards, unit.replicas))
        refuse_shared_shards(who, unit.parts[0].name, shards, copies)
    _check_same_ranks(who, units)
    return units


def refuse_shared_shards(who: str, name: str, shards: list[int], replicas: Iterable[int]) -> None:
    """Raises: ValueError if several of the ranks `replicas`, which are to be averaged, hold different shards of a
    parameter. `shards`: the ranks that together hold it."""
    common = sorted(set(replicas).intersection(shards))
    if len(common) > 1:
        raise ValueError(
            f"{who}: parameter {name} is sharded over ranks {shards}, and the exchange's group has "
            f"{common} of them, which hold different shards; pass group=, the ranks that hold the same shard: "
            'mesh.get_group("replicate") of a mesh with the dimensions "replicate" and "shard"'
        )


def _check_group(who: str, model: torch.nn.Module, module: torch.nn.Module, groups: list[Any]) -> None:
    name = next(n for n, m in model.named_modules() if m is module) or type(model).__name__
    if len(groups) > 1:
        raise ValueError(
            f"{who}: module {name!r} has parameters on {len(groups)} meshes (shard_placement_fn); torch then has no "
            "all-reduce hook. Call fully_shard on submodules that have one mesh each"
        )
    if not hasattr(groups[0].mesh_info, "shard_process_group"):
        raise ValueError(
            f"{who}: module {name!r} is replicated and not sharded (torch's replicate()); use "
            "DistributedDataParallel with spccl.ddp.PrunedGradients"
        )
    if groups[0]._all_reduce_hook is not None:
        raise ValueError(
            f"{who}: module {name!r} already has an all-reduce hook ({groups[0]._all_reduce_hook!r}); call "
            "spccl.fsdp.prune once on a model, and set no other hook"
        )


def _check_same_ranks(who: str, units: list[Unit]) -> None:
    first = units[0]
    for unit in units[1:]:
        for what in ("replicas", "shards"):
            wanted, got = (dist.get_process_group_ranks(getattr(u, what)) for u in (first, unit))
            if got != wanted:
                raise ValueError(
                    f"{who}: parameter {unit.parts[0].name!r} has {what} on ranks {got}, "
                    f"{first.parts[0].name!r} on {wanted}; wanted one mesh for the whole model"
                )
