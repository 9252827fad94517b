"""Cases: calls that torch's own libraries make on a backend with CUDA tensors."""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
from gpu_common import DEVICE, cuda, main, same
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from workers.common import RANK, WORLD, made, raises, reduced, same_bits, same_everywhere


def inputs(shape, dtype=torch.float32, seed=0):
    return [made(r, shape, dtype, seed=seed) for r in range(WORLD)]


def delegated():
    """Calls that go to NCCL: collectives, dtypes and reductions that spccl does not run."""
    ones = torch.full((4,), RANK + 1.0, device=DEVICE)
    total = float(sum(range(1, WORLD + 1)))
    for async_op in (False, True):
        x = ones.clone()
        work = dist.reduce(x, 0, async_op=async_op)
        out = torch.zeros(WORLD, device=DEVICE)
        second = dist.all_to_all_single(out, torch.arange(WORLD, device=DEVICE) + 10.0 * RANK, async_op=async_op)
        if async_op:
            second.wait()
            work.wait()
        assert RANK != 0 or torch.equal(x, torch.full((4,), total, device=DEVICE))
        assert torch.equal(out, torch.arange(WORLD, device=DEVICE) * 10.0 + RANK)
    last = WORLD - 1
    parts = [torch.zeros(4, device=DEVICE) for _ in range(WORLD)] if last == RANK else None
    dist.gather(ones, parts, dst=last)
    assert last != RANK or [int(p[0]) for p in parts] == list(range(1, WORLD + 1))
    out = torch.zeros(2, device=DEVICE)
    dist.scatter(out, [torch.full((2,), float(r), device=DEVICE) for r in range(WORLD)] if RANK == 0 else None, src=0)
    assert torch.equal(out, torch.full((2,), float(RANK), device=DEVICE))
    outs = [torch.zeros(3, device=DEVICE) for _ in range(WORLD)]
    dist.all_to_all(outs, [torch.full((3,), 10.0 * RANK + r, device=DEVICE) for r in range(WORLD)])
    assert [int(o[0]) for o in outs] == [10 * r + RANK for r in range(WORLD)]
    flags = torch.tensor([RANK == 0, True, False], device=DEVICE)
    dist.all_reduce(flags, dist.ReduceOp.MAX)
    assert flags.tolist() == [True, True, False]
    z = torch.full((5,), 1.0 + 2.0j * RANK, device=DEVICE)
    dist.all_reduce(z)
    assert torch.equal(z, torch.full((5,), WORLD + 2.0j * sum(range(WORLD)), device=DEVICE))
    dist.barrier()


def premul_sum():
    for dtype in (torch.float32, torch.bfloat16):
        xs = inputs((WORLD, 1000), dtype)
        x = cuda(xs[RANK])
        dist.all_reduce(x, dist._make_nccl_premul_sum(0.5))
        want = reduced([v * 0.5 for v in xs], "sum")
        torch.testing.assert_close(x.cpu(), want, rtol=4e-2 if dtype == torch.bfloat16 else 1e-5, atol=2e-2)
        out = torch.zeros(1000, dtype=dtype, device=DEVICE)
        dist.reduce_scatter_tensor(out, cuda(xs[RANK]), dist._make_nccl_premul_sum(0.5))
        torch.testing.assert_close(out.cpu(), want[RANK], rtol=4e-2 if dtype == torch.bfloat16 else 1e-5, atol=2e-2)


def point_to_point():
    """A batch of sends and receives in any order, while a collective of spccl runs."""
    right, left = (RANK + 1) % WORLD, (RANK - 1) % WORLD
    big = 1 << 20
    x = torch.ones(1000, device=DEVICE)
    under_way = dist.all_reduce(x, async_op=True)
    if WORLD > 1:
        got = torch.zeros(big, device=DEVICE)
        ops = [
            dist.P2POp(dist.isend, torch.full((big,), float(RANK), device=DEVICE), right),
            dist.P2POp(dist.irecv, got, left),
        ]
        for work in dist.batch_isend_irecv(ops if RANK % 2 else ops[::-1]):
            work.wait()
        assert torch.equal(got, torch.full((big,), float(left), device=DEVICE))
        if RANK == 0:
            dist.send(got, 1)
        elif RANK == 1:
            dist.recv(got, 0)
            assert torch.equal(got, torch.full((big,), float(WORLD - 1), device=DEVICE))
        host = torch.zeros(5)
        for work in dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, torch.full((5,), float(RANK)), right), dist.P2POp(dist.irecv, host, left)]
        ):
            work.wait()
        assert torch.equal(host, torch.full((5,), float(left)))
    under_way.wait()
    assert torch.equal(x, torch.full_like(x, WORLD))


