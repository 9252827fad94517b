"""Weight sync over a group on emulated hosts: a trainer and receivers, beside a dense broadcast of Gloo.

    python bench/weight_sync.py [--rates 1gbit 10gbit] [--megabytes 256 1000] [--changed 0.01] [--values raw|adam]

Each rank is a host of its own: a network namespace behind a shaped link (root, iproute2). The weights are bfloat16
matrices of 4096 columns. Each round changes some of them at random places: to random bits (raw), or by one in the last
place (adam: what most steps of Adam do). Then the trainer publishes, the receivers apply, and Gloo broadcasts the same
weights. Each time is that of the slowest rank, the median over rounds; it has everything from comparing the weights to
the last receiver's last write. Times of stages are of the slowest rank, in brackets CPU time. `wire` is the time of the
sent bytes at the link's measured rate. `floor` is encode, wire, check and commit with a core for each rank: CPU time of
the busiest rank, which is the time without other work on the machine.
"""

import argparse
import multiprocessing
import os
import statistics
import tempfile
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from spccl import Communicator
from spccl.bench import hosts
from spccl.sync import Publisher, Subscriber

COLUMNS = 4096


def change(flat: torch.Tensor, share: float, values: str, seed: int) -> None:
    """Change the bits of a share of the elements, each place once."""
    random = torch.Generator().manual_seed(seed)
    bits, part = flat.view(torch.int16), 1 << 22
    for first in range(0, bits.numel(), part):
        some = bits[first : first + part]
        places = (torch.rand(some.numel(), generator=random) < share).nonzero()[:, 0]
        n = places.numel()
        if values == "raw":
            step = torch.randint(1, 1 << 15, (n,), generator=random, dtype=torch.int16)
        else:
            step = torch.randint(0, 2, (n,), generator=random, dtype=torch.int16) * 2 - 1
        some[places] += step


class Times:
    """Seconds of a rank by name, of each round; with "-cpu": of its processor."""

    def __init__(self) -> None:
        self.rounds: list[dict[str, float]] = []

    def timed(self, name: str, call):
        def run(*args, **kwargs):
            began, cpu = time.perf_counter(), time.process_time()
            try:
                return call(*args, **kwargs)
            finally:
                row = self.rounds[-1]
                row[name] = row.get(name, 0.0) + time.perf_counter() - began
                row[f"{name}-cpu"] = row.get(f"{name}-cpu", 0.0) + time.process_time() - cpu

        return run


def one_size(args: argparse.Namespace, rank: int, comm: Communicator, megabytes: int) -> dict:
    n_rows = megabytes * 1_000_000 // 2 // COLUMNS
    flat = torch.empty(n_rows * COLUMNS, dtype=torch.bfloat16)
    flat.view(torch.int16).random_(-(1 << 15), 1 << 15, generator=torch.Generator().manual_seed(1))
    flat.nan_to_num_()
    tensors = {f"w{i}": x for i, x in enumerate(flat.view(n_rows, COLUMNS).split(4096))}
    times = Times()
    if rank == 0:
        one = Publisher(comm, tensors)
        step = one.publish
        one._write = times.timed("encode", one._write)
        one._advance_group = times.timed("base", one._advance_group)
    else:
        one = Subscriber(comm, tensors)
        step = one.apply
        one._stage = times.timed("check", one._stage)
        one.commit = times.timed("commit", one.commit)
    rows = []
    times.rounds.append({})
    step()
    for number in range(args.rounds + 1):
        if rank == 0:
            change(flat, args.changed, args.values, number)
        times.rounds.append({})
        dist.barrier()
        sent, began = comm.stats().wire_bytes_sent, time.perf_counter()
        step()
        ours = time.perf_counter() - began - times.rounds[-1].get("base", 0.0)
        sent = comm.stats().wire_bytes_sent - sent
        dist.barrier()
        began = time.perf_counter()
        if number % args.dense_every == 0:
            dist.broadcast(flat, 0)
        gloo = time.perf_counter() - began
        row = {"ours": ours, "gloo": gloo, "sent": float(sent), **times.rounds[-1]}
        everyone: list = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, row)
        if number > 0:  # the first one touches new memory
            rows.append({k: max(r.get(k, 0.0) for r in everyone) for k in {k for r in everyone for k in r}})
    one.verify()
    result = {k: statistics.median(row[k] for row in rows) for k in rows[0] if k != "gloo"}
    result["gloo"] = statistics.median(r["gloo"] for i, r in enumerate(rows, 1) if i % args.dense_every == 0)
    result["fastest"], result["slowest"] = min(row["ours"] for row in rows), max(row["ours"] for row in rows)
    if rank == 0:
        stats = one.stats()
        result.update(changed=stats["changed"], delta_bytes=stats["delta_bytes"], bytes=flat.numel() * 2)
    return result


