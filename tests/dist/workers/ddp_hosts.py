"""PrunedGradients where hosts prune: two ranks count as one host, on one machine.

As in workers/ddp_hook.py gradients are chosen: the averages so far, plus the mean over hosts of the residuals, is the
average of all gradients so far.
"""

from __future__ import annotations

import copy
import math
import os

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

from spccl import backend, ddp
from workers import ddp_hook
from workers.common import RANK, WORLD, main, raises
from workers.ddp_hook import SHAPES, Sums, step_once, wanted, wrap

PER_HOST = int(os.environ.get("SPCCL_TEST_PER_HOST", "2"))
N_HOSTS, HOST, PLACE = WORLD // PER_HOST, RANK // PER_HOST, RANK % PER_HOST
os.environ["SPCCL_HOST_ID"] = f"host {HOST}"
SHAPE = f"{N_HOSTS} hosts of {PER_HOST} ranks"


def everyone(what: object) -> list:
    out = [None] * WORLD
    dist.all_gather_object(out, what)
    return out


def mean_residual(hook, key: str = "residual") -> dict[str, torch.Tensor]:
    """Average over hosts of what each still holds back, whole."""
    hosts = ddp.PrunedGradients.reshard(everyone(hook.state_dict()), N_HOSTS)
    out = {}
    for name, shape in SHAPES.items():
        held = [s["parameters"][name][key] for s in hosts if name in s["parameters"]]
        out[name] = sum((h.double().cpu() for h in held if h is not None), torch.zeros(shape).double()) / N_HOSTS
    return out


ddp_hook.mean_residual = mean_residual  # which Sums.check asks for


def conserves(dtype=torch.float32, settings=None, tolerance=1e-4, **ddp_settings):
    """Buckets are made anew after the first step: the parts of a parameter stay where they are."""
    model, hook = wrap({"density": 0.02, **(settings or {})}, dtype, bucket_cap_mb=0.05, **ddp_settings)
    sums = Sums()
    buckets = set()
    for step in range(4):
        sums.gave(step, dtype=dtype)
        averages = step_once(model, wanted(RANK, step, dtype=dtype))
        buckets.add(tuple(key for key, *_ in hook._host_plans.values()))
        sums.take(averages)
        assert torch.count_nonzero(averages["last"]) <= 2 * N_HOSTS * 0.02 * averages["last"].numel()
        for name, theirs in everyone(averages)[0].items():
            assert torch.equal(theirs, averages[name]), name
    sums.check(hook, tolerance)
    assert len(buckets) == 2, len(buckets)
    return model, hook


def sums_are_kept():
    for dtype, tolerance in ((torch.float32, 1e-4), (torch.bfloat16, 5e-2), (torch.float64, 1e-6)):
        _, hook = conserves(dtype, tolerance=tolerance, gradient_as_bucket_view=dtype == torch.float32)
        kept = sum(p.residual.numel() for p in hook._params.values() if p.residual is not None)
        assert kept < 1.01 * sum(math.prod(s) for n, s in SHAPES.items() if n in ("big", "mid", "last")) / PER_HOST
    stats = hook.stats()
    assert stats["pruning_ranks"] == N_HOSTS and stats["hosts"].startswith(SHAPE), stats
    assert 0.01 < stats["density_pruned"] < 0.04, stats


def bytes_between_hosts():
    before = backend.stats().wire_bytes_sent
    _, hook = conserves()
    stats = hook.stats()
    dense = 4 * 8 * sum(math.prod(s) for s in SHAPES.values()) * (N_HOSTS - 1) / N_HOSTS / PER_HOST  # of 4 steps
    assert 0 < stats["wire_bytes"] < 0.12 * dense, stats["wire_bytes"] / dense
    assert backend.stats().wire_bytes_sent - before < 10 * dense  # only what this test itself has gathered


