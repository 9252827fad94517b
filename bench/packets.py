"""All-reduces of 1 KiB to 64 KiB: with packets, by the kernel of examples/channels, against NCCL in the same run.

    torchrun --nproc-per-node 4 bench/packets.py [--csv FILE]       2, 4 or 8 ranks of one host, one on each GPU

Elements are float32. `nccl_symm` is NCCL with its registered symmetric windows. The systems take turns. `graph`: a CUDA
graph of 20 calls. `eager`: 20 calls from Python, so the host's time for a call is in it. The time between two CUDA
events is divided by 20; of each round the slowest rank counts. Before the first event an untimed call lines the GPUs
up. Each row has median, least and most of the rounds. Every result of every round is compared with the exact sum: a
wrong element ends the program with status 1. First nvcc, on PATH or in /usr/local/cuda/bin, compiles the kernel.
If there are more ranks than GPUs, ranks share them. Then NCCL is left out, and times only show that the program works.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import ctypes
import datetime
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

import spccl
from spccl.bench import gpu_torch
from spccl.channels import Channels, include_dir

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "channels"
sys.path.insert(0, str(EXAMPLE))
import all_pairs  # noqa: E402

KIB = (1, 2, 4, 8, 16, 32, 64)
CALLS, TIMEOUT_S = 20, 60
COLUMNS = ("size_bytes", "how", "system", "median_us", "least_us", "most_us", "wrong")


class System(NamedTuple):
    """`call` adds the `source` of all ranks up in `target`. It is in place if they are one tensor.

    kept: memory that `call` uses.
    """

    name: str
    source: torch.Tensor
    target: torch.Tensor
    call: Callable[[], object]
    kept: object = None

    def fill(self, rank: int, turn: int) -> None:
        """Write the input of a turn: whole numbers, which float32 adds exactly. An element that no call
        writes is a NaN."""
        self.target.fill_(float("nan"))
        self.source.copy_(counted(self.source) * (rank + 1) + turn)

    def wrong(self, n_ranks: int, turn: int) -> int:
        """Number of wrong elements after 1 + CALLS calls. In place, each call but the first multiplies by n_ranks, a
        power of two: float32 still holds the result exactly."""
        wanted = counted(self.target) * (n_ranks * (n_ranks + 1) // 2) + n_ranks * turn
        if self.target is self.source:
            wanted *= float(n_ranks) ** CALLS
        return int((self.target != wanted).sum())


def counted(like: torch.Tensor) -> torch.Tensor:
    return torch.arange(like.numel(), device=like.device, dtype=torch.float32) % 100


class Bench:
    """One rank's part of the measurement."""

    def __init__(self, comm: spccl.Communicator, library: ctypes.CDLL, peers: dict[str, tuple], rounds: int) -> None:
        """peers: of NCCL, by name: a group, and memory for the largest array."""
        self.comm, self.clock = comm, gpu_torch.CudaClock()
        self._library, self._peers, self._rounds = library, peers, rounds

    def systems(self, n_elems: int, channels: Channels) -> list[System]:
        """All systems, packets first."""
        source, target = torch.zeros(2, n_elems, device="cuda")
        uses = torch.zeros(all_pairs.BLOCKS_MAX, dtype=torch.int32, device="cuda")
        to = all_pairs.to_peers(channels, self.comm)
        pointers = source.data_ptr(), target.data_ptr()
        job = all_pairs.AllPairsJob(*pointers, n_elems, self.comm.rank, self.comm.world_size, uses.data_ptr())

        def call() -> None:
            stream = torch.cuda.current_stream().cuda_stream
            error = self._library.all_pairs_all_reduce(to, ctypes.byref(job), stream)
            if error != 0:
                raise RuntimeError(f"all_pairs_all_reduce: CUDA error {error}")

        systems = [System("packets", source, target, call, uses)]
        for name, (group, memory) in self._peers.items():
            x = memory[:n_elems]
            systems.append(System(name, x, x, lambda x=x, group=group: dist.all_reduce(x, group=group)))
        return systems

    def run(self, n_elems: int) -> dict[tuple[str, str], tuple[list[float], int]]:
        """Of each way and system: us of a call in each round, and the number of wrong elements."""
        with contextlib.ExitStack() as stack:
            channels = stack.enter_context(Channels(self.comm, all_pairs.window_bytes(n_elems, self.comm.world_size)))
            trials = {}
            for system in self.systems(n_elems, channels):
                trials["eager", system.name] = system, repeated(system.call)
                replay = stack.enter_context(self.clock.captured(repeated(system.call)))
                trials["graph", system.name] = system, replay
            results: dict[tuple[str, str], tuple[list[float], int]] = {key: ([], 0) for key in trials}
            for turn in range(1 + self._rounds):  # the first turn warms up
                for key in list(trials) if turn % 2 else reversed(trials):
                    us, n_wrong = self._turn(*trials[key], turn, head_start=key[0] == "graph")
                    times, n_before = results[key]
                    results[key] = times + [us] * (turn > 0), n_before + n_wrong
            return results

    def _turn(self, system: System, run: Callable[[], object], turn: int, head_start: bool) -> tuple[float, int]:
        """Microseconds of a call, and the number of wrong elements."""
        system.fill(self.comm.rank, turn)
        if head_start:
            self.clock.let_host_run_ahead(2)  # the graph is launched before the GPU comes to it
        system.call()
        start = self.clock.mark()
        run()
        end = self.clock.mark()
        self.comm.wait_gpu(torch.cuda.current_stream().cuda_stream, TIMEOUT_S)
        return 1e6 * self.clock.seconds(start, end) / CALLS, system.wrong(self.comm.world_size, turn)


