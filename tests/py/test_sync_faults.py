"""Faults of spccl.sync: each is an error that names tensor, file or version, and nothing is half written."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="spccl.sync is for torch tensors, and none is installed")
pytest.importorskip("safetensors", reason="spccl.sync writes safetensors files, and it is not installed")

import safetensors  # noqa: E402
from sync_runs import Net, change, edit, in_child, published, received, state  # noqa: E402

import spccl  # noqa: E402
from spccl.sync import Place, Publisher, Subscriber, _blob, _chain, _staged, delta  # noqa: E402
from spccl.sync.manifest import sha256  # noqa: E402


def first_half(targets: delta.Packed) -> delta.Packed:
    return delta.Packed(targets.targets[: len(targets.targets) // 2], targets.key)


def test_subscriber_killed_in_apply(tmp_path):
    """It wrote half of its tensors, which are gone with it. The folder is as before, for others and for the same one
    when it starts again."""
    net, copy = Net(), Net(1)
    states = published(tmp_path, net, 2)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}

    def apply() -> None:
        pull = Subscriber(tmp_path, copy)
        pull.apply(1)
        real = delta.apply

        def half(targets) -> None:
            real(first_half(targets))
            os.kill(os.getpid(), signal.SIGKILL)

        delta.apply = half
        pull.apply(2)

    assert in_child(apply) == signal.SIGKILL
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    assert received(tmp_path) == (2, states[2])


@pytest.mark.parametrize("where", ["latest", "manifest.json", "delta-00001.safetensors", "anchor-00001.safetensors"])
def test_flipped_bits(tmp_path, where):
    """One bit in any file: a receiver raises and keeps its version. Bits all over the file, also in the header."""
    net, copy = Net(), Net(1)
    states = published(tmp_path, net, 2, anchor_share=0)
    newest = tmp_path / "v000002"
    path = tmp_path / where if where == "latest" else newest / where
    pull = Subscriber(tmp_path, copy)
    pull.apply(1)
    if where.startswith("anchor"):
        pull = Subscriber(tmp_path, copy)  # one that has nothing needs the anchor
    good, before = path.read_bytes(), state(copy)
    for bit in {0, 3, 70, 8 * len(good) - 1, *range(5, 8 * len(good), 8 * len(good) // 40)}:
        bad = bytearray(good)
        bad[bit // 8] ^= 1 << bit % 8
        path.write_bytes(bad)
        with pytest.raises((spccl.FormatError, spccl.ArgumentError), match=re.escape(where)):
            pull.apply()
        assert state(copy) == before
    path.write_bytes(good)
    assert pull.apply() == 2
    assert state(copy) == states[2]


@pytest.mark.parametrize("where", ["manifest.json", "delta-00001.safetensors"])
def test_files_that_are_not_there_or_cut_short(tmp_path, where):
    """As a copy of the folder may look for a while: `latest` came first."""
    net, copy = Net(), Net(1)
    states = published(tmp_path, net, 2)
    pull = Subscriber(tmp_path, copy)
    pull.apply(1)
    path = tmp_path / "v000002" / where
    good = path.read_bytes()
    for size in (0, 7, len(good) // 2, len(good) - 1):
        path.write_bytes(good[:size])
        with pytest.raises(spccl.FormatError, match=re.escape(where)):
            pull.apply()
    path.unlink()
    with pytest.raises(spccl.FormatError, match=f"{re.escape(where)}: missing"):
        pull.apply()
    os.mkfifo(path)  # opening it would wait for ever
    with pytest.raises(spccl.FormatError, match="not a regular file"):
        pull.apply()
    path.unlink()
    path.write_bytes(good)
    assert state(copy) == states[1] and pull.version == 1
    assert pull.apply() == 2
    assert state(copy) == states[2]


def test_damage_that_the_hashes_do_not_show(tmp_path):
    """Files that follow from one another, of someone who wants to deceive: frames and sums are checked on their own."""
    net, copy = Net(), Net(1)
    published(tmp_path, net, 2)
    pull = Subscriber(tmp_path, copy)
    pull.apply(1)
    before = state(copy)
    newest = tmp_path / "v000002"
    path = newest / "delta-00001.safetensors"
    manifest = json.loads((newest / "manifest.json").read_text())
    part = next(part for tensor in manifest["tensors"] for part in tensor["parts"])
    good = path.read_bytes()
    for place in range(32):  # the header of a frame: a frame that breaks a rule; last: a value, a sum that differs
        bad = bytearray(good)
        first = 8 + int.from_bytes(good[:8], "little") + part["offset"]  # 8 bytes and a header of safetensors
        bad[first + (place if place < 31 else part["bytes"] - 8)] ^= 1
        path.write_bytes(bad)
        edit(newest, delta=[{**manifest["delta"][0], "sha256": sha256(bytes(bad))}])
        with pytest.raises((spccl.FormatError, spccl.MismatchError), match=r"version 2: .*tensor 'count'"):
            pull.apply()
        assert state(copy) == before and pull.version == 1
    path.write_bytes(good)
    part["nnz"] -= 1  # what a receiver reserves follows from it
    edit(newest, tensors=manifest["tensors"], delta=manifest["delta"])
    with pytest.raises(spccl.FormatError, match=r"tensor 'count': a frame of 3 changes, its manifest says 2"):
        pull.apply()


@pytest.mark.parametrize(
    ("change_net", "text"),
    [
        (lambda net: setattr(net, "body", torch.nn.Linear(40, 41)), r"tensor 'body.weight' is float32 \[41, 40\]"),
        (
            lambda net: net.body.to(torch.float64),
            r"tensor 'body.weight' is float64 \[40, 40\], the publisher's float32",
        ),
        (lambda net: setattr(net, "more", torch.nn.Linear(2, 2)), r"'more.weight': the receiver has it, the publisher"),
        (lambda net: delattr(net, "body"), r"tensor 'body.weight': the publisher has it, the receiver does not"),
    ],
    ids=["shape", "dtype", "more", "less"],
)
def test_another_model(tmp_path, change_net, text):
    """A receiver of another shape, dtype or name; a publisher that goes on with such a model."""
    published(tmp_path, Net(), 2)
    other = Net(1)
    change_net(other)
    before = state(other)
    with pytest.raises(spccl.MismatchError, match=text):
        Subscriber(tmp_path, other).apply()
    assert state(other) == before
    with pytest.raises(spccl.MismatchError, match=r"publisher: tensor '(body|more).*take another folder"):
        Publisher(tmp_path, other)
    with Publisher(tmp_path, Net()) as push:  # the refusals gave the lock back
        assert push.version == 2


def test_a_model_that_changes_its_shape_later(tmp_path):
    net = Net()
    with Publisher(tmp_path, net) as push:
        push.publish()
        net.body = torch.nn.Linear(40, 41)
        with pytest.raises(spccl.MismatchError, match=r"tensor 'body.weight' is .*41.* now"):
            push.publish()


def test_missing_versions(tmp_path):
    """No version yet, one that is not there any more, one that is not there yet, one whose base is gone."""
    with pytest.raises(spccl.StateError, match="has no version yet"):
        Subscriber(tmp_path, Net()).apply()
    net, copy = Net(), Net(1)
    states = published(tmp_path, net, 4)
    pull = Subscriber(tmp_path, copy)
    pull.apply(2)
    shutil.rmtree(tmp_path / "v000001")
    with pytest.raises(spccl.ArgumentError, match=r"does not have version 1; it has \[2, 3, 4\]"):
        pull.apply(1)
    with pytest.raises(spccl.ArgumentError, match="does not have version 9"):
        pull.apply(9)
    shutil.rmtree(tmp_path / "v000003")
    with pytest.raises(spccl.FormatError, match=r"v000003/manifest.json: missing"):
        pull.apply()
    assert pull.version == 2 and state(copy) == states[2]


def test_another_run_in_the_same_folder(tmp_path):
    """Version 3 of a run whose folder was emptied is not the base of the new run's version 4."""
    net, copy = Net(), Net(1)
    pull = Subscriber(tmp_path, copy)
    published(tmp_path, net, 3)
    pull.apply()
    shutil.rmtree(tmp_path)
    states = published(tmp_path, Net(8), 4)
    pull.stage()
    assert pull._staged[0][0].from_anchor
    assert pull.commit() == 4
    assert state(copy) == states[4]


