"""Ranks on hosts whose own names resolve to 127.0.1.1, with no setting of an interface."""

import os

import debian_host
import torch
import torch.distributed as dist

from workers.common import RANK, WORLD, main, raises

NAMESPACES = os.environ["SPCCL_TEST_NAMESPACES"].split(",")
HOST = RANK // (WORLD // len(NAMESPACES))
debian_host.enter(NAMESPACES[HOST], f"pc{HOST + 1}")


def ddp_trains():
    from spccl.ddp import PrunedGradients

    torch.manual_seed(1)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
    PrunedGradients(density=0.1).register(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        model(torch.full((4, 64), float(RANK + step))).square().mean().backward()
        optimizer.step()
    everyone: list = [None] * WORLD
    dist.all_gather_object(everyone, model.module.weight.sum().item())
    assert everyone == everyone[:1] * WORLD, everyone


def calls_that_gloo_runs():
    dist.barrier()
    gathered: list | None = [None] * WORLD if RANK == 0 else None
    dist.gather_object({"rank": RANK}, gathered)
    assert gathered is None or gathered == [{"rank": r} for r in range(WORLD)], gathered
    x = torch.full((3,), float(RANK))
    if RANK % 2 == 0:
        dist.send(x, (RANK + 1) % WORLD)
    else:
        dist.recv(x, RANK - 1)
        assert x.tolist() == [RANK - 1.0] * 3, x


def new_groups():
    """One group across the hosts, and one for each host, whose Gloo is on loopback."""
    per_host = WORLD // len(NAMESPACES)
    across = [dist.new_group(list(range(i, WORLD, per_host))) for i in range(per_host)]
    inside = [dist.new_group(list(range(h * per_host, (h + 1) * per_host))) for h in range(len(NAMESPACES))]
    for group in (across[RANK % per_host], inside[HOST]):
        dist.barrier(group)
        x = torch.ones(5)
        dist.all_reduce(x, group=group)
        assert x.tolist() == [float(dist.get_world_size(group))] * 5, x


def links_name_the_addresses():
    from spccl import backend

    other = (RANK + WORLD // 2) % WORLD
    want = f"(10.77.1.{HOST + 1} to 10.77.1.{2 - HOST})"
    assert want in backend.describe_link(other), backend.describe_link(other)


def wrong_interface_is_named():
    os.environ["GLOO_SOCKET_IFNAME"] = "none7"
    with raises(dist.DistBackendError, "none7 (GLOO_SOCKET_IFNAME)", "the inner Gloo", f"rank {RANK} of {WORLD}"):
        dist.new_group(list(range(WORLD)))
    del os.environ["GLOO_SOCKET_IFNAME"]


if __name__ == "__main__":
    main([ddp_trains, calls_that_gloo_runs, new_groups, links_name_the_addresses, wrong_interface_is_named])
