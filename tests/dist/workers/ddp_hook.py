"""PrunedGradients under DistributedDataParallel on every rank; the backend is SPCCL_TEST_BACKEND.

Gradients are chosen, not computed: the loss is sum(parameter * wanted gradient), so every rank knows every
rank's gradient and can check what DDP returns. Most cases check this sum: the averages so far, plus the mean over ranks
of the residuals, is the average of all gradients so far.
"""

from __future__ import annotations

import os
import warnings

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from spccl import ddp
from workers.common import RANK, WORLD, main, raises

BACKEND = os.environ["SPCCL_TEST_BACKEND"]
DEVICE = torch.device(os.environ.get("SPCCL_TEST_DEVICE", "cpu"))
SHAPES = {"big": (150, 200), "mid": (90, 100), "bias": (50,), "small": (3, 5), "last": (600, 500)}


class Probe(torch.nn.Module):
    """Parameters of SHAPES whose gradients are what forward is given; missing ones are unused."""

    def __init__(self, dtype: torch.dtype = torch.float32):
        super().__init__()
        for name, shape in SHAPES.items():
            setattr(self, name, torch.nn.Parameter(torch.zeros(shape, dtype=dtype, device=DEVICE)))

    def forward(self, wanted: dict[str, torch.Tensor]) -> torch.Tensor:
        return sum((getattr(self, name) * grad.to(DEVICE)).sum() for name, grad in wanted.items())


def wanted(rank: int, step: int, names=tuple(SHAPES), dtype=torch.float32) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(1000 * step + rank)
    made = {name: torch.randn(shape, generator=g).to(dtype) for name, shape in SHAPES.items()}
    return {name: made[name] for name in names}


def wrap(settings: dict, dtype=torch.float32, **ddp_settings):
    model = DistributedDataParallel(Probe(dtype), **ddp_settings)
    return model, ddp.PrunedGradients(**settings).register(model)


def grads(model) -> dict[str, torch.Tensor]:
    return {n: p.grad.detach().double().cpu() for n, p in model.module.named_parameters() if p.grad is not None}


def step_once(model, given) -> dict[str, torch.Tensor]:
    """One synchronised backward pass; the averages that it gave."""
    model.zero_grad(set_to_none=True)
    model(given).backward()
    return {n: g.clone() for n, g in grads(model).items()}


def mean_residual(hook, key: str = "residual") -> dict[str, torch.Tensor]:
    """Average over ranks of what each still holds back, by parameter name."""
    out = {}
    for name, entry in sorted(hook.state_dict()["parameters"].items()):
        n = int(torch.tensor(SHAPES[name]).prod())
        held = entry[key].double().cpu() if entry[key] is not None else torch.zeros(n, dtype=torch.float64)
        dist.all_reduce(held)
        out[name] = held.view(SHAPES[name]) / WORLD
    return out


class Sums:
    """Of the average gradients that went into the hook, and of the averages that came out."""

    def __init__(self):
        zero = {n: torch.zeros(s, dtype=torch.float64) for n, s in SHAPES.items()}
        self.given, self.got = zero, {n: z.clone() for n, z in zero.items()}

    def gave(self, step: int, names_of=lambda rank: tuple(SHAPES), ranks=range(WORLD), dtype=torch.float32):
        for rank in ranks:
            for name, grad in wanted(rank, step, names_of(rank), dtype).items():
                self.given[name] += grad.double() / WORLD

    def take(self, averages: dict[str, torch.Tensor]):
        for name, grad in averages.items():
            self.got[name] += grad

    def check(self, hook, tolerance: float = 1e-4):
        for name, held in mean_residual(hook).items():
            torch.testing.assert_close(
                self.got[name] + held, self.given[name], rtol=tolerance, atol=tolerance, msg=name
            )


def conserves(n_steps: int = 5, dtype=torch.float32, settings: dict | None = None, **ddp_settings):
    model, hook = wrap(settings or {}, dtype, **ddp_settings)
    sums = Sums()
    for step in range(n_steps):
        sums.gave(step, dtype=dtype)
        averages = step_once(model, wanted(RANK, step, dtype=dtype))
        sums.take(averages)
        assert torch.count_nonzero(averages["big"]) <= WORLD * 5 * 0.01 * averages["big"].numel()
        if dtype == torch.float32:  # one-dimensional and small parameters are plain averages
            for name in ("bias", "small"):
                plain = sum(wanted(r, step)[name].double() for r in range(WORLD)) / WORLD
                torch.testing.assert_close(averages[name], plain, rtol=1e-5, atol=1e-6)
    sums.check(hook, 1e-4 if dtype == torch.float32 else 5e-2)
    assert hook.step == n_steps
    return model, hook


