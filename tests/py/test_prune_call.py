"""Pruning calls that an all-reduce carries out (spccl.prune.Plan.call). tests/gpu runs them."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="spccl.prune is for torch, and none is installed")

from spccl import prune  # noqa: E402

N = 5000


def plan_of_one() -> tuple[prune.Plan, prune.ParamState]:
    param = prune.ParamState("weight", N, True, torch.zeros(prune.STATE_COLUMNS, dtype=torch.int64))
    param.prepare(torch.float32, True, False)
    return prune.Plan([(0, param)], N, torch.float32, torch.device("cpu")), param


def test_a_call_changes_nothing():
    (plan, param), grad = plan_of_one(), torch.randn(N)
    before = grad.clone()
    address, options, owner = plan.call(grad, prune.Rule(0.01, 0.001, 1.0, 0.0))
    assert address != 0
    assert options != 0
    assert owner is not None
    assert torch.equal(grad, before)
    assert int(param.state[prune.STEP]) == 0
