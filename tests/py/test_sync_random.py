"""Runs of spccl.sync in an order that nobody thought of: publishers that restart and fail, receivers that lag, go back,
roll back and join. At each moment a receiver's bits are those of the version that it says."""

from __future__ import annotations

import os
import random

import pytest

torch = pytest.importorskip("torch", reason="spccl.sync is for torch tensors, and none is installed")
pytest.importorskip("safetensors", reason="spccl.sync writes safetensors files, and it is not installed")

from sync_runs import STAGING, Net, change, state  # noqa: E402

import spccl  # noqa: E402
from spccl.sync import Publisher, Subscriber, _folder, delta  # noqa: E402


class Run:
    """A folder, its publisher, receivers, and the bits of each version."""

    def __init__(self, folder, monkeypatch):
        self.folder, self.patch = folder, monkeypatch
        self.net, self.states = Net(width=8), {}
        self.push = self.new_publisher()
        self.publish()
        self.pulls: list[tuple[Subscriber, Net]] = []
        self.join()

    def new_publisher(self) -> Publisher:
        share = random.choice([0, 0.2, 0.5, 2])
        return Publisher(self.folder, self.net, keep=random.randint(1, 5), anchor_share=share, staging_bytes=STAGING)

    def publish(self) -> None:
        for _ in range(random.randint(1, 3)):
            change(self.net, random.randrange(1 << 30), random.choice([0, 0.001, 0.05, 1.0]))
            self.states[self.push.publish()] = state(self.net)

    def join(self) -> None:
        net = Net(random.randrange(1 << 30), width=8)
        self.pulls.append((Subscriber(self.folder, net, staging_bytes=random.choice([None, None, 0, 500])), net))
        self.pulls = self.pulls[-4:]

    def restart(self) -> None:
        self.push.close()
        self.push = self.new_publisher()
        assert self.push.version == max(self.states) == self.push.verify()

    def fail_to_publish(self) -> None:
        """At a write or a sync; the change comes with the next version."""
        change(self.net, random.randrange(1 << 30), 0.05)
        name = random.choice(["write_tensors", "write_bytes", "sync_folder", "replace_latest"])
        before, real, left = self.push.version, getattr(_folder, name), [random.randint(0, 1)]

        def fails(*args):
            left[0] -= 1
            if left[0] < 0:
                raise OSError(28, "no space")
            return real(*args)

        with self.patch.context() as patch:
            patch.setattr(_folder, name, fails)
            try:
                version = self.push.publish()
            except spccl.SystemCallError:
                version = self.push.version
        if version != before:
            self.states[version] = state(self.net)

    def take(self) -> None:
        pull, net = random.choice(self.pulls)
        there = [int(name[1:]) for name in os.listdir(self.folder) if name.startswith("v")]
        version = random.choice([None, None, None, *there])
        assert pull.apply(version) == (max(self.states) if version is None else version)
        if random.random() < 0.3:
            try:
                before = pull.rollback()
            except spccl.StateError:
                return
            assert before == pull.version and before in self.states and state(net) == self.states[before]

    def fail_to_take(self) -> None:
        """In the middle of writing: all or nothing, or the receiver knows that it holds a mixture."""
        pull, net = random.choice(self.pulls)
        before, bits, real = pull.version, state(net), delta.apply

        def fails(targets) -> None:
            real(delta.Packed(targets.targets[: len(targets.targets) // 2], targets.key))
            raise spccl.DeviceError("no more")

        with self.patch.context() as patch:
            patch.setattr(delta, "apply", fails)
            try:
                pull.apply()
            except spccl.DeviceError:
                assert not pull.synced or (pull.version == before and state(net) == bits)

    def check(self) -> None:
        for pull, net in self.pulls:
            if pull.synced:
                assert state(net) == self.states[pull.version], pull.version


def test_random_runs(tmp_path, monkeypatch):
    run = Run(tmp_path, monkeypatch)
    steps = [run.publish, run.publish, run.take, run.take, run.take, run.join, run.restart]
    for _ in range(120):
        random.choice([*steps, run.fail_to_publish, run.fail_to_take])()
        run.check()
    for pull, _ in run.pulls:
        assert pull.apply() == max(run.states) == pull.verify()
    run.check()
    run.push.verify()
