"""SparseSync on every rank; the backend is SPCCL_TEST_BACKEND.

`Simulation` is the rule in plain torch: it runs all ranks' optimizers in one process. Every rank runs it beside the
real thing and compares its own weights and the global ones.
"""

from __future__ import annotations

import copy
import hashlib
import math
import os
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map

from spccl.optim import Geometric, SparseSync
from spccl.optim.checkpoint import KEY
from workers.common import RANK, WORLD, main, raises
from workers.sparse_model import DEVICE, Net, Simulation, adamw, loss_of, require_same, trained, weights

BACKEND = os.environ["SPCCL_TEST_BACKEND"]
warnings.filterwarnings("ignore", message=".*no bytes are saved.*")


def steps(opt: SparseSync, net: Net, count: int, start: int = 0) -> None:
    for t in range(start, start + count):
        opt.zero_grad()
        loss_of(net, RANK, t).backward()
        opt.step()


def compare(opt: SparseSync, net: Net, simulation: Simulation, tolerance: float = 0.0, few: float = 0.0) -> None:
    require_same(weights(opt, net), (trained(simulation.nets[RANK]), simulation.common), tolerance, few)


def digest(opt: SparseSync, net: Net) -> str:
    """Hash of this rank's local and global weights, bit for bit."""
    sha = hashlib.sha256()
    for p in trained(net).values():
        sha.update(p.detach().float().cpu().numpy().tobytes())
    with opt.global_weights():
        for p in trained(net).values():
            sha.update(p.detach().float().cpu().numpy().tobytes())
    return sha.hexdigest()


def everyone(what: object) -> list:
    """What each rank has, with tensors in host memory."""
    out = [None] * WORLD
    dist.all_gather_object(out, tree_map(lambda x: x.cpu() if isinstance(x, torch.Tensor) else x, what))
    return out


# What the sums of gloo and spccl may differ by from those of the simulation, which adds in rank order: gloo adds in
# another order, and averages by a factor on what is sent.
LOOSE = 0.0 if BACKEND == "spccl" else 2e-6


def follows_the_simulation():
    for settings in ({"density": 0.05}, {"density": 0.01, "leak": 0.9}):
        net, simulation = Net(), Simulation(leak=settings.get("leak", 1.0))
        opt = SparseSync(adamw(net), sample=1.0, correct_second_moment=False, bucket_mb=0.03, **settings)
        for t in range(10):
            steps(opt, net, 1, t)
            simulation.step(t, settings["density"])
        compare(opt, net, simulation, LOOSE)
        assert len(opt.buckets) >= 3
        stats = opt.stats()
        assert stats["backend"] == BACKEND and stats["exchanges"] == 10


def follows_the_simulation_with_local_steps_and_nesterov():
    net, simulation = Net(), Simulation(every=3, outer=(0.7, 0.9))
    opt = SparseSync(adamw(net), density=0.05, every=3, outer_lr=0.7, outer_momentum=0.9, sample=1.0)
    for t in range(12):
        steps(opt, net, 1, t)
        simulation.step(t, 0.05)
    compare(opt, net, simulation, LOOSE or 1e-6)  # fused multiply and add may round differently
    assert opt.exchanges == 4


def follows_the_simulation_with_bfloat16_on_the_wire():
    net, simulation = Net(), Simulation(wire=torch.bfloat16)
    opt = SparseSync(
        adamw(net), density=0.05, sample=1.0, correct_second_moment=False, bucket_mb=0.03, wire_dtype=torch.bfloat16
    )
    for t in range(10):
        steps(opt, net, 1, t)
        simulation.step(t, 0.05)
    compare(opt, net, simulation, 0.0 if BACKEND == "spccl" else 1e-4)
    numel = sum(p.numel() for p in trained(net).values())
    stats = opt.stats()
    assert stats["sent_bytes"] == 2 * round(stats["density_sent"] * numel)
    opt.consolidate()  # sends all, unrounded
    assert opt.stats()["sent_bytes"] == 4 * numel
    own = {n: p.detach().clone() for n, p in trained(net).items()}
    with opt.global_weights():
        for name, p in trained(net).items():
            assert torch.equal(p, own[name]), name


def follows_a_schedule():
    schedule = Geometric(end=0.01, steps=6, dense=2)
    assert [schedule(i) for i in range(3)] == [1, 1, 1] and abs(schedule(5) - 0.1) < 1e-12 and schedule(99) == 0.01
    net, simulation = Net(), Simulation()
    opt = SparseSync(adamw(net), density=schedule, sample=1.0, correct_second_moment=False)
    for t in range(10):
        steps(opt, net, 1, t)
        simulation.step(t, schedule(t))
    compare(opt, net, simulation, LOOSE)