def repeated(call: Callable[[], object]) -> Callable[[], None]:
    def run() -> None:
        for _ in range(CALLS):
            call()

    return run


def compiled(folder: str) -> str:
    """Compile the kernels of examples/channels for this GPU. cudart is shared: torch has loaded it."""
    nvcc = shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")
    if nvcc is None:
        raise FileNotFoundError("no nvcc on PATH or in /usr/local/cuda/bin")
    major, minor = torch.cuda.get_device_capability()
    library = f"{folder}/kernels.so"
    flags = ["-shared", "-Xcompiler", "-fPIC", "-cudart", "shared", f"-arch=sm_{major}{minor}", f"-I{include_dir()}"]
    sources = [str(EXAMPLE / f"{name}_kernel.cu") for name in ("all_pairs", "ring")]
    done = subprocess.run([nvcc, *flags, "-o", library, *sources], capture_output=True, text=True, timeout=50)
    if done.returncode != 0:
        raise RuntimeError(f"nvcc: exit status {done.returncode}\n{done.stdout}{done.stderr}")
    return library


def nccl_peers(stack: contextlib.ExitStack, timeout: datetime.timedelta) -> dict[str, tuple]:
    """NCCL's groups, with memory for the largest array. All ranks get the same."""
    n_bytes = 1024 * max(KIB)
    peers = {"nccl": (dist.group.WORLD, torch.zeros(n_bytes // 4, device="cuda"))}
    dist.all_reduce(peers["nccl"][1])  # makes the connections
    symmetric, why = gpu_torch.symmetric_group(timeout, n_bytes, n_bytes)
    if symmetric is None:
        print(f"rank {dist.get_rank()}: nccl_symm is left out: {why}", flush=True)
        return peers
    # After an error the other ranks may not come to close(), which would wait for them.
    stack.push(lambda kind, *_: symmetric.close() if kind is None else None)
    return peers | {"nccl_symm": (symmetric.group, symmetric.target.view(torch.float32))}


def rows_of(size: int, results: dict[tuple[str, str], tuple[list[float], int]]) -> list[tuple]:
    """Rows with COLUMNS: of the slowest rank in each round."""
    times = torch.tensor([times for times, _ in results.values()], dtype=torch.float64)
    wrong = torch.tensor([n_wrong for _, n_wrong in results.values()])
    dist.all_reduce(times, dist.ReduceOp.MAX)
    dist.all_reduce(wrong)
    return [
        (size, *key, statistics.median(us), min(us), max(us), n_wrong)
        for key, us, n_wrong in zip(results, times.tolist(), wrong.tolist(), strict=True)
    ]


def write_csv(path: Path, facts: str, rows: list[tuple]) -> None:
    with path.open("w", newline="") as file:
        file.write(f"# {facts}, commit: {os.environ.get('SPCCL_COMMIT', 'unknown')}\n")
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        writer.writerows([*row[:3], *(f"{us:.2f}" for us in row[3:6]), row[6]] for row in rows)


def measured(rounds: int, shared: bool) -> list[tuple]:
    """The rows of all sizes. Rank 0 prints them. shared: ranks share GPUs."""
    rank, n_ranks = dist.get_rank(), dist.get_world_size()
    timeout = datetime.timedelta(seconds=TIMEOUT_S)
    with contextlib.ExitStack() as stack:
        start = [None, None]
        if rank == 0:
            start = [compiled(stack.enter_context(tempfile.TemporaryDirectory())), spccl.get_unique_id()]
        dist.broadcast_object_list(start, 0, device=torch.device("cpu"))
        library, _ = all_pairs.load(start[0])
        stack.enter_context(torch.cuda.stream(torch.cuda.Stream()))
        peers = {} if shared else nccl_peers(stack, timeout)
        comm = stack.enter_context(spccl.Communicator(rank, n_ranks, unique_id=start[1], timeout=timeout))
        comm.attach_gpu(torch.cuda.current_device())
        bench, rows = Bench(comm, library, peers, rounds), []
        for kib in KIB:
            news = rows_of(1024 * kib, bench.run(256 * kib))
            rows += news
            for size, how, name, us, least, most, n_wrong in news if rank == 0 else ():
                print(
                    f"{size:6d} B, {how}, {name:9s} {us:8.2f} us ({least:.2f} to {most:.2f}), {n_wrong} wrong",
                    flush=True,
                )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--csv", type=Path, help="file for the results")
    parser.add_argument("--rounds", type=int, default=21, help="default 21; where ranks share GPUs: few")
    args = parser.parse_args()
    if args.rounds < 1:
        parser.error(f"--rounds {args.rounds}: wanted 1 or more")
    if "LOCAL_WORLD_SIZE" not in os.environ:
        parser.error("start it with torchrun: LOCAL_WORLD_SIZE is not set")
    rank, n_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if n_ranks not in (2, 4, 8) or n_ranks != int(os.environ["LOCAL_WORLD_SIZE"]):
        parser.error(f"wanted 2, 4 or 8 ranks of one host; got {n_ranks} ranks, here {os.environ['LOCAL_WORLD_SIZE']}")
    n_gpus = torch.cuda.device_count()
    if n_gpus == 0:
        parser.error(f"torch {torch.__version__} sees no GPU")
    shared = n_gpus < n_ranks
    torch.cuda.set_device(rank % n_gpus)
    timeout = datetime.timedelta(seconds=TIMEOUT_S)
    dist.init_process_group("gloo" if shared else "cpu:gloo,cuda:nccl", timeout=timeout)
    nccl = "left out" if shared else ".".join(map(str, torch.cuda.nccl.version()))
    settings = "".join(f", {k}={v}" for k, v in sorted(os.environ.items()) if k.startswith("NCCL_"))
    facts = f"gpu: {n_ranks} ranks on {min(n_gpus, n_ranks)} x {torch.cuda.get_device_name()}, nccl: {nccl}{settings}"
    facts += f", torch: {torch.__version__}, float32 all-reduce, {args.rounds} rounds of {CALLS} calls"
    if rank == 0:
        print(facts + (": ranks share GPUs, so the times say nothing" if shared else ""), flush=True)
    rows = measured(args.rounds, shared)
    if rank == 0 and args.csv:
        write_csv(args.csv, facts, rows)
    dist.barrier()
    dist.destroy_process_group()
    n_wrong = sum(row[-1] for row in rows)
    if n_wrong:
        sys.exit(f"rank {rank}: {n_wrong} wrong elements")


if __name__ == "__main__":
    main()
