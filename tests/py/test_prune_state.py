"""States of spccl.ddp that an older version saved, or that do not fit the model; optimizers that do not suit it."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="the DDP hook is for torch, and none is installed")

import torch.distributed as dist  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

from spccl import ddp  # noqa: E402

SAVED = Path(__file__).parent / "data" / "hook_state_761e286.pt"


@pytest.fixture
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("name", ["warmup_steps", "dense_steps", "norm_every", "min_numel", "max_ctas", "seed"])
@pytest.mark.parametrize("value", [1e3, 0.5, True, "3", 2**64])
def test_settings_that_are_no_whole_numbers(name, value):
    with pytest.raises(ValueError, match=rf"PrunedGradients: {name}=.*, wanted a whole number"):
        ddp.PrunedGradients(**{name: value})


def test_steps_beyond_32_bits_are_refused():
    with pytest.raises(ValueError, match=r"dense_steps=4294967296, wanted a whole number, 0 to 2\^32 - 1"):
        ddp.PrunedGradients(dense_steps=2**32)
    assert ddp.PrunedGradients(dense_steps=2**32 - 1, seed=-1, min_numel=2**40).dense_steps == 2**32 - 1


def wrapped():
    """The model of the saved state, and its hook."""
    model = torch.nn.Sequential(torch.nn.Linear(20, 16), torch.nn.Tanh(), torch.nn.Linear(16, 10))
    model = DistributedDataParallel(model)
    return model, ddp.PrunedGradients(density=0.1, momentum=0.9, min_numel=100).register(model)


def test_a_state_saved_by_761e286_loads(one_rank):
    """That version's hook wrote the fixture, on one rank: density 0.1, momentum 0.9, min_numel 100, 5 steps."""
    saved = torch.load(SAVED, weights_only=True)
    model, hook = wrapped()
    hook.load_state_dict(saved)
    again = hook.state_dict()
    assert (again["step"], again["seed"], again["world_size"]) == (5, 5, 1)
    for name, entry in saved["parameters"].items():
        for key in ("residual", "velocity"):
            assert (entry[key] is None) == (again["parameters"][name][key] is None), (name, key)
            assert entry[key] is None or torch.equal(entry[key], again["parameters"][name][key].flatten()), (name, key)
            assert entry[key] is None or again["parameters"][name][key].shape == model.module.get_parameter(name).shape
    x = torch.randn(8, 20, generator=torch.Generator().manual_seed(9))
    plain = torch.autograd.grad(model.module(x).square().mean(), list(model.module.parameters()))
    model(x).square().mean().backward()
    now = hook.state_dict()
    assert now["step"] == 6
    for (name, param), grad in zip(model.module.named_parameters(), plain, strict=True):
        old, new = saved["parameters"][name], now["parameters"][name]
        velocity = 0.9 * old["velocity"] + grad.flatten()
        if old["residual"] is None:  # sent whole
            torch.testing.assert_close(param.grad.flatten(), velocity, rtol=1e-5, atol=1e-7)
            continue
        sent = param.grad.flatten()
        assert 0 < torch.count_nonzero(sent) < sent.numel() // 2
        kept = new["residual"].flatten()
        torch.testing.assert_close(sent + kept, old["residual"] + velocity, rtol=1e-5, atol=1e-7)


def test_what_is_no_state_of_this_model_is_refused(one_rank):
    _, hook = wrapped()
    state = torch.load(SAVED, weights_only=True)
    with pytest.raises(ValueError, match=r"the state has no parameters, seed, step, version, world_size; wanted what"):
        hook.load_state_dict({"0.weight": torch.zeros(16, 20)})
    state["parameters"]["0.weight"]["residual"] = torch.zeros(5)
    with pytest.raises(ValueError, match=r"'0.weight' has shape \(5,\) in the state, wanted \(320,\)"):
        hook.load_state_dict(state)
    states = [{**state, "world_size": 2, "version": version} for version in (1, 2)]
    with pytest.raises(ValueError, match=r"got \[\(2, 5, 1\), \(2, 5, 2\)\] as \(ranks, step, version\)"):
        ddp.PrunedGradients.reshard(states, 1)


def test_a_loaded_residual_of_another_dtype_is_refused(one_rank):
    model, hook = wrapped()
    state = torch.load(SAVED, weights_only=True)
    state["parameters"]["0.weight"]["residual"] = state["parameters"]["0.weight"]["residual"].double()
    hook.load_state_dict(state)
    with pytest.raises((ValueError, RuntimeError), match=r"residual of '0.weight' is 320 torch.float64"):
        model(torch.ones(8, 20)).sum().backward()


@pytest.mark.filterwarnings("ignore:PrunedGradients")
def test_adam_like_optimizers_are_refused(one_rank):
    model, hook = wrapped()
    for kind in (torch.optim.AdamW, torch.optim.Adam, torch.optim.RMSprop):
        adam = kind(model.parameters(), lr=1e-3)
        with pytest.raises(ValueError, match=rf"got {kind.__name__} as optimizer, wanted SGD.*SparseSync.*allow_adam"):
            ddp.PrunedGradients().register(model, optimizer=adam)
    with pytest.raises(RuntimeError, match="already registered"):  # past the check of the optimizer
        hook.register(model, optimizer=adam, allow_adam=True)
    with pytest.raises(RuntimeError, match="already registered"):
        hook.register(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))


