"""The SPCCL_* variables that the torch backend reads. Those of the library are in csrc/core/base/env.c.

Imports no torch, so that `spccl info` can print them without it.
"""

import os
from typing import NamedTuple

ROUTES = ("auto", "spccl", "one-host", "auto+stage", "spccl+stage", "one-host+stage", "nccl", "stage")
ORDERS = ("device", "group")


class Setting(NamedTuple):
    """One variable. An empty value counts as unset, as for the variables of the library."""

    name: str
    default: str
    choices: tuple[str, ...]  # empty: any text
    meaning: str

    def given(self) -> str | None:
        """The value in the environment, None if unset. Raises: ValueError if it is not one of the choices."""
        value = os.environ.get(self.name) or None
        if value is not None and self.choices and value not in self.choices:
            raise ValueError(f"spccl: {self.name}={value!r}, wanted one of {', '.join(self.choices)}")
        return value

    def text(self) -> str:
        """The value in the environment, checked or not; the default if unset."""
        return os.environ.get(self.name) or self.default


GLUE = Setting(
    "SPCCL_TORCH_GLUE", "auto", (), "where the torch glue comes from: auto, prebuilt, compile, or a library's path"
)
# Field of `backend.Options` -> its variable.
OPTIONS = {
    "order": Setting(
        "SPCCL_ORDER", "device", ORDERS, "collectives of a GPU: device, all groups in one order; group, one per group"
    ),
    "blocking_wait": Setting(
        "SPCCL_BLOCKING_WAIT", "0", ("0", "1"), "1: CUDA calls and wait() return when the GPU is done, and raise"
    ),
}
ALL = (GLUE, *OPTIONS.values())
# csrc/core/base/env.c describes it, because the library reads it too.
ROUTE = Setting("SPCCL_CUDA_ROUTE", "auto", ROUTES, "")
OLD_ENGINE = Setting("SPCCL_CUDA_ENGINE", "1", ("0", "1"), "0: CUDA tensors always take the fallback")
OLD_FALLBACK = Setting("SPCCL_CUDA_FALLBACK", "nccl", ("nccl", "stage"), "what the fallback is")


def merge_old(route: str, engine: bool | None, fallback: str | None) -> str:
    """`route`, changed by what cuda_engine and cuda_fallback meant; None: not given."""
    stage = route.endswith("stage") if fallback is None else fallback == "stage"
    is_off = route in ("nccl", "stage") if engine is None else not engine
    if is_off:
        return "stage" if stage else "nccl"
    on = "auto" if route in ("nccl", "stage") else route.removesuffix("+stage")
    return on + "+stage" if stage else on


def route_in_force(option: str) -> str:
    """The variable, unless it is unset or its default; else `option`, changed by the variables of earlier versions."""
    value, engine = ROUTE.given(), OLD_ENGINE.given()
    if value is not None and value != ROUTE.default:
        return value
    return merge_old(option, None if engine is None else engine == "1", OLD_FALLBACK.given())
