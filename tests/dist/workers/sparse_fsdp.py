"""SparseSync where FSDP2 shards a model over 2 ranks, and 2 such replicas average their changes."""

from __future__ import annotations

import copy
import io
import math
import os
import warnings

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from spccl.optim import SparseSync
from workers.common import RANK, WORLD, main, raises, same_bits

REPLICA, SHARD = divmod(RANK, 2)
mesh = None  # (replica, shard)


def net() -> torch.nn.Sequential:
    torch.manual_seed(0)
    layers = torch.nn.Linear(60, 81), torch.nn.Tanh(), torch.nn.Linear(81, 170), torch.nn.Linear(170, 1)
    return torch.nn.Sequential(*layers)  # the last layer is empty on the ranks of shard 1


def sharded(over=None) -> torch.nn.Sequential:
    model = net()
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=over or mesh["shard"])
    return fully_shard(model, mesh=over or mesh["shard"])


def data(replica: int, step: int) -> torch.Tensor:
    return torch.randn(8, 60, generator=torch.Generator().manual_seed(100 * step + replica))


def backward(model, opt, step: int) -> None:
    opt.zero_grad()  # model.zero_grad() misses the root's shards after an evaluation
    model(data(REPLICA, step)).square().mean().backward()


def synced(model, density=0.05, kind=torch.optim.AdamW, lr=1e-2, **settings) -> SparseSync:
    group = mesh.get_group("replica")
    return SparseSync(kind(model.parameters(), lr=lr), density, group=group, min_numel=100, **settings)


def train(model, opt, steps: range) -> None:
    for step in steps:
        backward(model, opt, step)
        opt.step()


def local(p) -> torch.Tensor:
    return p.detach().to_local()


def weights(model) -> torch.Tensor:
    return torch.cat([local(p).flatten() for p in model.parameters()])


# -- cases ---------------------------------------------------------------------------------------------


def sharded_replicas() -> None:
    """All sent: both replicas have the average of two unsharded models' steps. Then 5% sent, with AdamW."""
    model, plain = sharded(), net()
    opt = synced(model, 1.0, torch.optim.SGD, lr=0.5)
    for step in range(3):
        backward(model, opt, step)
        opt.step()
        grads = [
            torch.autograd.grad(plain(data(replica, step)).square().mean(), list(plain.parameters()))
            for replica in (0, 1)
        ]
        with torch.no_grad():
            for p, a, b in zip(plain.parameters(), *grads, strict=True):
                p -= 0.5 * (a + b) / 2
    for shards, whole in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(shards.full_tensor(), whole, atol=1e-6)
    opt = synced(model)
    train(model, opt, range(4))
    opt.check()
    opt.load_state_dict(opt.state_dict())
    assert 0.04 < opt.stats()["density_sent"] < 0.2
    with opt.global_weights():
        assert all(math.isfinite(float(p.full_tensor().norm())) for p in model.parameters())


def nan_in_one_shard() -> None:
    """Both shards of a replica leave out the step; the other replica makes it."""
    model = sharded()
    opt = synced(model, 1.0, torch.optim.SGD, lr=0.5)
    before = weights(model)
    backward(model, opt, 0)
    if RANK == 3:
        local(model[0].weight.grad)[0, 0] = float("nan")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        opt.step()
    assert opt.stats()["skipped_steps"] == REPLICA
    after = weights(model)
    assert after.isfinite().all() and not torch.equal(before, after)


def clips_the_gradient_of_the_replica() -> None:
    """The bound holds for the norm over both shards."""
    model = sharded()
    opt = synced(model, 1.0, torch.optim.SGD, lr=1.0, clip_norm=0.01)
    backward(model, opt, 0)
    whole = torch.cat([p.grad.full_tensor().flatten() for p in model.parameters()]).norm()
    wanted = [local(p.grad) * (0.01 * math.sqrt(2) / float(whole)) for p in model.parameters()]
    assert whole > 0.02
    opt.step()
    for p, clipped in zip(model.parameters(), wanted, strict=True):
        torch.testing.assert_close(local(p.grad), clipped, rtol=1e-5, atol=1e-9)


def evaluation_leaves_no_trace() -> None:
    """FSDP2 keeps the root's gathered parameters after an evaluation. Neither the evaluation nor the training after it
    may use those of the other weights."""
    straight, model = sharded(), sharded()
    one, two = synced(straight), synced(model)
    train(straight, one, range(4))
    x = data(0, 99)
    for step in range(4):
        with torch.no_grad():
            mine = model(x)
        with two.global_weights(), torch.no_grad():
            common = model(x)
            theirs = [torch.empty_like(common) for _ in range(2)]
            dist.all_gather(theirs, common, group=mesh.get_group("replica"))
            same_bits(theirs[0], theirs[1], "output of the global weights")
        with torch.no_grad():
            same_bits(model(x), mine, "output of the local weights")
        assert step == 0 or not torch.equal(mine, common)
        train(model, two, range(step, step + 1))
    same_bits(weights(model), weights(straight), "weights after evaluations")
    with torch.no_grad():
        model(x)
        two.consolidate()
        sent = model(x)
        with two.global_weights():
            same_bits(model(x), sent, "consolidated")


def made_after_an_evaluation() -> None:
    """Both replicas begin with the weights of the first, also in what FSDP2 has gathered before."""
    model, x = sharded(), data(0, 99)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    with torch.no_grad():
        for p in model.parameters():
            local(p).add_(0.1 * REPLICA)
        model(x)
        opt = SparseSync(inner, 0.05, group=mesh.get_group("replica"))
        theirs = [torch.empty(8, 1) for _ in range(2)]
        dist.all_gather(theirs, model(x), group=mesh.get_group("replica"))
    same_bits(theirs[0], theirs[1], "outputs of the replicas")
    opt.check()


