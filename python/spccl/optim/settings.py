"""The settings of `SparseSync`, in one record."""

import dataclasses

import torch

from .checks import check_settings
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
        """Names and values, for a comparison of ranks. A function counts by its name."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        if callable(self.density) and not dataclasses.is_dataclass(self.density):
            values["density"] = getattr(self.density, "__qualname__", type(self.density).__qualname__)
        else:
            values["density"] = repr(self.density)
        return values
