"""spccl.sync on one GPU: deltas of tensors there have the bytes, sums and errors of those on the CPU; a model there is
published and taken over."""

from __future__ import annotations

import copy
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from gpu_launch import SETTINGS, check_case, run_ranks

import spccl
from spccl.sync import Place, Publisher, Subscriber, _encode, delta

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU that CUDA can use"),
]
KEY = 77
DEVICE = torch.device("cuda", 0)
WORKERS = Path(__file__).parents[1] / "dist" / "workers"
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


@pytest.mark.parametrize("base", ["device", "pinned", "live"])
@pytest.mark.parametrize("master", [torch.bfloat16, torch.float32])
def test_publisher_and_subscriber(tmp_path, master, base, monkeypatch):
    """A trainer on the GPU; receivers on the GPU and on the CPU follow it bit for bit, wherever its base is."""
    pytest.importorskip("safetensors")
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(700, 300), torch.nn.Linear(300, 500)).to("cuda", master)
    replicas = {
        device: torch.nn.Sequential(torch.nn.Linear(700, 300), torch.nn.Linear(300, 500)).to(device, torch.bfloat16)
        for device in ("cuda", "cpu")
    }
    monkeypatch.setattr(_encode, "BASE_BYTES", 500_000)  # a pinned base is read in two pieces
    live = copy.deepcopy(model).to(torch.bfloat16)
    where = live if base == "live" else base
    push = spccl.sync.Publisher(str(tmp_path), model, wire_dtype=torch.bfloat16, base=where)
    pulls = {device: spccl.sync.Subscriber(str(tmp_path), replica) for device, replica in replicas.items()}
    for step in range(4):
        with torch.no_grad():
            for p in model.parameters():
                p += (torch.rand_like(p, dtype=torch.float32) < 0.02) * 0.01 * (step != 0)
        version = push.publish()
        assert push.verify() == version
        assert all(x.is_pinned() == (base == "pinned") for x in push.base)
        assert bits(live) == bits(model) or base != "live"
        for device, replica in replicas.items():
            assert pulls[device].apply() == version
            for want, got in zip(model.parameters(), replica.parameters(), strict=True):
                assert torch.equal(
                    want.detach().bfloat16().cpu().view(torch.int16), got.detach().cpu().view(torch.int16)
                )


# ---- what a server relies on: chains, undo, shards, streams, threads, groups ----


def net(dtype: torch.dtype = torch.bfloat16) -> torch.nn.Module:
    pytest.importorskip("safetensors")
    return torch.nn.Sequential(torch.nn.Linear(700, 300), torch.nn.Linear(300, 500)).to(DEVICE, dtype)


@torch.no_grad()
def step(model: torch.nn.Module, share: float = 0.02) -> None:
    for p in model.parameters():
        p += torch.where(torch.rand_like(p, dtype=torch.float32) < share, 0.5, 0.0).to(p.dtype)


def bits(model: torch.nn.Module) -> list[bytes]:
    """Of bfloat16."""
    return [p.detach().bfloat16().cpu().view(torch.int16).numpy().tobytes() for p in model.parameters()]


def three_behind(folder: Path) -> tuple[Publisher, torch.nn.Module, Subscriber, torch.nn.Module, list[bytes]]:
    """A publisher at version 4, its model, a receiver that staged it from version 1, its model, version 1's bits."""
    model, replica = net(), net()
    push, pull = Publisher(folder, model), Subscriber(folder, replica)
    push.publish()
    pull.apply()
    first = bits(model)
    for _ in range(3):
        step(model)
        push.publish()
    assert pull.stage() == 4
    assert len(pull._staged.changes) == 3 and bits(replica) == first
    return push, model, pull, replica, first


