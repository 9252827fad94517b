"""What pruning between hosts saves on emulated hosts: bytes out of each, and the time of an exchange.

    python bench/host_exchange.py [--hosts 4] [--per-host 2] [--rate 100mbit] [--millions 2] [--csv FILE]

Each host is a network namespace behind a shaped link (root, iproute2). The ranks run `SparseSync` on one weight, first
with hosts="off", then "on"; each rank has a random gradient of its own. Bytes are those of the host's interface, with
all headers, in an exchange. Seconds are the median over exchanges of the slowest rank's time of step(), which with
hosts includes the average of gradients inside the host.
"""

import argparse
import csv
import multiprocessing
import os
import statistics
import tempfile
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from spccl.bench import hosts
from spccl.optim import SparseSync

EXCHANGES = 6  # the first one is not counted


def rank_main(args: argparse.Namespace, rank: int, names: list[str], folder: str, results) -> None:
    host = rank // args.per_host
    hosts.enter(names[host])
    torch.set_num_threads(1)
    n_ranks = args.per_host * len(names)
    dist.init_process_group(
        "spccl", init_method=f"file://{folder}/store", rank=rank, world_size=n_ranks, timeout=timedelta(seconds=300)
    )
    for mode in ("off", "on"):
        weight = torch.nn.Parameter(torch.zeros(args.millions * 1000, 1000))
        opt = SparseSync(torch.optim.SGD([weight], lr=1.0), density=args.density, hosts=mode, check_every=0)
        bytes_out, times = [], []
        for i in range(EXCHANGES):
            draw = torch.Generator().manual_seed(1000 * i + rank)
            weight.grad = torch.randn(weight.shape, generator=draw)
            dist.all_reduce(torch.zeros(1))
            before, began = hosts.counters(), time.perf_counter()
            opt.step()
            taken = torch.tensor([time.perf_counter() - began])
            dist.all_reduce(torch.zeros(1))
            if i > 0:
                bytes_out.append(hosts.counters().since(before).tx_bytes)
                dist.all_reduce(taken, op=dist.ReduceOp.MAX)
                times.append(taken.item())
        if rank == 0:
            results.put((mode, opt.stats()["pruning_ranks"], statistics.median(bytes_out), times))
    dist.destroy_process_group()


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--hosts", type=int, default=4)
    p.add_argument("--per-host", type=int, default=2)
    p.add_argument("--rate", default="100mbit")
    p.add_argument("--millions", type=int, default=2)
    p.add_argument("--density", type=float, default=0.01)
    p.add_argument("--csv", default="")
    args = p.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    with hosts.emulated(args.hosts, args.rate) as names, tempfile.TemporaryDirectory() as folder:
        ranks = [
            context.Process(target=rank_main, args=(args, rank, names, folder, results))
            for rank in range(args.hosts * args.per_host)
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        if any(process.exitcode for process in ranks):
            raise SystemExit("a rank failed")
    rows = []
    for mode, pruning, out, times in (results.get() for _ in range(2)):
        rows.append({
            "hosts": args.hosts, "per_host": args.per_host, "rate": args.rate, "parameters": args.millions * 1_000_000,
            "density": args.density, "mode": mode, "pruning_ranks": pruning, "bytes_out_of_host": round(out),
            "seconds": f"{statistics.median(times):.4f}", "least": f"{min(times):.4f}", "most": f"{max(times):.4f}",
        })  # fmt: skip
        print(rows[-1], flush=True)
    off, on = rows
    print(f"bytes on / off: {on['bytes_out_of_host'] / off['bytes_out_of_host']:.3f}; "
          f"time off / on: {float(off['seconds']) / float(on['seconds']):.2f}")  # fmt: skip
    if args.csv:
        with open(args.csv, "w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
