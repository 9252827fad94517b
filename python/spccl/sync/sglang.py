"""Weight sync for SGLang: a function for `--custom-weight-loader`, and the tensors that tell it what to do.

    sglang ... --custom-weight-loader spccl.sync.sglang.load
    tensors = spccl.sync.sglang.command("/shared/run1", version, "/models/m")
    engine.begin_weight_update()
    engine.update_weights_from_tensor(tensors, load_format="spccl.sync.sglang.load")
    engine.end_weight_update()

SGLang calls `load` in each of its workers; each reads the folder itself. SGLang is not imported before that.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from spccl.errors import ArgumentError, FormatError, UnsupportedError

from ._replica import OneWorker, Replica, TorchWorkers, Workers, require_nothing_derived

NAME = "spccl"
_replicas: weakref.WeakKeyDictionary[torch.nn.Module, Replica] = weakref.WeakKeyDictionary()


def command(
    folder: str | Path, version: int, checkpoint: str | Path, timeout_s: float = 300.0
) -> list[tuple[str, torch.Tensor]]:
    """What `load` takes as its named tensors: one of bytes.

    Args:
        folder: of the publisher, as the server sees it.
        version: what publish() returned.
        checkpoint: the folder of safetensors files that the server was started with: the first time the weights are
            compared with it.
        timeout_s: the most time that the workers wait for each other and for the folder.
    """
    told = {"folder": str(folder), "version": version, "checkpoint": str(checkpoint), "timeout_s": timeout_s}
    return [(NAME, torch.frombuffer(bytearray(json.dumps(told).encode()), dtype=torch.uint8))]


def load(model: torch.nn.Module, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Put a version into the weights of this worker: all workers of the server take it, or none.

    Raises: StateError on all workers if one of them fails. In SGLang 0.5.23 a loader has no other way to report it, and
        the server then ends: it never serves a mixture, but ends also where its weights are as before.
    """
    told = _told(named_tensors)
    replica = _replicas.get(model)
    if replica is None:
        alive, checkpoint = _Loads(model), Path(told["checkpoint"])
        replica = Replica("sglang", alive, lambda: _read(checkpoint), _workers(), alive.require)
        _replicas[model] = replica
    replica.open(told["folder"], told["timeout_s"])
    replica.update(told["version"], told["timeout_s"])


class _Loads:
    """A model, without holding it: the replica must not keep alive what it is found by."""

    def __init__(self, model: torch.nn.Module):
        self._model = weakref.ref(model)

    def load_weights(self, named: Iterator[tuple[str, torch.Tensor]]) -> Any:
        return self._model().load_weights(named)

    def require(self) -> None:
        require_nothing_derived("sglang", self._model())

    def named_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self._model().named_parameters()


def _told(named_tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, Any]:
    tensors = list(named_tensors)
    if [name for name, _ in tensors] != [NAME]:
        names = [name for name, _ in tensors[:3]]
        raise ArgumentError(f"sglang: tensors {names}: wanted what spccl.sync.sglang.command returns")
    return json.loads(tensors[0][1].cpu().numpy().tobytes())


def _read(checkpoint: Path) -> Iterator[tuple[str, torch.Tensor]]:
    import safetensors

    files = sorted(checkpoint.glob("*.safetensors"))
    if not files:
        raise FormatError(f"sglang: {checkpoint}: no safetensors files: the folder that the server was started with?")
    for path in files:
        with safetensors.safe_open(path, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118 (it is no mapping)
                yield name, opened.get_tensor(name)


def _workers() -> Workers:
    from sglang.srt.distributed import get_pp_group, get_tp_group
    from sglang.srt.runtime_context import get_parallel

    n_replicas = get_parallel().dp_size  # attention's data parallelism lies within the tensor-parallel group
    if n_replicas > 1:
        raise UnsupportedError(
            f"sglang: {n_replicas} data-parallel replicas vote apart and could hold different versions: start a server "
            "for each of them"
        )
    n_stages = get_pp_group().world_size
    if n_stages > 1:
        raise UnsupportedError(
            f"sglang: pipeline of {n_stages} stages: each gets a request after the one before has carried it out, so "
            "they cannot vote together: serve with tensor parallelism alone"
        )
    group = get_tp_group()
    return OneWorker() if group.world_size == 1 else TorchWorkers(group.cpu_group)
