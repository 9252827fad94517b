"""What is measured: named cases; pure data. Sizes follow nccl-tests (see `Case.size_bytes`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "broadcast")
OPS = ("sum", "avg", "min", "max", "prod")
ELEM_BYTES = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float64": 8,
    "float8": 1,
    "int8": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
    "uint8": 1,
}
_BATCH_BYTES = 64 << 10  # up to this size, calls are timed in batches: a clock and a barrier cost as much
_BATCH_CALLS = 20


@dataclasses.dataclass(frozen=True)
class Case:
    """One row of the table.

    size_bytes: as nccl-tests count: the larger of the two buffers of one rank, dense: the output of an
        all-gather, the input of a reduce-scatter, either of an all-reduce or broadcast. Rounded down to a
        whole number of elements per rank.
    sparsity: fraction of elements that are zero, 0 to 1.
    """

    collective: str
    size_bytes: int
    dtype: str
    op: str  # "none" where nothing is reduced
    sparsity: float

    def block_elems(self, world_size: int) -> int:
        """Elements of the smaller buffer: a rank's block where there are blocks, else everything."""
        n = self.size_bytes // ELEM_BYTES[self.dtype]
        return n // world_size if self.collective in ("all_gather", "reduce_scatter") else n

    def calls(self) -> int:
        """Calls that are timed together."""
        return _BATCH_CALLS if self.size_bytes <= _BATCH_BYTES else 1


def sizes(smallest: int, largest: int, factor: int) -> list[int]:
    """From smallest to largest, each `factor` times the one before. Bytes."""
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
) -> Iterator[Case]:
    """Every combination, in the order of the table."""
    for collective in collectives:
        for dtype in dtypes:
            for size in size_list:
                for sparsity in sparsities:
                    reduces = collective in ("reduce_scatter", "all_reduce")
                    yield Case(collective, size, dtype, op if reduces else "none", sparsity)
