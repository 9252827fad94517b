"""Tests of `spccl bench`: cases, formulas, files, and ranks as processes."""

import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from spccl import _launch as launch
from spccl import plot, verify
from spccl.bench import cases, loop, report, runner, start

# ---- functions that run as ranks; they must be importable by name ----


def rank_echo(rank, offset):
    rank.send(("hello", rank.rank))
    return rank.rank + offset


def rank_fail(rank, how):
    if rank.rank != 1:
        time.sleep(60)
    if how == "raise":
        raise ValueError("rank one does not like this")
    os.kill(os.getpid(), signal.SIGKILL)


def rank_sleep(rank, folder):
    (folder / f"{rank.rank}.pid").write_text(str(os.getpid()))
    time.sleep(600)


def alive(pid):
    """Whether the process runs; a zombie does not."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until(condition, seconds=20):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "did not come true in time"
        time.sleep(0.02)


# ---- launch ----


def test_ranks_return_and_talk():
    heard = []
    results = launch.run_ranks(rank_echo, 3, (10,), deadline_s=600, on_message=lambda r, m: heard.append((r, m)))
    assert results == [10, 11, 12]
    assert sorted(heard) == [(r, ("hello", r)) for r in range(3)]


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("raise", r"rank 1 of 3: ValueError: rank one does not like this \(test_bench.py:\d+\)"),
        ("die", "rank 1 of 3: died without a message, killed by SIGKILL"),
    ],
)
def test_a_failed_rank_surfaces_and_ends_the_others(how, text, monkeypatch):
    monkeypatch.setattr(launch, "_GRACE_S", 0.3)
    start = time.monotonic()
    with pytest.raises(launch.RanksFailed, match=text) as caught:
        launch.run_ranks(rank_fail, 3, (how,), deadline_s=50)
    assert "rank(s) 0, 2 of 3: still running 0.3 s after the first failure; killed" in str(caught.value)
    assert time.monotonic() - start < 30


@pytest.mark.slow
def test_deadline_kills_all(tmp_path):
    with pytest.raises(launch.RanksFailed, match=r"rank\(s\) 0, 1 of 2: still running after 4 s; killed"):
        launch.run_ranks(rank_sleep, 2, (tmp_path,), deadline_s=4)
    for file in tmp_path.glob("*.pid"):
        assert not alive(int(file.read_text()))


def test_ranks_die_with_a_killed_parent(tmp_path):
    code = (
        "import pathlib, sys; sys.path.insert(0, sys.argv[2])\n"
        "import test_bench; from spccl import _launch as launch\n"
        "if __name__ == '__main__':\n"
        "    launch.run_ranks(test_bench.rank_sleep, 2, (pathlib.Path(sys.argv[1]),), deadline_s=100)\n"
    )
    script = tmp_path / "parent.py"
    script.write_text(code)
    parent = subprocess.Popen([sys.executable, str(script), str(tmp_path), os.path.dirname(__file__)])
    try:
        wait_until(lambda: len([f for f in tmp_path.glob("*.pid") if f.read_text()]) == 2, 60)
    finally:
        parent.kill()
        parent.wait(10)
    pids = [int(file.read_text()) for file in tmp_path.glob("*.pid")]
    wait_until(lambda: not any(alive(pid) for pid in pids))


# ---- cases and formulas ----


def test_sizes():
    assert cases.sizes(8, 100, 2) == [8, 16, 32, 64]
    assert cases.sizes(8, 8, 16) == [8]
    for bad in ((0, 8, 2), (8, 4, 2), (8, 16, 1)):
        with pytest.raises(ValueError, match="wanted 1 <= min <= max"):
            cases.sizes(*bad)


def test_counts_are_those_of_nccl_tests():
    """The size of all_gather is its output, that of reduce_scatter its input. count is one rank's block."""
    for collective in ("all_gather", "reduce_scatter"):
        assert cases.Case(collective, 1 << 20, "float32", "none", 0.9).block_elems(4) == 1 << 16
    assert cases.Case("all_reduce", 1 << 20, "float32", "sum", 0.9).block_elems(4) == 1 << 18
    assert cases.Case("broadcast", 1 << 20, "bfloat16", "none", 0.9).block_elems(4) == 1 << 19


def test_bandwidths():
    assert report.algbw_gbs(10**9, 0.5) == 2.0
    assert [report.bus_factor(c, 4) for c in cases.COLLECTIVES] == [0.75, 0.75, 1.5, 1.0]


