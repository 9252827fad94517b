"""The step with a corrected second moment (spccl.optim.moments)."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="SparseSync is for torch, and none is installed")

from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from spccl.optim import SparseSync, moments  # noqa: E402


class ScalarReads(TorchDispatchMode):
    """Counts how often the value of one tensor goes to the host: each waits for a GPU."""

    n_reads = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.n_reads += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def corrected(lr) -> tuple[int, torch.nn.Module]:
    """A step of Adam and its correction for 4 ranks: (scalars that correct_step reads, the model)."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(80, 60), torch.nn.Linear(60, 5))
    opt = SparseSync(torch.optim.AdamW(net.parameters(), lr=lr, betas=(0.8, 0.99)), density=0.5)
    net(torch.randn(8, 80)).square().mean().backward()
    opt._stepper.step()
    (bucket,) = opt.buckets
    with ScalarReads() as reads, torch.no_grad():
        scratch = opt.transfers.scratch[bucket.device, bucket.globals.dtype]
        moments.correct_step(opt.inner, bucket, 4, scratch)
    return reads.n_reads, net


def test_step_numbers_and_learning_rates_are_read_at_once():
    """fused and capturable optimizers have one step number for each parameter in GPU memory."""
    n_reads, net = corrected(1e-2)
    assert n_reads == 0
    n_reads, other = corrected(torch.tensor(1e-2, dtype=torch.float64))
    assert n_reads == 0
    for p, q in zip(net.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p, q)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("moment", ["scaled", "corrected"])
def test_look_ahead_holds_a_part_of_each_step(dtype, moment):
    """Before anything is sent w - z is the part of what it is with look-ahead 1, also of changes that 16 bits of a
    weight would round away."""
    moved = []
    for part in (1.0, 0.125):
        torch.manual_seed(0)
        net = torch.nn.Linear(80, 60).to(dtype)
        opt = SparseSync(torch.optim.AdamW(net.parameters(), lr=1e-2), density=0.5, every=2, look_ahead=part)
        opt._moment, opt.ranks.world_size = moment, 4  # the first of two local steps exchanges nothing
        net(torch.ones(8, 80, dtype=dtype)).float().square().mean().backward()
        opt.step()
        bucket = opt.buckets[0]
        moved.append([own - common for own, common in zip(bucket.locals, bucket.global_parts, strict=True)])
    for whole, little in zip(*moved, strict=True):
        assert float(whole.abs().mean()) > 1e-3
        torch.testing.assert_close(little, whole * 0.125, rtol=1e-2, atol=1e-6)


def test_look_ahead_refuses_steps_that_are_not_proportional_to_the_learning_rate():
    net = torch.nn.Linear(80, 60)
    with pytest.raises(ValueError, match=r"look_ahead=0\.5, wanted 1 with a Rprop: below 1 the step must"):
        SparseSync(torch.optim.Rprop(net.parameters()), density=0.5, look_ahead=0.5)
    SparseSync(torch.optim.Rprop(net.bfloat16().parameters()), density=0.5, look_ahead=0.5)
