"""SparseSync where hosts prune: two ranks count as one host, on one machine.

`Simulation` has the rule: its ranks are hosts. Where all entries are sent, a `SparseSync` over the ranks of a place,
which gets the average of its host's gradients, must come to the same bits: the twin.
"""

from __future__ import annotations

import contextlib
import copy
import math
import os
import warnings

import torch
import torch.distributed as dist

from spccl import backend
from spccl._pruning import hosts
from spccl.optim import SparseSync
from spccl.optim.checkpoint import KEY
from workers.common import RANK, WORLD, main, raises
from workers.sparse_model import DEVICE, Net, Simulation, adamw, loss_of, require_same, trained, weights
from workers.sparse_sync import everyone, scaled_step, steps

PER_HOST = int(os.environ.get("SPCCL_TEST_PER_HOST", "2"))
N_HOSTS, HOST, PLACE = WORLD // PER_HOST, RANK // PER_HOST, RANK % PER_HOST
os.environ["SPCCL_HOST_ID"] = f"host {HOST}"


@contextlib.contextmanager
def on_host(name: str):
    before = os.environ["SPCCL_HOST_ID"]
    os.environ["SPCCL_HOST_ID"] = name
    try:
        yield
    finally:
        os.environ["SPCCL_HOST_ID"] = before


def hosts_follow_the_simulation():
    for settings, twin, tolerance in (
        ({"density": 0.05}, {}, 0.0),
        ({"density": 0.01, "leak": 0.9}, {"leak": 0.9}, 0.0),
        ({"density": 0.05, "wire_dtype": torch.bfloat16}, {"wire": torch.bfloat16}, 0.0),
        ({"density": 0.05, "every": 3, "outer_momentum": 0.9}, {"every": 3, "outer": (1.0, 0.9)}, 1e-6),
        ({"density": 0.05, "chunk": 256}, {"chunk": 256}, 0.0),
        # 0.06: with 0.05 a level lies between two bfloat16, and the simulation rounds it the other way
        ({"density": 0.06, "chunk": 256, "bits": 2}, {"chunk": 256, "levels": True}, 1e-6),
    ):
        net, simulation = Net(), Simulation(N_HOSTS, per_host=PER_HOST, **twin)
        opt = SparseSync(adamw(net), sample=1.0, correct_second_moment=False, bucket_mb=0.03, **settings)
        for t in range(9):
            steps(opt, net, 1, t)
            simulation.step(t, settings["density"])
        got = weights(opt, net)
        require_same(got, (trained(simulation.nets[HOST]), simulation.common), tolerance * WORLD)
        assert len(opt.buckets) >= 3
        stats = opt.stats()
        assert stats["pruning_ranks"] == N_HOSTS and stats["exchanges"] == 9 // settings.get("every", 1)
        assert stats["hosts"].startswith(f"{N_HOSTS} hosts of {PER_HOST} ranks"), stats["hosts"]


def a_twin_over_each_place_has_the_same_bits():
    """Everything is sent. 16-bit weights, both corrections of the second moment, clipping, a default by hosts."""
    for dtype, settings in (
        (torch.float32, {"correct_second_moment": None, "clip_norm": 1e-3}),
        (torch.float32, {"correct_second_moment": True, "every": 2}),
        (torch.bfloat16, {"correct_second_moment": "scaled", "every": 2, "look_ahead": 0.5}),
        (torch.float64, {"correct_second_moment": False, "outer_momentum": 0.5}),
    ):
        net, other = Net(dtype), Net(dtype)
        opt = SparseSync(adamw(net), density=1.0, **settings)
        inner, across = opt.ranks.hosts.inner, opt.ranks.hosts.across
        twin = SparseSync(adamw(other), density=1.0, group=across, hosts="off", **settings)
        assert twin._moment == opt._moment and twin.ranks.n_pruning == N_HOSTS
        for t in range(4):
            steps(opt, net, 1, t)
            twin.zero_grad()
            loss_of(other, RANK, t).backward()
            for p in trained(other).values():
                if p.grad is not None:
                    wide = p.grad.to(torch.promote_types(dtype, torch.float32))
                    dist.all_reduce(wide, op=dist.ReduceOp.AVG, group=inner)
                    p.grad.copy_(wide)
            twin.step()
            require_same(weights(opt, net), weights(twin, other))
        state = sum(b.globals.numel() for b in opt.buckets)
        assert state < 1.1 * sum(b.globals.numel() for b in twin.buckets) / PER_HOST
        opt.check()


