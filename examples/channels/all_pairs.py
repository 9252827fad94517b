"""all_pairs.py - the kernels of this folder from Python, with spccl.channels: the all-reduce with packets over memory
channels, and the ring over port channels. No torch: ctypes calls the kernels' launchers and the CUDA runtime.

    nvcc -shared -Xcompiler -fPIC -cudart shared -o kernels.so all_pairs_kernel.cu ring_kernel.cu \
        -I$(python -c "import spccl.channels; print(spccl.channels.include_dir())")
    CUDA_MODULE_LOADING=EAGER CUDA_DEVICE_MAX_CONNECTIONS=32 python all_pairs.py ./kernels.so 2

Arguments: the library with the kernels; the number of ranks (by default 2). Ranks are threads, rank r on GPU r modulo
their number; processes work in the same way.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from ctypes import POINTER, byref, c_int, c_size_t, c_uint64, c_void_p

import spccl
from spccl.channels import Channels, MemoryChannel, PortChannel

N_ELEMS = 4096  # 16 KiB
N_LAUNCHES = 3
BLOCK_BYTES = 4096
RANKS_MAX = 8
BLOCKS_MAX = 32
TO_GPU, FROM_GPU = 1, 2


class AllPairsJob(ctypes.Structure):
    """struct all_pairs_job."""

    _fields_ = (
        ("in_", c_void_p),
        ("out", c_void_p),
        ("n_elems", c_uint64),
        ("rank", c_int),
        ("world_size", c_int),
        ("uses", c_void_p),
    )


class RingJob(ctypes.Structure):
    """struct ring_job."""

    _fields_ = (
        ("block", c_void_p),
        ("out", c_void_p),
        ("block_bytes", c_uint64),
        ("world_size", c_int),
    )


class Gpu:
    """One rank's GPU: its stream, and what it allocated."""

    def __init__(self, library: ctypes.CDLL, device: int) -> None:
        self._library = library
        self.call("cudaSetDevice", c_int(device))
        self.stream = c_void_p()
        self.call("cudaStreamCreateWithFlags", byref(self.stream), c_int(1))

    def call(self, name: str, *args: object) -> None:
        """Call a function that returns a cudaError_t."""
        error = getattr(self._library, name)(*args)
        if error != 0:
            raise RuntimeError(f"{name}: CUDA error {error}")

    def memory(self, n_bytes: int) -> int:
        """GPU memory, zeroed."""
        address = c_void_p()
        self.call("cudaMalloc", byref(address), c_size_t(n_bytes))
        self.call("cudaMemsetAsync", address, c_int(0), c_size_t(n_bytes), self.stream)
        return address.value or 0

    def pinned(self, n_bytes: int) -> int:
        """Pinned memory: a copy to other memory may wait for kernels of other ranks."""
        address = c_void_p()
        self.call("cudaHostAlloc", byref(address), c_size_t(n_bytes), c_int(1))
        return address.value or 0

    def copy(self, to: int, source: int, n_bytes: int, kind: int) -> None:
        self.call("cudaMemcpyAsync", c_void_p(to), c_void_p(source), c_size_t(n_bytes), c_int(kind), self.stream)


