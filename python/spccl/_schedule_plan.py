"""From what a schedule did to the steps of a plan, as text. schedule.py is the language, docs/SCHEDULES.md the text.

A *node* makes a value on one rank: an input, a sum, or a copy. All nodes have one order, by the number of messages
before them, then by the program. Each rank takes and sends messages in that order. So the messages of a queue have one
order, and the steps that share a queue take turns. Steps that are alone on their queues run freely, and a node that is
alone sends what it makes in the same step.

The order proves that no rank waits for ever: every wait is for something that comes earlier in it. Merged sends may
break that. So `compile_trace` tries the merged form first, lets the check in C decide, and falls back.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any, overload

from . import _ext, errors

KEPT_MAX = 128  # slices: SP_PLAN_KEPT_MAX
BLOCK = 4  # slices on the way between a rank's takes and its sends, as in the ring of C


class ScheduleError(ValueError):
    """A schedule asks for what no plan can do, or its plan fails the check."""


class Value:
    """A chunk of data on a rank. It never changes.

    Attributes: rank; chunk (in all_gather and reduce_scatter: block times chunks, plus the chunk in the block).
    """

    def __init__(self, trace: Trace, kind: str, rank: int, chunk: int, terms: list[Value]) -> None:
        self.rank, self.chunk = rank, chunk
        self._trace, self._kind, self._terms = trace, kind, terms
        self._is_output = False
        self._merge = 0  # values of one copy() call have one number
        self._seq = len(trace.values)
        # Messages before it, one after the other.
        self._level = max((v._level + (v.rank != rank) for v in terms), default=0) + (kind == "sum")
        trace.values.append(self)

    def __repr__(self) -> str:
        return f"{self._kind} of chunk {self.chunk} on rank {self.rank}"

    @overload
    def copy(self, rank: int) -> Value: ...
    @overload
    def copy(self, rank: Sequence[int]) -> list[Value]: ...
    def copy(self, rank: int | Sequence[int]) -> Value | list[Value]:
        """The same data on another rank; a list of ranks gives a list, and one message goes to all of them."""
        trace = self._trace
        trace.n_copies += 1
        ranks = [rank] if isinstance(rank, int) else list(rank)
        made = []
        for r in ranks:
            trace.check_rank(r)
            if r == self.rank:
                raise ScheduleError(f"{self}: it is on rank {r} already")
            v = Value(trace, "copy", r, self.chunk, [self])
            v._merge = trace.n_copies
            made.append(v)
        return made[0] if isinstance(rank, int) else made

    def output(self) -> Value:
        """Make this the output of its rank for the chunk. Returns the value."""
        self._is_output = True
        return self


class Trace:
    """What a schedule did."""

    def __init__(self, collective: str, ranks: int) -> None:
        self.collective, self.ranks = collective, ranks
        self.values: list[Value] = []
        self.n_copies = 0
        self._inputs: dict[tuple[int, int], Value] = {}

    def check_rank(self, rank: int) -> None:
        if not 0 <= rank < self.ranks:
            raise ScheduleError(f"rank {rank}: wanted 0 to {self.ranks - 1}")

    def input(self, rank: int, chunk: int, block: int | None, chunks: int, root: int) -> Value:
        self.check_rank(rank)
        if not 0 <= chunk < chunks:
            raise ScheduleError(f"chunk {chunk}: wanted 0 to {chunks - 1}")
        if block is None and self.collective == "reduce_scatter":
            raise ScheduleError("a reduce_scatter has a block for each rank: t.input(rank, chunk, block=RANK)")
        if block is not None and self.collective != "reduce_scatter":
            raise ScheduleError(f"block= is for reduce_scatter: the input of {self.collective} has no blocks")
        if root not in (-1, rank):
            raise ScheduleError(f"rank {rank} has no input: rank {root} is the root")
        if block is not None:
            self.check_rank(block)
        first = {"all_gather": rank, "reduce_scatter": block or 0}.get(self.collective, 0)
        key = rank, first * chunks + chunk
        if key not in self._inputs:
            self._inputs[key] = Value(self, "input", *key, [])
        return self._inputs[key]

    def sum(self, rank: int, values: list[Value]) -> Value:
        self.check_rank(rank)
        if self.collective not in ("all_reduce", "reduce_scatter"):
            raise ScheduleError(f"{self.collective} has no sums")
        if not values:
            raise ScheduleError("a sum of no values")
        for v in values:
            if v.chunk != values[0].chunk:
                raise ScheduleError(f"{v} and {values[0]} are different chunks: they cannot be added")
        return Value(self, "sum", rank, values[0].chunk, values)


# ---- nodes ------------------------------------------------------------------------------------------


@dataclasses.dataclass(eq=False)
class Node:
    """Makes a value on one rank. A sum adds `terms`; a copy passes on its one term, which is finished."""

    rank: int
    chunk: int
    kind: str  # "input", "sum", "copy"
    terms: list[Node]
    is_output: bool
    key: tuple[int, int, float]  # the order of nodes: messages before it, chunk, place in the program
    merge: int
    finished: bool = False  # a sum that is an output, or what has no sums
    readers: list[Node] = dataclasses.field(default_factory=list)  # nodes that it is a term of
    steps: list[Step] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(eq=False)
class Step:
    """A line of the plan. What it takes and sends: queues by (peer, name)."""

    kind: str
    node: Node
    rank: int
    key: tuple[Any, ...]
    senders: list[int] = dataclasses.field(default_factory=list)
    receivers: list[int] = dataclasses.field(default_factory=list)
    queue_in: str = "input"
    queue_out: str = "input"
    source: str = ""  # "in", "out", "kept"
    at: int = -1
    out: bool = False
    keeps: bool = False
    after: Step | None = None
    reads: Step | None = None  # the step that keeps what this one reads
    slot: int = -1
    turn: int = -1
    index: int = -1

    def queues(self) -> list[tuple[str, int, str]]:
        return [("from", r, self.queue_in) for r in self.senders] + [("to", r, self.queue_out) for r in self.receivers]

    def text(self) -> str:
        words = [self.kind, f"chunk={self.node.chunk}"]
        if self.senders:
            words.append(f"from={','.join(map(str, self.senders))}@{self.queue_in}")
        if self.source:
            source = f"slot{self.reads.slot}" if self.source == "kept" and self.reads else self.source
            words.append(f"{'src' if self.kind == 'send' else 'own'}={source}")
        if self.at >= 0:
            words.append(f"at={self.at}")
        if self.out:
            words.append("out")
        if self.keeps:
            words.append(f"keep={self.slot}")
        if self.receivers:
            words.append(f"to={','.join(map(str, self.receivers))}@{self.queue_out}")
        if self.after is not None:
            words.append(f"after={self.after.index}")
        if self.turn >= 0:
            words.append(f"turn={self.turn}")
        return " ".join(words) + "\n"


def _nodes(trace: Trace) -> list[Node]:
    """One node for each value, in their order. A copy of what is not finished is a sum of one term."""
    sums = trace.collective in ("all_reduce", "reduce_scatter")
    of: dict[Value, Node] = {}
    for v in trace.values:
        terms = [of[t] for t in v._terms]
        kind = v._kind
        if kind == "copy" and sums and not terms[0].finished:
            kind = "sum"
        node = Node(v.rank, v.chunk, kind, terms, v._is_output, (v._level, v.chunk, v._seq), v._merge)
        node.finished = kind == "copy" or (v._is_output if sums else True)
        if kind == "copy" and not v._is_output:
            raise ScheduleError(
                f"{v} is not an output: call .output() on it; finished data goes only to ranks that need it"
            )
        if kind == "input" and v._is_output and sums:
            raise ScheduleError(f"{v} is an output before it is a sum")
        for term in terms:
            if kind == "sum" and term.finished:
                raise ScheduleError(f"{v}: one of its terms is an output, so it is a result already")
            term.readers.append(node)
        of[v] = node
    for node in of.values():
        if not node.readers and not node.is_output:
            if node.kind == "input":
                continue
            raise ScheduleError(f"a {node.kind} of chunk {node.chunk} on rank {node.rank} is used nowhere")
    made = [piece for node in of.values() for piece in _split(node)]
    return sorted(made, key=lambda n: n.key)


def _split(node: Node) -> list[Node]:
    """A step adds one value of its own rank, and one of each other rank. A longer sum is cut: it starts with the sum of
    its first terms, which has the same bits."""
    if node.kind != "sum":
        return [node]
    made: list[Node] = []
    terms: list[Node] = []
    seen: set[int] = set()
    for term in node.terms:
        if term.rank in seen:
            prefix = Node(node.rank, node.chunk, "sum", terms, False, node.key, 0, readers=[node])
            for t in terms:
                t.readers[t.readers.index(node)] = prefix
            made.append(prefix)
            if term.rank == node.rank:
                raise ScheduleError(
                    f"a sum of chunk {node.chunk} on rank {node.rank} adds two values that this rank has: a rank adds "
                    "one of its own, and one of each other rank. Give their terms to one reduce(), or make one of the "
                    "two on another rank"
                )
            terms, seen = [prefix], {node.rank}
        terms.append(term)
        seen.add(term.rank)
    node.terms = terms
    for i, prefix in enumerate(made):
        prefix.key = (*node.key[:2], node.key[2] - 1 + (i + 1) / (len(made) + 1))  # before the node itself
    return [*made, node]


def _key(node: Node, takes: bool) -> tuple[int, int, int, float]:
    """The place of a step that sends to the node, or of the one that takes: of one chunk, sends come first."""
    return node.key[0], node.key[1], int(takes), node.key[2]


# ---- steps ------------------------------------------------------------------------------------------


class _Lowering:
    """fuse: a node sends in the step that makes its value where it is alone on the queues. merge: values of one copy(),
    and terms of sums of one level, travel in one send."""

    def __init__(self, trace: Trace, nodes: list[Node], fuse: bool, merge: bool) -> None:
        self.sums = trace.collective in ("all_reduce", "reduce_scatter")
        self.trace, self.nodes, self.fuse, self.merge = trace, nodes, fuse, merge
        self.streams: Counter[tuple[int, int, str]] = Counter()
        self.steps: list[list[Step]] = [[] for _ in range(trace.ranks)]

    def queue(self, reader: Node) -> str:
        """The queue to a node. What its rank takes and is done with goes over the result queue."""
        if reader.kind == "sum" or (not self.sums and any(r.rank != reader.rank for r in reader.readers)):
            return "input"
        return "result"

    def run(self) -> list[list[Step]]:
        for node in self.nodes:
            node.steps = []
            for term in node.terms:
                if term.rank != node.rank:
                    self.streams[term.rank, node.rank, self.queue(node)] += 1
        for node in self.nodes:
            if node.kind != "input":
                self.make(node)
            elif node.is_output and self.trace.collective == "all_gather":
                self.add(Step("copy", node, node.rank, _key(node, True)))
        for node in self.nodes:
            self.send(node)
        for rank in range(self.trace.ranks):
            self.finish(rank)
        return self.steps

    def add(self, step: Step) -> Step:
        self.steps[step.rank].append(step)
        step.node.steps.append(step)
        return step

    def make(self, node: Node) -> None:
        """The step that makes the value of a sum or a copy."""
        remote = [t for t in node.terms if t.rank != node.rank]
        step = Step("reduce" if node.kind == "sum" else "recv", node, node.rank, _key(node, True))
        step.senders = [t.rank for t in remote]
        step.queue_in = self.queue(node)
        step.out = node.is_output
        for i, term in enumerate(node.terms):
            if term.rank == node.rank:
                step.at, step.source = i, "in"
                if term.kind != "input":
                    maker = term.steps[0]
                    maker.keeps, step.source, step.reads, step.after = True, "kept", maker, maker
        self.add(step)

    def send(self, node: Node) -> None:
        """The steps that send the value to the nodes on other ranks that read it."""
        readers = sorted((r for r in node.readers if r.rank != node.rank), key=lambda r: r.key)
        maker = node.steps[0] if node.kind != "input" else None
        queues = {self.queue(r) for r in readers}
        alone = all(self.streams[node.rank, r.rank, self.queue(r)] == 1 for r in readers)
        if maker is not None and self.fuse and len(queues) == 1 and alone:
            maker.receivers, maker.queue_out = self.around(node.rank, readers), queues.pop()
            return
        groups: dict[Any, list[Node]] = defaultdict(list)
        for r in readers:
            same = (r.merge if r.merge else r.key[0]) if self.merge else r.key
            groups[self.queue(r), r.merge != 0, same].append(r)
        for (queue, _, _), group in groups.items():
            step = Step("send", node, node.rank, _key(group[0], False), source="in")
            step.receivers, step.queue_out = self.around(node.rank, group), queue
            if maker is not None and node.finished and self.sums and node.kind == "sum":
                step.source, step.after = "out", maker
            elif maker is not None:
                maker.keeps, step.source, step.reads, step.after = True, "kept", maker, maker
            self.add(step)

    def around(self, rank: int, readers: list[Node]) -> list[int]:
        """Their ranks, from the one after `rank` on: not all ranks send to the same one first."""
        n = self.trace.ranks
        ranks = sorted((r.rank for r in readers), key=lambda r: (r - rank) % n)
        if len(set(ranks)) != len(ranks):
            raise ScheduleError(f"rank {rank} sends chunk {readers[0].chunk} to one rank twice")
        return ranks

    def finish(self, rank: int) -> None:
        """Order, turns and slots of one rank's steps."""
        steps = self.steps[rank]
        steps.sort(key=lambda s: (self.place(s), s.key))
        for i, step in enumerate(steps):
            step.index = i
        self.read_inputs_first(steps)
        self.take_turns(steps)

    def place(self, step: Step) -> tuple[int, int]:
        """Steps that are alone on their queues may stand anywhere: what ends comes first, what starts comes last, and
        each rank begins with the rank after it. All others stand in the order of nodes."""
        alone = step.reads is None and not step.keeps
        for way, peer, queue in step.queues():
            pair = (peer, step.rank) if way == "from" else (step.rank, peer)
            alone = alone and self.streams[*pair, queue] == 1
        if not alone or step.kind in ("reduce", "copy"):
            return 1, 0
        peer = step.senders[0] if step.kind == "recv" else step.receivers[0]
        return (0 if step.kind == "recv" else 2), (peer - step.rank) % self.trace.ranks

    def read_inputs_first(self, steps: list[Step]) -> None:
        """An output may lie in the memory of the input. A sum of all ranks comes after its rank's one reader of the
        input, because it holds what that reader read. Several readers come one after the other, then the output."""
        if not self.sums:
            return
        readers: dict[int, list[Step]] = defaultdict(list)
        for step in sorted(steps, key=lambda s: (s.out, s.key)):
            if step.source == "in":
                readers[step.node.chunk].append(step)
        for step in steps:
            those = readers[step.node.chunk]
            if step.out and len(those) > 1:
                for before, later in itertools.pairwise(those):
                    later.after = before
                if step.after is None and step is not those[-1]:
                    step.after = those[-1]

    def take_turns(self, steps: list[Step]) -> None:
        parent = list(range(len(steps)))

        def root(i: int) -> int:
            while parent[i] != i:
                i = parent[i]
            return i

        users: dict[tuple[str, int, str], list[int]] = defaultdict(list)
        for step in steps:
            for queue in step.queues():
                users[queue].append(step.index)
        shared = set()
        for those in users.values():
            if len(those) > 1:
                shared.update(those)
                for i in those[1:]:
                    parent[root(i)] = root(those[0])
        turns = {r: n for n, r in enumerate(dict.fromkeys(root(i) for i in sorted(shared)))}
        for i in shared:
            steps[i].turn = turns[root(i)]
        self.give_slots(steps)

    def give_slots(self, steps: list[Step]) -> None:
        """A slot is free for a later step of the same turn when its last reader comes earlier."""
        last: dict[Step, int] = {}
        for step in steps:
            if step.reads is not None:
                last[step.reads] = step.index
        n_slots = 0
        free_at: dict[int, list[tuple[int, int]]] = defaultdict(list)  # turn -> (index of the last reader, slot)
        for step in steps:
            if not step.keeps:
                continue
            free = next((e for e in free_at[step.turn] if e[0] < step.index), None) if step.turn >= 0 else None
            if free is not None:
                free_at[step.turn].remove(free)
                step.slot = free[1]
            else:
                step.slot, n_slots = n_slots, n_slots + 1
            free_at[step.turn].append((last[step], step.slot))