def overlap_has_the_same_bits():
    net, other = Net(), Net()
    opt = SparseSync(adamw(net), density=0.05, overlap=net, bucket_mb=0.03)
    plain = SparseSync(adamw(other), density=0.05, bucket_mb=0.03)
    for t in range(5):
        steps(opt, net, 1, t)
        steps(plain, other, 1, t)
    opt.wait()
    require_same(weights(opt, net), weights(plain, other))


def a_rank_of_a_host_asks_alone():
    """While an exchange is under way: stats() and state_dict() wait for no other rank, state_dict() of the model is
    refused. A rank that enters global_weights() alone is refused, and the others too, once they step."""
    net, other = Net(), Net()
    opt = SparseSync(adamw(net), density=0.05, overlap=net, bucket_mb=0.03)
    plain = SparseSync(adamw(other), density=0.05, bucket_mb=0.03)
    for t in range(4):
        steps(opt, net, 1, t)
        steps(plain, other, 1, t)
        if PLACE == 0:
            assert opt.transfers.pending
            figures, state, wanted = opt.stats(), opt.state_dict()[KEY]["parameters"], plain.state_dict()[KEY]
            assert figures["sent_bytes"] == plain.stats()["sent_bytes"] > 0
            for mine, theirs in zip(state, wanted["parameters"], strict=True):
                assert all(torch.equal(mine[name], theirs[name]) for name in ("global", "local"))
            with raises(RuntimeError, "Call opt.wait() on all ranks of the host"):
                net.state_dict()
        dist.barrier()
    opt.wait()
    assert net.state_dict().keys() == other.state_dict().keys()
    require_same(weights(opt, net), weights(plain, other))
    with raises(RuntimeError, "this rank is at", "are at step() and global_weights()", "and save on one"):
        if PLACE == 0:
            with opt.global_weights():
                pass
        else:
            steps(opt, net, 1, 4)
    assert not opt.in_globals
    require_same(weights(opt, net), weights(plain, other))


def a_host_skips_a_step_together():
    """Rank 1 finds nan. Its whole host leaves out the step and says so; the others do not."""
    net = Net()
    opt = SparseSync(adamw(net), density=0.02)
    steps(opt, net, 2)
    opt.zero_grad()
    loss_of(net, RANK, 2).backward()
    if RANK == 1:
        net.middle.grad[3, 5] = math.nan
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        opt.step()
    assert opt.stats()["skipped_steps"] == (HOST == 0), opt.stats()
    assert any(f"rank {RANK}: the gradient's norm is nan" in str(w.message) for w in caught) == (HOST == 0)
    steps(opt, net, 2, 3)
    assert all(p.isfinite().all() for p in net.parameters())
    opt.check()


def a_host_has_one_loss_scale():
    """Ranks begin with other scales: the host takes the smallest. Inf on one rank halves it for all of the host."""
    net, plain = Net(), Net()
    opt = SparseSync(adamw(net, fused=True), density=0.05)
    other = SparseSync(adamw(plain, fused=True), density=0.05)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0 * 2**PLACE, growth_interval=1000)
    for t in range(5):
        scaled_step(scaler, opt, net, t, t == 2)
        scaled_step(None, other, plain, t)
        if t == 0:
            assert scaler.get_scale() == 1024.0
    assert opt.stats()["skipped_steps"] == (HOST == 0)
    assert scaler.get_scale() == (512.0 if HOST == 0 else 1024.0)
    require_same(weights(opt, net), weights(other, plain))  # scales are powers of two


