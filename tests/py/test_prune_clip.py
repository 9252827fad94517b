"""spccl.prune.Clip: clipping within the pruning call, by the norm of a gradient of several buckets."""

from __future__ import annotations

import math

import pytest

torch = pytest.importorskip("torch", reason="spccl.prune is for torch, and none is installed")

from spccl import prune  # noqa: E402

N = 10_001
RULE = prune.Rule(density=1.0, sample=0.001, leak=1.0, momentum=0.0)


def one_plan() -> prune.Plan:
    """A plan of one parameter, whose residual its caller does not need."""
    param = prune.ParamState("weight", N, True, torch.zeros(prune.STATE_COLUMNS, dtype=torch.int64))
    param.prepare(torch.float32, True, False)
    return prune.Plan([(0, param)], N, torch.float32, torch.device("cpu"))


def clipped(grad, squares, square, max_norm, loss_scale=None):
    """The gradient that a call with Clip takes: what it sends at density 1."""
    plan = one_plan()
    sent = grad.clone()
    norm = torch.linalg.vector_norm(grad, dim=0, keepdim=True)
    plan.run(sent, RULE, loss_scale=loss_scale, clip=prune.Clip(norm, squares, square, max_norm))
    return sent


def test_clipping_bounds_the_norm_of_all_buckets():
    grad, squares = torch.randn(N), torch.tensor([9.0, 123.0, 7.0], dtype=torch.float64)
    own = float(torch.linalg.vector_norm(grad)) ** 2
    sent = clipped(grad, squares, 1, 2.0)
    assert squares.tolist() == [9.0, pytest.approx(own), 7.0]
    factor = torch.tensor(2.0 / math.sqrt(16.0 + float(squares[1])), dtype=torch.float64).float()
    assert torch.equal(sent, grad * factor)
    assert torch.equal(clipped(grad, squares, 1, math.inf), grad)
    assert torch.equal(clipped(grad, squares, 1, 1e6), grad)


def test_clipping_takes_the_loss_scale_out_of_the_norm():
    grad, squares = torch.randn(N), torch.zeros(2, dtype=torch.float64)
    clipped(grad * 8, squares, 0, 1.0, torch.tensor([8.0]))
    assert float(squares[0]) == pytest.approx(float(grad.double().square().sum()), rel=1e-4)


def test_a_norm_that_is_not_finite_leaves_the_last_square():
    squares = torch.tensor([4.0, 12.0], dtype=torch.float64)
    for bad in (math.inf, math.nan):
        grad = torch.ones(N)
        grad[5] = bad
        sent = clipped(grad, squares, 0, 1.0)
        assert squares.tolist() == [4.0, 12.0] and float(sent[0]) == 0.25


def test_bad_input_is_refused():
    plan = one_plan()
    squares = torch.zeros(3, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"norm is torch.float64, wanted contiguous torch.float32"):
        plan.run(torch.zeros(N), RULE, clip=prune.Clip(squares[:1], squares, 0, 1.0))
    with pytest.raises(ValueError, match=r"with 3 entries and square is 3, wanted squares with an entry"):
        plan.run(torch.zeros(N), RULE, clip=prune.Clip(torch.ones(1), squares, 3, 1.0))
    with pytest.raises(ValueError, match=r"options.max_norm is 0, wanted a number above 0"):
        plan.run(torch.zeros(N), RULE, clip=prune.Clip(torch.ones(1), squares, 0, 0.0))
