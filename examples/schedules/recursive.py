"""Recursive halving and doubling (Thakur et al., 2005): in each round a rank exchanges sums of half
of its chunks with a partner, and at the end results come back the same way. 2 log2(P) messages one
after the other, for powers of two."""

from spccl.schedule import Topology, all_reduce


@all_reduce
def halving_doubling(t: Topology) -> None:
    if t.ranks & (t.ranks - 1):
        t.skip("wanted a power of two")
    sums = {(rank, c): t.input(rank, c) for rank in range(t.ranks) for c in range(t.ranks)}
    distance = t.ranks // 2
    while distance:  # chunk c stays with the ranks that agree with c in the bits from `distance` on
        for rank in range(t.ranks):
            for c in range(t.ranks):
                if (rank ^ c) & ~(distance - 1) == 0:  # kept here; the partner sends its sum
                    pair = [sums[rank, c], sums[rank ^ distance, c]]
                    sums[rank, c] = t.reduce(rank, pair if rank & distance == 0 else pair[::-1])
        distance //= 2
    have = {c: {c: sums[c, c].output()} for c in range(t.ranks)}  # chunk -> rank -> its copy
    distance = 1
    while distance < t.ranks:
        for c in range(t.ranks):
            for rank, x in list(have[c].items()):
                have[c][rank ^ distance] = x.copy(rank ^ distance).output()
        distance *= 2
