"""PrunedGradients with sum_density under DistributedDataParallel on every rank: the averages so far, plus the mean over
ranks of the residuals, plus what the owners of the shards keep, is the average of all gradients so far."""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from spccl import backend, ddp, fsdp
from workers.common import RANK, WORLD, main, raises
from workers.ddp_hook import BACKEND, DEVICE, SHAPES, Probe, Sums, mean_residual, step_once, wanted, wrap

SETTINGS = {"density": 0.02, "sum_density": 0.025}


def held(hook) -> dict[str, torch.Tensor]:
    """What the averages have not had yet, by parameter name."""
    out, entries = mean_residual(hook), hook.state_dict()["parameters"]
    for name, total in out.items():
        kept = torch.zeros(total.numel(), dtype=torch.float64)
        saved = entries[name].get("kept")
        if saved is not None:
            kept[saved["first"] : saved["first"] + saved["values"].numel()] = saved["values"].double()
        dist.all_reduce(kept)
        total += kept.view(SHAPES[name])
    return out


def check(sums: Sums, held: dict[str, torch.Tensor], tolerance: float = 1e-4) -> None:
    for name, waiting in held.items():
        torch.testing.assert_close(sums.got[name] + waiting, sums.given[name], rtol=tolerance, atol=tolerance, msg=name)


def same_everywhere(averages: dict[str, torch.Tensor]) -> None:
    flat = torch.cat([g.flatten() for g in averages.values()])
    everyone = [torch.empty_like(flat) for _ in range(WORLD)]
    dist.all_gather(everyone, flat)
    assert all(torch.equal(theirs, flat) for theirs in everyone)


def nothing_is_lost():
    """Over several buckets, which DDP fills anew after the first step, in dense steps and the warm-up, with unused
    parameters, and with 16-bit gradients. All ranks get the same bits."""
    some = tuple(SHAPES)[:-1]
    for dtype, settings, ddp_settings, names in (
        (torch.float32, {}, {"bucket_cap_mb": 0.2}, tuple(SHAPES)),
        (torch.float32, {"dense_steps": 1, "warmup_steps": 2}, {"gradient_as_bucket_view": True}, tuple(SHAPES)),
        (torch.float32, {}, {"find_unused_parameters": True, "bucket_cap_mb": 0.2}, some),
        (torch.bfloat16, {}, {"bucket_cap_mb": 0.2}, tuple(SHAPES)),
    ):
        model, hook = wrap({**SETTINGS, **settings}, dtype, **ddp_settings)
        sums = Sums()
        for step in range(6):
            now = names if step % 2 else tuple(SHAPES)
            sums.gave(step, lambda rank, now=now: now, dtype=dtype)
            averages = step_once(model, wanted(RANK, step, now, dtype))
            same_everywhere(averages)
            sums.take(averages)
        check(sums, held(hook), 1e-4 if dtype == torch.float32 else 5e-2)
        big = torch.count_nonzero(averages["big"]) / averages["big"].numel()
        assert big <= 5 * SETTINGS["sum_density"] + 0.01, big  # without sum_density: up to ranks times density
        assert 0 <= hook.stats()["density_sums"] <= 0.3
        assert any("kept" in entry for entry in hook.state_dict()["parameters"].values()) or RANK > 0


def resumes():
    """With the same bits; with another layout, without sum_density and on other numbers of ranks what was kept becomes
    residual."""
    model, hook = wrap(SETTINGS)
    sums = Sums()
    for step in range(5):
        sums.gave(step)
        sums.take(step_once(model, wanted(RANK, step)))
    saved = copy.deepcopy(hook.state_dict())
    again, other = wrap(SETTINGS)
    step_once(again, wanted(RANK, 0))  # DDP fills its buckets anew after its first step
    other.load_state_dict(copy.deepcopy(saved))
    for step in range(5, 8):
        one, two = (step_once(m, wanted(RANK, step)) for m in (model, again))
        assert all(torch.equal(one[n], two[n]) for n in one), step
    for settings, ddp_settings in ((SETTINGS, {"bucket_cap_mb": 0.2}), ({"density": 0.02}, {})):
        third, loaded = wrap(settings, **ddp_settings)
        loaded.load_state_dict(copy.deepcopy(saved))
        now = copy.deepcopy(sums)
        for step in range(5, 8):
            now.gave(step)
            now.take(step_once(third, wanted(RANK, step)))
        check(now, held(loaded))
    states: list = [None] * WORLD
    dist.all_gather_object(states, saved)
    waiting = held(hook_of(saved))
    for n in (1, WORLD + 1):
        new = ddp.PrunedGradients.reshard(copy.deepcopy(states), n)
        for name, total in waiting.items():
            parts = [state["parameters"][name] for state in new]
            assert not any("kept" in part for part in parts)
            if parts[0]["residual"] is not None:
                mean = sum(part["residual"].double().cpu() for part in parts) / n
                torch.testing.assert_close(mean, total, rtol=1e-5, atol=1e-6)


def hook_of(state: dict):
    hook = ddp.PrunedGradients(**SETTINGS)
    hook.load_state_dict(copy.deepcopy(state))
    return hook


def bytes_do_not_grow():
    """Counted bytes of 2 ranks and of all, (P - 1) / P times."""
    if BACKEND != "spccl" or WORLD % 2 or DEVICE.type == "cuda":  # a GPU does not count them
        return
    options = backend.Options(format="tile")  # else a fast link takes small shards dense
    groups = [dist.new_group([r, r + 1], pg_options=options) for r in range(0, WORLD, 2)]
    means = []
    for group in (groups[RANK // 2], dist.new_group(pg_options=options)):
        n = dist.get_world_size(group)
        model = DistributedDataParallel(Probe(), process_group=group)
        hook = ddp.PrunedGradients(density=0.02, sum_density=0.02).register(model)
        for step in range(6):
            step_once(model, wanted(RANK, step))
        sent: list = [None] * WORLD
        dist.all_gather_object(sent, hook.stats()["wire_bytes"])
        means.append(sum(sent) / WORLD / ((n - 1) / n))
    assert means[1] < 1.1 * means[0], means


def refused():
    with raises(ValueError, "sum_density=2", "in (0, 1], or None"):
        ddp.PrunedGradients(sum_density=2)
    with raises(ValueError, "sum_density=0.1", "None with FSDP2"):
        fsdp.PrunedShards(0.01, sum_density=0.1)


CASES = [nothing_is_lost, resumes, bytes_do_not_grow, refused]

if __name__ == "__main__":
    torch.set_num_threads(1)
    main(CASES, BACKEND)