def convolution(turned: bool):
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 2))
    model = model.to(memory_format=torch.channels_last) if turned else model
    return DistributedDataParallel(model)


@pytest.mark.filterwarnings("ignore:PrunedGradients. the group's backend")
@pytest.mark.parametrize("early", [False, True])
def test_version_1_is_read_in_the_memory_format_of_the_model(one_rank, early):
    """It has flat tensors in the order of the memory, and does not say which order that was."""
    flat = torch.arange(48.0)
    entry = {"residual": flat, "velocity": None, "threshold": None}
    state = {"version": 1, "world_size": 1, "step": 3, "seed": 0, "parameters": {"0.weight": entry}}
    model, hook = convolution(turned=True), ddp.PrunedGradients(min_numel=1)
    if early:
        hook.load_state_dict(state)
        assert hook.state_dict() == state  # of version 1 as long as no shapes are known
    with pytest.warns(UserWarning, match=r"version 1.*memory format.*'0.weight' and 0 others") as seen:
        hook.register(model)
        if not early:
            hook.load_state_dict(state)
    assert len(seen) == 1
    again = hook.state_dict()
    expected = flat.view(4, 2, 2, 3).permute(0, 3, 1, 2)
    assert again["version"] == 2 and torch.equal(again["parameters"]["0.weight"]["residual"], expected)
    model(torch.zeros(1, 3, 5, 5)).sum().backward()  # the weight's gradient is 0
    kept = hook.state_dict()["parameters"]["0.weight"]["residual"]
    assert torch.equal(model.module[0].weight.grad + kept, expected)


@pytest.mark.filterwarnings("ignore:PrunedGradients. the group's backend")
def test_the_first_step_of_an_optimizer_that_does_not_suit_warns(one_rank, recwarn):
    def texts():
        return [str(w.message) for w in recwarn if "the first optimizer step" in str(w.message)]

    model, _ = wrapped()
    stranger = torch.nn.Linear(2, 2)
    stranger(torch.ones(2)).sum().backward()
    torch.optim.AdamW(stranger.parameters()).step()
    assert not texts()
    adam = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        model(torch.ones(8, 20)).sum().backward()
        adam.step()
        adam.zero_grad()
    (text,) = texts()
    assert "got AdamW as optimizer, wanted SGD" in text and "SparseSync(AdamW(...)" in text
    attached, other = DistributedDataParallel(torch.nn.Linear(20, 16)), ddp.PrunedGradients(momentum=0.9)
    attached.register_comm_hook(other, ddp.pruned_gradients_hook)
    attached(torch.ones(8, 20)).sum().backward()
    torch.optim.SGD(attached.parameters(), lr=0.1, momentum=0.5).step()
    assert len(texts()) == 2 and "momentum=0.5 in SGD and momentum=0.9 in the hook" in texts()[1]


@pytest.mark.filterwarnings("ignore:PrunedGradients. the group's backend")
def test_the_first_step_says_nothing_if_the_optimizer_suits_or_was_named(one_rank, recwarn):
    for settings, kind in (({}, torch.optim.SGD), ({"allow_adam": True}, torch.optim.AdamW)):
        model = DistributedDataParallel(torch.nn.Linear(20, 16))
        optimizer = kind(model.parameters(), lr=0.1)
        for named in ({}, {"optimizer": optimizer}):
            model = DistributedDataParallel(model.module)
            ddp.PrunedGradients().register(model, **named, **settings)
            model(torch.ones(8, 20)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert not [w for w in recwarn if "optimizer" in str(w.message)]


def test_settings_that_do_not_exist_name_the_class():
    with pytest.raises(TypeError, match=r"^PrunedGradients: got sparsity=0.99, .*; sparsity=0.99 is density=0.01$"):
        ddp.PrunedGradients(sparsity=0.99)
    with pytest.raises(TypeError, match=r"^PrunedGradients: got densty=0.01, wanted one of the settings density, "):
        ddp.PrunedGradients(densty=0.01)


def test_percent_as_density_is_explained(recwarn):
    with pytest.raises(ValueError, match=r"density=5, wanted in \(0, 1\]; 5 percent is density=0.05$"):
        ddp.PrunedGradients(density=5)
    ddp.PrunedGradients(density=1.0)
    assert not recwarn
    with pytest.warns(UserWarning, match=r"PrunedGradients: density=1 sends every entry; one percent is density=0.01"):
        ddp.PrunedGradients(density=1)


def test_a_state_with_a_part_missing_is_refused():
    state = {"version": 2, "world_size": 1, "step": 3, "seed": 0, "parameters": {"weight": {"residual": None}}}
    with pytest.raises(ValueError, match=r"PrunedGradients.load_state_dict: .* 'weight' has no velocity; wanted what"):
        ddp.PrunedGradients().load_state_dict(state)


def test_a_hook_on_no_model_is_copied_whole():
    hook = ddp.PrunedGradients(0.02, momentum=0.9)
    for other in (copy.deepcopy(hook), pickle.loads(pickle.dumps(hook))):
        assert repr(other) == repr(hook) and isinstance(other, ddp.PrunedGradients)


def test_repr_shows_the_settings():
    assert repr(ddp.PrunedGradients()) == "PrunedGradients(density=0.01; step 0)"
    hook = ddp.PrunedGradients(0.05, momentum=0.9, residual_dtype=torch.bfloat16)
    assert repr(hook) == "PrunedGradients(density=0.05, momentum=0.9, residual_dtype=torch.bfloat16; step 0)"
