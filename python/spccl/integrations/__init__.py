"""Ready-made parts for training frameworks. A framework is imported only when its part is used.

    PrunedGradientsCallback, SparseSyncCallback    for transformers.Trainer
    keep_states                                    checkpoints of Accelerate
    PrunedGradientsStrategy, SparseSyncStrategy    for Lightning

Frameworks save one state for all ranks. `PrunedGradients` and `SparseSync` have a state of each rank: these parts
write it to a file of each rank beside the framework's checkpoint. docs/FRAMEWORKS.md has the lines for each framework.
"""

from __future__ import annotations

from typing import Any

from ._accelerate import keep_states
from ._files import conflicting_settings, load_state, save_state

__all__ = [
    "PrunedGradientsCallback",
    "PrunedGradientsStrategy",
    "SparseSyncCallback",
    "SparseSyncStrategy",
    "conflicting_settings",
    "keep_states",
    "load_state",
    "save_state",
]


def __getattr__(name: str) -> Any:
    if name in ("PrunedGradientsCallback", "SparseSyncCallback"):
        _require("transformers", name)
        from . import _trainer

        return getattr(_trainer, name)
    if name in ("PrunedGradientsStrategy", "SparseSyncStrategy"):
        _require("lightning", name)
        from . import _lightning

        return getattr(_lightning, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _require(library: str, part: str) -> None:
    import importlib

    try:
        importlib.import_module(library)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"spccl.integrations.{part} needs {library}, which is not installed: pip install {library}"
        ) from error
