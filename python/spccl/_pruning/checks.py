"""What the pruning parts ask of their settings: numbers in range, and words of today."""

import math
import numbers
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn


def is_whole(value: object, least: int, most: int = 2**32 - 1) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def is_number(value: object) -> bool:
    """Whether value is a finite number that float64 holds; not for a bool."""
    try:
        return isinstance(value, numbers.Real) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # a larger int
        return False


def is_share(value: Any) -> bool:
    return is_number(value) and 0 < value <= 1


def outside() -> int:
    """The `stacklevel` with which the caller's warning is about the first line outside of spccl that led to it."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_globals["__name__"].partition(".")[0] == "spccl":
        frame, level = frame.f_back, level + 1
    return level


def check_density(who: str, density: Any, is_schedule: bool = False, more: str = "") -> None:
    """Raises: ValueError for what is no share, nor a schedule. Warns of the integer 1, which may be meant as percent.

    Args: more: what else is wanted, for the error.
    """
    is_percent = is_number(density) and 1 < density <= 100
    hint = f"; {density} percent is density={density / 100:g}" if is_percent else ""
    require(who, "density", density, is_schedule or is_share(density), f"in (0, 1]{more}{hint}")
    if isinstance(density, int) and density == 1:
        warnings.warn(
            f"{who}: density=1 sends every entry; one percent is density=0.01. Write density=1.0 if all entries are "
            "meant",
            stacklevel=outside(),
        )


# Of a setting: whether a value will do, and what is wanted.
Rule = tuple[Callable[[Any], bool], str]
SHARE: Rule = is_share, "in (0, 1]"
FRACTION: Rule = lambda x: is_number(x) and 0 <= x < 1, "in [0, 1)"
COUNT: Rule = lambda x: is_whole(x, 0), "a whole number, 0 to 2^32 - 1"
COUNT_FROM_1: Rule = lambda x: is_whole(x, 1), "a whole number, 1 or more"
ABOVE_0: Rule = lambda x: is_number(x) and x > 0, "a finite number above 0"


def require(who: str, name: str, value: object, ok: bool, wanted: str) -> None:
    if not ok:
        raise ValueError(f"{who}: {name}={value!r}, wanted {wanted}")


def check(who: str, settings: Mapping[str, Any], rules: Mapping[str, Rule]) -> None:
    """Raises: ValueError that names the first setting that breaks its rule."""
    for name, (will_do, wanted) in rules.items():
        require(who, name, settings[name], will_do(settings[name]), wanted)


def refuse_unknown(who: str, unknown: Mapping[str, Any], known: Iterable[str]) -> NoReturn:
    """Raises: TypeError about the first of the settings `unknown`."""
    name, value = next(iter(unknown.items()))
    is_sparsity = name == "sparsity" and is_number(value) and 0 <= value < 1
    hint = f"; sparsity={value} is density={1 - value:g}" if is_sparsity else ""
    raise TypeError(f"{who}: got {name}={value!r}, wanted one of the settings {', '.join(known)}{hint}")


_warned: set[tuple[str, str]] = set()


def warn_of_old_word(who: str, old: str, new: str) -> None:
    """Warn, once, that `old` is an earlier name of `new`."""
    if (who, old) not in _warned:
        _warned.add((who, old))
        warnings.warn(f"{who}: {old} is now called {new}", FutureWarning, stacklevel=outside())
