"""A residual of bfloat16: spccl.prune and spccl.ddp on one process."""

from __future__ import annotations

import random

import pytest

torch = pytest.importorskip("torch", reason="the DDP hook is for torch, and none is installed")

import torch.distributed as dist  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

from spccl import ddp, prune  # noqa: E402

N = 65_537
CPU = torch.device("cpu")


def make_param(name="weight", n=N, dtype=torch.float32, residual_dtype=torch.bfloat16) -> prune.ParamState:
    param = prune.ParamState(name, n, True, torch.zeros(prune.STATE_COLUMNS, dtype=torch.int64))
    param.prepare(dtype, True, False, residual_dtype)
    return param


def rule(**changes) -> prune.Rule:
    return prune.Rule(**{"density": 0.01, "sample": 0.001, "leak": 1.0, "momentum": 0.0, "seed": 1, **changes})


# ---- spccl.prune ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_each_step_rounds_to_a_neighbour(dtype):
    """What is sent and what is kept differ from the exact sum by less than one gap of bfloat16."""
    param = make_param(dtype=dtype)
    plan = prune.Plan([(0, param)], N, dtype, CPU)
    g = torch.Generator().manual_seed(random.randrange(1 << 31))
    for _ in range(5):
        before = param.residual.double()
        grad = torch.randn(N, generator=g).to(dtype)
        exact = (before.float() + grad.float()).double()
        plan.run(grad, rule())
        kept = exact - grad.double()  # what a wider residual would hold
        gap = torch.exp2(torch.floor(torch.log2(kept.abs().clamp(1e-30))) - 7)
        assert ((param.residual.double() - kept).abs() < gap).all()
        assert 0 < torch.count_nonzero(grad) < 0.05 * N


def test_the_mean_is_right_where_rounding_to_nearest_loses_all():
    """200 gradients of a quarter gap of the residual. The standard deviation of the mean over n elements is below
    sqrt(200) gaps / 2 / sqrt(n), and the bound is 6 of them: by chance one run in 5e8 fails."""
    seed, n = random.randrange(1 << 31), N // 2
    param = make_param()
    plan = prune.Plan([(0, param)], N, torch.float32, CPU)
    param.residual.fill_(1.0)  # the gap up to 2 is 2^-7
    for _ in range(200):
        grad = torch.full((N,), 2.0**-9)
        grad[n:] = torch.rand(N - n) + 100  # the threshold is above 100
        plan.run(grad, rule(seed=seed))
        assert not grad[:n].any()
    got, wanted = float(param.residual[:n].double().mean()), 1 + 200 * 2.0**-9
    assert abs(got - wanted) < 6 * 200**0.5 * 2.0**-7 / 2 / n**0.5, f"seed {seed}: {got}, wanted {wanted}"


def test_seed_and_step_decide_the_rounding():
    def residual(seed, n_steps):
        param = make_param()
        plan = prune.Plan([(0, param)], N, torch.float32, CPU)
        for step in range(n_steps):
            plan.run(torch.randn(N, generator=torch.Generator().manual_seed(step)), rule(seed=seed))
        return param.residual

    assert torch.equal(residual(1, 3), residual(1, 3))
    assert not torch.equal(residual(1, 3), residual(2, 3))


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="'weight' has float64 gradients, which need a residual of float64"):
        make_param(dtype=torch.float64)
    params = [make_param("a"), make_param("b", residual_dtype=torch.float32)]
    with pytest.raises(ValueError, match="wanted one dtype"):
        prune.Plan([(0, params[0]), (N, params[1])], 2 * N, torch.float32, CPU)


# ---- PrunedGradients -----------------------------------------------------------------------------------------


@pytest.fixture
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def wrapped(**settings):
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(100, 200), torch.nn.Tanh(), torch.nn.Linear(200, 50))
    model = DistributedDataParallel(module)
    return model, ddp.PrunedGradients(**{"residual_dtype": torch.bfloat16, **settings}).register(model)


def backward(model, seed):
    model.zero_grad()
    x = torch.randn(16, 100, generator=torch.Generator().manual_seed(seed))
    model(x).square().mean().backward()
    return [p.grad.clone() for p in model.parameters()]


def residuals(hook):
    return {name: p["residual"] for name, p in hook.state_dict()["parameters"].items() if p["residual"] is not None}


@pytest.mark.filterwarnings("ignore:PrunedGradients")
def test_a_resumed_run_continues_bit_for_bit(one_rank, tmp_path):
    settings = {"momentum": 0.9, "warmup_steps": 5, "norm_every": 2, "seed": 5}
    model, hook = wrapped(**settings)
    for seed in range(6):
        backward(model, seed)
    torch.save(hook.state_dict(), tmp_path / "hook.pt")
    wanted = [backward(model, seed) for seed in range(6, 9)]
    kept = residuals(hook)
    assert {r.dtype for r in kept.values()} == {torch.bfloat16} and hook.stats()["unsent_norm"] > 0
    model, hook = wrapped(**{**settings, "seed": 0})  # the seed comes from the checkpoint
    saved = torch.load(tmp_path / "hook.pt")
    hook.load_state_dict(saved)
    assert saved["step"] == hook.step == 6
    for seed, grads in zip(range(6, 9), wanted, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(backward(model, seed), grads, strict=True))
    assert all(torch.equal(kept[name], r) for name, r in residuals(hook).items())
    model, hook = wrapped(**settings)  # without the step, other entries are sampled and roundings differ
    hook.load_state_dict({**saved, "step": 7})
    backward(model, 6)
    assert not all(torch.equal(a, b) for a, b in zip(backward(model, 7), wanted[1], strict=True))


@pytest.mark.filterwarnings("ignore:PrunedGradients")
def test_a_checkpoint_of_the_other_dtype_loads(one_rank):
    for saved_dtype, dtype in ((torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)):
        model, hook = wrapped(residual_dtype=saved_dtype)
        backward(model, 0)
        saved = hook.state_dict()
        model, hook = wrapped(residual_dtype=dtype, density=1e-3)
        hook.load_state_dict(saved)
        backward(model, 1)
        assert {r.dtype for r in residuals(hook).values()} == {dtype}


def test_reshard_refuses_states_of_several_shards():
    state = {"version": 1, "world_size": 2, "step": 7, "seed": 0, "parameters": {}}
    with pytest.raises(ValueError, match=r"hold one shard, got shards \[\(0, 2\), \(1, 2\)\]"):
        ddp.PrunedGradients.reshard([{**state, "shard": (0, 2)}, {**state, "shard": (1, 2)}], 1)


def test_resharded_states_keep_their_dtype():
    def state(value):
        kept = {"residual": torch.full((4,), value).bfloat16(), "velocity": None, "threshold": None}
        return {"version": 1, "world_size": 2, "step": 3, "seed": 0, "parameters": {"w": kept}}

    (one,) = ddp.PrunedGradients.reshard([state(1.0), state(2.0**-8)], 1)
    kept = one["parameters"]["w"]["residual"]
    assert kept.dtype == torch.bfloat16
    assert torch.equal(kept, torch.full((4,), (1 + 2.0**-8) / 2).bfloat16())


def test_only_two_dtypes():
    with pytest.raises(ValueError, match=r"residual_dtype=torch.float16, wanted torch.float32 or torch.bfloat16"):
        ddp.PrunedGradients(residual_dtype=torch.float16)
