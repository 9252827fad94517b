"""`spccl verify`: tests every collective, dtype, op, size and sparsity over ranks on this machine, with numpy.

numpy computes the expected results in the order that the library documents: rank 0, 1, 2, ..., float16 and
bfloat16 in float32 with one rounding. So every comparison is of bits. Needs numpy.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from ._launch import Rank, run_ranks
from .comm import COLLECTIVES, OPS, REDUCING, Communicator, get_unique_id
from .frame import DTYPES, numpy_dtype

SIZES = (0, 1, 33, 4097, 20011)
SPARSITIES = (0.0, 0.5, 0.9, 0.99, 1.0)
_BIG = 1_000_003  # elements: more than every queue between two ranks holds
_FLIGHTS = 4  # collectives that are started before the first one is waited for
_EXAMPLES = 5  # most wrong answers that a rank describes

Array = Any  # numpy.ndarray of the dtype's storage: bfloat16 as uint16, float8 as uint8


@dataclasses.dataclass(frozen=True)
class Case:
    """One call. `n_elems` is the number of elements of the smaller buffer of a rank."""

    collective: str
    dtype: str
    op: str  # "" for collectives that do not reduce
    n_elems: int
    sparsity: float
    in_place: bool

    def __str__(self) -> str:
        op = f" {self.op}" if self.op else ""
        where = "in place" if self.in_place else "out of place"
        return f"{self.collective}{op} {self.dtype} x {self.n_elems}, {100 * self.sparsity:g}% sparse, {where}"


@dataclasses.dataclass
class Tally:
    """Outcome of all cases of one collective and dtype."""

    n_cases: int = 0
    n_wrong: int = 0


@dataclasses.dataclass
class Result:
    """The outcome on all ranks: tallies by (collective, dtype), texts of wrong answers and of links, and the number of
    frames by format."""

    tallies: dict[tuple[str, str], Tally]
    examples: list[str]
    links: list[str]
    frames: dict[str, int]

    @property
    def n_wrong(self) -> int:
        return sum(tally.n_wrong for tally in self.tallies.values())


def cases() -> Iterator[Case]:
    """Every case, in the order in which every rank runs them. Cases alternate between in place and out of place."""
    n = 0
    for collective in COLLECTIVES:
        reduces = collective in REDUCING
        for dtype in DTYPES:
            if reduces and dtype == "float8":
                continue  # spccl has no arithmetic for float8
            for op in OPS if reduces else ("",):
                for sparsity in SPARSITIES:
                    for n_elems in SIZES:
                        n += 1
                        yield Case(collective, dtype, op, n_elems, sparsity, n % 2 == 0)
        yield Case(collective, "float32", "sum" if reduces else "", _BIG, 0.99, False)


# ---- data and expected answers ----


def make_input(seed: list[int], n_elems: int, dtype: str, sparsity: float, arithmetic: bool) -> Array:
    """[n_elems] with about `sparsity` of all-zero elements, in the dtype's storage.

    arithmetic=False: any bits, NaN payloads and infinities too. True: finite floats from 0.5 to 2 of both
    signs and some -0.0, so that no sum or product overflows; integers of the full range (sums wrap).
    """
    rng = np.random.default_rng(seed)
    storage = numpy_dtype(dtype)
    if not arithmetic or (storage.kind in "iu" and dtype != "bfloat16"):
        bits = np.frombuffer(rng.bytes(n_elems * storage.itemsize), storage).copy()
    else:
        values = (rng.random(n_elems, np.float32) * 1.5 + 0.5) * rng.choice([-1.0, 1.0], n_elems)
        values[rng.random(n_elems) < 0.01] = -0.0
        bits = from_float(values.astype(np.float64 if dtype == "float64" else np.float32), dtype)
    bits[rng.random(n_elems) < sparsity] = 0
    return bits


def to_float(bits: Array, dtype: str) -> Array:
    """Storage -> the dtype in which sums are computed: float32 for the 16-bit floats, else the dtype itself."""
    if dtype == "bfloat16":
        return (bits.astype(np.uint32) << 16).view(np.float32)
    return bits.astype(np.float32) if dtype == "float16" else bits


def from_float(values: Array, dtype: str) -> Array:
    """The inverse of `to_float`, rounded to nearest, ties to even."""
    if dtype == "bfloat16":
        bits = np.ascontiguousarray(values, np.float32).view(np.uint32).astype(np.uint64)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return values.astype(numpy_dtype(dtype))


def reduced(inputs: list[Array], dtype: str, op: str) -> Array:
    """The reduction of one array per rank, bit for bit as documented in spccl.h."""
    parts = [to_float(bits, dtype) for bits in inputs]
    with np.errstate(over="ignore"):
        if op in ("sum", "avg"):
            acc = np.zeros_like(parts[0])
            for part in parts:
                acc = acc + part
            if op == "avg":
                acc = _divided(acc, len(parts))
        else:
            acc = parts[0].copy()
            for part in parts[1:]:
                if op == "prod":
                    acc = acc * part
                else:
                    acc = np.where(part < acc if op == "min" else part > acc, part, acc)
    return from_float(acc, dtype)


def _divided(acc: Array, by: int) -> Array:
    if acc.dtype.kind == "f":
        return acc / acc.dtype.type(by)
    quotient = acc // acc.dtype.type(by)  # rounds down; spccl rounds toward zero
    return (quotient + ((acc < 0) & (acc % acc.dtype.type(by) != 0))).astype(acc.dtype)


# ---- one rank ----


def inputs_of(case: Case, index: int, world_size: int) -> list[Array]:
    reduces = case.op != ""
    n_elems = case.n_elems * (world_size if case.collective == "reduce_scatter" else 1)
    return [make_input([index, rank], n_elems, case.dtype, case.sparsity, reduces) for rank in range(world_size)]


def expected(case: Any, inputs: list[Array], rank: int, root: int) -> Array:
    """The output that rank `rank` must get. case: of this file or of bench/cases.py."""
    if case.collective == "all_gather":
        return np.concatenate(inputs)
    if case.collective == "broadcast":
        return inputs[root]
    block = slice(None)
    if case.collective == "reduce_scatter":
        n = len(inputs[rank]) // len(inputs)
        block = slice(rank * n, (rank + 1) * n)
    return reduced([x[block] for x in inputs], case.dtype, case.op)


def buffers(
    case: Case, inputs: list[Array], rank: int, root: int, place: Callable[[Array], Any], in_place: bool
) -> tuple[Any, Any, bool]:
    """Input and output of rank `rank`, in memory to which `place` copies an array, and whether the input must stay.

    Elements that the collective does not write show: outputs begin with other bytes.
    """
    mine, n = inputs[rank], case.n_elems
    own = slice(rank * n, (rank + 1) * n)
    x = place(mine)

    def poisoned(n_elems: int) -> Any:
        return place(np.full(n_elems, np.frombuffer(b"\xa5" * 8, mine.dtype)[0]))

    if case.collective == "all_gather":
        out = poisoned(len(inputs) * n)
        if in_place:
            out[own] = x
            x = out[own]
        return x, out, not in_place
    if case.collective == "broadcast":
        return x, x if rank == root else poisoned(n), False
    if in_place:
        return x, x[own] if case.collective == "reduce_scatter" else x, False
    return x, poisoned(n), True


def bound(comm: Communicator, case: Any, source: Any, target: Any, root: int, **how: Any) -> Callable[[], Any]:
    """The case's collective as a function without arguments. case: of this file or of bench/cases.py."""
    how["dtype"] = case.dtype
    if case.collective == "all_gather":
        return functools.partial(comm.all_gather, source, target, **how)
    if case.collective == "reduce_scatter":
        return functools.partial(comm.reduce_scatter, source, target, case.op, **how)
    if case.collective == "all_reduce":
        return functools.partial(comm.all_reduce, source, None if target is source else target, case.op, **how)
    return functools.partial(comm.broadcast, target, root, **how)


