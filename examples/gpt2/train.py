"""Train GPT-2 with DDP and 99% pruned gradients: an ordinary DDP script and two more lines.

    torchrun --nproc-per-node 4 train.py --size xl            # one process per GPU; without GPUs it runs on the CPU
    torchrun --nproc-per-node 4 train.py --size xl --dense    # for comparison: NCCL or Gloo, no hook

(1) and (2) mark the lines that differ from an ordinary DDP script.
"""

import argparse
import os
import time

import tokens
import torch
import torch.distributed as dist
from gpt import GPT, SIZES
from torch.nn.parallel import DistributedDataParallel

import spccl


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--dense", action="store_true", help="dense gradients over NCCL or Gloo, no hook")
    parser.add_argument("--density", type=float, default=0.01, help="share of the gradient that is sent")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--micro-batch", type=int, default=2, help="sequences per rank and step")
    parser.add_argument("--context", type=int, default=512, help="tokens per sequence, at most those of the size")
    parser.add_argument("--data", choices=["python", "random"], default="python")
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--log-every", type=int, default=10)
    args = parser.parse_args()
    size = SIZES[args.size]

    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dense_backend = "nccl" if on_gpu else "gloo"
    dist.init_process_group(dense_backend if args.dense else "spccl")  # (1) the backend
    rank = dist.get_rank()
    with device:
        model = GPT(size)
    model = DistributedDataParallel(model, bucket_cap_mb=128, gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9 if args.dense else 0.0)
    hook = None
    if not args.dense:  # (2) the hook. It has the momentum, so the optimizer has none.
        hook = spccl.ddp.PrunedGradients(density=args.density, momentum=0.9, clip_norm=1.0)
        hook.register(model, optimizer=optimizer)
    text = tokens.load(args.data, size.vocab).to(device)
    batches = tokens.Batches(text, args.micro_batch, min(args.context, size.context), seed=1 + rank)

    began = time.perf_counter()
    for step in range(1, args.steps + 1):
        with torch.autocast(device.type, torch.bfloat16, enabled=on_gpu):
            loss = model(*batches())
        loss.backward()
        if args.dense:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % args.log_every == 0 and rank == 0:
            sent = f", {hook.stats()['density_sent']:.2%} of the gradient sent" if hook else ""
            ms = (time.perf_counter() - began) * 1e3 / args.log_every
            print(f"step {step}: loss {loss.item():.3f}{sent}, {ms:.1f} ms per step", flush=True)
            began = time.perf_counter()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