def test_something_else_writes_to_the_receiver(tmp_path):
    """A weight that is not the version's any more, among those that change: refused before the first write."""
    net, copy = Net(), Net(1)
    pull = Subscriber(tmp_path, copy)
    with Publisher(tmp_path, net) as push:
        push.publish()
        pull.apply()
        with torch.no_grad():
            net.body.weight[3, 4] += 1
        change(net, 1)
        push.publish()
        with torch.no_grad():
            copy.body.weight[3, 4] += 1
        before = state(copy)
        with pytest.raises(spccl.MismatchError, match=r"version 2: tensor 'body.weight': elements 0 to 1600 are not"):
            pull.apply()
        assert state(copy) == before and pull.synced
        with pytest.raises(spccl.MismatchError, match=r"tensor 'body.weight' has sum"):
            pull.verify()
        assert not pull.synced
        assert pull.apply() == 2  # from the anchor
        assert state(copy) == state(net)


def test_something_else_writes_to_a_tensor_in_two_places(tmp_path):
    """Its left and right halves lie apart, the left one twice: together they are compared before the first write."""
    x, halves = torch.zeros(6, 8), [torch.zeros(6, 4) for _ in range(3)]
    places = [Place(half, 8, 0, 6, 4 * (n == 1), 4, 4) for n, half in enumerate(halves)]
    pull = Subscriber(tmp_path, places={"x": places})
    with Publisher(tmp_path, {"x": x}) as push:
        for number in range(3):
            x[2, 1] += 1
            x[3, 7] += 1
            push.publish()
            if number < 2:
                assert pull.apply() == number + 1
    assert torch.equal(torch.cat(halves[:2], dim=1)[3], torch.tensor([0.0] * 7 + [2.0]))
    halves[1][3, 3] += 1
    with pytest.raises(spccl.MismatchError, match=r"version 3: tensor 'x': elements 0 to 48 are not"):
        pull.stage()


