"""spccl.fsdp.prune on 4 ranks, 2 replicas of 2 shards: against torch's own all-reduce, and sums over steps.

Most cases check this sum: the averages so far, plus the mean over replicas of the residuals, is the average of all
gradients so far.
"""

from __future__ import annotations

import math
import warnings

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from spccl import fsdp
from workers.common import RANK, WORLD, main, raises, same_bits

REPLICA, SHARD = divmod(RANK, 2)
SHAPES = {"big": (151, 200), "mid": (90, 101), "bias": (51,), "small": (3, 5), "one": (1, 7)}  # most do not divide by 2
mesh = None  # (replicate, shard)


class Probe(torch.nn.Module):
    """Parameters of SHAPES whose gradients are what forward is given; missing ones are unused."""

    def __init__(self):
        super().__init__()
        for name, shape in SHAPES.items():
            setattr(self, name, torch.nn.Parameter(torch.zeros(shape)))

    def forward(self, wanted: dict[str, torch.Tensor]) -> torch.Tensor:
        return sum((getattr(self, name) * grad).sum() for name, grad in wanted.items())


def wanted(rank: int, step: int, names=tuple(SHAPES)) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(1000 * step + rank)
    made = {name: torch.randn(shape, generator=g) for name, shape in SHAPES.items()}
    return {name: made[name] for name in names}


def net() -> torch.nn.Sequential:
    torch.manual_seed(0)
    layers = torch.nn.Linear(20, 61), torch.nn.Tanh(), torch.nn.Linear(61, 30), torch.nn.Linear(30, 1)
    return torch.nn.Sequential(*layers)  # the last layer is empty on the ranks of shard 1


def sharded(model: torch.nn.Module, over=None, **settings) -> torch.nn.Module:
    """Shard each layer, and the rest."""
    for layer in model.children():
        if next(layer.parameters(), None) is not None:
            fully_shard(layer, mesh=over or mesh, **settings)
    return fully_shard(model, mesh=over or mesh, **settings)


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(16, 20, generator=torch.Generator().manual_seed(100 * step + RANK))
    return x, x[:, :5].sum(1, keepdim=True)


def loss_of(model: torch.nn.Module, step: int) -> torch.Tensor:
    x, y = batch(step)
    return (model(x) - y).square().mean()


def train(model: torch.nn.Module, steps: range, lr: float = 0.05) -> float:
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    for step in steps:
        optimizer.zero_grad()
        loss = loss_of(model, step)
        loss.backward()
        optimizer.step()
    return float(loss.detach())


def local(x) -> torch.Tensor:
    return x.detach().to_local()


def shard_of(whole: torch.Tensor) -> torch.Tensor:
    """This rank's part of a parameter, as FSDP2 cuts it."""
    return torch.cat([*whole.chunk(2), whole[:0]][SHARD : SHARD + 1])


def same_weights(a: torch.nn.Module, b: torch.nn.Module, what: str) -> None:
    for (name, p), q in zip(a.named_parameters(), b.parameters(), strict=True):
        same_bits(local(p), local(q), f"{what}: {name}")


def mean_residual(hook) -> dict[str, torch.Tensor]:
    """Average over replicas of what this rank's shards hold back, by parameter name."""
    out = {}
    for name, entry in sorted(hook.state_dict()["parameters"].items()):
        if entry["residual"] is not None:
            held = entry["residual"].double()
            dist.all_reduce(held, group=mesh.get_group("replicate"))
            out[name] = held / 2
    return out


def check_sums(hook, model, got: dict, steps: range, tolerance: float = 1e-4) -> None:
    """`got`: the sum of the gradients that arrived, by name; compares with all ranks' gradients of `steps`."""
    held = mean_residual(hook)
    assert set(held) <= {"big", "mid"} and "big" in held
    for name, p in model.named_parameters():
        whole = sum(wanted(r, s)[name].double() for s in steps for r in range(WORLD)) / WORLD
        mine = shard_of(whole)
        total = got[name] + held[name].view(mine.shape) if name in held else got[name]
        torch.testing.assert_close(total, mine, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}")
        assert local(p).shape == mine.shape


