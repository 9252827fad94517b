"""Cases: the DDP hook, and limits of thread blocks, on CUDA tensors."""

from __future__ import annotations

import collections

import torch
import torch.distributed as dist
from gpu_common import DEVICE, main
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.nn.parallel import DistributedDataParallel
from workers.common import RANK, WORLD, raises, same_bits, same_everywhere


def limited_calls():
    """limit_ctas changes no result; it can be nested; a graph keeps the limit that it was captured with."""
    from spccl import backend

    x = torch.randn(300_000, generator=torch.Generator().manual_seed(RANK)).to(DEVICE)
    x[torch.rand(x.shape, generator=torch.Generator().manual_seed(7)).to(DEVICE) > 0.05] = 0
    want = x.clone()
    dist.all_reduce(want)
    most = backend.cuda_stats().n_ctas

    def check(what):
        got = x.clone()
        dist.all_reduce(got)
        same_bits(got.cpu(), want.cpu(), what)

    for limit in (1, 2, most, 0):
        with backend.limit_ctas(limit):
            check(f"limit {limit}")
            with backend.limit_ctas(3):
                check("limit 3 inside")
            check(f"limit {limit} again")
    check("without a limit")
    with backend.limit_ctas(most + 1), raises(ValueError, f"max_ctas is {most + 1}, wanted at most {most}"):
        check("too high")
    check("after a limit that was refused")
    with raises(ValueError, "max_ctas=-1"):
        backend.limit_ctas(-1)
    static, graph = x.clone(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), backend.limit_ctas(2):
        dist.all_reduce(static)
    for i in range(4):
        static.copy_(x)
        with backend.limit_ctas((i + RANK) % 3 + 1):  # no rank calls anything inside: the graph has its own limit
            graph.replay()
        same_bits(static.cpu(), want.cpu(), f"replay {i}")


def small_ddp(hook_settings, **ddp_settings):
    import spccl.ddp

    torch.manual_seed(1)
    ddp = DistributedDataParallel(Elementwise().to(DEVICE), device_ids=[RANK], bucket_cap_mb=0.5, **ddp_settings)
    return ddp, spccl.ddp.PrunedGradients(**hook_settings).register(ddp)


class Elementwise(nn.Module):
    """Parameters whose gradients are computed element by element: the same bits on any run."""

    SHAPES = ((300, 500), (77,), (101, 103), (250, 400))

    def __init__(self):
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(shape)) for shape in self.SHAPES)

    def forward(self, x):
        return sum((w - x[: w.numel()].view_as(w)).pow(2).sum() for w in self.weights) * 0.5


def batches(n):
    """A generator of inputs, on the device; other numbers on each rank."""
    g = torch.Generator(device=DEVICE).manual_seed(40 + RANK)
    for _ in range(n):
        yield torch.randn(150_000, generator=g, device=DEVICE)


def ddp_limited():
    """The hook with max_ctas gives the bits of the hook without."""
    results = []
    for max_ctas in (None, 2):
        ddp, _ = small_ddp({"density": 0.01, "momentum": 0.9, "max_ctas": max_ctas})
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
        for x in batches(5):
            optimizer.zero_grad()
            ddp(x).backward()
            optimizer.step()
        results.append([w.detach().cpu() for w in ddp.module.weights])
    for i, (plain, limited) in enumerate(zip(*results, strict=True)):
        same_bits(limited, plain, f"weight {i}")
        same_everywhere(plain, f"weight {i}")
    if WORLD == 1:  # then the hook calls no all-reduce
        return
    # Collectives outside of the hook are not limited: a limit above the group's would fail here.
    ddp, _ = small_ddp({"max_ctas": 100_000})
    dist.all_reduce(torch.ones(10, device=DEVICE))
    with raises(ValueError, "max_ctas is 100000, wanted at most"):
        ddp(next(batches(1))).backward()


EAGER_STEPS = 12  # DDP measures times in its first ten steps, which a capture cannot
REPLAYS = 100


def ddp_step_in_a_graph():
    """Forward, backward, hook and optimizer in one graph: 100 replays across the warm-up equal 100 eager steps."""
    settings = {"density": 0.01, "momentum": 0.9, "clip_norm": 300.0, "dense_steps": 5, "warmup_steps": 60, "seed": 3}
    results = []
    for captured in (False, True):
        stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            ddp, hook = small_ddp(settings, gradient_as_bucket_view=True)
            optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
            x = torch.zeros(150_000, device=DEVICE)

            def step(ddp=ddp, optimizer=optimizer, x=x):
                optimizer.zero_grad(set_to_none=False)
                ddp(x).backward()
                optimizer.step()

            inputs = batches(EAGER_STEPS + REPLAYS)
            for _ in range(EAGER_STEPS):
                x.copy_(next(inputs))
                step()
        torch.cuda.synchronize()
        if captured:
            with torch.cuda.graph(graph, stream=stream):
                step()
        seen = []
        with torch.cuda.stream(stream):
            for i, batch in enumerate(inputs):
                x.copy_(batch)
                graph.replay() if captured else step()
                if i % 10 == 9:
                    seen.extend(w.detach().clone() for w in ddp.module.weights)
        torch.cuda.synchronize()
        state = hook.state_dict()
        assert state["step"] == EAGER_STEPS + REPLAYS, state["step"]
        kept = [entry[key] for entry in state["parameters"].values() for key in ("residual", "velocity")]
        results.append([*seen, *(tensor for tensor in kept if tensor is not None)])
        sent = hook.stats()["density_pruned"]
        assert 0.005 < sent < 0.02, sent
    for i, (eager, replayed) in enumerate(zip(*results, strict=True)):
        same_bits(replayed.cpu(), eager.cpu(), f"result {i}")
    return {"compared": len(results[0]), "density": sent}