def a_rank_without_weights() -> None:
    """Every parameter has one row: all of them are on shard 0."""
    torch.manual_seed(0)
    model = fully_shard(torch.nn.Linear(60, 1), mesh=mesh["shard"])
    opt = synced(model, clip_norm=1.0, norm_every=1, outer_momentum=0.5)
    train(model, opt, range(3))
    opt.load_state_dict(opt.state_dict())
    assert len(opt.state_dict()["sparse_sync"]["parameters"]) == 2 - 2 * SHARD
    assert (opt.stats()["density_sent"] > 0) == (SHARD == 0)
    opt.consolidate()
    assert math.isfinite(float(model(data(0, 99)).sum()))


def resumes() -> None:
    """A state that went through a file, for this rank alone."""
    straight = sharded()
    opt = synced(straight, clip_norm=1.0)
    train(straight, opt, range(5))
    model = sharded()
    opt = synced(model, clip_norm=1.0)
    train(model, opt, range(2))
    file = io.BytesIO()
    torch.save(opt.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=False)
    again = sharded()
    opt = synced(again, clip_norm=1.0)
    opt.load_state_dict(state)
    train(again, opt, range(2, 5))
    same_bits(weights(again), weights(straight), "resumed")
    other = {**state["sparse_sync"], "shard": ((1 - SHARD, 2),)}
    with raises(ValueError, f"got the state of shard (({1 - SHARD}, 2),)", "load the file that this rank saved"):
        opt.load_state_dict({**state, "sparse_sync": other})


def grad_scaler() -> None:
    """inf in one shard: its replica leaves out the step and lowers its scale; the other one does not."""
    model = sharded()
    opt = synced(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(3):
        opt.zero_grad()
        scaler.scale(model(data(REPLICA, step)).square().mean()).backward()
        if step == 1 and RANK == 3:
            local(model[0].weight.grad)[0, 0] = float("inf")
        scaler.step(opt)
        scaler.update()
    assert scaler.get_scale() == 1024.0 / (1 + REPLICA)
    assert opt.stats()["skipped_steps"] == REPLICA
    assert weights(model).isfinite().all()
    opt.check()


def follows_a_twin(model, over, **settings) -> SparseSync:
    """What is exchanged of shards is what is exchanged of plain parameters with their local parts."""
    settings = {"group": over.get_group("replica"), "correct_second_moment": False, "min_numel": 100, **settings}
    opt = SparseSync(torch.optim.AdamW(model.parameters(), lr=1e-2), **settings)
    plain = [torch.nn.Parameter(local(p).clone()) for p in model.parameters()]
    twin = SparseSync(torch.optim.AdamW(plain, lr=1e-2), **settings)
    for step in range(4):
        opt.zero_grad()
        model(data(over.get_local_rank("replica"), step)).square().mean().backward()
        for p, q in zip(model.parameters(), plain, strict=True):
            q.grad = local(p.grad).clone()
        opt.step()
        twin.step()
        with opt.global_weights(), twin.global_weights():
            same_bits(weights(model), torch.cat([q.detach().flatten() for q in plain]), "global weights")
        same_bits(weights(model), torch.cat([q.detach().flatten() for q in plain]), "local weights")
        if step == 1:
            opt.load_state_dict(copy.deepcopy(opt.state_dict()))
    opt.check()
    return opt


def one_bit_of_shards() -> None:
    opt = follows_a_twin(sharded(), mesh, bits=1, warmup_steps=1)
    assert any(not kept.is_empty() for kept in opt.transfers.kept.values())


def replicas_on_hosts() -> None:
    """Two hosts of two replicas each, of one shard, which is a DTensor: hosts prune."""
    over = init_device_mesh("cpu", (4, 1), mesh_dim_names=("replica", "shard"))
    os.environ["SPCCL_HOST_ID"] = f"host {RANK // 2}"
    try:
        for settings in ({"density": 0.05}, {"bits": 1, "warmup_steps": 1}):
            opt = follows_a_twin(sharded(over["shard"]), over, **settings)
            assert opt.stats()["pruning_ranks"] == 2, opt.stats()["hosts"]
    finally:
        del os.environ["SPCCL_HOST_ID"]


def refused() -> None:
    model = sharded()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    other = [0, 1] if REPLICA == 0 else [2, 3]
    with raises(ValueError, f"sharded over ranks {other}", "hold different shards", 'mesh.get_group("replicate")'):
        SparseSync(inner)
    with raises(ValueError, f"sharded over ranks {other}", "hold different shards"):
        SparseSync(inner, group=mesh.get_group("shard"))
    named = torch.optim.SGD(model.named_parameters(), lr=0.1)
    with raises(ValueError, "overlap with parameter 0.weight, which is sharded"):
        SparseSync(named, group=mesh.get_group("replica"), overlap=model)
    model = sharded(over=mesh)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    with raises(ValueError, f"replicated over ranks [{SHARD}, {SHARD + 2}]", "nothing to exchange", 'mesh["shard"]'):
        SparseSync(inner, group=mesh.get_group("replica"))


CASES = [
    sharded_replicas, nan_in_one_shard, clips_the_gradient_of_the_replica, evaluation_leaves_no_trace,
    made_after_an_evaluation, a_rank_without_weights, resumes, grad_scaler, one_bit_of_shards,
    replicas_on_hosts, refused,
]  # fmt: skip


def with_mesh(case):
    def run():
        global mesh
        assert WORLD == 4
        mesh = mesh or init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
        return case()

    run.__name__ = case.__name__
    return run


if __name__ == "__main__":
    torch.set_num_threads(1)
    main([with_mesh(c) for c in CASES])
