"""Cases: groups of spccl.backend.make_process_group without a default group, and with fewer and fewer ranks."""

from __future__ import annotations

import os
import traceback
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from spccl import _torch_join, backend, ddp
from workers.common import FOLDER, RANK, WORLD, raises, report

TIMEOUT = timedelta(seconds=60)


def group_of(n_ranks: int, name: str) -> dist.ProcessGroup:
    store = dist.FileStore(f"{FOLDER}/{name}", n_ranks)
    return backend.make_process_group(store, RANK, n_ranks, name=name, timeout=TIMEOUT)


def without_a_default_group() -> None:
    group = group_of(WORLD, "first")
    assert not dist.is_initialized() and (group.rank(), group.size()) == (RANK, WORLD)
    x = torch.zeros(1000)
    x[RANK] = RANK + 1
    group.allreduce([x]).wait()
    assert x.sum() == WORLD * (WORLD + 1) / 2
    y = torch.full((4,), float(RANK))
    group.broadcast(y, 0).wait()
    assert y.sum() == 0
    group.barrier().wait()  # Gloo's
    assert backend.stats(group).n_collectives >= 2
    model = DistributedDataParallel(torch.nn.Linear(100, 100), process_group=group)
    hook = ddp.PrunedGradients(min_numel=1).register(model)
    model(torch.randn(8, 100)).sum().backward()
    assert hook.step == 1
    grads = [torch.empty(100, 100) for _ in range(WORLD)]
    group.allgather([grads], [model.module.weight.grad]).wait()
    assert all(torch.equal(grad, grads[0]) for grad in grads)
    group.shutdown()


def fewer_ranks_on_the_same_store() -> None:
    """The last rank leaves. The others make a new group under the same name, twice."""
    for n_ranks in (WORLD, WORLD - 1, WORLD - 1):
        if n_ranks <= RANK:
            return
        group = group_of(n_ranks, f"shrinking-{n_ranks}")
        x = torch.ones(5)
        group.allreduce([x]).wait()
        assert x[0] == n_ranks
        group.shutdown()


def bad_arguments() -> None:
    store = dist.HashStore()
    with raises(TypeError, "store is a dict"):
        backend.make_process_group({}, 0, 1)
    with raises(ValueError, "rank 5 of a group of 2, wanted 0 to 1", "WORLD_SIZE"):
        _torch_join.check_rank(5, 2)
    with raises(ValueError, "rank 2 of 2"):
        backend.make_process_group(store, 2, 2)
    with raises(ValueError, "timeout"):
        backend.make_process_group(store, 0, 1, timeout=timedelta(0))
    with raises(TypeError, "spccl.backend.Options"):
        backend.make_process_group(store, 0, 1, options={"format": "coo"})


CASES = [without_a_default_group, fewer_ranks_on_the_same_store, bad_arguments]

if __name__ == "__main__":
    for case in CASES:
        try:
            case()
        except BaseException:
            report(case.__name__, ok=False, error=traceback.format_exc())
            os._exit(1)
        report(case.__name__, ok=True)