@pytest.mark.parametrize("call", ["apply", "check"])
def test_an_error_in_the_middle_restores_all(tmp_path, monkeypatch, call):
    """Three deltas in one commit; the second or third fails after some of its writes. Or a check fails there: of
    deltas that stage had no room to check."""
    net, copy = Net(), Net(1)
    pull = Subscriber(tmp_path, copy)
    with Publisher(tmp_path, net) as push:
        push.publish()
        pull.apply()
        before = state(copy)
        for number in range(3):
            change(net, number)
            push.publish()
    n_calls, real = [], getattr(delta, call)

    def fails(targets, *args):
        n_calls.append(1)
        if len(n_calls) < 3:
            return real(targets, *args)
        if call == "apply":
            real(first_half(targets))
        raise spccl.DeviceError("no more")

    with monkeypatch.context() as patch:
        if call == "check":
            n_calls.append(1)
            check_chain = _chain.check_chain
            patch.setattr(_chain, "check_chain", lambda changes, _: check_chain(changes, 0))
        pull.stage()
        patch.setattr(delta, call, fails)
        with pytest.raises(spccl.DeviceError, match="no more"):
            pull.commit()
    assert state(copy) == before and pull.version == 1
    assert pull.apply() == 4
    assert state(copy) == state(net)


def test_later_deltas_are_checked_before_the_pause(tmp_path):
    """The last of three deltas is not what its sum says: stage finds it, and nothing is written."""
    net, copy = Net(), Net(1)
    pull = Subscriber(tmp_path, copy)
    states = published(tmp_path, net, 4, anchor_share=9)
    pull.apply(1)
    path = tmp_path / "v000004" / "delta-00001.safetensors"
    manifest = json.loads((path.parent / "manifest.json").read_text())
    part = next(x["parts"][0] for x in manifest["tensors"] if x["name"] == "body.bias")
    good = path.read_bytes()
    bad = bytearray(good)
    bad[8 + int.from_bytes(good[:8], "little") + part["offset"] + part["bytes"] - 4] ^= 1
    path.write_bytes(bad)
    edit(path.parent, delta=[{**manifest["delta"][0], "sha256": sha256(bytes(bad))}])
    with pytest.raises((spccl.FormatError, spccl.MismatchError), match=r"version 4: .*tensor 'body.bias'"):
        pull.stage()
    assert state(copy) == states[1]
    path.write_bytes(good)
    edit(path.parent, delta=manifest["delta"])
    assert pull.apply() == 4 and state(copy) == states[4]
    assert pull.rollback() == 1 and state(copy) == states[1]


