"""`spccl simulate` and simulate.py: what the command prints, calibration files, and what is refused by which sentence.

The simulator itself is tested in tests/c/test_simulate.c, its bytes in tests/c/test_plan_cost.c.
"""

import dataclasses
import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from spccl import simulate as sim
from spccl.cli import main
from spccl.cli_schedule import check_text

NETWORK = sim.Network(4, 2, 1e9, cores=2, shared=True)
CALL = sim.Call("all_reduce", 1 << 20, density=0.05)


def run(*words: object) -> str:
    result = CliRunner().invoke(main, ["simulate", *map(str, words)])
    assert result.exit_code == 0, result.output
    return result.output


def refused(*words: object) -> str:
    result = CliRunner().invoke(main, ["simulate", *map(str, words)])
    assert result.exit_code != 0, result.output
    return " ".join(result.output.split())


def test_answer_of_512_ranks(tmp_path: Path) -> None:
    """The question of docs/SIMULATE.md: time, bytes of a link, memory, which schedule, where they cross."""
    out = tmp_path / "answer.json"
    text = run("--hosts", 64, "--ranks", 8, "--rate", "25gbit", "--sparsity", "0.99", "--size", "1M", "--json", out,
               "--schedule", "direct,relayed,ring")  # fmt: skip
    assert "CPU engine, no GPU kernels" in text and "The library would choose relayed" in text
    made = {p["schedule"]: p for p in json.loads(out.read_text())["results"][0]["schedules"]}
    assert list(made) == sorted(made, key=lambda s: made[s]["time_s"])
    assert made["relayed"]["link_bytes"] < made["direct"]["link_bytes"] / 5
    assert made["direct"]["simulated"] == 8


def test_crossings_growth_and_a_step() -> None:
    text = run("--hosts", 4, "--ranks", 2, "--size", "4M", "--crossings", "--growth", "--model", "gpt2", "--schedule",
               "direct,relayed")  # fmt: skip
    assert "crossing points over size" in text and "16 ranks" in text and "4096 ranks" in text
    assert "124 M parameters, 119 buckets of 4 MiB float32" in text


def test_crossing_point() -> None:
    """Lines that cross in the middle of a decade of both."""
    found = {"a": [(1.0, 1.0), (100.0, 4.0)], "b": [(1.0, 4.0), (100.0, 1.0)]}
    ((x, before, after),) = sim.crossings(found)
    assert (before, after) == ("a", "b") and x == pytest.approx(10.0)


