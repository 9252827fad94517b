"""The buckets of a `SparseSync` that are under way between ranks: their buffers, all-reduce or all-gather, the end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from .packed import Layout, add_packed, pack, packed_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable

    from spccl._pruning.ranks import Ranks

    from .bucket import Bucket
    from .settings import Settings


class Transfers:
    """Attributes:
    scratch: two buffers for each device and dtype, as long as the longest bucket.
    wire: with wire_dtype and several ranks, two buffers for each device that has float32 buckets.
    pending: what is under way, by number of the bucket: its buffer, what to wait for, what arrives.
    """

    def __init__(self, settings: Settings, ranks: Ranks, buckets: list[Bucket]):
        self.settings, self.ranks, self.buckets = settings, ranks, buckets
        self._averages = {b.device: ranks.averages(b.device, settings.bits is None) for b in buckets}
        self.scratch = self._make_scratch()
        self.wire = self._make_wire()
        self.pending: dict[int, tuple[torch.Tensor, Any]] = {}
        self._layout: Layout | None = None  # of this exchange, if it sends two bits per value
        self._exact = False  # of this exchange
        self._own_buffers: list[torch.Tensor] = []  # one for each bucket, if exchanges end later

    def end_later(self) -> None:
        """From now on `start` leaves every bucket pending. Takes a buffer for each."""
        self._own_buffers = [torch.zeros_like(b.globals) for b in self.buckets]

    def end_at_once(self) -> None:
        """Undo `end_later`, with nothing pending."""
        self._own_buffers = []

    @property
    def ends_later(self) -> bool:
        return bool(self._own_buffers)

    def start(self, density: float, exact: bool) -> None:
        """Start an exchange: each bucket is selected while the one before travels. At least the last one is left
        pending. `exact` ignores wire_dtype and bits."""
        packs = self.settings.packs(density) and not exact
        self._layout = Layout(self.settings.chunk, density) if packs else None
        self._exact = exact
        for i in range(len(self.buckets)):
            self._begin(i, density)
            if not self.ends_later and i > 0:
                self.finish([i - 1])

    def _make_scratch(self) -> dict[tuple[torch.device, torch.dtype], tuple[torch.Tensor, torch.Tensor]]:
        """Two buffers for each device and dtype, as long as the longest bucket: one is filled while the other one is
        exchanged."""
        most: dict[tuple[torch.device, torch.dtype], int] = {}
        for b in self.buckets:
            kind = (b.device, b.globals.dtype)
            most[kind] = max(most.get(kind, 0), b.length)
        return {
            (device, dtype): tuple(torch.zeros(n, dtype=dtype, device=device) for _ in range(2))
            for (device, dtype), n in most.items()
        }

    def _make_wire(self) -> dict[torch.device, tuple[torch.Tensor, torch.Tensor]]:
        """With wire_dtype and several ranks: two buffers for each device that has float32 buckets."""
        dtype = self.settings.wire_dtype
        if dtype is None or self.ranks.world_size == 1:
            return {}
        return {
            device: tuple(torch.zeros_like(x, dtype=dtype) for x in pair)
            for (device, wide), pair in self.scratch.items()
            if wide == torch.float32
        }

    def value_bytes(self, bucket: Bucket) -> int:
        """Bytes of a value of `bucket` as the last exchange sent it."""
        return self.wire[bucket.device][0].element_size() if self._rounds(bucket) else bucket.globals.element_size()

    def _rounds(self, bucket: Bucket) -> bool:
        """Whether this exchange sends the values of `bucket` in wire_dtype."""
        return bucket.device in self.wire and bucket.globals.dtype == torch.float32 and not self._exact

    def _begin(self, i: int, density: float) -> None:
        """Select what bucket i sends, and start its transfer."""
        bucket = self.buckets[i]
        kind = bucket.device, bucket.globals.dtype
        buffer = self._own_buffers[i] if self._own_buffers else self.scratch[kind][i % 2][: bucket.length]
        if self._layout is not None:
            bucket.select(buffer, density, 1.0, self.settings, levels=2)
            everyone, work = self.ranks.all_gather(pack(buffer, bucket.n_chunked, self._layout))
            self.pending[i] = buffer, (work, everyone)
            return
        averages = self._averages[bucket.device]
        scale = 1.0 if averages else 1.0 / self.ranks.world_size
        bucket.select(buffer, density, scale, self.settings)
        packed = buffer
        if self._rounds(bucket):
            packed = torch.empty_like(buffer, dtype=self.settings.wire_dtype) if self._own_buffers else (
                self.wire[bucket.device][i % 2][: bucket.length])  # fmt: skip
            bucket.round_off(buffer, packed, scale)
        self.pending[i] = buffer, (self.ranks.all_reduce(packed, averages), packed)

    @torch.no_grad()
    def finish(self, numbers: Iterable[int]) -> None:
        """End what is pending of these buckets: wait for it, and advance local and global weights by the average."""
        for i in numbers:
            if i not in self.pending:
                continue
            bucket, (buffer, (work, received)) = self.buckets[i], self.pending[i]
            if work is not None:
                work.wait()
            if self._layout is not None:
                buffer.zero_()
                for rank, packed in enumerate(received):
                    add_packed(packed, buffer, bucket.n_chunked, self._layout, rank)
                buffer.div_(self.ranks.world_size)
            elif received is not buffer:
                buffer.copy_(received)
            bucket.apply(buffer, self.settings)
            bucket.publish()
            del self.pending[i]

    def sent_bytes(self) -> int | None:
        """Bytes of this rank's part of the last exchange if it sent two bits per value; else None."""
        if self._layout is None:
            return None
        return sum(packed_bytes(b.length, b.n_chunked, self._layout, b.globals.element_size()) for b in self.buckets)
