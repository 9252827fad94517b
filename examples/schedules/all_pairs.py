"""All-pairs: each rank sends chunk c to rank c, which adds in rank order and sends the sum to
everyone. Two messages one after the other, however many ranks. This is spccl's direct schedule, so
results have the bits of the automatic choice."""

from spccl.schedule import Topology, all_reduce, reduce_scatter


@all_reduce
def all_pairs(t: Topology) -> None:
    for c in range(t.ranks):
        total = t.reduce(c, [t.input(rank, c) for rank in range(t.ranks)]).output()
        for copy in total.copy([rank for rank in range(t.ranks) if rank != c]):
            copy.output()


@reduce_scatter
def all_pairs_scatter(t: Topology) -> None:
    for owner in range(t.ranks):
        t.reduce(owner, [t.input(rank, block=owner) for rank in range(t.ranks)]).output()
