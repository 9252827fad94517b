"""The state of a SparseSync: it does not depend on memory formats, and a state that does not fit is refused by name."""

from __future__ import annotations

import copy
import functools
import io
import re

import pytest

torch = pytest.importorskip("torch", reason="SparseSync is for torch, and none is installed")

from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict  # noqa: E402

from spccl.optim import SparseSync  # noqa: E402


def conv(channels_last: bool, dtype=torch.float32) -> torch.nn.Module:
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Conv2d(16, 32, 3), torch.nn.Tanh(), torch.nn.Conv2d(32, 8, 3)).to(dtype)
    return net.to(memory_format=torch.channels_last) if channels_last else net


def train(net, opt, n_steps: int, first: int = 0) -> None:
    for seed in range(first, first + n_steps):
        opt.zero_grad()
        x = torch.randn(2, 16, 8, 8, generator=torch.Generator().manual_seed(seed))
        net(x.to(net[0].weight.dtype)).float().square().mean().backward()
        opt.step()


def saved(opt) -> dict:
    """The state as it comes out of a file."""
    file = io.BytesIO()
    torch.save(opt.state_dict(), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("settings", [{}, {"outer_momentum": 0.9}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_another_memory_format(dtype, settings):
    """Local and global weights, velocity and moments of a channels_last model in a contiguous one, and back. The step
    after loading does the same too: a moment in another order than its parameter would spoil its correction."""
    for channels_last in (True, False):
        nets = [conv(channels_last, dtype), conv(not channels_last, dtype)]
        opts = [
            SparseSync(torch.optim.AdamW(net.parameters(), lr=1e-2), density=0.05, sample=1.0, **settings)
            for net in nets
        ]
        train(nets[0], opts[0], 4)
        state = saved(opts[0])
        opts[1].load_state_dict(state)
        for ours, theirs in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
            assert torch.equal(ours, theirs)
        again = opts[1].state_dict()["sparse_sync"]["parameters"]
        for a, b in zip(state["sparse_sync"]["parameters"], again, strict=True):
            for key in ("global", "local", "velocity"):
                assert (a[key] is None and b[key] is None) or torch.equal(a[key], b[key]), key
        with opts[0].global_weights(), opts[1].global_weights():
            for ours, theirs in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
                assert torch.equal(ours, theirs)
        for net, opt in zip(nets, opts, strict=True):
            opt._moment, opt.ranks.hosts = "corrected", opt.ranks.hosts._replace(n_pruning=4)
            gradients = torch.Generator().manual_seed(7)
            for p in net.parameters():
                p.grad = torch.empty_like(p).copy_(torch.randn(p.shape, generator=gradients))
            opt._local_step()
            opt._after_local_step(True, True)
        for ours, theirs in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
            torch.testing.assert_close(ours, theirs)


def named(order: str, shape=(90, 100)) -> tuple[torch.nn.Module, SparseSync]:
    torch.manual_seed(0)
    net = torch.nn.ParameterDict({name: torch.nn.Parameter(torch.randn(shape)) for name in "ab"})
    opt = SparseSync(torch.optim.AdamW([(name, net[name]) for name in order], lr=1e-2), density=0.05)
    (net["a"].square().sum() + net["b"].sin().sum()).backward()
    opt.step()
    return net, opt


def test_named_parameters_in_another_order():
    """Their shapes are equal: the names alone show it."""
    _, opt = named("ab")
    other, wrong = named("ba")
    before = {name: p.detach().clone() for name, p in other.items()}
    words = "parameter 0 is a of shape (90, 100) in the state and b of shape (90, 100) here"
    with pytest.raises(ValueError, match=re.escape(words) + ".*in the same order"):
        wrong.load_state_dict(saved(opt))
    assert all(torch.equal(before[name], p) for name, p in other.items()), "nothing was changed"
    named("ab")[1].load_state_dict(saved(opt))


def test_names_of_a_compiled_model():
    """torch.compile puts _orig_mod. before names. A state without names fits as well."""
    state = saved(named("ab")[1])
    _, opt = named("ab")
    for names in (["_orig_mod.a", "_orig_mod.b"], [None, None]):
        for w, name in zip(opt._weights, names, strict=True):
            w.name, opt._named = name or str(w.index), name is not None
        opt.load_state_dict(copy.deepcopy(state))
        assert opt.state_dict()["sparse_sync"]["names"] == (["a", "b"] if names[0] else names)


def test_another_shape_and_a_missing_parameter():
    state = saved(named("ab")[1])
    with pytest.raises(ValueError, match=re.escape("0 is a of shape (90, 100) in the state and a of shape (100, 90)")):
        named("ab", (100, 90))[1].load_state_dict(state)
    one = SparseSync(torch.optim.AdamW([("a", torch.nn.Parameter(torch.zeros(90, 100)))]))
    with pytest.raises(ValueError, match=r"1 is b of shape \(90, 100\) in the state and absent here \(2 and 1"):
        one.load_state_dict(state)


def as_version_1(state: dict) -> dict:
    """Version 1 had flat weights in the order of memory, which was that of the shape here."""
    mine = state["sparse_sync"]
    parameters = [
        {**entry, "shape": shape, "global": entry["global"].flatten(), "local": entry["local"].flatten()}
        for entry, shape in zip(mine["parameters"], mine["shapes"], strict=True)
    ]
    mine = {key: value for key, value in mine.items() if key not in ("names", "shapes")}
    return {**state, "sparse_sync": {**mine, "version": 1, "parameters": parameters}}


def test_the_version_before():
    net, opt = named("ab")
    state = as_version_1(saved(opt))
    for again in (state, opt.reshard([state], 1)[0]):
        other, loaded = named("ab")
        with torch.no_grad():
            other["a"].zero_()
        loaded.load_state_dict(again)
        for name, p in net.items():
            torch.testing.assert_close(p, other[name])  # reshard() rounds
    with pytest.raises(ValueError, match=re.escape("0 is of shape (90, 100) in the state and a of shape (100, 90)")):
        named("ab", (100, 90))[1].load_state_dict(state)
    net = conv(False)
    opt = SparseSync(torch.optim.AdamW(net.parameters()), density=0.05)
    train(net, opt, 1)
    with pytest.raises(ValueError, match=r"version 1, .* memory format parameter 0 of shape \(32, 16, 3, 3\) was"):
        opt.load_state_dict(as_version_1(saved(opt)))
    with pytest.raises(ValueError, match=r"got version 3, wanted .* of version 2 or 1"):
        opt.load_state_dict({"sparse_sync": {"version": 3}})


def test_torch_distributed_checkpoint():
    """get_optimizer_state_dict() would drop the state of this object: it is refused when saving."""
    net = torch.nn.Linear(80, 80)
    opt = SparseSync(torch.optim.AdamW(net.parameters()), density=0.05)
    with pytest.raises(RuntimeError, match=r"get_optimizer_state_dict\(\) would drop"):
        get_optimizer_state_dict(net, opt)  # it calls step() of an optimizer that has no state
    assert opt.exchanges == 0
    opt.zero_grad()
    net(torch.randn(4, 80)).sum().backward()
    opt.step()
    for opt.states_apart in (False, True):
        with pytest.raises(RuntimeError, match=r"get_optimizer_state_dict\(\) would drop .* save opt.state_dict\(\)"):
            get_optimizer_state_dict(net, opt)
        assert "sparse_sync" in opt.state_dict()


def test_older_words_act_with_one_warning():
    net = torch.nn.Linear(4, 4)
    make = functools.partial(SparseSync, torch.optim.SGD(net.parameters(), lr=0.1), density=0.01)
    with pytest.warns(FutureWarning, match="is now called") as seen:
        opt = make(every=3, warmup=4, decay=0.5)
        assert opt.summary() == make(warmup=4).summary()
    assert {w.filename for w in seen} == {__file__}
    named = [str(w.message).partition(": ")[2].split(" is now called ") for w in seen]
    assert named == [["warmup", "warmup_steps"], ["decay", "leak"], ["summary()", "stats()"]]
    assert opt.settings.warmup_steps == 12 and opt.settings.schedule().steps == 4 and opt.settings.leak == 0.5
    with pytest.raises(TypeError, match=r"SparseSync: got sparsity=0.99, wanted one of .*warmup_steps.*density=0.01"):
        make(sparsity=0.99)


def test_a_state_of_another_look_ahead():
    """What is unsent stays the same; the weights hold another part of it."""
    nets = [conv(False), conv(False)]
    opts = [
        SparseSync(torch.optim.AdamW(net.parameters(), lr=1e-2), density=0.05, look_ahead=part)
        for net, part in zip(nets, (0.5, 1.0), strict=True)
    ]
    train(nets[0], opts[0], 4)
    state = saved(opts[0])
    opts[1].load_state_dict(state)
    for entry, w in zip(state["sparse_sync"]["parameters"], nets[1].parameters(), strict=True):
        unsent = 2 * (entry["local"] - entry["global"])
        assert w.numel() < 4096 or float(unsent.norm()) > 0.01
        torch.testing.assert_close(w.detach() - entry["global"], unsent, rtol=0, atol=1e-6)
    for opt in opts:
        opt.consolidate()
    for w, v in zip(*(net.parameters() for net in nets), strict=True):
        torch.testing.assert_close(w, v, rtol=0, atol=1e-6)
