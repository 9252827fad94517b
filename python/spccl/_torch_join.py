"""Errors of joining a group of torch, with all ranks that are absent: the library waits for one after another."""

import contextlib
from collections.abc import Iterator
from typing import Any


def check_rank(rank: int, size: int) -> None:
    """Raises: ValueError for a rank that is not in the group. Gloo's own text says neither where nor what to do."""
    if not 0 <= rank < size:
        raise ValueError(
            f"spccl: rank {rank} of a group of {size}, wanted 0 to {size - 1}; see RANK and WORLD_SIZE, or rank= and "
            "world_size= of init_process_group"
        )


@contextlib.contextmanager
def naming_absent_ranks(member: Any, timeout_ms: int) -> Iterator[None]:
    """Around the making of a group: the error of a time-out names the ranks that have not begun to join.

    Args: member: a `_Member` of `spccl.backend`, which has counted its join in the store.
    Raises: DistBackendError; the error as it came if all ranks have begun to join, or if the store fails too.
    """
    import torch.distributed as dist

    try:
        yield
    except RuntimeError as error:
        absent = _absent_ranks(member) if "[SPCCL_ERR_TIMEOUT]" in str(error) else []
        if not absent:
            raise
        ranks = "rank " + absent[0] if len(absent) == 1 else "ranks " + ", ".join(absent)
        raise dist.DistBackendError(
            f"spccl: rank {member.rank} of {member.size}, group '{member.name}': joining the group: {ranks} did not "
            f"come within {timeout_ms} ms; see the output of each, or raise the timeout if they are only slow "
            "[SPCCL_ERR_TIMEOUT]"
        ) from error


def _absent_ranks(member: Any) -> list[str]:
    try:
        joins = [member.store.add(f"spccl/joins/{rank}", 0) for rank in range(member.size)]
    except RuntimeError:
        return []
    return [str(rank) for rank, n in enumerate(joins) if n < joins[member.rank]]
