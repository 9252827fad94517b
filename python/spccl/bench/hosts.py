"""Emulated hosts: network namespaces of this machine, joined by a switch, with links of a limited rate.

Each host is a namespace with one interface, `eth0`. The switch is a bridge in a namespace of its own, so the machine's
own network is not touched. Both ends of a host's link are shaped by `tbf`. After a pause each passes a burst at once,
2 ms of the rate (16 to 256 KiB). The switch's end queues what the caller says, else as much as a small switch: 5 ms of
the rate, and 256 KiB at least. The host's end queues 1.5 MB, 1000 full packets, as Linux's pfifo_fast. Needs root, and
the commands `ip` and `tc` (iproute2). This file knows nothing of collectives.
"""

from __future__ import annotations

import contextlib
import ctypes
import operator
import os
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import NamedTuple

IFNAME = "eth0"
_BURST_S, _BURST_BYTES_MIN, _BURST_BYTES_MAX = 256 * 1024 / 125e6, 16 << 10, 256 << 10
_QUEUE_S, _QUEUE_BYTES_MIN = 5e-3, 256 << 10
_HOST_QUEUE_BYTES = 1000 * 1514
_COMMAND_S = 20.0  # time for one `ip` or `tc` command
_CLONE_NEWNET = 0x40000000
_RATE = re.compile(r"(\d+(?:\.\d+)?)(k|m|g)bit")
_UNIT = {"k": 1e3, "m": 1e6, "g": 1e9}


class CannotEmulate(RuntimeError):
    """This machine or this user cannot make the namespaces. The text says why, and what to do."""


def bits_per_second(rate: str) -> float:
    """ "1gbit" -> 1e9. Raises: ValueError."""
    match = _RATE.fullmatch(rate)
    if match is None or float(match[1]) <= 0:
        raise ValueError(f'"{rate}" is not a rate: write it as tc does, such as 1gbit or 100mbit')
    return float(match[1]) * _UNIT[match[2]]


def burst_bytes(rate: str) -> int:
    """What a link passes at once after a pause. A larger burst at a low rate would hide the wire's time."""
    return int(min(max(bits_per_second(rate) / 8 * _BURST_S, _BURST_BYTES_MIN), _BURST_BYTES_MAX))


def queue_bytes(rate: str) -> int:
    """What the switch's end of a link holds at most: its burst, and what waits behind it."""
    return burst_bytes(rate) + int(max(bits_per_second(rate) / 8 * _QUEUE_S, _QUEUE_BYTES_MIN))


def host_queue_bytes(rate: str) -> int:
    """What the host's end of a link holds at most. At 2.5 Gbit/s and more it is that of the switch."""
    return max(burst_bytes(rate) + _HOST_QUEUE_BYTES, queue_bytes(rate))


def _run(*words: str) -> None:
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=_COMMAND_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CannotEmulate(f"{' '.join(words)}: {error}") from error
    if done.returncode != 0:
        text = done.stderr.strip() or f"exit code {done.returncode}"
        raise CannotEmulate(f"{' '.join(words)}: {text}")


def why_not() -> str | None:
    """Why hosts cannot be emulated here; None if they can. Makes a namespace with a shaped interface to find out."""
    if os.geteuid() != 0:
        return "making network namespaces needs root"
    missing = [name for name in ("ip", "tc") if shutil.which(name) is None]
    if missing:
        return f"{' and '.join(missing)} not found: install iproute2"
    return _refusal(f"spccl-{os.getpid()}-probe")


def _refusal(name: str) -> str | None:
    """What the system refuses to root, such as namespaces in a container without CAP_SYS_ADMIN."""
    try:
        _run("ip", "netns", "add", name)
        _run("ip", "-n", name, "link", "add", "bridge", "type", "bridge")
        _run("ip", "-n", name, "link", "add", "port0", "type", "veth", "peer", "name", "port1")
        _run("tc", "-n", name, "qdisc", "add", "dev", "lo", "root", "tbf", *_shape("1gbit", queue_bytes("1gbit")))
    except CannotEmulate as error:
        return str(error)
    finally:
        with contextlib.suppress(CannotEmulate):  # it may not have been made
            _run("ip", "netns", "del", name)
    return None


def _shape(rate: str, limit_bytes: int) -> tuple[str, ...]:
    """Arguments of tbf."""
    return ("rate", rate, "burst", str(burst_bytes(rate)), "limit", str(limit_bytes))


def _make(prefix: str, names: list[str], rate: str, port_queue: int) -> None:
    switch = f"{prefix}-switch"
    limit = burst_bytes(rate) + port_queue if port_queue else queue_bytes(rate)
    _run("ip", "netns", "add", switch)
    _run("ip", "-n", switch, "link", "add", "bridge", "type", "bridge")
    _run("ip", "-n", switch, "link", "set", "bridge", "up")
    for i, name in enumerate(names):
        port = f"port{i}"
        _run("ip", "netns", "add", name)
        _run("ip", "-n", switch, "link", "add", port, "type", "veth", "peer", "name", IFNAME, "netns", name)
        _run("ip", "-n", switch, "link", "set", port, "master", "bridge", "up")
        _run("ip", "-n", name, "addr", "add", f"{address(i)}/24", "dev", IFNAME)
        _run("ip", "-n", name, "link", "set", IFNAME, "up")
        _run("ip", "-n", name, "link", "set", "lo", "up")
        _run("tc", "-n", name, "qdisc", "add", "dev", IFNAME, "root", "tbf", *_shape(rate, host_queue_bytes(rate)))
        _run("tc", "-n", switch, "qdisc", "add", "dev", port, "root", "tbf", *_shape(rate, limit))


