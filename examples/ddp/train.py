"""Train a byte-level GPT with 99% pruned gradients: the shortest complete use of the hook.

    torchrun --nproc-per-node 2 train.py                 # backend "spccl", gradients pruned
    torchrun --nproc-per-node 2 train.py --dense         # for comparison: backend "gloo", no hook

(1), (2) and (3) mark the lines that differ from an ordinary DDP script.
"""

import argparse
from pathlib import Path

import corpus
import torch
import torch.distributed as dist
from gpt import GPT
from torch.nn.parallel import DistributedDataParallel

import spccl  # noqa: F401  (1) registers backend="spccl"
from spccl.ddp import PrunedGradients

CONTEXT, BATCH = 128, 4


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--dense", action="store_true")
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--save", type=Path, help="folder for checkpoints, one hook state per rank")
    args = parser.parse_args()

    torch.set_num_threads(1)
    dist.init_process_group("gloo" if args.dense else "spccl")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(GPT(context=CONTEXT), gradient_as_bucket_view=True)
    if args.dense:
        hook = None
        optimizer = torch.optim.SGD(model.parameters(), lr=0.4, momentum=0.9)
    else:  # (2) an optimizer without momentum, and (3) the hook, which has it
        optimizer = torch.optim.SGD(model.parameters(), lr=0.8)
        hook = PrunedGradients(density=0.01, momentum=0.9, clip_norm=1.0).register(model, optimizer=optimizer)

    schedule = torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [
            torch.optim.lr_scheduler.LinearLR(optimizer, 0.01, total_iters=100),
            torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(1, args.steps - 100)),
        ],
        milestones=[100],
    )
    train, validation = corpus.load()
    generator = torch.Generator().manual_seed(rank)
    for step in range(1, args.steps + 1):
        loss = model(*corpus.batch(train, BATCH, CONTEXT, generator))
        loss.backward()
        if args.dense:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % 100 == 0 and rank == 0:
            sent = f", {hook.stats()['density_sent']:.1%} of the gradient sent" if hook else ""
            print(f"step {step}: loss {loss.item():.3f}{sent}", flush=True)

    with torch.no_grad():
        losses = [model.module(*pair) for pair in corpus.windows(validation, 16, CONTEXT, 8)]
    if rank == 0:
        print(f"validation: {sum(losses).item() / len(losses):.3f} nats per byte")
    if args.save:
        args.save.mkdir(parents=True, exist_ok=True)
        if rank == 0:
            torch.save(model.module.state_dict(), args.save / "model.pt")
        if hook:
            torch.save(hook.state_dict(), args.save / f"hook-{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
