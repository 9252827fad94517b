"""A bucket of DDP where hosts prune: the ranks of a host average it, each prunes its part, then they gather the parts.

A rank owns the same part of a parameter (`hosts.part`) in whatever bucket DDP puts it, so that its state stays.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import torch
import torch.distributed as dist

from spccl import backend, prune

from . import hosts
from .ranks import all_gather


class HostBucket:
    """Where the parts of a bucket's parameters lie: of `numels` elements each, one after the other.

    Attributes:
        spans: of this rank's part of each parameter.
        begins: first element of each in `part`.
        part: [sum of the spans], of the bucket's dtype: what this rank prunes and exchanges.
    """

    def __init__(self, who: hosts.Hosts, numels: Sequence[int], like: torch.Tensor):
        assert who.inner is not None
        if sum(numels) != like.numel():
            raise RuntimeError(
                f"PrunedGradients: a bucket of {like.numel()} elements has parameters of {sum(numels)}; wanted them "
                "one after the other. Pass hosts='off', and tell the authors of spccl which torch this is"
            )
        self._inner, self._n = who.inner, who.per_host
        spans = [[hosts.part(n, self._n, place) for n in numels] for place in range(self._n)]
        sizes = [[end - first for first, end in of_place] for of_place in spans]
        longest = max(map(sum, sizes))
        self.spans, own = spans[who.place], sizes[who.place]
        self.begins = [sum(own[:i]) for i in range(len(own))]
        # Sizes of all pieces: parameter by parameter as in the bucket, and place by place as in the buffers below.
        self._in_bucket = list(chain.from_iterable(zip(*sizes, strict=True)))
        wide = prune.wide_dtype(like.dtype)
        self._wide = torch.zeros(self._n, longest, dtype=wide, device=like.device)
        self._mine = self._wide.new_zeros(longest)
        self._sent = self._mine if like.dtype == wide else torch.zeros(longest, dtype=like.dtype, device=like.device)
        # In the same memory: what is averaged is not needed when the parts come.
        self._all = self._wide.view(-1).view(like.dtype)[: self._n * longest].view(self._n, longest)
        self.part = self._sent[: sum(own)]
        self._averages = backend.name_for(who.inner, like.device) in backend.AVERAGING
        self._pieces = [self._views(x, sizes) for x in (self._wide, self._all)]

    @staticmethod
    def _views(rows: torch.Tensor, sizes: list[list[int]]) -> list[torch.Tensor]:
        """The pieces of [places, longest], parameter by parameter."""
        by_place = [row[: sum(of_place)].split(of_place) for row, of_place in zip(rows, sizes, strict=True)]
        return list(chain.from_iterable(zip(*by_place, strict=True)))

    def average(self, grad: torch.Tensor) -> None:
        """Write this rank's part of the average of `grad` [n] over the host to `part`. Sums are of float32 (float64 of
        float64)."""
        torch._foreach_copy_(self._pieces[0], list(grad.split(self._in_bucket)))
        op = dist.ReduceOp.AVG if self._averages else dist.ReduceOp.SUM
        scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor  # renamed in torch 2.13
        scatter(self._mine, self._wide.view(-1), op=op, group=self._inner)
        if not self._averages:
            self._mine.div_(self._n)
        if self._sent is not self._mine:
            self._sent.copy_(self._mine)

    def gather(self, grad: torch.Tensor) -> None:
        """Write all ranks' `part` to `grad` [n]."""
        all_gather(self._inner, self._sent, self._all.view(-1)).wait()
        torch._foreach_copy_(list(grad.split(self._in_bucket)), self._pieces[1])
