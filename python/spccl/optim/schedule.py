"""Density as a function of the exchange: what share of the entries is sent when."""

import dataclasses
from collections.abc import Callable

from .checks import is_share, is_whole

Density = float | Callable[[int], float]


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
        for name, ok, wanted in (
            ("end", is_share(self.end), "in (0, 1]"),
            ("start", is_share(self.start) and (not is_share(self.end) or self.end <= self.start), "in [end, 1]"),
            ("steps", is_whole(self.steps, 0), "a whole number, 0 or more"),
            ("dense", is_whole(self.dense, 0), "a whole number, 0 or more"),
        ):
            if not ok:
                raise ValueError(f"Geometric: {name} is {getattr(self, name)!r}, wanted {wanted}")

    def __call__(self, exchange: int) -> float:
        """Density of an exchange, 0 the first."""
        if exchange < self.dense:
            return 1.0
        done = min(1.0, (exchange - self.dense) / self.steps) if self.steps else 1.0
        return float(self.start * (self.end / self.start) ** done)


def density_at(density: Density, exchange: int) -> float:
    """The density of an exchange. Raises: ValueError if a schedule leaves (0, 1]."""
    value = density(exchange) if callable(density) else density
    if not is_share(value):
        raise ValueError(
            f"SparseSync: the density schedule {density!r} gave {value!r} at exchange {exchange}, wanted a number in "
            "(0, 1]"
        )
    return float(value)
