"""spccl.prune and what of spccl.ddp needs one process only. Over ranks: tests/dist/test_ddp_hook.py."""

from __future__ import annotations

import math

import pytest

torch = pytest.importorskip("torch", reason="the DDP hook is for torch, and none is installed")

import torch.distributed as dist  # noqa: E402

from spccl import ddp, prune  # noqa: E402

N = 150_001  # two blocks and a rest, odd


def rule(**changes) -> prune.Rule:
    settings = {"density": 0.01, "sample": 0.001, "leak": 1.0, "momentum": 0.0, "error_feedback": True}
    return prune.Rule(**{**settings, **changes})


def normal(g, n):
    return torch.randn(n, generator=g)


def heavy_tail(g, n):
    return torch.randn(n, generator=g) / torch.rand(n, generator=g).clamp_(1e-4) ** 1.5


def uniform(g, n):
    return torch.rand(n, generator=g) * 2 - 1


def mostly_zero(g, n):
    return torch.randn(n, generator=g) * (torch.rand(n, generator=g) < 0.03)


def rows(g, n):
    x = torch.zeros(n)
    x[: n // 20] = torch.randn(n // 20, generator=g)
    return x


NONZERO_SHARE = {mostly_zero: 0.03, rows: 0.05}


def steps(make, settings: prune.Rule, n_steps: int, n: int = N, dtype=torch.float32):
    """Runs prune_host n_steps times; yields (gradient before, sent, slot) of each step."""
    g = torch.Generator().manual_seed(3)
    slot = prune.Slot("weight", n, True)
    for step in range(n_steps):
        grad = make(g, n).to(dtype)
        before = grad.clone()
        slot.prepare(grad, settings, True)
        n_sent = prune.prune_host(grad, slot, settings, seed=1, step=step)
        assert n_sent == int(torch.count_nonzero(grad))
        yield before, grad, slot


# ---- how much is sent ----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("make", [normal, heavy_tail, uniform, mostly_zero, rows])
@pytest.mark.parametrize("settings", [rule(), rule(momentum=0.9), rule(error_feedback=False), rule(density=0.1)])
def test_density_stays_near_its_target(make, settings):
    sent = [int(torch.count_nonzero(s)) / N for _, s, _ in steps(make, settings, 30)]
    late = sent[10:]
    wanted = min(settings.density, NONZERO_SHARE.get(make, 1.0))  # nobody can send more than there is
    assert 0.7 <= sum(late) / len(late) / wanted <= 1.4, late
    assert max(sent) <= (prune.MAX_OVERSHOOT + 1) * settings.density
    assert min(late) >= 0.2 * wanted


@pytest.mark.parametrize("settings", [rule(), rule(momentum=0.9), rule(error_feedback=False)])
def test_ties_are_cut_short_and_nothing_is_starved(settings):
    sent = [s for _, s, _ in steps(lambda g, n: torch.ones(n), settings, 30)]
    counts = [int(torch.count_nonzero(s)) for s in sent]
    assert max(counts) <= (prune.MAX_OVERSHOOT + 1) * settings.density * N
    assert min(counts) > 0


@pytest.mark.parametrize("settings", [rule(), rule(momentum=0.9), rule(error_feedback=False)])
def test_all_zero_sends_nothing(settings):
    for _, sent, slot in steps(lambda g, n: torch.zeros(n), settings, 3):
        assert not sent.any()
        assert slot.residual is None or not slot.residual.any()


def test_one_huge_value_is_sent_at_once():
    def make(g, n):
        x = torch.zeros(n)
        x[12345] = 1e30
        return x

    for before, sent, _ in steps(make, rule(), 2):
        assert torch.equal(sent, before)


def test_a_sample_of_zeros_does_not_hide_the_rest():
    """A block that the threshold's sample calls empty is still sent, up to the overshoot's bound."""
    *_, (_, sent, _) = steps(rows, rule(density=0.06, error_feedback=False), 3)
    assert 0.5 * N / 20 <= torch.count_nonzero(sent) <= N / 20


@pytest.mark.parametrize("n", [1, 2, 31, 33, 4096, 65536, 65537, 131073])
def test_any_size(n):
    for _, sent, slot in steps(normal, rule(momentum=0.5), 5, n):
        assert sent.numel() == n and torch.isfinite(slot.residual).all()


def test_sample_places_cover_the_parameter_and_repeat():
    slot, settings = prune.Slot("w", N, True), rule()
    places = [prune.sample_places(slot, settings, 0, step) for step in range(50)]
    assert places == [prune.sample_places(slot, settings, 0, step) for step in range(50)]
    assert len({start for start, _ in places}) > 10
    for start, stride in places:
        assert 0 <= start < stride and stride % 32 == 1
        assert len(range(start, N, stride)) >= prune.SAMPLE_HITS / settings.density / 2


# ---- what is sent and what stays -----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("make", [normal, lambda g, n: torch.ones(n)])
def test_sent_and_residual_add_up_bit_for_bit(dtype, make):
    before = None
    for grad, sent, slot in steps(make, rule(), 8, dtype=dtype):
        wide = slot.residual.dtype
        total = grad.to(wide) if before is None else grad.to(wide) + before
        assert torch.equal(sent.to(wide) + slot.residual, total)
        if dtype == wide:  # moved whole: an entry is sent or kept, never both
            assert not ((sent != 0) & (slot.residual != 0)).any()
        before = slot.residual.clone()


@pytest.mark.slow
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("leak", [1.0, 0.9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_against_a_plain_reference(momentum, leak, dtype):
    """Lin et al. 2018, 3.1 and 3.2, written out; which entries are sent is taken from the hook."""
    u = torch.zeros(N, dtype=torch.float64)
    v = torch.zeros(N, dtype=torch.float64)
    for grad, sent, slot in steps(normal, rule(momentum=momentum, leak=leak), 15, dtype=dtype):
        u = momentum * u + grad.double()
        v = leak * v + u
        picked = sent != 0
        rtol = 1e-5 if dtype == torch.float32 else 1e-2  # bfloat16 keeps 8 bits
        torch.testing.assert_close(sent.double()[picked], v[picked], rtol=rtol, atol=1e-4)
        assert v[picked].abs().min() >= v[~picked].abs().max() * (1 - 1e-5)
        v = torch.where(picked, v - sent.double(), v)
        u = torch.where(picked, 0.0, u)
        torch.testing.assert_close(slot.residual.double(), v, rtol=1e-4, atol=1e-4)
        if momentum:
            torch.testing.assert_close(slot.velocity.double(), u, rtol=1e-4, atol=1e-4)


def test_leak_forgets():
    slot, settings = prune.Slot("w", N, True), rule(leak=0.5)
    grad = torch.randn(N)
    slot.prepare(grad, settings, True)
    prune.prune_host(grad, slot, settings)
    kept = slot.residual.clone()
    sent = torch.zeros(N)
    prune.prune_host(sent, slot, settings, step=1)
    assert torch.equal(sent + slot.residual, kept * 0.5)


def test_without_error_feedback_nothing_is_kept():
    for grad, sent, slot in steps(normal, rule(error_feedback=False), 2):
        assert slot.residual is None
        assert torch.equal(sent, torch.where(sent != 0, grad, torch.zeros(())))


def test_factor_and_scale():
    slot, settings = prune.Slot("w", N, True), rule(scale=0.25)
    grad = torch.randn(N)
    before = grad.clone()
    slot.prepare(grad, settings, True)
    prune.prune_host(grad, slot, settings, factor=0.5)
    assert torch.equal(grad * 4 + slot.residual, before * 0.5)


@pytest.mark.parametrize("settings", [rule(), rule(momentum=0.9, leak=0.99), rule(error_feedback=False, scale=0.5)])
def test_device_form_equals_host_form(settings):
    g = torch.Generator().manual_seed(0)
    host, device = prune.Slot("w", N, True), prune.Slot("w", N, True)
    alive = torch.tensor(True)
    for step in range(10):
        a = torch.randn(N, generator=g)
        b = a.clone()
        host.prepare(a, settings, True)
        device.prepare(b, settings, True)
        n_host = prune.prune_host(a, host, settings, step=step)
        n_device = int(prune.prune_device(b, device, settings, alive, step=step))
        assert n_device == int(torch.count_nonzero(b))
        assert abs(n_host - n_device) <= 2  # thresholds are float64 here, float32 there
        assert int(((a != 0) != (b != 0)).sum()) <= 2 * (step + 1)


def test_device_form_leaves_a_dead_parameter_alone():
    settings = rule(momentum=0.9)
    slot = prune.Slot("w", N, True)
    grad = torch.randn(N)
    slot.prepare(grad, settings, True)
    prune.prune_device(grad, slot, settings, torch.tensor(True))
    kept = slot.residual.clone(), slot.velocity.clone(), float(slot.threshold)
    bad = torch.randn(N)
    bad[7] = math.inf
    sent = bad.clone()
    assert int(prune.prune_device(sent, slot, settings, torch.tensor(False), step=1)) == 0
    assert torch.equal(sent, bad)
    assert torch.equal(slot.residual, kept[0]) and torch.equal(slot.velocity, kept[1])
    assert float(slot.threshold) == kept[2]


def test_sending_all_flushes_the_residual():
    *_, (_, _, slot) = steps(normal, rule(), 3)
    kept = slot.residual.clone()
    grad = torch.randn(N)
    before = grad.clone()
    prune.send_all(grad, slot, rule(density=1.0))
    assert torch.equal(grad, before + kept) and not slot.residual.any()


# ---- PrunedGradients on one rank -----------------------------------------------------------------------------


@pytest.fixture
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def wrapped(**settings):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(100, 200), torch.nn.Tanh(), torch.nn.Linear(200, 50))
    model = torch.nn.parallel.DistributedDataParallel(model)
    return model, ddp.PrunedGradients(**settings).register(model)


def backward(model, seed):
    model.zero_grad()
    x = torch.randn(16, 100, generator=torch.Generator().manual_seed(seed))
    model(x).square().mean().backward()
    return [p.grad.clone() for p in model.parameters()]


@pytest.mark.parametrize(
    "name, value",
    [
        ("density", 0.0),
        ("density", 1.5),
        ("sample", 0),
        ("leak", 1.1),
        ("momentum", 1.0),
        ("dense_steps", -1),
        ("warmup_steps", -1),
        ("min_numel", 0),
        ("clip_norm", 0.0),
        ("norm_every", -1),
    ],
)
def test_settings_out_of_range(name, value):
    with pytest.raises(ValueError, match=name):
        ddp.PrunedGradients(**{name: value})


def test_momentum_needs_error_feedback():
    with pytest.raises(ValueError, match="momentum"):
        ddp.PrunedGradients(momentum=0.9, error_feedback=False)


def test_schedule_of_densities():
    hook = ddp.PrunedGradients(density=0.01, dense_steps=3, warmup_steps=4)
    assert [hook.density_at(s) for s in range(3)] == [1.0] * 3
    warm = [hook.density_at(s) for s in range(3, 8)]
    ratios = [b / a for a, b in zip([1.0, *warm], warm, strict=False)]
    assert ratios == pytest.approx([0.01**0.2] * 5)
    assert hook.density_at(8) == hook.density_at(10**6) == 0.01
    assert ddp.PrunedGradients().density_at(0) == 0.01


@pytest.mark.filterwarnings("ignore:PrunedGradients")
def test_refusals(one_rank):
    model, hook = wrapped()
    with pytest.raises(RuntimeError, match="already registered"):
        hook.register(model)
    with pytest.raises(TypeError, match="got a Sequential with no DistributedDataParallel in it"):
        ddp.PrunedGradients().register(model.module)
    with pytest.raises(TypeError, match="python_reducer"):
        ddp.pruned_gradients_hook(hook, (torch.zeros(3), torch.zeros(3)))


def test_warns_once_that_no_bytes_are_saved(one_rank):
    model, _ = wrapped()
    with pytest.warns(UserWarning, match="'gloo', not 'spccl'") as seen:
        backward(model, 0)
        backward(model, 1)
    assert len(seen) == 1


@pytest.mark.filterwarnings("ignore:PrunedGradients")
def test_stats(one_rank):
    model, hook = wrapped(momentum=0.9, norm_every=2)
    backward(model, 0)
    first = hook.stats()
    assert first["step"] == 1 and first["residual_norm"] is None
    sent = sum(int(torch.count_nonzero(p.grad)) for p in model.parameters())
    backward(model, 1)
    stats = hook.stats()
    total = sum(p.numel() for p in model.parameters())
    assert stats["dense_bytes"] == 4 * total
    assert first["density_sent"] == pytest.approx(sent / total, rel=1e-6)
    assert stats["density_target"] == 0.01 and 0.003 < stats["density_pruned"] < 0.04
    assert stats["sent_bytes"] == round(stats["density_sent"] * total) * 4
    assert stats["residual_norm"] > 0 and stats["residual_ratio"] > 0 and stats["select_ms"] > 0
    assert stats["nonfinite_buckets"] == 0


@pytest.mark.filterwarnings("ignore:PrunedGradients")
@pytest.mark.parametrize("loaded_before_register", [False, True])
def test_a_resumed_run_continues_bit_for_bit(one_rank, loaded_before_register):
    model, hook = wrapped(momentum=0.9, warmup_steps=5)
    for seed in range(6):
        backward(model, seed)
    saved = hook.state_dict()
    wanted = [backward(model, seed) for seed in range(6, 9)]
    model = wrapped_with_state(saved, loaded_before_register)
    for seed, grads in zip(range(6, 9), wanted, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(backward(model, seed), grads, strict=True))


def wrapped_with_state(saved, loaded_before_register):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(100, 200), torch.nn.Tanh(), torch.nn.Linear(200, 50))
    model = torch.nn.parallel.DistributedDataParallel(model)
    hook = ddp.PrunedGradients(momentum=0.9, warmup_steps=5)
    if loaded_before_register:
        hook.load_state_dict(saved)
        hook.register(model)
    else:
        hook.register(model).load_state_dict(saved)
    again = hook.state_dict()  # saved again before the first step: nothing is lost
    assert again["step"] == saved["step"] and set(again["parameters"]) == set(saved["parameters"])
    return model


@pytest.mark.filterwarnings("ignore:PrunedGradients")
def test_state_that_does_not_fit_is_refused(one_rank):
    model, hook = wrapped(momentum=0.9)
    backward(model, 0)
    saved = hook.state_dict()
    with pytest.raises(ValueError, match="version"):
        hook.load_state_dict({**saved, "version": 99})
    with pytest.raises(ValueError, match=r"of 3 ranks.*reshard"):
        hook.load_state_dict({**saved, "world_size": 3})
    parameters = dict(saved["parameters"])
    parameters["0.weight"] = {**parameters["0.weight"], "residual": torch.zeros(5)}
    with pytest.raises(ValueError, match=r"'0.weight' has 5 elements, the parameter has 20000"):
        hook.load_state_dict({**saved, "parameters": parameters})
    with pytest.raises(ValueError, match="stranger"):
        hook.load_state_dict({**saved, "parameters": {"stranger": parameters["0.weight"]}})
    assert hook.step == 1  # a refused load changes nothing


@pytest.mark.parametrize("n_old, n_new", [(4, 2), (2, 4), (3, 2), (2, 3), (1, 5)])
def test_reshard_keeps_what_the_averages_still_owe(n_old, n_new):
    def state(rank):
        tensors = {"residual": torch.randn(50), "velocity": torch.randn(50), "threshold": 1.0}
        return {"version": 1, "world_size": n_old, "step": 7, "seed": 0, "parameters": {"w": tensors}}

    old = [state(r) for r in range(n_old)]
    new = ddp.PrunedGradients.reshard(old, n_new)
    assert [s["world_size"] for s in new] == [n_new] * n_new
    for key in ("residual", "velocity"):
        owed = [sum(s["parameters"]["w"][key] for s in states) / len(states) for states in (old, new)]
        torch.testing.assert_close(owed[0], owed[1])
    with pytest.raises(ValueError, match="all ranks at one step"):
        ddp.PrunedGradients.reshard([*old, {**old[0], "step": 8}], n_new)


@pytest.mark.filterwarnings("ignore:PrunedGradients")
def test_local_clipping_bounds_what_is_accumulated(one_rank):
    model, hook = wrapped(clip_norm=1e-3)
    backward(model, 0)
    total = 0.0
    for name, p in model.module.named_parameters():
        residual = hook.state_dict()["parameters"][name]["residual"]
        kept = residual if residual is not None else torch.zeros(p.numel())
        total += (p.grad.flatten() + kept).square().sum().item()
    assert math.sqrt(total) == pytest.approx(1e-3, rel=1e-4)
    assert hook.stats()["grad_norm"] > 1e-2
