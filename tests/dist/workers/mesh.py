"""Cases for four ranks: meshes of two dimensions, callbacks that wait, uneven ranks, torch's optimizers and
compiler."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from workers.common import RANK, WORLD, made, main, reduced, same_bits, same_everywhere


def mesh_2d():
    from torch.distributed.device_mesh import init_device_mesh

    assert WORLD == 4
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))


# ---- callbacks of futures ----------------------------------------------------------------------------------


def callback_waits_for_another():
    """A callback may issue a collective and wait for its future; the callback of that future may do the same."""

    def deeper(level):
        def run(future):
            x = future.value()[0].clone()
            work = dist.all_reduce(x, async_op=True)
            if level:
                return work.get_future().then(deeper(level - 1)).wait()
            return work.get_future().wait()[0]

        return run

    x = torch.ones(100)
    got = dist.all_reduce(x, async_op=True).get_future().then(deeper(3)).wait()
    assert torch.equal(got, torch.full((100,), float(WORLD**5))), got[0]
    sparse = torch.eye(4).to_sparse_coo()
    got = dist.all_reduce(sparse, async_op=True).get_future().then(deeper_sparse).wait()
    assert torch.equal(got.to_dense(), WORLD**2 * torch.eye(4))


def deeper_sparse(future):
    x = future.value()[0].clone()
    return dist.all_reduce(x, async_op=True).get_future().wait()[0]


def callbacks_in_order():
    """Callbacks that are attached before their collectives end run in the order of issue."""
    order: list[int] = []
    dist.barrier()
    if RANK != 0:  # no collective ends before all ranks have joined, so rank 0 attaches in time
        dist.recv(torch.zeros(1), 0)
    works = [dist.all_reduce(torch.full((10,), float(i)), async_op=True) for i in range(20)]
    futures = [w.get_future().then(lambda f, i=i: order.append(i)) for i, w in enumerate(works)]
    if RANK == 0:
        for other in range(1, WORLD):
            dist.send(torch.zeros(1), other)
    for future in futures:
        future.wait()
    assert RANK != 0 or order == list(range(20)), order
    assert sorted(order) == list(range(20)), order


def power_sgd():
    """torch's own PowerSGD hook: its callbacks wait for two more collectives."""
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

    if torch.cuda.is_available():
        return {"left out": "where there is a GPU, torch's hook synchronizes it, and refuses a CPU bucket for that"}
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)))
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    for step in range(5):
        model(made(RANK, (4, 64), torch.float32, zeros=0, seed=step)).square().mean().backward()
    assert state.compression_stats()[2] > 0, "nothing was compressed"
    for p in model.parameters():
        same_everywhere(p.grad, "gradient")


# ---- ranks that differ -------------------------------------------------------------------------------------


def ddp_join():
    """Every rank has another number of batches. A rank that has none left joins the collectives of the others."""
    torch.manual_seed(0)
    net = nn.Linear(4, 4)
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    steps = 0
    with model.join():
        for _ in range(2 + RANK):
            optimizer.zero_grad()
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            steps += 1
    assert steps == 2 + RANK
    same_everywhere(net.weight.detach(), "weight of the last to end")


def ddp_rank_without_rows():
    """nn.Embedding(sparse=True) with int64 indices. One rank's batch has no rows, another's has only duplicates."""

    def batch(rank):
        return torch.tensor([[], [3, 3, 3], [0, 49, 7], [7, 8, 8]][rank], dtype=torch.int64)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(50, 8, sparse=True)
            self.out = nn.Linear(8, 1)

        def forward(self, x):
            return self.out(self.embed(x)).sum()

    torch.manual_seed(0)
    net = Net()
    model = DistributedDataParallel(net)
    model(batch(RANK)).backward()
    grad = net.embed.weight.grad
    assert grad.layout == torch.sparse_coo
    assert grad.coalesce().indices().tolist() == [[0, 3, 7, 8, 49]]
    alone = Net()
    alone.load_state_dict(net.state_dict())
    total = torch.zeros_like(alone.embed.weight)
    for r in range(WORLD):
        alone.zero_grad()
        alone(batch(r)).backward()
        total += alone.embed.weight.grad.to_dense() / WORLD
    torch.testing.assert_close(grad.to_dense(), total)


# ---- meshes ------------------------------------------------------------------------------------------------