def all_sent_is_the_average_of_updates():
    """density=1, every=1: z' = z + mean over ranks of (w - z), and w' = z', bit for bit."""
    net, simulation = Net(), Simulation()
    opt = SparseSync(adamw(net), density=1.0, correct_second_moment=False)
    for t in range(5):
        steps(opt, net, 1, t)
        simulation.step(t, 1.0)
        compare(opt, net, simulation, LOOSE)
        own = {n: p.detach().clone() for n, p in trained(net).items()}
        with opt.global_weights():
            assert all(torch.equal(own[n], p) for n, p in trained(net).items())


def global_weights_are_equal_on_all_ranks():
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        net = Net(dtype, seed=RANK)  # ranks start differently: rank 0's weights count
        opt = SparseSync(adamw(net), density=0.02, check_every=1)
        steps(opt, net, 6)
        state = opt.state_dict()["sparse_sync"]["parameters"]
        sha = hashlib.sha256(b"".join(e["global"].cpu().numpy().tobytes() for e in state)).hexdigest()
        assert len(set(everyone(sha))) == 1
        local = hashlib.sha256(b"".join(e["local"].cpu().numpy().tobytes() for e in state)).hexdigest()
        assert len(set(everyone(local))) == WORLD
        before = digest(opt, net)
        assert digest(opt, net) == before  # entering the block changes nothing
        opt.consolidate()
        opt.check()
        assert len(set(everyone(digest(opt, net)))) == 1


def corrected_second_moment():
    """After each step the weights are those of AdamW with v / N + (1 - 1/N) m^2 in the denominator."""
    check_second_moment(True, 1 - 1 / WORLD)


def scaled_second_moment():
    """The default for AdamW: v / N in the denominator, and the same weight decay."""
    check_second_moment(None, 0.0)
    opt = SparseSync(adamw(Net()), density=0.5)
    rates = [(g["lr"], g["eps"], g["weight_decay"]) for g in opt.param_groups]
    assert rates == [(3e-3, 1e-8, 0.01), (1e-3, 1e-8, 0.1)]
    assert SparseSync(adamw(Net()), density=0.5, every=2)._moment == "local"
    assert SparseSync(torch.optim.SGD(trained(Net()).values(), lr=0.1))._moment == "local"


def check_second_moment(setting, share_of_mean: float):
    net = Net()
    opt = SparseSync(adamw(net), density=1.0, correct_second_moment=setting)
    b1, b2, eps = 0.9, 0.999, 1e-8
    groups = {id(p): g for g in opt.param_groups for p in g["params"]}
    common = {n: p.detach().double().clone() for n, p in trained(net).items()}
    m = [{n: torch.zeros_like(p) for n, p in common.items()} for _ in range(WORLD)]
    v = [{n: torch.zeros_like(p) for n, p in common.items()} for _ in range(WORLD)]
    for t in range(1, 5):
        change = {n: torch.zeros_like(p) for n, p in common.items()}
        for rank in range(WORLD):
            probe = Net()
            for n, p in trained(probe).items():
                p.data.copy_(common[n])
            loss_of(probe, rank, t - 1).backward()
            for n, p in trained(probe).items():
                if p.grad is None:
                    continue
                group = groups[id(trained(net)[n])]
                g = p.grad.double()
                m[rank][n].mul_(b1).add_(g, alpha=1 - b1)
                v[rank][n].mul_(b2).addcmul_(g, g, value=1 - b2)
                mean, second = m[rank][n] / (1 - b1**t), v[rank][n] / (1 - b2**t)
                second = second / WORLD + share_of_mean * mean * mean
                decayed = common[n] * (1 - group["lr"] * group["weight_decay"])
                change[n] += decayed - group["lr"] * mean / (second.sqrt() + eps) - common[n]
        for n in common:
            common[n] += change[n] / WORLD
        steps(opt, net, 1, t - 1)
        for n, p in trained(net).items():
            assert (p - common[n]).abs().max() < 1e-6 * t, (t, n, (p - common[n]).abs().max())


def bfloat16_weights():
    """What the optimizer changes is added to float32 masters; the parameter is the rounded master, and changes that are
    smaller than its rounding are not lost."""
    net = Net(torch.bfloat16)
    opt = SparseSync(torch.optim.SGD(trained(net).values(), lr=0.05), density=0.1)
    for t in range(8):
        steps(opt, net, 1, t)
        for bucket in opt.buckets:
            for w, local, common in zip(bucket.weights, bucket.locals, bucket.global_parts, strict=True):
                assert local.dtype == torch.float32
                assert torch.equal(w.flat, local.bfloat16())
                assert not w.pruned or w.param.grad is None or not torch.equal(local, common)
    opt.consolidate()
    masters = [b.masters.cpu() for b in opt.buckets]
    for rank, theirs in enumerate(everyone(masters)):
        assert all(torch.equal(a, b) for a, b in zip(masters, theirs, strict=True)), rank


