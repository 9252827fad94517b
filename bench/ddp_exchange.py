"""What the exchange of gradients adds to a backward pass under DDP: dense over NCCL, or pruned over spccl.

    torchrun --nproc-per-node 4 bench/ddp_exchange.py MODES [--bucket-mb 512] [--max-ctas 32] [--rounds 5]
    torchrun --nproc-per-node 2 bench/ddp_exchange.py dense,pruned,pruned:32,momentum --device cpu

MODES: of dense, pruned (density 1%), momentum (the same with momentum 0.9 and clip_norm 1.0), with commas between;
pruned:32 is --max-ctas 32 for this mode alone. They take turns, --rounds times. Parameters have GPT-2 XL's shapes
(1.56 G float32 elements; on the CPU 1000 times fewer). Gradients are random numbers and cost no computation.

Rank 0 prints a line for each run: medians of 12 passes with exchange and 6 without (no_sync), in ms; the peak of
torch's allocator in these passes, and what the process and others have on the GPU outside of it, which holds spccl's
inbox, NCCL's buffers and the CUDA contexts. Each GPU needs about 30 GiB, with momentum 36. With one GPU nothing is
exchanged: the run shows that the script works, and the hook's density, host time and memory.
"""

import argparse
import contextlib
import gc
import os
import statistics
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

HOOKS = {"dense": None, "pruned": {}, "momentum": {"momentum": 0.9, "clip_norm": 1.0}}


class Parameters(torch.nn.Module):
    """GPT-2 XL's parameters, or a small model's; the gradient of each is what forward is given for it."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        on_gpu = device.type == "cuda"
        width, n_blocks, vocabulary = (1600, 48, 50257) if on_gpu else (160, 4, 2000)
        block = [(width,), (width,), (width, 3 * width), (3 * width,), (width, width), (width,)]
        block += [(width,), (width,), (width, 4 * width), (4 * width,), (4 * width, width), (width,)]
        shapes = [(vocabulary, width), (1024, width), *(n_blocks * block)]
        self.all = torch.nn.ParameterList(torch.nn.Parameter(torch.zeros(s, device=device)) for s in shapes)

    def forward(self, grads: list[torch.Tensor]) -> torch.Tensor:
        return sum((p * g).sum() for p, g in zip(self.all, grads, strict=True))


def wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def median_ms(model: DistributedDataParallel, grads: list[torch.Tensor], n: int, exchange: bool) -> float:
    """Median time of n backward passes. On CUDA between events, so that launching is not counted twice."""
    times, device = [], grads[0].device
    for _ in range(n):
        model.zero_grad(set_to_none=False)  # as in training; a hook with momentum refuses what was not zeroed
        wait_for(device)
        dist.barrier()
        wait_for(device)
        began = time.perf_counter()
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if device.type == "cuda" else []
        for event in events[:1]:
            event.record()
        with contextlib.nullcontext() if exchange else model.no_sync():
            model(grads).backward()
        for event in events[1:]:
            event.record()
        wait_for(device)
        times.append(events[0].elapsed_time(events[1]) if events else 1e3 * (time.perf_counter() - began))
    return statistics.median(times)


def memory_gib(device: torch.device, before: int) -> str:
    """before: bytes allocated when the mode began. NCCL's group keeps buckets of the mode before for a while."""
    if device.type == "cpu":
        return "not measured on a CPU"
    free, total = torch.cuda.mem_get_info()
    peak, outside = torch.cuda.max_memory_allocated() - before, total - free - torch.cuda.memory_reserved()
    return f"peak {peak / 2**30:.2f} GiB above {before / 2**30:.2f}, outside torch {outside / 2**30:.2f} GiB"


def run(args: argparse.Namespace, mode: str, group: dist.ProcessGroup, device: torch.device) -> str:
    """Measures one mode once. What it allocates is free again afterwards."""
    name, _, ctas = mode.partition(":")
    before = torch.cuda.memory_allocated() if device.type == "cuda" else 0
    module, max_ctas, hook = Parameters(device), int(ctas) if ctas else args.max_ctas, None
    generator = torch.Generator(device).manual_seed(dist.get_rank())
    grads = [torch.randn(p.shape, device=device, generator=generator) for p in module.all]
    model = DistributedDataParallel(
        module, process_group=group, bucket_cap_mb=args.bucket_mb, gradient_as_bucket_view=True
    )
    if HOOKS[name] is not None:
        import spccl

        hook = spccl.ddp.PrunedGradients(density=0.01, max_ctas=max_ctas, **HOOKS[name]).register(model)
    median_ms(model, grads, 4, True)  # buckets are made anew, state is allocated
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    with_exchange = median_ms(model, grads, 12, True)
    without = median_ms(model, grads, 6, False)
    stats = hook.stats() if hook is not None else {}
    return (
        f"{name}, buckets of {args.bucket_mb} MB, {max_ctas or 'all'} thread blocks: "
        f"{with_exchange:.1f} ms with exchange, {without:.1f} without, difference {with_exchange - without:.1f}; "
        f"density {stats.get('density_pruned', 1.0):.4f}, "
        f"hook {stats.get('select_ms', 0.0):.2f} ms of host time; memory: {memory_gib(device, before)}"
    )


def positive(text: str) -> int:
    if not (text.isdecimal() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"{text} is not a whole number above 0")
    return int(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("modes")
    parser.add_argument("--bucket-mb", type=positive, default=512)
    parser.add_argument("--max-ctas", type=positive, help="most thread blocks of spccl's all-reduces; default: all")
    parser.add_argument("--rounds", type=positive, default=1, help="runs of each mode, in turns")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    args = parser.parse_args()
    modes = args.modes.split(",")
    for mode in modes:
        name, colon, ctas = mode.partition(":")
        if name not in HOOKS or (colon and not (ctas.isdecimal() and int(ctas) > 0)):
            parser.error(f'"{mode}" is not one of {", ".join(HOOKS)}, nor one with :THREAD-BLOCKS')
        if name == "dense" and colon:
            parser.error(f'"{mode}": thread blocks are a setting of spccl, and dense runs over NCCL or Gloo')
    if "LOCAL_RANK" not in os.environ:
        parser.error("start it with torchrun: LOCAL_RANK is not set")
    device = torch.device(args.device)
    if args.device == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("spccl")
    dense = dist.new_group(backend="nccl" if args.device == "cuda" else "gloo")
    for number in range(1, args.rounds + 1):
        for mode in modes:
            line = run(args, mode, dense if mode.startswith("dense") else dist.group.WORLD, device)
            gc.collect()
            if args.device == "cuda":
                torch.cuda.empty_cache()
            if dist.get_rank() == 0:
                print(f"round {number}: {line}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
