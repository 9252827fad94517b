"""The recipes for `density=None`: settings by the number of ranks that prune, each with the run that measured it.

To add a recipe, add a row: the settings, what they were measured to cost and to save, and the file of the run.
"""

import dataclasses
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from .checks import outside

# Settings that a recipe may choose, and what each is without one. One that is None (wire_dtype: "auto") is not given.
PLAIN: dict[str, Any] = {
    "density": 0.01, "warmup_steps": 0, "look_ahead": 1.0, "correct_second_moment": None, "wire_dtype": None,
    "bits": None,
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Row:
    """A recipe and its measurement. Of rows with the same number of ranks the first that fits is taken.

    Attributes:
        ranks: that pruned when it was measured. It is also the recipe of fewer.
        local_steps: between exchanges. Rows with several are for every `every` above 1.
        loss: what was measured, as a part of a sentence.
        saving: bytes of a dense float32 all-reduce in each step over bytes sent.
        source: file of bench/results.
    """

    ranks: int
    settings: Mapping[str, Any]
    loss: str
    saving: float
    source: str
    local_steps: int = 1

    def __str__(self) -> str:
        ranks = f"{self.ranks} pruning ranks" + (f", {self.local_steps} local steps" if self.local_steps > 1 else "")
        return f"measured with {ranks}: {self.loss}, {self.saving:g} times fewer bytes (bench/results/{self.source})"


_BF16 = {"warmup_steps": 50, "correct_second_moment": "scaled", "wire_dtype": torch.bfloat16}
_ONE_BIT = {"bits": 1, "warmup_steps": 190, "correct_second_moment": True}  # 190 of 5000 steps
ADAM = (
    Row(4, {"density": 0.0245, "look_ahead": 0.5, **_BF16}, "loss 0.018 nats above dense", 20.8, "quality-25m.csv"),
    Row(16, _ONE_BIT, "loss 0.028 nats above dense", 20.2, "quality-25m-16-ranks-5000-steps.csv"),
    Row(16, {"density": 0.0245, "look_ahead": 0.125, **_BF16},
        "loss 0.106 nats above dense after 2000 steps", 8.9, "quality-25m-16-ranks.csv"),
    Row(32, _ONE_BIT, "loss 0.045 nats above dense", 20.2, "quality-25m-32-ranks-5000-steps.csv"),
    Row(4, {"density": 0.105, "look_ahead": 0.5, "correct_second_moment": "scaled", "wire_dtype": torch.bfloat16},
        "loss 0.048 nats above dense", 111, "quality-25m-every-16.csv", local_steps=16),
)  # fmt: skip
SGD = (
    Row(4, {"density": 0.01}, "a CNN as accurate as with dense training, a GPT 0.20 nats above it (simulated)", 6.3,
        "quality-digits.csv"),
    Row(32, {"density": 0.01}, "a CNN as accurate as with dense training, a GPT 0.26 nats above it (simulated)", 5.3,
        "quality-digits-many.csv"),
)


def rows_for(optimizer: torch.optim.Optimizer, is_adam: bool) -> list[Row]:
    """The rows for SparseSync with this optimizer: one bit is not for float64."""
    has_float64 = any(p.dtype == torch.float64 for group in optimizer.param_groups for p in group["params"])
    return [row for row in ADAM if is_adam and not (has_float64 and row.settings.get("bits") == 1)]


def choose(
    given: dict[str, Any], n_ranks: int, rows: Iterable[Row], who: str = "SparseSync"
) -> tuple[dict[str, Any], str]:
    """The settings that a recipe completes, and a sentence about it.

    Args:
        given: settings, as `PLAIN` says, beside others. What is given wins.
        n_ranks: that prune.
        rows: of the optimizer; none if nothing was measured with it.
    Warns, once for each sentence, where nothing was measured for that many ranks.
    """
    wanted = {name for name in PLAIN if name in given and _is_unset(name, given[name])}
    if "density" not in wanted:
        return given | {name: PLAIN[name] for name in wanted}, "as given"
    if n_ranks == 1:
        return given | _completed(given, wanted, PLAIN), "one rank, which sends nothing"
    fitting = sorted((row for row in rows if _fits(row, given)), key=lambda row: row.ranks)
    most = fitting[-1].ranks if fitting else 0
    row = next((row for row in fitting if row.ranks >= min(n_ranks, most)), None)
    if row is None:
        text = "not measured with this optimizer and these settings"
        what = "bits=1" if given.get("bits") == 1 else f"density=None is {PLAIN['density']} here, which"
        _warn(f"{who}: {what} was {text}; compare with dense training")
        return given | _completed(given, wanted, PLAIN), text
    chosen = _completed(given, wanted, row.settings)
    shown = ", ".join(f"{name}={chosen[name]}" for name in row.settings if name in chosen)
    text = f"{shown}; {row}" + ("; not measured with what else was given" if _differs(row, given | chosen) else "")
    if n_ranks > row.ranks:
        _warn(f"{who}: {n_ranks} ranks prune, and no recipe was measured with so many. The nearest is taken: {text}. "
              "Compare with dense training, or set density")  # fmt: skip
        text = f"not measured with {n_ranks} pruning ranks; {text}"
    return given | chosen, text


def _is_unset(name: str, value: object) -> bool:
    return isinstance(value, str) and value == "auto" if name == "wire_dtype" else value is None


def _fits(row: Row, given: dict[str, Any]) -> bool:
    """Whether what was given can go with the row."""
    if (given.get("every", 1) == 1) != (row.local_steps == 1):
        return False
    if row.settings.get("bits") != 1:
        return given.get("bits") != 1
    prunes = given.get("chunk") or given.get("sum_density") is not None
    return given.get("bits") in (None, 1) and not isinstance(given.get("wire_dtype"), torch.dtype) and not prunes


def _differs(row: Row, settings: dict[str, Any]) -> bool:
    """Whether settings that change what is sent or kept are not those that were measured."""
    plain = {"every": row.local_steps, "chunk": 0, "sum_density": None, "bits": None}
    wanted = plain | dict(row.settings)
    return any(settings.get(name, value) != value for name, value in wanted.items())


def _completed(given: dict[str, Any], wanted: set[str], settings: Mapping[str, Any]) -> dict[str, Any]:
    """What `settings` have for what is wanted, where that can go with what was given."""
    chosen = {name: settings.get(name, PLAIN[name]) for name in wanted}
    bits = (given | chosen).get("bits")
    changes = {"density": 1.0} if bits == 1 else {}  # nothing is pruned
    if bits is not None:  # of values
        changes["wire_dtype"] = None
    if given.get("sum_density") is not None and "look_ahead" in chosen:
        changes["look_ahead"] = max(0.5, chosen["look_ahead"])  # with less, pruned sums are unstable
    return chosen | {name: value for name, value in changes.items() if name in wanted}


_warned: set[str] = set()


def _warn(text: str) -> None:
    if text not in _warned:
        _warned.add(text)
        warnings.warn(text, stacklevel=outside())
