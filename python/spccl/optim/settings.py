"""The settings of `SparseSync`, in one record."""

import dataclasses
from collections.abc import Callable

import torch

from .checks import check_settings, is_number
from .schedule import Density, Geometric


@dataclasses.dataclass(frozen=True)
class Settings:
    """See `SparseSync`. Raises: ValueError for a setting out of range, with its name and what is wanted."""

    density: Density
    every: int
    warmup: int
    sample: float
    min_numel: int
    decay: float
    outer_lr: float
    outer_momentum: float
    correct_second_moment: bool | str | None
    clip_norm: float | None
    check_finite: bool
    check_every: int
    norm_every: int
    bucket_mb: float
    seed: int
    wire_dtype: torch.dtype | None
    chunk: int
    bits: int | None
    overlap: bool

    def __post_init__(self) -> None:
        check_settings(self)

    def schedule(self) -> Density:
        """The density as a number or a function of the exchange."""
        if self.warmup == 0 or callable(self.density):
            return self.density
        return Geometric(end=float(self.density), steps=self.warmup)

    def packs(self, density: float) -> bool:
        """Whether an exchange of this density sends two bits per value. 1 as a float32 sends everything exactly."""
        return self.bits is not None and density < 1 - 2**-25

    def facts(self) -> dict[str, object]:
        """Names and values, for a comparison of ranks. A density function counts by its values at some exchanges."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        if not callable(self.density):
            return values
        del values["density"]
        return values | {f"density of exchange {i}": _outcome(self.density, i) for i in _COMPARED}


# Close together at the start, where schedules change fast.
_COMPARED = (*range(10), *(digit * 10**power for power in range(1, 6) for digit in (1, 2, 5)))


def _outcome(density: Callable[[int], float], exchange: int) -> object:
    """What a schedule gives. A schedule may end before the compared exchanges do: its error counts as a value."""
    try:
        value = density(exchange)
    except Exception as error:
        return f"a {type(error).__name__}"
    return value if is_number(value) else repr(value)
