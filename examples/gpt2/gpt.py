"""GPT-2 in plain torch: pre-norm blocks, learned positions, tied output layer, no dropout. Nothing is downloaded."""

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F


@dataclass(frozen=True)
class Size:
    n_layers: int
    width: int
    n_heads: int
    vocab: int = 50257
    context: int = 1024


SIZES = {
    "tiny": Size(2, 64, 2, vocab=256, context=64),  # 0.1 M parameters: for tests on a CPU
    "mini": Size(4, 128, 4, vocab=256, context=128),  # 0.9 M
    "small": Size(12, 768, 12),  # 124 M
    "medium": Size(24, 1024, 16),  # 355 M
    "large": Size(36, 1280, 20),  # 774 M
    "xl": Size(48, 1600, 25),  # 1558 M
}


class Block(nn.Module):
    """Attention and MLP with residual connections. Input and output are [batch, time, width]."""

    def __init__(self, width: int, n_heads: int):
        super().__init__()
        self.n_heads = n_heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        heads = self.qkv(self.norm1(x)).view(batch, length, 3, self.n_heads, -1)
        q, k, v = heads.permute(2, 0, 3, 1, 4)  # each [batch, n_heads, time, width / n_heads]
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class GPT(nn.Module):
    """forward(tokens [batch, time] int64, targets of the same shape) returns the mean cross entropy in nats."""

    def __init__(self, size: Size):
        super().__init__()
        self.token = nn.Embedding(size.vocab, size.width)
        self.position = nn.Embedding(size.context, size.width)
        self.blocks = nn.ModuleList(Block(size.width, size.n_heads) for _ in range(size.n_layers))
        self.norm = nn.LayerNorm(size.width)
        self.reset()

    @torch.no_grad()
    def reset(self) -> None:
        """GPT-2's initial values, from seed 0: the same on every rank and in every call."""
        generator = torch.Generator(self.token.weight.device).manual_seed(0)
        for name, p in self.named_parameters():
            if p.dim() == 1:
                p.fill_(1.0 if "norm" in name and name.endswith("weight") else 0.0)
            else:  # layers that add to the residual connections start smaller
                adds = name.endswith(("out.weight", "down.weight"))
                p.normal_(0.0, 0.02 * (2 * len(self.blocks)) ** -0.5 if adds else 0.02, generator=generator)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.token(tokens) + self.position.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.token.weight)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
