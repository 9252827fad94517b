"""The ranks that average their weights: group, backend, and what they must agree on."""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from spccl import backend

from . import hosts
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


def reduce_scatter(group: dist.ProcessGroup, given: torch.Tensor, out: torch.Tensor, average: bool) -> dist.Work:
    """Start the average (or sum) of block `rank` of every rank's `given` [ranks * n] into `out` [n]. That may be wider:
    then the result is not rounded to the dtype of `given`, in which spccl sends it."""
    if given.dtype != out.dtype and backend.has_ops(group, given.device):
        return dist.Work.unbox(torch.ops.spccl.reduce_scatter_wide(backend.boxed(group), out, given, average))
    op = dist.ReduceOp.AVG if average else dist.ReduceOp.SUM
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor  # renamed in torch 2.13
    return scatter(out, given.to(out.dtype), op=op, group=group, async_op=True)


def all_gather(group: dist.ProcessGroup, mine: torch.Tensor, out: torch.Tensor) -> dist.Work:
    """Start the gathering of every rank's `mine` [n] into `out` [ranks * n], in rank order."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # renamed in torch 2.13
    return gather(out, mine, group=group, async_op=True)


def gather(group: dist.ProcessGroup, mine: Any) -> list[Any]:
    """What each rank of the group gave, by rank."""
    everyone: list[Any] = [None] * group.size()
    dist.all_gather_object(everyone, mine, group=group)
    return everyone


def require_same(who: str, what: str, everyone: Mapping[int, dict[str, Any]]) -> None:
    """Raises: ValueError unless all ranks have the same facts; the text has the facts, values and ranks.

    Args: everyone: the facts of each rank, which all ranks have gathered. what: has these facts.
    """
    names = list(dict.fromkeys(name for theirs in everyone.values() for name in theirs))
    faults = []
    for name in names:
        values = {rank: theirs.get(name, "absent") for rank, theirs in everyone.items()}
        first = next(iter(values.values()))
        if any(value != first for value in values.values()):
            faults.append(f"{name} is {_by_value(values)}")
    if faults:
        more = len(faults) - _MOST_FAULTS
        if more > 0:
            faults[_MOST_FAULTS:] = [f"and {more} more difference{'s' if more > 1 else ''}"]
        raise ValueError(f"{who}: ranks differ: {'; '.join(faults)}; make {what} the same way on all ranks")


class Ranks:
    """The process group of a `SparseSync`; without torch.distributed one rank alone, whose exchanges do nothing.

    hosts: which of the ranks prune with each other (`spccl._pruning.hosts`). Exchanges are between those.
    """

    def __init__(self, group: dist.ProcessGroup | None, mode: str = "off", device: torch.device | None = None):
        there = dist.is_available() and dist.is_initialized()
        self.group = dist.group.WORLD if group is None and there else group
        self.world_size = dist.get_world_size(self.group) if self.group is not None else 1
        self.rank = dist.get_rank(self.group) if self.group is not None else 0
        if self.rank < 0:
            raise ValueError(
                f"SparseSync: this process (rank {dist.get_rank()} of the world) is not in the group it was given; "
                "make the optimizer only on ranks of the group"
            )
        self.hosts = hosts.find("SparseSync", mode, self.group, device)

    @property
    def n_pruning(self) -> int:
        """Number of ranks that prune and exchange with each other: hosts, where a host's ranks average first."""
        return self.hosts.n_pruning

    @property
    def across(self) -> dist.ProcessGroup | None:
        """The group in which this rank prunes and exchanges; None for one rank alone."""
        return self.hosts.across if self.world_size > 1 else None

    @property
    def number(self) -> int:
        """This rank's number among those."""
        return self.hosts.host

    def members(self) -> set[int]:
        """The numbers in the world of the ranks of the group."""
        return set(dist.get_process_group_ranks(self.group)) if self.group is not None else set()

    def backend(self, device: torch.device) -> str:
        """Name of the backend that carries tensors of `device`; "none" for one rank alone."""
        return "none" if self.across is None else backend.name_for(self.across, device)

    def averages(self, device: torch.device, sends_zeros: bool = True) -> bool:
        """Whether an all-reduce can average. See the function `averages`."""
        return self.across is None or averages("SparseSync", self.across, device, sends_zeros)

    def all_reduce(self, buffer: torch.Tensor, average: bool) -> "dist.Work | None":
        """Start the average (or sum) of `buffer` over the ranks that prune with each other, in place; None if there is
        nothing to wait for."""
        if self.across is None or buffer.numel() == 0:
            return None
        op = dist.ReduceOp.AVG if average else dist.ReduceOp.SUM
        return dist.all_reduce(buffer, op=op, group=self.across, async_op=True)

    def all_to_all(self, given: torch.Tensor, out: torch.Tensor) -> "dist.Work | None":
        """Start sending block r of `given` [n_pruning * n] to rank r of those that prune with each other; `out`
        [n_pruning * n] gets what each sent, in their order."""
        if self.across is None or given.numel() == 0:
            out.copy_(given)
            return None
        return dist.all_to_all_single(out, given, group=self.across, async_op=True)

    def reduce_scatter(self, given: torch.Tensor, out: torch.Tensor, average: bool) -> "dist.Work | None":
        """See the function `reduce_scatter`. None if there is nothing to wait for."""
        if self.across is None or given.numel() == 0:
            out.copy_(given)
            return None
        return reduce_scatter(self.across, given, out, average)

    def all_gather(
        self, mine: torch.Tensor, out: torch.Tensor | None = None
    ) -> "tuple[torch.Tensor, dist.Work | None]":
        """Start the gathering of `mine` [n] of the ranks that prune with each other, in their order: ([n_pruning, n],
        what to wait for).

        Args: out: [n_pruning * n] to gather into; None: a new tensor.
        """
        everyone = (mine.new_empty(self.n_pruning * mine.numel()) if out is None else out).view(self.n_pruning, -1)
        if self.across is None or mine.numel() == 0:
            return everyone.copy_(mine[None]), None
        return everyone, all_gather(self.across, mine, everyone.view(-1))

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Give every rank what rank 0 of the group has."""
        if self.world_size > 1:
            dist.broadcast(tensor, src=dist.get_global_rank(self.group, 0), group=self.group)

    def gather(self, mine: Any) -> list[Any]:
        """What each rank gave, by rank."""
        return [mine] if self.group is None else gather(self.group, mine)

    def require_same(self, facts: dict[str, Any]) -> None:
        """See the function `require_same`."""
        require_same("SparseSync", "the model and SparseSync", dict(enumerate(self.gather(facts))))

    def require_equal_weights(self, sums: Sequence[int], exchange: int) -> None:
        """Errors on every rank, naming ranks, unless all ranks' checksums of their global weights are the same."""
        places = [place for _, place in self.hosts.of_rank]  # ranks of one place have the same part of the weights
        everyone = list(zip(places, map(tuple, self.gather(list(sums))), strict=True))
        common = {place: max((x for x in everyone if x[0] == place), key=everyone.count) for place in places}
        odd = [rank for rank, theirs in enumerate(everyone) if theirs != common[theirs[0]]]
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


def _by_value(values: dict[int, Any]) -> str:
    ranks_of: dict[str, list[int]] = {}
    for rank, value in values.items():
        ranks_of.setdefault(str(value), []).append(rank)
    return ", ".join(f"{value} on {_ranks(ranks)}" for value, ranks in ranks_of.items())
