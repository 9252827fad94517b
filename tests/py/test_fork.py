"""A child of fork cannot use its parent's Communicator: every call raises at once and changes nothing."""

import os
import signal
import threading

import numpy as np
import pytest
from test_comm import TIMEOUT_S, run_threads

import spccl


def in_child(fn):
    """Run fn() in a child of fork. Returns the text of its exception, "" if there was none."""
    read_fd, write_fd = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(TIMEOUT_S)  # a child that hangs ends here
        text = ""
        try:
            fn()
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
        os.write(write_fd, text.encode())
        os._exit(0)
    os.close(write_fd)
    with os.fdopen(read_fd, "rb") as pipe:
        text = pipe.read().decode()
    assert os.waitpid(child, 0)[1] == 0, "the child hangs, or crashed"
    return text


def use(comm):
    x = np.full(1000, 100.0, np.float32)
    calls = {
        "all_reduce": lambda: comm.all_reduce(x),
        "async": lambda: comm.all_reduce(x, async_op=True),
        "broadcast": lambda: comm.broadcast(x),
        "abort": lambda: comm.abort("the child says so"),
        "stats": comm.stats,
        "error": lambda: raise_it(comm.async_error()),
        "describe_links": comm.describe_links,
        "describe_schedules": comm.describe_schedules,
    }
    for name, call in calls.items():
        with pytest.raises(spccl.StateError, match="child of fork"):
            call()
            print(f"{name} works in the child")
    comm.close()


def raise_it(error):
    if error is not None:
        raise error


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # fork with threads, from Python 3.12 on
@pytest.mark.parametrize("transport", ["inproc", "shm", "tcp"])
def test_communicator(transport):
    def rank_main(comm):
        texts = []
        for step in range(4):
            x = np.full(1000, comm.rank + 1, np.float32)
            comm.all_reduce(x)
            assert (x == 3).all(), f"rank {comm.rank}, step {step}: {x[:3]}"
            if comm.rank == 0 and step == 1:
                texts.append(in_child(lambda: use(comm)))
        return texts

    assert run_threads(2, rank_main, transports=transport) == [[""], []]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_pending_request():
    forked = threading.Event()

    def rank_main(comm):
        x = np.full(10, comm.rank + 1, np.float32)
        if comm.rank == 1:
            assert forked.wait(2 * TIMEOUT_S)
            comm.all_reduce(x)
            return x[0]
        request = comm.all_reduce(x, async_op=True)

        def use_request():
            with pytest.raises(spccl.StateError, match="child of fork"):
                request.wait()
            assert "child of fork" in str(request.error)

        assert in_child(use_request) == ""
        forked.set()
        request.wait()
        return x[0]

    assert run_threads(2, rank_main) == [3, 3]
