"""Cases: calls that torch's own libraries make on a backend: delegated collectives, groups, objects, sparse_coo, DDP,
FSDP2, DTensor, distributed checkpoints."""

from __future__ import annotations

import contextlib
import copy
import os
import warnings
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from workers.common import FOLDER, RANK, WORLD, bits, made, main, raises, reduced, same_bits, same_everywhere

# ---- calls that Gloo runs ----------------------------------------------------------------------------------


def delegated():
    ones = torch.full((4,), RANK + 1.0)
    total = float(sum(range(1, WORLD + 1)))
    x = ones.clone()
    dist.reduce(x, 0)
    assert RANK != 0 or torch.equal(x, torch.full((4,), total))
    parts = [torch.zeros(4) for _ in range(WORLD)] if RANK == 1 else None
    dist.gather(ones, parts, dst=1)
    assert RANK != 1 or [int(p[0]) for p in parts] == list(range(1, WORLD + 1))
    out = torch.zeros(2)
    dist.scatter(out, [torch.full((2,), float(r)) for r in range(WORLD)] if RANK == 0 else None, src=0)
    assert torch.equal(out, torch.full((2,), float(RANK)))
    out = torch.zeros(WORLD)
    dist.all_to_all_single(out, torch.arange(WORLD) + 10.0 * RANK)
    assert torch.equal(out, torch.arange(WORLD) * 10.0 + RANK)
    if tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13):  # older versions of Gloo have no list form
        outs = [torch.zeros(3) for _ in range(WORLD)]
        dist.all_to_all(outs, [torch.full((3,), 10.0 * RANK + r) for r in range(WORLD)])
        assert [int(o[0]) for o in outs] == [10 * r + RANK for r in range(WORLD)]
    for op, want in ((dist.ReduceOp.BAND, 8), (dist.ReduceOp.BOR, 8 + 2**WORLD - 1)):
        x = torch.tensor([8 + 2**RANK])
        dist.all_reduce(x, op)
        assert x.item() == want, (op, x)
    flags = torch.tensor([RANK == 0, True, False])
    dist.all_reduce(flags, dist.ReduceOp.MAX)
    assert flags.tolist() == [True, True, False]
    dist.barrier()
    dist.group.WORLD.monitored_barrier(timedelta(seconds=20))


def point_to_point():
    right, left = (RANK + 1) % WORLD, (RANK - 1) % WORLD
    got = torch.zeros(5)
    for op in dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, torch.full((5,), float(RANK)), right), dist.P2POp(dist.irecv, got, left)]
    ):
        op.wait()
    assert torch.equal(got, torch.full((5,), float(left)))
    if RANK == 0:
        sources = {dist.recv(torch.zeros(1)) for _ in range(WORLD - 1)}
        assert sources == set(range(1, WORLD))
    else:
        dist.send(torch.ones(1), 0)


def mixed_order():
    """Collectives of spccl and Gloo are in flight together. A peer needs a send before it joins."""
    x, y = torch.ones(1000), torch.ones(1000, dtype=torch.bool)
    first = dist.all_reduce(x, async_op=True)
    second = dist.all_reduce(y, dist.ReduceOp.MIN, async_op=True)
    third = dist.barrier(async_op=True)
    for work in (third, second, first):
        work.wait()
    assert torch.equal(x, torch.full((1000,), float(WORLD)))
    token = torch.zeros(1)
    if RANK == 0:
        work = dist.all_reduce(x, async_op=True)
        dist.send(token, 1)
        work.wait()
    else:
        if RANK == 1:
            dist.recv(token, 0)
        dist.all_reduce(x)


def objects():
    gathered: list = [None] * WORLD
    dist.all_gather_object(gathered, {"rank": RANK, "text": "x" * RANK})
    assert [g["rank"] for g in gathered] == list(range(WORLD))
    box = [f"from {RANK}", RANK]
    dist.broadcast_object_list(box, src=WORLD - 1)
    assert box == [f"from {WORLD - 1}", WORLD - 1]
    out: list = [None]
    dist.scatter_object_list(out, [f"for {r}" for r in range(WORLD)] if RANK == 0 else None, src=0)
    assert out == [f"for {RANK}"]
    got = [None] * WORLD if RANK == 0 else None
    dist.gather_object(RANK * 2, got, dst=0)
    assert RANK != 0 or got == [2 * r for r in range(WORLD)]


