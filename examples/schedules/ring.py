"""The ring: each rank sends to the next one only. The sum of chunk c starts at rank c + 1, goes
round, and ends at rank c; its result goes round once more. Every rank sends 2 (P-1)/P of the array."""

from spccl.schedule import Topology, all_gather, all_reduce


@all_reduce
def ring(t: Topology) -> None:
    for c in range(t.ranks):
        x = t.input((c + 1) % t.ranks, c)
        for i in range(2, t.ranks + 1):
            rank = (c + i) % t.ranks
            x = t.reduce(rank, [x, t.input(rank, c)])
        x.output()
        for i in range(1, t.ranks):
            x = x.copy((c + i) % t.ranks).output()


@all_gather
def ring_gather(t: Topology) -> None:
    for owner in range(t.ranks):
        x = t.input(owner).output()
        for i in range(1, t.ranks):
            x = x.copy((owner + i) % t.ranks).output()