def plain() -> dict:
    _, hook = conserves()
    return {"density": hook.stats()["density_pruned"]}


def buckets_rebuilt() -> None:
    """Iteration 0 has one bucket, later ones three (a first one of 1 MiB): state follows its parameter."""
    model, _ = conserves(bucket_cap_mb=0.03)
    if WORLD > 1:
        assert len(model._get_ddp_logging_data()["rebuilt_bucket_sizes"].split(",")) == 3


def views() -> None:
    conserves(gradient_as_bucket_view=True)
    conserves(gradient_as_bucket_view=True, bucket_cap_mb=0.03)


def static_graph() -> None:
    conserves(static_graph=True)
    conserves(static_graph=True, bucket_cap_mb=0.03, gradient_as_bucket_view=True)


def limited_to_few_blocks() -> None:
    """max_ctas is for CUDA: on the host, and by other backends, it is ignored."""
    conserves(settings={"max_ctas": 2})


def sixteen_bits() -> None:
    conserves(dtype=torch.bfloat16)


def no_feedback_sends_its_own_entries_only() -> None:
    model, hook = wrap({"error_feedback": False})
    averages = step_once(model, wanted(RANK, 0))
    all_ranks = sum(wanted(r, 0)["big"].double() for r in range(WORLD)) / WORLD
    assert hook.state_dict()["parameters"]["big"]["residual"] is None
    assert 0 < torch.count_nonzero(averages["big"]) < 0.1 * all_ranks.numel()


def dense_is_plain_ddp() -> None:
    """density 1 hands out exactly the average; ranks' sums of two are exact in any order."""
    model, _ = wrap({"density": 1.0})
    averages = step_once(model, wanted(RANK, 0))
    for name, grad in averages.items():
        total = sum(wanted(r, 0)[name].double() for r in range(WORLD)) / WORLD
        torch.testing.assert_close(grad, total, rtol=1e-6, atol=1e-7)


def momentum_of_whole_parameters() -> None:
    """What is always sent whole follows SGD with momentum on the averaged gradient."""
    model, _ = wrap({"momentum": 0.9})
    velocity = 0.0
    for step in range(4):
        averages = step_once(model, wanted(RANK, step))
        velocity = 0.9 * velocity + sum(wanted(r, step)["bias"].double() for r in range(WORLD)) / WORLD
        torch.testing.assert_close(averages["bias"], velocity, rtol=1e-5, atol=1e-5)


def accumulates_under_no_sync() -> None:
    for as_view in (False, True):
        model, hook = wrap({}, gradient_as_bucket_view=as_view)
        sums = Sums()
        for step in range(0, 6, 3):
            model.zero_grad(set_to_none=True)
            for part in range(3):
                sums.gave(step + part)
                if part < 2:
                    with model.no_sync():
                        model(wanted(RANK, step + part)).backward()
                else:
                    model(wanted(RANK, step + part)).backward()
            sums.take(grads(model))
        assert hook.step == 2
        sums.check(hook)


def unused_parameters_wait() -> None:
    """Used by nobody, by one rank, by all: nothing that was held back is lost."""
    for as_view in (False, True):
        model, hook = wrap({}, find_unused_parameters=True, gradient_as_bucket_view=as_view)
        sums = Sums()
        kept = None
        for step in range(6):

            def names_of(rank, step=step):
                names = [n for n in SHAPES if n != "mid" or step % 2 == 0]  # mid: by nobody in odd steps
                return [n for n in names if n != "last" or step != 4 or rank == 0]  # last: by rank 0 in step 4

            sums.gave(step, names_of)
            averages = step_once(model, wanted(RANK, step, names_of(RANK)))
            held = hook.state_dict()["parameters"]["mid"]["residual"]
            if step % 2:
                assert torch.equal(held, kept) and not averages.get("mid", torch.zeros(1)).any()
            kept = held
            sums.take(averages)
        sums.check(hook)


