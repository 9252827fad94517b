"""Where a publisher of spccl.sync has its base: a live copy of float32 masters, or memory that is far from the weights.
tests/gpu/test_gpu_delta.py has pinned memory."""

from __future__ import annotations

import copy

import pytest

torch = pytest.importorskip("torch", reason="spccl.sync is for torch tensors, and none is installed")
pytest.importorskip("safetensors", reason="spccl.sync writes safetensors files, and it is not installed")

from sync_runs import STAGING, Net, change, raw, received, state  # noqa: E402
from test_sync_group import Ranks  # noqa: E402

import spccl  # noqa: E402
from spccl.sync import Publisher, _encode, _folder  # noqa: E402

BF16 = torch.bfloat16


def live_of(net: Net) -> Net:
    """A live copy in bfloat16, with other values; its integers too are not those of the masters."""
    live = copy.deepcopy(net).to(BF16)
    for x in live.state_dict().values():
        x.fill_(3)
    return live


def publisher(folder, net, live, **options) -> Publisher:
    return Publisher(folder, net, wire_dtype=BF16, base=live, staging_bytes=STAGING, **options)


def test_a_live_copy_is_the_base(tmp_path, monkeypatch):
    """Each version overwrites it, the first one too, and only when it is in place: not if writing it fails. A publisher
    that starts again puts the newest version into it."""
    net = Net()
    live = live_of(net)
    addresses = {name: x.data_ptr() for name, x in live.state_dict().items()}
    push = publisher(tmp_path, net, live)
    for number in range(1, 4):
        before = state(live)
        with monkeypatch.context() as patch:
            patch.setattr(_folder, "replace_latest", lambda *_: (_ for _ in ()).throw(OSError(28, "no space")))
            with pytest.raises(spccl.SystemCallError):
                push.publish()
        assert state(live) == before
        change(net, 10 + number)
        assert push.publish() == number == push.verify()
        assert state(live) == state(net, BF16)
        assert received(tmp_path, Net(7).to(BF16)) == (number, state(live))
        change(net, number, density=0.02 if number == 1 else 1)  # the third version is larger than what is staged
    assert push.stats()["base_bytes"] == 0
    push.close()
    for x in live.state_dict().values():
        x.fill_(5)
    with publisher(tmp_path, net, live) as push:
        assert received(tmp_path, Net(7).to(BF16)) == (3, state(live))
        assert push.publish() == 4
    assert state(live) == state(net, BF16)
    assert addresses == {name: x.data_ptr() for name, x in live.state_dict().items()}


def test_others_write_to_the_live_copy(tmp_path):
    """An optimizer that copies its masters itself: nothing would differ, and receivers would stay behind."""
    net = Net()
    live = live_of(net)
    with publisher(tmp_path, net, live) as push:
        push.publish()
        change(net, 1)
        live.load_state_dict({name: x.to(BF16) for name, x in net.state_dict().items()})
        with pytest.raises(spccl.MismatchError, match=r"the base is not version 1: others wrote to the live copy"):
            push.publish()
        assert push.publish() == 2
    assert received(tmp_path, Net(7).to(BF16)) == (2, state(net, BF16))


def test_what_cannot_be_a_base(tmp_path):
    net = Net()
    live = live_of(net)
    for base, text in [
        ("host", "base='host': wanted device, pinned, or the live copy"),
        ("pinned", "base='pinned': the tensors are in host memory"),
        ({**live.state_dict(), "count": net.count}, "base: count lies in the memory of what is published"),
        ({**live.state_dict(), "head.weight": live.head.weight.clone()}, "embed.weight, head.weight are one tensor"),
    ]:
        with pytest.raises(spccl.ArgumentError, match=text):
            publisher(tmp_path, net, base)
    with pytest.raises(spccl.MismatchError, match=r"base: tensor 'body.bias' is float32 \[40\]"):
        publisher(tmp_path, net, {**live.state_dict(), "body.bias": live.body.bias.float()})
    assert state(live) == state(live_of(net))
    assert not list(tmp_path.iterdir())


def test_a_live_copy_in_a_group():
    """It follows a delta, the weights themselves, and what others wrote to it."""
    run = Ranks(2, staging_bytes=1000)
    net, live = run.net, live_of(run.net)
    for one in run.nets:
        one.to(BF16)
    run.push = publisher(run.comms[0], net, live)
    try:
        for number, density in enumerate((0, 0.02, 1), 1):
            change(net, number, density)
            before = state(live)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(run.pulls[0], "_settle", lambda *_: (_ for _ in ()).throw(spccl.MismatchError("broken")))
                assert isinstance(run.round()[0], spccl.Error) == (number > 1)  # the first one is not staged
            if number > 1:
                assert state(live) == before
                assert run.round() == [number] * 3
            assert state(live) == state(net, BF16)
            run.check(number, BF16)
        live.body.bias.data += 1
        assert isinstance(run.round()[0], spccl.MismatchError)
        assert run.round() == [4] * 3
        run.check(4, BF16)
    finally:
        run.close()


def test_a_base_that_is_far_from_the_weights(tmp_path, monkeypatch):
    """It is read in pieces, which must not change what is written. Memory of the host is far from a GPU; here only the
    pieces are tested."""
    x = {"a": torch.randn(300_000), "b": torch.randn(3, 70_000), "c": torch.randn(5)}
    written = []
    for is_far in (False, True):
        now = {name: y.clone() for name, y in x.items()}
        monkeypatch.setattr(_encode, "is_far", lambda *_, far=is_far: far)
        monkeypatch.setattr(_encode, "PART_ELEMS", 1 << 16)
        monkeypatch.setattr(_encode, "BASE_BYTES", 300_000)
        calls = []
        monkeypatch.setattr(_encode.delta, "encode", counted(_encode.delta.encode, calls))
        with Publisher(tmp_path / str(is_far), now, key=1) as push:
            push.publish()
            for y in now.values():
                y.view(-1)[::7] += 1
            push.publish()
            push.verify()
        written.append((tmp_path / str(is_far) / "v000002" / "delta-00001.safetensors").read_bytes())
        assert (len(calls) > 3) == is_far and max(calls) > 1
        assert [raw(y) for y in push.base] == [raw(y) for y in now.values()]
    assert written[0] == written[1]


def counted(call, calls):
    real = getattr(call, "real", call)

    def counting(sources, *args, **options):
        calls.append(len(sources))
        return real(sources, *args, **options)

    counting.real = real
    return counting
