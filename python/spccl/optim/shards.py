"""Parameters that are DTensors: what `SparseSync` does where a model is sharded inside each replica.

A rank then exchanges its local parts with the ranks that have the same parts: the *replicas*. The gradient of a replica
is spread over its shards, so its norm is a sum over them.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from spccl import prune
from spccl._pruning import fsdp_model
from spccl._pruning.ranks import Ranks

from .bucket import local_part

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

Groups = tuple[Any, ...]  # process groups over which a parameter is sharded


class Shards:
    """Over which ranks the parameters of an optimizer are sharded.

    Attributes:
        example: name of a sharded parameter; None if there is none.
        place: (this rank's number, how many) in each process group over which a parameter is sharded.
    Raises: ValueError for parameters that ranks of the exchange's group share.
    """

    def __init__(self, params: Iterable[tuple[str, torch.Tensor]], ranks: Ranks):
        self._groups: dict[int, Groups] = {}  # by id of a sharded parameter
        self._devices: dict[Groups, torch.device] = {}
        self.example: str | None = None
        for name, p in params:
            if hasattr(p, "_local_tensor"):
                self.example = self.example or name
                groups = _groups_of(name, p, ranks)
                self._groups[id(p)] = groups
                self._devices.setdefault(groups, p.device)
        self.place = tuple((g.rank(), g.size()) for g in dict.fromkeys(g for key in self._devices for g in key))
        self._modules = fsdp_model.modules_with(self._groups) if self._groups else []

    def __bool__(self) -> bool:
        return bool(self._groups)

    def norm(self, params: Sequence[torch.Tensor]) -> float:
        """Norm of this replica's gradient; inf or nan if one of its shards has inf or nan. Waits for the device.

        Where parameters are sharded this is a collective of the shards: 8 bytes.
        """
        kinds: dict[Groups, list[torch.Tensor]] = {(): [], **{groups: [] for groups in self._devices}}
        for p in params:
            if (grad := gradient(p)) is not None:
                kinds[self._groups.get(id(p), ())].append(grad)
        squares = 0.0
        for groups, grads in kinds.items():
            square = _norm(grads) ** 2
            if groups:
                total = torch.tensor([square], dtype=torch.float64, device=self._devices[groups])
                for group in groups:
                    dist.all_reduce(total, group=group)
                square = float(total)
            squares += square
        return math.sqrt(squares)

    def forget_gathered(self) -> None:
        """Free what FSDP2 has gathered, because the shards are about to change, or have changed.

        FSDP2 keeps the root module's parameters after a forward pass without a backward pass, and takes these again in
        the next one.
        """
        fsdp_model.reshard(self._modules)


def gradient(param: torch.Tensor) -> torch.Tensor | None:
    """The memory of a gradient that holds numbers: of a sparse one its values, of a DTensor its local part."""
    grad = param.grad
    if grad is None:
        return None
    grad = local_part(grad)
    return grad._values() if grad.is_sparse else grad


def _norm(grads: list[torch.Tensor]) -> float:
    """Norm of all gradients; inf or nan if one of them has inf or nan. Waits for the device."""
    kinds: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for g in grads:
        kinds.setdefault((g.device, g.dtype), []).append(g)
    found = []
    for (_, dtype), same in kinds.items():
        norms = torch.stack(torch._foreach_norm(same, 2, dtype=prune.wide_dtype(dtype)))
        found.append(float(torch.linalg.vector_norm(norms)))
    return math.hypot(*found)


def _groups_of(name: str, param: Any, ranks: Ranks) -> Groups:
    """The process groups over which a DTensor is sharded."""
    mesh, groups = param.device_mesh, []
    ours = set() if ranks.group is None else set(dist.get_process_group_ranks(ranks.group))
    for dim, placement in enumerate(param.placements):
        group = mesh.get_group(dim)
        theirs = dist.get_process_group_ranks(group)
        common = sorted(ours.intersection(theirs))
        if not placement.is_replicate():
            fsdp_model.refuse_shared_shards("SparseSync", name, theirs, ours)
        if len(common) > 1:
            raise ValueError(
                f"SparseSync: parameter {name} is replicated over ranks {theirs}, whose gradients FSDP2 averages, and "
                f"the exchange's group has {common} of them, so there is nothing to exchange. Leave the replicas to "
                'SparseSync: fully_shard(..., mesh=mesh["shard"]), with group=mesh.get_group("replicate")'
            )
        if not placement.is_replicate() and len(theirs) > 1:
            groups.append(group)
    return tuple(groups)