# -- cases ---------------------------------------------------------------------------------------------


def density_one_equals_torch() -> None:
    """With density 1 every bit of the weights is that of torch's own all-reduce, whatever FSDP2 is told. In float16
    torch divides by the number of all ranks before the reduce-scatter, which costs bits of numbers below 6e-5."""

    def accumulate_shards(model, step):
        model.set_requires_all_reduce(step % 3 == 2)

    def accumulate(model, step):
        model.set_requires_gradient_sync(step % 2 == 1)

    def variant(policy=None, prepare=None, each=None, exact=True, **settings):
        models = [sharded(net(), mp_policy=policy or MixedPrecisionPolicy(), **settings) for _ in range(2)]
        hook = fsdp.prune(models[1], density=1.0)
        for model in models:
            if prepare:
                prepare(model)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
            for step in range(6 if each else 2):
                if each:
                    each(model, step)
                loss_of(model, step).backward()
                if not each or step % 6 == 5:
                    optimizer.step()
                    optimizer.zero_grad()
        if exact:
            same_weights(*models, f"{policy} {prepare} {each} {settings}")
        for p, q in zip(*(m.parameters() for m in models), strict=True):
            torch.testing.assert_close(local(p), local(q), rtol=1e-4, atol=1e-5)
        return hook

    def for_all(method: str, value):
        def prepare(model):
            for m in model.modules():
                if hasattr(m, method):
                    getattr(m, method)(value)

        return prepare

    assert variant().step == 2
    variant(reshard_after_forward=False)
    variant(MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
    variant(MixedPrecisionPolicy(reduce_dtype=torch.bfloat16))
    variant(MixedPrecisionPolicy(reduce_dtype=torch.float16), exact=False)
    variant(prepare=for_all("set_gradient_divide_factor", 8.0))
    variant(prepare=for_all("set_gradient_divide_factor", 2.0))
    variant(prepare=for_all("set_force_sum_reduction_for_comms", True))
    assert variant(each=accumulate_shards).step == 2
    assert variant(each=accumulate).step == 3


def after_dense_steps() -> None:
    """prune() on a model that torch has trained before."""
    dense, pruned = sharded(net()), sharded(net())
    for model in (dense, pruned):
        train(model, range(2))
    fsdp.prune(pruned, density=1.0)
    for model in (dense, pruned):
        train(model, range(2, 4))
    same_weights(dense, pruned, "after dense steps")


def shards_of_columns() -> None:
    """Shard(1): the rows of a shard are then apart in the parameter, and together in the flat gradient."""

    def model():
        torch.manual_seed(0)
        whole = torch.nn.Sequential(torch.nn.Linear(20, 60, bias=False), torch.nn.Linear(60, 2, bias=False))
        return fully_shard(whole, mesh=mesh, shard_placement_fn=lambda p: Shard(1))

    dense, pruned = model(), model()
    fsdp.prune(pruned, density=1.0)
    for m in (dense, pruned):
        train(m, range(2))
    same_weights(dense, pruned, "Shard(1)")


def nothing_is_lost(over=None, **settings) -> dict:
    model = fully_shard(Probe(), mesh=over or mesh)
    hook = fsdp.prune(model, density=0.01, **settings)
    got = {n: torch.zeros(local(p).shape, dtype=torch.float64) for n, p in model.named_parameters()}
    for step in range(5):
        model.zero_grad()
        model(wanted(RANK, step)).backward()
        for name, p in model.named_parameters():
            got[name] += local(p.grad)
        assert torch.count_nonzero(local(model.big.grad)) <= 2 * 5 * 0.01 * local(model.big).numel()
        plain = sum(wanted(r, step)["bias"].double() for r in range(WORLD)) / WORLD
        torch.testing.assert_close(local(model.bias.grad).double(), shard_of(plain), rtol=1e-5, atol=1e-6)
    check_sums(hook, model, got, range(5))
    assert hook.step == 5
    held = hook.state_dict()["parameters"]["big"]["residual"]
    assert held.numel() == local(model.big).numel() and held.dtype == torch.float32
    stats = hook.stats()
    assert 0.005 < stats["density_pruned"] < 0.02, stats
    return {"density": stats["density_pruned"]}


def divided_later() -> None:
    """force_sum: torch divides by the shards after the hook. Residuals in a state are in units of the gradient."""
    model = fully_shard(Probe(), mesh=mesh)
    hook = fsdp.prune(model, density=0.01, clip_norm=1e9)
    model.set_force_sum_reduction_for_comms(True)
    model(wanted(RANK, 0)).backward()
    got = {name: local(p.grad).double() for name, p in model.named_parameters()}
    check_sums(hook, model, got, range(1))
    grads = [{n: wanted(r, 0)[n] + wanted(r + 1, 0)[n] for n in SHAPES} for r in (0, 2)]
    norm = torch.cat([g.flatten() / 2 for g in grads[REPLICA].values()]).norm()
    torch.testing.assert_close(hook.stats()["update_norm"], float(norm), rtol=1e-4, atol=0)


def accumulation() -> None:
    """Both ways to accumulate: the hook sees the sum once."""
    for how in ("set_requires_gradient_sync", "set_requires_all_reduce"):
        model = fully_shard(Probe(), mesh=mesh)
        hook = fsdp.prune(model, density=0.01)
        for step in range(3):
            getattr(model, how)(step == 2)
            model(wanted(RANK, step)).backward()
        got = {name: local(p.grad).double() for name, p in model.named_parameters()}
        check_sums(hook, model, got, range(3))
        assert hook.step == 1, how


def clipping() -> None:
    """clip_norm bounds the norm of a replica's whole gradient, over its shards, to clip_norm * sqrt(replicas)."""
    model = fully_shard(Probe(), mesh=mesh)
    hook = fsdp.prune(model, density=1.0, clip_norm=0.5)
    model(wanted(RANK, 0)).backward()
    clipped = []
    for first in (0, 2):
        mean = {n: (wanted(first, 0)[n] + wanted(first + 1, 0)[n]) / 2 for n in SHAPES}
        norm = torch.cat([g.flatten() for g in mean.values()]).norm()
        clipped.append({n: g * (0.5 * 2**0.5 / norm) for n, g in mean.items()})
        if first == 2 * REPLICA:
            torch.testing.assert_close(hook.stats()["update_norm"], float(norm), rtol=1e-5, atol=0)
    for name, p in model.named_parameters():
        whole = (clipped[0][name] + clipped[1][name]) / 2
        mine = shard_of(whole)
        torch.testing.assert_close(local(p.grad), mine, rtol=1e-4, atol=1e-7)


def trains() -> dict:
    """5% of the entries sent, with momentum: the loss falls, and replicas have the same weights."""
    model = sharded(net())
    hook = fsdp.prune(model, 0.05, momentum=0.5, min_numel=500, clip_norm=5.0, norm_every=1)
    first = train(model, range(1), lr=0.02)
    last = train(model, range(1, 40), lr=0.02)
    assert last < 0.4 * first, (first, last)
    for name, p in model.named_parameters():
        theirs = [torch.empty_like(local(p)) for _ in range(2)]
        dist.all_gather(theirs, local(p), group=mesh.get_group("replicate"))
        same_bits(theirs[0], theirs[1], name)
    stats = hook.stats()
    assert stats["steps"] == 40, stats
    parts = [None] * 2  # of the shards
    part = (stats["unsent_norm"] / stats["residual_ratio"]) ** 2
    dist.all_gather_object(parts, part, group=mesh.get_group("shard"))
    assert math.isclose(sum(parts), stats["update_norm"] ** 2, rel_tol=1e-6), (parts, stats)
    return {"losses": [first, last]}


def a_rank_without_elements() -> None:
    """Every parameter has one row: all of them are on shard 0."""
    torch.manual_seed(0)
    model = fully_shard(torch.nn.Linear(20, 1), mesh=mesh)
    hook = fsdp.prune(model, 0.5, min_numel=1, clip_norm=1.0, norm_every=1)
    train(model, range(2))
    assert (hook.stats()["density_sent"] > 0) == (SHARD == 0) and hook.step == 2
    hook.load_state_dict(hook.state_dict())


def one_dimension_and_a_group() -> None:
    """A model over shards alone, with the replicas as `group`, is the same as one over both."""
    both = sharded(net())
    fsdp.prune(both, 0.05, min_numel=500)
    shards = sharded(net(), over=mesh["shard"])
    fsdp.prune(shards, 0.05, min_numel=500, group=mesh.get_group("replicate"))
    for model in (both, shards):
        train(model, range(4))
    same_weights(both, shards, "mesh of 1 dimension")


def made_on_meta() -> None:
    """prune() before the parameters have memory."""
    with torch.device("meta"):
        model = sharded(net())
    hook = fsdp.prune(model, 0.05, min_numel=500)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(0.01)
    train(model, range(2))
    assert hook.step == 2 and hook.stats()["density_pruned"] < 0.2


def grad_scaler() -> None:
    """inf in the gradient of one rank: every rank skips the step, what was kept stays, and scales are followed."""
    model = fully_shard(Probe(), mesh=mesh)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    hook = fsdp.prune(model, density=0.01, grad_scaler=scaler)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for step in range(3):
        optimizer.zero_grad()
        given = wanted(RANK, step)
        if step == 1 and RANK == 3:
            given["big"][150, 3] = float("inf")
        before = [local(p).clone() for p in model.parameters()]
        scaler.scale(model(given)).backward()
        scaler.step(optimizer)
        scaler.update()
        skipped = all(torch.equal(a, local(p)) for a, p in zip(before, model.parameters(), strict=True))
        assert skipped == (step == 1), step
    assert scaler.get_scale() == 512.0
    held = hook.state_dict()["parameters"]["big"]["residual"]
    assert held.isfinite().all() and 0.5 < float(held.std()) < 2  # of 3 gradients with standard deviation 0.7


def unused_parameters() -> None:
    model = fully_shard(Probe(), mesh=mesh)
    fsdp.prune(model, density=0.01)
    with raises(RuntimeError, "some of these parameters got no gradient", "(big, mid, bias, small, one)"):
        model(wanted(RANK, 0, ("big", "bias"))).backward()
    if torch.__version__ < (2, 13):  # without set_reduce_scatter_unused_params
        return
    model = fully_shard(Probe(), mesh=mesh)
    hook = fsdp.prune(model, density=0.01)
    model.set_reduce_scatter_unused_params(True)
    model(wanted(RANK, 0)).backward()
    kept = hook.state_dict()["parameters"]["mid"]["residual"]
    model.zero_grad()
    model(wanted(RANK, 1, ("big", "bias"))).backward()
    assert not local(model.mid.grad).any()
    same_bits(hook.state_dict()["parameters"]["mid"]["residual"], kept, "an unused parameter's residual")


def frozen_and_tied() -> None:
    model = net()
    model[2].weight.requires_grad_(False)
    model = sharded(model)
    hook = fsdp.prune(model, 0.05, min_numel=500)
    train(model, range(2))
    assert "2.weight" not in hook.state_dict()["parameters"] and hook.step == 2
    tied = torch.nn.Sequential(torch.nn.Linear(30, 30), torch.nn.Linear(30, 30))
    tied[1].weight = tied[0].weight
    tied = fully_shard(tied, mesh=mesh)
    hook = fsdp.prune(tied, 0.05, min_numel=500)
    tied(torch.ones(2, 30)).sum().backward()
    assert set(hook.state_dict()["parameters"]) == {"0.weight", "0.bias", "1.bias"}


def tensor_parallel() -> None:
    """2 replicas of 2 tensor-parallel ranks: a parameter is a DTensor before FSDP2 shards it."""
    whole = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("replicate", "shard", "split"))

    def model() -> torch.nn.Module:
        torch.manual_seed(0)
        made = torch.nn.Sequential(torch.nn.Linear(20, 60), torch.nn.Tanh(), torch.nn.Linear(60, 30))
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel(output_layouts=Replicate())}
        return sharded(parallelize_module(made, whole["split"], plan), over=whole["replicate", "shard"])

    def train_halves(made) -> None:
        optimizer = torch.optim.SGD(made.parameters(), lr=0.05)
        for step in range(2):
            optimizer.zero_grad()
            x = torch.randn(16, 20, generator=torch.Generator().manual_seed(100 * step + REPLICA))
            (made(x) - x[:, :1]).square().mean().backward()
            optimizer.step()

    dense, pruned = model(), model()
    hook = fsdp.prune(pruned, density=1.0)
    for made in (dense, pruned):
        train_halves(made)
    same_weights(dense, pruned, "tensor parallel")
    assert hook.step == 2
    pruned = model()
    hook = fsdp.prune(pruned, density=0.05, min_numel=500)
    train_halves(pruned)
    assert hook.state_dict()["parameters"]["0.weight"]["residual"].numel() == local(pruned[0].weight).numel() == 600
    with raises(ValueError, "clip_norm=1.0", "tensor parallelism"):
        fsdp.prune(model(), clip_norm=1.0)


