"""Ways in which SparseSync exchanges: chunks, two bits per value, overlap, torch's debug mode, and what it refuses.

On every rank, as workers/sparse_sync.py.
"""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from torch.distributed.optim import ZeroRedundancyOptimizer

from spccl import backend
from spccl.optim import SparseSync
from workers.common import RANK, WORLD, main, raises
from workers.sparse_model import DEVICE, Net, Simulation, adamw, data, loss_of, trained
from workers.sparse_sync import BACKEND, LOOSE, compare, digest, everyone, steps


def follows_the_simulation_with_chunks():
    """Exactly the largest k of each chunk, bit for bit, local steps and decay included."""
    for settings in ({"chunk": 256, "leak": 0.9}, {"chunk": 4096, "every": 2}):
        net = Net()
        simulation = Simulation(**settings)
        opt = SparseSync(adamw(net), density=0.03, correct_second_moment=False, bucket_mb=0.03, **settings)
        for t in range(6):
            steps(opt, net, 1, t)
            simulation.step(t, 0.03)
        compare(opt, net, simulation, LOOSE)


def follows_the_simulation_with_two_bits():
    """Signs and two levels per chunk, in an all-gather, on any backend."""
    net, simulation = Net(), Simulation(chunk=1024, every=2, leak=0.95, outer=(0.9, 0.5), levels=True)
    settings = {"every": 2, "leak": 0.95, "outer_lr": 0.9, "outer_momentum": 0.5, "chunk": 1024, "bits": 2}
    opt = SparseSync(adamw(net), density=0.1, bucket_mb=0.03, check_every=1, **settings)
    for t in range(8):
        steps(opt, net, 1, t)
        simulation.step(t, 0.1)
    compare(opt, net, simulation, 2e-5)  # where a magnitude lies close to the mean the simulation may differ
    stats = opt.stats()
    whole, n_chunks = 80 + 7 * 80, 8 + 7 + 5  # rows of `first`, `middle`, `unused`
    assert stats["sent_bytes"] == n_chunks * (4 + 39 + 29 + 26) + 4 * whole, stats["sent_bytes"]
    opt.consolidate()  # exact, in an all-reduce
    own = {n: p.detach().clone() for n, p in trained(net).items()}
    with opt.global_weights():
        assert all(torch.equal(own[n], p) for n, p in trained(net).items())


class Delayed:
    """A transfer whose end this rank sees late, by a random time."""

    def __init__(self, work, generator):
        self.work, self.generator = work, generator

    def wait(self):
        time.sleep(float(torch.rand((), generator=self.generator)) * 0.01)
        self.work.wait()


def overlap_changes_no_bit():
    """With random delays in ranks and transfers, local and global weights are those of a run without overlap."""
    for settings in (
        {"density": 0.05, "bucket_mb": 0.03, "check_every": 3},
        {"density": 0.1, "bucket_mb": 0.03, "every": 2, "outer_momentum": 0.5, "wire_dtype": torch.bfloat16},
        {"density": 0.1, "bucket_mb": 0.03, "every": 2, "chunk": 256, "bits": 2, "norm_every": 2},
    ):
        net, plain = Net(), Net()
        opt = SparseSync(adamw(net), overlap=Wrapped(net), **settings)
        other = SparseSync(adamw(plain), **settings)
        generator = torch.Generator().manual_seed(100 + RANK)
        for name in ("all_reduce", "all_gather"):
            delay(opt.ranks, name, generator)
        saw_pending = 0
        for t in range(9):
            time.sleep(float(torch.rand((), generator=generator)) * 0.01)
            steps(opt, net, 1, t)
            saw_pending += len(opt.transfers.pending) > 1
            steps(other, plain, 1, t)
        assert saw_pending >= 2, saw_pending  # a check or a measurement of norms ends an exchange at once
        opt.wait()
        assert digest(opt, net) == digest(other, plain)
        assert not opt.transfers.pending


class Wrapped(torch.nn.Module):
    """A model around another one, as DDP or a trainer has."""

    def __init__(self, net):
        super().__init__()
        self.net = net


def delay(ranks, name: str, generator) -> None:
    real = getattr(ranks, name)

    def call(*args):
        got = real(*args)
        return (got[0], Delayed(got[1], generator)) if isinstance(got, tuple) else Delayed(got, generator)

    setattr(ranks, name, call)


