"""Accuracy on scikit-learn's digits with many ranks: dense, 99% pruned, and 99% pruned with pruned sums.

    OMP_NUM_THREADS=1 python bench/quality/digits_many.py --out bench/results/quality-digits-many.csv

One process plays all ranks: each has its images, residual, velocity and plan of `spccl.prune`, which is what
`PrunedGradients` calls. The global batch is 64 images, so one dense run is that of any number of ranks. Learning rates
are tried with other seeds first; the best loss wins. Rows are written as they are measured, those of the search
too. Prints the difference to dense with its 95% interval (t distribution, seeds in pairs). Needs scikit-learn.
"""

from __future__ import annotations

import argparse
import csv
import math
import os
import statistics
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from digits import data, model
from torch import Tensor
from torch.func import functional_call, grad, vmap
from wire import all_reduce_bytes, dense_bytes

from spccl import prune

GLOBAL_BATCH, MOMENTUM, WEIGHT_DECAY = 64, 0.9, 1e-4
RATES = (0.05, 0.1, 0.2)
SEARCH_SEEDS = (100,)
T_95 = {2: 12.71, 4: 3.182, 6: 2.571, 8: 2.365, 10: 2.262}  # by number of seeds
COLUMNS = ["part", "setting", "lr", "seed", "ranks", "steps", "accuracy", "loss", "saving", "density_sent", "seconds"]
SUM_DENSITY = {"99%": 0.0, "99%, sums 2%": 0.02}  # by setting
SLICE = 32768  # float32


class Pruned:
    """The ranks' states, and the sums' if these are pruned."""

    def __init__(self, params: dict[str, Tensor], ranks: int, sum_density: float, rule: prune.Rule) -> None:
        self.rule, self.ranks, self.sum_density = rule, ranks, sum_density
        self.parts, n = [], 0
        for name, p in params.items():
            self.parts.append((name, n, p.numel(), p.dim() > 1 and p.numel() >= 4096))
            n += p.numel()
        self.kept, self.plans, self.sent_bytes, self.sent_share = torch.zeros(n), [], 0.0, 0.0
        for _ in range(ranks):
            segments = []
            for name, begin, numel, pruned in self.parts:
                state = prune.ParamState(name, numel, pruned, torch.zeros(prune.STATE_COLUMNS, dtype=torch.int64))
                state.prepare(torch.float32, pruned, True)
                segments.append((begin, state))
            self.plans.append(prune.Plan(segments, n, torch.float32, torch.device("cpu")))

    def average(self, grads: Tensor, step: int) -> Tensor:
        """What all ranks get for their gradients [ranks, n], which are overwritten."""
        for plan, row in zip(self.plans, grads, strict=True):
            plan.run(row, self.rule)
        mean = grads.mean(0)
        if self.sum_density:
            self.kept += mean
            mean = self._prune_sum(min(1.0, step / max(1, self.rule.warmup_steps)))
        padded = F.pad(torch.cat([grads, mean[None]]) != 0, (0, -mean.numel() % SLICE))
        self.sent_bytes += all_reduce_bytes(padded[:-1], padded[-1], 4).item()
        self.sent_share += (grads != 0).float().mean().item()
        return mean

    def _prune_sum(self, progress: float) -> Tensor:
        """Takes the largest entries of each pruned parameter from what is kept, and all of the others."""
        sent = self.kept.clone()
        for _, begin, numel, pruned in self.parts:
            part = sent[begin : begin + numel]
            if pruned:
                n_sent = math.ceil(self.sum_density**progress * numel)
                part[part.abs() < part.abs().topk(n_sent).values[-1]] = 0.0
        self.kept -= sent
        return sent


