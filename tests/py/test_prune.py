"""spccl.prune and what of spccl.ddp needs one process only. Over ranks: tests/dist/test_ddp_hook.py."""

from __future__ import annotations

import math

import pytest

torch = pytest.importorskip("torch", reason="the DDP hook is for torch, and none is installed")

import torch.distributed as dist  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

from spccl import ddp, prune  # noqa: E402

N = 150_001  # two blocks and a rest, odd


def rule(**changes) -> prune.Rule:
    return prune.Rule(**{"density": 0.01, "sample": 0.001, "leak": 1.0, "momentum": 0.0, "seed": 1, **changes})


class One:
    """One parameter of n elements and its plan."""

    def __init__(self, n=N, dtype=torch.float32, residual=True, velocity=False, pruned=True):
        self.param = prune.ParamState("weight", n, pruned, torch.zeros(prune.STATE_COLUMNS, dtype=torch.int64))
        self.param.prepare(dtype, residual, velocity)
        self.plan = prune.Plan([(0, self.param)], n, dtype, torch.device("cpu"))

    def run(self, grad, settings, **kwargs) -> int:
        """Prunes grad in place; the number of entries sent."""
        self.plan.run(grad, settings, **kwargs)
        return int(self.param.state[prune.N_SENT])


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


def steps(make, settings: prune.Rule, n_steps: int, n: int = N, dtype=torch.float32, residual=True):
    """Prunes n_steps times; yields (gradient before, sent, param) of each step."""
    g = torch.Generator().manual_seed(3)
    one = One(n, dtype, residual, settings.momentum > 0)
    for _ in range(n_steps):
        grad = make(g, n).to(dtype)
        before = grad.clone()
        n_sent = one.run(grad, settings)
        if dtype != torch.float16:  # where a small v rounds to 0
            assert n_sent == int(torch.count_nonzero(grad))
        yield before, grad, one.param


# ---- how much is sent ----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("make", [normal, heavy_tail, uniform, mostly_zero, rows])
@pytest.mark.parametrize(
    "settings, residual",
    [(rule(), True), (rule(momentum=0.9), True), (rule(), False), (rule(density=0.1), True)],
)
def test_density_stays_near_its_target(make, settings, residual):
    sent = [int(torch.count_nonzero(s)) / N for _, s, _ in steps(make, settings, 30, residual=residual)]
    late = sent[10:]
    wanted = min(settings.density, NONZERO_SHARE.get(make, 1.0))  # nobody can send more than there is
    assert 0.7 <= sum(late) / len(late) / wanted <= 1.4, late
    assert max(sent) <= (prune.MAX_OVERSHOOT + 1) * settings.density
    assert min(late) >= 0.2 * wanted


@pytest.mark.parametrize("settings, residual", [(rule(), True), (rule(momentum=0.9), True), (rule(), False)])
def test_ties_are_cut_short_and_nothing_is_starved(settings, residual):
    sent = [s for _, s, _ in steps(lambda g, n: torch.ones(n), settings, 30, residual=residual)]
    counts = [int(torch.count_nonzero(s)) for s in sent]
    assert max(counts) <= (prune.MAX_OVERSHOOT + 1) * settings.density * N
    assert min(counts) > 0


@pytest.mark.parametrize("settings, residual", [(rule(), True), (rule(momentum=0.9), True), (rule(), False)])
def test_all_zero_sends_nothing(settings, residual):
    for _, sent, param in steps(lambda g, n: torch.zeros(n), settings, 3, residual=residual):
        assert not sent.any()
        assert param.residual is None or not param.residual.any()


def test_one_huge_value_is_sent_at_once():
    def make(g, n):
        x = torch.zeros(n)
        x[12345] = 1e30
        return x

    for before, sent, _ in steps(make, rule(), 2):
        assert torch.equal(sent, before)


def test_a_sample_of_zeros_does_not_hide_the_rest():
    """A block that the threshold's sample calls empty is still sent, up to the overshoot's bound."""
    *_, (_, sent, _) = steps(rows, rule(density=0.06), 3, residual=False)
    assert 0.5 * N / 20 <= torch.count_nonzero(sent) <= N / 20


@pytest.mark.parametrize("n", [1, 2, 31, 33, 4096, 65536, 65537, 131073])
def test_any_size(n):
    for _, sent, param in steps(normal, rule(momentum=0.5), 5, n):
        assert sent.numel() == n and torch.isfinite(param.residual).all()