def address(host: int) -> str:
    """The IP address of host number `host`."""
    return f"10.77.1.{host + 1}"


@contextlib.contextmanager
def emulated(n_hosts: int, rate: str, port_queue: int = 0) -> Iterator[list[str]]:
    """Make n_hosts hosts with links of `rate` ("1gbit"), and remove them at the end. Yields the namespaces' names.

    port_queue: bytes that the switch's end of a link queues behind its burst; 0: as a small switch.

    Raises: CannotEmulate, ValueError (the rate, or not 2 to 250 hosts).
    """
    bits_per_second(rate)
    if not 2 <= n_hosts <= 250:
        raise ValueError(f"{n_hosts} hosts: wanted 2 to 250")
    reason = why_not()
    if reason is not None:
        raise CannotEmulate(reason)
    prefix = f"spccl-{os.getpid()}"
    names = [f"{prefix}-{i}" for i in range(n_hosts)]
    try:
        _make(prefix, names, rate, port_queue)
        yield names
    finally:
        for name in [*names, f"{prefix}-switch"]:
            with contextlib.suppress(CannotEmulate):
                _run("ip", "netns", "del", name)


def enter(name: str) -> None:
    """Move this thread, and the threads that it starts later, to the host `name`. Raises: OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{name}", "rb") as namespace:
        if libc.setns(namespace.fileno(), _CLONE_NEWNET) != 0:
            error = ctypes.get_errno()
            raise OSError(error, f"entering the network namespace {name}: {os.strerror(error)}")


# ---- counters ----


class Counters(NamedTuple):
    """What the host of this thread counted since it was made.

    tx_bytes: bytes out of its interface, with all headers. retransmits: TCP segments sent again. timeouts: TCP
    retransmission time-outs.
    """

    tx_bytes: int
    retransmits: int
    timeouts: int

    def since(self, before: Counters) -> Counters:
        return Counters(*map(operator.sub, self, before))


def _table_value(path: str, table: str, name: str) -> int:
    """A value of /proc/net/snmp or netstat, which have pairs of lines: names, then values."""
    with open(path) as file:
        lines = [line.split() for line in file if line.startswith(table + ":")]
    return int(lines[1][lines[0].index(name)])


def counters() -> Counters:
    """Read the counters of the host of this thread."""
    with open("/proc/thread-self/net/dev") as file:
        line = next(line for line in file if line.strip().startswith(IFNAME + ":"))
    return Counters(
        tx_bytes=int(line.split(":")[1].split()[8]),
        retransmits=_table_value("/proc/thread-self/net/snmp", "Tcp", "RetransSegs"),
        timeouts=_table_value("/proc/thread-self/net/netstat", "TcpExt", "TCPTimeouts"),
    )


# ---- the rate of a link ----


def _send_for(name: str, port: Future[int], seconds: float) -> None:
    where = address(1), port.result(10)
    enter(name)
    block = bytes(1 << 18)
    with socket.create_connection(where, timeout=seconds + 5) as sock:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            sock.sendall(block)


def _receive(name: str, port: Future[int]) -> float:
    enter(name)
    with socket.create_server((address(1), 0)) as server:
        server.settimeout(10)
        port.set_result(server.getsockname()[1])
        sock, _ = server.accept()
        with sock:
            sock.settimeout(10)
            buffer = bytearray(1 << 18)
            sock.recv_into(buffer)
            start, n_bytes = time.monotonic(), 0
            while n := sock.recv_into(buffer):
                n_bytes += n
            return n_bytes / (time.monotonic() - start)


def measured_rate(names: list[str], seconds: float = 1.0) -> float:
    """Payload that one TCP connection carries from host 0 to host 1, in bytes per second. Raises: CannotEmulate."""
    port: Future[int] = Future()
    pool = ThreadPoolExecutor(2)  # threads that are in the hosts' namespaces
    receiver = pool.submit(_receive, names[1], port)
    receiver.add_done_callback(lambda _: port.cancel())  # no effect if the receiver has listened
    sender = pool.submit(_send_for, names[0], port, seconds)
    pool.shutdown(wait=False)
    for name, thread in ((names[0], sender), (names[1], receiver)):
        try:
            rate = thread.result(seconds + 20)
        except CancelledError:  # of `port`: the receiver says why
            continue
        except Exception as error:
            what = f"measuring the rate of the link from {names[0]} to {names[1]}: host {name}: {error!r}"
            raise CannotEmulate(what) from error
    return rate
