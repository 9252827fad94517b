"""Cases in which something goes wrong on a GPU. Each case has its own processes; argv[1] names the case."""

from __future__ import annotations

import os
import signal
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from gpu_common import DEVICE, start
from workers.common import RANK, WORLD, raises, report

LAST = WORLD - 1


def works_again(ranks: list[int], name: str) -> None:
    """Check that the GPU is usable and that a new group of `ranks` can be made."""
    x = torch.ones(1000, device=DEVICE)
    assert float((x * 2).sum()) == 2000.0
    dist.destroy_process_group()
    os.environ["RANK"], os.environ["WORLD_SIZE"] = str(ranks.index(RANK)), str(len(ranks))
    dist.init_process_group(
        "spccl",
        init_method=f"file://{os.environ['SPCCL_TEST_FOLDER']}/{name}",
        rank=ranks.index(RANK),
        world_size=len(ranks),
        timeout=timedelta(seconds=60),
    )
    dist.all_reduce(x)
    torch.cuda.synchronize()
    assert torch.equal(x, torch.full_like(x, len(ranks))), x[:3]
    dist.destroy_process_group()


def until_raised(call, seconds: float) -> tuple[str, float]:
    """Repeat `call` until it raises DistBackendError. Returns its text and the seconds that passed."""
    began = time.monotonic()
    while time.monotonic() < began + seconds:
        try:
            call()
        except dist.DistBackendError as error:
            return str(error), time.monotonic() - began
    raise AssertionError(f"nothing raised in {seconds} s")


def warm() -> torch.Tensor:
    x = torch.ones(1 << 20, device=DEVICE)
    dist.all_reduce(x)
    torch.cuda.synchronize()
    return x


def killed_peer() -> dict:
    start(timeout_s=60)
    x = warm()
    if RANK == LAST:
        os.kill(os.getpid(), signal.SIGKILL)

    def step():
        dist.all_reduce(x, async_op=True).wait()
        torch.cuda.synchronize()

    text, seconds = until_raised(step, 40)
    assert f"rank {LAST}" in text, text
    with raises(dist.DistBackendError, f"rank {LAST}"):
        dist.all_gather_into_tensor(torch.empty(WORLD * 8, device=DEVICE), torch.ones(8, device=DEVICE))
    works_again([r for r in range(WORLD) if r != LAST], "after")
    return {"text": text, "seconds": seconds}


def killed_peer_blocking_wait() -> dict:
    """SPCCL_BLOCKING_WAIT=1: the call that waits when the peer dies must raise."""
    start(timeout_s=60)
    x = warm()
    if RANK == LAST:
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    text, _ = until_raised(lambda: dist.all_reduce(x), 40)
    assert f"rank {LAST}" in text, text
    works_again([r for r in range(WORLD) if r != LAST], "after")
    return {"text": text, "seconds": time.monotonic() - began}


def aborted() -> dict:
    """One rank calls abort() while the others' kernels wait for it."""
    start(timeout_s=60)
    x = warm()
    began = time.monotonic()
    if RANK == 0:
        time.sleep(0.5)
        dist.group.WORLD.abort()
        text = "abort"
    else:
        dist.all_reduce(x, async_op=True).wait()
        torch.cuda.synchronize()
        text, _ = until_raised(lambda: dist.all_reduce(x), 20)
        assert "abort" in text.lower(), text
    seconds = time.monotonic() - began
    works_again(list(range(WORLD)), "after")
    return {"text": text, "seconds": seconds}


def missing_rank() -> dict:
    """One rank never calls. The deadline ends the kernels of the others, and the error names the missing rank."""
    start(timeout_s=4)
    x = warm()
    began = time.monotonic()
    if RANK == LAST:
        time.sleep(8)
        text = "was late"
    else:
        work = dist.all_reduce(x, async_op=True)
        text, _ = until_raised(lambda: work.wait(timedelta(seconds=20)), 20)
        assert f"rank {LAST}" in text, text
    seconds = time.monotonic() - began
    time.sleep(max(0.0, 9 - seconds))
    works_again(list(range(WORLD)), "after")
    return {"text": text, "seconds": seconds}


def short_wait() -> dict:
    """A wait with a short timeout raises. The work goes on, and a second wait succeeds."""
    start(timeout_s=60)
    x = warm()
    began = time.monotonic()
    if RANK == LAST:
        time.sleep(2)
        dist.all_reduce(x)
        text = "was late"
    else:
        work = dist.all_reduce(x, async_op=True)
        text, _ = until_raised(lambda: work.wait(timedelta(milliseconds=300)), 1)
        assert not work.is_completed()
        work.wait()
    torch.cuda.synchronize()
    assert torch.equal(x, torch.full_like(x, float(WORLD * WORLD)))
    dist.destroy_process_group()
    return {"text": text, "seconds": time.monotonic() - began}


def other_limit() -> dict:
    """Ranks that limit a collective to different numbers of thread blocks fail, and the error names the numbers."""
    from spccl import backend

    start(timeout_s=60)
    x = warm()
    began = time.monotonic()
    with backend.limit_ctas(1 if RANK == LAST else 2):
        work = dist.all_reduce(x, async_op=True)
    text, _ = until_raised(lambda: work.wait(timedelta(seconds=20)), 20)
    seconds = time.monotonic() - began
    time.sleep(1)  # a rank that leaves at once would be taken for dead
    works_again(list(range(WORLD)), "after")
    return {"text": text, "seconds": seconds}


def one_without_engine() -> dict:
    if RANK == LAST:
        os.environ["SPCCL_CUDA_ROUTE"] = "stage"
    return fallback()


def fallback() -> dict:
    """Without the GPU engine the same calls go through host memory, or to NCCL."""
    from spccl import backend

    start(timeout_s=60)
    x = torch.full((5000,), float(RANK + 1), device=DEVICE)
    dist.all_reduce(x)
    out = torch.empty(WORLD * 5000, device=DEVICE)
    dist.all_gather_into_tensor(out, torch.full((5000,), float(RANK), device=DEVICE), async_op=True).wait()
    part = torch.empty(5000, device=DEVICE)
    dist.reduce_scatter_tensor(part, out)
    flags = torch.tensor([RANK == 0, True], device=DEVICE)
    dist.all_reduce(flags, dist.ReduceOp.MIN)
    dist.broadcast(flags, LAST)
    coo = torch.eye(3, device=DEVICE).to_sparse_coo()
    dist.all_reduce(coo)
    dist.barrier()
    torch.cuda.synchronize()
    assert torch.equal(x, torch.full_like(x, float(sum(range(1, WORLD + 1)))))
    assert [int(v) for v in out[::5000]] == list(range(WORLD))
    assert torch.equal(part, torch.full_like(part, float(WORLD * RANK)))
    assert flags.tolist() == [WORLD == 1, True]
    assert torch.equal(coo.to_dense(), WORLD * torch.eye(3, device=DEVICE))
    stats = backend.cuda_stats()
    dist.destroy_process_group()
    return {"text": f"{stats.path}: {stats.why}", "seconds": 0.0}


if __name__ == "__main__":
    name = sys.argv[1]
    facts = globals()[name]()
    report(name, ok=True, **facts)