def infinite_gradients_pass_through() -> None:
    model, hook = wrap({"momentum": 0.9})
    step_once(model, wanted(RANK, 0))
    before = hook.state_dict()["parameters"]
    given = wanted(RANK, 1)
    if RANK == 0:
        given["big"][3, 4] = float("inf")
        given["mid"][0, 0] = float("nan")
    averages = step_once(model, given)
    assert not torch.isfinite(averages["big"]).all() and not torch.isfinite(averages["mid"]).all()
    assert averages["big"][3, 4].isinf() and averages["mid"][0, 0].isnan()
    after = hook.state_dict()["parameters"]
    assert hook.stats()["nonfinite_elems"] == (2 if RANK == 0 else 0)
    if RANK == 0:
        for name, place in (("big", 3 * 200 + 4), ("mid", 0)):
            for key in ("residual", "velocity"):
                assert before[name][key].flatten()[place] == after[name][key].flatten()[place], (name, key)
    for name, entry in after.items():
        for key in ("residual", "velocity"):
            assert entry[key] is None or torch.isfinite(entry[key]).all(), (name, key)
    assert all(torch.isfinite(g).all() for g in step_once(model, wanted(RANK, 2)).values())


def loss_scale_changes() -> None:
    """With a GradScaler that halves and doubles, the run equals one without a scale, bit for bit."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaled, hook = wrap({"momentum": 0.9, "grad_scaler": scaler, "clip_norm": 50.0})
    plainly, reference = wrap({"momentum": 0.9, "clip_norm": 50.0})
    for step in range(4):
        if step:
            scaler.update(new_scale=1024.0 * (0.5, 4.0, 0.25)[step - 1])
        scale = scaler.get_scale()
        scaled.zero_grad(set_to_none=True)
        scaler.scale(scaled(wanted(RANK, step))).backward()
        unscaled = {n: g / scale for n, g in grads(scaled).items()}
        for name, grad in step_once(plainly, wanted(RANK, step)).items():
            assert torch.equal(unscaled[name], grad), (step, name)
    for name, entry in reference.state_dict()["parameters"].items():
        mine = hook.state_dict()["parameters"][name]
        for key in ("residual", "velocity"):
            assert (mine[key] is None) == (entry[key] is None), (name, key)
            assert entry[key] is None or torch.equal(mine[key], entry[key]), (name, key)


def resumes() -> None:
    model, hook = wrap({"momentum": 0.9})
    for step in range(3):
        step_once(model, wanted(RANK, step))
    saved = hook.state_dict()
    expected = step_once(model, wanted(RANK, 3))
    model, hook = wrap({"momentum": 0.9})
    hook.load_state_dict(saved)
    for name, grad in step_once(model, wanted(RANK, 3)).items():
        assert torch.equal(grad, expected[name]), name


def loaded_before_it_is_registered() -> None:
    """The ranks of a state are compared with those of the model's group, not with those of the default group."""
    model, hook = wrap({"momentum": 0.9})
    step_once(model, wanted(RANK, 0))
    saved = hook.state_dict()
    alone = [dist.new_group([rank], backend="gloo") for rank in range(WORLD)][RANK]
    early = ddp.PrunedGradients(momentum=0.9)
    early.load_state_dict({**saved, "world_size": 1})
    early.register(DistributedDataParallel(Probe(), process_group=alone))
    assert early.state_dict()["world_size"] == 1 and early.step == 1
    early = ddp.PrunedGradients(momentum=0.9)
    early.load_state_dict(saved)
    with raises(ValueError, f"rank {RANK}", f"state of {WORLD} ranks, this group has 1", "reshard(states, 1)"):
        early.register(DistributedDataParallel(Probe(), process_group=alone))


def uneven_inputs() -> None:
    """Rank 0 has more batches; a rank that has joined counts as gradient 0 and goes on sending its residual."""
    model, hook = wrap({})
    sums = Sums()
    n_mine = [6, 3][min(RANK, 1)]
    for step in range(6):
        sums.gave(step, ranks=[r for r in range(WORLD) if r == 0 or step < 3])
    with model.join():
        for step in range(n_mine):
            sums.take(step_once(model, wanted(RANK, step)))
    gathered = [None] * WORLD
    dist.all_gather_object(gathered, sums.got["big"])
    sums.got = {"big": gathered[0]}  # only rank 0 has seen all six averages
    held = mean_residual(hook)["big"]
    torch.testing.assert_close(sums.got["big"] + held, sums.given["big"], rtol=1e-4, atol=1e-4)


