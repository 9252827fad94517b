"""What the exchange of gradients adds to a backward pass under DDP: dense over NCCL, or pruned over spccl.

    torchrun --nproc-per-node 4 bench/ddp_exchange.py MODE [--bucket-mb 512] [--max-ctas 32]

MODE: dense, pruned (density 1%), momentum (the same with momentum 0.9 and clip_norm 1.0).
Parameters have GPT-2 XL's shapes (1.56 G float32 elements). Gradients are random numbers and cost no
computation. Rank 0 prints one line: medians of 12 passes with exchange and 6 without (no_sync), in ms.
Each GPU needs about 30 GiB, with momentum 36. With one GPU nothing is exchanged: the run shows that the script
works, and the hook's density, host time and memory.
"""

import argparse
import contextlib
import os
import statistics

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


class Parameters(torch.nn.Module):
    """GPT-2 XL's parameters; the gradient of each is what forward is given for it."""

    def __init__(self) -> None:
        super().__init__()
        width = 1600
        block = [(width,), (width,), (width, 3 * width), (3 * width,), (width, width), (width,)]
        block += [(width,), (width,), (width, 4 * width), (4 * width,), (4 * width, width), (width,)]
        shapes = [(50257, width), (1024, width), *(48 * block)]
        self.all = torch.nn.ParameterList(torch.nn.Parameter(torch.zeros(s, device="cuda")) for s in shapes)

    def forward(self, grads: list[torch.Tensor]) -> torch.Tensor:
        return sum((p * g).sum() for p, g in zip(self.all, grads, strict=True))


def median_ms(model: DistributedDataParallel, grads: list[torch.Tensor], n: int, exchange: bool) -> float:
    times = []
    for _ in range(n):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        dist.barrier()
        torch.cuda.synchronize()
        start.record()
        with contextlib.nullcontext() if exchange else model.no_sync():
            model(grads).backward()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mode", choices=["dense", "pruned", "momentum"])
    parser.add_argument("--bucket-mb", type=int, default=512)
    parser.add_argument("--max-ctas", type=int, help="most thread blocks of spccl's all-reduces; default: all")
    args = parser.parse_args()
    rank = int(os.environ["RANK"])
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    dist.init_process_group("nccl" if args.mode == "dense" else "spccl", device_id=device)
    module = Parameters()
    generator = torch.Generator(device).manual_seed(rank)
    grads = [torch.randn(p.shape, device=device, generator=generator) for p in module.all]
    model = DistributedDataParallel(
        module, bucket_cap_mb=args.bucket_mb, gradient_as_bucket_view=True, device_ids=[rank]
    )
    hook = None
    if args.mode != "dense":
        import spccl

        extra = {"momentum": 0.9, "clip_norm": 1.0} if args.mode == "momentum" else {}
        hook = spccl.ddp.PrunedGradients(density=0.01, max_ctas=args.max_ctas, **extra).register(model)
    median_ms(model, grads, 4, True)  # buckets are rebuilt, state is allocated
    with_exchange = median_ms(model, grads, 12, True)
    without = median_ms(model, grads, 6, False)
    memory = torch.cuda.max_memory_allocated() / 2**30
    if rank == 0:
        stats = hook.stats() if hook is not None else {}
        print(
            f"{args.mode}, buckets of {args.bucket_mb} MB, {args.max_ctas or 'all'} thread blocks: "
            f"{with_exchange:.1f} ms with exchange, {without:.1f} without, difference {with_exchange - without:.1f}; "
            f"density {stats.get('density_pruned', 1.0):.4f}, "
            f"hook {stats.get('select_ms', 0.0):.2f} ms of host time, {memory:.1f} GiB"
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
