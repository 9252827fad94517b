"""SparseSync with one bit per value: the bits of the rule, all ranks alike, overlap, bytes, states.

On every rank, as workers/sparse_sync.py.
"""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist

from spccl.optim import SparseSync
from spccl.optim.checkpoint import KEY
from workers.common import RANK, WORLD, main, raises
from workers.sparse_exchange import Wrapped, delay
from workers.sparse_model import DEVICE, Net, Simulation, adamw, trained
from workers.sparse_sync import BACKEND, LOOSE, compare, digest, everyone, steps

CHUNK = 4096


class SignsSimulation(Simulation):
    """docs/FORMAT.md, section 10, in plain torch. `kept`: of all owners together."""

    def __init__(self, warmup: int = 0, **settings):
        super().__init__(**settings)
        self.kept = {name: torch.zeros(rows_of(z).shape) for name, z in self.common.items()}
        self.exchanges, self.warmup = 0, warmup

    @torch.no_grad()
    def exchange(self, density: float) -> None:
        self.exchanges += 1
        for name, z in self.common.items():
            own = [trained(net)[name] for net in self.nets]
            if z.dim() < 2 or z.numel() < 4096 or self.exchanges <= self.warmup:
                average = sum((w - z for w in own), torch.zeros_like(z)) / WORLD
                for w in own:
                    w.copy_(z)
            else:
                average = self.one_bit(name, z, own)
            self.receive(name, average)

    def one_bit(self, name: str, z: torch.Tensor, own: list[torch.Tensor]) -> torch.Tensor:
        values = self.kept[name]
        share = torch.tensor(1.0) / WORLD
        for w in own:
            d = rows_of(w - z)
            magnitude, signs = encoded(d, z.numel())
            kept = d - magnitude * signs
            w.copy_((self.leak * kept).flatten()[: z.numel()].view_as(z).to(z.device) + z)
            values = values + (magnitude * share) * signs
        values.flatten()[z.numel() :] = 0
        magnitude, signs = encoded(values, z.numel())
        self.kept[name] = values - magnitude * signs
        self.kept[name].flatten()[z.numel() :] = 0
        return (magnitude * signs).flatten()[: z.numel()].view_as(z).to(z.device)


def rows_of(x: torch.Tensor) -> torch.Tensor:
    """As chunks, with zeros behind the end."""
    flat = x.flatten().cpu()
    return torch.nn.functional.pad(flat, (0, -flat.numel() % CHUNK)).view(-1, CHUNK)


def encoded(rows: torch.Tensor, numel: int) -> tuple[torch.Tensor, torch.Tensor]:
    sums, half = rows.abs(), CHUNK // 2
    while half:
        sums = sums[:, :half] + sums[:, half : 2 * half]
        half //= 2
    counts = (numel - CHUNK * torch.arange(len(rows))).clamp(max=CHUNK).float()
    return sums / counts[:, None], torch.where(rows.signbit(), -1.0, 1.0)


def one_bit(net: Net, **settings) -> SparseSync:
    """Without a recipe, which would begin with many dense steps."""
    return SparseSync(adamw(net), bits=1, **{"warmup_steps": 0, "correct_second_moment": False, **settings})


def follows_the_rule():
    """Local and global weights, bit for bit. On Gloo those that are sent whole have rounding of its own. A value near 0
    may get another sign from that, and what depends on it differs. Whether one is so near depends on the processor."""
    few = 0.01 if LOOSE else 0.0
    for settings in (
        {},
        {"every": 2, "leak": 0.9, "outer_lr": 0.7, "outer_momentum": 0.5},
        {"warmup_steps": 3},
        {"every": 2, "warmup_steps": 3, "bucket_mb": 256},
    ):
        given = {"every": settings.get("every", 1), "leak": settings.get("leak", 1.0)}
        outer = settings.get("outer_lr", 1.0), settings.get("outer_momentum", 0.0)
        warmup = -(-settings.get("warmup_steps", 0) // given["every"])
        net, simulation = Net(), SignsSimulation(warmup, outer=outer, **given)
        opt = one_bit(net, **{"bucket_mb": 0.03, **settings})
        for t in range(8):
            steps(opt, net, 1, t)
            simulation.step(t, 1.0)
        compare(opt, net, simulation, 5 * LOOSE, few)
        opt.check()


def ranks_agree():
    """Of 16-bit weights too: global weights are the same bits on all ranks, with overlap and without."""
    for dtype in (torch.float32, torch.bfloat16):
        for overlaps in (False, True):
            net = Net(dtype, seed=RANK)
            opt = one_bit(net, check_every=1, overlap=Wrapped(net) if overlaps else None)
            steps(opt, net, 5)
            with opt.global_weights():
                bits = [p.detach().clone() for p in trained(net).values()]
            for theirs in everyone(bits):
                assert all(torch.equal(a.cpu(), b) for a, b in zip(bits, theirs, strict=True))


def overlap_changes_no_bit():
    """With delayed transfers. Ranks wait at different times, alone: both collectives were started in step()."""
    settings = {"bucket_mb": 0.03, "check_every": 4, "norm_every": 0}
    net, plain = Net(), Net()
    opt, other = one_bit(net, overlap=Wrapped(net), **settings), one_bit(plain, **settings)
    generator = torch.Generator().manual_seed(RANK)
    for name in ("all_reduce", "all_gather", "all_to_all"):
        delay(opt.ranks, name, generator)
    for t in range(9):
        steps(opt, net, 1, t)
        assert len(opt.transfers.pending) == (0 if (t + 1) % 4 == 0 else len(opt.buckets))
        if t % WORLD == RANK:
            opt.stats()
        steps(other, plain, 1, t)
    opt.wait()
    assert digest(opt, net) == digest(other, plain)


def sends_few_bytes() -> dict:
    """What is counted is what the layout says: 31.75 times fewer than a dense all-reduce, on any number of ranks."""
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(1024, 1024, device=DEVICE))
    opt = SparseSync(torch.optim.SGD([weight], lr=0.1), bits=1, warmup_steps=0, check_every=0)
    start = opt.stats()["wire_bytes"]
    for t in range(3):
        weight.grad = torch.randn(1024, 1024, generator=torch.Generator().manual_seed(t + 7 * RANK)).to(DEVICE)
        opt.step()
    stats, n_chunks = opt.stats(), 256
    assert stats["sent_bytes"] == n_chunks * 516 and stats["density_sent"] == 1
    assert stats["dense_bytes"] / stats["sent_bytes"] > 31.7
    if BACKEND != "spccl" or DEVICE.type != "cpu":
        return {}
    dense = 3 * 2 * (WORLD - 1) / WORLD * stats["dense_bytes"]
    least, most = 0.9 * 31.75, 31.76  # shards end with a whole chunk, frames have headers
    saving = dense / (stats["wire_bytes"] - start)
    assert least < saving <= most, saving
    return {"saving": saving}


