"""The model of workers/sparse_sync.py, and the rule of `SparseSync` in plain torch.

With sample=1 the threshold of a parameter of at most 24576 elements is that of its exact top k.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable

import torch

from spccl.optim import SparseSync
from workers.common import WORLD

DEVICE = torch.device(os.environ.get("SPCCL_TEST_DEVICE", "cpu"))


class Net(torch.nn.Module):
    """Two pruned weights, biases and a small weight that are sent whole, a frozen weight, one used twice (tied)."""

    def __init__(self, dtype: torch.dtype = torch.float32, seed: int = 0):
        super().__init__()
        g = torch.Generator().manual_seed(seed)

        def param(*shape: int) -> torch.nn.Parameter:
            x = torch.randn(shape, generator=g) / math.sqrt(shape[-1])
            return torch.nn.Parameter(x.to(DEVICE, dtype))

        self.first, self.bias, self.middle = param(80, 100), param(80), param(80, 80)
        self.frozen, self.small, self.unused = param(80, 80), param(7, 80), param(71, 71)
        self.frozen.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(x @ self.first.T + self.bias)
        h = torch.tanh(h @ self.middle.T + x[:, :80] @ self.frozen)
        h = torch.tanh(h @ self.middle)  # tied
        return h @ self.small.T


def data(rank: int, step: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    g = torch.Generator().manual_seed(10_000 * step + rank)
    return torch.randn(16, 100, generator=g).to(DEVICE, dtype)


def loss_of(net: Net, rank: int, step: int) -> torch.Tensor:
    return net(data(rank, step, net.first.dtype)).float().square().mean()


def adamw(net: Net, **kwargs) -> torch.optim.Optimizer:
    """Two groups with their own learning rate and weight decay."""
    groups = [
        {"params": [net.first, net.bias, net.frozen], "lr": 3e-3},
        {"params": [net.middle, net.small, net.unused], "lr": 1e-3, "weight_decay": 0.1},
    ]
    return torch.optim.AdamW(groups, **kwargs)


def trained(net: Net) -> dict[str, torch.nn.Parameter]:
    return {name: p for name, p in net.named_parameters() if p.requires_grad}


def weights(opt: SparseSync, net: Net) -> tuple[dict, dict]:
    """(this rank's, the global ones)."""
    own = {n: p.detach().clone() for n, p in trained(net).items()}
    with opt.global_weights():
        common = {n: p.detach().clone() for n, p in trained(net).items()}
    assert all(torch.equal(p, own[n]) for n, p in trained(net).items())
    return own, common


def require_same(got: tuple[dict, dict], wanted: tuple[dict, dict], tolerance: float = 0.0, few: float = 0.0) -> None:
    """few: the share of a parameter's entries that may differ by more."""
    for what, a, b in zip(("local", "global"), got, wanted, strict=True):
        for name in a:
            diffs = (a[name].float() - b[name].float()).abs().flatten()
            diff = diffs.topk(int(few * diffs.numel()) + 1).values[-1].item()
            assert diff <= tolerance, f"{what} {name}: {diff}"


def is_whole(x: torch.Tensor) -> bool:
    """Whether a parameter is sent whole."""
    return x.dim() < 2 or x.numel() < 4096


def top(x: torch.Tensor, density: float) -> torch.Tensor:
    """The entries of x with the largest magnitude, zeros elsewhere."""
    k = max(1, math.floor(density * x.numel() + 0.5))
    threshold = x.abs().flatten().topk(k).values[-1]
    return torch.where(x.abs() >= threshold, x, torch.zeros(()))


def top_of_chunks(x: torch.Tensor, density: float, chunk: int) -> torch.Tensor:
    """Of each `chunk` neighbouring entries of x exactly the largest share `density`; of equal ones the first."""
    out = torch.zeros_like(x).flatten()
    for begin in range(0, x.numel(), chunk):
        part = x.flatten()[begin : begin + chunk]
        k = max(1, math.floor(density * part.numel() + 0.5))
        places = part.abs().sort(descending=True, stable=True).indices[:k]
        out[begin + places] = part[places]
    return out.view_as(x)


def two_levels(x: torch.Tensor, chunk: int) -> torch.Tensor:
    """Entries of x as sign and level: the means of a chunk's magnitudes below and above their mean, in bfloat16."""
    out = torch.zeros_like(x).flatten()
    for begin in range(0, x.numel(), chunk):
        part = x.flatten()[begin : begin + chunk].double()
        size, high = part.abs(), part.abs() >= part.abs()[part != 0].mean()
        for group in (high, (part != 0) & ~high):
            level = size[group].mean().to(torch.bfloat16).double() if group.any() else 0.0
            out[begin : begin + chunk] += (part.sign() * level * group).float()
    return out.view_as(x)


class Simulation:
    """All ranks in one process, float32 throughout.

    per_host: ranks of each host that average their gradients; then n counts hosts. Each of them owns a part of every
    parameter, which begins at a multiple of 8 and has a threshold, or chunks, of its own.
    """

    def __init__(
        self, n: int = WORLD, every: int = 1, leak: float = 1.0, outer=(1.0, 0.0), make=adamw, wire=torch.float32,
        chunk: int = 0, levels: bool = False, per_host: int = 1,
    ):  # fmt: skip
        self.per_host = per_host
        self.nets = [Net() for _ in range(n)]
        self.optimizers = [make(net) for net in self.nets]
        self.common = {name: p.detach().clone() for name, p in trained(self.nets[0]).items()}
        self.velocity = {name: torch.zeros_like(z) for name, z in self.common.items()}
        self.every, self.leak, self.outer, self.wire, self.chunk = every, leak, outer, wire, chunk
        self.levels = levels

    def step(self, t: int, density: float) -> None:
        for host, (net, optimizer) in enumerate(zip(self.nets, self.optimizers, strict=True)):
            found: dict[str, list[torch.Tensor]] = {}
            for rank in range(host * self.per_host, (host + 1) * self.per_host):
                optimizer.zero_grad()
                loss_of(net, rank, t).backward()
                for name, p in trained(net).items():
                    found.setdefault(name, []).extend([] if p.grad is None else [p.grad.clone()])
            for name, p in trained(net).items():
                p.grad = sum(found[name], torch.zeros_like(p)) / self.per_host if found[name] else None
            optimizer.step()
        if (t + 1) % self.every == 0:
            self.exchange(density)

    def chosen(self, x: torch.Tensor, density: float) -> torch.Tensor:
        if is_whole(x) or density >= 1:
            return x.clone()
        if self.chunk:
            return self.of_parts(x, lambda part: top_of_chunks(part, density, self.chunk))
        return self.of_parts(x, lambda part: top(part, density))

    def of_parts(self, x: torch.Tensor, rule: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        share = -(-x.numel() // (self.per_host * 8)) * 8
        return torch.cat([rule(part) for part in x.flatten().split(share)]).view_as(x)

    @torch.no_grad()
    def exchange(self, density: float) -> None:
        for name, z in self.common.items():
            locals_ = [trained(net)[name] for net in self.nets]
            total = torch.zeros_like(z)
            for w in locals_:
                total += self.send(w, z, density)
            self.receive(name, total.to(self.wire).float() / len(self.nets))

    def send(self, w: torch.Tensor, z: torch.Tensor, density: float) -> torch.Tensor:
        """What is sent of w - z, which leaves w."""
        chosen = self.chosen(w - z, density)
        sent = chosen.to(self.wire).float()
        if self.levels:  # the leak is of all that stays unsent
            if not is_whole(w):
                sent = self.of_parts(chosen, lambda part: two_levels(part, self.chunk))
            w.copy_((w - z - sent) * self.leak + z)
            return sent
        if self.leak < 1:
            w.copy_((w - z) * self.leak + z)
        w.copy_(torch.where(chosen != 0, z + (chosen - sent), w))
        return sent

    def receive(self, name: str, average: torch.Tensor) -> None:
        lr, momentum = self.outer
        if momentum:
            self.velocity[name].mul_(momentum).add_(average)
            average = average + momentum * self.velocity[name]
        average = average * lr
        self.common[name] += average
        for net in self.nets:
            trained(net)[name].add_(average)
