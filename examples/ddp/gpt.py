"""A small byte-level GPT: pre-norm blocks, learned positions, no dropout."""

import torch
from torch import nn
from torch.nn import functional as F


class Block(nn.Module):
    """Attention and MLP with residual connections; x [batch, time, width] to the same."""

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
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Next-byte model.

    forward(idx [batch, time] int64, targets of the same shape) returns the mean cross entropy in nats per
    byte, a 0-dim float32 tensor.
    """

    def __init__(self, n_layers: int = 4, width: int = 192, n_heads: int = 6, context: int = 128):
        super().__init__()
        self.token = nn.Embedding(256, width)
        self.position = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, n_heads) for _ in range(n_layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256)
        for name, p in self.named_parameters():
            if p.dim() > 1:  # the two projections into the residual stream smaller, as in GPT-2
                std = 0.02 * (2 * n_layers) ** -0.5 if name.endswith(("out.weight", "down.weight")) else 0.02
                nn.init.normal_(p, std=std)
            elif name.endswith("bias"):
                nn.init.zeros_(p)

    def forward(self, idx: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.token(idx) + self.position.weight[: idx.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