def test_format_mix():
    assert report.format_mix({"empty": 0, "tile": 97, "pici": 0, "coo": 0, "dense": 3}) == "tile 97% dense 3%"
    assert report.format_mix({"tile": 0}) == "-"


def row(**changes):
    case = cases.Case("all_reduce", 1 << 20, "float32", "sum", 0.99)
    times = {"spccl": np.array([1e-3, 2e-3, 3e-3]), "gloo": np.array([4e-3, 8e-3, 12e-3])}
    made = report.make_row(
        case, report.Measured(times, {"spccl": 0, "gloo": 0}, 1000.4, {"tile": 5}, {}),
        via="native", world_size=2, peer="gloo", dense_bytes=2e6,
    )  # fmt: skip
    return report.Row(**(vars(made) | changes))


def test_row_takes_medians_and_pairs():
    made = row()
    assert made.time_us == pytest.approx(2000) and made.peer_time_us == pytest.approx(8000)
    assert made.ratio == pytest.approx(4) and made.ratio_p10 == pytest.approx(4)
    assert made.time_p10_us < made.time_us < made.time_p90_us
    assert made.algbw_gbs == made.busbw_gbs == pytest.approx((1 << 20) / 2e-3 / 1e9)
    assert made.wire_bytes == 1000 and made.iters == 3 and made.count == 1 << 18
    head, line = report.Row.head("gloo"), made.line()
    assert "algbw" in head and "gloo" in head and "4.00x" in line and "1048576" in line


def test_command_names_no_folder_of_the_machine(monkeypatch):
    words = ["bench", "--csv", "/tmp/out/b.csv", "--codec-csv=/tmp/c.csv", "--sparsity", "0,50%", "--json", "x/j.json"]
    monkeypatch.setattr(sys, "argv", ["/usr/bin/spccl", *words])
    assert report.command() == "spccl bench --csv b.csv --codec-csv=c.csv --sparsity 0,50% --json x/j.json"


def test_csv_and_json_keep_everything(tmp_path):
    facts = report.machine()
    assert {"cpu", "cores", "memory", "spccl", "torch", "commit"} <= set(facts)
    path = tmp_path / "r.csv"
    path.write_text(report.to_csv([row(), row(peer="none", ratio=None)], facts))
    rows, read = report.read_csv(path)
    assert read == facts and len(rows) == 2 and rows[1]["ratio"] == ""
    assert float(rows[0]["ratio"]) == pytest.approx(4) and rows[0]["format_mix"] == "tile 100%"
    document = json.loads(report.to_json([row()], facts))
    assert document["machine"] == facts and document["rows"][0]["peer"] == "gloo"
    path.write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match="not a result of"):
        report.read_csv(path)


def test_plot(tmp_path):
    pytest.importorskip("matplotlib")
    path, picture = tmp_path / "r.csv", tmp_path / "r.png"
    rows = [row(sparsity=s, collective=c) for s in (0.0, 0.9) for c in ("all_gather", "all_reduce")]
    path.write_text(report.to_csv(rows, {"cpu": "a cpu"}))
    assert plot.speedup_over_sparsity([path], picture) == 4
    assert picture.read_bytes().startswith(b"\x89PNG") and picture.stat().st_size > 5000
    path.write_text(report.to_csv([row(ratio=None)], {}))
    with pytest.raises(ValueError, match="--peer gloo"):
        plot.speedup_over_sparsity([path], picture)


