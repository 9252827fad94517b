"""A vLLM server on CPUs for tests: started, asked over HTTP, ended with all its processes.

vLLM's linear layers on CPUs pack their weights and delete them. A plugin of the test, of the same kind as spccl's,
makes them keep the weights, and gives the workers a method that saves their parameters.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import torch

START_S, ANSWER_S = 500, 120
ENTRY_POINTS = "[vllm.general_plugins]\nspccl_test = spccl_vllm_test_plugin:register\n"
PLUGIN = Path(__file__).with_name("spccl_vllm_test_plugin.py")


class Server:
    """A running server. `call` asks one of its routes."""

    def __init__(self, port: int, process: subprocess.Popen[bytes], log: Path):
        self.url, self.process, self.log = f"http://127.0.0.1:{port}", process, log

    def call(self, route: str, body: dict[str, Any] | None = None, timeout_s: float = ANSWER_S) -> Any:
        data = None if body is None else json.dumps(body).encode()
        asked = urllib.request.Request(f"{self.url}/{route}", data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(asked, timeout=timeout_s) as answer:
            text = answer.read()
        return json.loads(text) if text else None

    def tokens(self, prompt: list[int]) -> list[int]:
        """What the model answers to tokens, greedily."""
        body = {"prompt": prompt, "max_tokens": 12, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
        (choice,) = self.call("v1/completions", {"model": "small", **body})["choices"]
        return choice["token_ids"]

    def parameters(self, folder: Path) -> list[dict[str, torch.Tensor]]:
        """The parameters of each worker."""
        folder.mkdir(parents=True, exist_ok=True)
        self.call("collective_rpc", {"method": "spccl_test_save", "args": [str(folder)]})
        return [torch.load(path) for path in sorted(folder.glob("rank*.pt"))]


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


@contextlib.contextmanager
def serving(model: Path, folder: Path, *options: str, plugin: bool = True, ranks: int = 1) -> Iterator[Server]:
    """Start a server of a model; it ends with the block. `folder` gets its log."""
    folder.mkdir(parents=True, exist_ok=True)
    env = {
        k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"
    }  # else each start compiles all of vLLM
    env.update(VLLM_SERVER_DEV_MODE="1", VLLM_CPU_KVCACHE_SPACE="1", VLLM_NO_USAGE_STATS="1", HF_HUB_OFFLINE="1")
    env.update(OMP_NUM_THREADS="1", VLLM_CPU_OMP_THREADS_BIND="nobind", VLLM_HOST_IP="127.0.0.1", DO_NOT_TRACK="1")
    env.update(PYTHONUNBUFFERED="1", GLOO_SOCKET_IFNAME="lo", VLLM_CACHE_ROOT=str(folder / "cache"))
    if plugin:
        info = folder / "plugin" / "spccl_vllm_test-1.dist-info"
        info.mkdir(parents=True, exist_ok=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: spccl-vllm-test\nVersion: 1\n")
        (info / "entry_points.txt").write_text(ENTRY_POINTS)
        env["PYTHONPATH"] = f"{info.parent}{os.pathsep}{PLUGIN.parent}"
    port, log = free_port(), folder / "server.log"
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--port", str(port)]
    command += ["--host", "127.0.0.1", "--served-model-name", "small", "--dtype", "bfloat16", "--enforce-eager"]
    command += ["--max-model-len", "64", "--max-num-seqs", "2", "--tensor-parallel-size", str(ranks), *options]
    with open(log, "wb") as out:
        process = subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT)
    try:
        server = Server(port, process, log)
        _wait(server)
        yield server
    except BaseException:
        print(f"---- the end of {log}\n" + "\n".join(log.read_text(errors="replace").splitlines()[-60:]))
        raise
    finally:
        _end(process)


def _wait(server: Server) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        if server.process.poll() is not None:
            raise RuntimeError(f"the server ended with status {server.process.returncode}")
        with contextlib.suppress(OSError):
            server.call("health", timeout_s=2)
            return
        time.sleep(0.2)
    raise RuntimeError(f"the server was not up within {START_S} s")


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the server and all processes that it started."""
    with contextlib.suppress(psutil.NoSuchProcess):
        top = psutil.Process(process.pid)
        mine = [top, *top.children(recursive=True)]
        process.terminate()
        _, left = psutil.wait_procs(mine, 20)
        for one in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
        _, left = psutil.wait_procs(left, 20)
        if left:
            raise RuntimeError(f"processes of the server are left: {left}")
    process.wait(20)