def refused() -> None:
    who = "spccl.fsdp.prune"
    with raises(TypeError, who, "no FSDP2 module", "fully_shard"):
        fsdp.prune(net())
    with raises(TypeError, who, "list"):
        fsdp.prune([net()])
    flat = sharded(net(), over=init_device_mesh("cpu", (WORLD,)))
    with raises(ValueError, who, "a mesh of 1 dimension", "group="):
        fsdp.prune(flat)
    with raises(ValueError, who, "sharded over ranks [0, 1, 2, 3]", "[0, 1, 2, 3] of them", 'get_group("replicate")'):
        fsdp.prune(flat, group=dist.group.WORLD)
    only_first = dist.new_group([0])
    if RANK > 0:
        with raises(ValueError, who, f"rank {RANK} of the world) is not in the group", "the same shard"):
            fsdp.prune(flat, group=only_first)
    model = sharded(net())
    adam = torch.optim.AdamW(model.parameters())
    with raises(ValueError, who, "AdamW", "SparseSync", 'mesh.get_group("replicate")', "allow_adam"):
        fsdp.prune(model, optimizer=adam)
    with raises(ValueError, f"{who}: density=2", "(0, 1]"):
        fsdp.prune(model, density=2)
    assert repr(fsdp.PrunedShards(0.05)) == "spccl.fsdp.prune(density=0.05; step 0)"
    with raises(TypeError, f"{who}: got no_such"):
        fsdp.prune(model, no_such=1)
    with raises(ValueError, f"{who}: hosts='on'", "FSDP2 averages over the shards first"):
        fsdp.prune(model, hosts="on")
    with raises(ValueError, f"{who}: sum_density=0.1", "None with FSDP2"):
        fsdp.prune(model, sum_density=0.1)
    with raises(ValueError, f"{who}: ranks differ: momentum is 0.0 on ranks 0, 1, 2, 0.5 on rank 3"):
        fsdp.prune(model, momentum=0.5 if RANK == 3 else 0.0)
    with raises(RuntimeError, "on no model", "spccl.fsdp.prune(model)"):
        fsdp.PrunedShards().load_state_dict({})
    fsdp.prune(model, optimizer=adam, allow_adam=True)
    with raises(ValueError, who, "already has an all-reduce hook", "once on a model"):
        fsdp.prune(model)


def gloo_between_replicas() -> None:
    """Another backend, which cannot average: one warning, the same training."""
    groups = [dist.new_group([shard, shard + 2], backend="gloo") for shard in (0, 1)]
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        nothing_is_lost(over=mesh["shard"], group=groups[SHARD])
        assert sum("spccl.fsdp.prune: " in str(w.message) and "'gloo'" in str(w.message) for w in seen) == 1, seen


CASES = [
    density_one_equals_torch, after_dense_steps, shards_of_columns, nothing_is_lost, divided_later, accumulation,
    clipping, trains, one_dimension_and_a_group, made_on_meta, grad_scaler, unused_parameters,
    a_rank_without_elements, frozen_and_tied, tensor_parallel, refused, gloo_between_replicas,
]  # fmt: skip


def with_mesh(case):
    def run():
        global mesh
        if mesh is None:
            assert WORLD == 4
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        return case()

    run.__name__ = case.__name__
    return run


if __name__ == "__main__":
    torch.set_num_threads(1)
    main([with_mesh(c) for c in CASES])
