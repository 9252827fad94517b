"""Stubs of what spccl.sync uses of vLLM 0.29.0 and 0.33.0: the same names, signatures and order of calls.

Read in the wheels vllm-0.29.0 and vllm-0.33.0: distributed/weight_transfer/{base,factory}.py,
v1/worker/gpu_worker.py, entrypoints/serve/dev/rlhf/api_router.py (0.29.0), entrypoints/rl/online/api_router.py. What
differs for an engine: 0.29.0 asks for a body with "init_info" and "update_info" by hand, and picks the entry of a list
by data_parallel_rank, 0.33.0 by data_parallel_index; 0.33.0 can shut the engine down and use it again.
"""

from __future__ import annotations

import abc
import collections
import dataclasses
import http.server
import json
import socketserver
import sys
import threading
import types
import typing
from collections.abc import Iterable
from typing import Any

import torch

VERSIONS = ("0.29.0", "0.33.0")
Init, Update = typing.TypeVar("Init"), typing.TypeVar("Update")


class WeightTransferInitInfo(abc.ABC):  # noqa: B024 (vLLM's own)
    pass


class WeightTransferUpdateInfo(abc.ABC):  # noqa: B024
    pass


class WeightTransferEngine(abc.ABC, typing.Generic[Init, Update]):
    init_info_cls: type
    update_info_cls: type
    supports_draft_weight_update = True

    def __init__(self, config, vllm_config, device, model):
        self.config, self.vllm_config, self.device, self.model = config, vllm_config, device, model
        self.parallel_config, self.model_config = vllm_config.parallel_config, vllm_config.model_config

    def set_weight_update_target(self, model, model_config):
        self.model, self.model_config = model, model_config

    def reset_weight_update_target(self):
        pass

    def parse_init_info(self, init_dict):
        try:
            return self.init_info_cls(**init_dict)
        except TypeError as error:
            raise ValueError(f"Invalid init_info for {type(self).__name__}: {error}") from error

    def parse_update_info(self, update_dict):
        try:
            return self.update_info_cls(**update_dict)
        except TypeError as error:
            raise ValueError(f"Invalid update_info for {type(self).__name__}: {error}") from error

    @abc.abstractmethod
    def init_transfer_engine(self, init_info): ...

    @abc.abstractmethod
    def start_weight_update(self): ...

    @abc.abstractmethod
    def finish_weight_update(self): ...

    def update_weights(self, update_info):
        self.receive_weights(self.parse_update_info(update_info))
        torch.accelerator.synchronize()  # raises where there is no accelerator

    @abc.abstractmethod
    def receive_weights(self, update_info): ...

    @abc.abstractmethod
    def shutdown(self): ...


class Factory:
    """vLLM's WeightTransferEngineFactory."""

    def __init__(self):
        self._registry = {}

    def register_engine(self, name, module_path_or_cls, class_name=None):
        if name in self._registry:
            raise ValueError(f"Weight transfer engine '{name}' is already registered.")
        self._registry[name] = module_path_or_cls, class_name

    def create_engine(self, config, vllm_config, device, model):
        module, name = self._registry[config.backend]
        return getattr(__import__(module, fromlist=[name]), name)(config, vllm_config, device, model)


@dataclasses.dataclass
class Checkpoint:
    """vLLM's loader of the model's own checkpoint."""

    tensors: dict[str, torch.Tensor]

    def get_all_weights(self, model_config: Any, model: torch.nn.Module) -> Iterable[tuple[str, torch.Tensor]]:
        yield from self.tensors.items()


def install(monkeypatch, loader: Any) -> Factory:
    """Put the stubs where `import vllm...` finds them. Returns the factory."""
    factory = Factory()
    base = {
        "WeightTransferEngine": WeightTransferEngine,
        "WeightTransferInitInfo": WeightTransferInitInfo,
        "WeightTransferUpdateInfo": WeightTransferUpdateInfo,
    }
    world = types.SimpleNamespace(world_size=1, rank_in_group=0, cpu_group=None)
    for name, content in {
        "vllm": {},
        "vllm.distributed": {},
        "vllm.distributed.weight_transfer": {"WeightTransferEngineFactory": factory},
        "vllm.distributed.weight_transfer.base": base,
        "vllm.distributed.parallel_state": {"get_world_group": lambda: world},
        "vllm.model_executor": {},
        "vllm.model_executor.model_loader": {"get_model_loader": lambda load_config: loader},
    }.items():
        module = types.ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "spccl.sync._vllm_engine", raising=False)
    return factory