def _start(comm: Communicator, case: Case, index: int, inputs: list[Array]) -> tuple[Any, Array, Array, Array | None]:
    """Start the case: (request, buffer with the answer, expected answer, input or None if overwritten)."""
    root = index % comm.world_size
    source, out, stays = buffers(case, inputs, comm.rank, root, np.copy, case.in_place)
    request = bound(comm, case, source, out, root, async_op=True)()
    return request, out, expected(case, inputs, comm.rank, root), source if stays else None


def problem(
    work: Any, out: Any, wanted: Array, source: Any, before: Array, bits: Callable[[Any, Array], Array]
) -> str | None:
    """Wait and check. Returns what is wrong, or None.

    Args: source: the input, if it must not change. bits: an array of the elements, of the second one's dtype.
    """
    work.wait()
    text = difference(bits(out, wanted), wanted)
    if text is None and source is not None:
        changed = difference(bits(source, before), before)
        text = None if changed is None else f"the input was changed: {changed}"
    return text


def difference(got: Array, wanted: Array) -> str | None:
    """Where two arrays differ in any bit; None if nowhere."""
    unsigned = np.dtype(f"u{got.dtype.itemsize}")
    a, b = got.view(unsigned), wanted.view(unsigned)
    wrong = np.flatnonzero(a != b)
    if wrong.size == 0:
        return None
    i, width = wrong[0], 2 * got.dtype.itemsize
    return (
        f"{wrong.size} of {got.size} elements wrong, the first at {i}: "
        f"got {got[i]} (0x{int(a[i]):0{width}x}), wanted {wanted[i]} (0x{int(b[i]):0{width}x})"
    )