def test_a_large_change_that_fails_leaves_the_receiver_unsynced(tmp_path, monkeypatch):
    """A change above the staging limit cannot be undone: the receiver says so, and begins with an anchor."""
    net, copy = Net(), Net(1)
    pull = Subscriber(tmp_path, copy, staging_bytes=0)
    states = published(tmp_path, net, 2)
    pull.apply(1)
    with monkeypatch.context() as patch:
        patch.setattr(delta, "apply", lambda targets: (_ for _ in ()).throw(spccl.DeviceError("no more")))
        with pytest.raises(spccl.DeviceError):
            pull.apply()
    assert not pull.synced and pull.version is None
    with pytest.raises(spccl.StateError, match="hold no version"):
        pull.verify()
    pull.stage()
    assert pull._staged[0][0].from_anchor
    assert pull.commit() == 2 and pull.synced
    assert state(copy) == states[2]


def test_between_stage_and_commit(tmp_path):
    """One of two replicas cannot stage: the other drops what it staged, and both keep their version. Files that go
    away after staging are not missed."""
    net, copies = Net(), [Net(1), Net(2)]
    pulls = [Subscriber(tmp_path, copy) for copy in copies]
    with Publisher(tmp_path, net) as push:
        push.publish()
        for pull in pulls:
            pull.apply()
        before = state(copies[0])
        change(net, 1)
        push.publish()
    assert pulls[0].stage() == 2
    assert state(copies[0]) == before
    pulls[0].abandon()
    with pytest.raises(spccl.StateError, match="commit without stage"):
        pulls[0].commit()
    assert state(copies[0]) == before and pulls[0].verify() == 1
    assert pulls[1].stage() == 2
    shutil.rmtree(tmp_path)
    assert pulls[1].commit() == 2
    assert state(copies[1]) == state(net)
    with pytest.raises(spccl.StateError, match="has no version yet"):
        pulls[0].apply()


def test_what_was_verified_is_what_is_applied(tmp_path, monkeypatch):
    """An anchor's file between stage and commit: removed with its folder, or another one under its name, it is read as
    it was; overwritten in place it is refused."""
    net, copy = Net(), Net(1)
    states = published(tmp_path / "run", net, 2, anchor_share=0)
    pull = Subscriber(tmp_path / "run", copy)
    path = tmp_path / "run/v000002/anchor-00001.safetensors"
    good = path.read_bytes()
    pull.stage()
    path.rename(tmp_path / "elsewhere")
    path.write_bytes(bytes(len(good)))
    assert pull.commit() == 2
    assert state(copy) == states[2]
    (tmp_path / "elsewhere").rename(path)
    pull = Subscriber(tmp_path / "run", copy)
    pull.stage()
    with open(path, "r+b") as file:
        file.write(good)
    os.utime(path, ns=(1, 1))  # a write within one tick of the clock has no other time
    with pytest.raises(spccl.FormatError, match=r"anchor-00001.safetensors: changed while it was read"):
        pull.commit()
    assert not pull.synced
    monkeypatch.setattr(_blob, "_MOST_OPEN", 0)  # as of many files: it is opened again
    pull.stage()
    path.rename(tmp_path / "elsewhere")
    path.write_bytes(good)
    with pytest.raises(spccl.FormatError, match=r"anchor-00001.safetensors: changed while it was read"):
        pull.commit()
    assert pull.apply() == 2 and state(copy) == states[2]


