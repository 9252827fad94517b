"""Tests of `spccl bench --hosts`: emulated hosts, and TCP between them."""

import json
import os
import socket
import subprocess
import threading

import pytest
from click.testing import CliRunner
from host_cluster import NO_HOSTS

from spccl.bench import cases, hosts, report, runner, start
from spccl.cli import main

pytest.importorskip("torch")
needs_hosts = pytest.mark.skipif(NO_HOSTS is not None, reason=f"emulated hosts: {NO_HOSTS}")


def namespaces():
    """Names of this process's namespaces that exist now."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, timeout=20).stdout
    return [line.split()[0] for line in listed.splitlines() if line.startswith(f"spccl-{os.getpid()}-")]


@pytest.mark.parametrize(("text", "rate"), [("1gbit", 1e9), ("100mbit", 1e8), ("2.5gbit", 2.5e9), ("56kbit", 56e3)])
def test_rates(text, rate):
    assert hosts.bits_per_second(text) == rate


@pytest.mark.parametrize("text", ["", "1", "fast", "-1gbit", "0gbit", "1gb", "1 gbit", "1gbit; ls"])
def test_refuses_what_is_no_rate(text):
    with pytest.raises(ValueError, match="is not a rate"):
        hosts.bits_per_second(text)


@pytest.mark.parametrize(
    ("rate", "burst", "queue"), [("1gbit", 262144, 887144), ("100mbit", 26214, 288358), ("1mbit", 16384, 278528)]
)
def test_burst_and_queue(rate, burst, queue):
    assert (hosts.burst_bytes(rate), hosts.queue_bytes(rate)) == (burst, queue)


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["--hosts", "2", "--ranks", "3"], "3 ranks cannot be spread evenly over 2 hosts"),
        (["--hosts", "2", "--rate", "slow"], '"slow" is not a rate'),
        (["--hosts", "2", "--device", "cuda"], "is for --device cpu"),
        (["--in-flight", "4"], "needs --hosts"),
        (["--port-queue", "4M"], "needs --hosts"),
        (["--port-queue", "5G", "--hosts", "2"], "at most 1G"),
        (["--in-flight", "4", "--hosts", "2", "--via", "torch"], "--via native"),
    ],
)
def test_refuses_options(words, part):
    result = CliRunner().invoke(main, ["bench", "--sizes", "64K", *words])
    assert result.exit_code == 2
    assert part in result.output


def test_says_what_is_missing(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    result = CliRunner().invoke(main, ["bench", "--hosts", "2"])
    assert result.exit_code == 1
    assert "needs root" in result.output


def test_says_that_iproute2_is_missing(monkeypatch, tmp_path):
    """The tests that are marked `needs_hosts` are skipped with this text."""
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert hosts.why_not() == "ip and tc not found: install iproute2"


def test_says_what_the_system_refuses(monkeypatch, tmp_path):
    """In a container root may not make namespaces."""
    for name in ("ip", "tc"):
        (tmp_path / name).write_text('#!/bin/sh\necho "Operation not permitted" >&2\nexit 1\n')
        (tmp_path / name).chmod(0o755)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    reason = hosts.why_not()
    assert reason is not None
    assert "ip netns add" in reason
    assert "Operation not permitted" in reason


@needs_hosts
def test_hosts_are_made_and_removed():
    with hosts.emulated(2, "100mbit", port_queue=3 << 20) as names:
        assert set(names) < set(namespaces())
        shaped = subprocess.run(
            ["tc", "-j", "-n", names[0].replace("-0", "-switch"), "qdisc"], capture_output=True, text=True, check=True
        ).stdout
        waits_s = [one["options"]["lat"] / 1e6 for one in json.loads(shaped) if one["kind"] == "tbf"]
        assert waits_s == pytest.approx([8 * (3 << 20) / 1e8] * 2, rel=0.01)
        with pytest.raises(hosts.CannotEmulate, match="File exists"), hosts.emulated(2, "100mbit"):
            pass
    assert namespaces() == []


@needs_hosts
def test_a_host_sees_the_others_alone():
    """Host 0 reaches host 1 and nothing else: its loopback is its own."""
    here = socket.create_server(("127.0.0.1", 0))
    found = []

    def look(names):
        hosts.enter(names[0])
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(here.getsockname(), timeout=5)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((hosts.address(1), 9), timeout=5)
        found.append(hosts.counters())

    with here, hosts.emulated(2, "100mbit") as names:
        thread = threading.Thread(target=look, args=(names,))
        thread.start()
        thread.join(30)
    assert len(found) == 1
    assert found[0].tx_bytes > 0


def refuse(*_):
    raise OSError(1, "refused for a test")


@pytest.mark.parametrize(("role", "host"), [("_receive", "b"), ("_send_for", "a")])
def test_rate_says_why_it_was_not_measured(monkeypatch, role, host):
    """The exception of either thread reaches the caller at once."""

    def listen(name, port):
        port.set_result(1)

    monkeypatch.setattr(hosts, "_receive", listen)
    monkeypatch.setattr(hosts, role, refuse)
    with pytest.raises(hosts.CannotEmulate, match=f"from a to b: host {host}: .*refused for a test") as caught:
        hosts.measured_rate(["a", "b"])
    assert isinstance(caught.value.__cause__, OSError)


@pytest.mark.slow
@pytest.mark.timeout(1500)
@needs_hosts
@pytest.mark.parametrize("ranks", [2, 4])
def test_bench_over_hosts(ranks):
    """Right results, and not faster than the wire. All bounds have slack, because the machine may be busy."""
    plan = runner.Plan(
        cases=tuple(cases.cases(["all_reduce"], [16 << 20], ["float32"], "sum", [0.0])),
        peer="none",
        iters=3,
        warmup=1,
        n_hosts=2,
        rate="500mbit",
        in_flight=3,
    )
    rows = start.run_spawned(plan, ranks, deadline_s=600, on_message=lambda _: None)
    assert namespaces() == []
    row = rows[0]
    assert row.wrong == 0
    assert row.hosts == 2
    assert 0.003 < row.link_gbs < 0.1  # a receiver that starts late finds full buffers; without a limit it is over 1
    # A host sends its ranks' contributions to the other host's shards, and each of its results once.
    payload = (ranks / 2 * 8 + 8) * 2**20
    assert payload < row.host_bytes < 1.5 * payload
    assert row.time_us * 1e-6 > payload / 0.07e9
    assert 0.04 < row.time_over_wire < 100
    assert row.in_flight == 3
    assert row.first_us < row.last_us
    # A rank that starts late does not count what the other rank of its host has sent before.
    assert 0.4 * row.host_bytes < row.first_bytes < 3.5 * row.host_bytes
    assert "3 in flight" in row.line()


def test_rows_without_hosts_have_no_such_columns():
    plan = runner.Plan(
        cases=tuple(cases.cases(["all_reduce"], [64 << 10], ["float32"], "sum", [0.9])),
        peer="none",
        iters=2,
        warmup=0,
    )
    row = start.run_spawned(plan, 2, deadline_s=600, on_message=lambda _: None)[0]
    assert type(row) is report.Row
