"""The buckets of a `SparseSync` that are under way between ranks: their buffers, their exchange, the end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from .exchanges import AllReduce, Exchange, TwoBits
from .pruned_sums import PrunedSums, kept_sums
from .signs import Signs

if TYPE_CHECKING:
    from collections.abc import Iterable

    from spccl._pruning.ranks import Ranks

    from .bucket import Bucket
    from .hosts import Host
    from .settings import Settings


class Transfers:
    """Attributes:
    scratch: two buffers for each device and dtype, as long as the longest bucket.
    kept: with bits=1 (`KeptSigns`) or sum_density (`KeptSums`), by bucket, what this rank keeps of the sums of its
        shard.
    pending: what is under way, by number of the bucket: how it is exchanged, its buffer, the state of that; None where
        this rank's part has its average, and the ranks of the host have not gathered theirs.
    """

    def __init__(self, settings: Settings, ranks: Ranks, buckets: list[Bucket], host: Host | None = None):
        self.settings, self.ranks, self.buckets, self.host = settings, ranks, buckets, host
        averages = {b.device: ranks.averages(b.device, settings.bits is None) for b in buckets}
        self._signs = Signs(settings, ranks, buckets) if settings.bits == 1 else None
        self.kept: dict[Bucket, Any] = {} if self._signs is None else self._signs.kept
        if settings.sum_density is None:
            self._exact = AllReduce(settings, ranks, buckets, averages, kept=self.kept)
            self._usual = AllReduce(settings, ranks, buckets, averages, settings.wire_dtype)
        else:
            self.kept = sums = kept_sums(ranks, buckets)
            self._exact = PrunedSums(settings, ranks, buckets, averages, sums)
            self._usual = PrunedSums(settings, ranks, buckets, averages, sums, settings.wire_dtype)
        self._ways: list[Exchange] = [self._usual for _ in buckets]  # of the last exchange
        self.scratch = self._make_scratch()
        self.pending: dict[int, tuple[Exchange, torch.Tensor, Any] | None] = {}
        self._own_buffers: list[torch.Tensor] = []  # one for each bucket, if exchanges end later

    def end_later(self) -> None:
        """From now on `start` leaves every bucket pending. Takes a buffer for each."""
        self._own_buffers = [b.globals.new_zeros(self._usual.room(b.length)) for b in self.buckets]

    def end_at_once(self) -> None:
        """Undo `end_later`, with nothing pending."""
        self._own_buffers = []

    @property
    def ends_later(self) -> bool:
        return bool(self._own_buffers)

    def start(self, density: float, exact: bool) -> None:
        """Start an exchange: each bucket is selected while the one before travels. At least the last one is left
        pending. `exact` ignores wire_dtype and bits."""
        self._ways = self._choose(density, exact)
        for i, (bucket, way) in enumerate(zip(self.buckets, self._ways, strict=True)):
            buffer, slot = self._buffer(i)
            self.pending[i] = way, buffer, way.begin(bucket, buffer, density, slot)
            if i > 0:
                self._turn(i - 1)
                if not self.ends_later:
                    self.finish([i - 1])
        if self.buckets:
            self._turn(len(self.buckets) - 1)

    def _choose(self, density: float, exact: bool) -> list[Exchange]:
        """The way of each bucket."""
        way: Exchange = self._exact if exact else self._usual
        if self.settings.packs(density) and not exact:
            way = TwoBits(self.settings, self.ranks, self.buckets, density)
        if exact or self._signs is None:
            return [way for _ in self.buckets]
        return [self._signs if bucket in self.kept else way for bucket in self.buckets]

    def _buffer(self, i: int) -> tuple[torch.Tensor, int | None]:
        """The buffer of bucket i, and its slot: see `Exchange.begin`."""
        bucket = self.buckets[i]
        if self._own_buffers:
            return self._own_buffers[i], None
        room = self._ways[i].room(bucket.length)
        return self.scratch[bucket.device, bucket.globals.dtype][i % 2][:room], i % 2

    def _make_scratch(self) -> dict[tuple[torch.device, torch.dtype], tuple[torch.Tensor, torch.Tensor]]:
        """Two buffers for each device and dtype, as long as the longest bucket: one is filled while the other one is
        exchanged."""
        most: dict[tuple[torch.device, torch.dtype], int] = {}
        for b in self.buckets:
            kind = (b.device, b.globals.dtype)
            most[kind] = max(most.get(kind, 0), self._usual.room(b.length))
        return {
            (device, dtype): tuple(torch.zeros(n, dtype=dtype, device=device) for _ in range(2))
            for (device, dtype), n in most.items()
        }

    def sent_bytes(self, i: int, n_sent: int) -> int:
        """Bytes of what the last exchange sent of bucket i, of `n_sent` values."""
        packed = self._ways[i].sent_bytes(self.buckets[i])
        return n_sent * self._ways[i].value_bytes(self.buckets[i]) if packed is None else packed

    def n_calls(self) -> int:
        """Collectives of the last exchange."""
        return sum(way.n_calls for way, bucket in zip(self._ways, self.buckets, strict=True) if bucket.length)

    def delegated_bytes(self) -> int:
        """Bytes that this rank gave, in the last exchange, to collectives which spccl leaves to another backend."""
        return sum(way.delegated_bytes(bucket) for way, bucket in zip(self._ways, self.buckets, strict=True))

    def _turn(self, i: int) -> None:
        way, buffer, state = self.pending[i]
        self.pending[i] = way, buffer, way.turn(self.buckets[i], state)

    def advance(self) -> None:
        """`finish` all buckets, but where hosts prune leave the gathering, so that ranks of a host may call it alone.
        Weights of what this rank owns are then up to date."""
        if self.host is None:
            self.finish(list(self.pending))
        for i in self.pending:
            self._advance(i)

    @torch.no_grad()
    def _advance(self, i: int) -> None:
        if (pending := self.pending[i]) is not None:
            bucket, (way, buffer, state) = self.buckets[i], pending
            way.end(bucket, buffer, state)
            bucket.apply(buffer[: bucket.length], self.settings)
            bucket.publish()
            self.pending[i] = None

    @torch.no_grad()
    def finish(self, numbers: Iterable[int]) -> None:
        """End what is pending of these buckets: wait for it, and advance local and global weights by the average.

        Where hosts prune, the ranks of a host then gather the weights, in the order of the buckets: also those before
        these, so that all ranks do so in one order.
        """
        if self.host is not None:
            numbers = range(1 + max(numbers, default=-1))
        for i in numbers:
            if i not in self.pending:
                continue
            self._advance(i)
            if self.host is not None:
                self.host.gather(i)
            del self.pending[i]
