"""spccl.channels over GPUs in software: what its structs hold, memories of the caller, signals, refusals.

Run with the library of such a build and the number of ranks. Kernels run in examples/channels/all_pairs.py. Here Python
is the kernel: memory of the software GPU is memory of this process, so a channel's fields are used by address.
"""

from __future__ import annotations

import ctypes
import sys
import threading
import time

import spccl
from spccl.channels import LAYOUT, Channels, ChannelState

CUDA = ctypes.CDLL(sys.argv[1])


def gpu_memory(n_bytes: int) -> int:
    address = ctypes.c_void_p()
    assert CUDA.cudaMalloc(ctypes.byref(address), ctypes.c_size_t(n_bytes)) == 0
    return address.value


def new_stream() -> int:
    stream = ctypes.c_void_p()
    assert CUDA.cudaStreamCreateWithFlags(ctypes.byref(stream), 1) == 0
    return stream.value


def refused(error: type[Exception], text: str, fn, *args, **options) -> None:
    try:
        fn(*args, **options)
    except error as found:
        assert text in str(found), f"{found!r}: wanted {text!r}"
    else:
        raise AssertionError(f"not refused: {text}")


def word(address: int) -> ctypes.c_uint64:
    return ctypes.c_uint64.from_address(address)


def exchange(comm: spccl.Communicator, channels: Channels, memory: int) -> None:
    """Signal every peer through the fields of its channel, and take its signal."""
    for peer in range(comm.world_size):
        if peer != comm.rank:
            c = channels.memory_channel(peer, 1, peer_memory=memory)
            word(c.peer_window + 8 * comm.rank).value = 100 + comm.rank
            state = ChannelState.from_address(c.base.state)
            state.signals_sent += 1
            word(c.peer_signals).value = state.signals_sent
    for peer in range(comm.world_size):
        if peer != comm.rank:
            c = channels.memory_channel(peer, 1, own_memory=memory)
            until = time.monotonic() + 60
            while word(c.base.signals).value < 1:
                assert time.monotonic() < until, f"no signal of rank {peer}"
            assert word(c.base.window + 8 * peer).value == 100 + peer


def check_fields(comm: spccl.Communicator, channels: Channels, own: int) -> None:
    peer = (comm.rank + 1) % comm.world_size
    c = channels.memory_channel(peer, 1)
    assert (c.base.layout, c.base.index, c.base.rank, c.base.peer) == (LAYOUT, 1, comm.rank, peer)
    assert c.base.window == channels.window.device and channels.window.host == 0
    assert c.base.window_bytes == c.base.peer_bytes == channels.window.n_bytes == 256
    assert c.base.timeout_ns == 60 * 10**9
    added = channels.memory_channel(peer, 1, peer_memory=1, own_memory=1)
    assert added.base.window == own and added.base.state == c.base.state and added.peer_signals == c.peer_signals
    refused(spccl.ArgumentError, "the set has memory channels", channels.port_channel, peer)
    refused(spccl.ArgumentError, "wanted 0 to 1", channels.memory_channel, peer, 2)
    refused(spccl.ArgumentError, "memory 2 of channel 0", channels.memory_channel, peer, own_memory=2)
    refused(spccl.ArgumentError, "wanted another rank", channels.memory_channel, comm.rank)


def check_rank(comm: spccl.Communicator) -> None:
    refused(spccl.StateError, "spccl_cuda_attach", Channels, comm, 64)
    assert CUDA.cudaSetDevice(comm.rank % 4) == 0
    comm.attach_gpu(comm.rank % 4)
    refused(spccl.ArgumentError, "config.window_bytes is 40", Channels, comm, 40)
    own = gpu_memory(128)
    with Channels(comm, 256, n_per_peer=2) as channels:
        refused(spccl.ArgumentError, "without n_bytes", channels.add_memory, own)
        refused(spccl.ArgumentError, "is not memory of GPU", channels.add_memory, ctypes.addressof(LAYOUT_WORDS), 64)
        assert channels.add_memory(own, 128) == 1
        check_fields(comm, channels, own)
        exchange(comm, channels, 1)
        comm.wait_gpu(new_stream())
    assert channels.closed
    refused(spccl.StateError, "they are closed", channels.memory_channel, (comm.rank + 1) % comm.world_size)
    ports = Channels(comm, 64, kind="port")  # the communicator closes it
    assert ports.window.host != 0
    refused(spccl.ArgumentError, "are not pinned host memory", ports.add_memory, own, 128)
    peer = (comm.rank + 1) % comm.world_size
    comm.close()
    assert ports.closed
    ports.close()
    refused(spccl.StateError, "closed", ports.port_channel, peer)


LAYOUT_WORDS = (ctypes.c_uint64 * 18)()  # host memory


def main() -> None:
    n_ranks, unique_id, failed = int(sys.argv[2]), spccl.get_unique_id(), []

    def run(rank: int) -> None:
        try:
            with spccl.Communicator(rank, n_ranks, unique_id=unique_id, timeout=60) as comm:
                check_rank(comm)
        except BaseException as error:
            failed.append(f"rank {rank}: {type(error).__name__}: {error}")

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(n_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sys.exit("\n".join(failed) or 0)


if __name__ == "__main__":
    main()
