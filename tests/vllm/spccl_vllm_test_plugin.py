"""A plugin of vLLM that the tests' servers load: linear layers on CPUs keep their weights, workers save parameters."""

from __future__ import annotations

from typing import Any

import torch


def register() -> None:
    from vllm.model_executor.layers import utils
    from vllm.v1.worker.gpu_worker import Worker

    utils.dispatch_cpu_unquantized_gemm = _keep
    Worker.spccl_test_save, Worker.spccl_test_fail_once = _save, _fail_once


def _keep(layer: torch.nn.Module, remove_weight: bool) -> None:
    """In place of what packs the weights of a layer and deletes them."""
    layer.cpu_linear = torch.nn.functional.linear


def _save(worker: Any, folder: str) -> None:
    model = worker.get_model()
    tensors = {name: x.detach().clone() for name, x in model.named_parameters()}
    torch.save(tensors, f"{folder}/rank{worker.rank}.pt")


def _fail_once(worker: Any, rank: int) -> None:
    """The next change that this rank applies is applied, and then fails."""
    if worker.rank != rank:
        return
    from spccl.sync import delta

    apply = delta.apply

    def fail(*args: Any) -> None:
        delta.apply = apply
        apply(*args)
        raise RuntimeError("the test's own failure")

    delta.apply = fail