def everything_sent_is_the_average():
    model, _ = wrap({"density": 1.0, "hosts": "on"})
    for step in range(2):
        got = step_once(model, wanted(RANK, step))
        for name in SHAPES:
            mean = sum(wanted(r, step)[name].double() for r in range(WORLD)) / WORLD
            torch.testing.assert_close(got[name], mean, rtol=1e-5, atol=1e-6)


def momentum_and_clipping_are_of_hosts():
    """clip_norm bounds the norm of the host's average, over all parts, to clip_norm * sqrt(hosts). Momentum of what is
    sent whole is that of SGD."""
    model, _ = wrap({"density": 1.0, "clip_norm": 0.5, "momentum": 0.5}, bucket_cap_mb=100)
    velocity = {name: torch.zeros(shape).double() for name, shape in SHAPES.items()}
    for step in range(3):
        got = step_once(model, wanted(RANK, step))
        clipped = {name: torch.zeros(shape).double() for name, shape in SHAPES.items()}
        for host in range(N_HOSTS):
            ranks = range(host * PER_HOST, (host + 1) * PER_HOST)
            mean = {n: sum(wanted(r, step)[n].double() for r in ranks) / PER_HOST for n in SHAPES}
            norm = math.sqrt(sum(float(g.square().sum()) for g in mean.values()))
            for name in SHAPES:
                clipped[name] += mean[name] * min(1.0, 0.5 * math.sqrt(N_HOSTS) / norm) / N_HOSTS
        for name in SHAPES:
            velocity[name] = 0.5 * velocity[name] + clipped[name]
            if step > 0:  # in the first step the buckets have no norms of the step before
                torch.testing.assert_close(got[name], velocity[name], rtol=1e-4, atol=1e-5, msg=f"{name} {step}")
            else:
                velocity[name] = got[name].clone()


def inf_reaches_all_ranks():
    model, _ = wrap({"density": 0.02})
    step_once(model, wanted(RANK, 0))
    given = wanted(RANK, 1)
    if RANK == 1:
        given["last"][3, 4] = math.inf
    got = step_once(model, given)
    assert got["last"][3, 4] == math.inf
    assert step_once(model, wanted(RANK, 2))["last"].isfinite().all()


def residual_ratio_is_of_a_part():
    """Squared norms of what the places' ratios divide by add up to that of the host's gradient."""
    model, hook = wrap({"density": 0.02, "norm_every": 1})
    for step in range(3):
        step_once(model, wanted(RANK, step))
    figures = everyone(hook.stats())[HOST * PER_HOST :][:PER_HOST]
    parts = [(s["unsent_norm"] / s["residual_ratio"]) ** 2 for s in figures]
    assert math.isclose(sum(parts), figures[0]["update_norm"] ** 2, rel_tol=1e-6), (parts, figures)


def sparse_gradients_are_averaged_by_all():
    """They have no parts, and are not in the counts of parts."""
    table, head = torch.nn.Embedding(500, 64, sparse=True), torch.nn.Linear(64, 80, bias=False)
    torch.nn.init.ones_(table.weight)
    model = DistributedDataParallel(torch.nn.Sequential(table, head))
    hook = ddp.PrunedGradients(density=1.0).register(model)
    model(torch.tensor([RANK, 7, 7])).sum().backward()
    expected = torch.zeros(500, 64)
    for rank in range(WORLD):
        for row in (rank, 7, 7):
            expected[row] += head.weight.detach().sum(0) / WORLD
    torch.testing.assert_close(table.weight.grad.to_dense(), expected, rtol=1e-5, atol=1e-5)
    stats = hook.stats()
    assert stats["density_sent"] == 1 and stats["dense_bytes"] * PER_HOST == 4 * head.weight.numel(), stats


def ranks_with_fewer_inputs_join():
    model, hook = wrap({"density": 0.02})
    with Join([model]):
        for step in range(2 + (RANK != 1)):
            step_once(model, wanted(RANK, step))
    assert hook.step == 3


