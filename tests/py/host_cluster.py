"""Ranks on emulated hosts, for the tests: each is a process of host_rank.py that does what the test asks."""

import contextlib
import itertools
import multiprocessing
import subprocess
import sys
import time
from pathlib import Path

import pytest

from spccl.bench import hosts

DEADLINE_S = 60.0  # for whatever must happen
NO_HOSTS = hosts.why_not()  # why hosts cannot be emulated here. It makes a namespace to find out, so it is asked once


class Rank:
    """A process in a namespace, and what it was asked."""

    def __init__(self, namespace: str) -> None:
        self.pipe, theirs = multiprocessing.Pipe()
        worker = Path(__file__).with_name("host_rank.py")
        words = [sys.executable, str(worker), namespace, str(theirs.fileno())]
        self.process = subprocess.Popen(words, pass_fds=[theirs.fileno()])
        theirs.close()
        self.replies: dict[int, object] = {}
        self.numbers = itertools.count()

    def ask(self, name, *args):
        """Send a command. Returns its number."""
        number = next(self.numbers)
        self.pipe.send((number, name, args))
        return number

    def reply(self, number):
        end = time.monotonic() + DEADLINE_S
        while number not in self.replies:
            if not self.pipe.poll(max(0.0, end - time.monotonic())):
                pytest.fail(f"no reply within {DEADLINE_S:g} s: a rank hangs")
            got, value = self.pipe.recv()
            self.replies[got] = value
        return self.replies.pop(number)

    def call(self, name, *args):
        return self.reply(self.ask(name, *args))


class Cluster:
    """per_host ranks in each of the namespaces `names`, host by host."""

    def __init__(self, names, per_host):
        self.names = names
        self.per_host = per_host
        self.ranks = [Rank(name) for name in names for _ in range(per_host)]
        self.count = itertools.count()

    def close(self):
        for rank in self.ranks:
            rank.process.kill()
            rank.process.wait()
            rank.pipe.close()

    def ask(self, members, name, *args):
        return [(self.ranks[i], self.ranks[i].ask(name, *args)) for i in members]

    def replies(self, asked):
        return [rank.reply(number) for rank, number in asked]

    def begin_join(self, members, timeout=DEADLINE_S, env=None, transports=None, options=None):
        """Ask the members to form a group. env, transports: by rank of the cluster. options: of every Communicator.
        Returns the group's name and the questions."""
        group = f"g{next(self.count)}"
        env, transports = env or {}, transports or {}
        uid = self.ranks[members[0]].call("unique_id")
        asked = []
        for r, i in enumerate(members):
            given = {"transports": transports.get(i), **(options or {})}
            asked.append(
                (self.ranks[i], self.ranks[i].ask("join", group, r, len(members), uid, env.get(i, {}), timeout, given))
            )
        return group, asked

    @contextlib.contextmanager
    def group(self, members, **how):
        group, asked = self.begin_join(members, **how)
        assert [reply[:2] for reply in self.replies(asked)] == [("ok", "")] * len(members)
        yield group
        alive = [i for i in members if self.ranks[i].process.poll() is None]
        self.replies(self.ask(alive, "leave", group))

    def works(self, members, group, n_elems=100_000):
        got = self.replies(self.ask(members, "reduce", group, n_elems))
        assert [reply[:2] for reply in got] == [("ok", "")] * len(members)