def gradients_that_some_ranks_lack():
    """None counts as 0 where another rank of the host has one; sparse ones are averaged too."""
    table, extra = torch.nn.Embedding(64, 80, sparse=True), torch.nn.Linear(80, 64)
    with torch.no_grad():
        table.weight.copy_(torch.arange(64 * 80.0).view(64, 80) / 5000)
    params = [table.weight, extra.weight, extra.bias]
    opt = SparseSync(torch.optim.SGD(params, lr=1.0), density=1.0)
    before = [p.detach().clone() for p in params]
    table(torch.tensor([RANK % 3, 5, 5])).sum().backward()
    if PLACE == 0:
        extra.weight.grad = torch.ones_like(extra.weight)
    opt.step()
    wanted = torch.zeros(64, 80)
    for rank in range(WORLD):
        wanted[rank % 3] += 1 / WORLD
    wanted[5] += 2
    assert torch.allclose(before[0] - params[0], wanted, atol=1e-5)
    assert torch.allclose(before[1] - params[1], torch.full((64, 80), 1 / PER_HOST), atol=1e-6)
    assert extra.bias.grad is None and torch.equal(before[2], params[2])


def states_continue_and_move_between_host_shapes():
    settings = {"density": 0.02, "every": 2, "outer_momentum": 0.5}
    for dtype in (torch.float32, torch.bfloat16):
        net, other = Net(dtype), Net(dtype)
        opt = SparseSync(adamw(net), **settings)
        steps(opt, net, 5)
        states = everyone(copy.deepcopy(opt.state_dict()))
        mine = states[RANK]
        kept = sum(e["global"].numel() for e in mine[KEY]["parameters"])
        assert kept < 1.1 * sum(p.numel() for p in trained(net).values()) / PER_HOST
        steps(opt, net, 3, 5)
        again = SparseSync(adamw(other), **settings)
        steps(again, other, 2, 50)
        again.load_state_dict(mine)
        steps(again, other, 3, 5)
        require_same(weights(again, other), weights(opt, net))
        assert again.stats()["density_sent"] == opt.stats()["density_sent"]
    flat = SparseSync.reshard(states, 3)  # of 3 ranks that prune
    back = SparseSync.reshard(flat, WORLD, per_host=PER_HOST)
    other = SparseSync.reshard(states, 6, per_host=3)
    for shaped, n, per_host in ((flat, 3, 1), (back, N_HOSTS, PER_HOST), (other, 2, 3)):
        for i, entry in enumerate(flat[0][KEY]["parameters"]):
            theirs = [s[KEY]["parameters"][i] for s in shaped]
            common = torch.cat([e["global"].flatten() for e in theirs[:per_host]])
            assert torch.equal(common, entry["global"].flatten())
            parts = [(e["local"] - e["global"]).flatten() for e in theirs]
            unsent = sum(torch.cat(parts[h * per_host :][:per_host]) for h in range(n)) / n
            wanted = sum((s[KEY]["parameters"][i]["local"] - entry["global"]).flatten() for s in flat) / 3
            assert torch.allclose(unsent, wanted, atol=1e-6), (n, per_host, i)
    opt.load_state_dict(back[RANK])
    assert torch.equal(SparseSync.reshard(states, WORLD, [RANK], per_host=PER_HOST)[0][KEY]["parameters"][0]["global"],
                       mine[KEY]["parameters"][0]["global"])  # fmt: skip
    steps(opt, net, 2, 5)
    opt.check()
    net, other = Net(torch.bfloat16), Net(torch.bfloat16)
    if DEVICE.type == "cuda" and torch.cuda.device_count() < WORLD:
        return  # NCCL, which takes one bit to owners, refuses ranks that share a GPU
    one_bit = SparseSync(adamw(net), bits=1, outer_momentum=0.5, warmup_steps=0)  # another recipe, the same parts
    one_bit.load_state_dict(back[RANK])
    again = SparseSync(adamw(other), **settings)
    again.load_state_dict(SparseSync.reshard(back, WORLD, per_host=PER_HOST)[RANK])
    require_same(weights(one_bit, net), weights(again, other))
    steps(one_bit, net, 2, 5)
    one_bit.check()


