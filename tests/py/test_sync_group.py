"""spccl.sync over a group: ranks are threads. tests/dist/test_sync_ranks.py has processes and transports."""

from __future__ import annotations

import contextlib
import copy
import random
import threading
import time

import pytest

torch = pytest.importorskip("torch", reason="spccl.sync is for torch tensors, and none is installed")

from sync_runs import Net, change, state  # noqa: E402

import spccl  # noqa: E402
from spccl.sync import Publisher, Subscriber, _encode, delta  # noqa: E402

MOST_S = 240  # of one round of all ranks: several times the timeout of a group


class Ranks:
    """Publisher on rank 0, receivers on the others. Each round runs one function per rank, at the same time."""

    def __init__(self, n_receivers: int, timeout_s: float = 30, **options):
        self.net, self.nets = Net(), [Net(1 + n) for n in range(n_receivers)]
        self.timeout_s = timeout_s
        self.comms = self.join(n_receivers + 1)
        self.push = Publisher(self.comms[0], self.net, **options)
        self.pulls = [Subscriber(comm, net) for comm, net in zip(self.comms[1:], self.nets, strict=True)]

    def join(self, n_ranks: int) -> list[spccl.Communicator]:
        unique_id = spccl.get_unique_id()
        make = lambda rank: spccl.Communicator(rank, n_ranks, unique_id=unique_id, timeout=self.timeout_s)  # noqa: E731
        return at_once(*(lambda rank=rank: make(rank) for rank in range(n_ranks)))

    def round(self, *receivers) -> list:
        """publish(), and for each receiver its function or apply(). Returns results, or the exceptions."""
        calls = [pull.apply for pull in self.pulls]
        for place, call in enumerate(receivers):
            calls[place] = call or calls[place]
        return at_once(self.push.publish, *calls)

    def regroup(self) -> None:
        """A new group, with a new receiver."""
        self.close()
        self.nets.append(Net(99))
        self.comms = self.join(len(self.nets) + 1)
        for one, comm in zip([self.push, *self.pulls], self.comms, strict=False):
            one.regroup(comm)
        self.pulls.append(Subscriber(self.comms[-1], self.nets[-1]))

    def check(self, version: int, dtype=None) -> None:
        for pull, net in zip(self.pulls, self.nets, strict=True):
            assert pull.version == version == pull.verify()
            assert state(net) == state(self.net, dtype)

    def close(self) -> None:
        at_once(*(comm.close for comm in self.comms))


def at_once(*calls) -> list:
    results = [None] * len(calls)

    def run(place: int) -> None:
        try:
            results[place] = calls[place]()
        except BaseException as error:
            results[place] = error

    threads = [threading.Thread(target=run, args=(place,), daemon=True) for place in range(len(calls))]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + MOST_S
    for thread in threads:
        thread.join(max(0, deadline - time.monotonic()))
    late = [place for place, thread in enumerate(threads) if thread.is_alive()]
    assert not late, f"no end within {MOST_S} s: calls {late} of {len(calls)}"
    return results


