"""PrunedGradients with features of DDP that change when the hook is called, or with what; states, copies.

The models and the sums that are checked are those of ddp_hook.py.
"""

from __future__ import annotations

import copy
import io
import itertools
import time
import warnings
from datetime import timedelta
from unittest import mock

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint

from spccl import ddp
from spccl._pruning import ddp_model
from workers.common import RANK, WORLD, main, raises
from workers.ddp_hook import BACKEND, SHAPES, Probe, Sums, grads, mean_residual, step_once, wanted, wrap


def static_graph_resumed() -> None:
    """DDP exchanges all buckets at the end of its first pass, whatever step the hook is at."""
    settings = {"static_graph": True, "bucket_cap_mb": 0.03}
    model, hook = wrap({"momentum": 0.9}, **settings)
    for step in range(2):
        step_once(model, wanted(RANK, step))
    saved, expected = hook.state_dict(), step_once(model, wanted(RANK, 2))
    model, hook = wrap({"momentum": 0.9}, **settings)
    hook.load_state_dict(saved)
    for name, grad in step_once(model, wanted(RANK, 2)).items():
        assert torch.equal(grad, expected[name]), name
    assert hook.step == 3


def static_graph_set_after_register() -> None:
    """The flag counts from then on: unused parameters keep their residual too."""
    model, hook = wrap({}, bucket_cap_mb=0.03)
    model._set_static_graph()
    names = tuple(n for n in SHAPES if n != "mid")
    sums = Sums()
    for step in range(3):
        sums.gave(step, lambda rank: names)
        sums.take(step_once(model, wanted(RANK, step, names)))
    sums.check(hook)


class Reentrant(torch.nn.Module):
    """Its backward pass runs that of the first layer, which has the last bucket, inside of that of the second."""

    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(100, 90), torch.nn.Linear(90, 100)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(checkpoint(self.first, x, use_reentrant=True))


def reentrant_checkpoints() -> None:
    """DDP waits for all buckets in the backward pass that fills the last one."""
    torch.manual_seed(0)
    model = DistributedDataParallel(Reentrant(), bucket_cap_mb=0.03)
    hook = ddp.PrunedGradients(density=1.0).register(model)
    for _ in range(3):  # with two buckets from the second pass on
        model.zero_grad()
        model(torch.full((4, 100), RANK + 1.0, requires_grad=True)).sum().backward()
    expected = (WORLD + 1) / 2 * 4 * model.module.second.weight.sum(0)
    torch.testing.assert_close(model.module.first.weight.grad, expected.expand(100, 90).t(), rtol=1e-4, atol=1e-4)
    assert hook.step == 3


ZEROING = {
    "to None": lambda model: model.zero_grad(),
    "in place": lambda model: model.zero_grad(set_to_none=False),
    "by foreach": lambda model: torch._foreach_zero_([p.grad for p in model.parameters()]),
    "past autograd": lambda model: [p.grad.data.zero_() for p in model.parameters()],
}


def zeroed_gradients_with_momentum() -> None:
    """However gradients are zeroed, and under no_sync, each pass counts once: bit for bit as with new gradients."""
    for as_view in (False, True):
        runs = []
        for zero in ZEROING.values():
            model, _ = wrap({"momentum": 0.9}, gradient_as_bucket_view=as_view, bucket_cap_mb=0.03)
            for step in range(0, 6, 2):
                if step:
                    zero(model)
                with model.no_sync():
                    model(wanted(RANK, step)).backward()
                model(wanted(RANK, step + 1)).backward()
            runs.append(grads(model))
        for how, run in zip(ZEROING, runs, strict=True):
            for name, grad in run.items():
                assert torch.equal(grad, runs[0][name]), (as_view, how, name)


def unscale(params: list[torch.Tensor]) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(1))  # makes its scale
    scaler.unscale_(torch.optim.SGD(params))


CHANGES = {
    "nothing": lambda params: None,
    "clip": lambda params: torch.nn.utils.clip_grad_norm_(params, 0.1),
    "add": lambda params: [p.grad.add_(p.detach(), alpha=1e-4) for p in params],
    "unscale": unscale,
}


def second_pass_with_momentum_is_refused() -> None:
    """Whatever a training loop does to the averages between the passes, other than zeroing them."""
    words = "a second backward pass adds to the gradient", "model.no_sync()", "model.zero_grad()", "Start again"
    for as_view, one_between, change in itertools.product((False, True), (False, True), CHANGES.values()):
        model, hook = wrap({"momentum": 0.9}, gradient_as_bucket_view=as_view)
        model(wanted(RANK, 0)).backward()
        change(list(model.parameters()))
        if one_between:  # a pass under no_sync leaves the average in the gradient
            with model.no_sync():
                model(wanted(RANK, 2)).backward()
        loss = model(wanted(RANK, 1))
        with raises(RuntimeError, f"rank {RANK}", "momentum=0.9", *words):
            loss.backward()
        assert hook.step == 1


