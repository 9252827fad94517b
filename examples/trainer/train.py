"""Trains a small GPT-2 with transformers.Trainer and spccl, and says what was sent.

    torchrun --nproc-per-node 2 examples/trainer/train.py               AdamW, SparseSync
    torchrun --nproc-per-node 2 examples/trainer/train.py --pruned      SGD, PrunedGradients

The model is made from a config, the text is this file's: nothing is downloaded. Needs transformers and accelerate.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import spccl


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pruned", action="store_true", help="SGD with PrunedGradients in place of SparseSync")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--folder", help="save checkpoints there after each half of the steps")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint at half of the steps")
    return parser.parse_args(argv)


def windows(n: int = 64, length: int = 32) -> list[dict[str, torch.Tensor]]:
    """`n` pieces of this file as byte tokens [length]."""
    text = torch.tensor(list(Path(__file__).read_bytes()))
    pieces = [text[i * 24 : i * 24 + length] for i in range(n)]
    return [{"input_ids": piece, "labels": piece} for piece in pieces]


def settings(args: argparse.Namespace, folder: str, **more) -> TrainingArguments:
    on_gpu = torch.cuda.is_available()
    if not on_gpu and "RANK" in os.environ:
        dist.init_process_group("spccl")  # on the CPU the Trainer would take Gloo; it uses a group that is there
    return TrainingArguments(
        output_dir=folder,
        use_cpu=not on_gpu,
        ddp_backend="spccl" if on_gpu else None,
        ddp_bucket_cap_mb=100,
        max_steps=args.steps,
        save_strategy="steps" if args.folder else "no",
        save_steps=args.steps // 2,
        per_device_train_batch_size=8,
        max_grad_norm=0,  # SparseSync clips
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=5,
        logging_steps=max(1, args.steps // 4),
        disable_tqdm=True,
        ddp_find_unused_parameters=False,
        report_to=[],
        **more,
    )


def make_trainer(args: argparse.Namespace, folder: str):
    """(trainer, callback)."""
    torch.manual_seed(0)
    tokens = {"vocab_size": 256, "bos_token_id": None, "eos_token_id": None}
    model = GPT2LMHeadModel(GPT2Config(**tokens, n_positions=32, n_embd=64, n_layer=2, n_head=2))
    if args.pruned:
        options = settings(args, folder, optim="sgd", learning_rate=0.3)  # momentum is in the hook
        trainer = Trainer(model, options, train_dataset=windows(), eval_dataset=windows(8))
        hook = spccl.ddp.PrunedGradients(density=0.05, momentum=0.9, warmup_steps=10)
        callback = spccl.integrations.PrunedGradientsCallback(trainer, hook)
    else:
        options = settings(args, folder, learning_rate=3e-3)  # optim is AdamW by default
        trainer = Trainer(model, options, train_dataset=windows(), eval_dataset=windows(8))
        callback = spccl.integrations.SparseSyncCallback(trainer, density=0.05, warmup_steps=10, clip_norm=1.0)
    trainer.add_callback(callback)
    return trainer, callback


def train(args: argparse.Namespace, folder: str):
    trainer, callback = make_trainer(args, folder)
    trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-{args.steps // 2}" if args.resume else None)
    return trainer, callback.hook if args.pruned else callback.optimizer


def main() -> None:
    args = arguments()
    with tempfile.TemporaryDirectory() as scratch_folder:
        trainer, part = train(args, args.folder or scratch_folder)
        loss = trainer.evaluate()["eval_loss"]
    figures = part.stats()
    if trainer.is_world_process_zero():
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        print(
            f"loss {losses[0]:.2f} -> {losses[-1]:.2f}, evaluated {loss:.2f}; last step sent "
            f"{figures['density_sent']:.1%} of the {'gradient' if args.pruned else 'weights'}: "
            f"{figures['sent_bytes'] / 1e3:.0f} kB of {figures['dense_bytes'] / 1e3:.0f} kB"
        )
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
