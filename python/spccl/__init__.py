"""spccl: collectives for data that is mostly zeros.

    encoded = spccl.encode(array)         # numpy array, torch tensor, any buffer -> bytes
    array = spccl.decode(encoded)
    with spccl.Communicator(rank, world_size, store=store) as comm:
        comm.all_reduce(array)

Needs neither torch nor numpy. Where torch is installed, `import spccl` makes
`torch.distributed.init_process_group("spccl")` work; `spccl.ddp`, `spccl.fsdp`,
`spccl.optim`, `spccl.sync`, `spccl.channels`, `spccl.backend` and `spccl.integrations` load on first use.
"""

import importlib
import importlib.util
import os
import sys
import warnings
from importlib import metadata

if "t" in getattr(sys, "abiflags", ""):
    raise ImportError(
        f"spccl does not support free-threaded Python: this is {sys.version.split()[0]} without the GIL "
        f"({sys.executable}); use the Python of the same version with the GIL"
    )

# These imports come after the check: a free-threaded Python finds no _ext, and its error would not say why.
from . import errors
from ._ext import version as _version
from .comm import Communicator, Request, Stats, get_unique_id
from .errors import *  # noqa: F403 (the list is errors.__all__)
from .frame import FrameInfo, decode, encode, inspect
from .info import info

__version__ = _version()
__all__ = [
    "Communicator",
    "FrameInfo",
    "Request",
    "Stats",
    "__version__",
    "decode",
    "encode",
    "get_unique_id",
    "info",
    "inspect",
    *errors.__all__,
]

_LAZY = ("backend", "channels", "ddp", "fsdp", "integrations", "optim", "prune", "sync")


def __getattr__(name: str) -> object:
    if name in _LAZY:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _torch_will_autoload() -> bool:
    """Whether `import torch` itself registers spccl, by the entry point of an installed spccl."""
    if os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") != "1":
        return False
    return any(entry.name == "spccl" for entry in metadata.entry_points(group="torch.backends"))


def _register_backend() -> None:
    """Make the name "spccl" known to torch.distributed, unless `import torch` will do so itself."""
    loaded = sys.modules.get("torch") is not None
    if not loaded and (importlib.util.find_spec("torch") is None or _torch_will_autoload()):
        return
    try:
        from . import backend

        backend.register()
    except Exception as error:  # codec and communicator must work beside a broken torch
        warnings.warn(
            f'spccl: backend="spccl" is not available in torch.distributed: {type(error).__name__}: {error} '
            "(`spccl info` tells more; the rest of spccl works)",
            RuntimeWarning,
            stacklevel=3,
        )


_register_backend()
