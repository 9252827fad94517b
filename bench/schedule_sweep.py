"""What other schedules and slice sizes would give in place of the automatic choice, in each case.

    python bench/schedule_sweep.py [--where shm,4x1] [--rounds 9] [--csv FILE]      every fixed choice against the model
    python bench/schedule_sweep.py --variants tune:/tmp/profile --learn 1000    learns, in turns with the
                                                                                    model, and saves a profile
    python bench/schedule_sweep.py --variants tune:/tmp/profile         that profile against the model
    python bench/schedule_sweep.py --others --where 4x1 --sizes 64M --densities 0.01,0.1 [--block 256]

--others compares with what other libraries do (bench/notes/schedules.md): the direct schedule from a file, SparCML's
split with coo and recursive doubling (examples/schedules), and blocks as OmniReduce sends them. It prints the bytes
that a rank sends, and the 95% interval of the ratio (bootstrap).

A variant is a value of SPCCL_SCHEDULE; @FORMAT and a slice size may follow: oneshot@coo/64K. With !256 after it, a tiny
number replaces each zero of the input in the blocks of 256 elements that have any nonzero: such a block goes dense, and
one without is left out. All variants and the base have a communicator each in the same processes. They take turns, in
an order that changes each round, and the time of a turn is that of the slowest rank. A case's ratio is the median over
rounds of a variant's time over the base's of that round.
The best variant is chosen in the even rounds and its ratio is that of the odd ones: choosing the least of many noisy
ratios and showing the same ratios would promise a gain where there is none. A ratio that is not significantly
different from 1 is marked (sign test over the odd rounds, over all if there is one variant, Holm-corrected over the
cases).

Where: shm (--ranks ranks on this host), or HxR: H emulated hosts of R ranks, links of --rate (root, iproute2).
"""

import argparse
import contextlib
import csv
import itertools
import math
import multiprocessing
import os
import random
import re
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import spccl
from spccl import schedule
from spccl.bench import hosts
from spccl.bench.start import torch_store

SLICES = ("32K", "64K", "256K", "512K")  # the default is 128K
FIELDS = ("where", "collective", "bytes", "density", "variant", "round", "seconds", "base_seconds", "sent_bytes")
OTHERS = ("file:{}/all_pairs.plan", "direct", "file:{}/split.plan@coo", "file:{}/doubling.plan", "direct!256")
LEAST_S = 0.02  # of one turn
SLOW, LOOK = 2.0, 2  # variants slower than this many times the base after so many rounds are left out


def size_of(text: str) -> int:
    unit = {"K": 1 << 10, "M": 1 << 20}.get(text[-1], 1)
    return int(text.rstrip("KM")) * unit


def shown(n: int) -> str:
    return f"{n >> 20}M" if n >= 1 << 20 else f"{n >> 10}K"


def variants_of(args: argparse.Namespace, where: str, collective: str) -> list[str]:
    if args.variants:
        return args.variants.split(",")
    names = ["direct"]
    if collective in ("all_reduce", "broadcast"):
        names.append("oneshot")
    if "x" in where and not where.endswith("x1"):
        names.append("relayed")
    return [f"{name}/{size}" if size else name for name in names for size in ("", *SLICES)]


class Group:
    """The communicators of a rank, one for each variant, and the buffers of a case."""

    def __init__(self, rank: int, n_ranks: int, store: Any, transports: str | None) -> None:
        self.rank, self.n_ranks, self.store, self.transports = rank, n_ranks, store, transports
        self.comms: dict[str, spccl.Communicator] = {}
        self.control = self.comm("direct")

    def comm(self, variant: str) -> spccl.Communicator:
        if variant not in self.comms:
            name, form, size = re.fullmatch(r"(.*?)(?:@(\w+))?(?:/(\d+[KM]))?(?:!\d+)?", variant).groups()
            self.comms[variant] = spccl.Communicator(
                self.rank, self.n_ranks, store=self.store, name=f"variant {variant}", schedule=name,
                format=form or "auto", slice_bytes=size_of(size) if size else 0, transports=self.transports,
                timeout=300,
            )  # fmt: skip
        return self.comms[variant]

    def largest(self, seconds: float) -> float:
        """The time of the slowest rank; a barrier too."""
        x = torch.tensor([seconds], dtype=torch.float64)
        self.control.all_reduce(x, x, op="max")
        return x.item()


