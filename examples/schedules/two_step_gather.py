"""Two-step all-gather over hosts: each block goes to the rank with its place on every other host,
once, and from there to the ranks of that host."""

from spccl.schedule import Topology, all_gather


@all_gather
def two_step(t: Topology) -> None:
    for owner in range(t.ranks):
        block = t.input(owner).output()
        for host in range(t.hosts):
            relay = host * t.per_host + owner % t.per_host
            there = block if relay == owner else block.copy(relay).output()
            others = [host * t.per_host + i for i in range(t.per_host) if host * t.per_host + i != relay]
            for copy in there.copy(others):
                copy.output()
