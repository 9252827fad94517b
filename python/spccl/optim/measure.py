"""What a `SparseSync` counts and measures for its `stats`."""

from __future__ import annotations

import math
import warnings
from typing import TYPE_CHECKING, Any

import torch

from spccl import prune
from spccl._pruning.density import density_at
from spccl._pruning.stats import OwnBytes, report
from spccl._pruning.sums import KeptSums, density_sums

if TYPE_CHECKING:
    from .sync import SparseSync

_PROBE_ENTRIES = 4096  # of a parameter, whose squares stand for all of its entries


class Tally:
    """Counts of one `SparseSync`.

    Norms are estimated from at most 4096 evenly spaced entries of each parameter, every `norm_every` exchanges: the
    update is what the optimizer's steps since the last exchange changed, the unsent part is w - z after the exchange.
    """

    def __init__(self, sync: SparseSync):
        self.sync = sync
        self.skipped = 0  # local steps left out on this rank
        self.density: float | None = None  # of the last exchange
        self._seconds = self._last_s = 0.0
        self._norms: tuple[float, float] | None = None
        self._before: list[torch.Tensor] | None = None
        self._update: list[torch.Tensor] | None = None
        self._wire = OwnBytes(self._group())
        self._exchanges = self._calls = self._delegated_bytes = 0

    # -- in each step ------------------------------------------------------------------------------

    def before_step(self) -> None:
        """Keep the probed weights at the first local step of an exchange that is measured."""
        every, s = self.sync.settings.norm_every, self.sync
        self._wire.end(self._group())  # with overlap the exchange has just ended
        if every and s.buckets and (s.exchanges + 1) % every == 0 and s.steps % s.settings.every == 0:
            self._before = [p.clone() for b in s.buckets for p in _probes(b.locals)]

    def after_step(self) -> None:
        """At the last local step: what the steps have changed."""
        s = self.sync
        if self._before is not None and (s.steps + 1) % s.settings.every == 0:
            now = [p for b in s.buckets for p in _probes(b.locals)]
            self._update = torch._foreach_sub(now, self._before)
            self._before = None

    def skip(self, norm: float) -> None:
        """A local step was left out."""
        self.skipped += 1
        if self.skipped == 1:
            warnings.warn(
                f"SparseSync: rank {self.sync.ranks.rank}: the gradient's norm is {norm} at step {self.sync.steps}; "
                "this rank leaves out the step. stats()['skipped_steps'] counts such steps; this warning comes once",
                stacklevel=4,
            )

    def begin_exchange(self, density: float) -> None:
        self.density = density
        self._wire.begin(self._group())

    def waits_for_exchange(self) -> bool:
        """Whether this exchange is measured, which needs the weights after it."""
        return self._update is not None

    def end_exchange(self, seconds: float) -> None:
        self._exchanges += 1
        self._calls += self.sync.transfers.n_calls()
        self._delegated_bytes += self.sync.transfers.delegated_bytes()
        self._last_s = seconds
        self._seconds += seconds
        if not self.sync.transfers.pending:  # else the next exchange, or the reader, ends the count
            self._wire.end(self._group())
        if self._update is not None:
            s = self.sync
            numels = [w.numel for b in s.buckets for w in b.weights]  # of parts, which may have none
            unsent = [
                own - common
                for b in s.buckets
                for own, common in zip(_probes(b.locals), _probes(b.global_parts), strict=True)
            ]
            part = s.settings.look_ahead
            self._norms = _norm(self._update, numels) / part, _norm(unsent, numels) / part
            self._update = None

    def reset(self) -> None:
        """Forget what was counted: a state was loaded."""
        self.__init__(self.sync)

    # -- when asked --------------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """The dictionary that `HasStats.stats` describes. Waits for the device."""
        s = self.sync
        density = density_at(s._schedule, s.exchanges) if self.density is None else self.density
        rows = [row for b in s.buckets for row in torch.stack([w.state for w in b.weights]).tolist()]
        counted = zip((w for b in s.buckets for w in b.weights), rows, strict=True)
        pruned = [(w.numel, row[prune.N_SENT]) for w, row in counted if w.pruned and w.numel and density < 1]
        numel = max(1, sum(b.numel for b in s.buckets))  # 0: FSDP2 has given this rank empty shards alone
        update, unsent = self._norms or (None, None)
        sent = iter(row[prune.N_SENT] for row in rows)
        n_sent = [sum(next(sent) for _ in b.weights) for b in s.buckets]
        devices = [b.device for b in s.buckets]
        wire = self._wire.read(self._group(), devices, self._calls)
        return report(
            {s.ranks.backend(d) for d in devices},
            recipe=s.recipe,
            steps=s.steps,
            exchanges=s.exchanges,
            density_target=density,
            density_sent=sum(row[prune.N_SENT] for row in rows) / numel,
            density_pruned=sum(n for _, n in pruned) / sum(n for n, _ in pruned) if pruned else None,
            density_mean=sum(row[prune.N_SENT_ALL] for row in rows) / numel / max(1, s.exchanges),
            density_sums=density_sums(k for k in s.transfers.kept.values() if isinstance(k, KeptSums)),
            dense_bytes=sum(b.numel * b.globals.element_size() for b in s.buckets),
            sent_bytes=sum(s.transfers.sent_bytes(i, n) for i, n in enumerate(n_sent)),
            wire_bytes=None if wire is None else wire + self._delegated_bytes,
            update_norm=update,
            unsent_norm=unsent,
            exchange_ms=self._last_s * 1e3,
            exchange_ms_mean=self._seconds * 1e3 / max(1, self._exchanges),
            skipped_steps=self.skipped,
            pruning_ranks=s.ranks.n_pruning,
            hosts=s.ranks.hosts.why,
            nonfinite_elems=sum(row[prune.N_NONFINITE_ALL] for row in rows),
        )

    def _group(self) -> torch.distributed.ProcessGroup | None:
        """In which the exchange's bytes are counted: where hosts prune, those between hosts."""
        return self.sync.ranks.across


def _probes(parts: list[torch.Tensor]) -> list[torch.Tensor]:
    return [p[:: max(1, -(-p.numel() // _PROBE_ENTRIES))] for p in parts]


def _norm(probes: list[torch.Tensor], numels: list[int]) -> float:
    norms = torch.stack([n.double().cpu() for n in torch._foreach_norm(probes, 2)])
    shares = torch.tensor([n / max(1, p.numel()) for n, p in zip(numels, probes, strict=True)], dtype=torch.float64)
    return math.sqrt(float((norms * norms * shares).sum()))
