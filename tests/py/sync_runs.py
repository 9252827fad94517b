"""What the tests of spccl.sync share: small models, steps that change them, comparison bit by bit."""

from __future__ import annotations

import json
import os
import traceback
from pathlib import Path

import torch

from spccl.sync import Publisher, Subscriber
from spccl.sync.manifest import sha256

STAGING = 4 << 20


class Net(torch.nn.Module):
    """Tied weights, a buffer of integers, a tensor without dimensions, an empty one."""

    def __init__(self, seed: int = 0, width: int = 40):
        super().__init__()
        torch.manual_seed(seed)
        self.embed = torch.nn.Embedding(200, width)
        self.body = torch.nn.Linear(width, width)
        self.head = torch.nn.Linear(width, 200, bias=False)
        self.head.weight = self.embed.weight
        self.scale = torch.nn.Parameter(torch.rand(()))
        self.register_buffer("count", torch.zeros(3, dtype=torch.int64))
        self.register_buffer("nothing", torch.zeros(0, 5))


@torch.no_grad()
def change(net: torch.nn.Module, seed: int, density: float = 0.02) -> None:
    """A step of training: some weights change, each buffer too."""
    random = torch.Generator().manual_seed(1000 + seed)
    for x in net.parameters():
        x += (torch.randn(x.shape, generator=random) * (torch.rand(x.shape, generator=random) < density)).to(x.device)
    for x in net.buffers():
        x += 1


def raw(x: torch.Tensor) -> bytes:
    return x.detach().contiguous().reshape(-1).view(torch.uint8).cpu().numpy().tobytes()


def state(net: torch.nn.Module, dtype: torch.dtype | None = None) -> dict[str, bytes]:
    """All bits of a model, float32 rounded to `dtype`."""
    tensors = net.state_dict().items()
    return {n: raw(x.to(dtype) if dtype is not None and x.dtype == torch.float32 else x) for n, x in tensors}


def published(folder: Path, net: torch.nn.Module, n_versions: int, **options) -> list[dict[str, bytes]]:
    """Publish versions of a model. Returns the bits of each, the first at 1."""
    states = [{}]
    with Publisher(folder, net, staging_bytes=STAGING, **options) as push:
        for number in range(n_versions):
            if number:
                change(net, number)
            assert push.publish() == len(states)
            states.append(state(net, options.get("wire_dtype")))
    return states


def received(folder: Path, net: torch.nn.Module | None = None) -> tuple[int, dict[str, bytes]]:
    """The newest version of a folder and its bits, as a receiver that joins now reads it."""
    net = Net(99) if net is None else net
    version = Subscriber(folder, net).apply()
    return version, state(net)


def edit(path: Path, **fields) -> None:
    """Change fields of a version's manifest, and the hash of it in `latest`, as someone who wants to deceive would."""
    manifest = path / "manifest.json"
    data = json.dumps({**json.loads(manifest.read_text()), **fields}).encode()
    manifest.write_bytes(data)
    latest = path.parent / "latest"
    latest.write_text(json.dumps({**json.loads(latest.read_text()), "sha256": sha256(data)}))


def in_child(work) -> int:
    """Run `work` in a forked process. Returns the signal that ended it, or 0 for a process that ended itself."""
    torch.set_num_threads(1)
    child = os.fork()
    if child == 0:
        try:
            work()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    status = os.waitpid(child, 0)[1]
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, "the child raised: see its output"
    return os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