class Worker:
    """vLLM's Worker, as far as weights go. rank: its place in a list of update infos."""

    def __init__(self, version: str, factory: Factory, model: torch.nn.Module, world_size: int = 1, **config: Any):
        parallel = types.SimpleNamespace(world_size=world_size, data_parallel_size=1)
        setattr(parallel, "data_parallel_rank" if version == "0.29.0" else "data_parallel_index", 0)
        vllm_config = types.SimpleNamespace(
            parallel_config=parallel,
            model_config=types.SimpleNamespace(quantization=None, dtype=torch.bfloat16),
            load_config=types.SimpleNamespace(load_format="auto"),
            additional_config={},
        )
        for name, value in config.items():
            owner = vllm_config.model_config if name == "quantization" else vllm_config
            setattr(owner, name, value)
        config = types.SimpleNamespace(backend="spccl")
        self.engine = factory.create_engine(config, vllm_config, torch.device("cpu"), model)
        self.version, self.parallel, self.rank, self.is_active = version, parallel, 0, False

    def init_weight_transfer_engine(self, init_info):
        self.engine.init_transfer_engine(self.engine.parse_init_info(init_info))

    def start_weight_update(self):
        if self.is_active:
            raise RuntimeError("start_weight_update called while a weight update is already active. Call finish first.")
        self.engine.start_weight_update()
        self.is_active = True

    def update_weights(self, update_info):
        if not self.is_active:
            raise RuntimeError("start_weight_update must be called before update_weights.")
        try:
            if isinstance(update_info, list):
                replica = "data_parallel_rank" if self.version == "0.29.0" else "data_parallel_index"
                update_info = update_info[getattr(self.parallel, replica) * self.parallel.world_size + self.rank]
            self.engine.update_weights(update_info)
        except BaseException:
            self.is_active = False
            self.engine.reset_weight_update_target()
            raise

    def finish_weight_update(self):
        if not self.is_active:
            raise RuntimeError("finish_weight_update called without a matching start_weight_update.")
        self.engine.finish_weight_update()
        self.engine.reset_weight_update_target()
        self.is_active = False


class Executor:
    """vLLM's MultiprocExecutor: workers answer through a queue each; it stops reading at the first error.

    Args: groups: what each worker votes over. Its threads are the workers.
    """

    def __init__(self, workers: list[Worker], groups: list[Any]):
        self.workers, self.groups = workers, groups
        self.answers: list[collections.deque[BaseException | None]] = [collections.deque() for _ in workers]

    def group_of_thread(self) -> Any:
        rank = int(threading.current_thread().name.removeprefix("worker"))
        return types.SimpleNamespace(world_size=len(self.workers), rank_in_group=rank, cpu_group=self.groups[rank])

    def call(self, method: str, *args: Any) -> None:
        threads = [
            threading.Thread(target=self._work, args=(rank, method, args), name=f"worker{rank}")
            for rank in range(len(self.workers))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for queue in self.answers:
            error = queue.popleft()
            if error is not None:
                raise RuntimeError(f"Worker failed with error '{error}'")

    def _work(self, rank: int, method: str, args: Any) -> None:
        try:
            getattr(self.workers[rank], method)(*args)
            self.answers[rank].append(None)
        except Exception as error:
            self.answers[rank].append(error)

    def init_weight_transfer_engine(self, init_info):
        self.call("init_weight_transfer_engine", init_info)

    def start_weight_update(self):
        self.call("start_weight_update")

    def update_weights(self, update_info):
        self.call("update_weights", update_info)

    def finish_weight_update(self):
        self.call("finish_weight_update")


class Http:
    """vLLM's routes of VLLM_SERVER_DEV_MODE=1 before a worker, or several. calls: the routes asked, in order."""

    def __init__(self, worker: Worker | Executor):
        self.worker, self.calls, self.weight_version, self.is_paused = worker, [], "default", False
        self.world_size = len(getattr(worker, "workers", [worker]))
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                self._answer()

            def do_POST(self):
                self._answer()

            def _answer(self):
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                try:
                    status, found = 200, outer.answer(self.path.lstrip("/"), json.loads(body or b"{}"))
                except LookupError as error:
                    status, found = 404, {"detail": str(error)}
                except Exception as error:  # as its handler of exceptions does
                    text = f"Call to collective_rpc method failed: {error}"
                    status, found = 500, {"error": {"message": text, "type": "InternalServerError", "code": 500}}
                text = json.dumps(found).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            def log_message(self, *args):
                pass

        self._server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler)  # HTTPServer would ask the DNS
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    def __enter__(self) -> Http:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def answer(self, route: str, body: dict[str, Any]) -> dict[str, Any]:
        self.calls.append(route)
        route, _, query = route.partition("?")
        if route in ("pause", "resume"):
            self.is_paused = route == "pause"
            if self.is_paused and query not in ("mode=keep", "mode=wait", "mode=abort"):
                raise ValueError(query)
        elif route == "init_weight_transfer_engine":
            self.worker.init_weight_transfer_engine(_field(body, "init_info"))
        elif route == "update_weights":
            self.worker.update_weights(_field(body, "update_info"))
        elif route == "start_weight_update":
            self.worker.start_weight_update()
        elif route == "finish_weight_update":
            self.worker.finish_weight_update()
            if body.get("weight_version") is not None:
                self.weight_version = body["weight_version"]
        elif route == "get_world_size":
            return {"world_size": self.world_size}
        elif route == "weight_info":
            return {"weight_version": self.weight_version}
        else:
            raise LookupError("Not Found")
        return {"message": "done"}


def _field(body: dict[str, Any], name: str) -> Any:
    if body.get(name) is None:
        raise ValueError(f"Missing {name!r} in request body")
    return body[name]
