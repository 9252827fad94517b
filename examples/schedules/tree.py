"""Tree broadcast: rank number i from the root passes the array on to numbers 2 i + 1 and 2 i + 2."""

from spccl.schedule import Topology, broadcast


@broadcast(chunks=4)
def tree(t: Topology) -> None:
    for c in range(t.chunks):
        at = {0: t.input(t.root, c)}
        for i in range(1, t.ranks):
            at[i] = at[(i - 1) // 2].copy((t.root + i) % t.ranks).output()
