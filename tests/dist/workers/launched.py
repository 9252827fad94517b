"""A small job for a launcher such as torchrun: twice it makes a group from the environment and takes a DDP step."""

from __future__ import annotations

import sys
import warnings

import torch
import torch.distributed as dist
from torch import nn

warnings.simplefilter("ignore")
for _ in range(2):  # torchrun's agent keeps one store: the second group must not read the keys of the first
    dist.init_process_group(sys.argv[1])
    rank, world = dist.get_rank(), dist.get_world_size()
    model = nn.parallel.DistributedDataParallel(nn.Linear(4, 1))
    model(torch.full((2, 4), float(rank))).sum().backward()
    grad = model.module.weight.grad
    assert torch.equal(grad, torch.full((1, 4), 2 * sum(range(world)) / world)), grad
    name = dist.group.WORLD._get_backend(torch.device("cpu")).name()
    assert name == "spccl", name
    dist.destroy_process_group()
print("launched ok", flush=True)
