"""Faults between 4 emulated hosts of 2 ranks: network namespaces (root, iproute2), shm inside a host, TCP between.

The cases share hosts and ranks, so that start-up is paid once. A rank that dies or a link that goes down comes last.
No case depends on how fast the machine is: an error must come before DEADLINE_S, and must name the right ranks.
"""

import contextlib
import os
import signal
import socket
import subprocess
import threading
import time

import pytest
from host_cluster import DEADLINE_S, NO_HOSTS, Cluster

from spccl.bench import hosts

pytestmark = pytest.mark.skipif(NO_HOSTS is not None, reason=f"emulated hosts: {NO_HOSTS}")
N_HOSTS, PER_HOST = 4, 2
N = N_HOSTS * PER_HOST
RATE, SLOW = "200mbit", "20mbit"
CUT_S = 3.0  # time-out of collectives over a link that is cut
FIREWALL_S = 5.0  # time to join over a link that carries nothing


@pytest.fixture(scope="module")
def nothing_is_left():
    """After the cluster has closed, no namespace of this process is there."""
    yield
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, timeout=20, check=True).stdout
    assert f"spccl-{os.getpid()}-" not in listed, listed


@pytest.fixture(scope="module")
def cluster(nothing_is_left):
    with contextlib.ExitStack() as stack:
        made = Cluster(stack.enter_context(hosts.emulated(N_HOSTS, RATE)), PER_HOST)
        stack.callback(made.close)
        yield made


EVERYONE = list(range(N))
FIRST_TWO_HOSTS = [0, 1, 2, 3]


def run(*words):
    subprocess.run(words, check=True, capture_output=True, timeout=DEADLINE_S)


def netns(cluster, host, *words):
    run("ip", "-n", cluster.names[host], *words)


