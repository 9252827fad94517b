"""SparseSync where FSDP2 shards a model over 2 ranks, and 2 such replicas average their changes."""

from __future__ import annotations

import math

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from spccl.optim import SparseSync
from workers.common import RANK, WORLD, main

REPLICA = RANK // 2


def net() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(60, 81), torch.nn.Tanh(), torch.nn.Linear(81, 70))


def data(replica: int, step: int) -> torch.Tensor:
    return torch.randn(8, 60, generator=torch.Generator().manual_seed(100 * step + replica))


def sharded_replicas() -> None:
    """All sent: both replicas have the average of two unsharded models' steps. Then 5% sent, with AdamW."""
    assert WORLD == 4
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
    model, plain = net(), net()
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])
    group = mesh.get_group("replica")
    opt = SparseSync(torch.optim.SGD(model.parameters(), lr=0.5), density=1.0, group=group, min_numel=100)
    for step in range(3):
        opt.zero_grad()
        model(data(REPLICA, step)).square().mean().backward()
        opt.step()
        grads = [
            torch.autograd.grad(plain(data(replica, step)).square().mean(), list(plain.parameters()))
            for replica in (0, 1)
        ]
        with torch.no_grad():
            for p, a, b in zip(plain.parameters(), *grads, strict=True):
                p -= 0.5 * (a + b) / 2
    for sharded, whole in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(sharded.full_tensor(), whole, atol=1e-6)
    opt = SparseSync(torch.optim.AdamW(model.parameters(), lr=1e-2), density=0.05, group=group, min_numel=100)
    for step in range(4):
        opt.zero_grad()
        model(data(REPLICA, step)).square().mean().backward()
        opt.step()
    opt.check()
    opt.load_state_dict(opt.state_dict())
    assert 0.04 < opt.summary()["density_sent"] < 0.2
    with opt.global_weights():
        assert all(math.isfinite(float(p.full_tensor().norm())) for p in model.parameters())


if __name__ == "__main__":
    torch.set_num_threads(1)
    main([sharded_replicas])