def no_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on a plan or a check is an error: both take memory and wait, and may fail."""

    def refuse(*_args: object) -> None:
        raise AssertionError("a plan or a check inside of the pause")

    monkeypatch.setattr(delta._ext, "delta_plan", refuse)
    monkeypatch.setattr(delta._ext, "delta_plan_check", refuse)


def test_a_chain_and_back(tmp_path, monkeypatch):
    """Three deltas in one commit, and their rollback, only queue what stage made."""
    push, model, pull, replica, first = three_behind(tmp_path)
    with push:
        with monkeypatch.context() as patch:
            no_plans(patch)
            assert pull.commit() == 4
            assert bits(replica) == bits(model)
            assert pull.rollback() == 1
            assert bits(replica) == first
        assert pull.verify() == 1
        assert pull.apply() == 4 == pull.verify()
        assert bits(replica) == bits(model)


def test_commit_fails_half_way(tmp_path, monkeypatch):
    """Two of three deltas are written, the third fails: the receiver has its version again, and takes the next one."""
    push, model, pull, replica, first = three_behind(tmp_path)

    def broken() -> None:
        raise spccl.DeviceError("no")

    with push:
        with monkeypatch.context() as patch:
            patch.setattr(pull._staged.changes[2], "apply", broken)
            no_plans(patch)
            with pytest.raises(spccl.DeviceError):
                pull.commit()
        assert pull.verify() == 1 and bits(replica) == first
        assert pull.apply() == 4 == pull.verify()
        assert bits(replica) == bits(model)


def test_another_stream_and_a_staging_thread(tmp_path):
    """stage in a thread on a stream of its own, commit on a third one that is busy: when commit ends, the weights are
    there for the stream that serves. Memory of stage that is given away is not overwritten before."""
    push, model, pull, replica, first = three_behind(tmp_path)
    side, late = torch.cuda.Stream(), torch.cuda.Stream()

    def stage() -> None:
        with torch.cuda.stream(side):
            pull.stage()

    with push:
        thread = threading.Thread(target=stage, daemon=True)
        thread.start()
        thread.join(120)
        assert not thread.is_alive()
        with torch.cuda.stream(late):
            torch.cuda._sleep(200_000_000)
            assert pull.commit() == 4
        assert bits(replica) == bits(model)
        with torch.cuda.stream(late):
            torch.cuda._sleep(200_000_000)
            assert pull.rollback() == 1
        assert bits(replica) == first
        assert pull.stage() == 4
        pull.abandon()
        assert pull.apply() == 4 == pull.verify()


def test_settle_ends_in_time(monkeypatch):
    torch.cuda.synchronize()
    delta.settle(DEVICE)
    monkeypatch.setenv("SPCCL_TIMEOUT_MS", "50")
    torch.cuda._sleep(4_000_000_000)
    with pytest.raises(spccl.TimeoutError, match=r"the stream still had work after 0\.05 s"):
        delta.settle(DEVICE)
    torch.cuda.synchronize()
    delta.settle(DEVICE)


def test_shards_of_a_matrix(tmp_path, monkeypatch):
    """Rows, columns and single ranges of a matrix, three versions behind; and back."""
    pytest.importorskip("safetensors")
    monkeypatch.setattr(_encode, "PART_ELEMS", 1 << 16)
    w = torch.randn(512, 1024, device=DEVICE)
    has = [(slice(60, 128), slice(0, 1024)), (slice(0, 512), slice(100, 300)), (slice(7, 8), slice(3, 999))]
    shards = [w[rows, cols].clone() for rows, cols in has]
    pulls = []
    for x, (rows, cols) in zip(shards, has, strict=True):
        n_rows, n_cols = x.shape
        place = Place(x, 1024, rows.start, n_rows, cols.start, n_cols, n_cols)
        pulls.append(Subscriber(tmp_path, places={"w": [place]}))
    with Publisher(tmp_path, {"w": w}) as push:
        push.publish()
        before = [x.clone() for x in shards]
        for pull in pulls:
            pull.adopt()
        for _ in range(3):
            w.view(-1)[torch.randperm(w.numel(), device=DEVICE)[:9999]] += 1
            push.publish()
    for pull, x, old, (rows, cols) in zip(pulls, shards, before, has, strict=True):
        assert pull.apply() == 4 == pull.verify()
        assert torch.equal(x, w[rows, cols])
        assert pull.rollback() == 1 == pull.verify()
        assert torch.equal(x, old)


@pytest.mark.parametrize("n_written", [0, 1, 2])
def test_undo_of_a_list_with_two_places(n_written):
    """None, one or both places of each element were written."""
    base = torch.randn(3, 65537, device=DEVICE)
    source = delta.Source(base + (torch.rand_like(base) < 0.02), base)
    frames, out = encoded([source])
    live = [base.clone(), base.clone()]

    def targets(ys: list[torch.Tensor]) -> list[delta.Target]:
        return [delta.Target(out, base.numel(), base.dtype, [delta.Place.whole(y) for y in ys])]

    old = torch.empty(delta.old_bytes(targets(live)), dtype=torch.uint8, device=DEVICE)
    assert delta.check(targets(live), KEY, old) == [frames[0].sum_change]
    if n_written:
        delta.apply(targets(live[:n_written]))
        assert not torch.equal(live[0], base)
    delta.undo(targets(live), old)
    assert all(torch.equal(y, base) for y in live)


def test_a_change_above_the_limit(tmp_path):
    """It is read from the disk while it is written, and read back whole."""
    model, replica = net(), net()
    with Publisher(tmp_path, model) as push:
        pull = Subscriber(tmp_path, replica, staging_bytes=1000)
        push.publish()
        pull.apply()
        step(model, 0.3)
        push.publish()
        assert pull.stage() == 2
        assert pull._staged.changes is None
        assert pull.commit() == 2 == pull.verify()
        assert bits(replica) == bits(model)
        with pytest.raises(spccl.StateError, match="nothing to roll back"):
            pull.rollback()


@pytest.mark.parametrize("case", ["versions", "killed_receiver"])
def test_a_group_of_gpus(case):
    """Frames go from GPU to GPU: NCCL carries them. With one GPU ranks share it, and they go through the host."""
    n_ranks = min(max(torch.cuda.device_count(), 3), 4)
    settings = {"SPCCL_TEST_DEVICE": "cuda", "SPCCL_TEST_SHARE_GPUS": "1"}
    ranks = run_ranks(str(WORKERS / "sync"), n_ranks, case, timeout_s=120, env={**SETTINGS, **settings})
    check_case(ranks[:-1] if case == "killed_receiver" else ranks, case)


def test_a_group():
    """Deltas, a change above the limit, and a receiver whose GPU fails after the writes were queued: none has it."""
    model, replica = net(torch.float32), net()
    unique_id = spccl.get_unique_id()
    with ThreadPoolExecutor(2) as pool:
        comms = list(pool.map(lambda rank: spccl.Communicator(rank, 2, unique_id=unique_id, timeout=60), range(2)))
        push = Publisher(comms[0], model, wire_dtype=torch.bfloat16, staging_bytes=400_000)
        pull = Subscriber(comms[1], replica)

        def both() -> list[object]:
            calls = [pool.submit(push.publish), pool.submit(pull.apply)]
            return [call.exception(120) or call.result() for call in calls]

        def broken(_boxes: object) -> None:
            raise spccl.DeviceError("no")

        for number, share in enumerate((0, 0.02, 1.0, 0.02), 1):
            step(model, share)
            assert both() == [number] * 2
            assert (push.stats()["anchor_bytes"] > 0) == (number in (1, 3))
            assert bits(replica) == bits(model)
            assert pull.verify() == number == push.verify()
        before = bits(replica)
        step(model)
        pull._settle = broken
        failed = both()
        assert isinstance(failed[0], spccl.PeerError) and isinstance(failed[1], spccl.DeviceError), failed
        assert bits(replica) == before and pull.version == push.version == 4
        del pull._settle
        step(model)
        assert both() == [5] * 2
        assert bits(replica) == bits(model)
        for comm in comms:
            comm.close()
