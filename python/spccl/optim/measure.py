"""What a `SparseSync` counts and measures for its summary."""

from __future__ import annotations

import math
import warnings
from typing import TYPE_CHECKING, Any

import torch

from spccl import prune

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
        self.density = 1.0
        self._seconds = self._last_s = 0.0
        self._norms: tuple[float, float] | None = None
        self._before: list[torch.Tensor] | None = None
        self._update: list[torch.Tensor] | None = None
        self._wire_before = self._wire_bytes()
        self._exchanges = 0

    # -- in each step ------------------------------------------------------------------------------

    def before_step(self) -> None:
        """Keep the probed weights at the first local step of an exchange that is measured."""
        every, s = self.sync.settings.norm_every, self.sync
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
                "this rank leaves out the step. summary()['skipped_steps'] counts such steps; this warning comes once",
                stacklevel=4,
            )

    def begin_exchange(self, density: float) -> None:
        self.density = density

    def waits_for_exchange(self) -> bool:
        """Whether this exchange is measured, which needs the weights after it."""
        return self._update is not None

    def end_exchange(self, seconds: float) -> None:
        self._exchanges += 1
        self._last_s = seconds
        self._seconds += seconds
        if self._update is not None:
            s = self.sync
            numels = [w.numel for b in s.buckets for w in b.weights]
            unsent = [
                own - common
                for b in s.buckets
                for own, common in zip(_probes(b.locals), _probes(b.global_parts), strict=True)
            ]
            self._norms = _norm(self._update, numels), _norm(unsent, numels)
            self._update = None

    def reset(self) -> None:
        """Forget what was counted: a state was loaded."""
        self.__init__(self.sync)

    # -- when asked --------------------------------------------------------------------------------

    def summary(self) -> dict[str, Any]:
        """Figures of this rank. Waits for the device.

        Returns a dict:
            steps, exchanges        calls of step(), exchanges
            density_target          wanted density of the last exchange
            density_sent            entries sent / entries of all parameters, last exchange; those sent whole included
            density_mean            density_sent averaged over all exchanges, those of the run that saved a loaded state
                                    included
            update_norm             estimated norm of what the local steps changed, at the last measurement; or None
            unsent_norm             estimated norm of what was then still unsent; None before
            residual_ratio          unsent_norm / update_norm: how many exchanges' worth of change waits; None before
            dense_bytes, sent_bytes values of a dense exchange, and those sent in the last one, before any format; with
                                    bits=2 all bytes that this rank gives to the all-gather
            wire_bytes              what this rank has sent in the group so far, other users of the group included, with
                                    indices and headers; None if the backend is not spccl
            exchange_ms, exchange_ms_mean   time of the last exchange and mean; on CUDA the time to queue it
            skipped_steps           local steps left out because of inf or nan
            nonfinite_elems         weights that had become inf or nan and were set to the global ones
            backend                 what carries the exchange: "spccl", "nccl", ..., "none" for one rank
        """
        s = self.sync
        columns = [torch.stack([w.state for w in b.weights]).sum(dim=0).tolist() for b in s.buckets]
        numel = max(1, sum(b.numel for b in s.buckets))  # 0: FSDP2 has given this rank empty shards alone
        sent = sum(c[prune.N_SENT] for c in columns)
        widths = [b.globals.element_size() for b in s.buckets]
        sent_widths = [s.transfers.value_bytes(b) for b in s.buckets]
        update, unsent = self._norms or (None, None)
        packed = s.transfers.sent_bytes()
        values = sum(c[prune.N_SENT] * width for c, width in zip(columns, sent_widths, strict=True))
        wire = self._wire_bytes()
        calls = max(1, self._exchanges)
        return {
            "steps": s.steps,
            "exchanges": s.exchanges,
            "density_target": self.density,
            "density_sent": sent / numel,
            "density_mean": sum(c[prune.N_SENT_ALL] for c in columns) / numel / max(1, s.exchanges),
            "update_norm": update,
            "unsent_norm": unsent,
            "residual_ratio": unsent / update if update and unsent is not None else None,
            "dense_bytes": sum(b.numel * width for b, width in zip(s.buckets, widths, strict=True)),
            "sent_bytes": values if packed is None else packed,
            "wire_bytes": None if wire is None else wire - (self._wire_before or 0),
            "exchange_ms": self._last_s * 1e3,
            "exchange_ms_mean": self._seconds * 1e3 / calls,
            "skipped_steps": self.skipped,
            "nonfinite_elems": sum(c[prune.N_NONFINITE_ALL] for c in columns),
            "backend": ", ".join(sorted({s.ranks.backend(b.device) for b in s.buckets})),
        }

    def _wire_bytes(self) -> int | None:
        s = self.sync
        names = {b.device.type: s.ranks.backend(b.device) for b in s.buckets}
        if "spccl" not in names.values():
            return None
        from spccl import backend

        total = backend.stats(s.ranks.group).wire_bytes_sent if names.get("cpu") == "spccl" else 0
        return total + (backend.cuda_stats(s.ranks.group).wire_bytes_sent if names.get("cuda") == "spccl" else 0)


def _probes(parts: list[torch.Tensor]) -> list[torch.Tensor]:
    return [p[:: max(1, -(-p.numel() // _PROBE_ENTRIES))] for p in parts]


def _norm(probes: list[torch.Tensor], numels: list[int]) -> float:
    norms = torch.stack([n.double().cpu() for n in torch._foreach_norm(probes, 2)])
    shares = torch.tensor([n / p.numel() for n, p in zip(numels, probes, strict=True)], dtype=torch.float64)
    return math.sqrt(float((norms * norms * shares).sum()))
