"""What the tests of spccl.sync for vLLM share: a model as a rank of a server has it, and a publisher of its weights."""

from __future__ import annotations

import threading
from pathlib import Path

import torch

from spccl.sync import Publisher

WIDTH, RANKS, WAIT_S = 8, 2, 100
SHAPES = {"embed": (10, WIDTH), "q": (8, WIDTH), "k": (4, WIDTH), "o": (WIDTH, 8), "norm": (WIDTH,)}


def weights(seed: int, dtype=torch.bfloat16) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=random).to(dtype) for name, shape in SHAPES.items()}


class Model(torch.nn.Module):
    """What a rank of a tensor-parallel server has: fused rows, columns of a matrix, a padded vocabulary."""

    def __init__(self, rank: int = 0, ranks: int = 1):
        super().__init__()
        self.rank, self.ranks = rank, ranks
        padded = -(-10 // (4 * ranks)) * 4
        for name, shape in {
            "embed": (padded, WIDTH),
            "qk": (12 // ranks, WIDTH),
            "o": (WIDTH, 8 // ranks),
            "norm": (WIDTH,),
        }.items():
            self.register_parameter(name, torch.nn.Parameter(torch.zeros(shape, dtype=torch.bfloat16)))

    def load_weights(self, named):
        r, n = self.rank, self.ranks
        for name, x in named:
            if name == "embed":
                mine = x[r * len(self.embed) :][: len(self.embed)]
                self.embed.data[: len(mine)].copy_(mine)
                self.embed.data[len(mine) :].fill_(0)
            elif name in ("q", "k"):
                rows = x.shape[0] // n
                self.qk.data.narrow(0, (name == "k") * 8 // n, rows).copy_(x.narrow(0, r * rows, rows))
            elif name == "o":
                self.o.data.copy_(x.chunk(n, dim=1)[r])
            else:
                self.norm.data.copy_(x)


def bits(model: torch.nn.Module) -> list[list[int]]:
    return [x.detach().view(torch.int16).flatten().tolist() for x in model.parameters()]


def loaded(named: dict[str, torch.Tensor], rank: int = 0, ranks: int = 1) -> Model:
    model = Model(rank, ranks)
    model.load_weights(list(named.items()))
    return model


class Run:
    """A publisher of weights whose version n has the bits of `weights(n)`, few of them changed."""

    def __init__(self, folder: Path, **options):
        self.folder, self.now = folder, weights(1)
        self.push = Publisher(folder, self.now, **options)
        self.was: dict[int, dict[str, torch.Tensor]] = {}

    def publish(self) -> int:
        for x in self.now.values() if self.was else ():
            x.view(-1)[:: 3 + len(self.was)] = float(len(self.was))
        version = self.push.publish()
        self.was[version] = {name: x.clone() for name, x in self.now.items()}
        return version


def damage(run: Run, version: int) -> tuple[Path, bytes]:
    (path,) = (run.folder / f"v{version:06d}").glob("delta*")
    good = path.read_bytes()
    path.chmod(0o644)
    path.write_bytes(good[:-3] + bytes([good[-3] ^ 1]) + good[-2:])
    return path, good


def fail(*args, **kwargs):
    raise RuntimeError("the test's own failure")


class Threads:
    """Workers that are threads of this process."""

    def __init__(self, rank: int, barrier: threading.Barrier, answers: list[str]):
        self.rank, self.size, self.barrier, self.answers = rank, len(answers), barrier, answers

    @classmethod
    def group(cls, n: int) -> list[Threads]:
        barrier, answers = threading.Barrier(n), [""] * n
        return [cls(rank, barrier, answers) for rank in range(n)]

    def exchange(self, answer: str, timeout_s: float) -> list[str]:
        self.answers[self.rank] = answer
        self.barrier.wait(timeout_s)
        found = list(self.answers)
        self.barrier.wait(timeout_s)
        return found
