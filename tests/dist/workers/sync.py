"""Cases, one per run: spccl.sync over a process group of torch. Rank 0 publishes, the others receive. With
SPCCL_TEST_DEVICE=cuda all have their models on GPUs.

Each rank makes the publisher's steps on a model of its own, and compares its bits with those.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist

import spccl

sys.path.append(str(Path(__file__).resolve().parents[2] / "py"))

from sync_runs import Net, change, state

from spccl.sync import Publisher, Subscriber, _staged
from workers.common import FOLDER, RANK, WORLD, main, raises

ON_GPU = os.environ.get("SPCCL_TEST_DEVICE") == "cuda"


def member(net: Net) -> Publisher | Subscriber:
    group = dist.group.WORLD
    if ON_GPU:
        torch.cuda.set_device(RANK % torch.cuda.device_count())
        net.cuda()
    if RANK == 0:
        return Publisher(group, net, wire_dtype=torch.bfloat16)
    return Subscriber(group, net.to(torch.bfloat16))


def step(one: Publisher | Subscriber) -> int:
    return one.publish() if RANK == 0 else one.apply()


def versions() -> None:
    """Three versions of float32 masters, by bfloat16. Frames of GPUs stay there, unless ranks share one."""
    net, want = Net(RANK), Net(0)
    one = member(net)
    seen, read = set(), _staged.read_frames
    _staged.read_frames = lambda blob, *args: (seen.add(blob.data.device.type), read(blob, *args))[1]
    for number in range(1, 4):
        assert step(one) == number == one.version == one.verify()
        assert state(net, torch.bfloat16) == state(want, torch.bfloat16)
        change(want, number)
        if RANK == 0:
            change(net, number)
    wanted = "cuda" if ON_GPU and torch.cuda.device_count() >= WORLD else "cpu"
    assert seen == (set() if RANK == 0 else {wanted}), seen


def killed_receiver() -> None:
    """The last rank is killed after all have staged. The others take nothing, and go on in a group without it."""
    net, want = Net(RANK), Net(0)
    one = member(net)
    assert step(one) == 1
    if RANK == 0:
        change(net, 1)
    before = state(net)
    if RANK == WORLD - 1:
        one.stage()
        os.kill(os.getpid(), signal.SIGKILL)
    with raises(spccl.PeerError, f"rank {RANK}: commit", f"rank {WORLD - 1} is gone", "version 2"):
        step(one)
    assert one.version == 1 and state(net) == before
    dist.destroy_process_group()
    dist.init_process_group("spccl", init_method=f"file://{FOLDER}/again", rank=RANK, world_size=WORLD - 1)
    one.regroup(dist.group.WORLD)
    assert step(one) == 2 == one.verify()
    change(want, 1)
    assert state(net, torch.bfloat16) == state(want, torch.bfloat16)


if __name__ == "__main__":
    main([versions, killed_receiver])
