"""The Communicator: ranks are threads of this process (transport inproc), unless a test says otherwise."""

import datetime
import gc
import signal
import threading
import weakref

import numpy as np
import pytest

import spccl
from spccl import verify

TIMEOUT_S = 30


class Store:
    """A store in memory, with the three methods of torch's Store that spccl uses."""

    def __init__(self):
        self._values, self._changed = {}, threading.Condition()

    def set(self, key, value):
        assert isinstance(value, bytes)
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    def wait(self, keys, timeout):
        assert isinstance(timeout, datetime.timedelta)
        with self._changed:
            if not self._changed.wait_for(
                lambda: all(k in self._values for k in keys), timeout.total_seconds()
            ):
                raise RuntimeError(f"no key {keys} after {timeout}")

    def get(self, key):
        return self._values[key]


def run_threads(world_size, fn, **options):
    """Run fn(comm) on every rank. Returns the results by rank; raises the exception of the lowest rank that failed."""
    store, results, errors = Store(), [None] * world_size, [None] * world_size
    options = {"store": store, "timeout": TIMEOUT_S, "transports": "inproc", **options}

    def rank_main(rank):
        try:
            with spccl.Communicator(rank, world_size, **options) as comm:
                results[rank] = fn(comm)
        except BaseException as error:
            errors[rank] = error

    threads = [threading.Thread(target=rank_main, args=(rank,), daemon=True) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * TIMEOUT_S)
        assert not thread.is_alive(), "a rank hangs"
    for error in errors:
        if error is not None:
            raise error
    return results


def sparse(seed, n, dtype="float32", sparsity=0.9):
    return verify.make_input([seed], n, dtype, sparsity, True)


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
@pytest.mark.parametrize("async_op", [False, True])
def test_collectives(world_size, async_op):
    n = 5003
    inputs = [sparse(rank, world_size * n) for rank in range(world_size)]

    def finish(request):
        assert (request is not None) == async_op
        if request is not None:
            request.wait()
            assert request.done() and request.error is None

    def rank_main(comm):
        mine, block = inputs[comm.rank], slice(comm.rank * n, (comm.rank + 1) * n)
        gathered = np.empty(world_size * world_size * n, np.float32)
        finish(comm.all_gather(mine, gathered, async_op=async_op))
        assert verify.difference(gathered, np.concatenate(inputs)) is None
        shard = np.empty(n, np.float32)
        finish(comm.reduce_scatter(mine, shard, "avg", async_op=async_op))
        assert verify.difference(shard, verify.reduced([x[block] for x in inputs], "float32", "avg")) is None
        total = mine.copy()
        finish(comm.all_reduce(total, async_op=async_op))
        assert verify.difference(total, verify.reduced(inputs, "float32", "sum")) is None
        sent = mine.copy()
        finish(comm.broadcast(sent, world_size - 1, async_op=async_op))
        assert verify.difference(sent, inputs[-1]) is None

    run_threads(world_size, rank_main)


def test_verify_cases_on_threads():
    """A part of `spccl verify`: every collective, dtype and op, with little more than one block of elements."""
    cases = [c for c in verify.cases() if c.n_elems in (33, 4097) and c.sparsity == 0.9]
    assert {c.collective for c in cases} == set(verify.COLLECTIVES)

    def rank_main(comm):
        for index, case in enumerate(cases):
            inputs = verify.inputs_of(case, index, comm.world_size)
            request, got, wanted, _ = verify._start(comm, case, index, inputs)
            request.wait()
            assert verify.difference(got, wanted) is None, str(case)

    run_threads(3, rank_main)


def test_stats_links_and_properties():
    def rank_main(comm):
        before = comm.stats()
        comm.all_reduce(sparse(comm.rank, 100_000, sparsity=0.99))
        stats = comm.stats().since(before)
        assert stats.n_collectives == 1
        assert 0 < stats.wire_bytes_sent < stats.dense_bytes_sent / 5
        assert stats.wire_bytes_received > 0 and stats.buffer_bytes > 0
        assert set(stats.n_frames_sent) == {"empty", "tile", "pici", "coo", "dense"}
        assert sum(stats.n_frames_sent.values()) > 0
        links = comm.describe_links()
        assert list(links) == [1 - comm.rank] and "inproc" in links[1 - comm.rank]
        (schedule,) = comm.describe_schedules()
        assert schedule.startswith("all_reduce of 100000 float32: ") and "direct" in schedule and "us" in schedule
        assert comm.async_error() is None and comm.world_size == 2 and not comm.closed
        assert repr(comm) == f"<spccl.Communicator rank {comm.rank} of 2>"
        comm.set_timeout(20)

    run_threads(2, rank_main)


