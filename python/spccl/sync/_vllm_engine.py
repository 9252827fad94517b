"""The engine "spccl" of vLLM: one object in each worker process. vLLM imports this module; nothing else does."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from spccl.errors import ArgumentError, UnsupportedError

from ._replica import OneWorker, Replica, TorchWorkers, Workers


@dataclasses.dataclass
class SpcclInitInfo(WeightTransferInitInfo):
    """What /init_weight_transfer_engine takes. folder: None: that of the server's --additional-config."""

    folder: str | None = None
    timeout_s: float = 270.0


@dataclasses.dataclass
class SpcclUpdateInfo(WeightTransferUpdateInfo):
    """What /update_weights takes. action: "update", or "stage": begin to read, return at once."""

    version: int
    action: str = "update"
    timeout_s: float = 270.0

    def __post_init__(self) -> None:
        if self.action not in ("update", "stage"):
            raise ValueError(f"spccl: action {self.action!r}: wanted update or stage")


class SpcclWeightTransferEngine(WeightTransferEngine[SpcclInitInfo, SpcclUpdateInfo]):
    """Puts the versions of a folder into the weights of a vLLM worker, in place, where they lie.

    Start and finish of an update do nothing here: `update_weights` writes all of a version or none of it, on all
    workers. See Replica.
    """

    init_info_cls = SpcclInitInfo
    update_info_cls = SpcclUpdateInfo
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module):
        super().__init__(config, vllm_config, device, model)
        self._replica: Replica | None = None

    def init_transfer_engine(self, init_info: SpcclInitInfo) -> None:
        folder = _folder_of(self.vllm_config, init_info.folder)
        if self._replica is None:
            self._replica = Replica("vllm", self.model, self._checkpoint, _workers())
        self._replica.open(folder, init_info.timeout_s)

    def _checkpoint(self) -> Iterable[tuple[str, torch.Tensor]]:
        """What vLLM has loaded. Raises: UnsupportedError that names what quantizes or repacks."""
        require_plain(self.model, self.model_config)
        return _read_checkpoint(self.vllm_config, self.model)

    def start_weight_update(self) -> None:
        """Nothing."""

    def finish_weight_update(self) -> None:
        """Nothing."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: SpcclUpdateInfo) -> None:
        if self._replica is None:
            raise ArgumentError("vllm: update before init: POST /init_weight_transfer_engine names the folder")
        call = self._replica.stage if update_info.action == "stage" else self._replica.update
        call(update_info.version, update_info.timeout_s)

    def shutdown(self) -> None:
        if self._replica is not None:
            self._replica.close()


def _folder_of(vllm_config: Any, asked: str | None) -> str:
    """The folder of the server's own configuration if it has one, else what the client asks for."""
    config = getattr(vllm_config, "additional_config", None)
    mine = config.get("spccl", {}).get("folder") if isinstance(config, dict) else None
    if mine is not None and asked is not None and asked != mine:
        raise ArgumentError(f"vllm: folder {asked!r}: this server was started with {mine!r} and takes no other")
    if mine is None and asked is None:
        raise ArgumentError("vllm: no folder: give one to VllmClient, or start the server with --additional-config")
    return str(asked if mine is None else mine)


def _workers() -> Workers:
    from vllm.distributed.parallel_state import get_world_group

    group = get_world_group()
    return OneWorker() if group.world_size == 1 else TorchWorkers(group.cpu_group)


def _read_checkpoint(vllm_config: Any, model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    from vllm.model_executor.model_loader import get_model_loader

    load_config = vllm_config.load_config
    read: Callable[..., Any] | None = getattr(get_model_loader(load_config), "get_all_weights", None)
    if read is None:
        raise UnsupportedError(
            f"vllm: load_format {load_config.load_format!r}: there is no checkpoint to compare the weights with: "
            "start the server with the checkpoint that training begins with"
        )
    return read(vllm_config.model_config, model)


def require_plain(model: torch.nn.Module, model_config: Any) -> None:
    """Raises: UnsupportedError that names what is made from the weights after loading: an update would not reach it."""
    if getattr(model_config, "quantization", None):
        raise UnsupportedError(
            f"vllm: quantization {model_config.quantization!r}: quantized after loading, cannot be updated in place: "
            "serve an unquantized model"
        )
    known = {x.untyped_storage().data_ptr() for x in (*model.parameters(), *model.buffers())}
    for name, module in model.named_modules():
        linear = vars(module).get("cpu_linear", torch.nn.functional.linear)
        if linear is not torch.nn.functional.linear:
            raise UnsupportedError(f"vllm: layer {name!r}: vLLM on CPUs packs its weight: cannot be updated in place")
        for key, x in vars(module).items():
            is_made = isinstance(x, torch.Tensor) and x.is_floating_point() and x.dim() >= 2 and key != "kv_cache"
            if is_made and x.numel() and x.untyped_storage().data_ptr() not in known:
                raise UnsupportedError(
                    f"vllm: layer {name!r}: its {key!r} was made from the weights after loading: cannot be updated in "
                    "place"
                )