def groups_of_a_mesh():
    """The groups of both mesh dimensions and the world have work in flight at the same time."""
    mesh = mesh_2d()
    xs = {}
    works = []
    for s, dim in enumerate(("replica", "shard")):
        group = mesh.get_group(dim)
        members = dist.get_process_group_ranks(group)
        assert group._get_backend(torch.device("cpu")).name() == "spccl"
        x = made(RANK, 30_000, torch.float32, seed=s)
        xs[dim] = (x, members, s)
        works.append(dist.all_reduce(x, group=group, async_op=True))
    whole = made(RANK, 30_000, torch.float32, seed=9)
    works.append(dist.all_reduce(whole, async_op=True))
    for work in works:
        work.wait()
    for dim, (x, members, s) in xs.items():
        same_bits(x, reduced([made(r, 30_000, torch.float32, seed=s) for r in members], "sum"), dim)
    same_bits(whole, reduced([made(r, 30_000, torch.float32, seed=9) for r in range(WORLD)], "sum"), "world")


def hsdp():
    """fully_shard over one mesh dimension, replicas over the other: reduce-scatter, then all-reduce of the shards."""
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    plain, sharded = nn.Linear(8, 6), nn.Linear(8, 6)
    sharded.load_state_dict(plain.state_dict())
    fully_shard(sharded, mesh=mesh_2d())
    batches = [made(r, (3, 8), torch.float32, zeros=0) for r in range(WORLD)]
    sharded(batches[RANK]).square().mean().backward()
    for b in batches:
        (plain(b).square().mean() / WORLD).backward()
    for want, got in zip(plain.parameters(), sharded.parameters(), strict=True):
        torch.testing.assert_close(got.grad.full_tensor(), want.grad)


def dtensor_2d():
    from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

    mesh = mesh_2d()
    whole = torch.arange(64.0).reshape(8, 8)
    t = distribute_tensor(whole, mesh, [Shard(0), Shard(1)])
    for target in ([Replicate(), Replicate()], [Shard(1), Shard(0)], [Replicate(), Shard(0)]):
        assert torch.equal(t.redistribute(mesh, target).full_tensor(), whole), target
    assert t.sum().full_tensor() == whole.sum()
    partial = torch.distributed.tensor.DTensor.from_local(whole, mesh, [Partial(), Partial("avg")])
    assert torch.equal(partial.full_tensor(), 2 * whole)


# ---- optimizer, compiler, data loader, threads -------------------------------------------------------------


def zero_optimizer():
    """ZeroRedundancyOptimizer: each rank updates its part of the parameters and broadcasts it."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    def trained(make):
        torch.manual_seed(0)
        net = nn.Sequential(*(nn.Linear(6, 6) for _ in range(5)))
        model = DistributedDataParallel(net)
        optimizer = make(model.parameters())
        for step in range(3):
            optimizer.zero_grad()
            model(made(RANK, (2, 6), torch.float32, zeros=0, seed=step)).square().mean().backward()
            optimizer.step()
        return [p.detach() for p in net.parameters()]

    ours = trained(lambda p: ZeroRedundancyOptimizer(p, torch.optim.Adam, lr=0.01))
    for got, want in zip(ours, trained(lambda p: torch.optim.Adam(p, lr=0.01)), strict=True):
        same_everywhere(got, "parameter")
        torch.testing.assert_close(got, want)


def compiled():
    """torch.compile makes one graph of a function with collectives."""
    import torch.distributed._functional_collectives as fc

    group = dist.group.WORLD

    @torch.compile(backend="aot_eager", fullgraph=True)
    def f(x):
        y = fc.all_reduce(x * 2, "sum", group)
        z = fc.all_gather_tensor(y, 0, group)
        return fc.reduce_scatter_tensor(z, "avg", 0, group) + 1

    for n in (3, 5):
        assert torch.equal(f(torch.ones(n)), torch.full((n,), 2.0 * WORLD + 1))


def data_loader_workers():
    """A data loader forks worker processes while the group exists, and they end. The group goes on."""
    from torch.utils.data import DataLoader

    for _ in range(2):
        total = 0
        for batch in DataLoader(range(16), num_workers=2, batch_size=4, multiprocessing_context="fork"):
            dist.all_reduce(batch)
            total += int(batch.sum())
        assert total == WORLD * sum(range(16))


def groups_in_threads():
    """Each of three threads has a group of its own. Their collectives do not wait for each other."""
    from concurrent.futures import ThreadPoolExecutor

    groups = [dist.new_group() for _ in range(3)]

    def work(i):
        for step in range(30):
            x = torch.full((1000 + i,), float(step))
            dist.all_reduce(x, group=groups[i])
            assert torch.equal(x, torch.full((1000 + i,), float(step * WORLD)))
        return i

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(work, range(3), timeout=60)) == [0, 1, 2]
    for group in groups:
        dist.destroy_process_group(group)


main(
    [
        callback_waits_for_another,
        callbacks_in_order,
        power_sgd,
        ddp_join,
        ddp_rank_without_rows,
        groups_of_a_mesh,
        hsdp,
        dtensor_2d,
        zero_optimizer,
        compiled,
        data_loader_workers,
        groups_in_threads,
    ]
)