def test_torch_tensors():
    torch = pytest.importorskip("torch")

    def rank_main(comm):
        x = torch.zeros(10, 100, dtype=torch.bfloat16)
        x[comm.rank, 5] = 1.5
        comm.all_reduce(x)
        assert x[0, 5] == 1.5 and x[1, 5] == 1.5 and x.count_nonzero() == 2
        out = torch.empty(2, 8, dtype=torch.float8_e4m3fn)
        comm.all_gather(torch.full((8,), comm.rank + 1.0).to(torch.float8_e4m3fn), out)
        assert out.float().sum(1).tolist() == [8.0, 16.0]

    run_threads(2, rank_main)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (
            lambda c: c.all_gather(np.zeros(4, "f4"), np.zeros(9, "f4")),
            "output: got 9 elements; wanted 1 times the 4",
        ),
        (
            lambda c: c.reduce_scatter(np.zeros(4, "f4"), np.zeros(9, "f4")),
            "input: got 4 elements; wanted 1 times the 9",
        ),
        (lambda c: c.all_reduce(np.zeros(4, "f4"), np.zeros(4, "f8")), "output: got dtype float64"),
        (lambda c: c.all_reduce(np.zeros(4, "f4"), op="median"), 'op: got "median"'),
        (lambda c: c.all_reduce(bytes(4)), "output: the memory is read-only"),
        (lambda c: c.all_reduce(np.zeros((4, 4), "f4").T[:2]), "input: the array is not C-contiguous"),
        (lambda c: c.all_reduce([1.0]), "input: got a list"),
        (lambda c: c.all_reduce(bytearray(8), dtype="float8"), "float8"),
        (lambda c: c.all_reduce(bytearray(9), dtype="float32"), "input: 9 bytes"),
        (lambda c: c.all_reduce(bytearray(8), dtype="float31"), 'input: dtype "float31"'),
        (lambda c: c.broadcast(np.zeros(4, "f4"), 7), "root"),
    ],
)
def test_bad_arguments_leave_the_communicator_alive(call, text):
    def rank_main(comm):
        with pytest.raises(spccl.ArgumentError, match=text):
            call(comm)
        x = np.ones(5, np.int32)
        comm.all_reduce(x)
        assert x.tolist() == [1] * 5

    run_threads(1, rank_main)


def test_overlap_is_refused():
    def rank_main(comm):
        x = np.zeros(10, np.float32)
        with pytest.raises(spccl.ArgumentError, match="overlap"):
            comm.all_reduce(x[:8], x[1:9])

    run_threads(1, rank_main)


def test_bad_creation():
    with pytest.raises(spccl.ArgumentError, match="neither"):
        spccl.Communicator(0, 1)
    with pytest.raises(spccl.ArgumentError, match='no method "wait"'):
        spccl.Communicator(0, 1, store=type("S", (), {"set": 1, "get": 1})())
    with pytest.raises(spccl.ArgumentError, match="unique_id: got 3 bytes"):
        spccl.Communicator(0, 1, unique_id=b"abc")
    with pytest.raises(spccl.ArgumentError, match="secret: got 5 bytes"):
        spccl.Communicator(0, 1, store=Store(), secret=b"short")
    with pytest.raises(spccl.ArgumentError, match="rank"):
        spccl.Communicator(3, 2, store=Store())
    with pytest.raises(spccl.Error, match="pigeon"):
        spccl.Communicator(0, 2, store=Store(), transports="pigeon")


def test_missing_rank_is_a_timeout_with_its_cause():
    with pytest.raises(spccl.TimeoutError, match="rank 1") as caught:
        spccl.Communicator(0, 2, store=Store(), timeout=0.3, transports="inproc")
    assert isinstance(caught.value, TimeoutError) and caught.value.status == -41
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_store_errors_surface():
    class Broken(Store):
        def set(self, key, value):
            raise OSError("the disk is gone")

    with pytest.raises(spccl.SystemCallError, match="the disk is gone") as caught:
        spccl.Communicator(0, 2, store=Broken(), timeout=5, transports="inproc")
    assert isinstance(caught.value.__cause__, OSError)

    class Interrupted(Store):
        def wait(self, keys, timeout):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        spccl.Communicator(0, 2, store=Interrupted(), timeout=5, transports="inproc")


