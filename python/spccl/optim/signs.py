"""One bit per value: how the changes of a bucket travel if nothing is pruned.

Each chunk of 4096 values becomes a row of 516 bytes: the signs and one magnitude. An all-to-all takes the rows of each
shard to its owner, which adds up those of all ranks. The owner sends its sums, as rows again, to all ranks in an
all-gather. Both ends keep what a row changed: a sender in its weights, the owner in `KeptSigns`. The bytes that a rank
sends do not grow with the number of ranks. Layout and rule: docs/FORMAT.md, section 10.

Both collectives move uint8. spccl carries the all-gather; Gloo or NCCL the all-to-all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from spccl import _ext
from spccl._pruning.sums import Part, pieces_in

from .exchanges import Buffers, Exchange

if TYPE_CHECKING:
    from collections.abc import Sequence

    from spccl._pruning.ranks import Ranks

    from .bucket import Bucket
    from .settings import Settings

CHUNK = 4096
ROW_BYTES = 516


class KeptSigns:
    """What one rank keeps of the sums of its shard of a bucket.

    Attributes:
        n_chunks: of the shard: the same on all ranks; the last shards may end behind the bucket.
        values: [n_chunks * CHUNK].
        lengths: [n_chunks] int32, elements of each chunk.
        parts: the parameters that have elements in the shard.
    """

    def __init__(self, bucket: Bucket, ranks: Ranks):
        self.n_chunks = -(-bucket.length // (CHUNK * ranks.n_pruning))
        self.first, n = ranks.number * self.n_chunks * CHUNK, self.n_chunks * CHUNK
        self.values = torch.zeros(n, device=bucket.device)
        self.parts: list[Part] = []
        lengths = torch.zeros(self.n_chunks, dtype=torch.int32)
        for piece, begin, end in pieces_in(bucket.pieces(), self.first, n):
            part = self.values[begin - self.first : end - self.first]
            self.parts.append(Part(piece.name, begin - piece.begin, part))
            chunks = torch.arange(begin, end, CHUNK)
            lengths[(chunks - self.first) // CHUNK] = (end - chunks).clamp(max=CHUNK).int()
        self.lengths = lengths.to(bucket.device)

    def clear(self, exchanges: int) -> None:
        """Keep nothing."""
        self.values.zero_()

    def is_empty(self) -> bool:
        """Whether nothing is kept. Waits for the device."""
        return not bool(self.values.any())

    def release(self, out: torch.Tensor, factor: float) -> None:
        """Move what is kept, times `factor`, to a flat tensor of the bucket."""
        n = max(0, min(self.values.numel(), out.numel() - self.first))
        out[self.first : self.first + n].add_(self.values[:n], alpha=factor)
        self.values.zero_()


class Signs(Exchange):
    """An all-to-all of rows to the owners of shards, and an all-gather of the rows of their sums.

    Attributes: kept: by bucket, of those whose parameters are all pruned.
    """

    def __init__(self, settings: Settings, ranks: Ranks, buckets: Sequence[Bucket]):
        super().__init__(settings, ranks, buckets)
        self.kept = {b: KeptSigns(b, ranks) for b in buckets if b.n_chunked}
        self._buffers = Buffers()

    def begin(self, bucket: Bucket, buffer: torch.Tensor, density: float, slot: int | None) -> Any:
        n = self.kept[bucket].n_chunks * ROW_BYTES * self.ranks.n_pruning
        given, arrived = (self._take(bucket, use, slot, n) for use in ("given", "arrived"))
        bucket.send_signs(given, self.settings.leak)
        given[bucket.length // CHUNK * ROW_BYTES :].zero_()
        return self.ranks.all_to_all(given, arrived), given, arrived, slot

    def turn(self, bucket: Bucket, state: Any) -> Any:
        work, given, arrived, slot = state
        if work is not None:
            work.wait()
        kept = self.kept[bucket]
        rows = self._take(bucket, "rows", slot, kept.n_chunks * ROW_BYTES)
        _ext.signs_sum(
            arrived.data_ptr(), self.ranks.n_pruning, kept.values.data_ptr(), rows.data_ptr(),
            kept.lengths.data_ptr(), kept.n_chunks, bucket.ordinal, bucket.stream(),
        )  # fmt: skip
        _, work = self.ranks.all_gather(rows, given)
        return work, given, rows

    def end(self, bucket: Bucket, buffer: torch.Tensor, state: Any) -> None:
        work, rows, _ = state
        if work is not None:
            work.wait()
        n_chunks = bucket.length // CHUNK
        _ext.signs_decode(rows.data_ptr(), n_chunks, buffer.data_ptr(), bucket.ordinal, bucket.stream())

    def sent_bytes(self, bucket: Bucket) -> int:
        return bucket.length // CHUNK * ROW_BYTES

    def delegated_bytes(self, bucket: Bucket) -> int:
        return self.kept[bucket].n_chunks * ROW_BYTES * (self.ranks.n_pruning - 1)

    def _take(self, bucket: Bucket, use: str, slot: int | None, n_bytes: int) -> torch.Tensor:
        return self._buffers.take(bucket.device, torch.uint8, use, slot, n_bytes)
