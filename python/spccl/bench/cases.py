"""The cases that `spccl bench` measures, as data. Sizes follow nccl-tests (see `Case.size_bytes`)."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

from ..comm import COLLECTIVES, REDUCING
from ..frame import ITEM_BYTES as ELEM_BYTES

_BATCH_BYTES = 64 << 10  # up to this size calls are timed in batches: clock and barrier take as long as one call
_BATCH_CALLS = 20


@dataclasses.dataclass(frozen=True)
class Case:
    """One row of the table.

    size_bytes: dense bytes of the larger of one rank's two buffers, as nccl-tests counts: the output of an
        all-gather, the input of a reduce-scatter, either buffer of an all-reduce or broadcast. It is rounded
        down to a whole number of elements per rank.
    sparsity: fraction of elements that are zero, 0 to 1.
    max_ctas: most thread blocks that spccl may use on a GPU; 0 = all.
    target: wanted ratio to the peer; None: no target.
    """

    collective: str
    size_bytes: int
    dtype: str
    op: str  # "none" for collectives that do not reduce
    sparsity: float
    max_ctas: int = 0
    target: float | None = None

    def n_blocks(self, world_size: int) -> int:
        """Into how many ranks' blocks the larger buffer is divided."""
        return world_size if self.collective in ("all_gather", "reduce_scatter") else 1

    def block_elems(self, world_size: int) -> int:
        """Elements of the smaller buffer: one rank's block for all-gather and reduce-scatter, else all."""
        return self.size_bytes // ELEM_BYTES[self.dtype] // self.n_blocks(world_size)

    def out_elems(self, world_size: int) -> int:
        """Elements of a rank's output."""
        return self.block_elems(world_size) * (world_size if self.collective == "all_gather" else 1)

    def calls(self) -> int:
        """Number of calls that are timed together."""
        return _BATCH_CALLS if self.size_bytes <= _BATCH_BYTES else 1


def sizes(smallest: int, largest: int, factor: int) -> list[int]:
    """Sizes in bytes from smallest to largest, each `factor` times the one before."""
    if smallest < 1 or largest < smallest or factor < 2:
        raise ValueError(
            f"sizes from {smallest} to {largest} times {factor}: wanted 1 <= min <= max, factor >= 2"
        )
    result = [smallest]
    while result[-1] * factor <= largest:
        result.append(result[-1] * factor)
    return result


def cases(
    collectives: Sequence[str],
    size_list: Sequence[int],
    dtypes: Sequence[str],
    op: str,
    sparsities: Sequence[float],
    max_ctas: Sequence[int] = (0,),
) -> Iterator[Case]:
    """Every combination, in the order of the table."""
    for collective, dtype, size, sparsity, n in itertools.product(
        collectives, dtypes, size_list, sparsities, max_ctas
    ):
        yield Case(collective, size, dtype, op if collective in REDUCING else "none", sparsity, n)


def check_sizes(chosen: Sequence[Case], world_size: int) -> None:
    """Raise ValueError for the first case in which a rank would have no element: it would measure nothing."""
    for case in chosen:
        if case.block_elems(world_size) == 0:
            n_ranks = case.n_blocks(world_size)
            least = ELEM_BYTES[case.dtype] * n_ranks
            per_rank = f" for each of {n_ranks} ranks" if n_ranks > 1 else ""
            raise ValueError(
                f"{case.collective} of {case.size_bytes} bytes has no element of {case.dtype}{per_rank}: wanted at "
                f"least {least} bytes"
            )


# The targets for 4 H200: time of NCCL / time of spccl, where NCCL has its defaults or symmetric windows, the better of
# the two in the same run. (dtype, MiB, sparsity) -> all-gather, reduce-scatter, all-reduce; None = no target.
_GPU_TARGETS: dict[tuple[str, int, float], tuple[float | None, float | None, float | None]] = {
    ("float32", 512, 0.99): (8.0, 7.0, 8.0),
    ("float32", 512, 0.9): (6.0, 6.0, 3.6),
    ("float32", 512, 0.5): (2.0, 2.0, 1.3),
    ("float32", 512, 0.0): (0.98, 0.98, 0.98),
    ("bfloat16", 512, 0.99): (7.0, 6.0, 6.0),
    ("float32", 64, 0.99): (7.0, 6.0, 6.5),
    ("float32", 16, 0.99): (5.0, 4.5, 4.0),
    ("float32", 2048, 0.99): (None, None, None),
    ("float32", 512, 0.999): (None, None, None),
}
_FEW_CTAS = (32, 3.0)  # thread blocks and target of the all-reduce of 512 MiB at 99%


def gpu_targets() -> Iterator[Case]:
    """The cases of bench/notes/gpu-results.md, each with its target. The most important cases come first."""
    for (dtype, mib, sparsity), wanted in _GPU_TARGETS.items():
        for collective, target in zip(COLLECTIVES[:3], wanted, strict=True):
            op = "sum" if collective in REDUCING else "none"
            yield Case(collective, mib << 20, dtype, op, sparsity, 0, target)
    yield Case("all_reduce", 512 << 20, "float32", "sum", 0.99, *_FEW_CTAS)
