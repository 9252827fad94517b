"""The Python face of deltas: what goes through the extension, and what it refuses before it does. tests/c/test_delta.c
has the coding itself."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import spccl
from spccl.sync import delta

KEY = 2**64 - 5


def changed(base: torch.Tensor, places: list[int]) -> torch.Tensor:
    x = base.clone().flatten()
    x.view(torch.uint8)[[place * base.itemsize for place in places]] ^= 1
    return x.view(base.shape)


def encode(*pairs: tuple[torch.Tensor, torch.Tensor], raw: bool = False) -> tuple[list[delta.Frame], torch.Tensor]:
    out = torch.empty(sum(delta.bound(b.numel(), b.dtype) for _, b in pairs), dtype=torch.uint8)
    return delta.encode([delta.Source(x, b) for x, b in pairs], KEY, out, raw), out


def part(out: torch.Tensor, frame: delta.Frame) -> torch.Tensor:
    return out[frame.offset : frame.offset + frame.bytes]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int64, torch.float8_e4m3fn, torch.bool])
def test_whole_tensors(dtype: torch.dtype) -> None:
    bases = [torch.zeros(shape, dtype=dtype) for shape in ((300, 7), (0,), ())]
    news = [changed(bases[0], [0, 9, 2099]), bases[1], changed(bases[2], [0])]
    frames, out = encode(*zip(news, bases, strict=True))
    assert [f.nnz for f in frames] == [3, 0, 1]
    live = [b.clone() for b in bases]
    targets = [
        delta.Target(part(out, f), x.numel(), dtype, [delta.Place.whole(x)]) for f, x in zip(frames, live, strict=True)
    ]
    old = torch.empty(delta.old_bytes(targets), dtype=torch.uint8)
    before = [delta.checksum(x, KEY) for x in live]
    assert delta.check(targets, KEY, old) == [f.sum_change for f in frames]
    delta.apply(targets)
    for x, new, frame, sum_before in zip(live, news, frames, before, strict=True):
        assert torch.equal(x.flatten().view(torch.uint8), new.flatten().view(torch.uint8))
        assert delta.checksum(x, KEY) == (sum_before + frame.sum_change) % 2**64
    delta.undo(targets, old)
    assert [delta.checksum(x, KEY) for x in live] == before


def test_masters_are_rounded_as_torch_does() -> None:
    bits = torch.arange(-(2**31), 2**31, 65521, dtype=torch.int64).to(torch.int32)
    masters = bits.view(torch.float32)
    masters = masters[~masters.isnan()]  # torch's own result for NaN depends on the device
    for dtype in (torch.bfloat16, torch.float16):
        (frame,), _ = encode((masters, masters.to(dtype)))
        assert frame.nnz == 0
        nan = torch.full((3,), float("nan"))
        live = torch.zeros(3, dtype=dtype)
        (frame,), out = encode((nan, live))
        delta.apply([delta.Target(part(out, frame), 3, dtype, [delta.Place.whole(live)])])
        assert live.isnan().all()


def test_a_shard_of_columns_and_a_copy() -> None:
    base = torch.arange(6 * 8, dtype=torch.int32)
    x = base + (torch.arange(48) % 5 == 0)
    (frame,), out = encode((x, base))
    fused = torch.full((10, 9), -1, dtype=torch.int32)
    fused[3:7, 2:5] = base.view(6, 8)[1:5, 4:7]
    copy = base.view(6, 8)[:, 4:].clone()
    places = [delta.Place(fused[3:, 2:], 8, 1, 4, 4, 3, 9), delta.Place(copy, 8, 0, 6, 4, 4, 4)]
    target = delta.Target(part(out, frame), 48, torch.int32, places)
    (change,) = delta.check([target], KEY)
    shard = [(i, v) for i, v in enumerate(x.tolist()) if i % 8 >= 4]
    wanted = sum(
        delta.checksum(torch.tensor([v], dtype=torch.int32), KEY, i)
        - delta.checksum(torch.tensor([b], dtype=torch.int32), KEY, i)
        for (i, v), b in zip(shard, base.view(6, 8)[:, 4:].flatten().tolist(), strict=True)
    )
    assert change == wanted % 2**64  # an element at two places counts once
    delta.apply([target])
    assert torch.equal(fused[3:7, 2:5], x.view(6, 8)[1:5, 4:7]) and torch.equal(copy, x.view(6, 8)[:, 4:])
    assert (fused == -1).sum() == 90 - 12
    copy[0, 1] += 1
    with pytest.raises(spccl.FormatError, match=r"delta_check: targets\[0\]: element 5 has other bits in places\[1\]"):
        delta.check([delta.Target(target.frame, 48, torch.int32, [delta.Place.whole(base.clone()), places[1]])], KEY)


def test_packed_targets() -> None:
    """Packed once, used for all calls; with the key that they were packed with."""
    base = torch.arange(70000, dtype=torch.int16)
    live, x = base.clone(), changed(base, [3, 69999])
    (frame,), out = encode((x, base))
    targets = delta.Packed([delta.Target(part(out, frame), 70000, live.dtype, [delta.Place.whole(live)])], KEY)
    old = torch.zeros(delta.old_bytes(targets), dtype=torch.uint8)
    assert delta.check(targets, KEY, old) == [frame.sum_change]
    delta.apply(targets)
    assert torch.equal(live, x)
    delta.undo(targets, old)
    assert torch.equal(live, base)
    with pytest.raises(spccl.ArgumentError, match=f"check: key 7; wanted {KEY}"):
        delta.check(targets, 7)


def test_refusals_name_the_entry() -> None:
    x = torch.zeros(10, 4)
    (frame,), out = encode((changed(x, [5]), x))
    good = part(out, frame)
    whole = [delta.Place.whole(x)]

    def refused(text: str, error: type[Exception], call: Callable[[], object]) -> None:
        with pytest.raises(error, match=text):
            call()

    refused(r"sources\[0\].x: strides", spccl.ArgumentError, lambda: encode((x.t(), x)))
    refused(r"sources\[0\].x: on meta", spccl.UnsupportedError, lambda: encode((x.to("meta"), x)))
    refused(r"sources\[0\]: x has 36", spccl.ArgumentError, lambda: encode((x[1:], x)))
    refused(r"sources\[1\]: x_dtype float64", spccl.ArgumentError, lambda: encode((x, x), (x.double(), x)))
    refused("complex64", spccl.ArgumentError, lambda: delta.bound(3, torch.complex64))
    refused("dst_cap 8", spccl.ArgumentError, lambda: delta.encode([delta.Source(x, x)], KEY, out[:8]))
    short = [delta.Target(good[:-8], 40, x.dtype, whole)]
    refused(r"targets\[0\]: delta: cut off", spccl.FormatError, lambda: delta.check(short, KEY))
    other = [delta.Target(good, 41, x.dtype, whole)]
    refused("has 40 elements of float32, wanted 41", spccl.FormatError, lambda: delta.apply(other))
    far = [delta.Target(good, 40, x.dtype, [delta.Place(x, 4, 0, 10, 0, 4, 5)])]
    refused(r"targets\[0\].places\[0\]: its box ends at element 49", spccl.ArgumentError, lambda: delta.apply(far))
    small = torch.zeros(4, dtype=torch.uint8)
    target = [delta.Target(good, 40, x.dtype, whole)]
    refused("old_cap 4, wanted 8", spccl.ArgumentError, lambda: delta.check(target, KEY, small))
    refused("old has 4 bytes; wanted 8", spccl.ArgumentError, lambda: delta.undo(target, small))
    refused("version 2, a delta", spccl.FormatError, lambda: spccl.decode(good.numpy(), x.numpy()))
    assert spccl.inspect(good.numpy())[0].format == "delta"


def test_memory_that_torch_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where CUDA has no memory, what torch keeps is given back and the call is made once more. On a CPU it is not."""
    events: list[str] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: events.append("empty"))

    def call() -> int:
        events.append("call")
        if events.count("call") == 1:
            raise spccl.OutOfMemoryError("no")
        return 7

    assert delta._with_memory(torch.device("cuda", 0), call) == 7
    assert events == ["call", "empty", "call"]
    events.clear()
    with pytest.raises(spccl.OutOfMemoryError):
        delta._with_memory(torch.device("cpu"), call)
    assert events == ["call"]


def test_waits_for_a_gpu_end(monkeypatch: pytest.MonkeyPatch) -> None:
    class Never:
        def query(self) -> bool:
            return False

    monkeypatch.setenv("SPCCL_TIMEOUT_MS", "1K")
    assert delta._timeout_s() == 1.024
    assert not delta._wait(Never(), 0.01)