def a_consolidated_state_serves_every_run():
    net, alone = Net(torch.bfloat16), Net(torch.bfloat16)
    opt = SparseSync(adamw(net), density=0.02, outer_momentum=0.5)
    steps(opt, net, 3)
    opt.consolidate()
    own, common = weights(opt, net)
    assert all(torch.equal(own[n], common[n]) for n in own)
    state = everyone(opt.state_dict())[WORLD - 1]
    assert state[KEY]["consolidated"] and state[KEY]["hosts"] is None
    off = SparseSync(adamw(alone), density=0.02, outer_momentum=0.5, hosts="off")
    off.load_state_dict(state)
    require_same(weights(off, alone), (own, common))
    steps(off, alone, 1, 3)
    opt.load_state_dict(state)
    steps(opt, net, 1, 3)
    opt.check()
    assert opt.state_dict()[KEY]["hosts"] == {"per_host": PER_HOST, "host": HOST, "place": PLACE}


def refuses_states_of_other_host_shapes():
    net, plain = Net(), Net()
    opt = SparseSync(adamw(net), density=0.02)
    off = SparseSync(adamw(plain), density=0.02, hosts="off")
    steps(opt, net, 1)
    steps(off, plain, 1)
    mine, theirs = opt.state_dict(), off.state_dict()
    shape, ranks = f"{N_HOSTS} hosts of {PER_HOST} ranks", f"{WORLD} ranks that prune"
    with raises(ValueError, f"the state of one of {ranks}, this run has {shape}", f"per_host={PER_HOST}"):
        opt.load_state_dict(theirs)
    with raises(ValueError, f"the state of one of {shape}, this run has {ranks}", "per_host=1"):
        off.load_state_dict(mine)
    with raises(ValueError, f"place {1 - PLACE} on host" if PER_HOST == 2 else "place", f"this rank is place {PLACE}"):
        opt.load_state_dict(everyone(mine)[HOST * PER_HOST + (PLACE + 1) % PER_HOST])
    with raises(ValueError, "on another rank of this host" if HOST == 0 and RANK else "without 'sparse_sync'"):
        opt.load_state_dict({} if RANK == 0 or HOST else mine)
    with raises(ValueError, "wanted a divisor"):
        SparseSync.reshard(everyone(theirs), WORLD, per_host=WORLD - 1)
    opt.load_state_dict(mine)


def refuses_hosts_that_are_not_there():
    """On all ranks, before anything is sent; automatic ones are today's way, and stats() says why."""
    odd = WORLD - 1
    for name, found in (
        ("a" if odd == RANK else "b", f"uneven hosts: 1 to {WORLD - 1} ranks on each of 2 hosts"),
        ("a", f"one host of {WORLD} ranks"),
        (f"host {RANK}", f"{WORLD} hosts of one rank"),
    ):
        with on_host(name):
            with raises(ValueError, f"hosts='on' with {found}, wanted 2 hosts or more"):
                SparseSync(adamw(Net()), hosts="on")
            opt = SparseSync(adamw(Net()))
        assert opt.stats()["hosts"] == f"off: {found}" and opt.ranks.n_pruning == WORLD
    with raises(ValueError, "ranks differ: hosts is", "'on' on rank 0" if odd else "", f"'off' on rank {odd}"):
        SparseSync(adamw(Net()), hosts="off" if odd == RANK else "on")
    with raises(ValueError, "hosts=1, wanted 'auto', 'off' or 'on'"):
        SparseSync(adamw(Net()), hosts=1)
    opt = SparseSync(adamw(Net()), hosts="off")
    assert opt.stats()["hosts"] == "off: asked for" and opt.host is None
    assert SparseSync(adamw(Net()), hosts="on").ranks.n_pruning == N_HOSTS


