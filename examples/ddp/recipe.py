"""The two recipes of the demo, dense and pruned, and the learning-rate schedule of both."""

import math
from dataclasses import dataclass

import torch
from torch.nn.parallel import DistributedDataParallel

from spccl.ddp import PrunedGradients


@dataclass(frozen=True)
class Recipe:
    """One way to train.

    backend        of torch.distributed
    density        fraction of each gradient that is sent; 1 means that there is no hook
    peak_lr        the best of 0.3, 0.4, 0.6, 0.8 and 1.0 for this recipe, in runs of 1500 steps
    momentum       without a hook, of the optimizer; with one, of the hook (momentum correction)
    clip_norm      without a hook, of the averaged gradient; with one, of the local gradients
    """

    backend: str
    density: float
    peak_lr: float
    momentum: float = 0.9
    clip_norm: float = 1.0

    def build(self, model: DistributedDataParallel) -> tuple[torch.optim.SGD, PrunedGradients | None]:
        """Make the optimizer, and register the hook on the model. There is no weight decay."""
        if self.density == 1:
            return torch.optim.SGD(model.parameters(), lr=self.peak_lr, momentum=self.momentum), None
        hook = PrunedGradients(density=self.density, momentum=self.momentum, clip_norm=self.clip_norm, norm_every=50)
        optimizer = torch.optim.SGD(model.parameters(), lr=self.peak_lr)
        return optimizer, hook.register(model, optimizer=optimizer)

    def lr_at(self, step: int, n_steps: int) -> float:
        """Rises for 100 steps, is constant until half of the run, then falls as a half cosine to 5% of the peak."""
        down = max(0.0, 2.0 * step / n_steps - 1.0)
        shape = 0.05 + 0.95 * 0.5 * (1.0 + math.cos(math.pi * down))
        return self.peak_lr * shape * min(1.0, (step + 1) / 100)


DENSE = Recipe(backend="gloo", density=1.0, peak_lr=0.4)
PRUNED = Recipe(backend="spccl", density=0.01, peak_lr=0.8)
