"""A byte-level GPT of which all workers' copies are trained at once: each weight has a leading dimension of workers.

`Layout` places the parameters of one worker in one flat vector, matrices first, each at a multiple of a tile.
"""

from __future__ import annotations

import dataclasses
import math

import torch
import torch.nn.functional as F
from torch import Tensor

VOCABULARY = 256
TILE = 4096  # elements; also the tile of the format pici
SLICE = 65536  # elements: 128 KiB of bfloat16, the slice of a collective


@dataclasses.dataclass(frozen=True)
class ModelSize:
    """Sizes of the GPT. `context` is the number of bytes that the model sees at once."""

    layers: int = 8
    width: int = 512
    heads: int = 8
    context: int = 512

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of each parameter by name. Matrices are (inputs, outputs)."""
        d = self.width
        shapes: dict[str, tuple[int, ...]] = {"embed": (VOCABULARY, d), "place": (self.context, d)}
        for i in range(self.layers):
            shapes |= {f"{i}.qkv": (d, 3 * d), f"{i}.out": (d, d), f"{i}.up": (d, 4 * d), f"{i}.down": (4 * d, d)}
        shapes["head"] = (d, VOCABULARY)
        for i in range(self.layers):
            shapes |= {f"{i}.{name}": (d,) for name in ("scale1", "shift1", "scale2", "shift2")}
        return shapes | {"scale": (d,), "shift": (d,)}


SIZES = {
    "25m": ModelSize(),
    "tiny": ModelSize(layers=2, width=64, heads=2, context=64),
    "half": ModelSize(layers=4, width=96, heads=4, context=64),
    "3m": ModelSize(layers=4, width=256, heads=4, context=256),
}


class Layout:
    """Where each parameter lies in the flat vector of one worker.

    `offset[name]` counts elements. `tile_tensor` [n_elems / TILE] has the number of the parameter that each tile
    belongs to. All vectors together count as the last parameter, which is always sent whole.
    """

    def __init__(self, size: ModelSize) -> None:
        self.shapes = size.shapes()
        self.offset: dict[str, int] = {}
        self.n_params = 0
        place, tiles = 0, []
        matrices = [name for name, shape in self.shapes.items() if len(shape) > 1]
        for number, name in enumerate(matrices):
            count = math.prod(self.shapes[name])
            self.offset[name] = place
            n_tiles = -(-count // TILE)
            tiles += [number] * n_tiles
            place += n_tiles * TILE
        self.n_matrix_elems = place
        for name, shape in self.shapes.items():
            if len(shape) == 1:
                self.offset[name] = place
                place += shape[0]
        self.n_elems = -(-place // SLICE) * SLICE
        tiles += [len(matrices)] * (self.n_elems // TILE - len(tiles))
        self.tile_tensor = torch.tensor(tiles)
        self.matrices = matrices
        self.n_params = sum(math.prod(shape) for shape in self.shapes.values())

    def numel(self, name: str) -> int:
        """Elements of a parameter of one worker."""
        return math.prod(self.shapes[name])

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """Views of `flat` [workers, n_elems], one per parameter, each [workers, *shape]."""
        workers = flat.shape[0]
        return {
            name: flat[:, self.offset[name] : self.offset[name] + math.prod(shape)].view(workers, *shape)
            for name, shape in self.shapes.items()
        }

    def initial(self, size: ModelSize, seed: int) -> Tensor:
        """Weights before training, [n_elems] float32 on the host. The same seed gives the same weights."""
        generator = torch.Generator().manual_seed(seed)
        flat = torch.zeros(1, self.n_elems)
        for name, view in self.views(flat).items():
            if "scale" in name:
                view.fill_(1.0)
            elif view.dim() > 2:
                deep = name.endswith((".out", ".down"))
                std = 0.02 / math.sqrt(2 * size.layers) if deep else 0.02
                view.copy_(torch.randn(view.shape, generator=generator) * std)
        return flat[0]


def _norm(x: Tensor, scale: Tensor, shift: Tensor, dtype: torch.dtype) -> Tensor:
    """Layer norm over the last dimension; x [workers, rows, width], scale and shift [workers, width]."""
    return (F.layer_norm(x, x.shape[-1:]) * scale[:, None] + shift[:, None]).to(dtype)


def losses(weights: dict[str, Tensor], text: Tensor, size: ModelSize) -> Tensor:
    """Mean loss of each worker in nats per byte, [workers].

    Args:
        weights: by name, [workers, *shape]. Products are computed in the dtype of the matrices.
        text: bytes as int64, [workers, batch, context + 1].
    """
    workers, batch, length = text.shape
    length -= 1
    dtype = weights["embed"].dtype
    inputs, wanted = text[..., :-1].reshape(workers, -1), text[..., 1:].reshape(-1)
    one_hot = (inputs[..., None] == torch.arange(VOCABULARY, device=text.device)).to(dtype)
    x = torch.bmm(one_hot, weights["embed"]).float()
    x = (x.view(workers, batch, length, -1) + weights["place"][:, None].float()).view(workers, batch * length, -1)
    heads, depth = size.heads, size.width // size.heads
    for i in range(size.layers):
        w = {name: weights[f"{i}.{name}"] for name in ("qkv", "out", "up", "down", "scale1", "shift1")}
        y = torch.bmm(_norm(x, w["scale1"], w["shift1"], dtype), w["qkv"])
        q, k, v = y.view(workers * batch, length, 3, heads, depth).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + torch.bmm(y.transpose(1, 2).reshape(workers, batch * length, -1), w["out"])
        y = torch.bmm(_norm(x, weights[f"{i}.scale2"], weights[f"{i}.shift2"], dtype), w["up"])
        x = x + torch.bmm(F.gelu(y), w["down"])
    logits = torch.bmm(_norm(x, weights["scale"], weights["shift"], dtype), weights["head"])
    loss = F.cross_entropy(logits.float().view(-1, VOCABULARY), wanted, reduction="none")
    return loss.view(workers, -1).mean(1)
