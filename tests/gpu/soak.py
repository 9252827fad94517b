"""Random collectives on all GPUs for a while, each against an exact reference and against NCCL.

    python tests/gpu/soak.py --minutes 10 [--gpus 4] [--seed 1] [--max-mb 64]

Starts one process per GPU. Each round draws an operation, dtype, size, density, pattern, alignment, stream and
group, the same on all ranks. Moved bits and integers must equal NCCL's; float sums must equal the sum in rank
order, made from NCCL's gather of all inputs. Ends with status 1 and the draw's text at the first difference.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))


def parent(args: argparse.Namespace) -> int:
    from gpu_launch import check_case, missing, run_gpus

    if missing(args.gpus):
        raise SystemExit(f"soak: {missing(args.gpus)}")
    words = ["--minutes", str(args.minutes), "--seed", str(args.seed), "--max-mb", str(args.max_mb), "--worker"]
    ranks = run_gpus("../soak", args.gpus, *words, timeout_s=60 * args.minutes + 180)
    told = check_case(ranks, "soak")
    print(f"soak: {told[0]['rounds']} rounds on {args.gpus} GPUs in {args.minutes} min: no difference")
    return 0


def worker(args: argparse.Namespace) -> None:
    sys.path.insert(0, str(HERE / "workers"))
    import torch
    import torch.distributed as dist
    from gpu_common import DEVICE, KINDS, cuda, patterned, start
    from workers.common import FLOATS, INTEGERS, OPS, RANK, WORLD, reduced, report

    from spccl import backend

    start(timeout_s=120)
    nccl = dist.new_group(backend="nccl")
    groups = [dist.group.WORLD, dist.new_group(), dist.new_group()]
    streams = [torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.Stream(priority=-1)]
    rng = random.Random(args.seed)
    deadline = time.monotonic() + 60 * args.minutes
    stop = torch.zeros(1, device=DEVICE)
    rounds = 0

    def gathered(x: torch.Tensor) -> torch.Tensor:
        flat = torch.empty(WORLD * x.numel() * x.element_size(), dtype=torch.uint8, device=DEVICE)
        dist.all_gather_into_tensor(flat, x.contiguous().view(torch.uint8), group=nccl)
        return flat.view(x.dtype).view(WORLD, x.numel())

    while True:
        if rounds % 20 == 0:  # all ranks stop in the same round
            stop.fill_(float(time.monotonic() > deadline))
            dist.all_reduce(stop, dist.ReduceOp.MAX, group=nccl)
            if stop.item():
                break
        dtype = rng.choice((*FLOATS, *INTEGERS))
        kind, density = rng.choice(KINDS), rng.choice([0.0, 0.001, 0.01, 0.1, 0.5, 0.9, 1.0])
        most = (args.max_mb << 20) // dtype.itemsize // WORLD
        numel = int(most ** rng.random()) + rng.randint(0, 3)
        offset, async_op = rng.choice([0, 0, 1, 3]), rng.random() < 0.5
        call, op = rng.choice(["all_reduce", "all_gather", "reduce_scatter", "broadcast"]), rng.choice(list(OPS))
        group, stream, root = rng.choice(groups), rng.choice(streams), rng.randrange(WORLD)
        what = f"round {rounds}: {call} {op} {dtype} {kind} {density} x {numel} + {offset} async={async_op}"
        host = patterned(
            kind, RANK, WORLD, numel * WORLD if call == "reduce_scatter" else numel, density, dtype, rounds
        )
        with torch.cuda.stream(stream):
            x = cuda(host, offset)
            every = gathered(x)
            if call == "all_gather":
                out = torch.full((WORLD * numel + offset,), 3, dtype=dtype, device=DEVICE)[offset:]
                work = dist.all_gather_into_tensor(out, x, group, async_op)
            elif call == "reduce_scatter":
                out = torch.full((numel + offset,), 3, dtype=dtype, device=DEVICE)[offset:]
                work = dist.reduce_scatter_tensor(out, x, OPS[op], group, async_op)
            elif call == "broadcast":
                out = x
                work = dist.broadcast(out, root, group, async_op)
            else:
                out = x
                work = dist.all_reduce(out, OPS[op], group, async_op)
            if work is not None:
                work.wait()
            if call == "all_gather":
                want = every.view(-1)
            elif call == "broadcast":
                want = every[root]
            else:
                want = reduced(list(every), op)
                want = want.view(WORLD, -1)[RANK] if call == "reduce_scatter" else want
            wrong = int((out.view(torch.uint8) != want.contiguous().view(torch.uint8)).sum())
        if wrong:
            raise SystemExit(f"soak: rank {RANK}: {what}: {wrong} bytes differ")
        rounds += 1
    assert backend.cuda_stats().path == "engine"
    report("soak", ok=True, rounds=rounds)
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--gpus", type=int, default=4)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--max-mb", type=int, default=64, help="largest tensor of a rank, MiB")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    sys.exit(worker(arguments) if arguments.worker else parent(arguments))
