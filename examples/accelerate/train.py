"""Trains a small GPT-2 with Accelerate and spccl, and says what was sent.

    torchrun --nproc-per-node 2 examples/accelerate/train.py               AdamW, SparseSync
    torchrun --nproc-per-node 2 examples/accelerate/train.py --pruned      SGD, PrunedGradients

The model is made from a config, the text is this file's: nothing is downloaded. Needs accelerate and transformers.
"""

from __future__ import annotations

import argparse
import itertools
import os
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs, InitProcessGroupKwargs
from transformers import GPT2Config, GPT2LMHeadModel

import spccl


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pruned", action="store_true", help="SGD with PrunedGradients in place of SparseSync")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--folder", help="save a checkpoint there after half of the steps")
    parser.add_argument("--resume", action="store_true", help="load that checkpoint first")
    return parser.parse_args(argv)


def windows(n: int = 64, length: int = 32) -> list[torch.Tensor]:
    """`n` pieces of this file as byte tokens [length]."""
    text = torch.tensor(list(Path(__file__).read_bytes()))
    return [text[i * 24 : i * 24 + length] for i in range(n)]


def make_accelerator() -> Accelerator:
    handlers = [DistributedDataParallelKwargs(bucket_cap_mb=100, gradient_as_bucket_view=True)]
    if torch.cuda.is_available():
        handlers.append(InitProcessGroupKwargs(backend="spccl"))
    elif "RANK" in os.environ:
        dist.init_process_group("spccl")  # on the CPU Accelerate would take Gloo; it uses a group that is there
    return Accelerator(kwargs_handlers=handlers, cpu=not torch.cuda.is_available())


def prepare(accelerator: Accelerator, model: torch.nn.Module, pruned: bool):
    """(model, optimizer, the part of spccl)."""
    if pruned:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3)  # momentum is in the hook
        model, optimizer = accelerator.prepare(model, optimizer)
        part = spccl.ddp.PrunedGradients(density=0.05, momentum=0.9, warmup_steps=10)
        if accelerator.num_processes > 1:
            part.register(model, optimizer=optimizer)
    else:
        model = accelerator.prepare_model(model, evaluation_mode=True)  # no DDP; it stays in training mode
        part = spccl.optim.SparseSync(
            torch.optim.AdamW(model.parameters(), lr=3e-3), density=0.05, warmup_steps=10, clip_norm=1.0
        )
        optimizer = part
    spccl.integrations.keep_states(accelerator, part)  # in save_state and load_state
    return model, accelerator.prepare(optimizer), part


def train(args: argparse.Namespace):
    accelerator = make_accelerator()
    torch.manual_seed(0)
    tokens = {"vocab_size": 256, "bos_token_id": None, "eos_token_id": None}
    config = GPT2Config(**tokens, n_positions=32, n_embd=64, n_layer=2, n_head=2, loss_type="ForCausalLM")
    model, optimizer, part = prepare(accelerator, GPT2LMHeadModel(config), args.pruned)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1, (step + 1) / 5))
    loader, schedule = accelerator.prepare(torch.utils.data.DataLoader(windows(), batch_size=8), schedule)
    batches = itertools.islice(itertools.chain.from_iterable(itertools.repeat(loader)), args.steps)
    first, losses = 1, []
    if args.resume:
        first += sum(1 for _ in itertools.islice(batches, args.steps // 2))  # before load_state: loaders draw numbers
        accelerator.load_state(args.folder)
    for step, tokens in enumerate(batches, first):
        optimizer.zero_grad()
        loss = model(input_ids=tokens, labels=tokens).loss
        accelerator.backward(loss)
        optimizer.step()
        schedule.step()
        losses.append(float(accelerator.reduce(loss.detach(), "mean")))
        if args.folder and step == args.steps // 2:
            accelerator.save_state(args.folder)
    return accelerator, model, part, losses


def main() -> None:
    args = arguments()
    accelerator, _, part, losses = train(args)
    figures = part.stats()
    if accelerator.is_main_process:
        print(
            f"loss {losses[0]:.2f} -> {losses[-1]:.2f}; last step sent {figures['density_sent']:.1%} of the "
            f"{'gradient' if args.pruned else 'weights'}: {figures['sent_bytes'] / 1e3:.0f} kB of "
            f"{figures['dense_bytes'] / 1e3:.0f} kB"
        )
    accelerator.end_training()
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