def coalesced():
    from torch.distributed.distributed_c10d import _coalescing_manager

    xs = [inputs(n, seed=n) for n in (5, 5000, 1)]
    for async_ops in (False, True):
        tensors = [cuda(x[RANK]) for x in xs]
        with _coalescing_manager(async_ops=async_ops) as manager:
            for t in tensors:
                dist.all_reduce(t)
        if async_ops:
            manager.wait()
        for t, x in zip(tensors, xs, strict=True):
            same(t, reduced(x, "sum"), "all_reduce coalesced")
        outs = [torch.zeros(WORLD * x[0].numel(), device=DEVICE) for x in xs]
        sources = [cuda(x[RANK]) for x in xs]
        with _coalescing_manager(device=DEVICE, async_ops=async_ops) as manager:
            for o, x in zip(outs, sources, strict=True):
                dist.all_gather_into_tensor(o, x)
        if async_ops:
            manager.wait()
        for o, x in zip(outs, xs, strict=True):
            same(o, torch.cat(x), "all_gather_into_tensor coalesced")
    ins = [inputs((WORLD, n), seed=n) for n in (5, 5000)]
    outs = [torch.zeros(x[0].shape[1], device=DEVICE) for x in ins]
    with _coalescing_manager():
        for o, x in zip(outs, ins, strict=True):
            dist.reduce_scatter_tensor(o, cuda(x[RANK]))
    for o, x in zip(outs, ins, strict=True):
        same(o, reduced(x, "sum")[RANK], "reduce_scatter_tensor coalesced")


def functional_and_compiled():
    import torch.distributed._functional_collectives as fc

    xs = inputs((8, 30))
    x = cuda(xs[RANK])
    group = dist.group.WORLD
    same(fc.all_reduce(x, "sum", group) + 0, reduced(xs, "sum") + 0, "functional all_reduce")
    same(x, xs[RANK], "functional all_reduce leaves its input")
    same(fc.all_gather_tensor(x, 0, group) + 0.0, torch.cat(xs) + 0.0, "functional all_gather")
    whole = inputs((WORLD * 2, 3))
    part = fc.reduce_scatter_tensor(cuda(whole[RANK]), "avg", 0, group)
    same(part + 0.0, reduced(whole, "avg")[2 * RANK : 2 * RANK + 2] + 0.0, "functional reduce_scatter")
    several = fc.all_reduce_coalesced([x, x * 2], "sum", group)
    same(several[1] + 0.0, reduced([v * 2 for v in xs], "sum") + 0.0, "functional all_reduce_coalesced")

    @torch.compile(backend="aot_eager", fullgraph=True)
    def step(y):
        total = fc.all_reduce(y * 2, "sum", group)
        return fc.all_gather_tensor(total[:2] + 1, 0, group)

    want = (reduced([v * 2 for v in xs], "sum")[:2] + 1).repeat(WORLD, 1)
    same(step(x) + 0.0, want + 0.0, "compiled")


