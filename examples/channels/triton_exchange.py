"""triton_exchange.py - a Triton kernel that uses a channel of spccl.channels: put, signal and wait in one launch.

    python triton_exchange.py       # two ranks; one GPU is enough

Triton cannot call spccl_device.cuh, so `signal` and `wait` do what its functions do, with the addresses in the
channel's fields (docs/CHANNELS.md, Python). One program of one block uses a channel.
"""

import triton
import triton.language as tl

import spccl
from spccl.channels import Channels

N_ELEMS = 1024
N_LAUNCHES = 5
N_POLLS = 1 << 26  # the deadline of a wait, in looks at the signal


@triton.jit
def signal(state, peer_signals):
    """spccl_signal: all that the block stored before is there when the peer's wait returns."""
    sent = state.to(tl.pointer_type(tl.int64))
    number = tl.load(sent) + 1
    tl.debug_barrier()  # all threads have put, and have loaded the number
    tl.store(sent, number)
    tl.atomic_xchg(peer_signals.to(tl.pointer_type(tl.int64)), number, sem="release", scope="sys")


@triton.jit
def wait(state, signals, abort, n_polls):
    """spccl_wait. False: no signal came in n_polls looks, or this rank's waits were ended; then all of them end."""
    taken = state.to(tl.pointer_type(tl.int64)) + 1
    stop = abort.to(tl.pointer_type(tl.int32))
    wanted = tl.load(taken) + 1
    seen = wanted - 1
    left = n_polls
    while (seen < wanted) & (left > 0):
        seen = tl.atomic_add(signals.to(tl.pointer_type(tl.int64)), 0, sem="acquire", scope="sys")
        left -= 1
        if (left & 4095) == 0:  # it is in host memory: seldom
            left = tl.where(tl.load(stop, volatile=True) != 0, 0, left)
    came = seen >= wanted
    tl.debug_barrier()
    tl.store(taken, wanted, mask=came)
    tl.debug_barrier()  # all threads load it again
    return came


@triton.jit
def put(source, state, peer_window, n: tl.constexpr):
    """Store [n] float32 into the half of the peer's window whose turn it is: that of the next signal."""
    at = tl.arange(0, n)
    half = (tl.load(state.to(tl.pointer_type(tl.int64))) & 1) * n
    tl.store(peer_window.to(tl.pointer_type(tl.float32)) + half + at, tl.load(source + at))


@triton.jit
def take(out, state, window, came, n: tl.constexpr):
    """Copy what came with the last signal that was taken; zeros if none was."""
    at = tl.arange(0, n)
    half = ((tl.load(state.to(tl.pointer_type(tl.int64)) + 1) - 1) & 1) * n
    v = tl.load(window.to(tl.pointer_type(tl.float32)) + half + at, volatile=True)
    tl.store(out + at, tl.where(came, v, 0.0))


@triton.jit
def send(source, peer_window, state, peer_signals, n: tl.constexpr):
    """Put and signal."""
    put(source, state, peer_window, n)
    signal(state, peer_signals)


@triton.jit
def receive(out, window, state, signals, abort, n_polls, n: tl.constexpr):
    """Wait for the peer's signal, and copy what it put."""
    came = wait(state, signals, abort, n_polls)
    take(out, state, window, came, n)


@triton.jit
def exchange(source, out, window, peer_window, state, peer_signals, signals, abort, n_polls, n: tl.constexpr):
    """Swap [n] float32 with the peer: n is a power of two, a window has 8 * n bytes. source, out: tensors [n].

    Two halves of the windows take turns: who has the signal of a launch knows that the peer ended the launch before.
    """
    put(source, state, peer_window, n)
    signal(state, peer_signals)
    came = wait(state, signals, abort, n_polls)
    take(out, state, window, came, n)


def use(comm: spccl.Communicator) -> int:
    """Swap arrays with the peer some times. Returns the number of wrong elements."""
    import torch

    mine = torch.empty(N_ELEMS, dtype=torch.float32, device="cuda")
    theirs = torch.empty_like(mine)
    places = torch.arange(N_ELEMS, dtype=torch.float32, device="cuda")
    n_wrong = 0
    with Channels(comm, 2 * 4 * N_ELEMS) as channels:
        c = channels.memory_channel(1 - comm.rank)
        for launch in range(N_LAUNCHES):
            mine.copy_(places + 10000 * comm.rank + launch)
            exchange[(1,)](
                mine,
                theirs,
                c.base.window,
                c.peer_window,
                c.base.state,
                c.peer_signals,
                c.base.signals,
                c.base.abort,
                N_POLLS,
                N_ELEMS,
            )
            comm.wait_gpu(torch.cuda.current_stream().cuda_stream, 120)
            n_wrong += int((theirs != places + 10000 * (1 - comm.rank) + launch).sum())
    return n_wrong


def run(rank: int, unique_id: bytes) -> None:
    """One rank: a process."""
    import torch

    device = rank % torch.cuda.device_count()
    torch.cuda.set_device(device)
    with spccl.Communicator(rank, 2, unique_id=unique_id, timeout=120) as comm:
        comm.attach_gpu(device)
        n_wrong = use(comm)
    print(f"rank {rank}: {n_wrong} wrong of {N_LAUNCHES * N_ELEMS}", flush=True)
    if n_wrong != 0:
        raise SystemExit(1)


if __name__ == "__main__":
    import torch.multiprocessing

    torch.multiprocessing.spawn(run, (spccl.get_unique_id(),), nprocs=2)
