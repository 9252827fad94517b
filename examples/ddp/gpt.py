"""A small byte-level GPT: pre-norm blocks, learned positions, no dropout. Its initial values suit plain SGD."""

import torch
from torch import nn
from torch.nn import functional as F


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
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Predicts the next byte.

    forward(idx [batch, time] int64, targets of the same shape) returns the mean cross entropy in nats per
    byte, a 0-dim float32 tensor.

    The standard deviation of the initial embeddings is 0.4; GPT-2 has 0.02. A pre-norm block divides by the size of
    the embeddings, so small embeddings get gradients 20 times larger than all other parameters. SGD cannot train
    both with one learning rate; Adam can. Validation loss after 1500 steps of SGD: 1.88 at 0.2, 1.77 at 0.4.
    """

    def __init__(self, n_layers: int = 2, width: int = 192, n_heads: int = 6, context: int = 128):
        super().__init__()
        self.token = nn.Embedding(256, width)
        self.position = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, n_heads) for _ in range(n_layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256)
        nn.init.normal_(self.token.weight, std=0.4)
        nn.init.normal_(self.position.weight, std=0.4)
        for layer in self.modules():
            if isinstance(layer, nn.Linear):
                nn.init.normal_(layer.weight, std=0.02)
                nn.init.zeros_(layer.bias)
        for block in self.blocks:  # layers that add to the residual connections start smaller, as in GPT-2
            nn.init.normal_(block.out.weight, std=0.02 * (2 * n_layers) ** -0.5)
            nn.init.normal_(block.down.weight, std=0.02 * (2 * n_layers) ** -0.5)

    def forward(self, idx: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.token(idx) + self.position.weight[: idx.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
