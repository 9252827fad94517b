"""How both runs of the demo and train.py train: the two recipes and their shared learning-rate schedule."""

import math
from dataclasses import dataclass

import torch
from torch.nn.parallel import DistributedDataParallel

from spccl.ddp import PrunedGradients


@dataclass(frozen=True)
class Recipe:
    """One way to train.

    backend        of torch.distributed
    density        share of each gradient sent; 1 means no hook at all
    peak_lr        each recipe's best of 0.3, 0.4, 0.6, 0.8, 1.0 in runs of 1500 steps
    momentum       in the optimizer without a hook, in the hook (momentum correction) with one
    clip_norm      of the averaged gradient without a hook, of local gradients with one
    """

    backend: str
    density: float
    peak_lr: float
    momentum: float = 0.9
    clip_norm: float = 1.0

    def build(self, model: DistributedDataParallel) -> tuple[torch.optim.SGD, PrunedGradients | None]:
        """Optimizer and hook; the hook is on the model already. Weight decay is not used."""
        if self.density == 1:
            return torch.optim.SGD(model.parameters(), lr=self.peak_lr, momentum=self.momentum), None
        hook = PrunedGradients(density=self.density, momentum=self.momentum, clip_norm=self.clip_norm, norm_every=50)
        return torch.optim.SGD(model.parameters(), lr=self.peak_lr), hook.register(model)

    def lr_at(self, step: int, n_steps: int) -> float:
        """100 steps up, level until half-way, then half a cosine down to 5% of the peak."""
        down = max(0.0, 2.0 * step / n_steps - 1.0)
        shape = 0.05 + 0.95 * 0.5 * (1.0 + math.cos(math.pi * down))
        return self.peak_lr * shape * min(1.0, (step + 1) / 100)


DENSE = Recipe(backend="gloo", density=1.0, peak_lr=0.4)
PRUNED = Recipe(backend="spccl", density=0.01, peak_lr=0.8)
