"""Statistics of a pruning hook: the counts behind its `stats`."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from spccl import backend, prune

from .backward import at_end_of_backward, in_backward
from .hook_state import OnDevice
from .stats import OwnBytes, report


class Tally:
    """Counts of one step that the host knows."""

    def __init__(self, density: float = 1.0):
        self.density = density
        self.elems = 0
        self.dense_bytes = 0
        self.select_s = 0.0
        self.n_calls = 0  # of all-reduces

    def add(self, elems: int, elem_bytes: int) -> None:
        self.n_calls += 1
        self.elems += elems
        self.dense_bytes += elems * elem_bytes


class Statistics:
    """Counts of the step under way, of the last complete step, and of the run."""

    def __init__(self):
        self.now = Tally()
        self._last: Tally | None = None
        self._residual_norm: float | None = None
        self._wire: OwnBytes | None = None
        self._n_calls = 0  # collectives of the hook before `now`: its last buckets call some after end_step
        self.forget_totals()

    def forget_totals(self) -> None:
        """Begin a new run."""
        self._totals = {"steps": 0, "elems": 0, "select_s": 0.0}

    def begin_step(self, density: float, group: dist.ProcessGroup | None) -> None:
        """A backward pass has called the hook for the first time."""
        self._n_calls += self.now.n_calls
        self.now = Tally(density)
        if group is None or group.size() == 1:
            return
        wire = self._wire = self._wire or OwnBytes(group)
        wire.begin(group)
        if in_backward():
            # A callback that queues the end: it comes after all that is queued by then, DDP's wait for the buckets too.
            at_end_of_backward(lambda: at_end_of_backward(lambda: wire.end(group)))

    def end_step(self) -> None:
        self._last = self.now
        totals = self._totals
        totals["steps"] += 1
        totals["elems"] += self.now.elems
        totals["select_s"] += self.now.select_s

    def measure_residual(self, params: Iterable[prune.ParamState]) -> None:
        """Measure the norm of all residuals. Waits for the device."""
        kept = [(s.residual, s.loss_scale()) for s in params if s.residual is not None]
        norms = [torch.linalg.vector_norm(r, dtype=torch.float64).item() / scale for r, scale in kept]
        self._residual_norm = math.hypot(*norms)

    def report(
        self,
        step: int,
        density: float,
        group: dist.ProcessGroup | None,
        devices: Mapping[torch.device, OnDevice],
        params: Sequence[prune.ParamState],
        sent: dict[str, int],
        sums: float | None,
    ) -> dict[str, Any]:
        """What `HasStats.stats` describes. Waits for the device.

        Args:
            density: wanted in the next step.
            sent: entries sent in the last complete step, by parameter name.
            sums: share of its shards that this rank sent as an owner; None without sum_density.
        """
        last, totals = self._last or Tally(density), self._totals
        n_calls = self._n_calls + self.now.n_calls
        counts = [memory.read_counts() for memory in devices.values()]
        pruned = [param for param in params if param.pruned and last.density < 1]
        pruned_elems = sum(param.numel for param in pruned)
        carries = {backend.name_for(group, d) for d in devices} if group is not None and group.size() > 1 else set()
        return report(
            carries,
            steps=step,
            exchanges=step,
            density_target=last.density,
            density_sent=sum(sent.values()) / max(1, last.elems),
            density_pruned=sum(sent[param.name] for param in pruned) / pruned_elems if pruned_elems else None,
            density_mean=sum(n for *_, n, _ in counts) / max(1, totals["elems"]),
            density_sums=sums,
            dense_bytes=last.dense_bytes,
            sent_bytes=sum(sent[param.name] * param.elem_bytes for param in params),
            wire_bytes=None if self._wire is None else self._wire.read(group, devices, n_calls),
            update_norm=math.sqrt(sum(squares for squares, *_ in counts)) or None,
            unsent_norm=self._residual_norm,
            part_norm=math.sqrt(sum(squares for _, squares, *_ in counts)),
            select_ms=last.select_s * 1e3,
            select_ms_mean=totals["select_s"] * 1e3 / max(1, totals["steps"]),
            skipped_steps=0,
            nonfinite_elems=sum(n for *_, n in counts),
        )
