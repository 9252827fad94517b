"""The votes of the workers of one server: all of them take a version, or none."""

from __future__ import annotations

import multiprocessing
import threading
import time

import pytest

torch = pytest.importorskip("torch", reason="spccl.sync is for torch tensors, and none is installed")
pytest.importorskip("safetensors", reason="spccl.sync writes safetensors files, and it is not installed")

from vllm_models import RANKS, WAIT_S, Run, Threads, bits, damage, fail, loaded, weights  # noqa: E402

from spccl.errors import Error  # noqa: E402
from spccl.sync import _staged  # noqa: E402
from spccl.sync._replica import INTACT, Replica, TorchWorkers  # noqa: E402
from spccl.sync._source import Folder  # noqa: E402


@pytest.fixture
def run(tmp_path):
    found = Run(tmp_path / "run", anchor_share=9, keep=9)
    yield found
    found.push.close()


class Group:
    """The workers of a tensor-parallel server: each call is made on all of them."""

    def __init__(self, n: int = RANKS):
        self.models = [loaded(weights(1), rank, n) for rank in range(n)]
        self.replicas = [
            Replica("vllm", model, lambda: weights(1).items(), workers, lambda: None)
            for model, workers in zip(self.models, Threads.group(n), strict=True)
        ]

    def call(self, name: str, *args, timeout_s: float = WAIT_S) -> list[str]:
        """Errors of all workers, "" where there is none."""
        errors = [""] * len(self.replicas)

        def work(rank: int) -> None:
            try:
                getattr(self.replicas[rank], name)(*args, timeout_s)
            except Error as error:
                errors[rank] = str(error)

        threads = [
            threading.Thread(target=work, args=(rank,), name=f"worker{rank}") for rank in range(len(self.replicas))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(2 * WAIT_S)
        return errors

    def holds(self, named: dict[str, torch.Tensor]) -> bool:
        n = len(self.models)
        return all(bits(model) == bits(loaded(named, rank, n)) for rank, model in enumerate(self.models))


@pytest.fixture
def group(run):
    run.publish()
    found = Group()
    assert found.call("open", run.folder) == found.call("update", 1) == ["", ""]
    return found


def test_shards_take_versions_together(run, group):
    assert group.holds(run.was[1])
    for _ in range(2):
        version = run.publish()
        assert group.call("stage", version) == ["", ""]
        assert group.call("update", version) == ["", ""] and group.holds(run.was[version])
    assert group.call("update", version) == ["", ""]  # again: nothing to do


def test_one_worker_cannot_stage(run, group, monkeypatch):
    """No worker writes; all say which worker failed, and that they hold what they held."""
    version = run.publish()
    monkeypatch.setattr(group.replicas[1]._pull, "before_read", fail)
    errors = group.call("update", version)
    assert all("worker 1 of 2: RuntimeError: the test's own failure" in e and INTACT in e for e in errors)
    assert group.holds(run.was[1])
    group.replicas[1]._pull.before_read = None
    assert group.call("update", version) == ["", ""] and group.holds(run.was[version])


@pytest.mark.parametrize("when", ["before", "after"])
def test_one_worker_fails_while_it_writes(run, group, monkeypatch, when):
    """The other one has written all of it, and takes it back."""
    version = run.publish()
    if when == "before":  # its elements are written, its sums are not: Subscriber.commit restores them
        monkeypatch.setattr(_staged.Change, "count", _fails_on_worker_0)
    else:
        commit = group.replicas[0]._pull.commit
        monkeypatch.setattr(group.replicas[0]._pull, "commit", lambda: (commit(), fail()))
    errors = group.call("update", version)
    assert all("worker 0 of 2: RuntimeError" in e and INTACT in e for e in errors) and group.holds(run.was[1])
    monkeypatch.undo()
    assert group.call("update", version) == ["", ""] and group.holds(run.was[version])


def _fails_on_worker_0(self, sign=1):
    if threading.current_thread().name == "worker0":
        raise RuntimeError("the test's own failure")


def test_an_anchor_that_fails_on_one_worker_is_a_mixture_until_it_is_written(run, group, monkeypatch):
    run.push.anchor_share = 0
    version = run.publish()
    for replica in group.replicas:
        replica._pull._have = None  # what an anchor begins with
    pull = group.replicas[1]._pull
    monkeypatch.setattr(pull, "_finish", fail)
    errors = group.call("update", version)
    assert all("mixture" in e and INTACT not in e for e in errors)
    path, good = damage(run, run.publish())
    monkeypatch.undo()
    assert all(INTACT not in e and e for e in group.call("update", version + 1))  # not even staged: still a mixture
    path.write_bytes(good)
    assert group.call("update", version) == ["", ""] and group.holds(run.was[version])
    assert group.call("update", version + 1) == ["", ""] and group.holds(run.was[version + 1])


def test_parts_that_something_else_wrote_to(run, group):
    """Of a tensor in column shards no worker alone sees it: the sums of all workers do, and all take it back."""
    version = run.publish()
    with torch.no_grad():
        group.models[1].o.view(torch.int16)[3, 0] ^= 1  # one that version 2 changes
    spoilt = bits(group.models[1])
    errors = group.call("update", version)
    assert all(e and INTACT in e for e in errors), errors
    assert bits(group.models[1]) == spoilt and bits(group.models[0]) == bits(loaded(run.was[1], 0, RANKS))


def test_workers_whose_folders_differ(run, group, tmp_path):
    """The same version number of two publishers, as two copies of a folder may have it."""
    other = Run(tmp_path / "other", anchor_share=9)
    other.publish()
    run.publish()
    other.publish()
    group.replicas[1]._pull._source = Folder(other.folder)
    errors = group.call("update", 2)
    assert all("different files" in e and INTACT in e for e in errors) and group.holds(run.was[1])
    other.push.close()


def test_workers_that_lack_a_part(run):
    """Two ranks of a server of three: refused, because no sum of the whole tensor could be made."""
    run.publish()
    group = Group()
    for rank, model in enumerate(group.models):
        model.__init__(rank, 4)
        model.load_weights(list(weights(1).items()))
    errors = group.call("open", run.folder)
    assert all("the workers hold" in e and "of its" in e for e in errors), errors


def test_a_version_that_is_read_too_late(run, group):
    """The update fails within its time. The thread reads on; the next update of the same version takes what it read."""
    version, go_on, replica = run.publish(), threading.Event(), group.replicas[1]
    replica._pull.before_read = lambda _: go_on.wait(WAIT_S)
    start = time.monotonic()
    errors = group.call("update", version, timeout_s=1)
    assert all("worker 1 of 2: TimeoutError: " in e and "not read in time" in e and INTACT in e for e in errors)
    assert time.monotonic() - start < WAIT_S / 2 and replica._staging.is_alive()
    go_on.set()
    replica._staging.join(WAIT_S)
    assert replica._pull.staged
    assert group.call("update", version) == ["", ""] and group.holds(run.was[version])


def test_reads_that_wait_for_another_one_end_in_the_requests_time(run, group):
    """Version 2 is still read for most of the time of the update to version 3, whose files come late then."""
    versions, go_on, late = [run.publish(), run.publish()], threading.Event(), threading.Event()
    waits = [go_on, late]
    group.replicas[1]._pull.before_read = lambda _: waits.pop(0).wait(WAIT_S)
    assert group.call("stage", versions[0]) == ["", ""]
    timer = threading.Timer(1.2, go_on.set)
    timer.start()
    start = time.monotonic()
    errors = group.call("update", versions[1], timeout_s=2)
    took_s = time.monotonic() - start
    late.set()
    timer.join(WAIT_S)
    assert all("version 3: it was not read in time" in e and INTACT in e for e in errors) and took_s < 2.6, took_s


def test_weights_that_are_derived_between_stage_and_update(run, group):
    version = run.publish()
    assert group.call("stage", version) == ["", ""]
    group.replicas[0].require = fail
    errors = group.call("update", version)
    assert all("worker 0 of 2: RuntimeError" in e and INTACT in e for e in errors) and group.holds(run.was[1])


def _gloo_rank(rank: int, store: str, found, done) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    workers = TorchWorkers(torch.distributed.group.WORLD)
    for i in range(3):
        answers = workers.exchange(str(i) * (1 + 5000 * rank), WAIT_S)
    found.put((rank, answers))
    done.wait(2 * WAIT_S)


def _gloo_replica(rank: int, store: str, found, done, folder: str, late_at: str) -> None:
    """A worker of a server. The second one votes late, after the first one gave up."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    world = torch.distributed.group.WORLD
    model = loaded(weights(1), rank, RANKS)
    replica = Replica("vllm", model, lambda: weights(1).items(), TorchWorkers(world), lambda: None)
    replica.open(folder, WAIT_S)
    replica.update(1, WAIT_S)
    exchange = replica.workers.exchange

    def late(answer, timeout_s):
        if rank == 1 and late_at in answer:
            done.wait(WAIT_S)
        return exchange(answer, timeout_s if rank == 1 else min(timeout_s, 0.5))

    replica.workers.exchange = late
    errors = []
    for version in (2, 3):
        try:
            replica.update(version, WAIT_S)
        except Error as error:
            errors.append(f"{type(error).__name__}: {error}")
            done.set()
    torch.distributed.barrier(world)  # the server's own
    found.put((rank, [errors, bits(model)]))


def _on_two_processes(tmp_path, work, *args) -> dict:
    context = multiprocessing.get_context("fork")  # spawn would import torch twice
    found, done = context.Queue(), context.Event()
    args = (str(tmp_path / "store"), found, done, *args)
    ranks = [context.Process(target=work, args=(rank, *args), daemon=True) for rank in range(2)]
    for rank in ranks:
        rank.start()
    try:
        return dict(found.get(timeout=WAIT_S) for _ in ranks)
    finally:
        done.set()
        for rank in ranks:
            rank.join(WAIT_S)
            rank.kill()


def test_votes_over_torch_distributed(tmp_path):
    """Several votes, with answers of other lengths."""
    got = _on_two_processes(tmp_path, _gloo_rank)
    assert got[0] == got[1] == ["2", "2" * 5001]


@pytest.mark.parametrize("late_at", ["stage", "write"])
def test_a_worker_that_votes_late(run, tmp_path, late_at):
    """All say that the server must start again, also to the next update. The server's own group works on."""
    for _ in range(3):
        run.publish()
    got = _on_two_processes(tmp_path, _gloo_replica, str(run.folder), f": {late_at}")
    for rank, (errors, found) in got.items():
        assert len(errors) == 2 and all("restart the server" in e and INTACT not in e for e in errors), errors
        assert "worker 0 gave up: of 2 workers [1] did not answer" in errors[0]
        assert found == bits(loaded(run.was[1], rank, RANKS))
