"""Runs random collectives on all GPUs for some minutes and compares each with an exact reference made with NCCL.

    python tests/gpu/soak.py --minutes 10 [--gpus 4] [--seed 1] [--max-mb 64]

Starts one process per GPU. Each round draws an operation, dtype, size, density, pattern, alignment, stream and
group, the same on all ranks. The reference is computed in rank order from all inputs, which NCCL gathers. Results
must equal it bit for bit. Ends with status 1 and a description of the draw at the first difference.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
if "--worker" in sys.argv:
    sys.path.insert(0, str(HERE / "workers"))
    import torch
    import torch.distributed as dist
    from gpu_common import DEVICE, KINDS, cuda, patterned, start
    from workers.common import FLOATS, INTEGERS, OPS, RANK, WORLD, reduced, report


def parent(args: argparse.Namespace) -> int:
    from gpu_launch import check_case, missing, run_gpus

    if missing(args.gpus):
        raise SystemExit(f"soak: {missing(args.gpus)}")
    print(f"soak: {args.minutes} min on {args.gpus} GPUs, seed {args.seed}", flush=True)
    words = ["--minutes", str(args.minutes), "--seed", str(args.seed), "--max-mb", str(args.max_mb), "--worker"]
    ranks = run_gpus("../soak", args.gpus, *words, timeout_s=60 * args.minutes + 180)
    reported = check_case(ranks, "soak")
    print(f"soak: {reported[0]['rounds']} rounds on {args.gpus} GPUs in {args.minutes} min: no difference")
    return 0


@dataclasses.dataclass
class Draw:
    """The call of one round, the same on all ranks."""

    call: str
    op: str
    dtype: torch.dtype
    kind: str
    density: float
    numel: int  # elements of a rank's block
    offset: int
    async_op: bool
    group: int
    stream: int
    root: int

    @staticmethod
    def make(rng: random.Random, world: int, max_bytes: int) -> Draw:
        dtype = rng.choice((*FLOATS, *INTEGERS))
        return Draw(
            call=rng.choice(["all_reduce", "all_gather", "reduce_scatter", "broadcast"]),
            op=rng.choice(list(OPS)),
            dtype=dtype,
            kind=rng.choice(KINDS),
            density=rng.choice([0.0, 0.001, 0.01, 0.1, 0.5, 0.9, 1.0]),
            numel=int((max_bytes // dtype.itemsize // world) ** rng.random()) + rng.randint(0, 3),
            offset=rng.choice([0, 0, 1, 3]),
            async_op=rng.random() < 0.5,
            group=rng.randrange(3),
            stream=rng.randrange(3),
            root=rng.randrange(world),
        )


def gathered(x: torch.Tensor, nccl: dist.ProcessGroup) -> torch.Tensor:
    """`x` of every rank, [ranks, numel], gathered by NCCL."""
    flat = torch.empty(WORLD * x.numel() * x.element_size(), dtype=torch.uint8, device=DEVICE)
    dist.all_gather_into_tensor(flat, x.contiguous().view(torch.uint8), group=nccl)
    return flat.view(x.dtype).view(WORLD, x.numel())


def differing_bytes(d: Draw, seed: int, group: dist.ProcessGroup, nccl: dist.ProcessGroup) -> int:
    """Run the draw on the current stream. Returns the number of bytes that differ from the reference."""
    blocks = WORLD if d.call == "reduce_scatter" else 1
    x = cuda(patterned(d.kind, RANK, WORLD, d.numel * blocks, d.density, d.dtype, seed, DEVICE), d.offset)
    every = gathered(x, nccl)
    out = x
    if d.call in ("all_gather", "reduce_scatter"):
        n = d.numel * (WORLD if d.call == "all_gather" else 1)
        out = torch.full((n + d.offset,), 3, dtype=d.dtype, device=DEVICE)[d.offset :]
    if d.call == "all_gather":
        work = dist.all_gather_into_tensor(out, x, group, d.async_op)
        want = every.view(-1)
    elif d.call == "broadcast":
        work = dist.broadcast(out, d.root, group, d.async_op)
        want = every[d.root]
    elif d.call == "reduce_scatter":
        work = dist.reduce_scatter_tensor(out, x, OPS[d.op], group, d.async_op)
        want = reduced(list(every), d.op).view(WORLD, -1)[RANK]
    else:
        work = dist.all_reduce(out, OPS[d.op], group, d.async_op)
        want = reduced(list(every), d.op)
    if work is not None:
        work.wait()
    return int((out.view(torch.uint8) != want.contiguous().view(torch.uint8)).sum())


def worker(args: argparse.Namespace) -> None:
    from spccl import backend

    start(timeout_s=120)
    nccl = dist.new_group(backend="nccl")
    groups = [dist.group.WORLD, dist.new_group(), dist.new_group()]
    streams = [torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.Stream(priority=-1)]
    rng = random.Random(args.seed)
    deadline = time.monotonic() + 60 * args.minutes
    stop = torch.zeros(1, device=DEVICE)
    rounds = 0
    while True:
        if rounds % 20 == 0:  # all ranks stop in the same round
            stop.fill_(float(time.monotonic() > deadline))
            dist.all_reduce(stop, dist.ReduceOp.MAX, group=nccl)
            if stop.item():
                break
        draw = Draw.make(rng, WORLD, args.max_mb << 20)
        with torch.cuda.stream(streams[draw.stream]):
            wrong = differing_bytes(draw, rounds, groups[draw.group], nccl)
        if wrong:
            raise SystemExit(f"soak: rank {RANK}, round {rounds}: {draw}: {wrong} bytes differ")
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
