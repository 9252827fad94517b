"""Density as a function of the exchange: what share of the entries is sent when. A hook's exchange is a step."""

import dataclasses
from collections.abc import Callable

from .checks import COUNT, SHARE, check, is_share, require

Density = float | Callable[[int], float]


def falling(end: float, done: float, start: float = 1.0) -> float:
    """Density when the share `done` of a geometric fall from `start` to `end` is over; 0 or less: before it."""
    return float(start * (end / start) ** min(1.0, max(0.0, done)))


@dataclasses.dataclass(frozen=True)
class Geometric:
    """Everything is sent for `dense` exchanges, then the density falls geometrically over `steps` to `end`.

    A run of n exchanges at `end` sends n * end; the fall adds about steps * (start - end) / ln(start / end).

    Args:
        end: density after the fall, (0, 1].
        steps: exchanges of the fall.
        start: density at the first exchange of the fall, [end, 1].
        dense: exchanges before the fall, in which everything is sent.
    """

    end: float
    steps: int
    start: float = 1.0
    dense: int = 0

    def __post_init__(self) -> None:
        check("Geometric", vars(self), {"end": SHARE, "steps": COUNT, "dense": COUNT})
        require("Geometric", "start", self.start, is_share(self.start) and self.end <= self.start, "in [end, 1]")

    def __call__(self, exchange: int) -> float:
        """Density of an exchange, 0 the first."""
        if exchange < self.dense:
            return 1.0
        return falling(self.end, (exchange - self.dense) / self.steps if self.steps else 1.0, self.start)


def density_at(density: Density, exchange: int) -> float:
    """The density of an exchange. Raises: ValueError if a schedule leaves (0, 1]."""
    value = density(exchange) if callable(density) else density
    if not is_share(value):
        raise ValueError(
            f"SparseSync: the density schedule {density!r} gave {value!r} at exchange {exchange}, wanted a number in "
            "(0, 1]"
        )
    return float(value)
