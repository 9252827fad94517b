"""SparCML's split all-reduce (Renggli et al., 2019, DSAR_Split_allgather): each rank sends its part
of chunk c straight to rank c, which adds; then the sums are gathered by recursive doubling. For
powers of two."""

from spccl.schedule import Topology, all_reduce


@all_reduce
def split(t: Topology) -> None:
    if t.ranks & (t.ranks - 1):
        t.skip("wanted a power of two")
    for c in range(t.ranks):
        have = {c: t.reduce(c, [t.input(rank, c) for rank in range(t.ranks)]).output()}
        distance = 1
        while distance < t.ranks:
            for rank, x in list(have.items()):
                have[rank ^ distance] = x.copy(rank ^ distance).output()
            distance *= 2