def test_request_timeout_then_success():
    late = threading.Event()

    def rank_main(comm):
        x = np.ones(1000, np.float32)
        if comm.rank == 1:
            late.wait(TIMEOUT_S)
        request = comm.all_reduce(x, async_op=True)
        if comm.rank == 0:
            assert not request.done() and request.error is None
            with pytest.raises(spccl.TimeoutError, match="still under way"):
                request.wait(0.05)
            with pytest.raises(spccl.TimeoutError, match="still under way"):
                request.wait(datetime.timedelta(0))
            late.set()
        request.wait()
        assert request.done() and x[0] == 2.0
        request.wait()  # a second wait changes nothing

    run_threads(2, rank_main)


def test_deadline_of_the_collective():
    gate = threading.Barrier(2)

    def rank_main(comm):
        if comm.rank == 0:
            comm.set_timeout(0.2)
            request = comm.all_reduce(np.ones(1000, np.float32), async_op=True)
            with pytest.raises(spccl.TimeoutError, match="rank"):
                request.wait()
            assert isinstance(request.error, spccl.TimeoutError)
            assert isinstance(comm.async_error(), spccl.TimeoutError)
            with pytest.raises(spccl.TimeoutError):
                comm.all_reduce(np.ones(1, np.float32))
        gate.wait(TIMEOUT_S)

    run_threads(2, rank_main)


def test_dropped_request_keeps_its_memory_until_done():
    dropped = threading.Event()

    class Tracked(np.ndarray):
        """An array that can be watched by a weak reference."""

    def rank_main(comm):
        if comm.rank == 1:
            assert dropped.wait(TIMEOUT_S)
            x = np.full(100_000, 2, np.float32)
            comm.all_reduce(x)
            assert x[-1] == 3.0
            comm.broadcast(np.zeros(1, np.float32))
            return
        x = np.full(100_000, 1, np.float32).view(Tracked)
        alive = weakref.ref(x)
        request = comm.all_reduce(x, async_op=True)
        del x, request
        gc.collect()
        assert alive() is not None, "memory was freed while the collective was under way"
        dropped.set()
        comm.broadcast(np.zeros(1, np.float32))  # calls run in order: when it ends, the all-reduce has ended
        comm.broadcast(np.zeros(1, np.float32), async_op=True)  # every call frees finished strays
        assert alive() is None, "memory was not given back"

    def ranks(comm):
        rank_main(comm)
        if comm.rank == 1:
            comm.broadcast(np.zeros(1, np.float32))

    run_threads(2, ranks)


def test_finished_request_gives_memory_back_at_once():
    def rank_main(comm):
        x = bytearray(4000)
        request = comm.all_reduce(x, dtype="float32", async_op=True)
        request.wait()
        x.extend(b"resizing an exported bytearray raises BufferError")
        assert len(x) > 4000 and bytes(x[:4000]) == bytes(4000)
        return request

    run_threads(2, rank_main)


def test_buffer_is_exported_while_under_way():
    gate = threading.Event()

    def rank_main(comm):
        x = bytearray(4000)
        if comm.rank == 1:
            assert gate.wait(TIMEOUT_S)
        request = comm.all_reduce(x, dtype="float32", async_op=True)
        if comm.rank == 0:
            with pytest.raises(BufferError):
                x.extend(b"1")
            gate.set()
        request.wait()

    run_threads(2, rank_main)


def test_abort_ends_waits_here_and_on_peers():
    started = threading.Barrier(2)

    def rank_main(comm):
        if comm.rank == 1:
            started.wait(TIMEOUT_S)
            comm.abort("enough of this")
            assert isinstance(comm.async_error(), spccl.AbortedError)
            return
        request = comm.all_reduce(np.ones(10, np.float32), async_op=True)
        started.wait(TIMEOUT_S)
        with pytest.raises(spccl.AbortedError, match="enough of this"):
            request.wait()
        with pytest.raises(spccl.AbortedError):
            comm.all_reduce(np.ones(10, np.float32))

    run_threads(2, rank_main)


def test_mismatch_names_both_sides():
    def rank_main(comm):
        with pytest.raises((spccl.MismatchError, spccl.AbortedError, spccl.PeerError)) as caught:
            comm.all_reduce(np.ones(10 + comm.rank, np.float32))
        return caught.value

    errors = run_threads(2, rank_main)
    text = " | ".join(str(error) for error in errors)
    assert any(isinstance(error, spccl.MismatchError) for error in errors), text
    assert "10" in text and "11" in text


def test_exception_in_with_block_tells_the_peers():
    def rank_main(comm):
        if comm.rank == 1:
            raise ZeroDivisionError("my own bug")
        comm.all_reduce(np.ones(10, np.float32))

    with pytest.raises(spccl.AbortedError, match="my own bug"):
        run_threads(2, rank_main)


