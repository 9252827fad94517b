"""The ranks that average their weights: group, backend, and what they must agree on."""

import warnings
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from spccl import backend

from .checks import outside

_MOST_FAULTS = 5  # of what ranks do differently, named in an error


def averages(who: str, group: dist.ProcessGroup, device: torch.device, sends_zeros: bool = True) -> bool:
    """Whether the group's backend for `device` has ReduceOp.AVG. Warns if it sends zeros too and there are any."""
    name = backend.name_for(group, device)
    if name != backend.NAME and sends_zeros:
        warnings.warn(
            f"{who}: the group's backend for {device.type} is {name!r}, not 'spccl': training is the same, but zeros "
            'travel too and no bytes are saved. Use init_process_group("spccl").',
            stacklevel=outside(),
        )
    return name in backend.AVERAGING


class Ranks:
    """The process group of a `SparseSync`; without torch.distributed one rank alone, whose exchanges do nothing."""

    def __init__(self, group: dist.ProcessGroup | None):
        there = dist.is_available() and dist.is_initialized()
        self.group = dist.group.WORLD if group is None and there else group
        self.world_size = dist.get_world_size(self.group) if self.group is not None else 1
        self.rank = dist.get_rank(self.group) if self.group is not None else 0
        if self.rank < 0:
            raise ValueError(
                f"SparseSync: this process (rank {dist.get_rank()} of the world) is not in the group it was given; "
                "make the optimizer only on ranks of the group"
            )

    @property
    def n_pruning(self) -> int:
        """Number of ranks that prune and exchange with each other."""
        return self.world_size

    @property
    def number(self) -> int:
        """This rank's number among those."""
        return self.rank

    def members(self) -> set[int]:
        """The numbers in the world of the ranks of the group."""
        return set(dist.get_process_group_ranks(self.group)) if self.group is not None else set()

    def backend(self, device: torch.device) -> str:
        """Name of the backend that carries tensors of `device`; "none" for one rank alone."""
        if self.world_size == 1 or self.group is None:
            return "none"
        return backend.name_for(self.group, device)

    def averages(self, device: torch.device, sends_zeros: bool = True) -> bool:
        """Whether an all-reduce can average. See the function `averages`."""
        return self.world_size == 1 or averages("SparseSync", self.group, device, sends_zeros)

    def all_reduce(self, buffer: torch.Tensor, average: bool) -> "dist.Work | None":
        """Start the average (or sum) of `buffer` over the ranks, in place; None if there is nothing to wait for."""
        if self.world_size == 1:
            return None
        op = dist.ReduceOp.AVG if average else dist.ReduceOp.SUM
        return dist.all_reduce(buffer, op=op, group=self.group, async_op=True)

    def all_to_all(self, given: torch.Tensor, out: torch.Tensor) -> "dist.Work | None":
        """Start sending block r of `given` [ranks * n] to rank r; `out` [ranks * n] gets what each sent, by rank."""
        if self.world_size == 1:
            out.copy_(given)
            return None
        return dist.all_to_all_single(out, given, group=self.group, async_op=True)

    def all_gather(
        self, mine: torch.Tensor, out: torch.Tensor | None = None
    ) -> "tuple[torch.Tensor, dist.Work | None]":
        """Start the gathering of every rank's `mine` [n], in rank order: ([ranks, n], what to wait for).

        Args: out: [ranks * n] to gather into; None: a new tensor.
        """
        everyone = (mine.new_empty(self.world_size * mine.numel()) if out is None else out).view(self.world_size, -1)
        if self.world_size == 1:
            return everyone.copy_(mine[None]), None
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # renamed in torch 2.13
        return everyone, gather(everyone.view(-1), mine, group=self.group, async_op=True)

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Give every rank what rank 0 of the group has."""
        if self.world_size > 1:
            dist.broadcast(tensor, src=dist.get_global_rank(self.group, 0), group=self.group)

    def gather(self, mine: Any) -> list[Any]:
        """What each rank gave, by rank."""
        if self.world_size == 1:
            return [mine]
        everyone: list[Any] = [None] * self.world_size
        dist.all_gather_object(everyone, mine, group=self.group)
        return everyone

    def require_same(self, facts: dict[str, Any]) -> None:
        """Errors on every rank unless all ranks give the same facts; the text has the facts, values and ranks."""
        everyone = self.gather(facts)
        names = list(dict.fromkeys(name for theirs in everyone for name in theirs))
        faults = []
        for name in names:
            values = [theirs.get(name, "absent") for theirs in everyone]
            if any(value != values[0] for value in values):
                faults.append(f"{name} is {_by_value(values)}")
        if faults:
            more = len(faults) - _MOST_FAULTS
            if more > 0:
                faults[_MOST_FAULTS:] = [f"and {more} more difference{'s' if more > 1 else ''}"]
            raise ValueError(
                f"SparseSync: ranks differ: {'; '.join(faults)}; make the model and SparseSync the same way on all "
                "ranks"
            )

    def require_equal_weights(self, sums: Sequence[int], exchange: int) -> None:
        """Errors on every rank, naming ranks, unless all ranks' checksums of their global weights are the same."""
        everyone = [tuple(theirs) for theirs in self.gather(list(sums))]
        common = max(everyone, key=everyone.count)
        odd = [rank for rank, theirs in enumerate(everyone) if theirs != common]
        if odd:
            raise RuntimeError(
                f"SparseSync: after exchange {exchange} the global weights of {_ranks(odd)} differ from those of "
                f"{_ranks([r for r in range(self.world_size) if r not in odd])}; they must be the same bit for bit. "
                f"This is rank {self.rank}. Something other than SparseSync wrote to its memory, or the backend "
                f"({self.backend_names()}) gave ranks different results. Load a checkpoint on all ranks"
            )

    def backend_names(self) -> str:
        if self.group is None:
            return "none"
        return ", ".join(sorted(set(backend.names_of(self.group))))


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def _by_value(values: list[Any]) -> str:
    ranks_of: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks_of.setdefault(str(value), []).append(rank)
    return ", ".join(f"{value} on {_ranks(ranks)}" for value, ranks in ranks_of.items())