def _text(steps: list[list[Step]], collective: str, name: str, shape: str, chunks: int, root: int) -> str:
    slots = max((s.slot + 1 for of_rank in steps for s in of_rank), default=0)
    turns = any(s.turn >= 0 for of_rank in steps for s in of_rank)
    block = max(1, min(BLOCK, KEPT_MAX // max(slots, 1))) if turns or slots else 1
    lines = [f"plan {collective} {name} ranks={len(steps)} hosts={shape} chunks={chunks} block={block} slots={slots}"]
    lines.append(f" root={root}\n" if root >= 0 else "\n")
    for rank, of_rank in enumerate(steps):
        lines.append(f"rank {rank}\n")
        lines.extend(step.text() for step in of_rank)
    return "".join(lines)


def _check_outputs(trace: Trace, chunks: int, root: int) -> None:
    """Each rank has one output for each chunk that it needs. The check in C finds this too, but knows no .output()."""
    in_blocks = trace.collective in ("all_gather", "reduce_scatter")
    made = Counter((v.rank, v.chunk) for v in trace.values if v._is_output)
    for rank in range(trace.ranks):
        for chunk in range(chunks * (trace.ranks if in_blocks else 1)):
            block, n = chunk // chunks, made[rank, chunk]
            needs = rank != root and (trace.collective != "reduce_scatter" or block == rank)
            what = f"chunk {chunk % chunks}" + (f" of the block of rank {block}" if in_blocks else "")
            if needs and n == 0:
                raise ScheduleError(f"rank {rank} has no output for {what}: call .output() on one of its values")
            if n > needs:
                raise ScheduleError(f"rank {rank} has {n} outputs for {what}, wanted {needs:d}")


def compile_trace(trace: Trace, name: str, shape: str, chunks: int, root: int) -> str:
    """The text of a plan that passes the check.

    Raises: ScheduleError: what the language refuses, or what the check says of the simplest form.
    """
    reason = ""
    try:
        nodes = _nodes(trace)
        _check_outputs(trace, chunks, root)
    except ScheduleError as error:
        raise ScheduleError(f"{name}, {trace.ranks} ranks: {error}") from error
    for fuse, merge in ((True, True), (False, True), (False, False)):
        steps = _Lowering(trace, nodes, fuse, merge).run()
        text = _text(steps, trace.collective, name, shape, chunks, root)
        try:
            _ext.plan_check(f"spccl-plan 1\n{text}end\n".encode(), 0)
        except errors.Error as error:
            reason = str(error)
            continue
        return text
    raise ScheduleError(f"{name}, {trace.ranks} ranks: {reason}")