def sparse_coo():
    def coo(rank, shape, nnz, dtype, dense, seed):
        g = torch.Generator().manual_seed(100 * seed + rank)
        indices = torch.stack([torch.randint(n, (nnz,), generator=g) for n in shape[: len(shape) - dense]])
        values = made(rank, (nnz, *shape[len(shape) - dense :]), dtype, zeros=0.1, seed=seed + 7)
        return torch.sparse_coo_tensor(indices, values, shape).coalesce()

    for i, dtype in enumerate((torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32)):
        for shape, dense, sizes in (
            ((1000,), 0, [50, 3, 200]),
            ((50, 7), 1, [20, 0, 5]),
            ((9, 8, 4, 3), 2, [0, 0, 0]),
            ((30, 20), 0, [1, 700, 30]),
        ):
            mine = coo(RANK, shape, sizes[RANK % 3], dtype, dense, i)
            for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
                host, device = mine.clone(), mine.to(DEVICE)
                dist.all_reduce(host, op)
                work = dist.all_reduce(device, op, async_op=True)
                work.wait()
                assert device.is_cuda and device.is_coalesced()
                assert torch.equal(device.indices().cpu(), host.indices()), "the union of the indices"
                same(device.values(), host.values(), f"sparse {dtype} {shape} {op}")
    with raises(ValueError, "sum or avg"):
        dist.all_reduce(mine.to(DEVICE), dist.ReduceOp.MAX)
    if WORLD > 1:
        with raises(dist.DistBackendError, "another shape"):
            dist.all_reduce(torch.eye(3 + RANK, device=DEVICE).to_sparse_coo())


def ddp_sparse_embedding():
    torch.manual_seed(0)
    model = nn.Sequential(nn.EmbeddingBag(500, 16, sparse=True, mode="sum"), nn.Linear(16, 4)).to(DEVICE)
    alone = copy.deepcopy(model)
    ddp = DistributedDataParallel(model, device_ids=[RANK])
    optimizer, reference = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (ddp, alone))
    for step in range(4):
        batches = [
            torch.randint(500, (8, 5), generator=torch.Generator().manual_seed(10 * step + r)).to(DEVICE)
            for r in range(WORLD)
        ]
        optimizer.zero_grad()
        ddp(batches[RANK]).square().mean().backward()
        assert model[0].weight.grad.is_sparse
        optimizer.step()
        reference.zero_grad()
        (sum(alone(b).square().mean() for b in batches) / WORLD).backward()
        reference.step()
    for p, q in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)
        same_everywhere(p.detach().cpu(), "parameters")


