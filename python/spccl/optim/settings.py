"""The settings of `SparseSync`, in one record, and which values they may have."""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from spccl._pruning import checks
from spccl._pruning.checks import ABOVE_0, COUNT, COUNT_FROM_1, FRACTION, SHARE, is_number, is_share, is_whole
from spccl._pruning.density import Density, Geometric

from .signs import CHUNK

_RULES: dict[str, checks.Rule] = {
    "every": COUNT_FROM_1,
    "warmup_steps": COUNT,
    "sample": SHARE,
    "min_numel": COUNT_FROM_1,
    "leak": SHARE,
    "outer_lr": ABOVE_0,
    "outer_momentum": FRACTION,
    "correct_second_moment": (lambda x: x is None or x is False or x is True or x == "scaled",
                              "None, False, True or 'scaled'"),
    "clip_norm": (lambda x: x is None or ABOVE_0[0](x), "a finite number above 0, or None"),
    "check_finite": (lambda x: isinstance(x, bool), "True or False"),
    "bucket_mb": ABOVE_0,
    "check_every": COUNT,
    "norm_every": COUNT,
    "wire_dtype": (lambda x: x in (None, torch.bfloat16), "torch.bfloat16, or None for the weights' dtype"),
    "sum_density": (lambda x: x is None or is_share(x), "in (0, 1], or None"),
    "chunk": (lambda x: is_whole(x, 0, 4096) and (x == 0 or (x >= 256 and x & (x - 1) == 0)),
              "0, or a power of 2 from 256 to 4096"),
    "bits": (lambda x: x is None or is_whole(x, 1, 2), "1, 2, or None for whole values"),
    "look_ahead": SHARE,
    "seed": COUNT,
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Settings:
    """See `SparseSync`. Raises: ValueError for a setting out of range, with its name and what is wanted."""

    density: Density
    every: int
    warmup_steps: int
    sample: float
    min_numel: int
    leak: float
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
    look_ahead: float
    sum_density: float | None
    overlap: bool
    hosts: str = "auto"

    def __post_init__(self) -> None:
        checks.check_density("SparseSync", self.density, callable(self.density), ", or a function; 0.01 is 1%")
        checks.check("SparseSync", vars(self), _RULES)
        free, sums = self.warmup_steps == 0 or not callable(self.density), self.sum_density
        for name, ok, wanted in (
            ("warmup_steps", free, "0 when density is a function"),
            ("bits", self.bits != 2 or self.chunk > 0, "None without chunk: set chunk=4096"),
            ("chunk", self.bits != 1 or self.chunk == 0, "0 with bits=1, which has chunks of its own"),
            ("bits", self.bits is None or self.wire_dtype is None, "None with wire_dtype: set one of them"),
            ("sum_density", sums is None or self.bits is None, "None with bits: set one of them"),
            (
                "sum_density",
                sums is None or self.look_ahead >= 0.5,
                "None with look_ahead below 0.5: what owners keep is in no forward pass, and training was unstable",
            ),
            ("sum_density", sums is None or self.chunk == 0, "None with chunk: sums are pruned by a threshold"),
            (
                "sum_density",
                sums is None or self._end is not None,
                "None when density is a function other than Geometric: its last value is not known",
            ),
        ):
            checks.require("SparseSync", name, getattr(self, name), ok, wanted)

    def schedule(self) -> Density:
        """The density as a number or a function of the exchange."""
        if self.warmup_steps == 0 or callable(self.density) or self.bits == 1:
            return self.density
        return Geometric(end=float(self.density), steps=-(-self.warmup_steps // self.every))

    @property
    def _end(self) -> float | None:
        """The density after the warm-up, if it is known."""
        density = self.density.end if isinstance(self.density, Geometric) else self.density
        return None if callable(density) else float(density)

    def sum_density_at(self, density: float) -> float:
        """Share of the sums that their owners send in an exchange of this density: in proportion to it."""
        assert self.sum_density is not None and self._end is not None
        return 1.0 if density >= 1 else min(1.0, self.sum_density * density / self._end)

    def packs(self, density: float) -> bool:
        """Whether an exchange of this density sends two bits per value. 1 as a float32 sends everything exactly."""
        return self.bits == 2 and density < 1 - 2**-25

    def warms_up(self, exchange: int) -> bool:
        """Whether this exchange sends whole values although the later ones send one bit each."""
        return self.bits == 1 and exchange * self.every < self.warmup_steps

    @property
    def rows(self) -> int:
        """Elements of a row, if values travel in rows of one or two bits each; else 0."""
        return CHUNK if self.bits == 1 else self.chunk if self.bits else 0

    def facts(self) -> dict[str, object]:
        """Names and values, for a comparison of ranks. A density function counts by its values at some exchanges."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        if not callable(self.density):
            return values
        del values["density"]
        return values | {f"density of exchange {i}": _outcome(self.density, i) for i in _COMPARED}


def take_older(
    older: dict[str, Any], every: int, warmup_steps: int | None, leak: float
) -> tuple[int | None, float]:
    """(warmup_steps, leak), also where they have their earlier names in `older`, which then leave it.

    Raises: TypeError if a setting has both names; ValueError for a `warmup` that is no count.
    """
    if ("warmup" in older and warmup_steps) or ("decay" in older and leak != 1.0):
        raise TypeError("SparseSync: warmup is now called warmup_steps, and decay leak: got both names of one")
    if "warmup" in older:  # in exchanges
        checks.warn_of_old_word("SparseSync", "warmup", "warmup_steps")
        warmup = older.pop("warmup")
        checks.require("SparseSync", "warmup", warmup, is_whole(warmup, 0), "a whole number of at least 0")
        warmup_steps = warmup * every
    if "decay" in older:
        checks.warn_of_old_word("SparseSync", "decay", "leak")
        leak = older.pop("decay")
    return warmup_steps, leak


# Close together at the start, where schedules change fast.
_COMPARED = (*range(10), *(digit * 10**power for power in range(1, 6) for digit in (1, 2, 5)))


def _outcome(density: Callable[[int], float], exchange: int) -> object:
    """What a schedule gives. A schedule may end before the compared exchanges do: its error counts as a value."""
    try:
        value = density(exchange)
    except Exception as error:
        return f"a {type(error).__name__}"
    return value if is_number(value) else repr(value)