# ---- groups ------------------------------------------------------------------------------------------------


def groups():
    from spccl import backend

    everyone = dist.new_group()
    pairs = [dist.new_group([r, (r + 1) % WORLD]) for r in range(WORLD)]
    alone = dist.new_group([0])
    tuned = dist.new_group(pg_options=backend.Options(format="coo", timeout=timedelta(seconds=40)))
    x = torch.ones(10)
    dist.all_reduce(x, group=everyone)
    assert x[0] == WORLD
    for r, pair in enumerate(pairs):
        if RANK in (r, (r + 1) % WORLD):
            x = torch.full((10,), float(RANK))
            dist.all_reduce(x, dist.ReduceOp.MAX, group=pair)
            assert x[0] == max(r, (r + 1) % WORLD)
            gathered = [torch.zeros(10) for _ in range(pair.size())]
            dist.all_gather(gathered, torch.full((10,), float(RANK)), group=pair)
            assert sorted(int(g[0]) for g in gathered) == sorted([r, (r + 1) % WORLD])
    if RANK == 0:
        x = torch.ones(10)
        dist.all_reduce(x, group=alone)
        assert torch.equal(x, torch.ones(10))
        out = torch.zeros(10)
        dist.reduce_scatter_tensor(out, x, group=alone)
        assert torch.equal(out, x)
    other = dist.new_group(backend="gloo")
    x = torch.full((10,), float(RANK))
    dist.all_reduce(x, group=other)
    assert x[0] == sum(range(WORLD)) and other._get_backend(torch.device("cpu")).name() == "gloo"
    x = torch.zeros(100000)
    x[::100] = 1
    dist.all_reduce(x, group=tuned)
    frames = backend.stats(tuned).frames_sent
    assert frames["coo"] + frames["empty"] == sum(frames.values()), frames
    with raises(TypeError, "pg_options", "spccl.backend.Options"):
        dist.new_group(pg_options=object())
    for group in (everyone, tuned, other, *pairs):
        dist.destroy_process_group(group)
    x = torch.ones(1)
    dist.all_reduce(x)
    assert x.item() == WORLD
    with raises(RuntimeError, "shut down"):
        everyone.allreduce([torch.ones(1)])


def split():
    """Split the group with the calls that torch.distributed.split_group makes where a device is bound."""
    parent = dist.group.WORLD
    backend = parent._get_backend(torch.device("cpu"))
    members = [0, WORLD - 1]
    for turn in range(3):
        # torch counts a rank's groups in this name. Ranks that are in different numbers of groups have different names.
        name = f"pair {turn} of a rank in {RANK} groups"
        child = parent.split_group(
            members,
            timeout=timedelta(seconds=30),
            opts=copy.deepcopy(backend.options),
            group_name=name,
            group_desc="first and last",
        )
        backend.perform_nocolor_split(torch.device("cpu"))
        if RANK not in members:
            assert child is None
            continue
        assert child.size() == 2 and child.rank() == members.index(RANK) and child.group_name == name
        assert child._get_backend(torch.device("cpu")).name() == "spccl"
        x = torch.full((1000,), RANK + 1.0)
        child.allreduce([x]).wait()
        assert torch.equal(x, torch.full((1000,), WORLD + 1.0))
        child.barrier().wait()
        if turn < 2:
            child.shutdown()