def drift_is_found_within_a_place():
    net = Net()
    opt = SparseSync(adamw(net), density=0.02, check_every=2)
    steps(opt, net, 2)
    if RANK == WORLD - 1:
        opt.buckets[0].globals[17] += 1e-3
    steps(opt, net, 1, 2)
    with raises(RuntimeError, f"rank {WORLD - 1}" if N_HOSTS > 2 else "rank", "exchange 4", f"This is rank {RANK}"):
        steps(opt, net, 1, 3)


def a_group_of_some_ranks():
    """The first two hosts of four, or of two; the groups in it are made by their members alone."""
    ranks = list(range(2 * PER_HOST))
    group = dist.new_group(ranks)
    if RANK not in ranks:
        return
    net, simulation = Net(), Simulation(2, per_host=PER_HOST)
    opt = SparseSync(adamw(net), density=0.05, group=group, sample=1.0, correct_second_moment=False)
    for t in range(3):
        steps(opt, net, 1, t)
        simulation.step(t, 0.05)
    require_same(weights(opt, net), (trained(simulation.nets[HOST]), simulation.common))
    assert SparseSync(adamw(Net()), group=group).ranks.hosts.inner is opt.ranks.hosts.inner


def the_trial_of_a_gpu_is_agreed():
    """What decides whether spccl's kernels carry CUDA tensors between hosts, here with tensors of the host."""
    opt, cpu = SparseSync(adamw(Net())), torch.device("cpu")
    whole, across = dist.group.WORLD, opt.ranks.hosts.across
    assert backend.options_of(across).cuda_route == "spccl" and backend.options_of(whole).cuda_route == "auto"
    assert hosts.why_not_proven(whole, across, cpu) is None
    all_reduce = dist.all_reduce

    def wrong(tensor, **named):
        if RANK == 2 and not named.get("async_op"):
            all_reduce(tensor, **named)
            tensor[5] += 1
            return None
        return all_reduce(tensor, **named)

    dist.all_reduce = wrong
    try:
        why = hosts.why_not_proven(whole, across, cpu)
    finally:
        dist.all_reduce = all_reduce
    assert why == "rank 2: 1 of 65536 elements of torch.float32 differ from those that the hosts exchange", why
    (dense, *_) = [g for g in hosts._make(whole, [list(range(WORLD))], "nccl") if g is not None]
    assert backend.options_of(dense).cuda_route == "nccl"


def bytes_between_hosts():
    """What leaves a host is the pruned parts alone: as of one rank, for each host."""
    p = torch.nn.Parameter(torch.zeros(1000, 1000))
    opt = SparseSync(torch.optim.SGD([p], lr=1.0), density=0.01, sample=0.1)
    for t in range(3):
        g = torch.Generator().manual_seed(10 * t + RANK)
        p.grad = torch.randn(1000, 1000, generator=g)
        opt.step()
    stats = opt.stats()
    assert 0.006 < stats["density_sent"] < 0.016, stats
    dense = 3 * 4e6 * 2 * (N_HOSTS - 1) / N_HOSTS / PER_HOST
    assert 0 < stats["wire_bytes"] < 0.06 * dense, stats["wire_bytes"] / dense


CASES = [
    hosts_follow_the_simulation, a_twin_over_each_place_has_the_same_bits, overlap_has_the_same_bits,
    a_rank_of_a_host_asks_alone, a_host_skips_a_step_together, a_host_has_one_loss_scale,
    gradients_that_some_ranks_lack,
    states_continue_and_move_between_host_shapes, a_consolidated_state_serves_every_run,
    refuses_states_of_other_host_shapes, refuses_hosts_that_are_not_there, drift_is_found_within_a_place,
    a_group_of_some_ranks, the_trial_of_a_gpu_is_agreed, bytes_between_hosts
]  # fmt: skip

if __name__ == "__main__":
    torch.set_num_threads(1)
    main(CASES, "spccl")
