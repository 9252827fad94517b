"""The buckets of a `SparseSync` that are under way between ranks: their buffers, their exchange, the end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from .exchanges import AllReduce, Exchange, TwoBits

if TYPE_CHECKING:
    from collections.abc import Iterable

    from spccl._pruning.ranks import Ranks

    from .bucket import Bucket
    from .settings import Settings


class Transfers:
    """Attributes:
    scratch: two buffers for each device and dtype, as long as the longest bucket.
    pending: what is under way, by number of the bucket: how it is exchanged, its buffer, the state of that.
    """

    def __init__(self, settings: Settings, ranks: Ranks, buckets: list[Bucket]):
        self.settings, self.ranks, self.buckets = settings, ranks, buckets
        averages = {b.device: ranks.averages(b.device, settings.bits is None) for b in buckets}
        self._exact = AllReduce(settings, ranks, buckets, averages)
        self._usual = AllReduce(settings, ranks, buckets, averages, settings.wire_dtype)
        self._way: Exchange = self._usual  # of the last exchange
        self.scratch = self._make_scratch()
        self.pending: dict[int, tuple[Exchange, torch.Tensor, Any]] = {}
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
        self._way = self._choose(density, exact)
        for i, bucket in enumerate(self.buckets):
            buffer, slot = self._buffer(i)
            self.pending[i] = self._way, buffer, self._way.begin(bucket, buffer, density, slot)
            if i > 0:
                self._turn(i - 1)
                if not self.ends_later:
                    self.finish([i - 1])
        if self.buckets:
            self._turn(len(self.buckets) - 1)

    def _choose(self, density: float, exact: bool) -> Exchange:
        if exact:
            return self._exact
        if self.settings.packs(density):
            return TwoBits(self.settings, self.ranks, self.buckets, density)
        return self._usual

    def _buffer(self, i: int) -> tuple[torch.Tensor, int | None]:
        """The buffer of bucket i, and its slot: see `Exchange.begin`."""
        bucket = self.buckets[i]
        if self._own_buffers:
            return self._own_buffers[i], None
        room = self._way.room(bucket.length)
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

    def value_bytes(self, bucket: Bucket) -> int:
        """Bytes of a value of `bucket` as the last exchange sent it."""
        return self._way.value_bytes(bucket)

    def _turn(self, i: int) -> None:
        way, buffer, state = self.pending[i]
        self.pending[i] = way, buffer, way.turn(self.buckets[i], state)

    @torch.no_grad()
    def finish(self, numbers: Iterable[int]) -> None:
        """End what is pending of these buckets: wait for it, and advance local and global weights by the average."""
        for i in numbers:
            if i not in self.pending:
                continue
            bucket, (way, buffer, state) = self.buckets[i], self.pending[i]
            way.end(bucket, buffer, state)
            bucket.apply(buffer[: bucket.length], self.settings)
            bucket.publish()
            del self.pending[i]

    def sent_bytes(self) -> int | None:
        """Bytes of this rank's part of the last exchange if they are not those of the values; else None."""
        return self._way.sent_bytes()
