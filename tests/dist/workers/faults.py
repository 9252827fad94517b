"""Cases, one per run: the errors on every rank when ranks disagree, die, hang or abort.

Each case ends with `works_again`: the survivors destroy the broken group and make a new one in the same process. The
file descriptors, threads and shared memory of the broken group must then be gone.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from workers.common import (
    FOLDER,
    RANK,
    WORLD,
    await_told,
    held,
    join,
    raises,
    report,
    tell,
    wait_for,
)

SOON_S = 10  # far below the time-outs of the groups, far above what a busy machine needs
ELEMENTS = 1 << 20  # 4 MiB are several slices, so a fault comes in the middle of a collective


def open_files() -> list[str]:
    """The targets of this process's descriptors, for the text of a failure."""
    names = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            names.append(os.readlink(f"/proc/self/fd/{fd}"))
        except OSError:  # the descriptor of the listing itself
            continue
    return names


def alone_once() -> None:
    """Make, use and destroy a group of one rank. Afterwards torch has started all that it starts once per process."""
    dist.init_process_group("spccl", store=dist.HashStore(), rank=0, world_size=1)
    for x in (torch.ones(1), torch.eye(2).to_sparse_coo()):
        dist.all_reduce(x, async_op=True).get_future().wait()
    dist.destroy_process_group()


def works_again(ranks: list[int], before: tuple | None = None) -> None:
    dist.destroy_process_group()
    if before is not None and torch.version.cuda is None:  # a CUDA build may open the driver's files at any time
        assert wait_for(lambda: held() == before), f"before: {before}, after: {held()}, open: {open_files()}"
    dist.init_process_group(
        "spccl",
        init_method=f"file://{FOLDER}/again",
        rank=ranks.index(RANK),
        world_size=len(ranks),
        timeout=timedelta(seconds=60),
    )
    x = torch.ones(1000)
    dist.all_reduce(x)
    assert torch.equal(x, torch.full((1000,), float(len(ranks))))
    dist.destroy_process_group()


def caught(action, kind=dist.DistBackendError) -> dict:
    """Run `action`, which must fail. Returns the text of the error and the seconds that it took."""
    started = time.monotonic()
    try:
        action()
    except kind as error:
        return {"text": str(error), "after_s": time.monotonic() - started}
    raise AssertionError(f"nothing raised, wanted {kind.__name__}")


def size_mismatch():
    join(timeout_s=20)
    x = torch.ones(1000 if RANK == 0 else 1001)
    error = caught(lambda: dist.all_reduce(x))
    works_again(list(range(WORLD)))
    return error


def dtype_mismatch():
    join(timeout_s=20)
    x = torch.ones(1000, dtype=torch.float32 if RANK == 0 else torch.int32)
    error = caught(lambda: dist.all_reduce(x))
    works_again(list(range(WORLD)))
    return error


def operation_mismatch():
    join(timeout_s=20)
    x = torch.ones(1000)
    error = caught(lambda: dist.all_reduce(x) if RANK == 0 else dist.broadcast(x, 0))
    works_again(list(range(WORLD)))
    return error


def broken_group_stays_broken():
    """After a failure every call raises at once and names the first cause, also in Gloo and the sparse runner."""
    alone_once()
    before = held()
    join(timeout_s=20)
    x = torch.ones(1000 if RANK == 0 else 1001)
    first = caught(lambda: dist.all_reduce(x))
    again = caught(lambda: dist.all_reduce(torch.ones(1)))
    later = caught(lambda: dist.all_gather([torch.ones(1)] * WORLD, torch.ones(1), async_op=True).wait())
    sparse = caught(lambda: dist.all_reduce(torch.eye(3).to_sparse_coo()))
    barrier = caught(dist.barrier)
    flag = caught(lambda: dist.all_reduce(torch.ones(1, dtype=torch.bool), dist.ReduceOp.MAX))
    for error in (again, later, sparse, barrier, flag):
        assert error["after_s"] < SOON_S, error
    works_again(list(range(WORLD)), before)
    return first | {"again": [error["text"] for error in (again, later, sparse, barrier, flag)]}