def ddp_pruned():
    """spccl.ddp on CUDA: selecting entries does not wait for the device, and fewer bytes are sent."""
    import spccl.ddp

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 8)).to(DEVICE)
    ddp = DistributedDataParallel(model, device_ids=[RANK], bucket_cap_mb=1)
    hook = spccl.ddp.PrunedGradients(density=0.05, momentum=0.9, dense_steps=1).register(ddp)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(RANK)).to(DEVICE)
    y = x[:, :8] * 0.5
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        loss = (ddp(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    first, last = float(losses[0]), float(losses[-1])
    assert last < 0.7 * first, (first, last)
    stats = hook.stats()
    assert 0 < stats["density_pruned"] < 0.2, stats
    for p in model.parameters():
        same_everywhere(p.detach().cpu(), "parameters")
    return {"density": stats["density_pruned"], "loss": last}


GIVEN_SHAPES = {"big": (400, 500), "bias": (77,), "odd": (101, 103), "last": (600, 500)}


class Given(nn.Module):
    """Parameters of GIVEN_SHAPES whose gradients are what forward is given, bit for bit."""

    def __init__(self):
        super().__init__()
        for name, shape in GIVEN_SHAPES.items():
            setattr(self, name, nn.Parameter(torch.zeros(shape)))

    def forward(self, wanted):
        return sum((getattr(self, name) * grad).sum() for name, grad in wanted.items())


def given_gradients(step, unused=()):
    g = torch.Generator().manual_seed(100 * step + RANK)
    made = {name: torch.randn(shape, generator=g) for name, shape in GIVEN_SHAPES.items()}
    return {name: grad for name, grad in made.items() if name not in unused}


def ddp_pruned_as_on_the_host():
    """The hook hands out the same bits for CUDA gradients as for host gradients, and keeps the same state. One step
    has infinite entries."""
    import spccl.ddp

    for settings, unused in (
        ({}, ()),
        ({"momentum": 0.9, "leak": 0.99, "dense_steps": 2}, ()),
        ({"momentum": 0.5}, ("odd",)),  # not used in odd steps
        ({"residual_dtype": torch.bfloat16, "seed": 3}, ()),
    ):
        runs = []
        for device in (DEVICE, torch.device("cpu")):
            ddp = DistributedDataParallel(Given().to(device), bucket_cap_mb=1, find_unused_parameters=bool(unused))
            runs.append((device, ddp, spccl.ddp.PrunedGradients(density=0.01, **settings).register(ddp)))
        for step in range(6):
            wanted = given_gradients(step, unused if step % 2 else ())
            if step == 3 and RANK == 0:
                wanted["big"][3, 4], wanted["last"][0, 0] = float("inf"), -float("inf")
            grads = []
            for device, ddp, _ in runs:
                ddp.zero_grad(set_to_none=False)
                ddp({name: grad.to(device) for name, grad in wanted.items()}).backward()
                grads.append({name: p.grad.cpu().clone() for name, p in ddp.module.named_parameters()})
            for name, grad in grads[1].items():
                same_bits(grads[0][name], grad, f"{settings}, step {step}, {name}")
        states = [hook.state_dict() for _, _, hook in runs]
        assert states[0]["step"] == states[1]["step"] == 6
        for name, entry in states[1]["parameters"].items():
            for key in ("residual", "velocity"):
                if entry[key] is not None:
                    same_bits(states[0]["parameters"][name][key].cpu(), entry[key], f"{settings}, {key} of {name}")
        stats = [hook.stats() for _, _, hook in runs]
        for key in ("density_sent", "density_pruned", "density_mean", "sent_bytes", "nonfinite_elems"):
            assert stats[0][key] == stats[1][key], (key, stats)
        assert stats[0]["nonfinite_elems"] == (2 if RANK == 0 else 0), stats


def prune_in_a_graph():
    """A captured call, replayed 100 times with clipping, loss scales and across the warm-up, equals eager calls."""
    from spccl import prune

    for residual_dtype in (torch.float32, torch.bfloat16):
        results = [run_prune_steps(captured, residual_dtype) for captured in (False, True)]
        for i, (eager, replayed) in enumerate(zip(*results, strict=True)):
            same_bits(replayed.cpu(), eager.cpu(), f"{residual_dtype}, result {i}")
        assert int(results[1][-1][prune.STEP]) == 100


def run_prune_steps(captured, residual_dtype):
    """What 100 steps sent, then residual, velocity and state."""
    from spccl import prune

    n = 300_000
    state = torch.zeros(prune.STATE_COLUMNS, dtype=torch.int64, device=DEVICE)
    param = prune.ParamState("weight", n, True, state)
    param.prepare(torch.float32, True, True, residual_dtype)
    plan = prune.Plan([(0, param)], n, torch.float32, DEVICE)
    rule = prune.Rule(0.01, 0.001, 1.0, 0.9, dense_steps=2, warmup_steps=30, skip_zeros=True)
    grad = torch.zeros(n, device=DEVICE)
    factor, scale = torch.ones(1, device=DEVICE), torch.ones(1, device=DEVICE)
    graph = torch.cuda.CUDAGraph()
    if captured:
        with torch.cuda.graph(graph):
            plan.run(grad, rule, factor, scale)
    g = torch.Generator(device=DEVICE).manual_seed(9)
    sent = []
    for step in range(100):
        scale.fill_(2.0 ** (step // 20))
        factor.fill_(0.5 if step % 3 else 1.0)
        grad.copy_(torch.randn(n, generator=g, device=DEVICE) * scale * (step % 10 != 5))
        if captured:
            graph.replay()
        else:
            plan.run(grad, rule, factor, scale)
        sent.append(grad.clone())
    return (*sent, param.residual, param.velocity, state)


def fsdp2_equals_nccl():
    """Three steps of fully_shard, in float32 and with a bfloat16 reduction, give NCCL's parameters."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    nccl = dist.new_group(backend="nccl")  # the default group has a bound device; NCCL must not split that group
    meshes = [DeviceMesh.from_group(g, "cuda") for g in (dist.group.WORLD, nccl)]
    for reduce_dtype in (torch.float32, torch.bfloat16):
        results = []
        for mesh in meshes:
            torch.manual_seed(1)
            model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)).to(DEVICE)
            policy = MixedPrecisionPolicy(reduce_dtype=reduce_dtype)
            for layer in (model[0], model[2]):
                fully_shard(layer, mesh=mesh, mp_policy=policy)
            fully_shard(model, mesh=mesh, mp_policy=policy)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            x = torch.randn(16, 64, generator=torch.Generator().manual_seed(RANK)).to(DEVICE)
            for _ in range(3):
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()
            results.append([p.full_tensor().detach() for p in model.parameters()])
        for ours, theirs in zip(*results, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=2e-2 if reduce_dtype == torch.bfloat16 else 1e-5, atol=1e-3)
    dist.destroy_process_group(nccl)


def meshes():
    """torch makes the groups of a mesh by new_group without a bound device, and by split_group with one. Each dimension
    must reduce over its own ranks."""
    from torch.distributed.device_mesh import init_device_mesh

    rows = 2 if WORLD % 2 == 0 else 1
    mesh = init_device_mesh("cuda", (rows, WORLD // rows), mesh_dim_names=("dp", "tp"))
    for name in ("dp", "tp"):
        group = mesh.get_group(name)
        ranks = dist.get_process_group_ranks(group)
        assert RANK in ranks
        x = torch.full((1000,), float(RANK), device=DEVICE)
        dist.all_reduce(x, group=group)
        assert torch.equal(x, torch.full_like(x, float(sum(ranks)))), (name, ranks, x[0])
        assert group._get_backend(DEVICE).name() == "spccl"
    some = dist.new_group([0])
    if RANK == 0:
        x = torch.ones(5, device=DEVICE)
        dist.all_reduce(x, group=some)
        assert torch.equal(x, torch.ones_like(x))
    dist.barrier()


def objects_and_host_tensors():
    """One backend serves both kinds of tensor."""
    gathered: list = [None] * WORLD
    dist.all_gather_object(gathered, {"rank": RANK})
    assert [g["rank"] for g in gathered] == list(range(WORLD))
    host, device = torch.ones(1000), torch.ones(1000, device=DEVICE)
    works = [dist.all_reduce(t, async_op=True) for t in (host, device)]
    for work in works:
        work.wait()
    assert torch.equal(host, device.cpu()) and host[0] == WORLD


def bad_input():
    """Calls that are refused before any launch. The group must still work."""
    x = torch.ones(6, device=DEVICE)
    group = dist.group.WORLD
    with raises(ValueError, "output_tensor", "cuda", "wanted cpu"):
        group._allgather_base(torch.ones(6 * WORLD, device=DEVICE), torch.ones(6)).wait()
    with raises(ValueError, "output_tensor", "5 elements"):
        group._allgather_base(torch.ones(5, device=DEVICE), x)
    with raises(TypeError, "Double"):
        group._allgather_base(torch.ones(6 * WORLD, dtype=torch.float64, device=DEVICE), x)
    with raises(ValueError, "expanded"):
        dist.all_reduce(torch.ones(1, device=DEVICE).expand(6))
    if torch.cuda.device_count() > WORLD:
        with raises(ValueError, "one GPU per rank and group"):
            dist.all_reduce(torch.ones(6, device=torch.device("cuda", WORLD)))
    if WORLD > 1:
        with raises(ValueError, "overlap"):
            buffer = torch.ones(6 * WORLD + 1, device=DEVICE)
            group._allgather_base(buffer[: 6 * WORLD], buffer[1 + 6 * RANK : 7 + 6 * RANK]).wait()
    dist.all_reduce(x)
    assert torch.equal(x, torch.full_like(x, WORLD))


def profiler_names():
    from torch.profiler import ProfilerActivity, profile

    x = torch.ones(10, device=DEVICE)
    with profile(activities=[ProfilerActivity.CPU]) as record:
        dist.all_reduce(x)
        dist.all_reduce(x, async_op=True).wait()
    names = [e.name for e in record.events()]
    assert names.count("spccl:all_reduce") == 2, names


CASES = [
    delegated,
    premul_sum,
    point_to_point,
    coalesced,
    functional_and_compiled,
    sparse_coo,
    ddp_sparse_embedding,
    ddp_pruned,
    ddp_pruned_as_on_the_host,
    prune_in_a_graph,
    fsdp2_equals_nccl,
    meshes,
    objects_and_host_tensors,
    bad_input,
    profiler_names,
]

if __name__ == "__main__":
    import os

    main(CASES, bind=os.environ.get("BIND") == "1")