def sparse_embedding() -> None:
    model = torch.nn.Embedding(500, 16, sparse=True)
    torch.nn.init.ones_(model.weight)
    model = DistributedDataParallel(model)
    ddp.PrunedGradients().register(model)
    for step in range(2):
        model.zero_grad(set_to_none=True)
        model(torch.tensor([RANK, 7, 400 + step])).sum().backward()
        got = model.module.weight.grad.to_dense()
        expected = torch.zeros(500, 16)
        for rank in range(WORLD):
            expected[[rank, 7, 400 + step]] += 1.0 / WORLD
        torch.testing.assert_close(got, expected)


def registered_by_ddp() -> None:
    """model.register_comm_hook(state, hook), as torch documents it and Lightning calls it, is register()."""
    model, hook = wrap({"momentum": 0.9})
    other = DistributedDataParallel(Probe())
    state = ddp.PrunedGradients(momentum=0.9)
    other.register_comm_hook(state, ddp.pruned_gradients_hook)
    DistributedDataParallel(Probe()).register_comm_hook(None, lambda state, bucket: None)  # of no concern
    for step in range(3):
        expected = step_once(model, wanted(RANK, step))
        for name, grad in step_once(other, wanted(RANK, step)).items():
            assert torch.equal(grad, expected[name]), name
    assert state.state_dict()["parameters"].keys() == hook.state_dict()["parameters"].keys() == SHAPES.keys()
    assert state.stats()["density_pruned"] == hook.stats()["density_pruned"]
    resumed = ddp.PrunedGradients(momentum=0.9)
    resumed.load_state_dict(state.state_dict())
    third = DistributedDataParallel(Probe())
    third.register_comm_hook(resumed, ddp.pruned_gradients_hook)
    expected = step_once(model, wanted(RANK, 3))
    for name, grad in step_once(third, wanted(RANK, 3)).items():
        assert torch.equal(grad, expected[name]), name


def one_object_on_two_models_is_refused() -> None:
    state = ddp.PrunedGradients()
    models = [DistributedDataParallel(Probe()) for _ in range(2)]
    for model in models:
        model.register_comm_hook(state, ddp.pruned_gradients_hook)
    with raises(RuntimeError, "2 DistributedDataParallel modules", "register(model, optimizer=optimizer)"):
        step_once(models[0], wanted(RANK, 0))
    first, state = wrap({})
    second = DistributedDataParallel(Probe())
    second.register_comm_hook(state, ddp.pruned_gradients_hook)
    step_once(first, wanted(RANK, 0))
    with raises(RuntimeError, "one object per model"):
        step_once(second, wanted(RANK, 0))


class Wrapper(torch.nn.Module):
    """As Fabric's: the wrapped module is an attribute, and so is the original."""

    def __init__(self, forward_module, original):
        super().__init__()
        self._forward_module, self._original_module = forward_module, original

    def forward(self, *args):
        return self._forward_module(*args)


def second_hook_is_refused() -> None:
    model, first = wrap({})
    second = ddp.PrunedGradients()
    with raises(RuntimeError, "already has the communication hook pruned_gradients_hook", "leave one of the two out"):
        second.register(model)
    step_once(model, wanted(RANK, 0))
    assert first.step == 1
    second.register(DistributedDataParallel(Probe()))  # the refusal left it as it was


def momentum_in_both_is_refused() -> None:
    model = DistributedDataParallel(Probe())
    hook = ddp.PrunedGradients(momentum=0.9)
    with raises(ValueError, "momentum=0.5 in SGD and momentum=0.9 in the hook", "momentum=0 in the optimizer"):
        hook.register(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5))
    hook.register(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    other = DistributedDataParallel(Probe())
    ddp.PrunedGradients().register(other, optimizer=torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.5))


def ranks_with_other_settings() -> None:
    """Refused by name on all ranks before a gradient is sent; `seed` may differ."""
    odd = WORLD - 1
    for name, usual, other in (("density", None, 0.01), ("sum_density", None, 0.05), ("hosts", "auto", "off")):
        settings = {"density": 0.01} if name != "density" else {}
        with raises(ValueError, "PrunedGradients: ranks differ", f"{name} is {usual} on", f"{other} on rank {odd}"):
            wrap({**settings, name: other if odd == RANK else usual})
    wrap({"seed": RANK})