def split_again():
    """Splits with one name are different groups, whoever still holds the earlier ones. A split can be split."""
    options = dist.group.WORLD._get_backend(torch.device("cpu")).options

    def check(parent, ranks: list[int]) -> dist.ProcessGroup | None:
        child = parent.split_group(ranks, opts=copy.deepcopy(options), group_name="one name")
        if parent.rank() in ranks:
            x = torch.full((10,), float(RANK))
            child.allreduce([x]).wait()
            assert child.size() == len(ranks) and torch.equal(x, torch.full((10,), float(sum(ranks)))), ranks
        return child

    everyone, held, nested = list(range(WORLD)), [], [dist.group.WORLD]
    for ranks in (everyone, everyone, [0, WORLD - 1], everyone, everyone[: WORLD // 2], everyone[WORLD // 2 :]):
        held.append(check(dist.group.WORLD, ranks))
        if RANK != 0:  # these ranks let go of theirs
            held.clear()
    for _ in range(14):  # names of groups grow, up to a length at which they are hashed
        nested.append(check(nested[-1], everyone))


def destroy_and_join_again():
    """Make and destroy the default group five times, each time with two more groups. No file descriptor, thread or
    segment stays."""
    dist.destroy_process_group()

    from workers.common import held, join, wait_for

    counts = []
    for life in range(5):
        join(name="same-store" if life < 3 else f"store-{life}")  # torch may pass the same store again
        for _ in range(2):
            x = torch.ones(1000)
            dist.all_reduce(x, group=dist.new_group())
            assert x[0] == WORLD
        sparse = torch.eye(4).to_sparse_coo()
        dist.all_reduce(sparse)
        dist.all_reduce(torch.ones(1), async_op=True).get_future().wait()
        assert held()[2] > 0, "shm is not used"  # else a leak of it would not be seen
        dist.destroy_process_group()
        wait_for(lambda: held() in counts, 0.2 if life < 2 else 5)
        counts.append(held())
    assert counts[-1] in counts[:2], counts
    join(name="last-store")
    dist.barrier()  # Gloo fails to connect to a rank that has joined and ended


# ---- sparse_coo --------------------------------------------------------------------------------------------


def coo(rank, shape, nnz, dtype=torch.float32, dense=0, duplicates=True, seed=0):
    """Rank `rank`'s sparse tensor. It is uncoalesced, with duplicates and explicit zeros, unless `duplicates` is
    false."""
    g = torch.Generator().manual_seed(100 * seed + rank)
    sparse_shape = shape[: len(shape) - dense]
    indices = torch.stack([torch.randint(n, (nnz,), generator=g) for n in sparse_shape])
    values = made(rank, (nnz, *shape[len(shape) - dense :]), dtype, zeros=0.1, seed=seed + 7)
    t = torch.sparse_coo_tensor(indices, values, shape, check_invariants=True)
    return t if duplicates else t.coalesce()


def sparse_values():
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32):
        for shape, dense, sizes in (
            ((1000,), 0, [50, 3, 200]),
            ((50, 7), 1, [20, 0, 5]),
            ((9, 8, 4, 3), 2, [0, 0, 0]),
            ((30, 20), 0, [1, 700, 30]),
        ):
            inputs = [coo(r, shape, sizes[r % 3], dtype, dense) for r in range(WORLD)]
            x = inputs[RANK].clone()
            dist.all_reduce(x)
            assert x.is_coalesced() and x.layout == torch.sparse_coo
            want = reduced([t.coalesce().to_dense() for t in inputs], "sum")
            same_bits(x.to_dense() + 0, want + 0, f"sparse {dtype} {shape}")
            every = torch.cat([t.coalesce().indices() for t in inputs], 1)
            assert torch.equal(x.indices(), every.unique(dim=1)), "the union of the indices"
            same_everywhere(x.values(), "values")
    inputs = [coo(r, (40, 2), 10, dense=1) for r in range(WORLD)]
    x = inputs[RANK].clone()
    dist.all_reduce(x, dist.ReduceOp.AVG)
    same_bits(x.to_dense() + 0, reduced([t.coalesce().to_dense() for t in inputs], "avg") + 0, "sparse average")


def sparse_integers():
    """Sums that overflow, and averages of them, equal those of the dense all-reduce."""
    for dtype in (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64):
        limits = torch.iinfo(dtype)
        values = torch.tensor([limits.max, limits.min, limits.max - RANK, 1, limits.min + 1 + RANK], dtype=dtype)
        for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            dense = values.clone()
            dist.all_reduce(dense, op)
            x = torch.sparse_coo_tensor(torch.arange(5)[None], values.clone(), (5,))
            dist.all_reduce(x, op)
            assert torch.equal(x.to_dense(), dense), f"{dtype} {op}: {x.to_dense()}, dense {dense}"


def sparse_async():
    """Sparse and dense calls are in flight together. Sparse calls have their own communicator, so neither disturbs the
    other's order."""
    sparse = [coo(RANK, (500, 4), 30 + 10 * RANK, dense=1, seed=s) for s in range(4)]
    dense = [made(RANK, 3000, torch.float32, seed=s) for s in range(4)]
    works = []
    for s, d in zip(sparse, dense, strict=True):
        works += [dist.all_reduce(s, async_op=True), dist.all_reduce(d, async_op=True)]
    future = works[0].get_future()
    for work in reversed(works):
        work.wait()
    assert future.wait()[0].is_coalesced()
    for i, (s, d) in enumerate(zip(sparse, dense, strict=True)):
        all_coo = [coo(r, (500, 4), 30 + 10 * r, dense=1, seed=i).coalesce().to_dense() for r in range(WORLD)]
        same_bits(s.to_dense() + 0, reduced(all_coo, "sum") + 0, "sparse in flight")
        same_bits(d, reduced([made(r, 3000, torch.float32, seed=i) for r in range(WORLD)], "sum"), "dense")


def sparse_refused():
    """Shapes that differ between ranks are an error on every rank. The group stays usable."""
    x = torch.eye(4 if RANK == 0 else 5).to_sparse_coo()
    with raises(dist.DistBackendError, "sparse_coo", "another shape", "rank "):
        dist.all_reduce(x)
    with raises(ValueError, "sum or avg"):
        dist.all_reduce(torch.eye(4).to_sparse_coo(), dist.ReduceOp.MAX)
    y = torch.eye(4).to_sparse_coo()
    dist.all_reduce(y)
    assert torch.equal(y.to_dense(), WORLD * torch.eye(4))


# ---- training ----------------------------------------------------------------------------------------------


class Net(nn.Module):
    """An embedding and two linear layers. A third linear layer is used only if `use_extra` is true."""

    def __init__(self, sparse_embedding: bool = False):
        super().__init__()
        self.embed = nn.Embedding(50, 16, sparse=sparse_embedding)
        self.first, self.second, self.extra = nn.Linear(16, 32), nn.Linear(32, 4), nn.Linear(32, 4)

    def forward(self, x, use_extra=True):
        h = torch.relu(self.first(self.embed(x).mean(1)))
        return self.second(h) + (self.extra(h) if use_extra else 0)


def batch(rank: int, step: int):
    g = torch.Generator().manual_seed(17 * step + rank)
    return torch.randint(50, (6, 3), generator=g), torch.randint(4, (6,), generator=g)


def trained(group, steps: int = 4, sparse: bool = False, accumulate: int = 1, extra=lambda step: True, **ddp):
    """The parameters after `steps` steps of SGD with DDP on `group`."""
    torch.manual_seed(RANK)  # DDP must copy rank 0's parameters
    net = Net(sparse)
    model = DistributedDataParallel(net, process_group=group, **ddp)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        optimizer.zero_grad()
        for micro in range(accumulate):
            last = micro == accumulate - 1
            with contextlib.nullcontext() if last else model.no_sync():
                x, y = batch(RANK, accumulate * step + micro)
                nn.functional.cross_entropy(model(x, extra(step)), y).backward()
        optimizer.step()
    return [p.detach().clone() for p in net.parameters()]


def _same_as_gloo(**how):
    gloo = dist.new_group(backend="gloo")
    ours, theirs = trained(dist.group.WORLD, **how), trained(gloo, **how)
    for mine, other in zip(ours, theirs, strict=True):
        same_everywhere(mine, "parameter")
        torch.testing.assert_close(mine, other)
    dist.destroy_process_group(gloo)


def ddp_plain():
    _same_as_gloo()


def ddp_unused_parameters():
    _same_as_gloo(find_unused_parameters=True, extra=lambda step: (step + RANK) % 2 == 0)


def ddp_bucket_view():
    _same_as_gloo(gradient_as_bucket_view=True, bucket_cap_mb=0.001)


def ddp_no_sync():
    _same_as_gloo(accumulate=3)


def ddp_static_graph():
    _same_as_gloo(static_graph=True)


def ddp_sparse_embedding():
    _same_as_gloo(sparse=True)


def ddp_fp16_hook():
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    torch.manual_seed(0)
    model = DistributedDataParallel(Net(), bucket_cap_mb=0.001)
    model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    x, y = batch(RANK, 0)
    nn.functional.cross_entropy(model(x), y).backward()
    for p in model.parameters():
        same_everywhere(p.grad, "gradient")


def fsdp2():
    """fully_shard on a CPU mesh gives the parameters of one process that averages the gradients."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    mesh = init_device_mesh("cpu", (WORLD,))
    for factor in (None, 4.0):  # AVG; PREMUL_SUM
        torch.manual_seed(0)
        plain = Net()
        sharded = Net()
        sharded.load_state_dict(plain.state_dict())
        for layer in (sharded.first, sharded.second):
            fully_shard(layer, mesh=mesh)
        fully_shard(sharded, mesh=mesh)
        if factor:
            for module in (sharded.first, sharded.second, sharded):
                module.set_gradient_divide_factor(factor)
        for model, ranks in ((plain, range(WORLD)), (sharded, [RANK])):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for step in range(3):
                optimizer.zero_grad()
                for r in ranks:
                    x, y = batch(r, step)
                    scale = (factor or WORLD) if model is plain else 1
                    (nn.functional.cross_entropy(model(x), y) / scale).backward()
                optimizer.step()
        for (name, want), got in zip(plain.named_parameters(), sharded.parameters(), strict=True):
            assert isinstance(got, DTensor), name
            torch.testing.assert_close(got.full_tensor(), want.detach(), msg=lambda m, n=name: f"{n}: {m}")


def dtensor():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (WORLD,))
    whole = torch.arange(WORLD * 6 * 4.0).reshape(WORLD * 6, 4)
    t = distribute_tensor(whole if RANK == 0 else torch.zeros_like(whole), mesh, [Shard(0)])
    assert torch.equal(t.full_tensor(), whole)
    assert torch.equal(t.redistribute(mesh, [Replicate()]).to_local(), whole)
    assert torch.equal(t.redistribute(mesh, [Shard(1)]).full_tensor(), whole)
    partial = DTensor.from_local(whole, mesh, [Partial()])
    assert torch.equal(partial.redistribute(mesh, [Replicate()]).to_local(), whole * WORLD)
    mine = partial.redistribute(mesh, [Shard(0)]).to_local()
    assert torch.equal(mine, WORLD * whole[6 * RANK : 6 * RANK + 6])
    a = distribute_tensor(whole, mesh, [Shard(0)])
    b = distribute_tensor(whole.t().contiguous(), mesh, [Replicate()])
    torch.testing.assert_close((a @ b).full_tensor(), whole @ whole.t())


def checkpoint():
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (WORLD,))
    whole = torch.randn(WORLD * 4, 3, generator=torch.Generator().manual_seed(3))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"w": distribute_tensor(whole, mesh, [Shard(0)]), "step": 5}, checkpoint_id=f"{FOLDER}/dcp")
        target = {"w": distribute_tensor(torch.zeros_like(whole), mesh, [Shard(0)]), "step": 0}
        dcp.load(target, checkpoint_id=f"{FOLDER}/dcp")
        assert target["step"] == 5
        same_bits(target["w"].full_tensor(), whole, "loaded")
        future = dcp.async_save({"w": target["w"]}, checkpoint_id=f"{FOLDER}/dcp-async")
        future.result(timeout=60)
    dist.barrier()
    assert os.path.exists(f"{FOLDER}/dcp-async/.metadata")


def ddp_model_is_spread_by_broadcast():
    """Ranks start with different weights and buffers. After DDP's constructor all have rank 0's bits."""
    torch.manual_seed(RANK)
    net = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    DistributedDataParallel(net)
    for t in net.state_dict().values():
        same_everywhere(bits(t), "state")


main(
    [
        delegated,
        point_to_point,
        mixed_order,
        objects,
        groups,
        split,
        split_again,
        sparse_values,
        sparse_integers,
        sparse_async,
        sparse_refused,
        ddp_plain,
        ddp_unused_parameters,
        ddp_bucket_view,
        ddp_no_sync,
        ddp_static_graph,
        ddp_sparse_embedding,
        ddp_fp16_hook,
        ddp_model_is_spread_by_broadcast,
        fsdp2,
        dtensor,
        checkpoint,
        destroy_and_join_again,
    ]
)