@pytest.fixture
def ranks():
    made = []

    def make(*args, **options) -> Ranks:
        made.append(Ranks(*args, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_each_version_is_the_publishers(ranks):
    """The weights themselves first, then deltas; a receiver that joins later takes the weights, others the delta."""
    run = ranks(2)
    for number in range(1, 4):
        assert run.round() == [number] * 3
        run.check(number)
        assert run.push.verify() == number
        assert (run.push.stats()["anchor_bytes"] == 0) == (number > 1)
        change(run.net, number)
    run.regroup()
    seen = []
    real = run.pulls[0]._take_anchor
    run.pulls[0]._take_anchor = lambda *args: (seen.append(run.pulls[0].version), real(*args))[1]
    assert run.round() == [4] * 4
    run.check(4)
    assert seen == [3]  # the weights went to the new one while the others kept their version
    change(run.net, 9)
    assert run.round() == [5] * 4
    assert run.push.stats()["anchor_bytes"] == 0
    run.check(5)


def test_a_change_above_the_limit(ranks):
    """It is sent as the weights themselves, in pieces; receivers that hold a version keep it until commit."""
    net = torch.nn.Linear(1024, 1024)
    run = ranks(1)
    run.net, run.nets = net, [torch.nn.Linear(1024, 1024)]
    run.push = Publisher(run.comms[0], net, staging_bytes=3 << 20)
    run.pulls = [Subscriber(run.comms[1], run.nets[0])]
    assert run.round() == [1, 1]
    before = state(run.nets[0])
    change(net, 1, density=1.0)

    def slow() -> int:
        run.pulls[0].stage()
        assert state(run.nets[0]) == before
        return run.pulls[0].commit()

    assert run.round(slow) == [2, 2]
    assert run.push.stats()["anchor_bytes"] > 0
    run.check(2)
    change(net, 2)
    assert run.round() == [3, 3]
    run.check(3)
    run.push.verify()


@pytest.mark.parametrize("sharded", [False, True])
def test_parts_are_small_if_a_receiver_may_be_sharded(ranks, sharded, monkeypatch):
    """Only this test has receivers of both kinds, of which the publisher must know: a shard stages parts whole."""
    monkeypatch.setattr(_encode, "PART_ELEMS", _encode.SLICE_ELEMS)
    monkeypatch.setitem(_encode.WHOLE_TIMES, "cpu", 4)
    run = ranks(1)
    run.net, run.nets = torch.nn.Linear(1024, 1024), [torch.nn.Linear(1024, 1024)]
    places = {name: [delta.Place.whole(x.detach())] for name, x in run.nets[0].named_parameters()}
    run.push = Publisher(run.comms[0], run.net)
    run.pulls = [Subscriber(run.comms[1], places=places) if sharded else Subscriber(run.comms[1], run.nets[0])]
    assert run.round() == [1, 1]
    change(run.net, 1)
    assert run.round() == [2, 2]
    run.check(2)
    n_parts = [len(entry.parts) for entry in run.pulls[0]._have.entries]
    assert n_parts == ([16, 1] if sharded else [4, 1])


@pytest.mark.parametrize("density", [0.02, 1.0])  # the base takes over kept frames, or the weights
def test_the_base_cannot_follow(ranks, density, monkeypatch):
    """All receivers took the version, and then the publisher's base fails half way. The next version reaches all."""
    net = torch.nn.Sequential(torch.nn.Linear(1024, 512), torch.nn.Linear(512, 1024))
    run = ranks(1)
    run.net, run.nets = net, [copy.deepcopy(net)]
    run.push = Publisher(run.comms[0], net, staging_bytes=3 << 20)
    run.pulls = [Subscriber(run.comms[1], run.nets[0])]
    assert run.round() == [1, 1]
    change(net, 1, density)
    real = run.push._change_of_base

    def fails(*_) -> None:
        with torch.no_grad():
            run.push.base[0].view(-1)[:7] += 1
        raise KeyboardInterrupt("no")

    monkeypatch.setattr(run.push, "_change_of_base", lambda *args: altered(real(*args), apply=fails))
    monkeypatch.setattr(run.push, "_fill", fails)
    results = run.round()
    assert isinstance(results[0], KeyboardInterrupt) and results[1] == 2
    assert run.push.version == 2
    run.check(2)
    with pytest.raises(spccl.StateError, match="the base is lost"):
        run.push.verify()
    monkeypatch.undo()
    for number in (3, 4):
        change(net, number)
        assert run.round() == [number] * 2
        assert (run.push.stats()["anchor_bytes"] > 0) == (number == 3)
        run.check(number)
    assert run.push.verify() == 4


def altered(change, **fields):
    vars(change).update(fields)
    return change


@pytest.mark.parametrize("error", [spccl.OutOfMemoryError("no"), spccl.MismatchError("no"), KeyboardInterrupt("no")])
def test_the_base_cannot_be_prepared(ranks, error, monkeypatch):
    """Without memory for old values it is written last. Other errors are raised when the receivers have the version."""
    run = ranks(1)
    run.round()
    change(run.net, 1)

    def fails(**_) -> None:
        raise error

    real = run.push._change_of_base
    monkeypatch.setattr(run.push, "_change_of_base", lambda *args: altered(real(*args), check=fails))
    results = run.round()
    assert results[1] == run.push.version == 2
    if not isinstance(error, spccl.OutOfMemoryError):
        assert results[0] is error
    else:
        assert results[0] == 2 == run.push.verify()
    monkeypatch.undo()
    change(run.net, 2)
    assert run.round() == [3] * 2
    run.check(3)
    assert run.push.verify() == 3


@pytest.mark.parametrize("where", ["stage", "commit", "settle", "abandon", "undo"])
def test_one_receiver_fails(ranks, where, monkeypatch):
    """It cannot stage, or fails to write, or drops what it staged: no rank has the version, and the next publish has
    both changes. The base, which is written before the last vote, has the old version again; where it cannot be put
    back (undo), the next publish is of all weights."""
    run = ranks(3)
    run.round()
    before = state(run.net)
    change(run.net, 1)
    pull = run.pulls[1]

    def broken() -> None:
        raise spccl.DeviceError("no")

    real = run.push._change_of_base
    if where == "undo":
        monkeypatch.setattr(run.push, "_change_of_base", lambda *args: altered(real(*args), undo=broken))

    def fails() -> None:
        if where == "stage":
            with torch.no_grad():
                run.nets[1].count += 1
            pull.apply()
        elif where == "commit":
            pull.stage()
            monkeypatch.setattr(pull._staged.changes[0], "apply", broken)
            pull.commit()
        elif where in ("settle", "undo"):  # as a GPU that fails after the writes were queued: before this rank votes
            monkeypatch.setattr(pull, "_settle", lambda _boxes: broken())
            pull.apply()
        else:
            pull.stage()
            pull.abandon()

    errors = run.round(None, fails)
    failed = "failed to commit it.*no"
    text = {
        "stage": "failed to stage it.*tensor 'count'",
        "commit": failed,
        "settle": failed,
        "undo": failed,
        "abandon": "abandoned",
    }
    for error in (errors[0], errors[1], errors[3]):
        assert isinstance(error, spccl.PeerError), errors
        with pytest.raises(spccl.PeerError, match=f"version 2: rank 2 .*{text[where]}"):
            raise error
    assert run.push.version == 1
    if where == "undo":
        with pytest.raises(spccl.StateError, match="the base is lost"):
            run.push.verify()
    else:
        assert run.push.verify() == 1
    monkeypatch.undo()
    if where == "stage":
        run.nets[1].count -= 1
    assert all(state(net) == before and pull.version == 1 for net, pull in zip(run.nets, run.pulls, strict=True))
    change(run.net, 2)
    assert run.round() == [2] * 4
    assert (run.push.stats()["anchor_bytes"] > 0) == (where == "undo")
    run.check(2)
    assert run.push.verify() == 2


def test_a_receiver_behind_gets_the_deltas_that_it_lacks(ranks):
    """One took back a version by itself. A publisher that does not keep it sends the weights."""
    for keep in (4, 0):
        run = ranks(2, keep=keep)
        run.round()
        for number in range(2):
            change(run.net, number)
            run.round()
        assert run.pulls[0].rollback() == 2
        change(run.net, 5)
        assert run.round() == [4] * 3
        run.check(4)
        assert (run.push.stats()["anchor_bytes"] == 0) == (keep == 4)
        assert len(run.push._sent) == min(keep, 3)


def test_one_is_behind_and_one_joins(ranks):
    """The first gets the delta that it lacks, beside the weights that go to the second before the others pause."""
    run = ranks(2)
    for number in range(2):
        change(run.net, number)
        run.round()
    assert run.pulls[0].rollback() == 1
    run.regroup()
    change(run.net, 2)
    assert run.round() == [3] * 4
    run.check(3)


def test_publisher_fails(ranks):
    """It cannot make the version: receivers raise its text. The next one succeeds."""
    run = ranks(2)
    run.round()
    weight, run.net.body.weight = run.net.body.weight, torch.nn.Parameter(torch.zeros(41, 40))
    errors = run.round()
    assert isinstance(errors[0], spccl.MismatchError)
    for error in errors[1:]:
        assert isinstance(error, spccl.PeerError) and "rank 0 could not make version 2" in str(error)
        assert "tensor 'body.weight'" in str(error)
    run.net.body.weight = weight
    change(run.net, 1)
    assert run.round() == [2] * 3
    run.check(2)


def test_a_torch_group_that_was_left_half_way(ranks, monkeypatch):
    """It has no abort. Weights change while they are sent: both ranks refuse each further call, until regroup."""
    import torch.distributed as dist

    monkeypatch.setattr(dist, "all_gather", lambda rows, sent, group: _gather(group, rows, sent))
    monkeypatch.setattr(dist, "broadcast", lambda data, root, group: group.broadcast(data.numpy(), root))
    monkeypatch.setattr(dist, "get_global_rank", lambda _group, rank: rank)
    run = ranks(1, timeout_s=2, staging_bytes=36_000)
    for one in (run.push, run.pulls[0]):
        one._group.is_native = False
    run.round()
    change(run.net, 1, density=1.0)
    real = run.push._send_anchor

    def late(manifest) -> None:
        with torch.no_grad():
            run.net.body.weight[0, 0] += 1
        real(manifest)

    monkeypatch.setattr(run.push, "_send_anchor", late)
    errors = run.round()
    assert isinstance(errors[0], spccl.StateError) and isinstance(errors[1], spccl.TimeoutError), errors
    for error in run.round():
        with pytest.raises(spccl.StateError, match=r"an earlier call was left half way.*regroup"):
            raise error
    monkeypatch.setattr(run.push, "_send_anchor", real)
    run.regroup()
    assert run.round() == [2] * 3
    run.check(2)


def _gather(comm: spccl.Communicator, rows: list[torch.Tensor], sent: torch.Tensor) -> None:
    found = torch.empty((len(rows), sent.numel()), dtype=torch.uint8)
    comm.all_gather(sent.numpy(), found.numpy())
    for row, record in zip(rows, found, strict=True):
        row.copy_(record)


def test_calls_that_do_not_fit(ranks):
    """Two publishers, none, calls out of order, a rank that does not come: an error in time that names the ranks."""
    run = ranks(1)
    errors = at_once(run.push.publish, Publisher(run.comms[1], run.nets[0]).publish)
    assert all("ranks [0, 1] are publishers" in str(error) for error in errors), errors
    errors = at_once(Subscriber(run.comms[0], run.net).apply, run.pulls[0].apply)
    assert all("ranks [] are publishers" in str(error) for error in errors), errors
    with pytest.raises(spccl.ArgumentError, match="in a group the version is the newest"):
        run.pulls[0].apply(3)
    with pytest.raises(spccl.ArgumentError, match="int: wanted a folder, a Communicator"):
        Publisher(3, run.net)
    late = ranks(1, timeout_s=0.3)
    with pytest.raises(spccl.TimeoutError, match=r"publisher: rank 0: hello, version 1: .*rank 1"):
        late.push.publish()


def test_random_rounds(ranks):
    """Failures of any receiver at any point, receivers that take a version back or join, changes of any size: no rank
    waits for ever, and what a receiver holds is the version that it says."""
    run = ranks(2, staging_bytes=36_000, keep=random.randint(0, 3))  # two files if all weights change
    states: dict[int | None, dict] = {}
    has_anchor = False

    def failing(pull: Subscriber, where: str):
        def broken(*_) -> None:
            raise random.choice([spccl.DeviceError, ValueError])("no")

        def call() -> int:
            if where == "stage":
                pull._stage = broken
            try:
                pull.stage()
                if where == "abandon":
                    pull.abandon()
                    return 0
                if where == "commit":
                    pull._finish = broken
                return pull.commit()
            finally:
                vars(pull).pop("_stage", None)
                vars(pull).pop("_finish", None)

        return call

    for number in range(40):
        change(run.net, number, random.choice([0, 0.001, 0.02, 0.02, 1.0]))
        calls = [None] * len(run.pulls)
        where = random.choice(["", "", "", "stage", "commit", "abandon"])
        if where:
            place = random.randrange(len(calls))
            calls[place] = failing(run.pulls[place], where)
        before = run.push.version
        results = run.round(*calls)
        if where:
            assert run.push.version == before
            assert all(isinstance(r, Exception) or r == 0 for r in results), results
        else:
            assert results == [run.push.version] * len(results), results
            states[run.push.version] = {n: hash(x) for n, x in state(run.net).items()}
            run.check(run.push.version)
            has_anchor |= run.push.version > 1 and run.push.stats()["anchor_bytes"] > 0
        if random.random() < 0.2:
            pull = random.choice(run.pulls)
            with contextlib.suppress(spccl.StateError):
                pull.rollback()
        for pull, net in zip(run.pulls, run.nets, strict=True):
            if pull.synced:
                assert {n: hash(x) for n, x in state(net).items()} == states[pull.version]
        if len(run.pulls) < 4 and random.random() < 0.05:
            run.regroup()
    assert run.push.verify() == run.push.version and has_anchor