def settings_of_a_wrong_type_are_named() -> None:
    for name in ("density", "sample", "leak", "momentum", "clip_norm"):
        for value in ("0.1", True, float("nan")):
            with raises(ValueError, f"PrunedGradients: {name}={value!r}, wanted"):
                ddp.PrunedGradients(**{name: value})


def wrapped_models() -> None:
    """register() finds the DDP module in torch.compile's and other wrappers, and names no wrapper's prefix."""
    plain_model, _ = wrap({})
    expected = step_once(plain_model, wanted(RANK, 0))
    probe, inner = Probe(), DistributedDataParallel(Probe())
    in_ddp = DistributedDataParallel(torch.compile(probe, backend="eager"))
    for model, module in (
        (torch.compile(DistributedDataParallel(Probe()), backend="eager"), None),
        (in_ddp, probe),
        (Wrapper(inner, inner.module), inner.module),
        (
            Wrapper(torch.compile(inner := DistributedDataParallel(Probe()), backend="eager"), inner.module),
            inner.module,
        ),
    ):
        hook = ddp.PrunedGradients().register(model)
        module = module if module is not None else model._orig_mod.module
        model(wanted(RANK, 0)).backward()
        for name, param in module.named_parameters():
            assert torch.equal(param.grad.double(), expected[name]), name
        assert hook.state_dict()["parameters"].keys() == SHAPES.keys()
    old = hook.state_dict()  # of a compiled model, before its prefix was left out of names
    old["parameters"] = {f"_orig_mod.{name}": entry for name, entry in old["parameters"].items()}
    ddp.PrunedGradients().register(DistributedDataParallel(Probe())).load_state_dict(old)
    with raises(TypeError, "no DistributedDataParallel in it", "prepare()"):
        ddp.PrunedGradients().register(Probe())
    with raises(TypeError, "2 DistributedDataParallel"):
        ddp.PrunedGradients().register(torch.nn.ModuleList([plain_model, inner]))
    with raises(TypeError, "got a list"):
        ddp.PrunedGradients().register([plain_model])


def warning_names_the_backend() -> None:
    model, _ = wrap({})
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        step_once(model, wanted(RANK, 0))
        step_once(model, wanted(RANK, 1))
    texts = [str(w.message) for w in seen if "PrunedGradients" in str(w.message)]
    assert len(texts) == (0 if BACKEND == "spccl" else 1), texts


def bytes_are_saved() -> dict:
    """The wire carries a small part of the dense bytes, and the hook's count agrees with it. Gloo does not count."""
    from spccl import backend

    model, hook = wrap({})
    if BACKEND != "spccl":
        step_once(model, wanted(RANK, 0))
        assert hook.stats()["wire_bytes"] is None
        return {}
    for step in (0, 2):  # in the second DDP tells the ranks the order of its buckets
        step_once(model, wanted(RANK, step))
    dist.all_reduce(torch.ones(10_000))  # not the hook's; nor is the next one
    before, own = backend.stats(), hook.stats()["wire_bytes"]
    step_once(model, wanted(RANK, 1))
    after = backend.stats()
    sent = after.wire_bytes_sent - before.wire_bytes_sent
    dist.all_reduce(torch.ones(10_000))
    stats = hook.stats()
    assert stats["wire_bytes"] - own == sent and 0 < own < 3 * sent, (own, sent, stats)
    assert stats["backend"] == "spccl"
    assert stats["sent_bytes"] / WORLD < sent < 0.3 * stats["dense_bytes"], (sent, stats)
    return {"sent": sent, "dense": stats["dense_bytes"]}


CASES = [
    plain,
    buckets_rebuilt,
    views,
    static_graph,
    limited_to_few_blocks,
    sixteen_bits,
    no_feedback_sends_its_own_entries_only,
    dense_is_plain_ddp,
    momentum_of_whole_parameters,
    accumulates_under_no_sync,
    unused_parameters_wait,
    infinite_gradients_pass_through,
    loss_scale_changes,
    resumes,
    loaded_before_it_is_registered,
    ranks_with_other_settings,
    uneven_inputs,
    sparse_embedding,
    registered_by_ddp,
    one_object_on_two_models_is_refused,
    second_hook_is_refused,
    momentum_in_both_is_refused,
    settings_of_a_wrong_type_are_named,
    wrapped_models,
    warning_names_the_backend,
    bytes_are_saved,
]

if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message="PrunedGradients")
    main(CASES, backend=BACKEND)