def test_samples_differ_from_step_to_step_and_repeat():
    """The threshold comes from other places in each step, and from the same ones in a second run."""
    grad = torch.randn(N)

    def thresholds():
        one = One(residual=False)
        seen = []
        for _ in range(20):
            one.run(grad.clone(), rule())
            seen.append(float(one.param.state.view(torch.float64)[prune.THRESHOLD]))
        return seen

    first = thresholds()
    assert first == thresholds()
    assert len(set(first)) > 10
    exact = grad.abs().kthvalue(N - N // 100).values
    assert all(abs(t / exact - 1) < 0.2 for t in first)


def test_warm_up_counts_the_steps_of_the_state():
    one, settings = One(), rule(dense_steps=2, warmup_steps=3)
    shares = [one.run(torch.randn(N), settings) / N for _ in range(7)]
    assert shares[:2] == [1.0, 1.0]
    for step in range(2, 7):
        assert shares[step] == pytest.approx(0.01 ** min(1, (step - 1) / 4), rel=0.5)


# ---- what is sent and what stays -----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("make", [normal, lambda g, n: torch.ones(n)])
def test_sent_and_residual_add_up_bit_for_bit(dtype, make):
    before = None
    for grad, sent, param in steps(make, rule(), 8, dtype=dtype):
        wide = param.residual.dtype
        total = grad.to(wide) if before is None else grad.to(wide) + before
        assert torch.equal(sent.to(wide) + param.residual, total)
        if dtype == wide:  # moved whole: an entry is sent or kept, never both
            assert not ((sent != 0) & (param.residual != 0)).any()
        before = param.residual.clone()


@pytest.mark.slow
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("leak", [1.0, 0.9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_against_a_plain_reference(momentum, leak, dtype):
    """Lin et al. 2018, 3.1 and 3.2, written out; which entries are sent is taken from the hook."""
    u = torch.zeros(N, dtype=torch.float64)
    v = torch.zeros(N, dtype=torch.float64)
    for grad, sent, param in steps(normal, rule(momentum=momentum, leak=leak), 15, dtype=dtype):
        u = momentum * u + grad.double()
        v = leak * v + u
        picked = sent != 0
        rtol = 1e-5 if dtype == torch.float32 else 1e-2  # bfloat16 keeps 8 bits
        torch.testing.assert_close(sent.double()[picked], v[picked], rtol=rtol, atol=1e-4)
        assert v[picked].abs().min() >= v[~picked].abs().max() * (1 - 1e-5)
        v = torch.where(picked, v - sent.double(), v)
        u = torch.where(picked, 0.0, u)
        torch.testing.assert_close(param.residual.double(), v, rtol=1e-4, atol=1e-4)
        if momentum:
            torch.testing.assert_close(param.velocity.double(), u, rtol=1e-4, atol=1e-4)


def test_leak_forgets():
    one, settings = One(), rule(leak=0.5)
    one.run(torch.randn(N), settings)
    kept = one.param.residual.clone()
    sent = torch.zeros(N)
    one.run(sent, settings)
    assert torch.equal(sent + one.param.residual, kept * 0.5)


def test_without_error_feedback_nothing_is_kept():
    for grad, sent, param in steps(normal, rule(), 2, residual=False):
        assert param.residual is None
        assert torch.equal(sent, torch.where(sent != 0, grad, torch.zeros(())))


def test_factor_and_scale():
    one = One()
    grad = torch.randn(N)
    before = grad.clone()
    one.run(grad, rule(scale=0.25), factor=torch.tensor([0.5]))
    assert torch.equal(grad * 4 + one.param.residual, before * 0.5)


def test_an_entry_that_is_not_finite_is_sent_and_leaves_its_state():
    one, settings = One(velocity=True), rule(momentum=0.9)
    one.run(torch.randn(N), settings)
    kept = one.param.residual.clone(), one.param.velocity.clone()
    grad = torch.randn(N)
    bad = {7: math.inf, 70_000: -math.inf, N - 1: math.nan}
    for place, value in bad.items():
        grad[place] = value
    one.run(grad, settings)
    assert (~torch.isfinite(grad)).nonzero().flatten().tolist() == list(bad)
    assert grad[7] == math.inf and grad[70_000] == -math.inf
    for before, after in zip(kept, (one.param.residual, one.param.velocity), strict=True):
        assert torch.equal(before[list(bad)], after[list(bad)]) and torch.isfinite(after).all()
    assert int(one.param.state[prune.N_NONFINITE_ALL]) == 3


def test_a_segment_of_zeros_is_left_alone_if_wanted():
    for skip in (False, True):
        one, settings = One(velocity=True), rule(momentum=0.9, skip_zeros=skip)
        one.run(torch.randn(N), settings)
        kept = one.param.residual.clone(), one.param.velocity.clone()
        assert (one.run(torch.zeros(N), settings) == 0) == skip
        assert torch.equal(one.param.residual, kept[0]) == torch.equal(one.param.velocity, kept[1]) == skip


def test_sending_all_flushes_the_residual():
    one = One()
    one.run(torch.randn(N), rule())
    kept = one.param.residual.clone()
    grad = torch.randn(N)
    before = grad.clone()
    one.run(grad, rule(density=1.0))
    assert torch.equal(grad, before + kept) and not one.param.residual.any()


def test_a_plan_refuses_what_does_not_fit():
    one = One()
    with pytest.raises(ValueError, match=r"of 5 torch.float32.*wanted 150001"):
        one.run(torch.zeros(5), rule())
    with pytest.raises(ValueError, match=r"torch.float64.*wanted 150001 contiguous torch.float32"):
        one.run(torch.zeros(N, dtype=torch.float64), rule())
    with pytest.raises(ValueError, match=r"strides \(2,\)"):
        one.run(torch.zeros(2 * N)[::2], rule())
    with pytest.raises(ValueError, match=r"factor is on meta"):
        one.run(torch.zeros(N), rule(), factor=torch.ones(1, device="meta"))
    with pytest.raises(ValueError, match=r"overlap by 1"):
        prune.Plan([(0, one.param), (N - 1, one.param)], 2 * N, torch.float32, torch.device("cpu"))
    with pytest.raises(ValueError, match=r"leaves the gradient"):
        prune.Plan([(1, one.param)], N, torch.float32, torch.device("cpu"))
    with pytest.raises(ValueError, match="wanted host or CUDA memory"):
        prune.Plan([(0, one.param)], N, torch.float32, torch.device("meta"))


@pytest.mark.parametrize(
    "what, change, text",
    [
        (
            "residual",
            lambda t: t.double(),
            r"residual of 'weight' is 150001 torch.float64 .*150001 contiguous torch.float32",
        ),
        ("velocity", lambda t: t.half(), r"velocity of 'weight' is 150001 torch.float16"),
        ("residual", lambda t: t[1:], r"residual of 'weight' is 150000 torch.float32"),
        ("residual", lambda t: torch.stack([t, t], 1)[:, 0], r"with strides \(2,\)"),
        ("residual", lambda t: t.to("meta"), r"torch.float32 on meta .* on cpu"),
        ("state", lambda t: t.to("meta"), r"state of 'weight' is 6 torch.int64 on meta .* on cpu"),
    ],
)
def test_a_plan_refuses_a_slot_that_does_not_fit(what, change, text):
    param = One(velocity=True).param
    setattr(param, what, change(getattr(param, what)))
    with pytest.raises(ValueError, match=text):
        prune.Plan([(0, param)], N, torch.float32, torch.device("cpu"))


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
        ("max_ctas", 0),
    ],
)
def test_settings_out_of_range(name, value):
    with pytest.raises(ValueError, match=name):
        ddp.PrunedGradients(**{name: value})


def test_momentum_needs_error_feedback():
    with pytest.raises(ValueError, match="momentum"):
        ddp.PrunedGradients(momentum=0.9, error_feedback=False)


def test_one_rank_exchanges_nothing(one_rank, monkeypatch):
    """An all-reduce of one rank gives back its input, and on a GPU it costs a pass over it."""

    def refuse(*_, **__):
        raise AssertionError("all_reduce called")

    model, hook = wrapped(density=0.1)
    monkeypatch.setattr(dist, "all_reduce", refuse)
    for step in range(3):
        grads = backward(model, step)
    sent = sum(int(g.count_nonzero()) for g in grads)
    assert hook.step == 3 and hook.stats()["density_sent"] == pytest.approx(sent / 30_250, abs=1e-4)
    assert 0.05 < hook.stats()["density_pruned"] < 0.2


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
    assert first["steps"] == 1 and first["unsent_norm"] is None and hook.stats() == first
    sent = sum(int(torch.count_nonzero(p.grad)) for p in model.parameters())
    backward(model, 1)
    stats = hook.stats()
    total = sum(p.numel() for p in model.parameters())
    assert stats["dense_bytes"] == 4 * total
    assert first["density_sent"] == pytest.approx(sent / total, rel=1e-6)
    assert stats["density_target"] == 0.01 and 0.003 < stats["density_pruned"] < 0.04
    assert stats["sent_bytes"] == round(stats["density_sent"] * total) * 4
    assert stats["unsent_norm"] > 0 and stats["residual_ratio"] > 0 and stats["select_ms"] > 0
    assert stats["nonfinite_elems"] == 0


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
def test_a_state_of_the_first_version_loads(one_rank):
    """As the hook saved it when thresholds were carried from step to step."""
    held = torch.randn(20_000, generator=torch.Generator().manual_seed(5))
    empty = {"residual": None, "velocity": None, "threshold": None}
    entry = {"residual": held.clone(), "velocity": torch.ones(20_000), "threshold": 0.25}
    parameters = {"0.weight": entry, "0.bias": empty, "2.weight": empty, "2.bias": empty}
    model, hook = wrapped(momentum=0.5)
    hook.load_state_dict({"version": 1, "world_size": 1, "step": 7, "seed": 3, "parameters": parameters})
    given = backward(DistributedDataParallel(model.module), 0)[0].flatten()
    sent = backward(model, 0)[0].flatten()
    after = hook.state_dict()
    assert after["step"] == 8 and after["seed"] == 3
    kept = after["parameters"]["0.weight"]["residual"].flatten()
    torch.testing.assert_close(sent + kept, held + 0.5 + given)
    assert 0 < torch.count_nonzero(sent) < 1000
    assert torch.equal(held, entry["residual"])  # the caller's tensors are not ours to change


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
    with pytest.raises(ValueError, match=r"'0.weight' has shape \(5,\) in the state, wanted \(200, 100\)"):
        hook.load_state_dict({**saved, "parameters": parameters})
    with pytest.raises(ValueError, match="stranger"):
        hook.load_state_dict({**saved, "parameters": {"stranger": parameters["0.weight"]}})
    assert hook.step == 1  # a refused load changes nothing


@pytest.mark.parametrize("n_old, n_new", [(4, 2), (2, 4), (3, 2), (2, 3), (1, 5)])
def test_reshard_keeps_the_mean_residual(n_old, n_new):
    def state(rank):
        tensors = {"residual": torch.randn(50), "velocity": torch.randn(50), "threshold": 1.0}
        return {"version": 1, "world_size": n_old, "step": 7, "seed": 0, "parameters": {"w": tensors}}

    old = [state(r) for r in range(n_old)]
    new = ddp.PrunedGradients.reshard(old, n_new)
    assert [s["world_size"] for s in new] == [n_new] * n_new
    for key in ("residual", "velocity"):
        means = [sum(s["parameters"]["w"][key] for s in states) / len(states) for states in (old, new)]
        torch.testing.assert_close(means[0], means[1])
    (last,) = ddp.PrunedGradients.reshard(old, n_new, ranks=[n_new - 1])
    assert all(torch.equal(last["parameters"]["w"][k], new[-1]["parameters"]["w"][k]) for k in ("residual", "velocity"))
    with pytest.raises(ValueError, match="got 0 states for 2 ranks, wanted the states of all ranks"):
        ddp.PrunedGradients.reshard([], 2)
    with pytest.raises(ValueError, match="all ranks at one step"):
        ddp.PrunedGradients.reshard([*old, {**old[0], "step": 8}], n_new)


@pytest.mark.filterwarnings("ignore:PrunedGradients")
def test_local_clipping_bounds_what_is_accumulated(one_rank):
    model, hook = wrapped(clip_norm=1e-3)
    backward(model, 0)
    total = 0.0
    for name, p in model.module.named_parameters():
        residual = hook.state_dict()["parameters"][name]["residual"]
        kept = residual if residual is not None else torch.zeros_like(p)
        total += (p.grad + kept).square().sum().item()
    assert math.sqrt(total) == pytest.approx(1e-3, rel=1e-4)
    assert hook.stats()["update_norm"] > 1e-2
