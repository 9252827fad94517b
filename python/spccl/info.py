"""`info`: which parts this build contains, why others are absent, and the value of every setting."""

from __future__ import annotations

import dataclasses
import platform
import re
from importlib import metadata, util
from typing import Any

from . import _ext, _torch_settings


@dataclasses.dataclass(frozen=True)
class Entry:
    """One part of this build, or one setting.

    Attributes:
        kind: "transport", "kernels", "schedule", "part", "GPUDirect", "setting" (an SPCCL_* variable),
            "debug" (an SPCCL_DEBUG_* variable) or "python" (found by Python).
        name: of the part or setting.
        value: "in", "in, chosen", "absent", or the value of a setting or version.
        why: the reason for the value, and how to get what is absent.
    """

    kind: str
    name: str
    value: str
    why: str


def _installed(name: str) -> str | None:
    """Version of an installed distribution, without importing it."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _optional(name: str, use: str, requirement: str) -> Entry:
    version = _installed(name)
    if version is None:
        return Entry("python", name, "absent", f"needed for {use}: pip install {requirement}")
    return Entry("python", name, version, f"used for {use}")


def _torch_backend() -> Entry:
    name = "torch backend"
    if util.find_spec("torch") is None:
        return Entry(
            "python", name, "absent", 'torch is not installed: pip install torch, then backend="spccl" works'
        )
    try:
        from torch.distributed import Backend

        from . import backend

        backend.register()
    except Exception as error:  # any error of torch is the reason that the user wants to read
        return Entry("python", name, "absent", f"{type(error).__name__}: {error}")
    registered = "spccl" in Backend.backend_list
    if not registered:
        return Entry("python", name, "absent", "backend.register() left no entry in torch.distributed")
    return Entry("python", name, "registered", 'init_process_group("spccl") and "cpu:spccl" work')


def _torch_glue() -> list[Entry]:
    """One entry: whether the glue for the installed torch exists. Empty without torch. Compiles nothing."""
    if util.find_spec("torch") is None:
        return []
    name = "torch glue"
    try:
        import torch

        from . import _torch_glue as glue

        glue.check_torch_version(torch.__version__)
        minor = glue._minor(torch.__version__)
        prebuilt = glue.PACKAGE / f"libspccl_torch-{minor}.so"
        compiled = glue.cached_library(torch)
        for state, path in (("prebuilt", prebuilt), ("compiled", compiled)):
            if path.is_file():
                return [Entry("python", name, state, f"{path}, for torch {minor}")]
        return [Entry("python", name, "not yet", f"{glue._compiler()} compiles it at first use (20 s)")]
    except Exception as error:  # a GlueError says what to do
        return [Entry("python", name, "absent", f"{type(error).__name__}: {error}")]


def _in_force(entry: Entry) -> Entry:
    """`entry`, changed by the variables of earlier versions that only the torch backend reads."""
    if entry.name != _torch_settings.ROUTE.name:
        return entry
    try:
        return dataclasses.replace(entry, value=_torch_settings.route_in_force(entry.value))
    except ValueError:  # a bad value is shown as it is
        return entry


def info() -> list[Entry]:
    """The parts of this build with reasons, the settings with their present values, and Python packages.

    Imports torch if it is installed, which may take seconds. Raises: nothing.
    """
    entries = [_in_force(Entry(*entry)) for entry in _ext.info()]
    entries += [Entry("setting", s.name, s.text(), s.meaning) for s in _torch_settings.ALL]
    entries += [
        Entry(
            "python", "spccl", _ext.version(), "libspccl, as loaded by spccl._ext"
        ),
        Entry("python", "python", platform.python_version(), platform.python_implementation()),
        _optional("numpy", "decode without out=, spccl verify and spccl bench", "numpy"),
        _optional("torch", 'backend="spccl", and the Gloo or NCCL of spccl bench', "'torch>=2.9'"),
        _torch_backend(),
        *_torch_glue(),
        _optional("safetensors", "spccl.sync", "'safetensors>=0.8'"),
        Entry(
            "python",
            "weight sync memory",
            "base 1x, staged 1/8",
            "of the weights as they travel: a publisher's base, and at most so much for its frames, or for a "
            "subscriber's frames and old values (staging_bytes); of a running publisher: stats()",
        ),
        _optional("matplotlib", "spccl plot", "'matplotlib>=3.7'"),
    ]
    return entries


def verdict(entries: list[Entry]) -> str:
    """One line: what can be used on this machine, and the reason for what cannot. Details are in the entries."""
    found = {(e.kind, e.name): e for e in entries}
    chosen = next((e.name for e in entries if e.kind == "kernels" and "chosen" in e.value), None)
    torch, registered = found["python", "torch"], found["python", "torch backend"]
    glue = found.get(("python", "torch glue"), registered)
    why_not_torch = next((e.why for e in (torch, registered, glue) if e.value == "absent"), None)
    cuda, ib = found["part", "cuda"], found["transport", "ib"]
    n_gpus = re.search(r"; (\d+) GPUs? here", cuda.why)
    if n_gpus is not None:
        gpus = f"yes ({n_gpus[1]})" if n_gpus[1] != "0" else "no: this machine has none"
    elif cuda.value == "absent":
        gpus = f"no: {_cause(cuda.why).replace('not in this build', 'built without CUDA')}"
    else:
        gpus = "no: " + cuda.why.partition("; ")[2]
    return "; ".join(
        (
            f"ready: CPU yes ({chosen})" if chosen else "not ready: CPU no: SPCCL_DEBUG_CPU_ISA names an absent one",
            f"PyTorch yes ({torch.value})" if why_not_torch is None else f"PyTorch no: {_cause(why_not_torch)}",
            f"GPUs {gpus}",
            f"InfiniBand {'yes' if ib.value == 'in, devices usable' else 'no'}: {_cause(ib.why)}",
        )
    )


def _cause(why: str) -> str:
    """The part of a reason before what to do about it."""
    return re.split(r"; | \(|: (?=put|pip)", why)[0]


def as_json() -> list[dict[str, Any]]:
    """`info` as plain dictionaries."""
    return [dataclasses.asdict(entry) for entry in info()]
