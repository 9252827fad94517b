"""Sums that are pruned again, in a hook: buckets between reduce-scatter and all-gather, and what is kept of them."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from spccl import prune

from .hook_state import Layout
from .ranks import all_gather, reduce_scatter
from .sums import KeptSums, Piece, shaped_kept, shard_elems


class Transfer:
    """One bucket under way: its first `ranks * shard` elements by reduce-scatter and all-gather, the few behind them by
    an all-reduce.

    Attributes:
        n_calls: collectives.
        future: of the buffer. On CUDA it is complete after `turn`; on the host the caller completes it after `wait`.

    Args: loss_scale: [1] float32, the scale that the buffer contains.
    """

    def __init__(
        self,
        kept: KeptSums,
        buffer: torch.Tensor,
        group: dist.ProcessGroup,
        average: bool,
        loss_scale: torch.Tensor | None,
    ):
        self._kept, self._group, self._buffer, self._loss_scale = kept, group, buffer, loss_scale
        self.future: torch.futures.Future = torch.futures.Future(devices=[buffer.device] if buffer.is_cuda else None)
        n = kept.numel * dist.get_world_size(group)
        self._shards, tail = buffer[:n], buffer[n:]
        op = dist.ReduceOp.AVG if average else dist.ReduceOp.SUM
        self._sums = buffer.new_empty(kept.numel, dtype=prune.wide_dtype(buffer.dtype))
        self._work = reduce_scatter(group, self._shards, self._sums, average) if n else None
        self._tail = dist.all_reduce(tail, op=op, group=group, async_op=True) if tail.numel() else None
        self.n_calls = (2 if n else 0) + (1 if tail.numel() else 0)

    def turn(self, rule: prune.Rule) -> None:
        """Prune the sums of this rank's shard, and send what goes to all ranks; on CUDA on the current stream."""
        if self._work is not None:
            self._send_sums(self._work, rule)
        if self._buffer.is_cuda:
            self.wait()
            self.future.set_result(self._buffer)

    def _send_sums(self, scattered: dist.Work, rule: prune.Rule) -> None:
        scattered.wait()
        sent = None
        if self._sums.dtype != self._shards.dtype:
            sent = torch.empty_like(self._sums, dtype=self._shards.dtype)
        self._kept.prune(self._sums, rule, sent, self._loss_scale)
        self._mine = self._sums if sent is None else sent  # until the all-gather is done
        self._work = all_gather(self._group, self._mine, self._shards)

    def wait(self) -> None:
        """On CUDA the current stream waits, else the host."""
        for work in (self._work, self._tail):
            if work is not None:
                work.wait()


class HookSums:
    """What a hook keeps of sums, by bucket.

    Attributes:
        kept: by the bucket's parameters.
        turning: buckets whose sums are still to be pruned.
        loaded: what a loaded state has, by name of the parameter, until its bucket comes.
    """

    def __init__(self) -> None:
        self.kept: dict[Hashable, KeptSums] = {}
        self.turning: list[Transfer] = []
        self.loaded: dict[str, dict[str, Any]] = {}

    def turn(self, rule: prune.Rule, n_left: int) -> None:
        """Prune the sums of all buckets that wait for it but the last `n_left`, and send what goes to all ranks."""
        while len(self.turning) > n_left:
            self.turning.pop(0).turn(rule)

    def of_bucket(
        self,
        key: Hashable,
        pieces: Sequence[Piece],
        buffer: torch.Tensor,
        group: dist.ProcessGroup,
        params: dict[str, prune.ParamState],
        layouts: dict[str, Layout],
        keeps: bool,
        step: int,
    ) -> KeptSums:
        """What is kept of the bucket `key`. DDP may fill its buckets anew after the first step: what was kept of these
        parameters then becomes residual of this rank."""
        kept = self.kept.get(key)
        if kept is not None:
            return kept
        n_ranks, names = dist.get_world_size(group), {piece.name for piece in pieces}
        for old in [k for k, other in self.kept.items() if names.intersection(part.name for part in other.parts)]:
            for part in self.kept.pop(old).parts:
                self.loaded[part.name] = {**part.save(), "stride": layouts[part.name].strides}
        n = shard_elems(buffer.numel(), n_ranks, padded=False)
        first = dist.get_rank(group) * n
        kept = KeptSums(pieces, first, n, prune.wide_dtype(buffer.dtype), buffer.device, keeps)
        for part in kept.parts:
            part.state.state[prune.STEP] = step
            saved = self.loaded.get(part.name)
            fits = saved is not None and keeps and tuple(saved["stride"]) == layouts[part.name].strides
            if fits and part.load(saved):
                del self.loaded[part.name]
        for name in names.intersection(self.loaded):
            to_residual(params[name], self.loaded.pop(name), layouts[name], n_ranks)
        self.kept[key] = kept
        return kept

    def save(self, parameters: dict[str, dict[str, Any]], layouts: dict[str, Layout]) -> None:
        """Add to a state's entries, by name of the parameter, what this rank keeps of sums."""
        for name, saved in self.loaded.items():
            parameters[name]["kept"] = saved
        for kept in self.kept.values():
            for part in kept.parts:
                if part.values is not None:
                    parameters[part.name]["kept"] = {**part.save(), "stride": layouts[part.name].strides}


def to_residual(param: prune.ParamState, saved: dict[str, Any], layout: Layout, n_ranks: int) -> None:
    """Take what an owner kept as residual: `n_ranks` times as much, as averages divide by that. A parameter without
    residual, which is sent whole, keeps nothing but what rounding changed: that is dropped."""
    if param.residual is not None:
        flat = layout.flat(shaped_kept(saved, layout.shape), param.residual.device)
        param.residual.add_(flat.to(param.residual.dtype), alpha=n_ranks * param.loss_scale())
