"""Faults of a publisher of spccl.sync: killed anywhere, a full disk, another publisher. The folder stays whole."""

from __future__ import annotations

import builtins
import json
import os
import resource
import shutil
import signal
import tempfile
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="spccl.sync is for torch tensors, and none is installed")
pytest.importorskip("safetensors", reason="spccl.sync writes safetensors files, and it is not installed")

import safetensors.torch  # noqa: E402
from sync_runs import STAGING, Net, change, in_child, published, received, state  # noqa: E402

import spccl  # noqa: E402
from spccl.sync import Publisher, Subscriber, _encode, _folder  # noqa: E402


def kill_at(n: int) -> None:
    """From now on this process kills itself before its n-th call that changes a folder, or in the middle of the n-th
    one, if that writes tensors. For a forked child."""
    left = [n]

    def guard(module, name: str, in_the_middle=None) -> None:
        call = getattr(module, name)

        def guarded(*args, **kwargs):
            for is_half in (False, True)[: 1 + (in_the_middle is not None)]:
                left[0] -= 1
                if left[0] < 0:
                    if is_half:
                        call(*args, **kwargs)
                        in_the_middle(*args)
                    os.kill(os.getpid(), signal.SIGKILL)
            return call(*args, **kwargs)

        setattr(module, name, guarded)

    for name in ("mkdir", "rename", "replace", "fsync", "unlink", "link", "rmdir", "chmod"):
        guard(os, name)
    guard(builtins, "open")
    guard(safetensors.torch, "save_file", lambda _, path: os.truncate(path, os.stat(path).st_size // 2))


@pytest.fixture
def in_memory():
    """A folder in memory, where fsync takes no time."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as folder:
        yield Path(folder)


@pytest.mark.parametrize("first", [0, 1])  # every second call: two tests for two processes
def test_publisher_killed_between_any_two_calls(in_memory, first):
    """A folder of three versions, a publisher that writes delta and anchor and removes old versions, killed at each
    call in turn: receivers, new ones and one that has version 3, see version 3 or 4 whole, and the next publisher goes
    on."""
    net, old = Net(width=4), in_memory / "old"
    states = published(old, net, 3, keep=1)
    change(net, 7)
    states.append(state(net))
    seen = set()
    for n in range(first, 500, 2):
        folder = in_memory / f"at-{n}"
        shutil.copytree(old, folder)
        has_3 = Net(5, width=4)
        pull = Subscriber(folder, has_3)
        assert pull.apply() == 3

        def publish(folder=folder, n=n) -> None:
            kill_at(n)
            Publisher(folder, net, keep=1, anchor_share=0, staging_bytes=STAGING).publish()

        killed = in_child(publish)
        version, bits = received(folder, Net(99, width=4))
        seen.add(version)
        assert version in (3, 4) and bits == states[version], n
        assert pull.apply() == version and state(has_3) == states[version], n
        with Publisher(folder, net, keep=1, staging_bytes=STAGING) as push:
            assert push.version == version
            assert push.publish() == version + 1
            assert not [name for name in os.listdir(folder) if name.startswith(".unfinished")]
        assert pull.apply() == version + 1 and state(has_3) == states[4], n
        if not killed:
            break
    assert not killed and n > 30 and seen == {3, 4}


@pytest.mark.parametrize("density", [0.02, 1.0], ids=["delta", "delta and anchor"])
def test_full_disk(tmp_path, density):
    """Writing fails at each size of file: the folder and the base stay at the version before, and the next publish has
    both changes."""
    net, copy = Net(), Net(1)
    pull = Subscriber(tmp_path, copy)
    with Publisher(tmp_path, net, staging_bytes=STAGING) as push:
        push.publish()
        pull.apply()
        before = state(net)
        change(net, 1, density)
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        for most in (0, 100, 1000):  # bytes of a file
            resource.setrlimit(resource.RLIMIT_FSIZE, (most, hard))
            try:
                with pytest.raises(spccl.SystemCallError, match=r"v000002"):
                    push.publish()
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
            assert push.version == 1 == push.verify()
            assert [n for n in os.listdir(tmp_path) if n.startswith((".", "v"))] == ["v000001"]
            assert pull.apply() == 1 and state(copy) == before
        change(net, 2)
        push.publish()
    pull.apply()
    assert state(copy) == state(net)


@pytest.mark.parametrize("is_named", [False, True])
def test_a_publish_that_cannot_be_taken_back(tmp_path, monkeypatch, is_named):
    """`latest` cannot be replaced, nor the version's folder renamed back; or it is replaced, and the call says it was
    not. The same publisher goes on."""
    net = Net()
    with Publisher(tmp_path, net) as push:
        push.publish()
        change(net, 1)
        real, rename = _folder.replace_latest, os.rename

        def fails(*args) -> None:
            if is_named:
                real(*args)
            monkeypatch.setattr(os, "rename", lambda *_: fails_too())
            raise OSError(5, "bad disk")

        def fails_too() -> None:
            raise OSError(5, "bad disk again")

        monkeypatch.setattr(_folder, "replace_latest", fails)
        with pytest.raises(spccl.SystemCallError, match=r"bad disk$"):
            push.publish()
        monkeypatch.setattr(_folder, "replace_latest", real)
        monkeypatch.setattr(os, "rename", rename)
        assert received(tmp_path)[0] == 1 + is_named
        assert push.publish() == 2 + is_named
        push.verify()
    assert received(tmp_path) == (2 + is_named, state(net))


def test_two_publishers(tmp_path):
    """The second one is refused by the name of the first, here and in another process; after its end it is not."""
    net = Net()
    with Publisher(tmp_path, net) as push:
        push.publish()
        text = rf"publisher.lock is held by process {os.getpid()} on host .*, epoch 1"
        with pytest.raises(spccl.StateError, match=text):
            Publisher(tmp_path, net)

        def other() -> None:
            with pytest.raises(spccl.StateError, match=text):
                Publisher(tmp_path, net)
            with pytest.raises(spccl.StateError, match="not by its child"):
                push.publish()

        assert in_child(other) == 0
        assert push.publish() == 2
    with pytest.raises(spccl.StateError, match="closed"):
        push.publish()
    with Publisher(tmp_path, net) as push:
        assert push.epoch == 2


def test_a_lock_of_the_dead_is_taken_over(tmp_path):
    """Of a dead process of this host; not of another host, where nobody here can say who lives."""
    net = Net()
    held, lock = {}, tmp_path / "publisher.lock"

    def dies() -> None:
        push = Publisher(tmp_path, net)
        push.publish()
        os.kill(os.getpid(), signal.SIGKILL)

    assert in_child(dies) == signal.SIGKILL
    held = json.loads(lock.read_text())
    lock.write_text(json.dumps({**held, "host": "far-away", "host_id": "00"}))
    with pytest.raises(spccl.StateError, match=r"held by process .* on host 'far-away', epoch 1"):
        Publisher(tmp_path, net)
    lock.write_text("{")
    with pytest.raises(spccl.StateError, match="not readable: if no publisher is running, remove it"):
        Publisher(tmp_path, net)
    # The number of the dead process, given to another one since.
    lock.write_text(json.dumps({**held, "pid": os.getpid()}))
    with Publisher(tmp_path, net) as push:
        assert (push.epoch, push.publish()) == (2, 2)


def test_a_publisher_that_lost_its_lock(tmp_path):
    """It publishes no more, and does not remove the lock of the new one. One that loses it while it writes neither."""
    net = Net()
    first = Publisher(tmp_path, net)
    first.publish()
    os.unlink(tmp_path / "publisher.lock")
    with pytest.raises(spccl.StateError, match=r"lost .*publisher.lock: it is gone"):
        first.publish()
    with Publisher(tmp_path, net) as second:
        with pytest.raises(spccl.StateError, match=r"lost .*now held by process .* epoch 2; epoch 1 publishes no more"):
            first.publish()
        first.close()
        assert second.publish() == 2
        second.before_write = lambda path: os.unlink(path / "publisher.lock")
        with pytest.raises(spccl.StateError, match="it is gone"):
            second.publish()
        assert second.version == 2
    assert received(tmp_path)[0] == 2
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".unfinished")]


def test_weights_that_change_while_they_are_published(tmp_path, monkeypatch):
    """A trainer that goes on training: the anchor would not be what the sums say."""
    net = Net()
    with Publisher(tmp_path, net, anchor_share=0) as push:
        push.publish()
        change(net, 1)
        real = _encode.Writer.delta

        def slow(*args):
            parts = real(*args)
            change(net, 2)
            return parts

        with monkeypatch.context() as patch:
            patch.setattr(_encode.Writer, "delta", slow)
            with pytest.raises(spccl.StateError, match="was changed while it was published"):
                push.publish()
        push.publish()
    assert received(tmp_path) == (2, state(net))


def test_nan_that_is_rounded(tmp_path):
    """Anchors and deltas give a float32 NaN the same bits, those of its upper half; torch would drop its payload."""
    x = torch.zeros(1000)
    bits = x.view(torch.int32)
    bits[5], bits[7] = 0x7FE12345, -0x3EDCBB  # the second is negative
    y = torch.zeros(1000, dtype=torch.bfloat16)
    pull = Subscriber(tmp_path, {"x": y})
    with Publisher(tmp_path, {"x": x}, wire_dtype=torch.bfloat16, anchor_share=0) as push:
        for number in range(3):
            assert push.publish() == pull.apply()
            assert Subscriber(tmp_path, {"x": torch.zeros_like(y)}).apply() == number + 1  # from the anchor
            assert y.view(torch.int16)[[5, 7]].tolist() == [0x7FE1, -0x3F]
            x[number] = bits[100 + number] = 1
        pull.verify()


def test_a_folder_without_its_latest_keeps_its_versions(tmp_path):
    """Who deletes `latest`, or copies a folder without it, loses no version to the next publisher."""
    published(tmp_path, Net(), 3)
    (tmp_path / "latest").rename(tmp_path / "elsewhere")
    with pytest.raises(RuntimeError, match=r"latest names version none, the folder has 3"):
        Publisher(tmp_path, Net())
    (tmp_path / "elsewhere").rename(tmp_path / "latest")
    assert received(tmp_path)[0] == 3
