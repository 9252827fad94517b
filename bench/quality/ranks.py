"""Train by `spccl.optim.SparseSync` on real ranks, with the data and the recipe of a simulated run.

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 4 bench/quality/ranks.py --recipes bench/quality/recipes.txt \
        --only NAME --size tiny --steps 500 --out ranks.csv

CPU, backend spccl. The CSV has the columns of run.py; its bytes are those that the backend has counted. With select=top
thresholds come from other samples than in the simulation, so losses agree to the noise of a run and not to the bit.
With --per-host L each L ranks count as a host, and hosts prune: bytes are then those between hosts, of a whole host.
Recipes that SparseSync cannot follow are refused by the name of the field.
"""

from __future__ import annotations

import argparse
import csv
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from model import SIZES, TILE, Layout, losses
from recipes import Recipe, named, read_recipes
from run import COLUMNS, start_file
from simulate import batch_starts
from text import read_text, windows
from wire import dense_bytes

import spccl


def settings_of(recipe: Recipe, steps: int) -> dict[str, object]:
    """The recipe as arguments of `SparseSync`.

    Raises: ValueError that names a field which SparseSync does not have.
    """
    moments = {"local": False, "corrected": True, "scaled": "scaled"}
    for name, there, wanted in (
        ("mode", recipe.mode == "update", "update"),
        ("select", recipe.select in ("top", "chunk"), "top or chunk"),
        ("moment", recipe.moment in moments, ", ".join(moments)),
        ("power", recipe.power == 0, "0"),
        ("decay_in_change", recipe.decay_in_change, "True"),
        ("chunk", recipe.chunk == TILE, f"{TILE}"),
        ("magnitude", recipe.magnitude == "mean", "mean"),
        ("sum_density", recipe.sum_density == 0, "0"),
    ):
        if not there:
            raise ValueError(
                f"ranks.py: recipe has {name}={getattr(recipe, name)}, which SparseSync does not have, wanted "
                f"{wanted}; bench/quality/run.py simulates it"
            )
    one_bit = recipe.wire == "1bit"
    return {
        "density": None if one_bit else lambda exchange: recipe.density_at((exchange + 1) * recipe.every, steps),
        "warmup_steps": recipe.warmup if one_bit else 0,
        "every": recipe.every,
        "leak": recipe.decay,
        "look_ahead": recipe.look_ahead,
        "outer_lr": recipe.outer_lr,
        "outer_momentum": recipe.outer_momentum,
        "correct_second_moment": moments[recipe.moment],
        "wire_dtype": torch.bfloat16 if recipe.wire == "bfloat16" else None,
        "chunk": TILE if recipe.select == "chunk" else 0,
        "bits": {"1bit": 1, "2bit": 2}.get(recipe.wire),
    }


class Trainer:
    """One rank's copy of the model, its batches and its optimizer."""

    def __init__(self, args: argparse.Namespace, recipe: Recipe, text: torch.Tensor) -> None:
        self.args, self.recipe, self.text, self.size = args, recipe, text, SIZES[args.size]
        self.layout = Layout(self.size)
        flat = self.layout.initial(self.size, args.seed)[None]
        self.weights = {name: view.clone().requires_grad_() for name, view in self.layout.views(flat).items()}
        self.optimizer = self.wrap(recipe)
        rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        self.starts = batch_starts(len(text), self.size.context, (args.steps, ranks, args.batch), args.seed)[:, rank]
        self.step = 0

    def wrap(self, recipe: Recipe) -> spccl.optim.SparseSync:
        args, betas = self.args, (recipe.beta1, recipe.beta2)
        adamw = torch.optim.AdamW(self.weights.values(), lr=recipe.lr, betas=betas, weight_decay=recipe.weight_decay)
        settings = settings_of(recipe, args.steps)
        return spccl.optim.SparseSync(adamw, norm_every=0, check_every=50, seed=args.seed, **settings)

    def advance(self) -> float:
        self.step += 1
        for group in self.optimizer.param_groups:
            group["lr"] = self.recipe.lr_at(self.step, self.args.steps)
        self.optimizer.zero_grad()
        batch = windows(self.text, self.starts[self.step - 1], self.size.context + 1)
        loss = losses(self.weights, batch[None], self.size).sum()
        loss.backward()
        self.optimizer.step()
        return loss.item()

    @torch.no_grad()
    def evaluate(self, text: torch.Tensor, n_windows: int) -> tuple[float, float]:
        """Held-out loss of the global weights and of the mean of the ranks' weights. All ranks call it."""
        own = {name: w.detach().clone() for name, w in self.weights.items()}
        for w in own.values():
            dist.all_reduce(w)
            w.div_(dist.get_world_size())
        with self.optimizer.global_weights():
            agreed = {name: w.detach().clone() for name, w in self.weights.items()}
        generator = torch.Generator().manual_seed(7)
        starts = torch.randint(0, len(text) - self.size.context - 1, (n_windows,), generator=generator)
        totals = [0.0, 0.0]
        for part in starts.split(64):
            batch = windows(text, part[None], self.size.context + 1)
            for i, weights in enumerate((agreed, own)):
                totals[i] += losses(weights, batch, self.size).item() * len(part) / n_windows
        return totals[0], totals[1]