Tallies = dict[tuple[str, str], Tally]
Outcome = tuple[Tallies, list[str], list[str], dict[str, int]]  # tallies, examples, links, frames of one rank


def run_cases(
    rank: Rank, start: Callable[[Case, int, list[Array]], Callable[[], str | None]]
) -> tuple[Tallies, list[str]]:
    """Run every case on one rank, a few at a time. Returns tallies, and texts of wrong answers.

    Args: start: starts case, number, inputs of all ranks. What it returns waits, and says what is wrong, or None.
    """
    tallies: Tallies = {}
    examples: list[str] = []
    pending: list[tuple[Case, Callable[[], str | None]]] = []
    every = list(cases())
    for index, case in enumerate(every):
        pending.append((case, start(case, index, inputs_of(case, index, rank.world_size))))
        if rank.rank == 0 and index % 50 == 0:
            rank.send(index)
        if len(pending) < _FLIGHTS and index + 1 < len(every):
            continue
        for under_way, problem in pending:
            tally = tallies.setdefault((under_way.collective, under_way.dtype), Tally())
            tally.n_cases += 1
            text = problem()
            if text is not None:
                tally.n_wrong += 1
                examples.append(f"rank {rank.rank}: {under_way}: {text}")
        pending.clear()
    return tallies, examples[:_EXAMPLES]


def _verify_rank(rank: Rank, unique_id: bytes, transports: str | None, timeout_s: float) -> Outcome:
    how: dict[str, Any] = {"unique_id": unique_id, "name": "verify", "transports": transports, "timeout": timeout_s}
    with Communicator(rank.rank, rank.world_size, **how) as comm:

        def start(case: Case, index: int, inputs: list[Array]) -> Callable[[], str | None]:
            request, got, wanted, left = _start(comm, case, index, inputs)
            return lambda: problem(request, got, wanted, left, inputs[comm.rank], lambda x, _like: x)

        tallies, examples = run_cases(rank, start)
        links = [f"rank {comm.rank} -> {peer}: {text}" for peer, text in comm.describe_links().items()]
        return tallies, examples, links, comm.stats().n_frames_sent


def verify(
    world_size: int,
    transports: str | None = None,
    *,
    deadline_s: float = 300.0,
    on_progress: Any = None,
) -> Result:
    """Run every case over `world_size` new processes of this machine.

    Args:
        transports: comma list as in `Communicator`; None = the library's choice.
        deadline_s: seconds for all cases, start-up included.
        on_progress: called with the number of cases done.
    Raises: RanksFailed if a rank failed otherwise than by a wrong answer, or took too long.
    """
    return run(_verify_rank, world_size, (get_unique_id(), transports, min(60.0, deadline_s)), deadline_s, on_progress)


def run(worker: Callable[..., Outcome], world_size: int, args: Any, deadline_s: float, on_progress: Any) -> Result:
    """Run `worker` in new processes. Returns the outcome on all ranks."""
    on_message = None if on_progress is None else lambda _rank, n: on_progress(n)
    outcomes = run_ranks(worker, world_size, args, deadline_s=deadline_s, on_message=on_message)
    total = Result({}, [], [], {})
    for tallies, examples, links, frames in outcomes:
        for key, tally in tallies.items():
            merged = total.tallies.setdefault(key, Tally(tally.n_cases))
            merged.n_wrong += tally.n_wrong
        total.examples += examples
        total.links += links
        for name, n in frames.items():
            total.frames[name] = total.frames.get(name, 0) + n
    return total
