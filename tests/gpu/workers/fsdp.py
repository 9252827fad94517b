"""spccl.fsdp.prune and SparseSync with FSDP2 on GPUs: against torch's own all-reduce, and sums over steps."""

from __future__ import annotations

import torch
import torch.distributed as dist
from gpu_common import DEVICE, main
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from workers.common import RANK, WORLD, same_bits

from spccl import fsdp
from spccl.optim import SparseSync

N_SHARDS = 2 if WORLD == 4 else 1  # on 2 GPUs: 2 replicas of 1 shard
STEPS = 5


def mesh():
    return init_device_mesh("cuda", (WORLD // N_SHARDS, N_SHARDS), mesh_dim_names=("replicate", "shard"))


def sharded(over, **settings) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(301, 301), nn.Tanh()) for _ in range(6)]
    model = nn.Sequential(*layers, nn.Linear(301, 1)).to(DEVICE)
    for layer in model:
        fully_shard(layer, mesh=over, **settings)
    return fully_shard(model, mesh=over, **settings)


def batch(step: int) -> torch.Tensor:
    return torch.randn(64, 301, generator=torch.Generator().manual_seed(100 * step + RANK)).to(DEVICE)


def train(model: nn.Module, optimizer, steps: range) -> list[torch.Tensor]:
    """Sum of the gradients that arrived, by parameter."""
    sums = [torch.zeros_like(local(p)) for p in model.parameters()]
    for step in steps:
        optimizer.zero_grad()
        x = batch(step)
        (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
        for total, p in zip(sums, model.parameters(), strict=True):
            total += local(p.grad)
        optimizer.step()
    return sums


def local(x) -> torch.Tensor:
    return x.detach().to_local()


def same_weights(a: nn.Module, b: nn.Module, what: str) -> None:
    for (name, p), q in zip(a.named_parameters(), b.parameters(), strict=True):
        same_bits(local(p).cpu(), local(q).cpu(), f"{what}: {name}")


def density_one_equals_torch():
    """A bfloat16 reduction also shows whether torch reuses a gradient's memory while the hook's stream uses it."""
    over = mesh()
    for reduce_dtype in (torch.float32, torch.bfloat16):
        models = [sharded(over, mp_policy=MixedPrecisionPolicy(reduce_dtype=reduce_dtype)) for _ in range(2)]
        hook = fsdp.prune(models[1], density=1.0)
        for model in models:
            train(model, torch.optim.SGD(model.parameters(), lr=1e-3), range(STEPS))
        same_weights(*models, str(reduce_dtype))
        assert hook.step == STEPS


def nothing_is_lost():
    """With a learning rate of 0 gradients do not depend on what was sent: sent and kept add up to the dense sum."""
    over = mesh()
    dense, pruned = sharded(over), sharded(over)
    hook = fsdp.prune(pruned, density=0.01, norm_every=1)
    wanted, got = (train(m, torch.optim.SGD(m.parameters(), lr=0.0), range(STEPS)) for m in (dense, pruned))
    state = hook.state_dict()["parameters"]
    replicas = over.get_group("replicate")
    for (name, _), want, total in zip(pruned.named_parameters(), wanted, got, strict=True):
        if state.get(name, {}).get("residual") is not None:
            held = state[name]["residual"].to(DEVICE)
            dist.all_reduce(held, group=replicas)
            total = total + held.view(total.shape) / dist.get_world_size(replicas)
        torch.testing.assert_close(total, want, rtol=1e-3, atol=1e-3 * float(want.abs().max()) if want.numel() else 0)
    stats = hook.stats()
    assert 0.005 < stats["density_pruned"] < 0.02 and stats["residual_ratio"] > 0, stats


def clips_and_resumes():
    over = mesh()
    settings = {"momentum": 0.5, "warmup_steps": 3, "clip_norm": 1.0}
    straight, model, again = sharded(over), sharded(over), sharded(over)
    fsdp.prune(straight, 0.05, **settings)
    train(straight, torch.optim.SGD(straight.parameters(), lr=1e-3), range(6))
    hook = fsdp.prune(model, 0.05, **settings)
    train(model, torch.optim.SGD(model.parameters(), lr=1e-3), range(3))
    again.load_state_dict(model.state_dict())
    second = fsdp.prune(again, 0.05, **settings)
    second.load_state_dict(hook.state_dict())
    train(again, torch.optim.SGD(again.parameters(), lr=1e-3), range(3, 6))
    same_weights(straight, again, "resumed")


def sparse_sync_between_replicas():
    over = mesh()
    model = sharded(over["shard"])
    group = over.get_group("replicate")
    opt = SparseSync(torch.optim.AdamW(model.parameters(), lr=1e-3), 0.05, group=group, clip_norm=1.0)
    train(model, opt, range(STEPS))
    with torch.no_grad():
        mine = model(batch(0))
        with opt.global_weights():
            model(batch(0))
        same_bits(model(batch(0)).cpu(), mine.cpu(), "local weights after an evaluation")
    opt.check()


if __name__ == "__main__":
    main([density_one_equals_torch, nothing_is_lost, clips_and_resumes, sparse_sync_between_replicas], engine=False)