def many_ranks_agree():
    """Global weights are the same bits on all ranks, for each way to exchange."""
    for settings in ({}, {"chunk": 256}, {"chunk": 256, "bits": 2}, {"wire_dtype": torch.bfloat16}):
        net = Net(seed=RANK)
        opt = SparseSync(adamw(net), density=0.05, every=2, check_every=1, overlap=Wrapped(net), **settings)
        steps(opt, net, 6)
        with opt.global_weights():
            bits = [p.detach().clone() for p in trained(net).values()]
        for theirs in everyone(bits):
            assert all(torch.equal(a, b) for a, b in zip(theirs, bits, strict=True)), settings


def autocast_to_bfloat16():
    """A forward pass under autocast: weights, global weights, moments and the exchange stay float32, bit for bit."""
    for settings in ({"density": 0.05, "sample": 1.0}, {"density": 0.05, "chunk": 256, "every": 2}):
        net, plain = Net(), Net()
        simulation = Simulation(chunk=settings.get("chunk", 0), every=settings.get("every", 1))
        opt = SparseSync(adamw(net), correct_second_moment=False, bucket_mb=0.03, **settings)
        for t in range(6):
            opt.zero_grad()
            with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
                rounded = net(data(RANK, t)).dtype
                loss = loss_of(net, RANK, t)
            loss.backward()
            opt.step()
            assert rounded == torch.bfloat16 and loss.dtype == torch.float32
            with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
                simulation.step(t, 0.05)
        compare(opt, net, simulation, LOOSE)
        with opt.global_weights():
            assert {p.dtype for p in net.parameters()} == {torch.float32}
        dtypes = {state["exp_avg"].dtype for state in opt.state.values()}
        assert dtypes == {torch.float32}, dtypes
        loss_of(plain, RANK, 0).backward()
        assert not torch.equal(plain.first.grad, under_autocast(Net()).first.grad)  # autocast does something
        opt.check()


def under_autocast(net: Net) -> Net:
    with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
        loss = loss_of(net, RANK, 0)
    loss.backward()
    return net


def debug_detail():
    """TORCH_DISTRIBUTED_DEBUG=DETAIL puts a wrapper around the backend: the exchange, its counts and the limit of
    thread blocks work through it."""
    level = dist.get_debug_level()
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    group = dist.new_group()
    dist.set_debug_level(level)
    assert hasattr(group._get_backend(DEVICE), "wrapped_pg")
    net, simulation = Net(), Simulation()
    opt = SparseSync(adamw(net), density=0.05, sample=1.0, correct_second_moment=False, group=group)
    for t in range(2):
        steps(opt, net, 1, t)
        simulation.step(t, 0.05)
    compare(opt, net, simulation, LOOSE)
    summary = opt.stats()
    assert summary["backend"] == BACKEND
    if BACKEND == "spccl":
        assert 0 < summary["wire_bytes"] <= backend.stats(group).wire_bytes_sent
        with backend.limit_ctas(4, group):
            steps(opt, net, 1, 2)
    dist.destroy_process_group(group)


def what_averages_twice():
    """DDP over the same ranks is refused, whether it came before or after; one that is gone, or that averages over
    other ranks, is not. ZeroRedundancyOptimizer keeps one rank's gradient of each parameter."""
    ddp = torch.nn.parallel.DistributedDataParallel
    alone = [dist.new_group([rank]) for rank in range(WORLD)][RANK]
    net = Net()
    opt, wrapped = SparseSync(adamw(net), density=0.05), ddp(net)
    both = str(list(range(WORLD)))
    with raises(RuntimeError, "DistributedDataParallel", f"averages the gradients over ranks {both}", "use one of"):
        steps(opt, net, 1)
    del wrapped
    ignoring = torch.nn.Sequential(net, torch.nn.Linear(2, 2))
    ddp._set_params_and_buffers_to_ignore_for_model(ignoring, [f"0.{name}" for name, _ in net.named_parameters()])
    ignoring = ddp(ignoring)
    steps(opt, net, 1)
    assert ignoring.module[0] is net
    other = ddp(net, process_group=alone)
    steps(opt, net, 1)
    assert other.module is net
    with raises(TypeError, "ZeroRedundancyOptimizer", "gradients would be lost", "AdamW"):
        SparseSync(ZeroRedundancyOptimizer(trained(net).values(), optimizer_class=torch.optim.AdamW, lr=0.1))
    dist.destroy_process_group(alone)


CASES = [
    debug_detail, what_averages_twice,
    follows_the_simulation_with_chunks, follows_the_simulation_with_two_bits, overlap_changes_no_bit, many_ranks_agree,
    autocast_to_bfloat16
]  # fmt: skip

if __name__ == "__main__":
    torch.set_num_threads(1)
    main(CASES, BACKEND)
