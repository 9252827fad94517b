"""Cases for two ranks: rank 0 forks, and its child calls the group. Every call of the child raises and none hangs.
The parent's group goes on."""

from __future__ import annotations

import os
import signal
import traceback

import torch
import torch.distributed as dist

from workers.common import RANK, WORLD, main, raises

CHILD_S = 60


def in_child(fn):
    """Run fn() in a child of fork, which must end well."""
    child = os.fork()
    if child == 0:
        signal.alarm(CHILD_S)  # a child that hangs ends here
        try:
            fn()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    assert status == 0, f"the child {'hangs' if status == signal.SIGALRM else 'failed'} ({status:x})"


def sum_is_right():
    for n in (1, 70001):
        x = torch.full((n,), float(RANK + 1))
        dist.all_reduce(x)
        assert torch.equal(x, torch.full((n,), WORLD * (WORLD + 1) / 2)), x[:3]


def use_group():
    x = torch.full((1000,), 100.0)
    calls = {
        "all_reduce": lambda: dist.all_reduce(x),
        "async": lambda: dist.all_reduce(x, async_op=True).wait(),
        "future": lambda: dist.all_reduce(x, async_op=True).get_future().wait(),
        "sparse": lambda: dist.all_reduce(torch.eye(4).to_sparse_coo()),
        "broadcast": lambda: dist.broadcast(x, 0),
        "all_gather": lambda: dist.all_gather([x.clone() for _ in range(WORLD)], x),
        "barrier": dist.barrier,
        "send": lambda: dist.send(x, 1),
        "batch": lambda: dist.group.WORLD._start_coalescing(torch.device("cpu")),
    }
    for name, call in calls.items():
        with raises(RuntimeError, "child of fork"):
            call()
            print(f"{name} works in the child", flush=True)


def child_uses_group():
    sum_is_right()
    if RANK == 0:
        in_child(use_group)
    sum_is_right()


def child_waits_for_pending_work():
    x, sparse = torch.full((10,), float(RANK + 1)), torch.eye(4).to_sparse_coo()
    if RANK == 0:
        work, sparse_work = dist.all_reduce(x, async_op=True), dist.all_reduce(sparse, async_op=True)

        def wait():
            for pending in (work, sparse_work):
                with raises(RuntimeError, "child of fork"):
                    pending.wait()

        in_child(wait)
        dist.send(torch.zeros(1), 1)
        work.wait()
        sparse_work.wait()
    else:
        dist.recv(torch.zeros(1), 0)
        dist.all_reduce(x)
        dist.all_reduce(sparse)
    assert torch.equal(x, torch.full((10,), 3.0))
    assert torch.equal(sparse.to_dense(), WORLD * torch.eye(4))


def child_destroys_group():
    """The child destroys its copy of the group. The parent's group goes on, with its inner Gloo and sparse runner."""
    if RANK == 0:
        in_child(dist.destroy_process_group)
    sum_is_right()
    dist.barrier()
    sparse = torch.eye(4).to_sparse_coo()
    dist.all_reduce(sparse)
    assert torch.equal(sparse.to_dense(), WORLD * torch.eye(4))


def forks_while_busy():
    """The process forks during collectives, while other threads hold locks.

    A call that locked a mutex before it looked for a fork hung in 3 of 100 children.
    """
    from concurrent.futures import ThreadPoolExecutor

    def fork_often():
        for _ in range(60):
            in_child(use_group)
        return True

    with ThreadPoolExecutor(1) as pool:
        forking = pool.submit(fork_often) if RANK == 0 else None
        goes_on = torch.ones(1)
        while goes_on.item():
            works = [dist.all_reduce(torch.full((5000,), 1.0), async_op=True) for _ in range(8)]
            for work in works:
                work.wait()
            goes_on.fill_(float(RANK == 0 and not forking.done()))
            dist.all_reduce(goes_on)
        assert forking is None or forking.result()


main([child_uses_group, child_waits_for_pending_work, child_destroys_group, forks_while_busy])
