"""Train a byte-level GPT with FSDP2, two replicas of shards, and compare what travels between the replicas.

    torchrun --nproc-per-node 4 train.py --recipe dense        # SGD with momentum, torch's own average over replicas
    torchrun --nproc-per-node 4 train.py --recipe prune        # SGD with spccl.fsdp.prune
    torchrun --nproc-per-node 4 train.py --recipe dense-adamw  # AdamW, torch's own average
    torchrun --nproc-per-node 4 train.py --recipe sync         # AdamW with SparseSync between replicas
"""

import argparse
import contextlib
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import spccl

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "ddp"))
import corpus
from gpt import GPT

CONTEXT, BATCH = 128, 4


def make_optimizer(recipe: str, model, mesh):
    """The optimizer of a recipe. The model is sharded, and on `prune` gets a hook."""
    if recipe == "prune":
        optimizer = torch.optim.SGD(model.parameters(), lr=0.8)  # no momentum: it is in the hook
        spccl.fsdp.prune(model, density=0.01, momentum=0.9, clip_norm=1.0, optimizer=optimizer)
        return optimizer
    if recipe == "dense":
        return torch.optim.SGD(model.parameters(), lr=0.4, momentum=0.9)
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if recipe == "dense-adamw":
        return adamw
    return spccl.optim.SparseSync(adamw, density=0.01, group=mesh.get_group("replicate"), clip_norm=1.0)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--recipe", choices=("dense", "prune", "dense-adamw", "sync"), default="prune")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--width", type=int, default=96)
    args = parser.parse_args()

    torch.set_num_threads(1)
    dist.init_process_group("spccl")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(0)
    model = GPT(context=CONTEXT, width=args.width)
    over = mesh["shard"] if args.recipe == "sync" else mesh  # torch averages over replicas, unless SparseSync does
    for block in model.blocks:
        fully_shard(block, mesh=over)
    fully_shard(model, mesh=over)
    optimizer = make_optimizer(args.recipe, model, mesh)
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 0.05, total_iters=20)

    train, validation = corpus.load()
    generator = torch.Generator().manual_seed(rank)
    before = spccl.backend.stats(mesh.get_group("replicate")).wire_bytes_sent
    for step in range(1, args.steps + 1):
        optimizer.zero_grad()
        loss = model(*corpus.batch(train, BATCH, CONTEXT, generator))
        loss.backward()
        if args.recipe.startswith("dense"):  # the others have clipped before the exchange
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        warmup.step()
        if step % 50 == 0 and rank == 0:
            print(f"step {step}: loss {loss.item():.3f}", flush=True)
    sent = spccl.backend.stats(mesh.get_group("replicate")).wire_bytes_sent - before

    common = optimizer.global_weights() if args.recipe == "sync" else contextlib.nullcontext()
    with torch.no_grad(), common:
        losses = [model(*pair) for pair in corpus.windows(validation, 16, CONTEXT, 8)]
    if rank == 0:
        print(f"validation: {sum(losses).item() / len(losses):.3f} nats per byte")
        print(f"between replicas: {sent / args.steps / 1000:.0f} kB per step and rank")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