@pytest.mark.parametrize("where", ["latest", "manifest.json", "delta-00001.safetensors"])
def test_waits_for_a_copy_that_is_not_whole(tmp_path, where):
    """A folder that another program is copying: a file that is not there, or short, is waited for."""
    net, copy = Net(), Net(1)
    states = published(tmp_path, net, 2)
    path = tmp_path / where if where == "latest" else tmp_path / "v000002" / where
    good, n_calls = path.read_bytes(), []
    path.write_bytes(good[:-9])

    def copying(_) -> None:
        n_calls.append(1)
        if len(n_calls) == 2 and where != "latest":
            path.unlink()
        if len(n_calls) == 4:
            path.write_bytes(good)

    pull = Subscriber(tmp_path, copy, before_read=copying)
    with pytest.raises(spccl.FormatError, match=re.escape(where)):
        Subscriber(tmp_path, copy).apply(timeout_s=0.05)
    assert pull.apply(timeout_s=30) == 2
    assert len(n_calls) == 4 and state(copy) == states[2]


def test_versions_removed_while_they_are_read(tmp_path, monkeypatch):
    """The publisher removes what a slow receiver is about to read: it starts again with what is there."""
    net, copy = Net(), Net(1)
    with Publisher(tmp_path, net, keep=1, anchor_share=0) as push:
        push.publish()
        pull = Subscriber(tmp_path, copy)
        real = _staged.open_files

        def late(*args):
            monkeypatch.undo()
            change(net, 1)
            push.publish()
            return real(*args)

        monkeypatch.setattr(_staged, "open_files", late)
        assert pull.apply() == 2
    assert state(copy) == state(net)


def test_without_safetensors(tmp_path, monkeypatch):
    """Both say what to install, before anything is made."""
    monkeypatch.delattr(safetensors, "TensorSpec")
    for make in (lambda: Publisher(tmp_path / "run", Net()), lambda: Subscriber(tmp_path / "run", Net())):
        with pytest.raises(spccl.UnsupportedError, match=r"needs safetensors 0.8 or later, this is .*pip install"):
            make()
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(spccl.UnsupportedError, match=r'needs safetensors and numpy: pip install "safetensors'):
        Publisher(tmp_path / "run", Net())
    assert not (tmp_path / "run").exists()


def test_arguments(tmp_path):
    net = Net()
    bad = [
        (lambda: Publisher(tmp_path, net, keep=0), "keep=0"),
        (lambda: Publisher(tmp_path, net, key=-1), "key=-1"),
        (lambda: Publisher(tmp_path, {}), "no tensors"),
        (lambda: Publisher(tmp_path, {"x": 3}), "x is a int"),
        (lambda: Publisher(tmp_path, net, wire_dtype={"bod.weight": torch.bfloat16}), "'bod.weight'"),
        (lambda: Publisher(tmp_path, net, wire_dtype={"count": torch.bfloat16}), "tensor 'count' is int64"),
        (lambda: Publisher(tmp_path, net, wire_dtype=torch.int8), "wire_dtype int8"),
        (lambda: Subscriber(tmp_path), "neither tensors nor places"),
    ]
    for call, text in bad:
        with pytest.raises(spccl.ArgumentError, match=re.escape(text)):
            call()
    x = torch.zeros(8)
    with pytest.raises(spccl.ArgumentError, match="a and b share memory"):
        Subscriber(tmp_path, {"a": x[:5], "b": x[4:]})
    with pytest.raises(spccl.UnsupportedError, match="x is sharded, sparse or without memory"):
        Publisher(tmp_path, {"x": torch.zeros(3, device="meta")})
    with pytest.raises(spccl.UnsupportedError, match="complex128"):
        Publisher(tmp_path, {"x": torch.zeros(3, dtype=torch.complex128)})
    with pytest.raises(spccl.SystemCallError, match="publisher"):
        Publisher(Path("/dev/null/x"), net)
