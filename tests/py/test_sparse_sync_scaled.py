"""SparseSync under GradScaler, on one rank: float16 parameters, clipping, and who must be given to the scaler."""

from __future__ import annotations

import contextlib
import re

import pytest

torch = pytest.importorskip("torch", reason="SparseSync is for torch, and none is installed")

from spccl.optim import SparseSync  # noqa: E402


def scaler(scale: float = 65536.0) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=scale)


def fused(net) -> torch.optim.Optimizer:
    return torch.optim.AdamW(net.parameters(), lr=1e-2, eps=1e-12, weight_decay=0.0, fused=True)


def half_layer() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Linear(100, 100).half()


def train(net, opt, scale: float = 65536.0, factor: float = 1.0) -> None:
    amp = scaler(scale)
    for _ in range(3):
        opt.zero_grad()
        amp.scale(net(torch.ones(4, 100, dtype=net.weight.dtype)).float().sum() * factor).backward()
        amp.step(opt)
        amp.update()


def test_small_float16_gradients_count():
    """8e-9 is 0 in float16; a fused optimizer divides by the scale in float32, and so it does within SparseSync."""
    net, plain = half_layer(), half_layer()
    start = net.weight.detach().clone()
    train(net, SparseSync(fused(net), density=1.0), factor=2e-9)
    train(plain, fused(plain), factor=2e-9)
    assert torch.equal(net.weight, plain.weight)
    assert float((net.weight.detach() - start).abs().mean()) > 0.02


def test_float16_gradients_of_an_optimizer_that_is_not_fused():
    """As torch refuses them without SparseSync."""
    net = half_layer()
    opt = SparseSync(torch.optim.AdamW(net.parameters()))
    with pytest.raises(ValueError, match=r"and an optimizer AdamW that.*small ones lost.*fused=True.*autocast"):
        train(net, opt)
    assert opt.steps == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_clipping_is_of_the_gradient_without_its_scale(dtype):
    """With an eps this large the first step of Adam is the gradient, so it is as long as the bound."""
    torch.manual_seed(0)
    net = torch.nn.Linear(100, 100).to(dtype)
    with torch.no_grad():
        net.weight.zero_()  # so that float16 does not round the step away
        net.bias.zero_()
    optimizer = torch.optim.Adam(net.parameters(), lr=100.0, eps=100.0, fused=True)
    opt = SparseSync(optimizer, density=1.0, clip_norm=0.5)
    amp = scaler(1024.0)
    amp.scale(net(torch.ones(4, 100, dtype=dtype)).float().sum()).backward()
    amp.step(opt)
    step = torch.cat([p.detach().float().flatten() for p in net.parameters()])
    assert abs(float(step.norm()) / 0.5 - 1) < 2e-3


def test_the_scaler_must_be_given_the_wrapper():
    """No exchange follows a step of the inner optimizer; unscaling it and stepping the wrapper unscales twice."""
    net = torch.nn.Linear(100, 100)
    inner = torch.optim.SGD(net.parameters(), lr=1.0)
    opt, amp = SparseSync(inner, density=1.0), scaler()
    start = net.weight.detach().clone()
    amp.scale(net(torch.ones(4, 100)).square().mean()).backward()
    amp.unscale_(inner)
    with pytest.raises(RuntimeError, match=r"unscale_\(\) was called with the inner SGD.*give both the SparseSync"):
        amp.step(opt)
    with pytest.raises(RuntimeError, match=re.escape("inner SGD was called") + r".*scaler\.step\(opt\)"):
        amp.step(inner)
    assert torch.equal(net.weight, start) and opt.steps == 0


@pytest.mark.parametrize("both", [False, True])
def test_unscaling_the_inner_optimizer_after_the_first_step(both):
    """Also if both were unscaled, and if a GradScaler made the first steps that is no longer used."""
    net = torch.nn.Linear(100, 100)
    inner = torch.optim.SGD(net.parameters(), lr=1.0)
    opt, amp = SparseSync(inner, density=1.0), scaler()
    train(net, opt)
    for unscaled in ([], [inner, opt] if both else [inner]):
        opt.zero_grad()
        amp.scale(net(torch.ones(4, 100)).square().mean()).backward()
        for optimizer in unscaled:
            amp.unscale_(optimizer)
        refused = pytest.raises(RuntimeError, match=r"unscale_\(\) was called with the inner SGD")
        with refused if unscaled else contextlib.nullcontext():
            amp.step(opt)
            amp.update()
    assert opt.steps == 4


def test_a_scaled_step_without_gradients():
    """torch then gives an int as sum over no device. The exchange takes place."""
    opt, amp = SparseSync(torch.optim.SGD(torch.nn.Linear(100, 100).parameters(), lr=1.0)), scaler()
    amp.scale(torch.ones(1))
    amp.step(opt)
    assert opt.exchanges == 1


def test_a_step_of_the_inner_optimizer():
    """Refused while its SparseSync lives; a second SparseSync of the same optimizer does not disturb the first."""
    net = torch.nn.Linear(100, 100)
    inner = torch.optim.SGD(net.parameters(), lr=1.0)
    first, second = SparseSync(inner), SparseSync(inner)
    net(torch.ones(4, 100)).square().mean().backward()
    first.step()
    second.step()
    with pytest.raises(RuntimeError, match=r"inner SGD was called, wanted step\(\) of the SparseSync"):
        inner.step()
    del first, second
    inner.step()
