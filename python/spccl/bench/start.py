"""Starts the ranks of a benchmark: new processes of this machine, or one rank of the job that torchrun started."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import os
import tempfile
from collections.abc import Callable
from typing import Any

from .._launch import Rank, run_ranks
from .cases import Case


def torch_store(file: str, world_size: int, timeout_s: float) -> Any:
    """A store of torch in which spawned ranks meet."""
    import torch.distributed as dist

    store = dist.FileStore(file, world_size)
    store.set_timeout(datetime.timedelta(seconds=timeout_s))
    return store


@dataclasses.dataclass(frozen=True)
class BasePlan:
    """What to run, and how. A subclass says how one rank runs it. Spawned ranks meet at `store_file`."""

    cases: tuple[Case, ...]
    iters: int = 20
    warmup: int = 3
    timeout_s: float = 120.0  # of one collective
    store_file: str = ""
    needs_torch = True

    def prepared(self, stack: contextlib.ExitStack) -> BasePlan:
        """This plan with what spawned ranks need; `stack` removes it at the end."""
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="spccl-bench-"))
        return dataclasses.replace(self, store_file=os.path.join(folder, "store"))

    def enter_host(self, rank: Rank) -> None:
        """Called first in a spawned rank."""

    def run(self, rank: int, world_size: int, ordinal: int, store: Any, send: Callable[[Any], None]) -> list[Any]:
        """Run all cases on one rank and return their rows.

        Args:
            ordinal: number of the rank on its host.
            store: a store of torch; None unless `needs_torch`.
            send: takes ("row", a row) of each case, and what else the subclass names.
        """
        raise NotImplementedError


def _silent(_message: Any) -> None:
    """`send` of the ranks other than 0."""


def _spawned_rank(rank: Rank, plan: BasePlan) -> list[Any]:
    plan.enter_host(rank)
    store = torch_store(plan.store_file, rank.world_size, plan.timeout_s) if plan.needs_torch else None
    return plan.run(rank.rank, rank.world_size, rank.rank, store, _silent if rank.rank else rank.send)


def under_torchrun() -> bool:
    """Whether torchrun, or a launcher with the same variables, started this process as one rank of a job."""
    return all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))


def run_here(plan: BasePlan, on_message: Callable[[Any], None]) -> list[Any]:
    """Run as one rank of the job that torchrun started; `on_message` is called on rank 0 only."""
    import torch.distributed as dist

    rendezvous = dist.rendezvous("env://", timeout=datetime.timedelta(seconds=plan.timeout_s))
    store, rank, world_size = next(iter(rendezvous))
    return plan.run(rank, world_size, int(os.environ.get("LOCAL_RANK", rank)), store, _silent if rank else on_message)


def run_spawned(
    plan: BasePlan, world_size: int, *, deadline_s: float, on_message: Callable[[Any], None]
) -> list[Any]:
    """Run over `world_size` new processes of this machine. Returns the rows in the order of the cases.

    Args: on_message: called with what rank 0 sends (`BasePlan.run`).
    Raises: RanksFailed (_launch.py), CannotEmulate (hosts.py).
    """
    with contextlib.ExitStack() as stack:
        how: Any = {"deadline_s": deadline_s, "on_message": lambda _rank, message: on_message(message)}
        return run_ranks(_spawned_rank, world_size, (plan.prepared(stack),), **how)[0]