def zeroed_gradients_are_seldom_read() -> None:
    """Reading values takes a pass over the gradient, and on CUDA a wait. A loop that changes later is still refused,
    within as many passes as lie between two reads, and at once after a state was loaded."""
    for loads in (False, True):
        model, hook = wrap({"momentum": 0.9}, bucket_cap_mb=0.03)
        with mock.patch.object(ddp_model, "_has_nonzeros", side_effect=ddp_model._has_nonzeros) as read:
            for step in range(12):
                model(wanted(RANK, step)).backward()
                model.zero_grad(set_to_none=False)
        assert read.call_count == 4 * len(SHAPES), read.call_count
        if loads:
            hook.load_state_dict(hook.state_dict())
        passes: list[int] = []
        with raises(RuntimeError, "a second backward pass adds to the gradient"):
            for number in range(70):
                passes.append(number)
                model(wanted(RANK, 0)).backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        assert (len(passes) == 2) if loads else (2 < len(passes) < 62), len(passes)


def second_pass_without_momentum_is_right() -> None:
    model, hook = wrap({})
    sums = Sums()
    for step in range(0, 4, 2):
        model.zero_grad()
        for part in range(2):
            sums.gave(step + part)
            model(wanted(RANK, step + part)).backward()
        sums.take(grads(model))
    sums.check(hook)


class Orders(torch.nn.Module):
    """A convolution's weights and a matrix, each in one of two orders in memory."""

    def __init__(self, turned: bool):
        super().__init__()
        self.conv = torch.nn.Parameter(torch.zeros(64, 16, 3, 3))
        self.matrix = torch.nn.Parameter(torch.zeros(90, 100).t() if turned else torch.zeros(100, 90))
        if turned:
            self.to(memory_format=torch.channels_last)

    def forward(self, given: dict[str, torch.Tensor]) -> torch.Tensor:
        return sum((getattr(self, name) * grad).sum() for name, grad in given.items())


def given_orders(rank: int, step: int) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(50 * step + rank)
    return {"conv": torch.randn(64, 16, 3, 3, generator=g), "matrix": torch.randn(100, 90, generator=g)}


def state_moves_to_another_memory_format() -> None:
    """Nothing is lost or moved to another entry when the model that loads has another order in memory."""
    for turned in (False, True):
        first = DistributedDataParallel(Orders(turned))
        hook = ddp.PrunedGradients(momentum=0.5).register(first)
        averages = [step_once(first, given_orders(RANK, step)) for step in range(2)]
        saved = hook.state_dict()
        second = DistributedDataParallel(Orders(not turned))
        again = ddp.PrunedGradients(momentum=0.5)
        again.load_state_dict(saved)
        again.register(second)
        for name, entry in saved["parameters"].items():
            param = getattr(second.module, name)
            for key in ("residual", "velocity"):
                assert entry[key].shape == param.shape and entry[key].is_contiguous(), (name, key)
        averages.append(step_once(second, given_orders(RANK, 2)))
        for name, entry in again.state_dict()["parameters"].items():
            before = saved["parameters"][name]
            mine = 0.5 * before["velocity"] + given_orders(RANK, 2)[name]
            total = (before["residual"] + mine).double() / WORLD
            held = entry["residual"].double() / WORLD
            dist.all_reduce(total)
            dist.all_reduce(held)
            torch.testing.assert_close(averages[2][name] + held, total, rtol=1e-5, atol=1e-5, msg=name)
        wrong = {**saved, "parameters": {"matrix": {**saved["parameters"]["matrix"], "residual": torch.zeros(90, 100)}}}
        with raises(ValueError, f"rank {RANK}", "residual of 'matrix' has shape (90, 100)", "wanted (100, 90)"):
            again.load_state_dict(wrong)


class WithEmpty(Probe):
    """A Probe with an empty parameter in front, and if `alone` in a bucket of its own: of another dtype."""

    def __init__(self, alone: bool):
        super().__init__()
        self.nothing = torch.nn.Parameter(torch.zeros(0, 100, dtype=torch.float64 if alone else torch.float32))

    def forward(self, given: dict[str, torch.Tensor]) -> torch.Tensor:
        return super().forward(given) + self.nothing.sum()


def empty_parameters() -> None:
    for alone in (False, True):
        for settings in ({}, {"clip_norm": 1e6, "norm_every": 1}):
            model = DistributedDataParallel(WithEmpty(alone))
            hook = ddp.PrunedGradients(**settings).register(model)
            sums = Sums()
            for step in range(3):
                sums.gave(step)
                averages = step_once(model, wanted(RANK, step))
                del averages["nothing"]
                sums.take(averages)
            sums.check(hook)
            hook.load_state_dict(hook.state_dict())
            step_once(model, wanted(RANK, 3))