def train(setting: str, lr: float, seed: int, ranks: int, args: argparse.Namespace) -> dict[str, object]:
    """One run. Returns the row of the CSV."""
    images, labels, test_images, test_labels = data()
    torch.manual_seed(seed)
    net = model()
    params = {name: p.detach().clone() for name, p in net.named_parameters()}
    shapes = {name: p.shape for name, p in params.items()}
    steps_per_epoch = len(labels) // GLOBAL_BATCH
    steps, start, velocity = args.epochs * steps_per_epoch, time.monotonic(), 0.0

    def loss_of(weights: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(net, weights, (x,)), y)

    gradients = vmap(grad(loss_of), in_dims=(None, 0, 0))
    pruned = None
    if setting != "dense":
        rule = prune.Rule(0.01, 0.001, 1.0, MOMENTUM, warmup_steps=4 * steps_per_epoch, seed=seed)
        pruned = Pruned(params, ranks, SUM_DENSITY[setting], rule)
    generator = torch.Generator().manual_seed(seed)
    step = 0
    for _ in range(args.epochs):
        order = torch.randperm(len(labels), generator=generator)
        for batch in order[: steps_per_epoch * GLOBAL_BATCH].view(steps_per_epoch, ranks, -1):
            step += 1
            found = gradients(params, images[batch], labels[batch])
            flat = torch.cat([found[name].flatten(1) for name in params], 1)
            weights = torch.cat([p.flatten() for p in params.values()])
            if pruned is None:
                velocity = MOMENTUM * velocity + flat.mean(0) + WEIGHT_DECAY * weights
                change = velocity
            else:
                change = pruned.average(flat, step) + WEIGHT_DECAY * weights
            rate = lr * (1 + math.cos(math.pi * (step - 1) / steps)) / 2
            weights -= rate * change
            pieces = weights.split([shape.numel() for shape in shapes.values()])
            params = {name: part.view(shape) for part, (name, shape) in zip(pieces, shapes.items(), strict=True)}
    scores = functional_call(net, params, (test_images,)).detach()
    dense = dense_bytes(weights.numel(), ranks) * steps
    return {
        "setting": setting, "lr": lr, "seed": seed, "ranks": ranks, "steps": steps,
        "accuracy": f"{(scores.argmax(1) == test_labels).float().mean():.5f}",
        "loss": f"{F.cross_entropy(scores, test_labels):.5f}",
        "saving": f"{dense / pruned.sent_bytes:.2f}" if pruned else "1",
        "density_sent": f"{pruned.sent_share / steps:.5f}" if pruned else "1",
        "seconds": f"{time.monotonic() - start:.1f}",
    }  # fmt: skip


def best_rate(rows: list[dict[str, object]]) -> float:
    """The learning rate with the lowest mean loss."""
    by_rate = {lr: [float(str(r["loss"])) for r in rows if r["lr"] == lr] for lr in RATES}
    return min(RATES, key=lambda lr: statistics.mean(by_rate[lr]) if not any(map(math.isnan, by_rate[lr])) else 1e9)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--ranks", default="4,16,32")
    args = parser.parse_args()
    torch.set_num_threads(1)
    jobs = [("dense", 4)] + [(s, int(n)) for n in args.ranks.split(",") for s in SUM_DENSITY]
    with args.out.open("w") as file:
        file.write(f"# commit: {os.environ.get('SPCCL_COMMIT', 'unknown')}\n# torch: {torch.__version__}\n")
        file.write(f"# simulated, global batch {GLOBAL_BATCH} images\n")
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        dense: list[float] = []
        for setting, ranks in jobs:
            found: dict[str, list[dict[str, object]]] = {"search": [], "final": []}
            for part, seeds in (("search", SEARCH_SEEDS), ("final", range(args.seeds))):
                rates = RATES if part == "search" else (best_rate(found["search"]),)
                for lr, seed in [(lr, seed) for lr in rates for seed in seeds]:
                    found[part].append({"part": part, **train(setting, lr, seed, ranks, args)})
                    writer.writerow(found[part][-1])
                    file.flush()
            final = [float(str(r["accuracy"])) for r in found["final"]]
            dense = dense or final
            off = [a - b for a, b in zip(final, dense, strict=True)]
            error = T_95[len(off)] * statistics.stdev(off) / math.sqrt(len(off))
            print(f"{ranks} ranks, {setting}: {found['final'][-1]['lr']} {statistics.mean(final):.4f}, "
                  f"{statistics.mean(off):+.4f} +- {error:.4f} from dense, saving {found['final'][-1]['saving']}",
                  flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