def window_bytes(n_elems: int, n_ranks: int) -> int:
    """ALL_PAIRS_WINDOW_BYTES: the window of an all-reduce of n_elems float32."""
    return 2 * n_ranks * (n_elems // 2) * 16


def to_peers(channels: Channels, comm: spccl.Communicator) -> ctypes.Array[MemoryChannel]:
    """Channel number 0 to each peer, by rank."""
    to = (MemoryChannel * RANKS_MAX)()
    for peer in range(comm.world_size):
        if peer != comm.rank:
            to[peer] = channels.memory_channel(peer)
    return to


def all_reduce(comm: spccl.Communicator, gpu: Gpu) -> int:
    """Add arrays over all ranks by one kernel. Returns the number of wrong elements."""
    n, rank, n_bytes, n_wrong = comm.world_size, comm.rank, 4 * N_ELEMS, 0
    host = gpu.pinned(n_bytes)
    x = (ctypes.c_float * N_ELEMS).from_address(host)
    job = AllPairsJob(gpu.memory(n_bytes), gpu.memory(n_bytes), N_ELEMS, rank, n, gpu.memory(4 * BLOCKS_MAX))
    with Channels(comm, window_bytes(N_ELEMS, n)) as channels:
        to = to_peers(channels, comm)
        for launch in range(N_LAUNCHES):
            x[:] = [float((rank + 1) * (i % 100) + launch) for i in range(N_ELEMS)]
            gpu.copy(job.in_, host, n_bytes, TO_GPU)
            gpu.call("all_pairs_all_reduce", to, byref(job), gpu.stream)
            gpu.copy(host, job.out, n_bytes, FROM_GPU)
            comm.wait_gpu(gpu.stream.value or 0)  # also raises what a wait of the kernel failed with
            wanted = [float(n * (n + 1) // 2 * (i % 100) + n * launch) for i in range(N_ELEMS)]
            n_wrong += sum(a != b for a, b in zip(x, wanted, strict=True))
    return n_wrong


def all_gather(comm: spccl.Communicator, gpu: Gpu) -> int:
    """Gather a block of each rank around the ring, by port channels. Returns the number of wrong bytes."""
    n, rank = comm.world_size, comm.rank
    host = gpu.pinned(n * BLOCK_BYTES)
    x = (ctypes.c_uint8 * (n * BLOCK_BYTES)).from_address(host)
    x[:BLOCK_BYTES] = [50 * rank + i % 40 + 1 for i in range(BLOCK_BYTES)]
    job = RingJob(gpu.memory(BLOCK_BYTES), gpu.memory(n * BLOCK_BYTES), BLOCK_BYTES, n)
    with Channels(comm, 4 * BLOCK_BYTES, kind="port", n_per_peer=2) as channels:
        following = channels.port_channel((rank + 1) % n, int(rank + 1 == n))
        previous = channels.port_channel((rank - 1) % n, int(rank == 0))
        gpu.copy(job.block, host, BLOCK_BYTES, TO_GPU)
        gpu.call("ring_all_gather_port", following, previous, byref(job), gpu.stream)
        gpu.copy(host, job.out, n * BLOCK_BYTES, FROM_GPU)
        comm.wait_gpu(gpu.stream.value or 0)
    return sum(x[r * BLOCK_BYTES + i] != 50 * r + i % 40 + 1 for r in range(n) for i in range(BLOCK_BYTES))


def load(path: str) -> tuple[ctypes.CDLL, int]:
    """The library, and the number of GPUs."""
    library = ctypes.CDLL(path)
    library.all_pairs_all_reduce.argtypes = [POINTER(MemoryChannel), POINTER(AllPairsJob), c_void_p]
    library.ring_all_gather_port.argtypes = [PortChannel, PortChannel, POINTER(RingJob), c_void_p]
    n_gpus = c_int()
    if library.cudaGetDeviceCount(byref(n_gpus)) != 0 or n_gpus.value == 0:
        sys.exit("no GPU")
    return library, n_gpus.value


def main() -> None:
    library, n_gpus = load(sys.argv[1])
    n_ranks = int(sys.argv[2]) if len(sys.argv) > 2 else 2
    unique_id, failed = spccl.get_unique_id(), []

    def run(rank: int) -> None:
        try:
            gpu = Gpu(library, rank % n_gpus)
            with spccl.Communicator(rank, n_ranks, unique_id=unique_id, timeout=60) as comm:
                comm.attach_gpu(rank % n_gpus)
                n_wrong = all_reduce(comm, gpu), all_gather(comm, gpu)
            print(f"rank {rank}: all-reduce {n_wrong[0]} wrong, ring {n_wrong[1]} wrong", flush=True)
            failed.extend([rank] * (sum(n_wrong) != 0))
        except Exception as error:
            print(f"rank {rank}: {type(error).__name__}: {error}", flush=True)
            failed.append(rank)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(n_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