def states_continue_and_move_between_host_shapes():
    settings = {"density": 0.02, "momentum": 0.5}
    model, hook = conserves(settings=settings, tolerance=1e9)  # momentum does not keep the sum
    state = copy.deepcopy(hook.state_dict())
    after = [step_once(model, wanted(RANK, step)) for step in (4, 5)]
    again, hook2 = wrap(settings, bucket_cap_mb=0.05)
    step_once(again, wanted(RANK, 77))
    hook2.load_state_dict(state)
    for step, wanted_ in zip((4, 5), after, strict=True):
        got = step_once(again, wanted(RANK, step))
        assert all(torch.equal(got[n], wanted_[n]) for n in got)
    states = everyone(state)
    flat = ddp.PrunedGradients.reshard(states, WORLD)
    back = ddp.PrunedGradients.reshard(flat, WORLD, per_host=PER_HOST)
    other = ddp.PrunedGradients.reshard(states, 6, per_host=3)
    for key in ("residual", "velocity"):
        for name in ("big", "last"):
            found = [
                sum(torch.cat([s["parameters"][name][key].flatten().cpu() for s in shaped[h * per :][:per]])
                    for h in range(len(shaped) // per)) / (len(shaped) // per)
                for shaped, per in ((states, PER_HOST), (flat, 1), (back, PER_HOST), (other, 3))
            ]  # fmt: skip
            assert found[0].abs().max() > 0
            assert all(torch.allclose(found[0], x, atol=1e-5) for x in found[1:]), (key, name)
    hook.load_state_dict(back[RANK])
    step_once(model, wanted(RANK, 6))
    _, off = wrap({**settings, "hosts": "off"})
    assert off.stats()["hosts"] == "off: asked for" and off.stats()["pruning_ranks"] == WORLD
    off.load_state_dict(flat[RANK])
    with raises(ValueError, f"the state of one of {SHAPE}, this run has {WORLD} ranks that prune", "per_host=1"):
        off.load_state_dict(state)
    with raises(ValueError, f"{WORLD} ranks that prune, this run has {SHAPE}", f"{WORLD}, per_host={PER_HOST}"):
        hook.load_state_dict(flat[RANK])
    with raises(ValueError, f"this rank is place {PLACE} on host {HOST}"):
        hook.load_state_dict(states[(RANK + 1) % WORLD])
    early = ddp.PrunedGradients(**settings)
    early.load_state_dict(state)
    assert early.state_dict()["hosts"] == state["hosts"]
    with raises(ValueError, "wanted a divisor"):
        ddp.PrunedGradients.reshard(flat, WORLD, per_host=WORLD - 1)


def refuses_hosts_that_are_not_there():
    odd = WORLD - 1
    os.environ["SPCCL_HOST_ID"] = "a" if odd == RANK else "b"
    found = f"uneven hosts: 1 to {WORLD - 1} ranks on each of 2 hosts"
    with raises(ValueError, f"hosts='on' with {found}, wanted 2 hosts or more"):
        wrap({"hosts": "on"})
    model, hook = wrap({})
    os.environ["SPCCL_HOST_ID"] = f"host {HOST}"
    step_once(model, wanted(RANK, 0))
    assert hook.stats()["hosts"] == f"off: {found}" and hook.stats()["pruning_ranks"] == WORLD
    with raises(ValueError, "hosts='maybe', wanted 'auto', 'off' or 'on'"):
        ddp.PrunedGradients(hosts="maybe")


CASES = [
    sums_are_kept, bytes_between_hosts, everything_sent_is_the_average, momentum_and_clipping_are_of_hosts,
    inf_reaches_all_ranks, residual_ratio_is_of_a_part, sparse_gradients_are_averaged_by_all,
    ranks_with_fewer_inputs_join, states_continue_and_move_between_host_shapes,
    refuses_hosts_that_are_not_there
]  # fmt: skip

if __name__ == "__main__":
    torch.set_num_threads(1)
    main(CASES, "spccl")
