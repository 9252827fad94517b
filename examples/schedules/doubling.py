"""Recursive doubling: in each round a rank and a partner exchange the sums they have, so everyone has
the result after log2(P) messages. It sends the whole array each time: for small arrays, or few
nonzeros (SparCML's SSAR_Recursive_double). For powers of two."""

from spccl.schedule import Topology, all_reduce


@all_reduce(chunks=1)
def doubling(t: Topology) -> None:
    if t.ranks & (t.ranks - 1):
        t.skip("wanted a power of two")
    sums = [t.input(rank) for rank in range(t.ranks)]
    distance = 1
    while distance < t.ranks:  # both partners add in one order, so all ranks get the same bits
        pairs = [sorted((rank, rank ^ distance)) for rank in range(t.ranks)]
        sums = [t.reduce(rank, [sums[low], sums[high]]) for rank, (low, high) in enumerate(pairs)]
        distance *= 2
    for total in sums:
        total.output()