def resumes_and_reshards():
    """A run that loads its states continues bit for bit. States for fewer and for more ranks keep what is to be sent:
    the average of what ranks have not sent, plus what owners keep. After consolidate() nothing is kept."""
    net, again = Net(), Net()
    opt, other = one_bit(net, bucket_mb=0.03), one_bit(again, bucket_mb=0.03)
    steps(opt, net, 4)
    state = copy.deepcopy(opt.state_dict())
    other.load_state_dict(copy.deepcopy(state))  # torch shares what it loads
    for t in range(4, 7):
        steps(opt, net, 1, t)
        steps(other, again, 1, t)
    assert digest(opt, net) == digest(other, again)
    states = everyone(state)
    due = pending(states)
    assert any(bool(entry["kept"]) for s in states for entry in s[KEY]["parameters"])
    for n in (1, WORLD, WORLD + 2):
        new = SparseSync.reshard(copy.deepcopy(states), n)
        for a, b in zip(due, pending(new), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
    other.load_state_dict(SparseSync.reshard(copy.deepcopy(states), WORLD, [RANK])[0])
    assert all(kept.is_empty() for kept in other.transfers.kept.values())
    before = pending(everyone(opt.state_dict()))
    with opt.global_weights():
        start = [p.detach().clone() for p in trained(net).values()]
    opt.consolidate()
    state = opt.state_dict()
    assert state[KEY]["consolidated"] and all(entry["kept"] is None for entry in state[KEY]["parameters"])
    for z, p, a in zip(start, trained(net).values(), before, strict=True):
        torch.testing.assert_close((p - z).cpu(), a, rtol=1e-4, atol=1e-6)
    fresh = Net(seed=9)
    one_bit(fresh, bucket_mb=0.03).load_state_dict(everyone(state)[0])
    assert all(torch.equal(a, b) for a, b in zip(trained(fresh).values(), trained(net).values(), strict=True))


def pending(states: list[dict]) -> list[torch.Tensor]:
    """Of each parameter: the average of what ranks have not sent, plus what its owners keep."""
    out = []
    for entries in zip(*(s[KEY]["parameters"] for s in states), strict=True):
        common = entries[0]["global"].cpu()
        own = [common if e["local"] is None else e["local"].cpu() for e in entries]
        flat = sum((w - common for w in own), torch.zeros_like(common)).flatten() / len(states)
        for kept in (e["kept"] for e in entries if e["kept"] is not None):
            flat[kept["first"] : kept["first"] + kept["values"].numel()] += kept["values"].cpu()
        out.append(flat.view_as(common))
    return out


def refuses_what_differs():
    """On all ranks, by name, before anything is sent."""
    with raises(ValueError, "ranks differ", "bits is"):
        SparseSync(adamw(Net()), density=None if RANK == 0 else 1.0, bits=1 if RANK == 0 else None)
    net = Net()
    opt = one_bit(net)
    steps(opt, net, 2)
    mine = opt.state_dict()
    dense, keeps = SparseSync(adamw(Net()), density=1.0), any(entry["kept"] for entry in mine[KEY]["parameters"])
    assert everyone(keeps)[0]  # later ranks may own only what never had a gradient
    if keeps:
        with raises(ValueError, "what the rank kept of sums of parameter", "SparseSync.reshard"):
            dense.load_state_dict(mine)
    dist.barrier()
    opt.check()


CASES = [follows_the_rule, ranks_agree, overlap_changes_no_bit, sends_few_bytes, resumes_and_reshards,
         refuses_what_differs]  # fmt: skip

if __name__ == "__main__":
    torch.set_num_threads(1)
    main(CASES, BACKEND)