# ---- expected answers ----


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int8", "int64", "uint8"])
@pytest.mark.parametrize("op", verify.OPS)
def test_reference_against_plain_loops(dtype, op):
    """Compares verify.reduced with a loop over the elements, in Python's own numbers where they are exact."""
    inputs = [verify.make_input([7, r], 200, dtype, 0.3, True) for r in range(3)]
    got = verify.to_float(verify.reduced(inputs, dtype, op), dtype)
    columns = zip(*(verify.to_float(x, dtype).tolist() for x in inputs), strict=True)
    whole = inputs[0].dtype.kind in "iu" and dtype != "bfloat16"
    bits = 8 * inputs[0].dtype.itemsize

    def wrap(value):
        value &= (1 << bits) - 1
        return value - (1 << bits) if value >> (bits - 1) and dtype != "uint8" else value

    for value, column in zip(got.tolist(), columns, strict=True):
        if op in ("min", "max"):
            wanted = min(column) if op == "min" else max(column)
        else:
            wanted = column[0] * column[1] * column[2] if op == "prod" else sum(column)
            if whole:
                wanted = wrap(wanted)
            if op == "avg":
                wanted = int(wanted / 3) if bits < 64 or not whole else (abs(wanted) // 3) * (1 if wanted >= 0 else -1)
                if not whole:
                    wanted = sum(column) / 3
        close = {"bfloat16": 2**-7, "float16": 2**-10, "float32": 2**-21}.get(dtype, 0)
        assert value == pytest.approx(wanted, rel=close, abs=2 * close)


def test_bfloat16_rounds_to_even():
    values = np.array([1.0, 1.0 + 2**-8, 1.0 + 3 * 2**-8, -1.0 - 2**-8 - 2**-20], np.float32)
    assert [hex(b) for b in verify.from_float(values, "bfloat16")] == ["0x3f80", "0x3f80", "0x3f82", "0xbf81"]


def test_difference_sees_signs_of_zero():
    a, b = np.zeros(3, np.float32), np.zeros(3, np.float32)
    assert verify.difference(a, b) is None
    b[1] = -0.0
    assert verify.difference(a, b) == (
        "1 of 3 elements wrong, the first at 1: got 0.0 (0x00000000), wanted -0.0 (0x80000000)"
    )


# ---- the whole thing, over processes ----


@pytest.mark.slow
@pytest.mark.parametrize("via", ["native", "torch"])
def test_bench_checks_and_times(via):
    pytest.importorskip("torch")
    plan = runner.Plan(
        cases=tuple(cases.cases(cases.COLLECTIVES, [1 << 12, 1 << 18], ["float32"], "sum", [0.99, 0.0])),
        via=via,
        iters=3,
        warmup=1,
        timeout_s=60,
    )
    seen = []
    rows = start.run_spawned(plan, 2, deadline_s=600, on_message=seen.append)
    assert [("row", row) for row in rows] == seen and len(rows) == 16
    for made, case in zip(rows, plan.cases, strict=True):
        assert (made.collective, made.size_bytes, made.sparsity) == (
            case.collective,
            case.size_bytes,
            case.sparsity,
        )
        assert made.wrong == 0 and made.peer_wrong == 0
        assert made.time_us > 0 and made.peer_time_us > 0 and made.ratio > 0
        assert made.ratio == pytest.approx(made.peer_time_us / made.time_us)
        assert made.calls_per_iter == (20 if case.size_bytes == 1 << 12 else 1)
        if case.size_bytes == 1 << 18 and case.sparsity == 0.99:
            assert 0 < made.wire_bytes < made.dense_bytes / 5 and "dense" not in made.format_mix


def test_bench_without_torch_in_the_ranks():
    plan = runner.Plan(
        cases=tuple(cases.cases(["all_reduce"], [1 << 14], ["bfloat16", "int8"], "max", [0.5])),
        peer="none",
        iters=2,
        warmup=0,
        timeout_s=60,
    )
    rows = start.run_spawned(plan, 3, deadline_s=600, on_message=lambda _: None)
    assert [made.wrong for made in rows] == [0, 0] and rows[0].ratio is None and rows[0].peer == "none"


def test_wrong_answers_are_counted(monkeypatch):
    """The check before timing finds a wrong result."""

    class Liar:
        def __init__(self):
            self._source = self._target = None

        def prepare(self, case, source, target):
            return lambda: target.__setitem__(slice(None), 99)

    case = cases.Case("all_reduce", 400, "float32", "sum", 0.5)
    source = target = np.zeros(100, np.float32)
    expected = np.ones(100, np.float32)
    trial = loop.Trial("liar", case, 0, source, [target])
    trial.calls = [Liar().prepare(case, source, target)]
    assert trial.wrong(expected) == 100


def test_verify_notices_a_wrong_expectation(monkeypatch):
    """`spccl verify` finds a result that differs in one bit."""
    from test_comm import run_threads

    real = verify.reduced

    def off_by_a_bit(*args):
        answer = real(*args)
        answer.view(np.uint8)[-1] ^= 1
        return answer

    monkeypatch.setattr(verify, "reduced", off_by_a_bit)
    case = verify.Case("all_reduce", "float32", "sum", 1000, 0.9, False)

    def rank_main(comm):
        request, got, wanted, _ = verify._start(comm, case, 0, verify.inputs_of(case, 0, comm.world_size))
        request.wait()
        return verify.difference(got, wanted)

    for text in run_threads(2, rank_main):
        assert text.startswith("1 of 1000 elements wrong, the first at 999")
