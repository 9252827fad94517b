"""Accuracy of a small CNN on scikit-learn's digits: dense, and with PrunedGradients at 99% and 99.9%.

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 4 bench/quality/digits.py --out bench/results/quality-digits.csv

Every rank is a process on the CPU; the backend is spccl. SGD with momentum 0.9, in the hook when it prunes. Rank 0
writes a row per run and prints mean and standard error over the seeds. Needs scikit-learn.
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
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import spccl

TEST_IMAGES = 450
BATCH = 16  # images per rank and step
# name -> (density, learning rate): dense is the same at 0.05, 0.1 and 0.2; pruned diverges at 0.4 (2 seeds each).
SETTINGS = {"dense": (1.0, 0.1), "99%": (0.01, 0.1), "99.9%": (0.001, 0.1)}
COLUMNS = ["setting", "lr", "seed", "ranks", "steps", "accuracy", "loss", "sent_mb", "density_sent", "seconds"]


def model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(512, 128), nn.ReLU(), nn.Linear(128, 10),
    )  # fmt: skip


def data() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Images [n, 1, 8, 8] and labels: training, then test. The split is the same in every run."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    test, train = order[:TEST_IMAGES], order[TEST_IMAGES:]
    return images[train], labels[train], images[test], labels[test]


def train(setting: str, seed: int, epochs: int, parts: tuple[Tensor, ...]) -> dict[str, object]:
    """One run; all ranks call it. Returns the row of the CSV."""
    density, lr = SETTINGS[setting]
    images, labels, test_images, test_labels = parts
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(seed)
    net = DistributedDataParallel(model())
    steps_per_epoch = len(labels) // (BATCH * ranks)
    steps, start = epochs * steps_per_epoch, time.monotonic()
    hook = None
    if density < 1:
        hook = spccl.ddp.PrunedGradients(
            density=density, momentum=0.9, warmup_steps=4 * steps_per_epoch, seed=seed
        ).register(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=lr, momentum=0.0 if hook else 0.9, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    generator = torch.Generator().manual_seed(seed)
    before = spccl.backend.stats().wire_bytes_sent
    sent_share = 0.0
    for _ in range(epochs):
        order = torch.randperm(len(labels), generator=generator)
        for i in range(steps_per_epoch):
            mine = order[(i * ranks + rank) * BATCH :][:BATCH]
            optimizer.zero_grad()
            F.cross_entropy(net(images[mine]), labels[mine]).backward()
            optimizer.step()
            schedule.step()
            sent_share += hook.stats()["density_sent"] if hook else 1.0
    with torch.no_grad():
        scores = net.module.eval()(test_images)
    return {
        "setting": setting, "lr": lr, "seed": seed, "ranks": ranks, "steps": steps,
        "accuracy": f"{(scores.argmax(1) == test_labels).float().mean():.5f}",
        "loss": f"{F.cross_entropy(scores, test_labels):.5f}",
        "sent_mb": f"{(spccl.backend.stats().wire_bytes_sent - before) / 1e6:.3f}",
        "density_sent": f"{sent_share / steps:.5f}",
        "seconds": f"{time.monotonic() - start:.1f}",
    }  # fmt: skip


def summary(rows: list[dict[str, object]]) -> None:
    """Mean and standard error of the accuracy per setting, and the distance from dense."""
    values = {s: [float(str(r["accuracy"])) for r in rows if r["setting"] == s] for s in SETTINGS}
    error = {s: statistics.stdev(v) / math.sqrt(len(v)) for s, v in values.items()}
    mean = {s: statistics.mean(v) for s, v in values.items()}
    for setting, v in values.items():
        print(
            f"{setting:6s} accuracy {mean[setting]:.4f} +- {error[setting]:.4f} (standard error, {len(v)} seeds), "
            f"{mean[setting] - mean['dense']:+.4f} from dense"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--lr", action="append", default=[], help="SETTING=RATE, to try another learning rate")
    args = parser.parse_args()
    for word in args.lr:
        name, rate = word.split("=")
        SETTINGS[name] = (SETTINGS[name][0], float(rate))
    torch.set_num_threads(1)
    dist.init_process_group("spccl")
    parts, rows = data(), []
    for seed in range(args.seeds):
        for setting in SETTINGS:
            rows.append(train(setting, seed, args.epochs, parts))
            if dist.get_rank() == 0:
                print(rows[-1], flush=True)
    if dist.get_rank() == 0:
        with args.out.open("w") as file:
            file.write(f"# commit: {os.environ.get('SPCCL_COMMIT', 'unknown')}\n# torch: {torch.__version__}\n")
            writer = csv.DictWriter(file, COLUMNS)
            writer.writeheader()
            writer.writerows(rows)
        summary(rows)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
