"""spccl_prune against the torch operations that pruned before it (commit 761e286), at the same thresholds."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="the DDP hook is for torch, and none is installed")

from spccl import prune  # noqa: E402

N = 70_001  # two blocks, odd


def torch_prune(grad, residual, velocity, momentum: float, leak: float, threshold: float) -> None:
    """The torch code of 761e286 for one block that sends no more than it may. All flat and of one length, in place."""
    wide = grad.to(residual.dtype)
    total = wide.clone()
    if velocity is not None:
        total = torch.add(wide, velocity, alpha=momentum, out=velocity)
    torch.add(total, residual, alpha=leak, out=residual)
    wide = torch.ops.aten.hardshrink(residual, threshold * (1.0 - 2.0**-23))
    limits = torch.finfo(grad.dtype)
    grad.copy_(wide.clamp_(limits.min, limits.max))
    wide.copy_(grad)
    if velocity is not None:
        velocity.masked_fill_(wide != 0, 0.0)
    residual.sub_(wide)


def spacing(x: torch.Tensor) -> torch.Tensor:
    """Distance from |x| to the next larger number."""
    return torch.nextafter(x.abs(), torch.full_like(x, torch.inf)) - x.abs()


def steps(dtype: torch.dtype, momentum: float, leak: float):
    """Four steps of spccl_prune, each beside torch_prune of the same gradient and state.

    Yields ((s, r, u) of spccl_prune, (s, r, u) of torch_prune, largest magnitude that was added, threshold)."""
    param = prune.ParamState("weight", N, True, torch.zeros(prune.STATE_COLUMNS, dtype=torch.int64))
    param.prepare(dtype, residual=True, velocity=momentum > 0)
    plan = prune.Plan([(0, param)], N, dtype, torch.device("cpu"))
    generator = torch.Generator().manual_seed(7)
    for step in range(4):
        grad = torch.randn(N, generator=generator, dtype=prune.wide_dtype(dtype)).to(dtype)
        old = [x if x is None else x.clone() for x in (grad, param.residual, param.velocity)]
        plan.run(grad, prune.Rule(density=0.02, sample=0.01, leak=leak, momentum=momentum, seed=step))
        threshold = float(param.state[prune.THRESHOLD : prune.THRESHOLD + 1].view(torch.float64))
        largest = torch.stack([x.abs().to(prune.wide_dtype(dtype)) for x in old if x is not None]).amax(0)
        torch_prune(*old, momentum, leak, threshold)
        yield (grad, param.residual, param.velocity), tuple(old), largest, threshold


DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]


def comparable(v: torch.Tensor, threshold: float) -> torch.Tensor:
    """Which entries are not close to the threshold: torch's limit lay one or two ulps of float32 lower."""
    far = (v.abs() - threshold).abs() > 2.0**-22 * threshold
    assert (~far).sum() <= 100  # bfloat16 gradients have equal entries
    return far


@pytest.mark.parametrize("dtype", DTYPES)
def test_without_momentum_and_leak_the_bits_are_those_of_torch(dtype):
    for ours, theirs, _, threshold in steps(dtype, 0.0, 1.0):
        same = comparable(theirs[0].to(theirs[1].dtype) + theirs[1], threshold)
        assert 0.005 * N < torch.count_nonzero(ours[0]) < 0.1 * N
        for a, b in zip(ours[:2], theirs[:2], strict=True):
            assert torch.equal(a[same], b[same])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("momentum, leak, ulps", [(0.0, 0.99, 1), (0.9, 1.0, 2), (0.9, 0.99, 3)])
def test_with_momentum_or_leak_v_is_close_to_that_of_torch(dtype, momentum, leak, ulps):
    """torch multiplies and adds with one rounding, spccl with two, so u differs by an ulp and v by one for each of
    leak, momentum and sum. The ulp is that of the largest number added: where numbers cancel, v itself is smaller."""
    for ours, theirs, largest, threshold in steps(dtype, momentum, leak):
        mine, v = (s.to(r.dtype) + r for s, r, _ in (ours, theirs))
        error = (mine - v).abs() / spacing(torch.maximum(v.abs(), largest))
        assert error.max() <= ulps, error.max()
        same = comparable(v, threshold)
        sent = ours[0] != 0
        assert 0.005 * N < sent.sum() < 0.1 * N and torch.equal(sent[same], (theirs[0] != 0)[same])
        assert torch.equal(ours[0][sent], mine[sent].to(dtype))
        if momentum:
            error = (ours[2] - theirs[2]).abs() / spacing(torch.maximum(theirs[2].abs(), largest))
            assert (ours[2][sent] == 0).all() and error[same].max() <= 1, error[same].max()