def killed_peer():
    """The last rank is killed while the others are inside the collective. It sends no message before."""
    alone_once()
    before = held()
    join(timeout_s=30)
    x = torch.randn(ELEMENTS)
    dist.all_reduce(x)
    assert held()[2] > before[2], "shm is not used"  # else a leak of it would not be seen
    done = Path(FOLDER, "first_sum_done")
    done.with_suffix(f".{RANK}").touch()
    if RANK == WORLD - 1:
        # a rank that is still in the first collective would fail there
        assert wait_for(lambda: all(done.with_suffix(f".{r}").exists() for r in range(WORLD)), 25)
        dist.all_reduce(x, async_op=True)
        os.kill(os.getpid(), signal.SIGKILL)
    error = caught(lambda: [dist.all_reduce(x) for _ in range(50)])
    works_again(list(range(WORLD - 1)), before)
    return error


def killed_peer_async():
    """The last rank is killed; the others get the error from Work and Future."""
    join(timeout_s=30)
    x = torch.randn(ELEMENTS)
    dist.all_reduce(x)
    if RANK == WORLD - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    work = dist.all_reduce(x, async_op=True)
    future = work.get_future()
    error = caught(work.wait)
    assert work.is_completed()
    if tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13):  # before, torch cannot hand an exception to Python
        assert work.exception() is not None
    caught(future.wait, RuntimeError)
    sparse = caught(lambda: dist.all_reduce(torch.eye(4).to_sparse_coo()))  # must not wait for the dead rank
    assert "rank 2 is gone" in sparse["text"] and sparse["after_s"] < SOON_S, sparse
    works_again(list(range(WORLD - 1)))
    return error


def hanging_peer():
    """The last rank does something else for longer than the timeout."""
    join(timeout_s=3)
    if RANK == WORLD - 1:
        time.sleep(6)
        error = caught(lambda: dist.all_reduce(torch.ones(ELEMENTS)))
    else:
        error = caught(lambda: dist.all_reduce(torch.ones(ELEMENTS)))
    works_again(list(range(WORLD)))
    return error


def killed_peer_while_the_sparse_runner_is_made():
    """The last rank dies before its first sparse call, while the others wait for it in that call."""
    join(timeout_s=30)
    if RANK == WORLD - 1:
        time.sleep(1)
        os.kill(os.getpid(), signal.SIGKILL)
    work = dist.all_reduce(torch.eye(4).to_sparse_coo(), async_op=True)
    caught(lambda: dist.all_reduce(torch.ones(10)))  # this call notices that the rank is gone
    error = caught(work.wait)
    works_again(list(range(WORLD - 1)))
    return error


def abort_from_a_thread():
    """Rank 0 aborts while it waits too. All ranks end at once, far before the timeout."""
    join(timeout_s=60)

    def abort():
        dist.group.WORLD.abort()
        tell("aborted")

    if RANK == 0:
        threading.Timer(1.0, abort).start()
    if RANK == WORLD - 1:
        await_told("aborted")  # joins no collective before, so only the abort can end the wait of the others
    error = caught(lambda: dist.all_reduce(torch.ones(ELEMENTS)))
    works_again(list(range(WORLD)))
    return error


def abort_work():
    join(timeout_s=60)
    if RANK == 0:
        work = dist.all_reduce(torch.ones(ELEMENTS), async_op=True)
        with raises(dist.DistBackendError, "300 ms"):
            work.wait(timedelta(milliseconds=300))
        dist.group.WORLD.abort()
        tell("aborted")
        error = caught(work.wait)
    else:
        await_told("aborted")
        error = caught(lambda: dist.all_reduce(torch.ones(ELEMENTS)))
    works_again(list(range(WORLD)))
    return error


def absent_rank_at_start(absent: int = WORLD - 1):
    """One rank never joins. Making the group fails within the timeout, and the error names that rank."""
    if absent == RANK:
        return {"text": "", "after_s": 0.0}
    return caught(lambda: join(timeout_s=3), RuntimeError)


def absent_rank_0_at_start():
    return absent_rank_at_start(absent=0)


def exit_without_destroy():
    """A script without destroy_process_group ends by itself, and the other ranks' work is done."""
    join(timeout_s=30)
    x = torch.ones(100)
    dist.all_reduce(x, async_op=True).get_future().then(lambda f: None).wait()
    return {"text": "", "after_s": 0.0}


def meta_tensor_is_refused():
    """A tensor that is neither in host memory nor on a CUDA device."""
    join(timeout_s=30)
    group = dist.group.WORLD._get_backend(torch.device("cpu"))
    error = caught(lambda: group.allreduce([torch.ones(3, device="meta")], dist.AllreduceOptions()), ValueError)
    works_again(list(range(WORLD)))
    return error


name = sys.argv[1]
outcome = globals()[name]()
report(name, ok=True, **outcome)
