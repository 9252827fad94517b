"""Schedules in Python: the shipped ones are checked, run by processes over shared memory, and give the promised bits;
what the language refuses; the commands. tests/c/test_plan_file.c has the faults of plan files."""

import hashlib
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from test_comm import run_threads

import spccl
from spccl import _ext, schedule, verify
from spccl._launch import run_ranks
from spccl._schedule_show import as_rows, parse
from spccl.cli import main
from spccl.cli_schedule import check_text

EXAMPLES = sorted((Path(__file__).parents[2] / "examples/schedules").glob("*.py"))
SIZES = (1, 1000, 150_001)
DTYPES = ("float32", "bfloat16")


def _whole(rank, n, dtype):
    """Whole numbers up to 300, mostly zeros: their sums are exact in any order, but not in bfloat16."""
    x = np.rint(100 * verify.to_float(verify.make_input([rank], n, "float32", 0.8, True), "float32"))
    return verify.from_float(np.clip(x, -300, 300).astype(np.float32), dtype)


def _mixed(rank, n, dtype):
    return verify.make_input([rank, 7], n, dtype, 0.5, True)


def _run(comm, collective, inputs, dtype):
    """What this rank has of the collective, and what it should have."""
    n, rank, p = len(inputs[0]), comm.rank, comm.world_size
    if collective == "all_reduce":
        out = inputs[rank].copy()  # in place
        comm.all_reduce(out, dtype=dtype)
        return out, verify.reduced(inputs, dtype, "sum")
    if collective == "reduce_scatter":
        out = np.empty(n // p, inputs[0].dtype)
        comm.reduce_scatter(inputs[rank][: n // p * p], out, "avg", dtype=dtype)
        block = slice(rank * (n // p), (rank + 1) * (n // p))
        return out, verify.reduced([x[block] for x in inputs], dtype, "avg")
    if collective == "all_gather":
        out = np.empty(n * p, inputs[0].dtype)
        comm.all_gather(inputs[rank], out, dtype=dtype)
        return out, np.concatenate(inputs)
    out = inputs[rank].copy()
    comm.broadcast(out, p - 1, dtype=dtype)
    return out, inputs[p - 1]


def _rank_main(rank, groups, per_host):
    """Run every plan of every file. Returns a digest of what is the same on all ranks."""
    digest = hashlib.sha256()
    for unique_id, path, plans in groups:
        how = {"host_id": f"host {rank.rank // per_host}"} if per_host else {"transports": "shm"}
        how |= {"unique_id": unique_id, "timeout": 60, "schedule": f"file:{path}"}
        with spccl.Communicator(rank.rank, rank.world_size, **how) as comm:
            for collective, rank_order in plans:
                for n in SIZES:
                    for dtype in DTYPES:
                        for make in (_whole, _mixed, _mixed):  # twice: all runs give the same bits
                            inputs = [make(r, n, dtype) for r in range(rank.world_size)]
                            got, wanted = _run(comm, collective, inputs, dtype)
                            if rank_order or make is _whole:
                                problem = verify.difference(got, wanted)
                                assert problem is None, f"{path}: {collective} of {n} {dtype}: {problem}"
                            if collective == "all_reduce":
                                digest.update(got.tobytes())
            lines = comm.describe_schedules()
            assert all(f" of {Path(path).name}, forced" in line for line in lines), lines
    return digest.hexdigest()


@pytest.mark.parametrize("source", EXAMPLES, ids=lambda p: p.stem)
def test_shipped_schedules_in_threads(tmp_path, source):
    """What the slow test does with processes, for few sizes: sums of whole numbers are exact."""
    path = tmp_path / f"{source.stem}.plan"
    path.write_text(schedule.compile_file(source, [(4, None)]))
    collectives = {p["collective"] for p in check_text(path.read_text())}

    def rank_main(comm):
        for dtype in DTYPES:
            for n in (100, 40_000):
                inputs = [_whole(r, n, dtype) for r in range(4)]
                for collective in sorted(collectives):
                    got, wanted = _run(comm, collective, inputs, dtype)
                    assert verify.difference(got, wanted) is None, f"{collective} of {n} {dtype}"
        assert all(f" of {path.name}, forced" in line and " on GPUs" in line for line in comm.describe_schedules())

    run_threads(4, rank_main, schedule=f"file:{path}")


def test_the_page(tmp_path):
    """The example in Python, and the plan file, of docs/SCHEDULES.md."""
    page = (Path(__file__).parents[2] / "docs/SCHEDULES.md").read_text()
    source = tmp_path / "page.py"
    source.write_text(page.split("```python\n")[1].split("```")[0])
    for text in (schedule.compile_file(source, [(5, None)]), page.split("```text\n")[1].split("```")[0]):
        (plan,) = check_text(text)
        assert plan["collective"] == "all_reduce"


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "hosts"), [(2, None), (4, None), (4, 2), (8, None)])
def test_shipped_schedules_run(tmp_path, ranks, hosts):
    """Each example, by processes: bits of the automatic choice where it adds in rank order; else exact sums in float32
    of what is exact, and the same bits on all ranks and in two runs."""
    groups = []
    for source in EXAMPLES:
        text = schedule.compile_file(source, [(ranks, hosts)])
        path = tmp_path / f"{source.stem}.plan"
        path.write_text(text)
        plans = {(p["collective"], bool(p["rank_order"])) for p in check_text(text)}
        groups.append((spccl.get_unique_id(), str(path), sorted(plans)))
    digests = run_ranks(_rank_main, ranks, (groups, ranks // hosts if hosts else 0), deadline_s=240)
    assert digests == digests[:1] * ranks
    assert {c for _, _, plans in groups for c, _ in plans} == {
        "all_reduce",
        "all_gather",
        "reduce_scatter",
        "broadcast",
    }


@pytest.mark.parametrize("source", EXAMPLES, ids=lambda p: p.stem)
def test_shipped_schedules_are_right(source):
    """Every world size up to 9, and 16 and 64 ranks on several hosts. Each has at most 30 lines."""
    assert sum(bool(line.strip()) for line in source.read_text().splitlines()) <= 32
    text = schedule.compile_file(source, [*((n, None) for n in range(2, 10)), (16, 4), (12, 3)])
    assert len(check_text(text)) >= 3


# Plan -> on how many ranks and hosts GPUs can run it, of those below.
ON_GPUS = {
    "all_pairs": {(2, None), (4, None), (4, 2)},
    "all_pairs_scatter": {(2, None), (4, None), (4, 2)},
    "doubling": {(2, None)},
    "halving_doubling": {(2, None)},
    "hierarchical": {(2, None), (4, None)},  # on one host it is all_pairs
    "ring": set(),
    "ring_gather": {(2, None)},
    "split": {(2, None)},
    "tree": {(2, None)},
    "two_step": {(2, None), (4, None), (4, 2)},  # on 2 hosts it relays as GPUs do
}


def test_which_shipped_schedules_gpus_can_run():
    """Else the check names the first step that they cannot do."""
    found = {name: set() for name in ON_GPUS}
    for ranks, hosts in ((2, None), (4, None), (4, 2)):
        for source in EXAMPLES:
            for plan in check_text(schedule.compile_file(source, [(ranks, hosts)])):
                if plan["no_gpus"]:
                    assert plan["no_gpus"].startswith("rank "), plan
                else:
                    found[plan["name"]].add((ranks, hosts))
    assert found == ON_GPUS


def test_recursive_doubling_of_64_ranks():
    """The largest group, with the most steps of the shipped schedules."""
    source = next(p for p in EXAMPLES if p.stem == "recursive")
    (plan,) = check_text(schedule.compile_file(source, [(64, None)]))
    assert plan["n_hops"] == 12 and plan["chunks_sent"] == 126 and plan["rank_order"] == 0


def _compile(function, collective=schedule.all_reduce, ranks=2):
    return schedule.compile_schedule(collective(function), ranks)


def _pair(t, order):
    for c in range(2):
        t.reduce(c, [t.input(r, c) for r in order]).output().copy(1 - c).output()


def _doubled(t):
    t.reduce(0, [t.input(0, 0), t.input(1, 0), t.input(0, 0)]).output()


def _twice(t):
    _pair(t, [0, 1])
    t.reduce(0, [t.input(0, 0), t.input(1, 0)]).output()


def _without_output(t):
    t.reduce(0, [t.input(0, 0), t.input(1, 0)]).output().copy(1)


def _other_orders(t):
    for c in range(2):
        for rank in range(2):
            t.reduce(rank, [t.input(rank, c), t.input(1 - rank, c)]).output()


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (lambda t: None, "rank 0 has no output for chunk 0: call .output()"),
        (lambda t: _pair(t, [0]), "lacks the data of rank 1"),
        (_doubled, "adds two values that this rank has"),
        (_twice, "rank 0 has 2 outputs for chunk 0, wanted 1"),
        (_without_output, "is not an output: call .output"),
        (_other_orders, "in another order than on another rank"),
        (lambda t: t.input(2, 0), "rank 2: wanted 0 to 1"),
        (lambda t: t.input(0, 2), "chunk 2: wanted 0 to 1"),
        (lambda t: t.input(0, 0).copy(0), "is on rank 0 already"),
        (lambda t: t.input(0, 0).copy(1), "is used nowhere"),
        (lambda t: t.reduce(0, [t.input(0, 0), t.input(1, 1)]), "different chunks"),
        (lambda t: t.reduce(0, []), "a sum of no values"),
        (lambda t: t.input(0, 0).output(), "an output before it is a sum"),
    ],
)
def test_refused(function, why):
    with pytest.raises(schedule.ScheduleError, match=why):
        _compile(function)


def test_rank_order_is_proved():
    """Partial sums keep rank order if they start with rank 0; other orders are said to be so."""

    def prefix(t):
        for c in range(4):
            x = t.reduce(1, [t.input(0, c), t.input(1, c)])
            x = t.reduce(3, [x, t.input(2, c), t.input(3, c)]).output()
            for copy in x.copy([0, 1, 2]):
                copy.output()

    (text,) = _compile(prefix, ranks=4)
    plan = _ext.plan_check(f"spccl-plan 1\n{text}end\n".encode(), 0)
    assert plan["rank_order"] == 1 and plan["sends_sums"] == 1
    (text,) = _compile(lambda t: _pair(t, [1, 0]))
    assert _ext.plan_check(f"spccl-plan 1\n{text}end\n".encode(), 0)["rank_order"] == 0


def test_a_sum_of_one_term(tmp_path):
    """A sum that is not finished is float32 for bfloat16, even if it holds one contribution only."""

    def one_term(t):
        for c in range(2):
            t.reduce(1 - c, [t.reduce(c, [t.input(c, c)]), t.input(1 - c, c)]).output().copy(c).output()

    path = tmp_path / "one_term.plan"
    path.write_text(f"spccl-plan 1\n{_compile(one_term)[0]}end\n")
    inputs = [_whole(r, 1000, "bfloat16") for r in range(2)]

    def rank_main(comm):
        got, wanted = _run(comm, "all_reduce", inputs, "bfloat16")
        assert verify.difference(got, wanted) is None

    run_threads(2, rank_main, schedule=f"file:{path}")


def test_all_pairs_is_the_direct_schedule():
    """The same steps as sched_direct.c, in its order, so that speed is the same: results first, then the sum, then
    contributions, each beginning with the next rank."""
    source = next(p for p in EXAMPLES if p.stem == "all_pairs")
    (plan,) = [p for p in parse(schedule.compile_file(source, [(4, None)])) if p.head[1] == "all_reduce"]
    assert [s.text() for s in plan.ranks[1]] == [
        *("=2 <2", "=3 <3", "=0 <0", "+1 <0,2,3 >2,3,0"),
        *("2 >2", "3 >3", "0 >0"),
    ]
    assert all("turn" not in s.fields for steps in plan.ranks for s in steps)


def test_commands(tmp_path):
    run = CliRunner().invoke
    ring, out, figure = str(next(p for p in EXAMPLES if p.stem == "ring")), str(tmp_path / "x.plan"), tmp_path / "x.svg"
    done = run(main, ["schedule", "compile", ring, "-o", out, "--ranks", "3", "--hosts", "2x2"])
    assert done.exit_code == 0 and "plan(s) in" in done.output, done.output
    done = run(main, ["schedule", "check", out])
    assert done.exit_code == 0 and "right, for every rank" in done.output, done.output
    done = run(main, ["schedule", "show", out])
    assert done.exit_code == 0 and "round 1" in done.output, done.output
    pytest.importorskip("matplotlib")
    done = run(main, ["schedule", "show", out, "-o", str(figure)])
    assert done.exit_code == 0 and figure.stat().st_size > 1000, done.output


def test_faults_of_python_name_the_line(tmp_path):
    path = tmp_path / "bad.py"
    head = "from spccl.schedule import all_reduce\n@all_reduce\ndef f(t):\n"
    for line, words in (
        ("    t.input(9, 0)", "bad.py, line 4: rank 9: wanted 0 to 1"),
        ("    x = y", "bad.py, line 4: NameError: name 'y' is not defined"),
        ("    (", "bad.py, line 4: SyntaxError"),
    ):
        path.write_text(head + line + "\n")
        done = CliRunner().invoke(main, ["schedule", "check", str(path), "--ranks", "2"])
        assert done.exit_code == 1 and words in " ".join(done.output.split()), done.output


def test_check_names_rank_step_and_reason(tmp_path):
    path = tmp_path / "bad.plan"
    source = next(p for p in EXAMPLES if p.stem == "all_pairs")
    path.write_text(schedule.compile_file(source, [(2, None)]).replace("from=1@input own=in at=0", "own=in at=0", 1))
    done = CliRunner().invoke(main, ["schedule", "check", str(path)])
    assert done.exit_code == 1 and "rank 0, step 1" in done.output, done.output
    path.write_text("spccl-plan 2\nend\n")
    done = CliRunner().invoke(main, ["schedule", "check", str(path)])
    assert done.exit_code == 1 and "version 2, this spccl reads 1" in done.output, done.output


def test_check_says_which_plans_gpus_refuse_beside_others(tmp_path):
    """In a group of 2x2 the GPUs relay, for two_step, so they refuse a direct plan. Not refused are a plan that another
    one replaces there, and one for another number of ranks."""
    pairs, gather = (
        schedule.compile_file(next(p for p in EXAMPLES if p.stem == name), shapes)
        for name, shapes in (("all_pairs", [(2, None), (4, None)]), ("two_step_gather", [(4, None), (4, 2)]))
    )
    path = tmp_path / "both.plan"
    path.write_text(pairs.removesuffix("end\n") + gather.partition("\n")[2])
    done = CliRunner().invoke(main, ["schedule", "check", str(path)])
    refused = [line for line in done.output.splitlines() if line.startswith("not on GPUs")]
    assert done.exit_code == 0 and refused == [
        "not on GPUs of 2 hosts: all_pairs (all_reduce), 4 ranks: owners send results directly; "
        "two_step (all_gather) relays them, and GPUs of a group do one or the other"
    ], done.output
    assert done.output.count("not on 2 hosts") == 1, done.output


def test_show_has_every_step():
    text = schedule.compile_file(next(p for p in EXAMPLES if p.stem == "hierarchical"), [(8, 2)])
    (plan,) = parse(text)
    shown = sum(cell.count("\n") + 1 for row in as_rows(plan) for cell in row[1:] if cell)
    assert shown == sum(line.startswith(("send", "recv", "reduce")) for line in text.splitlines())
