"""Trains a small recurrent byte model with Lightning and spccl, and says what was sent.

    torchrun --nproc-per-node 2 examples/lightning/train.py               AdamW, SparseSync
    torchrun --nproc-per-node 2 examples/lightning/train.py --pruned      SGD, PrunedGradients

The text is this file's. Needs lightning.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path

import lightning
import torch
import torch.distributed as dist

import spccl


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pruned", action="store_true", help="SGD with PrunedGradients in place of SparseSync")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--folder", help="save a checkpoint there after each half of the steps")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint at half of the steps")
    return parser.parse_args(argv)


def windows(n: int = 64, length: int = 32) -> list[torch.Tensor]:
    """`n` pieces of this file as byte tokens [length]."""
    text = torch.tensor(list(Path(__file__).read_bytes()))
    return [text[i * 24 : i * 24 + length] for i in range(n)]


class Model(lightning.LightningModule):
    def __init__(self, pruned: bool) -> None:
        super().__init__()
        self.pruned = pruned
        self.embed = torch.nn.Embedding(256, 64)
        self.cells = torch.nn.GRU(64, 128, batch_first=True)
        self.guess = torch.nn.Linear(128, 256)  # no dropout: Lightning does not save the generators

    def loss(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden, _ = self.cells(self.embed(tokens[:, :-1]))
        return torch.nn.functional.cross_entropy(self.guess(hidden).flatten(0, 1), tokens[:, 1:].flatten())

    def training_step(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.loss(tokens)

    def validation_step(self, tokens: torch.Tensor) -> None:
        self.log("loss", self.loss(tokens), sync_dist=True)

    def configure_optimizers(self):
        if self.pruned:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.3)  # momentum is in the hook
        else:
            adamw = torch.optim.AdamW(self.parameters(), lr=3e-3)
            optimizer = spccl.optim.SparseSync(adamw, density=0.05, warmup_steps=10, clip_norm=1.0)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1, (step + 1) / 5))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def make_strategy(args: argparse.Namespace):
    if args.pruned:
        hook = spccl.ddp.PrunedGradients(density=0.05, momentum=0.9, warmup_steps=10)
        return spccl.integrations.PrunedGradientsStrategy(hook, bucket_cap_mb=100)
    return spccl.integrations.SparseSyncStrategy()  # no DDP: the optimizer exchanges


def train(args: argparse.Namespace, folder: str):
    lightning.seed_everything(0, verbose=False)
    half = lightning.pytorch.callbacks.ModelCheckpoint(
        folder, filename="{step}", every_n_train_steps=args.steps // 2, save_top_k=-1
    )
    trainer = lightning.Trainer(
        accelerator="auto" if torch.cuda.is_available() else "cpu",
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        strategy=make_strategy(args),
        max_steps=args.steps,
        callbacks=[half] if args.folder else [],
        enable_checkpointing=bool(args.folder),
        enable_progress_bar=False,
        enable_model_summary=False,
        log_every_n_steps=1,
        logger=False,
        default_root_dir=folder,
    )
    module = Model(args.pruned)
    text, some = windows(), windows(16)
    loaders = [torch.utils.data.DataLoader(data, batch_size=8) for data in (text, some)]
    trainer.fit(module, *loaders, ckpt_path=f"{folder}/step={args.steps // 2}.ckpt" if args.resume else None)
    return trainer, module


def main() -> None:
    args = arguments()
    with tempfile.TemporaryDirectory() as scratch_folder:
        trainer, _ = train(args, args.folder or scratch_folder)
    figures = trainer.strategy.hook.stats() if args.pruned else trainer.optimizers[0].stats()
    if trainer.is_global_zero:
        print(
            f"loss {float(trainer.callback_metrics['loss']):.2f}; last step sent {figures['density_sent']:.1%} of the "
            f"{'gradient' if args.pruned else 'weights'}: {figures['sent_bytes'] / 1e3:.0f} kB of "
            f"{figures['dense_bytes'] / 1e3:.0f} kB"
        )
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
