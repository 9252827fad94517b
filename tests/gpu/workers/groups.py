"""Cases of groups that are a part of the world, where some ranks share a host and others do not: each group must take
the GPUs' memory inside a host and the network between hosts, whatever its parent takes."""

from __future__ import annotations

import os
import signal
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from gpu_common import DEVICE, KINDS, cuda, main, patterned, same, start
from workers.common import RANK, WORLD, reduced, report

from spccl import backend

PER_HOST = int(os.environ.get("RANKS_PER_HOST", "1"))
N = 3 * 4096 + 17
HOSTS = [list(range(first, first + PER_HOST)) for first in range(0, WORLD, PER_HOST)]
PLACES = [list(range(place, WORLD, PER_HOST)) for place in range(PER_HOST)]  # one rank of each host


MEMBERS = {
    **{f"host {i}": ranks for i, ranks in enumerate(HOSTS)},
    **{f"place {i}": ranks for i, ranks in enumerate(PLACES)},
    "all but the last": list(range(WORLD - 1)),
    "all but the first": list(range(1, WORLD)),
    "the last alone": [WORLD - 1],
    "world": list(range(WORLD)),
}


def made_groups() -> dict[str, tuple[list[int], dist.ProcessGroup]]:
    """This rank's groups by name, with their ranks in the order of the world. Every rank makes every group."""
    groups = {name: (ranks, dist.new_group(ranks)) for name, ranks in MEMBERS.items()}
    return {name: (ranks, group) for name, (ranks, group) in groups.items() if RANK in ranks}


def end(groups: dict[str, tuple[list[int], dist.ProcessGroup]]) -> None:
    """Every rank ends its groups in the same order."""
    torch.cuda.synchronize()
    for _, group in groups.values():
        dist.destroy_process_group(group)


