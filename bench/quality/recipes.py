"""Recipes: how workers exchange what their optimizers compute, and the named ones that were run."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path


@dataclasses.dataclass(frozen=True)
class Recipe:
    """One way to train. See bench/quality/README.md for what each field does.

    Attributes:
        mode: "dense" (AdamW of the averaged gradient), "gradient" (error feedback on raw gradients, then AdamW) or
            "update" (a local AdamW per worker, error feedback on its update, the unsent part stays applied).
        optimizer: "adamw", or, with the modes "dense" and "gradient", "sgd": momentum `beta1`, the averaged gradient
            clipped to the norm `clip`. "gradient" is then `PrunedGradients` with its momentum and clip_norm.
        density: fraction of the entries of each matrix that a worker sends in an exchange.
        warmup: steps in which the density falls geometrically from 1 to `density`.
        every: local steps between two exchanges.
        moment: second moment that divides the update: "local", "corrected" (v/N + (1-1/N) m^2), "unbiased",
            "ratio" (v times a factor per matrix that estimates averaged over local), "scaled" (v/N), "averaged" (of
            the averaged gradient, see refresh), "oracle" (the same in each step, its bytes not counted).
        refresh: moment=averaged: steps between two dense exchanges of the gradient in bfloat16, whose bytes count.
            The second moment changes in these steps and in the warm-up.
        select: "top" (largest of each matrix, by a threshold from a sample), "chunk" (exactly the largest k of each
            4096), "rotate" (all workers send the same slices, in turn).
        power: "top" ranks entries by |e| * v**(power / 4).
        wire: dtype of the exchanged values: "float32", "bfloat16", "2bit" with select=chunk: sign and one of two
            levels per chunk, in an all-gather, or "1bit": signs of all entries and one magnitude per `chunk` entries,
            of what a worker sends and of the sums; a worker and a shard's owner keep the error. In the warm-up all
            entries are sent in bfloat16.
        chunk, magnitude: wire=1bit: entries of a magnitude, which is their "mean" or "rms" magnitude.
        sum_density: the owner of a shard adds the sum to what it kept, sends about this fraction of each matrix, the
            largest, and keeps the rest; 0: all. In the warm-up it falls as the density does.
        sum_decay: factor on what the owner keeps, per exchange.
        decay: factor on what stays unsent, per exchange (SparseLoCo: 0.95).
        look_ahead: a worker's own weights are the agreed ones minus this times what it has not sent.
        outer_lr, outer_momentum: Nesterov step on the averaged change (DiLoCo).
    """

    mode: str = "update"
    optimizer: str = "adamw"
    clip: float = 1.0
    density: float = 1.0
    sum_density: float = 0.0
    sum_decay: float = 1.0
    warmup: int = 0
    every: int = 1
    moment: str = "corrected"
    refresh: int = 1
    select: str = "top"
    power: int = 0
    wire: str = "bfloat16"
    chunk: int = 4096
    magnitude: str = "mean"
    lr: float = 1e-3
    outer_lr: float = 1.0
    outer_momentum: float = 0.0
    look_ahead: float = 1.0
    decay: float = 1.0
    beta1: float = 0.9
    beta2: float = 0.95
    weight_decay: float = 0.1
    shape: str = "constant"
    decay_in_change: bool = True

    def __post_init__(self) -> None:
        for name, value, known in (
            ("mode", self.mode, ("dense", "gradient", "update")),
            ("optimizer", self.optimizer, ("adamw", "sgd")),
            ("select", self.select, ("top", "chunk", "rotate")),
            ("wire", self.wire, ("float32", "bfloat16", "2bit", "1bit")),
            ("magnitude", self.magnitude, ("mean", "rms")),
        ):
            if value not in known:
                raise ValueError(f"recipe: {name} is {value!r}, wanted one of {', '.join(known)}")
        if self.optimizer == "sgd" and self.mode == "update":
            raise ValueError('recipe: optimizer=sgd with mode=update, wanted mode=dense or mode=gradient')
        if self.wire == "2bit" and self.select != "chunk":
            raise ValueError(f"recipe: wire=2bit with select={self.select}, wanted select=chunk")
        if self.wire == "2bit" and (self.warmup or self.density >= 1):
            raise ValueError("recipe: wire=2bit with warmup or density=1, which send whole values; wanted neither")

        if self.wire == "1bit" and (self.density < 1 or self.sum_density):
            raise ValueError("recipe: wire=1bit with density or sum_density, wanted neither: it sends all entries")

    def is_fresh(self, step: int) -> bool:
        """Whether the second moment of the averaged gradient changes in `step` (from 1)."""
        return step <= self.warmup or step % self.refresh == 0

    def density_at(self, step: int, steps: int) -> float:
        """Density of the exchange after `step` (from 1)."""
        density = self.density
        if self.shape == "late":  # the last eighth has 3 times the density of the rest; the mean is `density`
            density *= 2.4 if step > steps * 7 // 8 else 0.8
        elif self.shape == "early":
            density *= 2.4 if step <= steps // 8 else 0.8
        if step <= self.warmup:
            return max(density, density ** (step / self.warmup)) if density < 1 else 1.0
        return min(1.0, density)

    def lr_at(self, step: int, steps: int) -> float:
        """Learning rate: 100 steps of warm-up, then a cosine to 10%. 100 is 1/10 in runs of fewer than 1000."""
        warm = min(100, max(1, steps // 10))
        rest = max(0, step - warm) / max(1, steps - warm)
        return self.lr * min(1.0, step / warm) * (0.1 + 0.45 * (1 + math.cos(math.pi * rest)))


def parse(text: str) -> tuple[str, Recipe]:
    """A recipe from "name: field=value field=value"; the name is also the label in CSV and figure."""
    name, _, rest = text.partition(":")
    kinds = {f.name: type(f.default) for f in dataclasses.fields(Recipe)}
    values: dict[str, object] = {}
    for word in rest.split():
        key, _, value = word.partition("=")
        if key not in kinds:
            raise ValueError(f"recipe {name!r}: no field {key!r}; fields: {', '.join(kinds)}")
        values[key] = (value == "True") if kinds[key] is bool else kinds[key](value)
    return name.strip(), Recipe(**values)  # type: ignore[arg-type]


def named(only: str, recipes: dict[str, Recipe]) -> list[str]:
    """The names in `only`, which have commas between them and may have some in them; all for an empty `only`.

    Raises: ValueError for what is no name.
    """
    left = f",{only},"
    found = [name for name in recipes if f",{name}," in left]
    for name in sorted(found, key=len, reverse=True):
        left = left.replace(f",{name},", ",")
    if left.strip(","):
        raise ValueError(f"--only: {left.strip(',')} is not one of {'; '.join(recipes)}")
    return found if only else list(recipes)


def read_recipes(path: Path) -> dict[str, Recipe]:
    """The recipes of a file, by name: one a line, "#" before comments. Raises: ValueError if a name comes twice."""
    lines = [line.strip() for line in path.read_text().splitlines()]
    pairs = [parse(line) for line in lines if line and not line.startswith("#")]
    names = [name for name, _ in pairs]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"{path}: recipe {name!r} is there {names.count(name)} times, wanted once")
    return dict(pairs)