def scaled_step_in_a_graph():
    """Replays follow the scale of a GradScaler, which changes between them, as eager steps do."""
    results = []
    for captured in (False, True):
        scaler = torch.amp.GradScaler("cuda", init_scale=2.0**10)
        scaler.scale(torch.ones(1, device=DEVICE))  # makes the tensor of the scale
        stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            ddp, hook = small_ddp(
                {"density": 0.01, "momentum": 0.9, "clip_norm": 300.0, "grad_scaler": scaler},
                gradient_as_bucket_view=True,
            )
            optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
            x = torch.zeros(150_000, device=DEVICE)

            def step(ddp=ddp, optimizer=optimizer, x=x, scaler=scaler):
                optimizer.zero_grad(set_to_none=False)
                scaler.scale(ddp(x)).backward()
                for w in ddp.module.weights:
                    w.grad.div_(scaler._scale)
                optimizer.step()

            inputs = batches(EAGER_STEPS + 10)
            for _ in range(EAGER_STEPS):
                x.copy_(next(inputs))
                step()
        torch.cuda.synchronize()
        if captured:
            with torch.cuda.graph(graph, stream=stream):
                step()
        with torch.cuda.stream(stream):
            for i, batch in enumerate(inputs):
                scaler._scale.fill_(2.0 ** (8 + i % 5))
                x.copy_(batch)
                graph.replay() if captured else step()
        torch.cuda.synchronize()
        kept = [entry[key] for entry in hook.state_dict()["parameters"].values() for key in ("residual", "velocity")]
        results.append([w.detach().cpu() for w in ddp.module.weights] + [t.cpu() for t in kept if t is not None])
        assert all(t.isfinite().all() for t in results[-1])
    for i, (eager, replayed) in enumerate(zip(*results, strict=True)):
        same_bits(replayed, eager, f"result {i}")


# Settings of a hook that prunes inside the all-reduce. The last one measures residuals in every third step.
INSIDE = (
    {"momentum": 0.9},
    {"clip_norm": 300.0, "seed": 5},
    {"clip_norm": 300.0, "momentum": 0.9, "residual_dtype": torch.bfloat16, "norm_every": 3},
)


def pruned_inside_the_all_reduce():
    """Eager and captured steps give the bits of a hook that prunes before the all-reduce."""
    for settings in INSIDE:
        results = []
        for inside in (False, True):
            stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                ddp, hook = small_ddp({"density": 0.01, **settings}, gradient_as_bucket_view=True)
                taken = []
                exchange = hook._pruned_all_reduce
                hook._pruned_all_reduce = lambda *a, exchange=exchange, taken=taken: taken.append(1) or exchange(*a)
                if not inside:
                    hook._prunes_later = lambda *_: False
                optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
                x = torch.zeros(150_000, device=DEVICE)

                def step(ddp=ddp, optimizer=optimizer, x=x):
                    optimizer.zero_grad(set_to_none=False)
                    ddp(x).backward()
                    optimizer.step()

                inputs = batches(EAGER_STEPS + 10)
                for _ in range(EAGER_STEPS):
                    x.copy_(next(inputs))
                    step()
            torch.cuda.synchronize()
            n_eager = len(taken)
            if "norm_every" not in settings:  # a measurement waits for the device
                with torch.cuda.graph(graph, stream=stream):
                    step()
            with torch.cuda.stream(stream):
                for batch in inputs:
                    x.copy_(batch)
                    step() if "norm_every" in settings else graph.replay()
            torch.cuda.synchronize()
            if WORLD > 1:
                assert (n_eager > 0) == inside, (settings, n_eager)
                assert (len(taken) > n_eager) == inside, (settings, n_eager, len(taken))
            state = hook.state_dict()
            kept = [entry[key] for entry in state["parameters"].values() for key in ("residual", "velocity")]
            facts = hook.stats()
            results.append(
                (
                    [w.detach().cpu() for w in ddp.module.weights] + [t.cpu() for t in kept if t is not None],
                    {k: facts[k] for k in ("steps", "density_sent", "density_mean", "update_norm", "unsent_norm")},
                )
            )
        (before, facts_before), (after, facts_after) = results
        assert facts_before == facts_after, (settings, facts_before, facts_after)
        for i, (want, got) in enumerate(zip(before, after, strict=True)):
            same_bits(got, want, f"{settings}: result {i}")


