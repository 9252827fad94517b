"""Pictures of a plan: ranks over rounds, as text or by matplotlib. Reads plan files that passed the check."""

from __future__ import annotations

import dataclasses
from collections import defaultdict, deque
from pathlib import Path
from typing import Any


@dataclasses.dataclass
class Step:
    """A step of one rank. round: the longest way of steps before it, over messages and waits."""

    kind: str
    rank: int
    index: int
    fields: dict[str, str]
    senders: list[int]
    receivers: list[int]
    round: int = 0
    taken_from: list[Step] = dataclasses.field(default_factory=list)

    @property
    def chunk(self) -> int:
        return int(self.fields["chunk"])

    def text(self) -> str:
        """ "+3 <0,1 >2": adds to chunk 3 what ranks 0 and 1 sent, and sends the sum to rank 2."""
        sign = {"send": "", "recv": "=", "reduce": "+", "copy": "="}[self.kind]
        words = [f"{sign}{self.chunk}"]
        if self.senders:
            words.append("<" + ",".join(map(str, self.senders)))
        if self.receivers:
            words.append(">" + ",".join(map(str, self.receivers)))
        return " ".join(words)


@dataclasses.dataclass
class Plan:
    """A plan of a file. head: its line in words. ranks: the steps of each rank, in their order."""

    head: list[str]
    ranks: list[list[Step]]

    @property
    def title(self) -> str:
        return " ".join(self.head[1:])


def parse(text: str) -> list[Plan]:
    """The plans of a file that passed the check."""
    plans: list[Plan] = []
    for line in text.splitlines():
        words = line.split("#")[0].split()
        if words[:1] == ["plan"]:
            plans.append(Plan(words, []))
        elif words[:1] == ["rank"]:
            plans[-1].ranks.append([])
        elif words and words[0] in ("send", "recv", "reduce", "copy"):
            rank = len(plans[-1].ranks) - 1
            fields = dict(w.partition("=")[::2] for w in words[1:])
            senders, receivers = (
                [int(r) for r in fields[way].partition("@")[0].split(",")] if way in fields else []
                for way in ("from", "to")
            )
            plans[-1].ranks[rank].append(Step(words[0], rank, len(plans[-1].ranks[rank]), fields, senders, receivers))
    for plan in plans:
        _find_rounds(plan)
    return plans


def _queue(fields: dict[str, str], way: str) -> str:
    return fields[way].partition("@")[2] if way in fields else ""


def _find_rounds(plan: Plan) -> None:
    """Run one slice of each step as soon as its messages are there."""
    queues: dict[tuple[int, int, str], deque[Step]] = defaultdict(deque)
    last_turn: dict[tuple[int, str], Step] = {}
    done: set[tuple[int, int]] = set()
    left = deque(step for steps in plan.ranks for step in steps)
    n_waiting = 0
    while left and n_waiting < len(left):
        step = left.popleft()
        steps = plan.ranks[step.rank]
        heads = [queues[r, step.rank, _queue(step.fields, "from")] for r in step.senders]
        turn = step.fields.get("turn")
        earlier = turn is not None and any(
            s.fields.get("turn") == turn and (s.rank, s.index) not in done for s in steps[: step.index]
        )
        after = [steps[int(step.fields["after"])]] if "after" in step.fields else []
        ready = all(h and h[0].chunk == step.chunk for h in heads)
        if not ready or earlier or any((s.rank, s.index) not in done for s in after):
            left.append(step)
            n_waiting += 1
            continue
        n_waiting = 0
        step.taken_from = [h.popleft() for h in heads]
        before = [s.round + 1 for s in step.taken_from] + [s.round for s in after]
        if turn is not None and (step.rank, turn) in last_turn:
            before.append(last_turn[step.rank, turn].round + (step.kind == "send"))
        step.round = max(before, default=0)
        if turn is not None:
            last_turn[step.rank, turn] = step
        done.add((step.rank, step.index))
        for r in step.receivers:
            queues[step.rank, r, _queue(step.fields, "to")].append(step)


def as_rows(plan: Plan) -> list[list[str]]:
    """A row for each rank: its name, then the steps of each round, one a line."""
    n = 1 + max((s.round for steps in plan.ranks for s in steps), default=0)
    rows = []
    for rank, steps in enumerate(plan.ranks):
        cells: list[list[str]] = [[] for _ in range(n)]
        for step in steps:
            cells[step.round].append(step.text())
        rows.append([str(rank), *("\n".join(c) for c in cells)])
    return rows


def draw(plan: Plan, path: Path) -> None:
    """A figure: a line for each rank, an arrow for each message, a colour for each chunk. Needs matplotlib.

    Raises: ValueError for a suffix that matplotlib does not know, OSError.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import colormaps
    from matplotlib import pyplot as plt

    n_rounds = 1 + max((s.round for steps in plan.ranks for s in steps), default=0)
    n_chunks = 1 + max((s.chunk for steps in plan.ranks for s in steps), default=0)
    colours = colormaps["tab20"] if n_chunks <= 20 else colormaps["viridis"]
    figure, axes = plt.subplots(figsize=(2 + 1.6 * n_rounds, 1.2 + 0.7 * len(plan.ranks)))
    for rank in range(len(plan.ranks)):
        axes.axhline(rank, color="0.85", zorder=0)
    for steps in plan.ranks:
        for step in steps:
            colour: Any = colours(step.chunk if n_chunks <= 20 else step.chunk / n_chunks)
            for source in step.taken_from:
                axes.annotate(
                    "",
                    (step.round, step.rank),
                    (source.round, source.rank),
                    arrowprops={"arrowstyle": "->", "color": colour, "shrinkA": 4, "shrinkB": 4},
                )
            if step.kind == "reduce":
                axes.plot(step.round, step.rank, "o", color=colour, markersize=9)
                axes.annotate("+", (step.round, step.rank), ha="center", va="center", fontsize=8)
            elif "out" in step.fields or step.kind == "copy":
                axes.plot(step.round, step.rank, "s", color=colour, markersize=5)
    axes.set(xlabel="messages one after the other", ylabel="rank", title=plan.title, xlim=(-0.5, n_rounds - 0.5))
    axes.set_xticks(range(n_rounds))
    axes.set_yticks(range(len(plan.ranks)))
    axes.invert_yaxis()
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)