def on_other_hosts(ranks: list[int]) -> list[int]:
    return [r for r in ranks if r // PER_HOST != RANK // PER_HOST]


def check_collectives(
    ranks: list[int], group: dist.ProcessGroup, what: str, seed: int = 0, kinds: tuple[str, ...] = KINDS
) -> None:
    """The four collectives on `group` give the bits of a reduction in rank order."""
    me = ranks.index(RANK)
    for kind in kinds:
        for dtype in (torch.float32, torch.bfloat16):
            xs = [patterned(kind, r, len(ranks), N * len(ranks), 0.05, dtype, seed) for r in range(len(ranks))]
            want = reduced(xs, "sum")
            x = cuda(xs[me])
            dist.all_reduce(x, group=group)
            same(x, want, f"{what}: all_reduce {kind} {dtype}")
            part = torch.full((N,), 7, dtype=dtype, device=DEVICE)
            dist.reduce_scatter_tensor(part, cuda(xs[me]), group=group)
            same(part, want[me * N : (me + 1) * N], f"{what}: reduce_scatter_tensor {kind} {dtype}")
            whole = torch.full((len(ranks) * N,), 7, dtype=dtype, device=DEVICE)
            dist.all_gather_into_tensor(whole, cuda(xs[me][:N]), group=group)
            same(whole, torch.cat([y[:N] for y in xs]), f"{what}: all_gather_into_tensor {kind} {dtype}")
    x = cuda(xs[me])
    dist.broadcast(x, ranks[-1], group=group)
    same(x, xs[-1], f"{what}: broadcast")


def values_and_links() -> dict:
    """Right bits in every group, and each pair of ranks takes the way that its hosts ask for."""
    groups, texts = made_groups(), {}
    for name, (ranks, group) in groups.items():
        if os.environ.get("BIND") != "1":  # asking binds a group to no GPU, also not to the current one
            with torch.cuda.device((RANK + 1) % torch.cuda.device_count()):
                assert backend.cuda_stats(group).path == "unknown", backend.describe_group(group)
        check_collectives(ranks, group, name, seed=len(name))
        stats, far = backend.cuda_stats(group), on_other_hosts(ranks)
        assert stats.path == "engine" and stats.n_remote == len(far), (name, stats)
        assert (stats.pinned_bytes > 0) == (len(far) > 0) == (stats.n_proxies > 0), (name, stats)
        for peer, rank in enumerate(ranks):
            if rank != RANK:
                text = backend.describe_link(peer, group)
                assert (" over tcp, rings in pinned memory" in text) == (rank in far), (name, rank, text)
                assert ("mapped memory" in text) == (rank not in far), (name, rank, text)
        texts[name] = backend.describe_group(group)
    end(groups)
    return {"text": texts}


def in_flight_at_once() -> None:
    """Collectives of all groups are enqueued on streams of their own before any is waited for."""
    groups = made_groups()
    for round_ in range(5):
        works = []
        for name, (ranks, group) in groups.items():
            with torch.cuda.stream(torch.cuda.Stream()):
                x = torch.zeros(N, device=DEVICE)
                x[::50] = float(RANK + round_)
                works.append((name, ranks, x, dist.all_reduce(x, group=group, async_op=True)))
        for name, ranks, x, work in works:
            work.wait()
            torch.cuda.synchronize()
            want = torch.zeros(N)
            want[::50] = float(sum(ranks) + round_ * len(ranks))
            same(x, want, f"{name}, round {round_}")
    end(groups)


def in_one_graph() -> None:
    """A captured step reduces inside the host, then between hosts, as hierarchical training does."""
    groups = made_groups()
    inside, between = groups[f"host {RANK // PER_HOST}"][1], groups[f"place {RANK % PER_HOST}"][1]
    x = torch.zeros(N, device=DEVICE)
    for group in (inside, between):  # the first collective of a group makes its rings
        dist.all_reduce(x, group=group)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        dist.all_reduce(x, group=inside)
        dist.all_reduce(x, group=between)
    for round_ in range(3):
        x.zero_()
        x[::70] = float(RANK + round_)
        graph.replay()
        want = torch.zeros(N)
        want[::70] = float(sum(range(WORLD)) + round_ * WORLD)
        same(x, want, f"replay {round_}")
    del graph
    end(groups)


def meshes() -> None:
    """A mesh of hosts x ranks gives the same groups. With a bound device torch makes them by split_group."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cuda", (len(HOSTS), PER_HOST), mesh_dim_names=("hosts", "ranks"))
    for name in ("hosts", "ranks"):
        group = mesh.get_group(name)
        ranks = dist.get_process_group_ranks(group)
        assert ranks == (PLACES[RANK % PER_HOST] if name == "hosts" else HOSTS[RANK // PER_HOST])
        check_collectives(ranks, group, f"mesh, {name}")
        assert backend.cuda_stats(group).n_remote == len(on_other_hosts(ranks)), name


def ended_one_by_one() -> None:
    """A group that is destroyed leaves the others as they are."""
    groups = made_groups()
    for name, (ranks, group) in groups.items():
        check_collectives(ranks, group, name)
    for name in MEMBERS:  # all ranks take as many turns, whichever groups they are in
        if name in groups:
            dist.destroy_process_group(groups.pop(name)[1])
        for other, (ranks, group) in groups.items():
            check_collectives(ranks, group, f"{other}, after the end of {name}", kinds=("random",))


def killed_rank() -> None:
    """The last rank dies. Groups with it end with an error that names it. Groups without it go on."""
    start()
    groups = made_groups()
    for name, (ranks, group) in groups.items():
        check_collectives(ranks, group, name)
    torch.cuda.synchronize()
    # Not a barrier of GPUs: the dying rank's last frames of it could be lost with it.
    store = dist.distributed_c10d._get_default_store()
    store.set(f"ready {RANK}", b"")
    store.wait([f"ready {r}" for r in range(WORLD)], timedelta(seconds=60))
    if RANK == WORLD - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    texts = {}
    for name, (ranks, group) in groups.items():
        began = time.monotonic()
        if WORLD - 1 not in ranks:
            check_collectives(ranks, group, f"{name}, after a rank of other groups died")
            continue
        while name not in texts:
            try:
                x = torch.ones(N, device=DEVICE)
                dist.all_reduce(x, group=group, async_op=True).wait()
                torch.cuda.synchronize()
            except dist.DistBackendError as error:
                texts[name] = str(error)
            assert time.monotonic() - began < 40, f"{name}: no error"
        assert f"rank {ranks.index(WORLD - 1)}" in texts[name], (name, texts[name])
    report("killed_rank", ok=True, text=texts)


if __name__ == "__main__":
    if sys.argv[1:] == ["killed_rank"]:
        killed_rank()
    else:
        main(
            [values_and_links, in_flight_at_once, in_one_graph, meshes, ended_one_by_one],
            bind=os.environ.get("BIND") == "1",
            engine=False,  # each case looks at its groups; not all use the world's own
        )