def uneven_inputs_with_unused_parameters() -> None:
    """A rank that has joined sends its residual, also of a parameter that no other rank uses in that step."""
    model, hook = wrap({}, find_unused_parameters=True)
    sums = Sums()
    with_mid, without = tuple(SHAPES), tuple(n for n in SHAPES if n != "mid")
    n_steps, n_mine = 12, [12, 2][min(RANK, 1)]
    names = [without if step in (1, 2, 3) else with_mid for step in range(n_steps)]
    for step in range(n_steps):
        ranks = [r for r in range(WORLD) if r == 0 or step < 2]
        sums.gave(step, lambda rank, step=step: names[step], ranks)
    held = 0.0
    with model.join():
        for step in range(n_mine):
            sums.take(step_once(model, wanted(RANK, step, names[step])))
        if RANK:
            held = float(hook.state_dict()["parameters"]["big"]["residual"].norm())
    if RANK:
        assert float(hook.state_dict()["parameters"]["big"]["residual"].norm()) < 0.9 * held
    gathered = [None] * WORLD
    dist.all_gather_object(gathered, sums.got)
    residual = mean_residual(hook)
    for name in ("big", "mid"):  # only rank 0 has seen all averages
        torch.testing.assert_close(gathered[0][name] + residual[name], sums.given[name], rtol=1e-4, atol=1e-4)


def copies_have_no_hook() -> None:
    model, hook = wrap({"momentum": 0.9, "clip_norm": 1e6})
    step_once(model, wanted(RANK, 0))

    def through_a_file() -> torch.nn.Module:
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        return torch.load(file, weights_only=False)

    plain = {name: sum(wanted(r, 1)[name].double() for r in range(WORLD)) / WORLD for name in SHAPES}
    for copied in (lambda: copy.deepcopy(model), through_a_file, lambda: AveragedModel(model).module):
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            other = copied()
        assert [w for w in seen if "a copy of a model has no hook" in str(w.message)], seen
        for name, grad in step_once(other, wanted(RANK, 1)).items():
            torch.testing.assert_close(grad, plain[name], rtol=1e-5, atol=1e-6)
        assert hook.step == 1
    third = copy.deepcopy(other)
    again = ddp.PrunedGradients().register(third)  # the copy is no model with a hook
    step_once(third, wanted(RANK, 1))
    assert again.step == 1
    step_once(model, wanted(RANK, 1))
    assert hook.step == 2


def layer_frozen_after_ddp_was_made() -> None:
    """DDP goes on to reduce it, as an unused parameter. Its residual, if there is one, stays."""
    model = DistributedDataParallel(Probe(), find_unused_parameters=True)
    model.module.mid.requires_grad_(False)
    hook = ddp.PrunedGradients(momentum=0.9).register(model)
    names = tuple(n for n in SHAPES if n != "mid")
    for step in range(2):
        averages = step_once(model, wanted(RANK, step))
        assert set(averages) == set(names) and averages["big"].any()
    assert not hook.state_dict()["parameters"]["mid"]["residual"].any()


def a_late_rank_is_waited_for_until_the_timeout() -> None:
    """Of the group that the hook uses, however DDP waits for the buckets."""
    for settings in ({"bucket_cap_mb": 0.03}, {"static_graph": True}, {"find_unused_parameters": True}):
        group = dist.new_group(timeout=timedelta(seconds=2))
        model, _ = wrap({"momentum": 0.9}, process_group=group, **settings)
        step_once(model, wanted(RANK, 0))
        model.zero_grad()
        loss = model(wanted(RANK, 1))  # DDP makes its buckets anew, in a collective
        dist.barrier()
        if RANK == 0:
            began = time.monotonic()
            with raises(RuntimeError):
                loss.backward()
            assert 1.5 < time.monotonic() - began < 10, time.monotonic() - began
        dist.barrier()


CASES = [
    static_graph_resumed,
    static_graph_set_after_register,
    reentrant_checkpoints,
    zeroed_gradients_with_momentum,
    second_pass_with_momentum_is_refused,
    zeroed_gradients_are_seldom_read,
    second_pass_without_momentum_is_right,
    state_moves_to_another_memory_format,
    empty_parameters,
    uneven_inputs_with_unused_parameters,
    copies_have_no_hook,
    layer_frozen_after_ddp_was_made,
    a_late_rank_is_waited_for_until_the_timeout,
]

if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message="PrunedGradients")
    main(CASES, backend=BACKEND)
