"""What a step costs that GradScaler skips because of inf or nan (docs/TRAINING.md, inf and nan)."""

from __future__ import annotations

import math
import random

import pytest

torch = pytest.importorskip("torch", reason="the DDP hook is for torch, and none is installed")

from spccl import prune  # noqa: E402

N = 65_536


@pytest.mark.parametrize("residual_dtype", [torch.float32, torch.bfloat16])
def test_a_skipped_step_loses_what_it_sent_and_no_more(residual_dtype):
    """What the step sent has about the norm of one gradient, as dense training loses. What it kept stays."""
    param = prune.ParamState("weight", N, True, torch.zeros(prune.STATE_COLUMNS, dtype=torch.int64))
    param.prepare(torch.float32, True, False, residual_dtype)
    plan = prune.Plan([(0, param)], N, torch.float32, torch.device("cpu"))
    rule = prune.Rule(density=0.01, sample=0.001, leak=1.0, momentum=0.0, seed=1)
    generator = torch.Generator().manual_seed(random.randrange(1 << 31))
    for _ in range(150):
        plan.run(torch.randn(N, generator=generator), rule)
    held, grad = param.residual.clone(), torch.randn(N, generator=generator)
    norm = float(grad.norm())
    grad[9], grad[10] = math.inf, math.nan
    total = held.float() + grad
    plan.run(grad, rule)
    finite = torch.isfinite(total)
    assert finite.sum() == N - 2 and grad[9] == math.inf and grad[10].isnan()
    assert torch.equal(param.residual[9:11], held[9:11])
    kept = total[finite] - grad[finite]
    if residual_dtype == torch.float32:
        assert torch.equal(param.residual[finite], kept)
    else:
        assert ((param.residual[finite].float() - kept).abs() <= kept.abs() * 2.0**-7).all()
    assert 0.7 * norm < float(grad[finite].norm()) < 1.4 * norm


@pytest.mark.parametrize("residual_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("before", [1024.0, 1.0])  # 1: the residual comes from a checkpoint
def test_skipped_steps_keep_residual_and_velocity(residual_dtype, before):
    """GradScaler halves its scale at each of several skipped steps; the state stays, in units of the gradient."""
    param = prune.ParamState("weight", N, True, torch.zeros(prune.STATE_COLUMNS, dtype=torch.int64))
    param.prepare(torch.float32, True, True, residual_dtype)
    plan = prune.Plan([(0, param)], N, torch.float32, torch.device("cpu"))
    rule = prune.Rule(density=0.01, sample=0.001, leak=1.0, momentum=0.5, seed=1)
    for _ in range(3):
        plan.run(torch.randn(N) * before, rule, loss_scale=torch.tensor([before]))
    held = [x.double() / param.loss_scale() for x in (param.residual, param.velocity)]
    for step in range(8):
        grad = torch.full((N,), math.inf if step % 2 else math.nan)
        plan.run(grad, rule, loss_scale=torch.tensor([65536.0 / 2**step]))
        assert param.loss_scale() == 65536.0 / 2**step
        for name, now, was in zip(("residual", "velocity"), (param.residual, param.velocity), held, strict=True):
            assert torch.equal(now.double() / param.loss_scale(), was), f"{name} after {step + 1} skipped steps"
