"""spccl.optim on one rank: refusals, schedules, its exchange. Over ranks: tests/dist/test_sparse_sync_ranks.py."""

from __future__ import annotations

import copy
import math
import pydoc
import re
import warnings

import pytest

torch = pytest.importorskip("torch", reason="SparseSync is for torch, and none is installed")

import spccl  # noqa: E402
from spccl.optim import Geometric, SparseSync, checkpoint, moments  # noqa: E402


def model(dtype=torch.float32) -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(80, 100), torch.nn.Tanh(), torch.nn.Linear(100, 60)).to(dtype)


def adamw(net) -> torch.optim.Optimizer:
    return torch.optim.AdamW(net.parameters(), lr=1e-2)


def step(opt, net, seed=0) -> None:
    opt.zero_grad()
    x = torch.randn(16, 80, generator=torch.Generator().manual_seed(seed))
    net(x.to(next(net.parameters()).dtype)).float().square().mean().backward()
    opt.step()


def refuses(kind, *words):
    return pytest.raises(kind, match=".*".join(map(re.escape, words)))


@pytest.mark.parametrize(
    "settings, words",
    [
        ({"density": 0.0}, ("density=0.0", "in (0, 1]")),
        ({"density": 1.5}, ("density=1.5", "in (0, 1]", "0.01 is 1%")),
        ({"density": math.nan}, ("density=nan",)),
        ({"density": "1%"}, ("density='1%'",)),
        ({"every": 0}, ("every=0", "1 or more")),
        ({"every": 2.0}, ("every=2.0", "whole")),
        ({"warmup_steps": -1}, ("warmup_steps=-1",)),
        ({"density": Geometric(0.1, 3), "warmup_steps": 5}, ("warmup_steps=5", "0 when density is a function")),
        ({"leak": 0}, ("leak=0",)),
        ({"sum_density": 0.0}, ("sum_density=0.0", "in (0, 1], or None")),
        ({"sum_density": 0.1, "chunk": 256}, ("sum_density=0.1", "None with chunk")),
        ({"sum_density": 0.1, "chunk": 256, "bits": 2}, ("sum_density=0.1", "None with bits")),
        ({"sum_density": 0.1, "density": lambda i: 0.1}, ("sum_density=0.1", "None when density is a function")),
        ({"outer_lr": -1.0}, ("outer_lr=-1.0",)),
        ({"outer_momentum": 1.0}, ("outer_momentum=1.0", "[0, 1)")),
        ({"clip_norm": 0.0}, ("clip_norm=0.0",)),
        ({"sample": 2.0}, ("sample=2.0",)),
        ({"bucket_mb": 0}, ("bucket_mb=0",)),
        ({"seed": -1}, ("seed=-1",)),
        ({"look_ahead": 0.0}, ("look_ahead=0.0", "in (0, 1]")),
        ({"density": True}, ("density=True", "in (0, 1]")),
        ({"sample": "x"}, ("sample='x'", "in (0, 1]")),
        ({"sample": math.nan}, ("sample=nan",)),
        ({"leak": "x"}, ("leak='x'", "in (0, 1]")),
        ({"leak": True}, ("leak=True",)),
        ({"outer_lr": "x"}, ("outer_lr='x'", "a finite number above 0")),
        ({"outer_lr": math.inf}, ("outer_lr=inf",)),
        ({"outer_momentum": None}, ("outer_momentum=None", "[0, 1)")),
        ({"outer_momentum": math.nan}, ("outer_momentum=nan",)),
        ({"clip_norm": math.inf}, ("clip_norm=inf", "a finite number above 0, or None")),
        ({"clip_norm": math.nan}, ("clip_norm=nan",)),
        ({"clip_norm": True}, ("clip_norm=True",)),
        ({"clip_norm": "1"}, ("clip_norm='1'",)),
        ({"bucket_mb": math.inf}, ("bucket_mb=inf", "a finite number above 0")),
        ({"bucket_mb": "25"}, ("bucket_mb='25'",)),
        ({"check_finite": "no"}, ("check_finite='no'", "True or False")),
        ({"correct_second_moment": 1}, ("correct_second_moment=1", "None, False, True or 'scaled'")),
        ({"bits": 2.0, "chunk": 256}, ("bits=2.0", "2, or None")),
        ({"chunk": 1000}, ("chunk=1000", "a power of 2 from 256 to 4096")),
        ({"chunk": 128}, ("chunk=128",)),
        ({"wire_dtype": "bfloat16"}, ("wire_dtype='bfloat16'", "torch.bfloat16")),
    ],
)
def test_settings_out_of_range(settings, words):
    with refuses(ValueError, "SparseSync: ", *words):
        SparseSync(adamw(model()), **settings)


