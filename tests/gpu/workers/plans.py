"""A plan that GPUs cannot run: the all_reduce of examples/schedules/ring.py."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from gpu_common import DEVICE, main
from workers.common import RANK, WORLD


def ring() -> None:
    gathered = torch.empty(WORLD * 1000, device=DEVICE)
    dist.all_gather_into_tensor(gathered, torch.full((1000,), float(RANK), device=DEVICE))  # GPUs run this one
    assert gathered[::1000].tolist() == [float(r) for r in range(WORLD)]
    x = torch.ones(1000, device=DEVICE)
    try:
        dist.all_reduce(x)
        assert os.environ["SPCCL_CUDA_ROUTE"] == "auto+stage"
        assert x.tolist() == [float(WORLD)] * 1000
    except NotImplementedError as error:
        assert os.environ["SPCCL_CUDA_ROUTE"] == "auto", error
        assert "plan ring of ring.plan cannot run on GPUs: rank 0, step " in str(error), error
        assert x.tolist() == [1.0] * 1000
    dist.barrier()


if __name__ == "__main__":
    main([ring])
