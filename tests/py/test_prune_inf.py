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
    slot = prune.Slot("weight", N, True, torch.zeros(prune.STATE_COLUMNS, dtype=torch.int64))
    slot.prepare(torch.float32, True, False, residual_dtype)
    plan = prune.Plan([(0, slot)], N, torch.float32, torch.device("cpu"))
    rule = prune.Rule(density=0.01, sample=0.001, leak=1.0, momentum=0.0, seed=1)
    generator = torch.Generator().manual_seed(random.randrange(1 << 31))
    for _ in range(150):
        plan.run(torch.randn(N, generator=generator), rule)
    held, grad = slot.residual.clone(), torch.randn(N, generator=generator)
    norm = float(grad.norm())
    grad[9], grad[10] = math.inf, math.nan
    total = held.float() + grad
    plan.run(grad, rule)
    finite = torch.isfinite(total)
    assert finite.sum() == N - 2 and grad[9] == math.inf and grad[10].isnan()
    assert torch.equal(slot.residual[9:11], held[9:11])
    kept = total[finite] - grad[finite]
    if residual_dtype == torch.float32:
        assert torch.equal(slot.residual[finite], kept)
    else:
        assert ((slot.residual[finite].float() - kept).abs() <= kept.abs() * 2.0**-7).all()
    assert 0.7 * norm < float(grad[finite].norm()) < 1.4 * norm