def rank_main(args: argparse.Namespace, rank: int, names: list[str], folder: str, results) -> None:
    hosts.enter(names[rank])
    os.environ["GLOO_SOCKET_IFNAME"] = hosts.IFNAME
    torch.set_num_threads(1)
    wait = timedelta(seconds=600)
    store = dist.FileStore(f"{folder}/store", len(names))
    dist.init_process_group(
        "gloo", store=dist.PrefixStore("gloo", store), rank=rank, world_size=len(names), timeout=wait
    )
    with Communicator(rank, len(names), store=dist.PrefixStore("spccl", store), timeout=wait) as comm:
        for megabytes in args.megabytes:
            result = one_size(args, rank, comm, megabytes)
            if rank == 0:
                results.put((megabytes, result))
        dist.barrier()
    dist.destroy_process_group()


def show(rate: str, link: float, megabytes: int, r: dict) -> None:
    wire = r["sent"] / link
    floor = wire + sum(r[f"{name}-cpu"] for name in ("encode", "check", "commit"))
    stages = " ".join(
        f"{name} {r[name]:.3f} ({r[f'{name}-cpu']:.3f})" for name in ("encode", "check", "commit", "base")
    )
    print(
        f"{rate:>8} {megabytes:5} MB  changed {r['changed'] / (r['bytes'] / 2):6.2%}  "
        f"{r['delta_bytes'] / r['changed']:5.2f} bytes/change  ours {r['ours']:6.3f} s ({r['fastest']:.3f} to "
        f"{r['slowest']:.3f})  gloo {r['gloo']:7.3f} s  ratio {r['gloo'] / r['ours']:5.1f}  {stages}  "
        f"wire {wire:.3f} ({r['sent'] / 1e6:.1f} MB)  floor {floor:.3f}, of gloo 1/{r['gloo'] / floor:.0f}  "
        f"load {os.getloadavg()[0]:.0f}",
        flush=True,
    )


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--receivers", type=int, default=3)
    p.add_argument("--rates", nargs="+", default=["1gbit", "10gbit"])
    p.add_argument("--megabytes", nargs="+", type=int, default=[256, 1000])
    p.add_argument("--changed", type=float, default=0.01)
    p.add_argument("--values", choices=["raw", "adam"], default="raw")
    p.add_argument("--rounds", type=int, default=6)
    p.add_argument("--dense-every", type=int, default=2, help="Gloo runs in one of so many rounds")
    p.add_argument("--timeout-s", type=int, default=7200, help="of all rounds at one rate; then the ranks are ended")
    args = p.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    context = multiprocessing.get_context("fork")
    for rate in args.rates:
        results = context.SimpleQueue()
        with hosts.emulated(args.receivers + 1, rate) as names, tempfile.TemporaryDirectory() as folder:
            link = hosts.measured_rate(names)
            print(f"link {rate}: {link * 8 / 1e9:.2f} Gbit/s measured; values {args.values}", flush=True)
            ranks = [
                context.Process(target=rank_main, args=(args, rank, names, folder, results))
                for rank in range(args.receivers + 1)
            ]
            for process in ranks:
                process.start()
            deadline = time.monotonic() + args.timeout_s
            for process in ranks:
                process.join(max(0, deadline - time.monotonic()))
            late = [rank for rank, process in enumerate(ranks) if process.is_alive()]
            for rank in late:
                ranks[rank].kill()
                ranks[rank].join()
            if late:
                raise SystemExit(f"no end within {args.timeout_s} s: ranks {late}")
            if any(process.exitcode for process in ranks):
                raise SystemExit("a rank failed")
            while not results.empty():
                show(rate, link, *results.get())


if __name__ == "__main__":
    main()
