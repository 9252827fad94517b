"""The Triton kernels of examples/channels over GPUs in software; Triton interprets them (TRITON_INTERPRET=1).

Run with the library of such a build. It catches wrong fields, places of counts and halves of a window; not the order of
memory accesses. The interpreter runs one kernel at a time, so a rank's send and receive are two launches here. Without
torch or Triton the exit status is 77.
"""

from __future__ import annotations

import ctypes
import sys
import threading

try:
    import torch
    import triton  # noqa: F401
except ImportError as error:
    print(f"skipped: {error}")
    sys.exit(77)

import triton_exchange as kernels

import spccl
from spccl.channels import Channels, ChannelState, MemoryChannel

CUDA = ctypes.CDLL(sys.argv[1])
N_ELEMS = 256
interpreter, both = threading.Lock(), threading.Barrier(2, timeout=60)


def receive(c: MemoryChannel, n_polls: int) -> torch.Tensor:
    out = torch.full((N_ELEMS,), -1.0)
    b = c.base
    with interpreter:
        kernels.receive[(1,)](out, b.window, b.state, b.signals, b.abort, n_polls, N_ELEMS)
    return out


def use(rank: int, c: MemoryChannel) -> None:
    for launch in range(3):
        x = torch.arange(N_ELEMS, dtype=torch.float32) + 1000 * rank + 7 * launch
        with interpreter:
            kernels.send[(1,)](x, c.peer_window, c.base.state, c.peer_signals, N_ELEMS)
        both.wait()
        wanted = torch.arange(N_ELEMS, dtype=torch.float32) + 1000 * (1 - rank) + 7 * launch
        assert torch.equal(receive(c, 1000), wanted), launch
    both.wait()
    if rank == 0:  # no signal comes: the kernel ends, and ends all waits of this rank
        stop = ctypes.c_uint32.from_address(c.base.abort)
        assert stop.value == 0 and not receive(c, 50).any() and stop.value == 1
        assert ChannelState.from_address(c.base.state).signals_taken == 3
        stop.value = 0
    both.wait()


def main() -> None:
    unique_id, failed = spccl.get_unique_id(), []

    def run(rank: int) -> None:
        try:
            assert CUDA.cudaSetDevice(rank) == 0
            with spccl.Communicator(rank, 2, unique_id=unique_id, timeout=60) as comm:
                comm.attach_gpu(rank)
                with Channels(comm, 2 * 4 * N_ELEMS) as channels:
                    use(rank, channels.memory_channel(1 - rank))
        except BaseException as error:
            both.abort()
            failed.append(f"rank {rank}: {type(error).__name__}: {error}")

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sys.exit("\n".join(failed) or 0)


if __name__ == "__main__":
    main()