@pytest.mark.slow
def test_figure(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    out = tmp_path / "f.png"
    run("--hosts", 2, "--ranks", 2, "--size", "1M", "-o", out)
    assert out.read_bytes()[:4] == b"\x89PNG"


def test_plan_file(tmp_path: Path) -> None:
    """A plan of the language, and the sentence for ranks that the file lacks."""
    plan = tmp_path / "ring.plan"
    source = Path(__file__).parents[2] / "examples" / "schedules" / "ring.py"
    made = CliRunner().invoke(main, ["schedule", "compile", str(source), "-o", str(plan), "--ranks", "8"])
    assert made.exit_code == 0, made.output
    assert f"({plan.name})" in run("--hosts", 4, "--ranks", 2, "--plan", plan, "--size", "1M")
    assert "no plan for all_reduce of 6 ranks; it has all_gather of 8, all_reduce of 8" in refused(
        "--hosts", 3, "--ranks", 2, "--plan", plan
    )
    plan.write_text("spccl-plan 7\n")
    assert "version" in refused("--plan", plan)


def test_check_prints_the_same_bytes(tmp_path: Path) -> None:
    """`spccl schedule check` says what the simulator says: one model of bytes."""
    source = Path(__file__).parents[2] / "examples" / "schedules" / "ring.py"
    words = ["schedule", "check", str(source), "--ranks", "4", "--size", "1M", "--sparsity", "0.9"]
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 0, result.output
    (line,) = [x for x in result.output.splitlines() if " all_reduce " in x]
    call = sim.Call("all_reduce", 1 << 20, density=0.1)
    plan = tmp_path / "ring.plan"
    assert CliRunner().invoke(main, [*words[:1], "compile", *words[2:5], "-o", str(plan)]).exit_code == 0
    index = next(i for i, p in enumerate(check_text(plan.read_text())) if p["collective"] == "all_reduce")
    p = sim.predict(sim.Network(1, 4, 1e10), call, "ring", sim.Machine(), plan=(plan.read_bytes(), index))
    assert f"{p.rank_bytes / 1e6:.4g} MB" in line


# ---- calibration ----


def measured(machine: sim.Machine) -> list[sim.Cell]:
    """Cells that a machine with these rates would measure."""
    cells = []
    for schedule in ("direct", "ring"):
        for density in (0.01, 0.2, 1.0):
            for size in (64 << 10, 1 << 20):
                call = sim.Call("all_reduce", size, density=density)
                p = sim.predict(NETWORK, call, schedule, machine)
                cells.append(sim.Cell(NETWORK, call, schedule, p.time_s, p.wire_bytes, 0.0, 1 - density))
    return cells


def test_fit_finds_other_rates() -> None:
    """Rates that are three times the defaults: the fit predicts other cells within 5%, the defaults do not."""
    true = sim.Machine(pass_ns=0.3, send_ns=1.5, receive_ns=1.5, remote_message_ns=15000)
    fitted = sim.fit(measured(true))
    other = dataclasses.replace(CALL, density=0.05)
    want = sim.predict(NETWORK, other, "relayed", true).time_s
    assert sim.predict(NETWORK, other, "relayed", fitted).time_s == pytest.approx(want, rel=0.05)
    assert sim.predict(NETWORK, other, "relayed", sim.Machine()).time_s < 0.8 * want


def test_file_comes_back(tmp_path: Path) -> None:
    machine = sim.Machine(pass_ns=0.25, source="6 cells of x.csv")
    sim.write_calibration(tmp_path / "m.json", machine, {"cpu": "a", "commit": "b"})
    assert sim.read_calibration(tmp_path / "m.json") == machine
    assert "Rates: 6 cells of x.csv" in run("--machine", tmp_path / "m.json", "--size", "64K", "--hosts", 2)


GOOD = {"spccl_calibration": 1, "engine": "cpu", "rates": sim.Machine().rates()}
BAD = [
    ("garbage", "it is no JSON"),
    ("[1]", 'it has no "spccl_calibration"'),
    (json.dumps(GOOD | {"spccl_calibration": 2}), "a calibration of version 2, wanted 1"),
    (json.dumps(GOOD | {"engine": "gpu"}), "engine 'gpu', wanted 'cpu'"),
    (json.dumps(GOOD | {"rates": {}}), "its rate pass_ns is None"),
    (json.dumps(GOOD | {"rates": sim.Machine().rates() | {"send_ns": -1}}), "its rate send_ns is -1"),
    (json.dumps(GOOD | {"rates": sim.Machine().rates() | {"wake_ns": float("nan")}}), "its rate wake_ns is nan"),
]


@pytest.mark.parametrize(("text", "sentence"), BAD)
def test_bad_calibration(tmp_path: Path, text: str, sentence: str) -> None:
    file = tmp_path / "bad.json"
    file.write_text(text)
    assert f"{file}: " in refused("--machine", file) and sentence in refused("--machine", file)


def test_results_that_do_not_calibrate(tmp_path: Path) -> None:
    here = Path(__file__).parents[2] / "bench" / "results"
    assert "not a result of `spccl bench --csv`" in refused("--calibrate", here / "quality-tiny.csv")
    assert "no row of emulated hosts with a schedule" in refused("--calibrate", here / "netns-4-tcp.csv")
    for text in ("{}", '{"machine": {}, "rows": [{"hosts": 2, "link_gbs": 1, "schedule": "ring"}]}', '{"rows": 1'):
        (tmp_path / "x.json").write_text(text)
        assert "not a result of `spccl bench" in refused("--calibrate", tmp_path / "x.json")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--hosts", 1, "--ranks", 1), "1 hosts of 1 ranks are 1 ranks, wanted 2 to 4096"),
        (("--hosts", 1024, "--ranks", 8), "are 8192 ranks, wanted 2 to 4096"),
        (("--rate", "25"), '"25" is not a rate'),
        (("--latency", "20"), "wanted a time such as 20us"),
        (("--sparsity", "2"), "wanted a fraction of zeros"),
        (("--collective", "broadcast", "--root", 64), "the last rank is 63"),
        (("--model", "gpt2", "--collective", "all_gather"), "gradients are summed by all_reduce"),
        (("--save", "x.json"), "needs --calibrate"),
        (("--machine", __file__, "--calibrate", __file__), "not both"),
    ],
)
def test_impossible(words: tuple[object, ...], sentence: str) -> None:
    assert sentence in refused(*words)