def resumes_bit_for_bit():
    for dtype, kwargs in (
        (torch.float32, {"density": 0.02}),
        (torch.bfloat16, {"density": 0.02}),
        (torch.float32, {"density": Geometric(0.01, 8), "every": 2, "outer_lr": 0.7, "outer_momentum": 0.9}),
    ):
        net = Net(dtype)
        opt = SparseSync(adamw(net), **kwargs)
        steps(opt, net, 5)
        state = copy.deepcopy(opt.state_dict())
        steps(opt, net, 5, 5)
        other = Net(dtype)
        again = SparseSync(adamw(other), **kwargs)
        steps(again, other, 2, 50)
        again.load_state_dict(state)
        steps(again, other, 5, 5)
        assert digest(again, other) == digest(opt, net)
        assert again.stats()["density_sent"] == opt.stats()["density_sent"]


def survives_another_world_size():
    """Four ranks' states for this group: the average of what is unsent stays. A consolidated one serves everybody."""
    simulation = Simulation(n=4)
    for t in range(3):
        simulation.step(t, 0.02)
    net = Net()
    opt = SparseSync(adamw(net), density=0.02)
    steps(opt, net, 2)
    mine = opt.state_dict()
    assert not mine["sparse_sync"]["consolidated"]
    states = everyone(mine)
    mine = states[RANK]
    for n in (1, 2, 3, 8):
        new = SparseSync.reshard(states, n)
        for place, entry in enumerate(mine["sparse_sync"]["parameters"]):
            unsent = sum(s["sparse_sync"]["parameters"][place]["local"] - entry["global"] for s in states) / WORLD
            theirs = [s["sparse_sync"]["parameters"][place] for s in new]
            assert all(torch.equal(e["global"], entry["global"]) for e in theirs)
            kept = sum(e["local"] - e["global"] for e in theirs) / n
            assert torch.allclose(unsent, kept, atol=1e-6), (n, place)
        (last,) = SparseSync.reshard(states, n, ranks=[n - 1])
        for entry, same in zip(last[KEY]["parameters"], new[-1][KEY]["parameters"], strict=True):
            assert torch.equal(entry["local"], same["local"])
        assert last[KEY]["rank"] == n - 1
    with raises(ValueError, "rank", "reshard", f"this group has {WORLD}"):
        opt.load_state_dict(SparseSync.reshard(states, WORLD + 1)[RANK])
    opt.load_state_dict(SparseSync.reshard(SparseSync.reshard(states, 3), WORLD)[RANK])
    steps(opt, net, 2, 2)
    opt.check()
    opt.consolidate()
    state = everyone(opt.state_dict())[0]
    assert state["sparse_sync"]["consolidated"]
    state["sparse_sync"]["world_size"] = 64
    opt.load_state_dict(state)
    steps(opt, net, 1, 9)
    opt.check()


def refuses_states_of_others():
    net = Net()
    opt = SparseSync(adamw(net), density=0.02)
    steps(opt, net, 1)
    state = opt.state_dict()
    other = torch.nn.Linear(100, 100, device=DEVICE)
    wrong = SparseSync(torch.optim.AdamW(other.parameters()), density=0.02)
    with raises(ValueError, f"rank {RANK}", "another model", "parameter 0", "(80, 100)", "(100, 100)"):
        wrong.load_state_dict(state)
    with raises(ValueError, "without 'sparse_sync'"):
        opt.load_state_dict(adamw(net).state_dict())
    with raises(ValueError, f"got the state of rank {(RANK + 1) % WORLD}"):
        opt.load_state_dict(everyone(state)[(RANK + 1) % WORLD])
    with raises(ValueError, "outer_momentum is 0.9"):
        SparseSync(adamw(net), density=0.02, outer_momentum=0.9).load_state_dict(state)


