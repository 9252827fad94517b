"""Statistics of a pruning hook: the counts behind `PruningHook.stats`."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from . import prune
from ._hook_state import OnDevice


class Tally:
    """Counts of one step that the host knows."""

    def __init__(self, density: float = 1.0):
        self.density = density
        self.elems = 0
        self.dense_bytes = 0
        self.select_s = 0.0

    def add(self, elems: int, elem_bytes: int) -> None:
        self.elems += elems
        self.dense_bytes += elems * elem_bytes


class Statistics:
    """Counts of the step under way, of the last complete step, and of the run."""

    def __init__(self):
        self.now = Tally()
        self._last = Tally()
        self._residual_norm: float | None = None
        self.forget_totals()

    def forget_totals(self) -> None:
        """Begin a new run."""
        self._totals = {"steps": 0, "elems": 0, "select_s": 0.0}

    def end_step(self) -> None:
        self._last = self.now
        totals = self._totals
        totals["steps"] += 1
        totals["elems"] += self.now.elems
        totals["select_s"] += self.now.select_s

    def measure_residual(self, slots: Iterable[prune.Slot]) -> None:
        """Measure the norm of all residuals. Waits for the device."""
        kept = [(s.residual, s.loss_scale()) for s in slots if s.residual is not None]
        norms = [torch.linalg.vector_norm(r, dtype=torch.float64).item() / scale for r, scale in kept]
        self._residual_norm = math.hypot(*norms)

    def report(
        self, step: int, devices: Sequence[OnDevice], slots: Sequence[prune.Slot], sent: dict[str, int]
    ) -> dict[str, Any]:
        """The dictionary that `PruningHook.stats` describes. Waits for the device.

        Args: sent: entries sent in the last complete step, by parameter name.
        """
        last, totals = self._last, self._totals
        counts = [memory.read_counts() for memory in devices]
        pruned = [slot for slot in slots if slot.pruned and last.density < 1]
        pruned_elems = sum(slot.numel for slot in pruned)
        grad_norm = math.sqrt(sum(squares for squares, _, _ in counts))
        residual = self._residual_norm
        return {
            "step": step,
            "density_target": last.density,
            "density_sent": sum(sent.values()) / max(1, last.elems),
            "density_pruned": sum(sent[slot.name] for slot in pruned) / pruned_elems if pruned_elems else None,
            "density_mean": sum(n for _, n, _ in counts) / max(1, totals["elems"]),
            "dense_bytes": last.dense_bytes,
            "sent_bytes": sum(sent[slot.name] * slot.elem_bytes for slot in slots),
            "grad_norm": grad_norm,
            "residual_norm": residual,
            "residual_ratio": residual / grad_norm if residual is not None and grad_norm > 0 else None,
            "select_ms": last.select_s * 1e3,
            "select_ms_mean": totals["select_s"] * 1e3 / max(1, totals["steps"]),
            "nonfinite_elems": sum(n for _, _, n in counts),
        }