def run_profiled(ddp, n_steps=3):
    """Kernels, copies and fills on the GPU by name; torch operations; and allocations: all of n_steps."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    x = torch.randn(16, 128, device=DEVICE)
    for _ in range(6):  # in the first ones the hook looks whether gradients were zeroed (ddp_model.py)
        ddp.zero_grad(set_to_none=False)
        ddp(x).sum().backward()
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as record:
        for _ in range(n_steps):
            ddp.zero_grad(set_to_none=False)
            ddp(x).sum().backward()
        torch.cuda.synchronize()
    n_allocations = torch.cuda.memory_stats()["allocation.all.allocated"] - before
    on_gpu, torch_ops = collections.Counter(), collections.Counter()
    for event in record.events():
        if event.device_type == DeviceType.CUDA and not event.name.startswith("spccl:"):  # a range, no launch
            on_gpu[event.name] += 1
        elif event.name.startswith("aten::"):
            torch_ops[event.name] += 1
    return on_gpu, torch_ops, n_allocations


def launches_per_bucket():
    """A bucket takes at most three launches with its all-reduce, no allocation, no torch operation per parameter."""
    import spccl.ddp

    n_layers, n_steps = 40, 3
    seen = {}
    for name in ("noop", "pruned"):
        torch.manual_seed(1)
        model = nn.Sequential(*(nn.Linear(128, 128) for _ in range(n_layers))).to(DEVICE)
        ddp = DistributedDataParallel(model, device_ids=[RANK], bucket_cap_mb=0.5, gradient_as_bucket_view=True)
        buckets = set()

        def counted(state, bucket, buckets=buckets, name=name):
            buckets.add(bucket.index())
            return noop_hook(None, bucket) if name == "noop" else spccl.ddp.pruned_gradients_hook(state, bucket)

        ddp.register_comm_hook(spccl.ddp.PrunedGradients(density=0.01, momentum=0.9), counted)
        seen[name] = (*run_profiled(ddp, n_steps), len(buckets))
    (before, ops_before, allocated_before, _), (after, ops_after, allocated_after, n_buckets) = seen.values()
    more = after - before
    n_prune = sum(n for name, n in more.items() if "prune" in name or "sample" in name)
    n_more, n_ops = sum(more.values()), sum((ops_after - ops_before).values())
    facts = {"buckets": n_buckets, "more": dict(more), "ops": dict(ops_after - ops_before)}
    # With several ranks the third one is the sum of what they sent (spccl_cuda_prune_all_reduce).
    assert n_prune == (2 + (WORLD > 1)) * n_buckets * n_steps, facts
    # and one per step: the counts are copied
    assert n_more <= ((2 + (WORLD > 1)) * n_buckets + 1) * n_steps, facts
    assert n_ops <= 8 * n_steps, facts  # none for a parameter or a bucket
    assert allocated_after <= allocated_before, (allocated_before, allocated_after)
    return facts


def bad_input():
    """Refused before any launch: the gradient keeps its bits."""
    from spccl import prune

    n = 10_000
    grad = torch.randn(n, device=DEVICE)
    copy = grad.clone()

    def param(device=DEVICE, numel=n):
        state = torch.zeros(prune.STATE_COLUMNS, dtype=torch.int64, device=device)
        made = prune.ParamState("weight", numel, True, state)
        made.prepare(torch.float32, residual=True, velocity=True)
        return made

    def plan(*params, begins=(0,)):
        return prune.Plan(list(zip(begins, params, strict=True)), n, torch.float32, DEVICE)

    rule = prune.Rule(0.01, 0.001, 1.0, 0.9)
    with raises(ValueError, "overlap"):
        plan(param(numel=6000), param(numel=6000), begins=(0, 4000))
    with raises(ValueError, "leaves the gradient"):
        plan(param(), begins=(1,))
    with raises(ValueError, "on cpu with strides"):  # state and residual on the host
        plan(param(torch.device("cpu")))
    for key, wrong in (("residual", torch.float64), ("velocity", torch.float16)):
        bad = param()
        setattr(bad, key, getattr(bad, key).to(wrong))
        with raises(ValueError, f"{key} of 'weight'"):
            plan(bad)
    good = plan(param())
    with raises(ValueError, "contiguous"):
        good.run(torch.stack([grad, grad], 1)[:, 0], rule)
    with raises(ValueError, "grad is on cpu"):
        good.run(grad.cpu(), rule)
    with raises(ValueError, "loss_scale is on cpu"):
        good.run(grad, rule, None, torch.ones(1))
    torch.cuda.synchronize()
    same_bits(grad.cpu(), copy.cpu(), "the gradient")
    good.run(grad, rule)
    assert 0 < int(torch.count_nonzero(grad)) < n // 10


CASES = [
    limited_calls,
    ddp_limited,
    ddp_step_in_a_graph,
    scaled_step_in_a_graph,
    pruned_inside_the_all_reduce,
    launches_per_bucket,
    bad_input,
]

if __name__ == "__main__":
    main(CASES)
