"""The exchange of a `SparseSync` whose sums are pruned again: reduce-scatter, pruning by the owners, all-gather."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from spccl import prune
from spccl._pruning.sums import KeptSums, shard_elems

from .exchanges import AllReduce

if TYPE_CHECKING:
    from collections.abc import Sequence

    from spccl._pruning.ranks import Ranks

    from .bucket import Bucket
    from .settings import Settings


class _State(NamedTuple):
    """given: [room], what this rank sends to the owners; later what they send to all ranks. sums: [shard], the averages
    of this rank's shard."""

    work: Any
    given: torch.Tensor
    sums: torch.Tensor
    density: float
    slot: int | None


def kept_sums(ranks: Ranks, buckets: Sequence[Bucket]) -> dict[Bucket, KeptSums]:
    """What this rank keeps of its shard of each bucket."""
    kept = {}
    for b in buckets:
        n = shard_elems(b.length, ranks.n_pruning, padded=True)
        kept[b] = KeptSums(b.pieces(), ranks.number * n, n, b.globals.dtype, b.device)
    return kept


class PrunedSums(AllReduce):
    """A reduce-scatter whose results are not rounded, and an all-gather of what the owners of the shards send of them.

    Args: kept: by bucket, shared by all objects of a `SparseSync`. The others as for `AllReduce`.
    """

    n_calls = 2

    def __init__(
        self,
        settings: Settings,
        ranks: Ranks,
        buckets: Sequence[Bucket],
        averages: dict[torch.device, bool],
        kept: dict[Bucket, KeptSums],
        wire_dtype: torch.dtype | None = None,
    ):
        super().__init__(settings, ranks, buckets, averages, wire_dtype)
        self.kept = kept

    def room(self, length: int) -> int:
        return shard_elems(length, self.ranks.n_pruning, padded=True) * self.ranks.n_pruning

    def begin(self, bucket: Bucket, buffer: torch.Tensor, density: float, slot: int | None) -> _State:
        given = self._select(bucket, buffer, density, slot)
        n = given.numel() // self.ranks.n_pruning
        sums = self._buffers.take(bucket.device, bucket.globals.dtype, "sums", slot, n)
        work = self.ranks.reduce_scatter(given, sums, self._averages[bucket.device])
        return _State(work, given, sums, density, slot)

    def turn(self, bucket: Bucket, state: _State) -> _State:
        if state.work is not None:
            state.work.wait()
        sent = None
        if state.given.dtype != state.sums.dtype:
            sent = self._buffers.take(bucket.device, state.given.dtype, "sent", state.slot, state.sums.numel())
        s = self.settings
        rule = prune.Rule(s.sum_density_at(state.density), s.sample, s.leak, momentum=0.0, seed=s.seed)
        self.kept[bucket].prune(state.sums, rule, sent)
        _, work = self.ranks.all_gather(state.sums if sent is None else sent, state.given)
        return state._replace(work=work)

    def end(self, bucket: Bucket, buffer: torch.Tensor, state: _State) -> None:
        super().end(bucket, buffer, (state.work, state.given))