def train(args: argparse.Namespace, name: str, recipe: Recipe, texts: tuple) -> None:
    trainer = Trainer(args, recipe, texts[0])
    n, ranks = trainer.layout.n_params, dist.get_world_size()
    pruning, across = trainer.optimizer.ranks.n_pruning, trainer.optimizer.ranks.across
    sent, spent_s = 0.0, 0.0
    while trainer.step < args.steps:
        before, start, total = spccl.backend.stats(across).wire_bytes_sent, time.monotonic(), 0.0
        until = min(args.steps, trainer.step + args.evaluate_every)
        n_steps = until - trainer.step
        while trainer.step < until:
            total += trainer.advance()
        spent_s += time.monotonic() - start
        sums = torch.tensor([spccl.backend.stats(across).wire_bytes_sent - before, total], dtype=torch.float64)
        dist.all_reduce(sums)
        sent += sums[0].item() / pruning  # by a host's ranks together
        windows_now = args.final_windows if trainer.step == args.steps else args.evaluate_windows
        loss, consolidated = trainer.evaluate(texts[1], windows_now)
        row = {
            "name": name, "seed": args.seed, "steps": args.steps, "step": trainer.step,
            "bytes_per_param": f"{sent / n:.5g}",
            "saving": f"{dense_bytes(n, pruning) * trainer.step / sent:.4g}",
            "train_loss": f"{sums[1].item() / n_steps / ranks:.5f}",
            "loss": f"{loss:.5f}", "loss_consolidated": f"{consolidated:.5f}", "seconds": f"{spent_s:.1f}",
        }  # fmt: skip
        if dist.get_rank() == 0:
            print(row, flush=True)
            with args.out.open("a") as file:
                csv.DictWriter(file, COLUMNS).writerow(row)


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--recipes", type=Path, required=True)
    p.add_argument("--only", required=True)
    p.add_argument("--out", type=Path, required=True)
    p.add_argument("--size", choices=sorted(SIZES), default="tiny")
    p.add_argument("--steps", type=int, default=500)
    p.add_argument("--batch", type=int, default=8)
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--evaluate-every", type=int, default=250)
    p.add_argument("--evaluate-windows", type=int, default=256)
    p.add_argument("--final-windows", type=int, default=2048)
    p.add_argument("--text-mb", type=int, default=5)
    p.add_argument("--text-cache", type=Path)
    p.add_argument("--per-host", type=int, default=0, help="ranks that count as one host; 0: as they are")
    args = p.parse_args()
    if args.per_host:
        os.environ["SPCCL_HOST_ID"] = f"host {int(os.environ['RANK']) // args.per_host}"
    recipes = read_recipes(args.recipes)
    names = named(args.only, recipes)
    for name in names:
        settings_of(recipes[name], args.steps)  # refuse before the first run
    torch.set_num_threads(1)
    dist.init_process_group("spccl")
    train_text, held_out, digest = read_text(args.text_mb * 1_000_000, args.text_cache)
    if dist.get_rank() == 0:
        start_file(args.out, {"text": f"digest {digest}", "torch": torch.__version__, "ranks": dist.get_world_size()})
    for name in names:
        train(args, name, recipes[name], (train_text, held_out))
    if dist.get_rank() == 0:
        print(f"slices sent by format: {spccl.backend.stats().frames_sent}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
