"""The engine "spccl" of vLLM: one object in each worker process. vLLM imports this module; nothing else does."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from spccl.errors import ArgumentError, StateError, UnsupportedError

from ._replica import OPEN, OneWorker, Replica, TorchWorkers, Workers, agreed, is_agreed, require_nothing_derived

MOST_TIMEOUT_S = 86400


@dataclasses.dataclass
class SpcclInitInfo(WeightTransferInitInfo):
    """What /init_weight_transfer_engine takes.

    folder: None: that of the server's --additional-config. world_size: what /get_world_size says; None: unknown.
    """

    folder: str | None = None
    timeout_s: float = 270.0
    world_size: int | None = None

    def __post_init__(self) -> None:
        _require_time(self.timeout_s)
        if not (self.folder is None or isinstance(self.folder, str)):
            raise ValueError(f"spccl: folder {self.folder!r}: wanted a path")
        if not (self.world_size is None or _is_count(self.world_size)):
            raise ValueError(f"spccl: world_size {self.world_size!r}: wanted a number of workers")


@dataclasses.dataclass
class SpcclUpdateInfo(WeightTransferUpdateInfo):
    """What /update_weights takes. action: "update", or "stage": begin to read, return at once."""

    version: int
    action: str = "update"
    timeout_s: float = 270.0

    def __post_init__(self) -> None:
        if self.action not in ("update", "stage"):
            raise ValueError(f"spccl: action {self.action!r}: wanted update or stage")
        _require_time(self.timeout_s)
        if not _is_count(self.version):
            raise ValueError(f"spccl: version {self.version!r}: wanted what publish() returned")


def _is_count(x: Any) -> bool:
    return isinstance(x, int) and not isinstance(x, bool) and x >= 1


def _require_time(timeout_s: Any) -> None:
    """Requests are JSON from anyone: "30" and NaN come in too."""
    is_number = isinstance(timeout_s, (int, float)) and not isinstance(timeout_s, bool)
    if not (is_number and 0 < timeout_s <= MOST_TIMEOUT_S):
        raise ValueError(f"spccl: timeout_s {timeout_s!r}: wanted seconds, above 0, at most {MOST_TIMEOUT_S}")


class SpcclWeightTransferEngine(WeightTransferEngine[SpcclInitInfo, SpcclUpdateInfo]):
    """Puts the versions of a folder into the weights of a vLLM worker, in place, where they lie.

    `update_weights` writes all of a version or none of it, on all workers: see Replica.

    Where the workers agree that a call failed, only the last of them raises, and the others return. Up to 0.33 vLLM
    reads the workers' answers up to the first error and leaves the rest, so that after an error of all workers each
    later call would get an answer of the one before. Then the last worker's session is closed and those of the others
    are open: the client's `finish` closes them.
    """

    init_info_cls = SpcclInitInfo
    update_info_cls = SpcclUpdateInfo
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module):
        super().__init__(config, vllm_config, device, model)
        self._replica: Replica | None = None
        self._is_updating = False  # as vLLM's worker sees it: since start, until finish or an error

    def parse_init_info(self, init_dict: dict[str, Any]) -> Any:
        return init_dict  # vLLM calls this on all workers: `init_transfer_engine` raises what it would

    def init_transfer_engine(self, init_info: dict[str, Any]) -> None:
        with self._reported():
            info = self._checked(super().parse_init_info, init_info)
            if self._replica is None:
                self._replica = Replica(
                    "vllm",
                    self.model,
                    lambda: _read_checkpoint(self.vllm_config, self.model),
                    _workers(),
                    lambda: require_plain(self.model, self.model_config),
                )
            _require_all(self._replica.workers.size, info.world_size)
            folder = self._checked(_folder_of, self.vllm_config, info.folder)
            if self._replica.open(folder, info.timeout_s, self._is_updating):
                raise agreed(StateError(f"vllm: {OPEN}: POST /finish_weight_update, then start"))

    def start_weight_update(self) -> None:
        self._is_updating = True

    def finish_weight_update(self) -> None:
        self._is_updating = False

    def update_weights(self, update_info: dict[str, Any]) -> None:
        try:
            with self._reported():
                self.receive_weights(self._checked(self.parse_update_info, update_info))
        except BaseException:
            self._is_updating = False
            raise

    def receive_weights(self, update_info: SpcclUpdateInfo) -> None:
        if self._replica is None:
            raise agreed(ArgumentError("vllm: update before init: POST /init_weight_transfer_engine names the folder"))
        call = self._replica.stage if update_info.action == "stage" else self._replica.update
        call(update_info.version, update_info.timeout_s)

    def shutdown(self) -> None:
        if self._replica is not None:
            self._replica.close()

    @contextlib.contextmanager
    def _reported(self) -> Iterator[None]:
        """Of an error that all workers have, the last worker alone raises."""
        try:
            yield
        except Exception as error:
            size = self.parallel_config.world_size  # of one executor: with data parallelism there are several
            if not is_agreed(error) or _rank() % size == size - 1:
                raise

    @staticmethod
    def _checked(call: Callable[..., Any], *args: Any) -> Any:
        """What a call returns that depends on the request alone, so that it fails on all workers or on none."""
        try:
            return call(*args)
        except ValueError as error:
            raise agreed(ArgumentError(f"vllm: {error}")) from error


def _folder_of(vllm_config: Any, asked: str | None) -> str:
    """The folder of the server's own configuration if it has one, else what the client asks for."""
    config = getattr(vllm_config, "additional_config", None)
    mine = config.get("spccl", {}).get("folder") if isinstance(config, dict) else None
    if mine is not None and asked is not None and asked != mine:
        raise ArgumentError(f"vllm: folder {asked!r}: this server was started with {mine!r} and takes no other")
    if mine is None and asked is None:
        raise ArgumentError("vllm: no folder: give one to VllmClient, or start the server with --additional-config")
    return str(asked if mine is None else mine)


def _require_all(n_voters: int, world_size: int | None) -> None:
    """Raises: UnsupportedError if some workers of the server do not vote with this one."""
    if world_size is not None and world_size != n_voters:
        raise agreed(
            UnsupportedError(
                f"vllm: the server has {world_size} workers, {n_voters} of them vote together: its data-parallel "
                "engines could take different versions: start a server for each of them"
            )
        )


def _rank() -> int:
    from vllm.distributed.parallel_state import get_world_group

    return get_world_group().rank_in_group


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
    for name, module in model.named_modules():
        linear = vars(module).get("cpu_linear", torch.nn.functional.linear)
        if linear is not torch.nn.functional.linear:
            raise UnsupportedError(f"vllm: layer {name!r}: vLLM on CPUs packs its weight: cannot be updated in place")
    require_nothing_derived("vllm", model)