def test_closed_communicator_raises():
    comm = spccl.Communicator(0, 1, store=Store(), timeout=5)
    request = comm.all_reduce(np.ones(3, np.float32), async_op=True)
    comm.close()
    comm.close()
    request.wait()
    assert comm.closed and repr(comm) == "<spccl.Communicator closed>"
    for call in (comm.stats, comm.abort, comm.async_error, lambda: comm.rank):
        with pytest.raises(spccl.StateError, match="closed"):
            call()
    with pytest.raises(spccl.StateError, match="closed"):
        comm.all_reduce(np.ones(3, np.float32))
    with pytest.raises(spccl.StateError, match="closed"):
        comm.broadcast(np.ones(3, np.float32))


def test_unclosed_communicator_warns_and_frees():
    comm = spccl.Communicator(0, 1, store=Store(), timeout=5)
    with pytest.warns(ResourceWarning, match="unclosed"):
        del comm
        gc.collect()


def test_groups_can_be_made_again_and_again():
    for _ in range(5):
        x = np.ones((2, 10), np.float32)
        run_threads(2, lambda comm, x=x: comm.all_reduce(x[comm.rank]))
        assert (x == 2).all()


def test_torch_store():
    dist = pytest.importorskip("torch.distributed")

    def rank_main(comm):
        x = np.ones(10, np.float32)
        comm.all_reduce(x)
        return x[0]

    assert run_threads(3, rank_main, store=dist.HashStore(), name="by torch's store") == [3.0] * 3
    with pytest.raises(spccl.TimeoutError, match="rank 1"):
        spccl.Communicator(0, 2, store=dist.HashStore(), timeout=0.3, transports="inproc")


def test_signal_ends_a_blocking_wait_and_keeps_the_memory():
    class Alarm(Exception):
        pass

    def ring(signum, frame):
        raise Alarm

    store, gate, comms = Store(), threading.Event(), []
    options = {"store": store, "timeout": TIMEOUT_S, "transports": "inproc"}

    def peer():
        with spccl.Communicator(1, 2, **options) as comm:
            gate.wait(TIMEOUT_S)
            x = bytearray(4000)
            comm.all_reduce(x, dtype="float32")
            comms.append(comm)

    thread = threading.Thread(target=peer, daemon=True)
    thread.start()
    with spccl.Communicator(0, 2, **options) as comm:
        x = bytearray(4000)
        before = signal.signal(signal.SIGALRM, ring)
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.2)
            with pytest.raises(Alarm):
                comm.all_reduce(x, dtype="float32")
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        with pytest.raises(BufferError):  # the collective goes on and still uses the array
            x.append(1)
        gate.set()
        thread.join(TIMEOUT_S)
        assert len(comms) == 1
    x.append(1)  # close() has ended it


def test_two_threads_on_one_communicator():
    """Several threads start collectives. Each start works or is refused; the process never crashes."""
    refused, done = [], []

    def rank_main(comm):
        def many():
            for _ in range(200):
                try:
                    comm.all_reduce(np.ones(5000, np.float32))
                    done.append(1)
                except spccl.StateError as error:
                    refused.append(str(error))

        threads = [threading.Thread(target=many) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(TIMEOUT_S)
        assert len(done) + len(refused) == 800
        assert all("another thread" in text for text in refused)

    run_threads(1, rank_main)


@pytest.mark.parametrize(
    "timeout", [-1, 0, 0.0, float("nan"), float("inf"), 1e300, datetime.timedelta(0), datetime.timedelta(seconds=-1)]
)
def test_timeouts_that_mean_nothing_are_refused(timeout):
    """An earlier version took -1 as the default, without an error."""
    with pytest.raises(spccl.ArgumentError, match=r"timeout: got .*; wanted seconds above 0"):
        spccl.Communicator(0, 1, unique_id=spccl.get_unique_id(), timeout=timeout)
    with spccl.Communicator(0, 1, unique_id=spccl.get_unique_id()) as comm:
        with pytest.raises(spccl.ArgumentError, match="timeout: got"):
            comm.set_timeout(timeout)
        request = comm.all_reduce(np.zeros(4, np.float32), async_op=True)
        if timeout not in (0, datetime.timedelta(0)):
            with pytest.raises(spccl.ArgumentError, match="0 or more"):
                request.wait(timeout)
        request.wait()
        request.wait(0)


def test_short_timeouts_are_not_rounded_to_none():
    assert spccl.comm._ms(1e-9, 0) == spccl.comm._ms(datetime.timedelta(microseconds=1), 0) == 1
    assert spccl.comm._ms(1.5, 0) == 1500 and spccl.comm._ms(None, -1) == -1