def ranks_with_other_settings():
    odd = WORLD - 1
    with raises(ValueError, "ranks differ", "density is 0.01 on rank", f"0.02 on rank {odd}"):
        SparseSync(adamw(Net()), density=0.02 if odd == RANK else 0.01)
    values = (0.5, 0.01) if odd == RANK else (0.5, 0.02)  # two lambdas have the same name
    with raises(ValueError, "ranks differ", "density of exchange 100 is 0.02 on rank", f"0.01 on rank {odd}", "more"):
        SparseSync(adamw(Net()), density=lambda exchange: values[exchange >= 100])
    shape = (200, 30) if odd == RANK else (100, 60)
    p = torch.nn.Parameter(torch.zeros(shape, device=DEVICE))
    with raises(ValueError, "ranks differ", "parameter 0", "(100, 60)", "(200, 30)", f"on rank {odd}"):
        SparseSync(torch.optim.SGD([p], lr=1.0), density=0.02)


def drift_is_found_and_the_rank_named():
    net = Net()
    opt = SparseSync(adamw(net), density=0.02, check_every=2)
    steps(opt, net, 2)
    odd = WORLD - 1
    if odd == RANK:
        opt.buckets[0].globals[17] += 1e-3
    steps(opt, net, 1, 2)
    named = f"rank {odd}" if WORLD > 2 else "rank"
    with raises(RuntimeError, named, "exchange 4", f"This is rank {RANK}"):
        steps(opt, net, 1, 3)


def nan_gradient_on_one_rank():
    """That rank leaves out its step; all ranks go on with finite weights."""
    net = Net()
    opt = SparseSync(adamw(net), density=0.02)
    steps(opt, net, 2)
    moments = {n: opt.state[p]["exp_avg"].clone() for n, p in trained(net).items() if p.grad is not None}
    opt.zero_grad()
    loss_of(net, RANK, 2).backward()
    if RANK == 1:
        net.middle.grad[3, 5] = math.nan
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        opt.step()
    assert opt.stats()["skipped_steps"] == (RANK == 1)
    assert any("rank 1: the gradient's norm is nan at step 2" in str(w.message) for w in caught) == (RANK == 1)
    same = all(torch.equal(moments[n], opt.state[p]["exp_avg"]) for n, p in trained(net).items() if n in moments)
    assert same == (RANK == 1)
    steps(opt, net, 2, 3)
    assert all(p.isfinite().all() for p in net.parameters())
    opt.check()


def nan_weights_are_not_sent():
    """check_finite=False: weights that became nan are set to the global ones and counted."""
    net = Net()
    opt = SparseSync(torch.optim.SGD(trained(net).values(), lr=0.01), density=0.02, check_finite=False)
    loss_of(net, RANK, 0).backward()
    if RANK == 1:
        net.first.grad[3, 5] = math.inf
        net.bias.grad[7] = math.nan
    opt.step()
    assert all(p.isfinite().all() for p in net.parameters())
    assert opt.stats()["nonfinite_elems"] == (2 if RANK == 1 else 0)
    opt.check()


def scaled_step(scaler, opt: SparseSync, net: Net, t: int, unscales: bool = False) -> None:
    """One step, of a GradScaler if there is one. In step 3 rank 0 finds inf."""
    opt.zero_grad()
    loss = loss_of(net, RANK, t)
    (loss if scaler is None else scaler.scale(loss)).backward()
    if t == 3 and RANK == 0:
        net.first.grad[0, 0] = math.inf
    if scaler is None:
        opt.step()
        return
    if unscales:
        scaler.unscale_(opt)
    scaler.step(opt)
    scaler.update()


def grad_scaler_skips_on_one_rank():
    """A GradScaler per rank: the rank with inf leaves out its step, lowers its scale, and stays in the exchange."""
    net, plain = Net(), Net()
    opt = SparseSync(adamw(net), density=0.05, sample=1.0)
    other = SparseSync(adamw(plain), density=0.05, sample=1.0)
    scaler = torch.amp.GradScaler(DEVICE.type, init_scale=1024.0, growth_interval=1000)
    for t in range(6):
        scaled_step(scaler, opt, net, t, t % 2 == 1)
        scaled_step(None, other, plain, t)
    assert opt.stats()["skipped_steps"] == (RANK == 0)
    assert scaler.get_scale() == (512.0 if RANK == 0 else 1024.0)
    assert digest(opt, net) == digest(other, plain)  # scales are powers of two


def clipping():
    """clip_norm bounds a rank's own gradient to clip_norm * sqrt(ranks)."""
    net = Net()
    opt = SparseSync(torch.optim.SGD(trained(net).values(), lr=1.0), density=1.0, clip_norm=1e-3)
    before = {n: p.detach().clone() for n, p in trained(net).items()}
    loss_of(net, RANK, 0).backward()
    inner_step, seen = opt.inner.step, []

    def step():
        inner_step()
        seen.append(math.sqrt(sum(float((p - before[n]).double().square().sum()) for n, p in trained(net).items())))

    opt.inner.step = step
    opt.step()
    assert abs(seen[0] / (1e-3 * math.sqrt(WORLD)) - 1) < 1e-3, seen


