"""What the commands share: types of options (sizes, lists, fractions of zeros, files to write), grouped help, the end
with an error. Needs click."""

from __future__ import annotations

import importlib.util
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click


class Fail(click.ClickException):
    """End the command with exit code 1 and this text."""


def need(module: str, command: str, how: str) -> None:
    """Raises: Fail if `module` is not installed. how: what to do then."""
    if importlib.util.find_spec(module) is None:
        raise Fail(f"{command} needs {module}, which is not installed: {how}")


class GroupedCommand(click.Command):
    """A command whose --help shows its options in groups, and examples last.

    Args: groups: (title, names of the parameters) of each group. examples: (what it does, command line) of each.
    """

    def __init__(
        self,
        *args: Any,
        groups: Sequence[tuple[str, Sequence[str]]],
        examples: Sequence[tuple[str, str]],
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._groups, self._examples = groups, examples

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        records = {p.name: p.get_help_record(ctx) for p in self.get_params(ctx)}
        named = {name for _, names in self._groups for name in names}
        rest = [name for name in records if name not in named]
        for title, names in (*self._groups, ("Other options", rest)):
            with formatter.section(title):
                formatter.write_dl([record for name in names if (record := records[name]) is not None])
        with formatter.section("Examples"):
            for what, line in self._examples:
                formatter.write_text(what + ":")
                formatter.write(f"{'':{formatter.current_indent}}  {line}\n")


_SUFFIXES = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


class Size(click.ParamType):
    """Bytes with an optional K, M or G (powers of 1024)."""

    name = "SIZE"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        text = value.strip().upper().removesuffix("B").removesuffix("I")
        digits = text.rstrip("KMG")
        scale = _SUFFIXES.get(text[len(digits) :])
        if not digits.isdigit() or scale is None or int(digits) * scale == 0:
            self.fail(f"{value!r}: wanted bytes above 0, such as 4096, 64K, 16M or 1G", param, ctx)
        return int(digits) * scale


class List(click.ParamType):
    """A comma list of another type."""

    def __init__(self, item: click.ParamType, name: str) -> None:
        self._item, self.name = item, name

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[Any, ...]:
        if isinstance(value, tuple):
            return value
        return tuple(self._item.convert(part.strip(), param, ctx) for part in value.split(","))


class OutFile(click.Path):
    """A file that the command writes at its end. A missing folder or permission is an error at its start."""

    def __init__(self) -> None:
        super().__init__(dir_okay=False, writable=True, path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        path = Path(super().convert(value, param, ctx))
        if os.environ.get("RANK", "0") != "0":  # torchrun: rank 0 writes, perhaps on another host
            return path
        if not path.parent.is_dir():
            self.fail(f"{str(path)!r}: the folder {str(path.parent)!r} does not exist", param, ctx)
        if not os.access(path.parent, os.W_OK):
            self.fail(f"{str(path)!r}: no permission to write to the folder {str(path.parent)!r}", param, ctx)
        return path


def _sparsity(text: str) -> float:
    try:
        value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        value = math.nan
    if not 0 <= value <= 1:
        raise click.BadParameter(f"{text!r}: wanted a fraction of zeros from 0 to 1, or a percentage such as 99%")
    return value


class Sparsity(click.ParamType[float]):
    """The fraction of elements that are zero: 0.99 or 99%."""

    name = "FRACTION"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        return value if isinstance(value, float) else _sparsity(value)
