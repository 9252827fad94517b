"""Hierarchical: the ranks of a host add first, and only their sum leaves the host. Results cross to
each other host once. On each host the rank with the place of the chunk's owner adds and relays."""

from spccl.schedule import Topology, all_reduce


@all_reduce
def hierarchical(t: Topology) -> None:
    for c in range(t.ranks):
        own, place = divmod(c, t.per_host)
        sums = {}
        for host in range(t.hosts):
            ranks = range(host * t.per_host, (host + 1) * t.per_host)
            contributions = [t.input(rank, c) for rank in ranks]
            if host == own:
                sums[host] = contributions
            else:
                sums[host] = [t.reduce(ranks[place], contributions)]
        order = [own, *(host for host in range(t.hosts) if host != own)]
        total = t.reduce(c, [x for host in order for x in sums[host]]).output()
        for host in range(t.hosts):
            relay = host * t.per_host + place
            there = total if host == own else total.copy(relay).output()
            for rank in range(host * t.per_host, (host + 1) * t.per_host):
                if rank != relay:
                    there.copy(rank).output()