def schedulers_and_accumulation():
    """A learning-rate scheduler on the wrapper; two backward passes a step are the sum of both gradients."""
    net, simulation = Net(), Simulation()
    opt = SparseSync(adamw(net), density=0.05, sample=1.0, correct_second_moment=False)
    scheduler = torch.optim.lr_scheduler.StepLR(opt, 2, gamma=0.5)
    others = [torch.optim.lr_scheduler.StepLR(o, 2, gamma=0.5) for o in simulation.optimizers]
    for t in range(6):
        opt.zero_grad()
        for part in (0, 1):
            loss_of(net, RANK, 2 * t + part).backward()
        opt.step()
        scheduler.step()
        for rank, (twin, optimizer) in enumerate(zip(simulation.nets, simulation.optimizers, strict=True)):
            optimizer.zero_grad()
            for part in (0, 1):
                loss_of(twin, rank, 2 * t + part).backward()
            optimizer.step()
            others[rank].step()
        simulation.exchange(0.05)
    compare(opt, net, simulation, LOOSE)
    assert opt.param_groups[0]["lr"] == 3e-3 / 8 and opt.inner.param_groups[0]["lr"] == 3e-3 / 8


def sparse_bytes():
    """1% of a large model is sent in a few percent of the bytes, counted by the backend."""
    p = torch.nn.Parameter(torch.zeros(1000, 1000, device=DEVICE))
    opt = SparseSync(torch.optim.SGD([p], lr=1.0), density=0.01)
    for t in range(3):
        g = torch.Generator().manual_seed(10 * t + RANK)
        p.grad = torch.randn(1000, 1000, generator=g).to(DEVICE)
        opt.step()
        dist.all_reduce(torch.ones(1_000_000))  # not of the optimizer; on the host
    stats = opt.stats()
    assert 0.006 < stats["density_sent"] < 0.016, stats
    assert stats["sent_bytes"] == 4 * round(stats["density_sent"] * 1e6)
    if BACKEND == "spccl":
        dense = 3 * 4e6 * 2 * (WORLD - 1) / WORLD
        assert 0 < stats["wire_bytes"] < 0.06 * dense, stats["wire_bytes"] / dense
    else:
        assert stats["wire_bytes"] is None


def a_group_of_some_ranks():
    """Ranks 0 and 1 average between themselves; others cannot make the object with that group."""
    group = dist.new_group([0, 1])
    if RANK > 1:
        return
    net, simulation = Net(), Simulation(n=2)
    opt = SparseSync(adamw(net), density=0.05, group=group, sample=1.0, correct_second_moment=False)
    for t in range(3):
        steps(opt, net, 1, t)
        simulation.step(t, 0.05)
    compare(opt, net, simulation, LOOSE)


def train():
    """For test_a_rank_dies_and_comes_back: 12 steps, a checkpoint every 4, continued where the last one is."""
    folder, die_at = Path(os.environ["SPCCL_TEST_CHECKPOINTS"]), int(os.environ["SPCCL_TEST_DIE_AT"])
    folder.mkdir(parents=True, exist_ok=True)
    net = Net()
    opt = SparseSync(adamw(net), density=0.02)
    file = folder / f"rank-{RANK}.pt"
    if file.exists():
        opt.load_state_dict(torch.load(file))
    began = opt.steps
    for t in range(began, 12):
        if t == die_at and die_at and RANK == 1:
            os._exit(9)
        steps(opt, net, 1, t)
        if (t + 1) % 4 == 0:
            dist.barrier()
            torch.save(opt.state_dict(), file)
    return {"began": began, "weights": digest(opt, net)}


CASES = [
    follows_the_simulation, follows_the_simulation_with_local_steps_and_nesterov, follows_a_schedule,
    follows_the_simulation_with_bfloat16_on_the_wire, all_sent_is_the_average_of_updates,
    global_weights_are_equal_on_all_ranks, corrected_second_moment, scaled_second_moment,
    bfloat16_weights, resumes_bit_for_bit, survives_another_world_size, refuses_states_of_others,
    ranks_with_other_settings, drift_is_found_and_the_rank_named, nan_gradient_on_one_rank, nan_weights_are_not_sent,
    grad_scaler_skips_on_one_rank, clipping, schedulers_and_accumulation, sparse_bytes, a_group_of_some_ranks
]  # fmt: skip

if __name__ == "__main__":
    torch.set_num_threads(1)
    main([train] if "train" in sys.argv else CASES, BACKEND)
