"""SparseSync with sum_density: the sums of all ranks are pruned by the owners of their shards. On every rank."""

from __future__ import annotations

import copy
import itertools
import sys

import torch
import torch.distributed as dist

from spccl import backend
from spccl.optim import Geometric, SparseSync
from workers.common import RANK, WORLD, main, raises
from workers.sparse_model import DEVICE, Net, Simulation, adamw, trained
from workers.sparse_sync import BACKEND, LOOSE, compare, digest, everyone, steps


class OwnerSimulation(Simulation):
    """`Simulation` whose sums are pruned again, each shard of a bucket apart. One bucket holds all parameters."""

    def __init__(self, sum_density: float, **settings):
        super().__init__(**settings)
        self.sum_density = sum_density
        self.kept = {name: torch.zeros_like(z) for name, z in self.common.items()}
        self.cuts = self.shards()

    def shards(self) -> dict[str, list[tuple[int, int]]]:
        """Of each parameter: the elements of each shard."""
        sizes = {name: -(-p.numel() // 4) * 4 for name, p in trained(self.nets[0]).items()}
        order = ["first", "bias", "middle", "small", "unused"]  # as adamw() has them
        length = sum(sizes.values())
        shard = -(-length // (8 * WORLD)) * 8
        cuts, begin = {}, 0
        for name in order:
            numel = self.common[name].numel()
            edges = [min(max(r * shard - begin, 0), numel) for r in range(WORLD + 1)]
            cuts[name] = [(a, b) for a, b in itertools.pairwise(edges) if a < b]
            begin += sizes[name]
        return cuts

    @torch.no_grad()
    def exchange(self, density: float) -> None:
        for name, z in self.common.items():
            total = torch.zeros_like(z)
            for net in self.nets:
                total += self.send(trained(net)[name], z, density)
            kept = self.kept[name] + total / len(self.nets)
            share = 1.0 if density >= 1 else min(1.0, self.sum_density * density / self.density)
            result = torch.zeros_like(kept)
            whole = z.dim() < 2 or z.numel() < 4096 or share >= 1
            for a, b in self.cuts[name]:
                part = kept.flatten()[a:b]
                k = max(1, int(share * part.numel() + 0.5))
                least = 0.0 if whole else float(part.abs().topk(k).values[-1])
                result.view(-1)[a:b] = torch.where(part.abs() >= least, part, torch.zeros(())).to(self.wire).float()
            self.kept[name] = kept - result
            self.receive(name, result)


def follows_the_simulation():
    """The owner adds the average, as it is before it is rounded, to what it kept; it sends the largest, and keeps the
    rest and what rounding changed."""
    for wire in (torch.float32, torch.bfloat16):
        net, simulation = Net(), OwnerSimulation(0.06, wire=wire)
        simulation.density = 0.05
        opt = SparseSync(
            adamw(net), density=0.05, sum_density=0.06, sample=1.0, correct_second_moment=False, check_every=1,
            wire_dtype=None if wire == torch.float32 else wire,
        )  # fmt: skip
        for t in range(8):
            steps(opt, net, 1, t)
            simulation.step(t, 0.05)
        compare(opt, net, simulation, LOOSE)
        kept = sum(int((k != 0).sum()) for k in simulation.kept.values())
        assert kept > 1000, kept


def many_ranks_agree():
    """The same bits on all ranks, over several buckets, in the warm-up, with overlap and with local steps."""
    ways = (
        (torch.float32, {}),
        (torch.bfloat16, {"wire_dtype": torch.bfloat16, "every": 2}),
        (torch.float64, {"warmup_steps": 4}),
    )
    for dtype, more in ways:
        net, plain = Net(dtype, seed=RANK), Net(dtype, seed=RANK)
        settings = {"density": 0.05, "sum_density": 0.08, "bucket_mb": 0.03, "check_every": 1, **more}
        opt = SparseSync(adamw(net), **settings)
        other = SparseSync(adamw(plain), overlap=Wrapped(plain), **settings)
        for t in range(6):
            steps(opt, net, 1, t)
            steps(other, plain, 1, t)
        other.wait()
        assert digest(opt, net) == digest(other, plain)
        with opt.global_weights():
            bits = [p.detach().clone().cpu() for p in trained(net).values()]
        for theirs in everyone(bits):
            assert all(torch.equal(a, b) for a, b in zip(theirs, bits, strict=True)), settings


class Wrapped(torch.nn.Module):
    """A model around another one."""

    def __init__(self, net):
        super().__init__()
        self.net = net


def mean_of_everything(opt: SparseSync, net: Net) -> list[torch.Tensor]:
    """What the global weights become when everything is delivered: z + the mean of (w - z) + what owners keep."""
    states = everyone(copy.deepcopy(opt.state_dict()["sparse_sync"]))
    total = []
    for place, entry in enumerate(states[0]["parameters"]):
        z = entry["global"].double()
        result = z.clone()
        for state in states:
            theirs = state["parameters"][place]
            own = theirs["global"] if theirs["local"] is None else theirs["local"]
            result += (own.double() - z) / len(states)
            if theirs["kept"] is not None:
                kept, flat = theirs["kept"], result.view(-1)
                flat[kept["first"] : kept["first"] + kept["values"].numel()] += kept["values"].double()
        total.append(result)
    return total


def consolidate_delivers():
    """consolidate() sends what the owners kept: nothing is lost, and the state is that of any number of ranks."""
    for wire in (None, torch.bfloat16):
        net = Net()
        opt = SparseSync(adamw(net), density=0.03, sum_density=0.04, wire_dtype=wire, bucket_mb=0.03)
        steps(opt, net, 6)
        wanted = mean_of_everything(opt, net)
        assert any(not kept.is_empty() for kept in opt.transfers.kept.values())
        opt.consolidate()
        state = opt.state_dict()["sparse_sync"]
        assert state["consolidated"] and all(kept.is_empty() for kept in opt.transfers.kept.values())
        for entry, w in zip(state["parameters"], wanted, strict=True):
            torch.testing.assert_close(entry["global"].double().cpu(), w, rtol=1e-5, atol=1e-6)


def resumes():
    """With the same bits on the same ranks. After `reshard`, for any number of ranks, what was kept is unsent part.
    Other buckets, or no sum_density, are refused without it."""
    settings = {"density": 0.03, "sum_density": 0.04, "bucket_mb": 0.03, "wire_dtype": torch.bfloat16}
    net, again = Net(), Net()
    opt = SparseSync(adamw(net), **settings)
    steps(opt, net, 5)
    saved, wanted = copy.deepcopy(opt.state_dict()), mean_of_everything(opt, net)
    other = SparseSync(adamw(again), **settings)
    other.load_state_dict(copy.deepcopy(saved))
    steps(opt, net, 3, 5)
    steps(other, again, 3, 5)
    assert digest(opt, net) == digest(other, again)
    for changed in ({"bucket_mb": 256}, {"sum_density": None}):
        loaded = SparseSync(adamw(Net()), **{**settings, **changed})
        with raises(ValueError, "kept of sums", "which this rank does not own", "sum_density", "reshard"):
            loaded.load_state_dict(copy.deepcopy(saved))
    states = everyone(saved)
    for n in (1, WORLD, WORLD + 1):
        parts = [s["sparse_sync"]["parameters"] for s in SparseSync.reshard(copy.deepcopy(states), n)]
        assert not any(entry["kept"] for part in parts for entry in part)
        for place, w in enumerate(wanted):
            mean = sum(part[place]["local"].double() for part in parts) / n
            torch.testing.assert_close(mean, w, rtol=1e-5, atol=1e-6)


def bytes_do_not_grow():
    """Counted bytes are about those of the density and of sum_density, (P - 1) / P times, for 2 ranks and for all."""
    if BACKEND != "spccl" or DEVICE.type == "cuda":  # a GPU does not count them
        return
    options = backend.Options(format="tile")  # else a fast link takes small shards dense
    groups = [dist.new_group([r, r + 1], pg_options=options) for r in range(0, WORLD, 2)]
    means = []
    for group in (groups[RANK // 2], dist.new_group(pg_options=options)):
        net, n = Net(), dist.get_world_size(group)
        opt = SparseSync(adamw(net), density=0.02, sum_density=0.02, sample=1.0, group=group, wire_dtype=torch.bfloat16)
        steps(opt, net, 10)
        stats = opt.stats()
        assert stats["density_sums"] < 0.2, stats["density_sums"]
        means.append(sum(everyone(stats["wire_bytes"])) / WORLD / ((n - 1) / n))
    assert means[1] < 1.15 * means[0], means


def ranks_that_differ():
    """Refused by name on all ranks, before anything is sent."""
    net = Net()
    theirs = {"sum_density": 0.1 if RANK == 0 else None}
    with raises(ValueError, "ranks differ", "sum_density is 0.1 on rank 0"):
        SparseSync(adamw(net), density=0.05, **theirs)
    with raises(ValueError, "sum_density", "None with bits"):
        SparseSync(adamw(net), density=0.05, chunk=4096, bits=2, sum_density=0.1)
    with raises(ValueError, "sum_density", "None when density is a function"):
        SparseSync(adamw(net), density=lambda i: 0.1, sum_density=0.1)
    SparseSync(adamw(net), density=Geometric(0.1, 3), sum_density=0.1)


def sends_few_bytes() -> dict:
    """A dense float32 all-reduce's bytes over those sent, in exchanges after the first, for random gradients."""
    p, generator = torch.nn.Parameter(torch.zeros(512, 1024)), torch.Generator().manual_seed(RANK)
    opt = SparseSync(
        torch.optim.SGD([p], lr=1.0), density=0.0245, sum_density=0.05, wire_dtype=torch.bfloat16, check_every=0
    )
    before = 0
    for t in range(9):
        if t == 5:
            before = backend.stats().wire_bytes_sent
        p.grad = torch.randn(p.shape, generator=generator)
        opt.step()
    sent = sum(everyone(backend.stats().wire_bytes_sent - before)) / WORLD / 4
    return {"saving": 8 * p.numel() * (WORLD - 1) / WORLD / sent}


CASES = [
    follows_the_simulation, many_ranks_agree, consolidate_delivers, resumes, bytes_do_not_grow, ranks_that_differ
]  # fmt: skip

if __name__ == "__main__":
    torch.set_num_threads(1)
    main([sends_few_bytes] if "sends_few_bytes" in sys.argv else CASES, BACKEND)
