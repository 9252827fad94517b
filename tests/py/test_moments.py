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
