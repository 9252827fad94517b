"""spccl.sync on one GPU: deltas of tensors there have the bytes, sums and errors of those on the CPU; a model there is
published and taken over."""

from __future__ import annotations

import pytest
import torch

import spccl
from spccl.sync import delta

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU that CUDA can use"),
]
KEY = 77
SHAPES = [(1,), (300, 1000), (0,), (65536,), (3, 65537)]


def changed(base: torch.Tensor, share: float) -> torch.Tensor:
    """`base` with another value in a share of the elements."""
    x = base.clone()
    x[torch.rand(base.shape) < share] += 1
    return x


def lists(share: float) -> tuple[list[delta.Source], list[delta.Source]]:
    """Sources on the CPU, and the same on the GPU: bfloat16, int8, and bfloat16 of float32."""
    on_cpu = []
    for i, shape in enumerate(SHAPES * 3):
        old = torch.randn(shape).mul(50)
        base = old.to(torch.int8 if i % 3 == 1 else torch.bfloat16)
        x = changed(base, share)
        on_cpu.append(delta.Source(x.float() if i % 3 == 2 else x, base, first=1000 * i))
    return on_cpu, [delta.Source(s.x.cuda(), s.base.cuda(), s.first) for s in on_cpu]


def encoded(sources, raw=False):
    room = sum(delta.bound(s.base.numel(), s.base.dtype) for s in sources)
    out = torch.zeros(room, dtype=torch.uint8, device=sources[0].x.device)
    frames = delta.encode(sources, KEY, out, raw)
    return frames, out[: frames[-1].offset + frames[-1].bytes]


def targets_of(sources, frames, out, live):
    targets = []
    for s, f, y in zip(sources, frames, live, strict=True):
        n = y.numel()
        place = delta.Place(y, s.first + n + 1, 0, 1, s.first, n, n)
        frame = out[f.offset : f.offset + f.bytes]
        targets.append(delta.Target(frame, n, y.dtype, [place], s.first))
    return targets


@pytest.mark.parametrize("share", [0, 0.001, 0.04, 0.3, 1])
@pytest.mark.parametrize("raw", [False, True])
def test_bytes_are_those_of_the_cpu(share, raw):
    on_cpu, on_gpu = lists(share)
    want, want_out = encoded(on_cpu, raw)
    got, got_out = encoded(on_gpu, raw)
    assert got == want
    assert torch.equal(got_out.cpu(), want_out)


@pytest.mark.parametrize("is_packed", [False, True])
def test_check_apply_undo(is_packed):
    _, sources = lists(0.02)
    frames, out = encoded(sources)
    live = [s.base.clone() for s in sources]
    before = [delta.checksum(y, KEY, s.first) for s, y in zip(sources, live, strict=True)]
    targets = targets_of(sources, frames, out, live)
    targets = delta.Packed(targets, KEY) if is_packed else targets
    old = torch.empty(delta.old_bytes(targets), dtype=torch.uint8, device="cuda")
    assert delta.check(targets, KEY, old) == [f.sum_change for f in frames]
    delta.apply(targets)
    for s, y, total, f in zip(sources, live, before, frames, strict=True):
        assert torch.equal(y.view(torch.uint8), s.x.to(y.dtype).view(torch.uint8))
        assert delta.checksum(y, KEY, s.first) == (total + f.sum_change) % 2**64
    delta.undo(targets, old)
    for s, y in zip(sources, live, strict=True):
        assert torch.equal(y.view(torch.uint8), s.base.view(torch.uint8))


def test_refusals():
    _, sources = lists(0.1)
    frames, out = encoded(sources)
    live = [s.base.clone() for s in sources]
    with pytest.raises(spccl.ArgumentError, match=r"sources\[1\].base: on cpu; wanted cuda:0"):
        delta.encode([sources[0], delta.Source(sources[1].x, sources[1].base.cpu())], KEY, out)
    with pytest.raises(spccl.ArgumentError, match=r"wanted \d+ more in sources"):
        delta.encode(sources, KEY, torch.empty(256, dtype=torch.uint8, device="cuda"))
    out[frames[1].offset + 9] ^= 1
    with pytest.raises(spccl.FormatError, match=r"targets\[1\]"):
        delta.check(targets_of(sources, frames, out, live), KEY)
    with pytest.raises(spccl.FormatError, match=r"targets\[1\]"):
        delta.apply(targets_of(sources, frames, out, live))
    for s, y in zip(sources, live, strict=True):
        assert torch.equal(y.view(torch.uint8), s.base.view(torch.uint8))


@pytest.mark.parametrize("master", [torch.bfloat16, torch.float32])
def test_publisher_and_subscriber(tmp_path, master):
    """A trainer on the GPU; receivers on the GPU and on the CPU follow it bit for bit."""
    pytest.importorskip("safetensors")
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(700, 300), torch.nn.Linear(300, 500)).to("cuda", master)
    replicas = {
        device: torch.nn.Sequential(torch.nn.Linear(700, 300), torch.nn.Linear(300, 500)).to(device, torch.bfloat16)
        for device in ("cuda", "cpu")
    }
    push = spccl.sync.Publisher(str(tmp_path), model, wire_dtype=torch.bfloat16)
    pulls = {device: spccl.sync.Subscriber(str(tmp_path), replica) for device, replica in replicas.items()}
    for step in range(4):
        with torch.no_grad():
            for p in model.parameters():
                p += (torch.rand_like(p, dtype=torch.float32) < 0.02) * 0.01 * (step != 0)
        version = push.publish()
        for device, replica in replicas.items():
            assert pulls[device].apply() == version
            for want, got in zip(model.parameters(), replica.parameters(), strict=True):
                assert torch.equal(
                    want.detach().bfloat16().cpu().view(torch.int16), got.detach().cpu().view(torch.int16)
                )
