"""The SPCCL_* variables that the torch backend reads. Those of the library are in csrc/core/base/env.c.

Imports no torch, so that `spccl info` can print them without it.
"""

import os
from typing import NamedTuple

FALLBACKS = ("nccl", "stage")
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
    "cuda_engine": Setting("SPCCL_CUDA_ENGINE", "1", ("0", "1"), "0: CUDA tensors always take the fallback"),
    "cuda_fallback": Setting(
        "SPCCL_CUDA_FALLBACK",
        "nccl",
        FALLBACKS,
        "where CUDA tensors go if the GPUs cannot reach each other: nccl, or stage (host memory)",
    ),
    "order": Setting(
        "SPCCL_ORDER", "device", ORDERS, "collectives of a GPU: device, all groups in one order; group, one per group"
    ),
    "blocking_wait": Setting(
        "SPCCL_BLOCKING_WAIT", "0", ("0", "1"), "1: CUDA calls and wait() return when the GPU is done, and raise"
    ),
}
ALL = (GLUE, *OPTIONS.values())