def call_of(collective: str, x: torch.Tensor, y: torch.Tensor):
    if collective == "all_reduce":
        return lambda comm: comm.all_reduce(x, y)
    if collective == "all_gather":
        return lambda comm: comm.all_gather(x, y)
    return lambda comm: comm.broadcast(y, root=0)


def input_of(rank: int, n: int, density: float, block: int) -> torch.Tensor:
    """[n] numbers, zero in aligned blocks of so many elements."""
    draw = torch.Generator().manual_seed(rank + 1)
    keep = torch.rand(-(-n // block), generator=draw) < density
    return torch.randn(n, generator=draw) * keep.repeat_interleave(block)[:n]


def block_bytes(group: Group, n: int, density: float, zeros: int, block: int = 256) -> float:
    """Mean bytes of a rank if only the blocks with a nonzero travelled, without a header: to their owners, and the sums
    to all."""
    each = torch.stack([input_of(r, n, density, zeros)[: n // block * block].view(-1, block).ne(0).any(1)
                        for r in range(group.n_ranks)])  # fmt: skip
    blocks = each.float().sum(1).mean().item() + each.any(0).float().sum().item()
    return 4 * block * blocks * (group.n_ranks - 1) / group.n_ranks


def filled(x: torch.Tensor, block: int) -> torch.Tensor:
    """Without zeros in blocks that have any nonzero."""
    y = torch.nn.functional.pad(x, (0, -len(x) % block)).view(-1, block)
    return torch.where((y == 0) & (y != 0).any(1, keepdim=True), 1e-30, y).flatten()[: len(x)].contiguous()


def turn(group: Group, variant: str, call, n_calls: int) -> float:
    comm = group.comm(variant)
    group.largest(0)
    began = time.perf_counter()
    for _ in range(n_calls):
        call(comm)
    return group.largest(time.perf_counter() - began) / n_calls


def learn(group: Group, args: argparse.Namespace, case: tuple, variants: list[str], call) -> list[tuple]:
    """Calls of all variants in turns of 20. The row has the sum of all calls of each, as one round."""
    total = dict.fromkeys([args.base, *variants], 0.0)
    for i in range(math.ceil(args.learn / 20)):
        for name in list(total)[:: 1 - 2 * (i % 2)]:
            total[name] += 20 * turn(group, name, call, 20)
    return [(*case, name, 0, total[name], total[args.base], 0) for name in variants]


def run_case(group: Group, args: argparse.Namespace, case: tuple, variants: list[str]) -> list[tuple]:
    _where, collective, n_bytes, density = case
    n = max(n_bytes // 4, 1)
    x = input_of(group.rank, n, density, args.block)
    if args.others and group.rank == 0:
        mb = block_bytes(group, n, density, args.block) / 1e6
        print(f"blocks of 256 elements that have a nonzero: {mb:.2f} MB a rank")
    if collective == "all_gather":
        x = x[: n // group.n_ranks].contiguous()
        n = x.numel() * group.n_ranks
    y = torch.zeros(n)
    if args.learn:
        return learn(group, args, case, variants, call_of(collective, x, y))
    names, rows, spent = list(dict.fromkeys([args.base, *variants])), [], {}
    calls = {name: call_of(collective, filled(x, int(name.split("!")[1])) if "!" in name else x, y) for name in names}
    one = max(turn(group, args.base, calls[args.base], 3), 1e-6)
    n_calls = max(1, min(2000, math.ceil(LEAST_S / one)))
    for name in names:  # warm up; then the densities of earlier calls are known
        turn(group, name, calls[name], 20 if one < 0.05 else 10)
    before = {name: group.comm(name).stats().wire_bytes_sent for name in names}
    for i in range(args.rounds):
        order = names[:]
        random.Random(i).shuffle(order)
        times = {name: turn(group, name, calls[name], n_calls) for name in order}
        for name in names[1:] if args.base not in variants else names:
            sent = (group.comm(name).stats().wire_bytes_sent - before[name]) // ((i + 1) * n_calls)
            rows.append((*case, name, i, times[name], times[args.base], sent))
            spent.setdefault(name, []).append(times[name] / times[args.base])
        if i + 1 == LOOK and not args.others:  # ratios are the same on all ranks: so is what is left out
            names = [n for n in names if n == args.base or min(spent.get(n, [0])) < SLOW]
    return rows


def rank_main(args: argparse.Namespace, where: str, rank: int, n_ranks: int, netns: str, folder: str, out) -> None:
    if netns:
        hosts.enter(netns)
    torch.set_num_threads(1)
    group = Group(rank, n_ranks, torch_store(f"{folder}/store", n_ranks, 300), None if netns else "shm")
    cases = itertools.product([where], args.collectives.split(","), map(size_of, args.sizes.split(",")),
                              map(float, args.densities.split(",")))  # fmt: skip
    for case in cases:
        rows = run_case(group, args, case, variants_of(args, where, case[1]))
        if rank == 0:
            out.put(rows)
    for comm in group.comms.values():
        comm.close()
    if rank == 0:
        out.put(None)


def run_where(args: argparse.Namespace, where: str) -> list[tuple]:
    context = multiprocessing.get_context("fork")
    out, rows = context.SimpleQueue(), []
    emulate = where != "shm"
    n_hosts, per_host = map(int, where.split("x")) if emulate else (1, args.ranks)
    with (
        tempfile.TemporaryDirectory() as folder,
        hosts.emulated(n_hosts, args.rate) if emulate else contextlib.nullcontext([]) as names,
    ):
        ranks = [
            context.Process(target=rank_main, args=(args, where, r, n_hosts * per_host,
                                                    names[r // per_host] if emulate else "", folder, out))
            for r in range(n_hosts * per_host)
        ]  # fmt: skip
        for process in ranks:
            process.start()
        while (some := out.get()) is not None:
            rows += some
            print(summary(args, some), flush=True)
        for process in ranks:
            process.join()
    if any(process.exitcode for process in ranks):
        raise SystemExit("a rank failed")
    return rows


def sign_test(ratios: list[float]) -> float:
    """Two-sided p that as many ratios lie on one side of 1 by chance."""
    n, k = len(ratios), sum(r < 1 for r in ratios)
    tail = sum(math.comb(n, i) for i in range(min(k, n - k) + 1)) / 2**n
    return min(1.0, 2 * tail)


def best_of(rows: list[tuple]) -> tuple[str, float, float]:
    """The variant of the least median in even rounds; its median ratio in odd rounds, and the p of that."""
    by: dict[str, dict[int, float]] = {}
    for row in rows:
        by.setdefault(row[4], {})[row[5]] = row[6] / row[7]
    whole = {name: r for name, r in by.items() if len(r) == max(map(len, by.values()))}
    even = {name: statistics.median(v for i, v in r.items() if i % 2 == 0) for name, r in whole.items()}
    best = min(even, key=even.__getitem__)
    odd = [v for i, v in whole[best].items() if i % 2 == 1]
    return best, statistics.median(odd), sign_test(odd if len(whole) > 1 else list(whole[best].values()))


def interval(ratios: list[float]) -> str:
    """95% of the median, by bootstrap."""
    draw = random.Random(1)
    medians = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(2000))
    return f"{medians[49]:.3f} to {medians[1949]:.3f}"


def report_others(args: argparse.Namespace, rows: list[tuple]) -> None:
    print(
        "\n| where | bytes | density | variant | MB a rank | ms | time over "
        + args.base
        + " | 95% interval |\n"
        + "| --- " * 8
        + "|"
    )
    for (where, _, n_bytes, density, name), group in itertools.groupby(sorted(rows), key=lambda row: row[:5]):
        some = list(group)
        ratios = [row[6] / row[7] for row in some]
        print(f"| {where} | {shown(n_bytes)} | {density:g} | {Path(name).name} | {some[-1][8] / 1e6:.2f} | "
              f"{1e3 * statistics.median(row[6] for row in some):.1f} | {statistics.median(ratios):.3f} | "
              f"{interval(ratios)} |")  # fmt: skip


def summary(args: argparse.Namespace, rows: list[tuple]) -> str:
    where, collective, n_bytes, density = rows[0][:4]
    if args.learn:
        each = "  ".join(f"{row[4]} {row[6] / row[7]:.3f}" for row in rows)
        return f"{where} {collective} {shown(n_bytes)} {density:g}: {args.learn} calls, over {args.base}: {each}"
    base = statistics.median(row[7] for row in rows)
    ratios = {}
    for row in rows:
        ratios.setdefault(row[4], []).append(row[6] / row[7])
    each = "  ".join(f"{name} {statistics.median(r):.2f}" for name, r in ratios.items())
    best, ratio, _ = best_of(rows)
    return (f"{where} {collective} {shown(n_bytes)} {density:g}: {args.base} {base * 1e6:.0f} us; "
            f"best {best} {ratio:.3f}; {each}")  # fmt: skip


def holm(p: list[float]) -> list[bool]:
    """Which are significant at 5% together."""
    out, order = [False] * len(p), sorted(range(len(p)), key=p.__getitem__)
    for rank, i in enumerate(order):
        if p[i] * (len(p) - rank) > 0.05:
            break
        out[i] = True
    return out


def report(args: argparse.Namespace, rows: list[tuple]) -> None:
    cells = [list(group) for _, group in itertools.groupby(rows, key=lambda row: row[:4])]
    best = [best_of(cell) for cell in cells]
    marks = holm([p for _, _, p in best])
    print(f"\n| where | collective | bytes | density | best | time over {args.base} |\n{'| --- ' * 6}|")
    for cell, (name, ratio, _), significant in zip(cells, best, marks, strict=True):
        where, collective, n_bytes, density = cell[0][:4]
        note = "" if significant else " (not significant)"
        print(f"| {where} | {collective} | {shown(n_bytes)} | {density:g} | {name} | {ratio:.3f}{note} |")
    left = [min(ratio, 1.0) for _, ratio, _ in best]
    mean = math.exp(statistics.fmean(map(math.log, (r for _, r, _ in best))))
    at_most = math.exp(statistics.fmean(map(math.log, left)))
    print(f"\n{len(best)} cases: geometric mean of the best's time over {args.base}: {mean:.3f}; "
          f"if no case took what is slower: {at_most:.3f}; significantly slower than 1/0.97: "
          f"{sum(r > 1 / 0.97 and s for (_, r, _), s in zip(best, marks, strict=True))}")  # fmt: skip


def report_learnt(args: argparse.Namespace, rows: list[tuple]) -> None:
    mean = math.exp(statistics.fmean(math.log(row[6] / row[7]) for row in rows))
    print(f"\n{len(rows)} sums of {args.learn} calls, learning, over those of {args.base}: geometric mean {mean:.3f}")


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--where", default="shm,4x1,4x2")
    p.add_argument("--ranks", type=int, default=2, help="of shm")
    p.add_argument("--rate", default="1gbit")
    p.add_argument("--collectives", default="all_reduce,all_gather")
    p.add_argument("--sizes", default="4K,64K,1M,16M,64M")
    p.add_argument("--densities", default="0.002,0.02,0.2,1")
    p.add_argument("--variants", default="", help="default: every schedule and slice size")
    p.add_argument("--base", default="auto")
    p.add_argument("--learn", type=int, default=0, help="calls of each case, in turns; nothing is compared by rounds")
    p.add_argument("--rounds", type=int, default=10)
    p.add_argument("--block", type=int, default=1, help="zeros come in whole blocks of so many elements")
    p.add_argument("--others", action="store_true")
    p.add_argument("--csv", default="")
    args = p.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    rows: list[tuple] = []
    with tempfile.TemporaryDirectory() as folder:
        if args.others:
            args.collectives, args.variants = "all_reduce", ",".join(OTHERS).format(*[folder] * len(OTHERS))
            for path in Path(__file__).parents[1].glob("examples/schedules/*.py"):
                text = schedule.compile_file(path, [(2, None), (4, None), (8, None)])
                Path(folder, f"{path.stem}.plan").write_text(text)
        for where in args.where.split(","):
            rows += run_where(args, where)
    (report_learnt if args.learn else report_others if args.others else report)(args, rows)
    if args.csv:
        with open(args.csv, "w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(FIELDS)
            writer.writerows(rows)


if __name__ == "__main__":
    main()
