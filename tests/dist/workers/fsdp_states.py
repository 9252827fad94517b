"""spccl.fsdp.prune on 4 ranks: states that are saved and loaded, and what counts as a step."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from spccl import fsdp
from workers import fsdp as base
from workers.common import RANK, WORLD, main, raises
from workers.fsdp import SHARD, batch, local, net, same_weights, sharded, train


def resumes() -> None:
    settings = {"momentum": 0.5, "min_numel": 500, "warmup_steps": 3, "clip_norm": 1.0}
    straight = sharded(net())
    fsdp.prune(straight, 0.05, **settings)
    train(straight, range(6))
    model = sharded(net())
    hook = fsdp.prune(model, 0.05, **settings)
    train(model, range(3))
    saved, weights = hook.state_dict(), model.state_dict()
    again = sharded(net())
    again.load_state_dict(weights)
    hook = fsdp.prune(again, 0.05, **settings)
    hook.load_state_dict(saved)
    train(again, range(3, 6))
    same_weights(straight, again, "resumed")
    entry = saved["parameters"]["0.weight"]
    assert entry["residual"].shape == local(again[0].weight).shape
    old = {**saved, "version": 1, "parameters": {"0.weight": {**entry, "residual": entry["residual"].flatten()}}}
    old["parameters"]["0.weight"]["velocity"] = entry["velocity"].flatten()
    hook.load_state_dict(old)
    for key in ("residual", "velocity"):
        assert torch.equal(hook.state_dict()["parameters"]["0.weight"][key], entry[key]), key
    wrong = {**saved, "parameters": {"0.weight": {**entry, "residual": entry["residual"].t()}}}
    with raises(ValueError, f"PrunedShards.load_state_dict: rank {RANK}: residual of '0.weight' has shape (20, "):
        hook.load_state_dict(wrong)
    with raises(ValueError, f"state of shard ({1 - SHARD}, 2)", "load the file that this rank saved"):
        hook.load_state_dict({**saved, "shard": (1 - SHARD, 2)})
    with raises(ValueError, "state of 3 ranks", "PrunedShards.reshard(states, 2)"):
        hook.load_state_dict({**saved, "world_size": 3})
    states = [None, None]
    dist.all_gather_object(states, saved, group=base.mesh.get_group("replicate"))
    one = hook.reshard(states, 1)[0]
    total = sum(s["parameters"]["0.weight"]["residual"] for s in states)
    torch.testing.assert_close(one["parameters"]["0.weight"]["residual"], total / 2)
    assert one["shard"] == (SHARD, 2)


class Reversed(torch.nn.Sequential):
    """Runs its layers from the last to the first, so that the backward pass reaches bucket 0 first."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in reversed(self):
            x = layer(x)
        return x


def resumes_with_one_shard() -> None:
    """4 replicas of 1 shard: the first bucket after the load is clipped by the norms of all buckets."""
    replicas = init_device_mesh("cpu", (WORLD, 1), mesh_dim_names=("replicate", "shard"))

    def made() -> tuple[torch.nn.Module, fsdp.PrunedShards]:
        torch.manual_seed(0)
        layers = torch.nn.Linear(30, 1), torch.nn.Tanh(), torch.nn.Linear(61, 30), torch.nn.Linear(20, 61)
        model = sharded(Reversed(*layers), over=replicas)
        return model, fsdp.prune(model, 0.05, min_numel=500, clip_norm=0.1)

    straight, hook = made()
    train(straight, range(3))
    saved, weights = hook.state_dict(), {name: p.clone() for name, p in straight.state_dict().items()}
    train(straight, range(3, 5))
    again, hook = made()
    again.load_state_dict(weights)
    hook.load_state_dict(saved)
    train(again, range(3, 5))
    same_weights(straight, again, "resumed with one shard")


class Checkpointed(torch.nn.Sequential):
    """Each layer runs again in the backward pass."""

    reentrant = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self:
            x = checkpoint(layer, x, use_reentrant=self.reentrant)
        return x


def activation_checkpoints() -> None:
    """One backward pass is one step. Reentrant checkpoints, each with a backward pass of its own, are refused."""
    for reentrant in (False, True):
        model = sharded(Checkpointed(torch.nn.Linear(20, 61), torch.nn.Linear(61, 30), torch.nn.Linear(30, 1)))
        model.reentrant = reentrant
        hook = fsdp.prune(model, 0.05, min_numel=500)
        x, y = batch(0)
        loss = (model(x.requires_grad_()) - y).square().mean()
        if reentrant:
            with raises(RuntimeError, f"rank {RANK}", "inside the backward pass", "use_reentrant=False"):
                loss.backward()
        else:
            loss.backward()
            assert hook.step == 1


CASES = [resumes, resumes_with_one_shard, activation_checkpoints]

if __name__ == "__main__":
    torch.set_num_threads(1)
    main([base.with_mesh(c) for c in CASES])