def test_density_1_that_may_mean_a_percent():
    with pytest.warns(UserWarning, match=r"SparseSync: density=1 sends every entry.*0\.01.*density=1\.0") as seen:
        SparseSync(adamw(model()), density=1)
    assert seen[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        SparseSync(adamw(model()), density=1.0)
        for density, words in ((5, "5 percent is density=0.05"), (5.0, "5.0 percent is"), (0, "wanted in (0, 1]")):
            with refuses(ValueError, f"density={density}", words):
                SparseSync(adamw(model()), density=density)


def test_repr_shows_settings_that_were_given_and_what_was_chosen():
    net = model()
    opt = SparseSync(adamw(net), density=0.05, clip_norm=2.0, overlap=net)
    expected = "SparseSync(density=0.05, every=1, clip_norm=2.0, overlap=True, second_moment='local', ranks=1, backend="
    assert repr(opt) == f"{expected}'none') of {opt.inner!r}"


@pytest.mark.parametrize("group", [3, "world", [0, 1]])
def test_a_group_that_is_none(group):
    with refuses(TypeError, "SparseSync: group is ", repr(group), type(group).__name__, "process group", "or None"):
        SparseSync(adamw(model()), group=group)


@pytest.mark.parametrize(
    "settings, words",
    [
        ({"end": "x", "steps": 3}, ("end='x'", "in (0, 1]")),
        ({"end": True, "steps": 3}, ("end=True",)),
        ({"end": 0.1, "steps": 3, "start": "x"}, ("start='x'", "[end, 1]")),
        ({"end": 0.1, "steps": 2.5}, ("steps=2.5", "a whole number")),
        ({"end": 0.1, "steps": 3, "dense": None}, ("dense=None", "a whole number")),
    ],
)
def test_a_geometric_schedule_of_no_numbers(settings, words):
    with refuses(ValueError, "Geometric: ", *words):
        Geometric(**settings)


def test_a_schedule_that_gives_no_number():
    net = model()
    opt = SparseSync(adamw(net), density=lambda exchange: "1%")
    with refuses(ValueError, "density schedule", "gave '1%' at exchange 0", "(0, 1]"):
        step(opt, net)


def test_schedules_are_compared_by_their_values():
    """Ranks compare these facts. Two lambdas of the same name differ; a function and a class of equal values do not."""

    def facts(density):
        return SparseSync(adamw(model()), density=density).settings.facts()

    class Falling:
        def __call__(self, exchange):
            return 1 / (1 + exchange)

    assert facts(lambda e: 0.01) != facts(lambda e: 0.02)
    assert facts(lambda e: 0.02 if e < 1000 else 0.01) != facts(lambda e: 0.02)
    assert facts(lambda e: 1 / (1 + e)) == facts(Falling())
    assert facts(Geometric(0.1, 5)) == facts(Geometric(0.1, 5)) != facts(Geometric(0.1, 6))
    assert facts([0.5, 0.25].__getitem__)["density of exchange 2"] == "a IndexError"  # no exchange 2 need come


def test_a_schedule_that_leaves_its_range():
    net = model()
    opt = SparseSync(adamw(net), density=lambda exchange: 0.5 - 0.25 * exchange)
    step(opt, net)
    step(opt, net)
    with refuses(ValueError, "density schedule", "gave 0.0 at exchange 2", "(0, 1]"):
        step(opt, net)
    with refuses(ValueError, "Geometric: start=0.1", "[end, 1]"):
        Geometric(end=0.5, steps=3, start=0.1)


def test_optimizers_that_need_a_closure():
    net = model()
    with refuses(TypeError, "LBFGS", "closure", "AdamW"):
        SparseSync(torch.optim.LBFGS(net.parameters()))
    with refuses(TypeError, "got a Sequential", "torch.optim.Optimizer"):
        SparseSync(net)

    class Sharpness(torch.optim.SGD):
        def step(self, closure):
            raise AssertionError("never called")

    with refuses(TypeError, "Sharpness", "closure", "different numbers of times"):
        SparseSync(Sharpness(net.parameters(), lr=0.1))


def test_a_closure_is_called_once_before_the_step():
    """As Lightning does it. The weights, the moments and the loss are those of backward() and step()."""
    nets = [model(), model()]
    x = torch.randn(8, 80)
    calls = []
    first, second = (SparseSync(adamw(net), density=0.1) for net in nets)
    for _ in range(3):

        def closure():
            assert torch.is_grad_enabled() and first.steps == len(calls)
            first.zero_grad()
            loss = nets[0](x).square().mean()
            loss.backward()
            calls.append(loss)
            return loss

        assert first.step(closure) is calls[-1]
        second.zero_grad()
        loss = nets[1](x).square().mean()
        loss.backward()
        assert second.step() is None and torch.equal(loss, calls[-1])
    assert len(calls) == 3
    for ours, theirs in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_a_mark_stands_for_a_state_that_is_kept_apart(tmp_path):
    """Frameworks save one optimizer state for all ranks: a mark takes its place, and is of no use alone."""
    net, again = model(), model()
    opt = SparseSync(adamw(net), density=0.1)
    opt.states_apart = True
    step(opt, net)
    torch.save(opt.state_dict(), tmp_path / "optimizer.pt")
    torch.save(checkpoint.save(opt), tmp_path / "rank-0.pt")
    step(opt, net)
    opt.load_state_dict(torch.load(tmp_path / "optimizer.pt", weights_only=True))
    with refuses(RuntimeError, "rank 0", "checkpoint of step 1", "at step 2", "spccl-rank-", "FRAMEWORKS"):
        step(opt, net)
    checkpoint.load(opt, torch.load(tmp_path / "rank-0.pt", weights_only=True))
    step(opt, net)
    other = SparseSync(adamw(again), density=0.1)
    other.load_state_dict(torch.load(tmp_path / "optimizer.pt", weights_only=True))
    other.load_state_dict(torch.load(tmp_path / "rank-0.pt", weights_only=True))
    step(other, again)
    for ours, theirs in zip(net.parameters(), again.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    other.load_state_dict(checkpoint.mark(other))
    step(other, again)  # a mark of this very step asks for nothing


def test_a_state_saved_apart_has_the_exchange_under_way():
    net = model()
    opt = SparseSync(adamw(net), density=0.1, overlap=net)
    step(opt, net)
    assert opt.transfers.pending
    saved = checkpoint.save(opt)["sparse_sync"]["parameters"]
    assert not opt.transfers.pending
    with opt.global_weights():
        for entry, param in zip(saved, net.parameters(), strict=True):
            assert torch.equal(entry["global"], param)


def test_parameters_that_come_later():
    net = model()
    opt = SparseSync(adamw(net))
    late = torch.nn.Parameter(torch.zeros(3, 4))
    with refuses(RuntimeError, "cannot be added later", "make a new SparseSync"):
        opt.add_param_group({"params": [late]})
    opt.inner.add_param_group({"params": [late]})
    with refuses(RuntimeError, "shape (3, 4)", "was not there"):
        step(opt, net)


def test_a_parameter_that_is_removed_later():
    net = model()
    opt = SparseSync(adamw(net))
    assert opt.inner.param_groups[0]["params"].pop() is net[2].bias
    with refuses(RuntimeError, "parameter 3 of shape (60,) was removed", "make a new SparseSync"):
        step(opt, net)


def test_a_parameter_that_is_frozen_later():
    net = model()
    opt = SparseSync(adamw(net))
    net[0].weight.requires_grad_(False)
    before = net[0].weight.clone()
    step(opt, net)
    assert torch.equal(net[0].weight, before)


def test_a_parameter_that_is_unfrozen_later():
    net = model()
    net[0].weight.requires_grad_(False)
    opt = SparseSync(adamw(net))
    step(opt, net)
    net[0].weight.requires_grad_(True)
    with refuses(RuntimeError, "shape (100, 80)", "did not require a gradient"):
        step(opt, net)


def test_a_parameter_that_moved():
    net = model()
    opt = SparseSync(adamw(net))
    net[2].weight.data = net[2].weight.data.clone()
    with refuses(RuntimeError, "parameter 2 has other memory", "before the optimizer is made"):
        step(opt, net)


def test_parameters_that_cannot_be_exchanged():
    complex_ = torch.nn.Parameter(torch.zeros(3, dtype=torch.complex64))
    with refuses(TypeError, "parameter 0 is torch.complex64"):
        SparseSync(torch.optim.SGD([complex_], lr=1.0))
    with refuses(ValueError, "parameter 0 is on meta"):
        SparseSync(torch.optim.SGD([torch.nn.Parameter(torch.zeros(3, device="meta"))], lr=1.0))
    gaps = torch.nn.Parameter(torch.zeros(4, 6)[:, ::2])
    with refuses(ValueError, "parameter 0 has shape (4, 3)", "gaps"):
        SparseSync(torch.optim.SGD([gaps], lr=1.0))
    net = model().requires_grad_(False)
    with refuses(ValueError, "no parameter", "requires a gradient"):
        SparseSync(adamw(net))


def test_correction_of_other_optimizers():
    net = model()
    with refuses(ValueError, "correct_second_moment=True with a SGD", "Adam"):
        SparseSync(torch.optim.SGD(net.parameters(), lr=1.0), correct_second_moment=True)


def test_default_second_moment():
    """One rank's own; v / N for few ranks; the corrected one for many, where v / N would make too long steps."""
    opt = SparseSync(adamw(model()))
    found = [moments.decide(opt.inner, opt.settings, n_ranks) for n_ranks in (1, 4, 8, 9)]
    assert found == ["local", "scaled", "scaled", "corrected"]


def test_any_memory_order():
    """Parameters in channels_last or transposed memory are exchanged in their own order."""
    torch.manual_seed(0)
    conv = torch.nn.Conv2d(8, 70, 3).to(memory_format=torch.channels_last)
    turned = torch.nn.Parameter(torch.randn(90, 80).T)
    params = [conv.weight, turned]
    opt = SparseSync(torch.optim.SGD(params, lr=1.0), density=0.01)
    before = [p.detach().clone() for p in params]
    for p in params:
        p.grad = torch.randn_like(p)
    opt.step()
    with opt.global_weights():
        for p, start in zip(params, before, strict=True):
            moved = p.detach() != start
            assert 0 < int(moved.sum()) < 0.05 * p.numel()
            assert (p.grad[moved].abs() > p.grad.abs().quantile(0.9)).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_one_rank_trains(dtype):
    """Alone: local weights are those of the inner optimizer, global ones lag behind until consolidate()."""
    net, plain = model(dtype), model(dtype)
    opt, other = SparseSync(torch.optim.SGD(net.parameters(), lr=0.5), density=0.05), None
    other = torch.optim.SGD(plain.parameters(), lr=0.5)
    for i in range(5):
        step(opt, net, i)
        step(other, plain, i)
    tolerance = {torch.float16: 2e-3, torch.bfloat16: 2e-2}.get(dtype, 1e-6)
    for p, q in zip(net.parameters(), plain.parameters(), strict=True):
        assert (p - q).abs().max() <= tolerance
    with opt.global_weights():
        assert any(not torch.equal(p, q) for p, q in zip(net.parameters(), plain.parameters(), strict=True))
    opt.consolidate()
    own = [p.detach().clone() for p in net.parameters()]
    with opt.global_weights():
        assert all(torch.equal(p, q) for p, q in zip(net.parameters(), own, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_reading_between_exchanges_changes_nothing(dtype):
    """With local steps: state_dict() and global_weights() in the middle, and a run that continues from that state."""

    def run(reads: bool, resumes: bool = False) -> list[torch.Tensor]:
        def made():
            net = model(dtype)
            return net, SparseSync(torch.optim.SGD(net.parameters(), lr=0.5), density=0.05, every=3, outer_lr=0.7)

        net, opt = made()
        for t in range(7):
            step(opt, net, t)
            state = copy.deepcopy(opt.state_dict()) if reads else None
            if reads:
                with opt.global_weights():
                    pass
            if resumes and t == 4:
                net, opt = made()
                opt.load_state_dict(state)
        return [p.detach() for p in net.parameters()]

    plain = run(False)
    for other in (run(True), run(True, resumes=True)):
        assert all(torch.equal(p, q) for p, q in zip(plain, other, strict=True))


def test_global_weights_is_a_block():
    net = model()
    opt = SparseSync(adamw(net), density=0.01)
    step(opt, net)
    own = [p.detach().clone() for p in net.parameters()]
    with pytest.raises(KeyError), opt.global_weights():
        with refuses(RuntimeError, "inside `with opt.global_weights()`"):
            step(opt, net)
        with refuses(RuntimeError, "already inside"), opt.global_weights():
            pass
        inside = opt.state_dict()["sparse_sync"]["parameters"]
        raise KeyError
    assert all(torch.equal(p, q) for p, q in zip(net.parameters(), own, strict=True))
    outside = opt.state_dict()["sparse_sync"]["parameters"]
    for a, b in zip(inside, outside, strict=True):
        assert torch.equal(a["global"], b["global"]) and torch.equal(a["local"], b["local"])


def test_stats():
    net = model()
    opt = SparseSync(adamw(net), density=0.05, norm_every=2)
    first = opt.stats()
    assert first["update_norm"] is None and first["density_target"] == 0.05
    of_a_hook = spccl.ddp.PrunedGradients(0.02).stats()
    assert of_a_hook["density_target"] == 0.02 and of_a_hook["update_norm"] is None
    assert set(first) == set(of_a_hook) and opt.stats() == first
    for documented in (SparseSync.stats, spccl.ddp.PrunedGradients.stats):
        assert all(f"    {key} " in pydoc.getdoc(documented) for key in first)
    before = [p.detach().clone() for p in net.parameters()]
    step(opt, net)
    with opt.global_weights():
        middle = [p.detach().clone() for p in net.parameters()]
    start = [p.detach().clone() for p in net.parameters()]
    step(opt, net, 1)
    stats = opt.stats()
    own = [p.detach().clone() for p in net.parameters()]
    update = math.sqrt(sum(float((p - q).square().sum()) for p, q in zip(own, start, strict=True)))
    with opt.global_weights():
        unsent = math.sqrt(sum(float((p - q).square().sum()) for p, q in zip(net.parameters(), own, strict=True)))
        sent = sum(int((p != q).sum()) for p, q in zip(net.parameters(), middle, strict=True))
    numel = sum(p.numel() for p in net.parameters())
    assert abs(stats["update_norm"] / update - 1) < 0.05 and abs(stats["unsent_norm"] / unsent - 1) < 0.05
    assert stats["residual_ratio"] == stats["unsent_norm"] / stats["update_norm"]
    assert abs(stats["density_sent"] - sent / numel) < 2 / numel
    assert stats["dense_bytes"] == 4 * numel and stats["backend"] == "none" and stats["wire_bytes"] is None
    assert before[0].shape == middle[0].shape


def test_memory_is_as_stated():
    """Beside the optimizer: 4 bytes per float32 parameter, 8 per 16-bit one, and two buffers of a bucket."""
    for dtype, each in ((torch.float32, 4), (torch.bfloat16, 8)):
        net = model(dtype)
        opt = SparseSync(torch.optim.SGD(net.parameters(), lr=0.1), bucket_mb=0.02)
        numel = sum(p.numel() for p in net.parameters())
        kept = sum(t.nbytes for b in opt.buckets for t in (b.globals, b.masters, b.velocity) if t is not None)
        buffers = sum(t.nbytes for pair in opt.transfers.scratch.values() for t in pair)
        assert kept == each * numel
        assert buffers == 2 * 4 * max(b.numel for b in opt.buckets)


def test_sparse_gradients():
    """nn.Embedding(sparse=True) with SparseAdam: the change of the weights is what counts."""
    table = torch.nn.Embedding(200, 50, sparse=True)
    opt = SparseSync(torch.optim.SparseAdam(table.parameters(), lr=0.1), density=0.01)
    for i in range(3):
        opt.zero_grad()
        table(torch.tensor([i, 7])).sum().backward()
        opt.step()
    assert opt.stats()["skipped_steps"] == 0 and opt.stats()["density_sent"] > 0


def test_clipping_of_sparse_gradients():
    """A row that is looked up often is in the gradient as often: the norm is that of the sum."""
    table = torch.nn.Embedding(100, 64, sparse=True)
    opt = SparseSync(torch.optim.SGD(table.parameters(), lr=1.0), clip_norm=1.0, density=1.0)
    before = table.weight.detach().clone()
    table(torch.full((4000,), 7)).sum().backward()
    opt.step()
    assert abs(float((table.weight.detach() - before).norm()) - 1) < 1e-4


@pytest.mark.parametrize("every", [1, 2])
def test_compiled_step(every):
    """torch.compile(opt.step) runs it uncompiled: the counts of steps advance, which checkpoints and schedules use."""
    net = model()
    opt = SparseSync(adamw(net), density=0.1, every=every)
    compiled = torch.compile(opt.step, backend="eager")
    for i in range(4):
        net(torch.randn(8, 80)).square().mean().backward()
        compiled()
        assert (opt.steps, opt.exchanges) == (i + 1, (i + 1) // every)


def test_scheduler_and_hooks():
    net = model()
    opt = SparseSync(adamw(net))
    scheduler = torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=0.1, total_steps=10)
    calls = []
    opt.register_step_post_hook(lambda *_: calls.append(1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for i in range(3):
            step(opt, net, i)
            scheduler.step()
    assert len(calls) == 3
    assert opt.param_groups[0]["lr"] == scheduler.get_last_lr()[0]
    with refuses(TypeError, "cannot be pickled", "state_dict()"):
        import pickle

        pickle.dumps(opt)


def test_reshard_refuses_states_of_several_shards():
    states = [
        {"sparse_sync": {"world_size": 2, "rank": rank, "steps": 3, "shard": ((rank, 2),), "parameters": []}}
        for rank in range(2)
    ]
    with pytest.raises(ValueError, match="hold one shard, got shards"):
        SparseSync.reshard(states, 2)
