"""The ways in which the changes of a bucket become an average on all ranks: a class for each, called by `Transfers`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from .packed import Layout, add_packed, pack, packed_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from spccl._pruning.ranks import Ranks

    from .bucket import Bucket
    from .settings import Settings
    from .signs import KeptSigns


class Exchange:
    """The interface of a way, and what fits most: one transfer, of values in the dtype of the global weights.

    A state is what a way keeps of one bucket between the calls.
    """

    n_calls = 1  # collectives for each bucket

    def __init__(self, settings: Settings, ranks: Ranks, buckets: Sequence[Bucket]):
        self.settings, self.ranks, self.buckets = settings, ranks, buckets

    def begin(self, bucket: Bucket, buffer: torch.Tensor, density: float, slot: int | None) -> Any:
        """Select what is sent now, and start the first transfer.

        Args:
            buffer: [room(bucket.length)], until `end` returns.
            slot: 0 or 1, which no other bucket under way has; None where any number of buckets is under way.
        Returns: the state.
        """
        raise NotImplementedError

    def turn(self, bucket: Bucket, state: Any) -> Any:
        """Between two transfers: wait for the first, and start the second. Returns: the state."""
        return state

    def end(self, bucket: Bucket, buffer: torch.Tensor, state: Any) -> None:
        """Wait, and write the average over the ranks to the first bucket.length elements of `buffer`."""
        raise NotImplementedError

    def value_bytes(self, bucket: Bucket) -> int:
        """Bytes of a value as it is sent."""
        return bucket.globals.element_size()

    def sent_bytes(self, bucket: Bucket) -> int | None:
        """Bytes of this rank's part of an exchange, if they are not its values times value_bytes; else None."""
        return None

    def delegated_bytes(self, bucket: Bucket) -> int:
        """Bytes that this rank sends in collectives which the group's backend spccl leaves to another one."""
        return 0

    def room(self, length: int) -> int:
        """Elements that the buffer of a bucket of this length needs."""
        return length


class AllReduce(Exchange):
    """One all-reduce: the sums of all ranks travel as they are.

    Args:
        averages: by device: whether the backend can average.
        kept: by bucket, what this rank keeps of the sums of its shard: it is sent too, and then nothing is kept.
        wire_dtype: in which the values of float32 buckets are sent; None: as they are.
    """

    def __init__(
        self,
        settings: Settings,
        ranks: Ranks,
        buckets: Sequence[Bucket],
        averages: dict[torch.device, bool],
        wire_dtype: torch.dtype | None = None,
        kept: dict[Bucket, KeptSigns] | None = None,
    ):
        super().__init__(settings, ranks, buckets)
        self._averages, self._kept = averages, kept or {}
        self._wire_dtype = None if ranks.n_pruning == 1 else wire_dtype
        self._buffers = Buffers()

    def begin(self, bucket: Bucket, buffer: torch.Tensor, density: float, slot: int | None) -> Any:
        packed = self._select(bucket, buffer, density, slot)
        return self.ranks.all_reduce(packed, self._averages[bucket.device]), packed

    def _select(self, bucket: Bucket, buffer: torch.Tensor, density: float, slot: int | None) -> torch.Tensor:
        """What is sent now, as it is sent: `buffer`, or a tensor as long in wire_dtype. The padding is 0."""
        scale = 1.0 if self._averages[bucket.device] else 1.0 / self.ranks.n_pruning
        bucket.select(buffer, density, scale, self.settings)
        if bucket in self._kept:
            self._kept[bucket].release(buffer, self.ranks.n_pruning * scale)
        packed = buffer
        if self._rounds(bucket):
            packed = self._buffers.take(bucket.device, self._wire_dtype, "wire", slot, buffer.numel())
            bucket.round_off(buffer[: bucket.length], packed[: bucket.length], scale)
        packed[bucket.length :].zero_()
        return packed

    def end(self, bucket: Bucket, buffer: torch.Tensor, state: Any) -> None:
        work, packed = state
        if work is not None:
            work.wait()
        if packed is not buffer:
            buffer.copy_(packed)

    def value_bytes(self, bucket: Bucket) -> int:
        return self._wire_dtype.itemsize if self._rounds(bucket) else bucket.globals.element_size()

    def _rounds(self, bucket: Bucket) -> bool:
        """Whether the values of the bucket are sent in wire_dtype."""
        return self._wire_dtype is not None and bucket.globals.dtype == torch.float32


class TwoBits(Exchange):
    """One all-gather of two bits per value; every rank adds what all have sent, in rank order."""

    def __init__(self, settings: Settings, ranks: Ranks, buckets: Sequence[Bucket], density: float):
        super().__init__(settings, ranks, buckets)
        self._layout = Layout(settings.chunk, density)

    def begin(self, bucket: Bucket, buffer: torch.Tensor, density: float, slot: int | None) -> Any:
        bucket.select(buffer, density, 1.0, self.settings, levels=2)
        return self.ranks.all_gather(pack(buffer, bucket.n_chunked, self._layout))

    def end(self, bucket: Bucket, buffer: torch.Tensor, state: Any) -> None:
        received, work = state
        if work is not None:
            work.wait()
        buffer.zero_()
        for rank, packed in enumerate(received):
            add_packed(packed, buffer, bucket.n_chunked, self._layout, rank)
        buffer.div_(self.ranks.n_pruning)

    def sent_bytes(self, bucket: Bucket) -> int:
        return packed_bytes(bucket.length, bucket.n_chunked, self._layout, bucket.globals.element_size())


class Buffers:
    """Buffers of a way for the buckets that are under way, by device, dtype, use and slot."""

    def __init__(self) -> None:
        self._made: dict[tuple[torch.device, torch.dtype, str, int], torch.Tensor] = {}

    def take(self, device: torch.device, dtype: torch.dtype, use: str, slot: int | None, length: int) -> torch.Tensor:
        """[length], with any values. With slot None it is new."""
        if slot is None:
            return torch.empty(length, dtype=dtype, device=device)
        kind = device, dtype, use, slot
        if kind not in self._made or self._made[kind].numel() < length:
            self._made[kind] = torch.zeros(length, dtype=dtype, device=device)
        return self._made[kind][:length]