def test_shm_inside_tcp_between(cluster):
    with cluster.group(EVERYONE) as group:
        for rank, links in enumerate(cluster.replies(cluster.ask(EVERYONE, "links", group))):
            for peer, text in links.items():
                assert text.startswith("shm" if peer // PER_HOST == rank // PER_HOST else "tcp"), (rank, peer, text)
        cluster.works(EVERYONE, group)


def test_ipv6(cluster):
    """Every rank publishes one IPv6 address, and nothing else."""
    members = [0, 2, 4]
    env = {i: {"SPCCL_TCP_ADDR": f"fd77::{i // PER_HOST + 1}"} for i in members}
    with contextlib.ExitStack() as stack:
        for host in range(N_HOSTS):
            what = f"fd77::{host + 1}/64", "dev", hosts.IFNAME
            netns(cluster, host, "addr", "add", *what, "nodad")
            # else the other cases would have a second way to each host
            stack.callback(netns, cluster, host, "addr", "del", *what)
        with cluster.group(members, env=env) as group:
            cluster.works(members, group)


def test_interface_that_reaches_nobody(cluster):
    """An address that every host has, as a container bridge has it, comes before the one that works."""
    with contextlib.ExitStack() as stack:
        for host in range(N_HOSTS):
            netns(cluster, host, "link", "add", "aside", "type", "veth", "peer", "name", "aside-peer")
            stack.callback(netns, cluster, host, "link", "del", "aside")
            netns(cluster, host, "addr", "add", "172.17.0.1/16", "dev", "aside")
            netns(cluster, host, "link", "set", "aside", "up")
            netns(cluster, host, "link", "set", "aside-peer", "up")
        with cluster.group(EVERYONE) as group:
            cluster.works(EVERYONE, group)


def test_slow_link(cluster):
    def limit(rate):
        shape = ("root", "tbf", "rate", rate, "burst", "256kb", "latency", "5ms")
        run("tc", "-n", cluster.names[3], "qdisc", "change", "dev", hosts.IFNAME, *shape)

    with contextlib.ExitStack() as stack, cluster.group(EVERYONE) as group:
        limit(SLOW)
        stack.callback(limit, RATE)
        cluster.works(EVERYONE, group, 400_000)


def in_host(name, work):
    """Run work() in a thread that has entered the host."""
    done = []

    def body():
        hosts.enter(name)
        done.append(work())

    thread = threading.Thread(target=body)
    thread.start()
    thread.join(DEADLINE_S)
    assert done, "the thread failed"
    return done[0]


def test_garbage_from_another_process(cluster):
    """Noise at the listeners of a group that starts, and again when it runs."""
    seen = []

    def noise():
        """Returns how many of the listeners took the connection."""
        n = 0
        for port in seen:
            with contextlib.suppress(OSError):
                sock = socket.create_connection((hosts.address(1), port), timeout=5)
                n += 1
                with sock:
                    sock.sendall(os.urandom(4096))
        return n

    members = [0, 2, 3]
    before = set(cluster.ranks[2].call("listening"))
    uid = cluster.ranks[0].call("unique_id")
    asked = [
        (cluster.ranks[i], cluster.ranks[i].ask("join", "noise", r, 3, uid, {}, DEADLINE_S, {"transports": "tcp"}))
        for r, i in enumerate(members)
        if i != 3
    ]
    end = time.monotonic() + DEADLINE_S
    while not seen and time.monotonic() < end:  # rank 2 listens, and rank 3 has not come
        seen = [port for port in cluster.ranks[2].call("listening") if port not in before]
    assert in_host(cluster.names[0], noise) > 0
    last = cluster.ranks[3]
    asked.append((last, last.ask("join", "noise", 2, 3, uid, {}, DEADLINE_S, {"transports": "tcp"})))
    assert [reply[:2] for reply in cluster.replies(asked)] == [("ok", "")] * 3
    assert in_host(cluster.names[0], noise) == 0  # nobody listens any more
    cluster.works(members, "noise")
    cluster.replies(cluster.ask(members, "leave", "noise"))


def test_host_names_that_contradict_each_other(cluster):
    """Two names on one host, and one name on two hosts: the network decides, and all sums are right."""
    env = {i: {"SPCCL_HOST_ID": "same"} for i in (0, 2, 4)} | {i: {"SPCCL_HOST_ID": "other"} for i in (1, 3, 5)}
    members = [0, 1, 2, 3, 4, 5]
    with cluster.group(members, env=env) as group:
        for links in cluster.replies(cluster.ask(members, "links", group)):
            assert all(text.startswith("tcp") for text in links.values())
        cluster.works(members, group)


def test_no_common_transport(cluster):
    """Rank 2 offers shm alone, to ranks of other hosts. Another group of the same ranks goes on."""
    with cluster.group(FIRST_TWO_HOSTS) as other:
        _, asked = cluster.begin_join([0, 2, 4], transports={2: "shm"}, timeout=DEADLINE_S)
        replies = cluster.replies(asked)
        for rank, (kind, text, seconds) in enumerate(replies):
            assert kind == "UnreachableError", (rank, kind, text)
            assert "no transport reaches rank" in text, text
            assert "shm:" in text, text  # what was tried
            assert "tcp: the peer does not offer it" in text or rank == 1, text
            assert seconds < DEADLINE_S / 2  # at once, and not at the deadline
        cluster.works(FIRST_TWO_HOSTS, other)


def test_firewall(cluster):
    """Hosts 1 and 2 drop what they have for each other. Both ends are named, with the address that was tried."""
    netns(cluster, 2, "route", "add", "blackhole", f"{hosts.address(1)}/32")
    with contextlib.ExitStack() as stack, cluster.group([0, 1, 6, 7]) as other:
        stack.callback(netns, cluster, 2, "route", "del", "blackhole", f"{hosts.address(1)}/32")
        _, asked = cluster.begin_join([0, 2, 4], timeout=FIREWALL_S)
        cluster.works([0, 1, 6, 7], other)
        replies = cluster.replies(asked)
        for rank, peer in ((1, 2), (2, 1)):
            kind, text, seconds = replies[rank]
            assert kind in ("TimeoutError", "PeerError"), (kind, text)
            assert f"rank {rank}" in text and f"rank {peer}" in text, text
            assert seconds < DEADLINE_S
        assert hosts.address(2) in replies[1][1], replies[1]
        assert replies[0][0] in ("ok", "TimeoutError", "PeerError"), replies[0]


def test_rendezvous_address_that_does_not_answer(cluster):
    """The id's first address is one that host 1 cannot reach, without an error: after 1 s it takes the next."""
    aside, nobody = "10.78.0.1/32", hosts.address(100)
    with contextlib.ExitStack() as stack:
        netns(cluster, 0, "addr", "add", aside, "dev", "lo")  # lo is the first interface
        stack.callback(netns, cluster, 0, "addr", "del", aside, "dev", "lo")
        netns(cluster, 1, "route", "add", aside, "via", nobody)
        stack.callback(netns, cluster, 1, "route", "del", aside, "via", nobody)
        group, asked = cluster.begin_join([0, 2])
        replies = cluster.replies(asked)
    assert [reply[:2] for reply in replies] == [("ok", "")] * 2
    assert replies[1][2] > 0.9, "the first address answered or was refused"
    cluster.works([0, 2], group)
    cluster.replies(cluster.ask([0, 2], "leave", group))


def test_rendezvous_behind_a_firewall(cluster):
    """Host 1 cannot connect to host 0. Its error has each address with the cause, and rank 0's says what to check."""
    with contextlib.ExitStack() as stack:
        netns(cluster, 1, "route", "add", "blackhole", f"{hosts.address(0)}/32")
        stack.callback(netns, cluster, 1, "route", "del", "blackhole", f"{hosts.address(0)}/32")
        _, asked = cluster.begin_join([0, 2], timeout=2.0)
        (waited, waited_text, _), (tried, tried_text, _) = cluster.replies(asked)
    assert waited == "TimeoutError", waited_text
    for wanted in ("rank 1 of 2 did not join", f"{hosts.address(0)}:", "127.0.0.1:", "firewall"):
        assert wanted in waited_text, waited_text
    assert tried in ("PeerError", "TimeoutError"), tried_text
    for wanted in (f"{hosts.address(0)}:", "127.0.0.1:", "firewall"):
        assert wanted in tried_text, tried_text


def test_killed_host(cluster):
    """Both ranks of host 2 are killed: every other rank's error names one of them. Another group goes on."""
    with cluster.group(FIRST_TWO_HOSTS) as other, cluster.group(EVERYONE) as group:
        rest = [i for i in EVERYONE if i // PER_HOST != 2]
        asked = cluster.ask(EVERYONE, "loop", group, 200_000)
        cluster.works(FIRST_TWO_HOSTS, other)
        for i in (4, 5):
            cluster.ranks[i].process.send_signal(signal.SIGKILL)
            cluster.ranks[i].process.wait()
        for kind, text, _ in cluster.replies([asked[i] for i in rest]):
            assert kind in ("PeerError", "AbortedError"), (kind, text)
            assert "rank 4" in text or "rank 5" in text, text
        cluster.works(FIRST_TWO_HOSTS, other)


def test_link_that_is_cut(cluster):
    """Host 3's link goes down in a collective, and no FIN arrives: the time-out ends every rank."""
    members = [0, 1, 2, 3, 6, 7]
    with cluster.group(FIRST_TWO_HOSTS) as other, cluster.group(members) as group:
        cluster.replies(cluster.ask(members, "set_timeout", group, CUT_S))
        asked = cluster.ask(members, "loop", group, 200_000)
        cluster.works(FIRST_TWO_HOSTS, other)
        netns(cluster, 3, "link", "set", hosts.IFNAME, "down")
        replies = cluster.replies(asked)
        for kind, text, _ in replies:
            assert kind in ("TimeoutError", "AbortedError"), (kind, text)
            # The first time-out aborts the others. It may name a rank that waits for host 3 itself: a relay.
            assert "timed out" in text and "waiting for" in text, text
        cluster.works(FIRST_TWO_HOSTS, other)
