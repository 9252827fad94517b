"""The command line: exit codes, texts, files."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import rich.console
from click.testing import CliRunner

import spccl
from spccl import cli
from spccl.bench import report, start
from spccl.cli import main

info_module = sys.modules["spccl.info"]  # spccl.info is its function


def run(*args, code=0):
    result = CliRunner().invoke(main, [str(arg) for arg in args])
    assert result.exit_code == code, result.output + repr(result.exception)
    return result.output


def test_help_and_version():
    assert spccl.__version__ in run("--version")
    assert "..." not in run("--help").replace("[ARGS]...", ""), "click cut the line of a command"
    for command in ("info", "verify", "inspect", "bench", "plot", "simulate"):
        assert command in run("--help")
        assert "Usage" in run(command, "--help")


def test_help_of_bench():
    """Options in groups, examples last; nothing that only the repository has."""
    text = run("bench", "--help")
    at = [text.index(title) for title in ("What is measured:", "How spccl sends:", "--schedule", "Examples:")]
    assert at == sorted(at) and "bench/" not in text and "docs/" not in text


def test_python_dash_m():
    done = subprocess.run([sys.executable, "-m", "spccl", "--version"], capture_output=True, text=True, timeout=500)
    assert done.returncode == 0 and spccl.__version__ in done.stdout


def test_info():
    text = run("info")
    for word in ("scalar", "tcp", "SPCCL_FORMAT", "python", "numpy", "torch backend", "GPU ring memory"):
        assert word in text
    entries = json.loads(run("info", "--json"))
    assert {"kind", "name", "value", "why"} == set(entries[0])
    assert any(entry["name"] == "SPCCL_TRANSPORTS" and entry["kind"] == "setting" for entry in entries)


@pytest.mark.parametrize("width", [80, 120, 160])
def test_info_wraps_and_cuts_nothing(width, monkeypatch):
    console = rich.console.Console(width=width, highlight=False, markup=False, emoji=False)
    monkeypatch.setattr(cli, "_console", console)
    lines = run("info").splitlines()
    assert max(map(len, lines)) <= width and lines[1].startswith("ready: CPU yes (")
    shown = "".join("".join(lines).split())
    for entry in spccl.info():
        assert "".join(entry.name.split()) in shown, entry
        if entry.kind == "part":
            assert "".join(entry.value.split()) in shown, entry


def test_verdict_says_why_not():
    def entries(cuda, ib, backend=("registered", "works")):
        return [
            info_module.Entry("kernels", "avx2", "in, chosen", "AVX2"),
            info_module.Entry("transport", "ib", *ib),
            info_module.Entry("part", "cuda", *cuda),
            info_module.Entry("python", "torch", "2.13.0", "used"),
            info_module.Entry("python", "torch backend", *backend),
        ]

    no_ib = ("absent", "built without <infiniband/verbs.h> (Debian: apt-get install libibverbs-dev)")
    no_cuda = ("absent", "not in this build: no nvcc in PATH: put one there; then install again")
    assert info_module.verdict(entries(no_cuda, no_ib)) == (
        "ready: CPU yes (avx2); PyTorch yes (2.13.0); GPUs no: built without CUDA: no nvcc in PATH; "
        "InfiniBand no: built without <infiniband/verbs.h>"
    )
    some = ("in", "CUDA 12.8, compiled for 90; 2 GPUs here; at most 256M bytes")
    text = info_module.verdict(
        entries(some, ("in, devices usable", "device mlx5_0 port 1 (400 Gbit/s)"), ("absent", "old"))
    )
    assert text.endswith("PyTorch no: old; GPUs yes (2); InfiniBand yes: device mlx5_0 port 1"), text
    none = ("in", "CUDA 12.8, compiled for 90; no GPU can be used: no driver")
    assert "GPUs no: no GPU can be used: no driver;" in info_module.verdict(entries(none, no_ib))


def test_brackets_in_texts_are_no_markup(monkeypatch):
    """As markup, rich would take "[torch]" as a style and ":key:" as an emoji, and would print neither."""
    monkeypatch.setattr(cli, "verdict", lambda entries: "ready")
    entry = info_module.Entry("python", "x[bold]", "absent", "pip install 'name[torch]', host:key: [/] [red]x[/red]")
    monkeypatch.setattr(cli, "info", lambda: [entry, info_module.Entry("setting", "S", "[a]", "[b]")])
    text = run("info")
    for word in ("x[bold]", "name[torch]", "host:key:", "[/] [red]x[/red]", "[a]", "[b]"):
        assert word in text, text


def test_hints_name_what_an_index_has(monkeypatch):
    """No package index has spccl itself, so a hint to install 'spccl[torch]' would not work."""
    monkeypatch.setattr(info_module, "_installed", lambda name: None)
    whys = [entry.why for entry in info_module.info() if entry.kind == "python"]
    hints = [why.split("pip install ")[1] for why in whys if "pip install " in why]
    assert "'torch>=2.9'" in hints and "'matplotlib>=3.7'" in hints and "numpy" in hints
    assert not any("spccl" in hint for hint in hints)


def test_bench_refuses_a_file_that_cannot_be_written_before_it_measures(tmp_path, monkeypatch):
    monkeypatch.setattr(start, "run_spawned", lambda *_, **__: pytest.fail("measured"))
    missing = tmp_path / "no such folder" / "x.csv"
    for option in ("--csv", "--json"):
        text = run("bench", option, missing, code=2)
        assert option in text and "does not exist" in text.replace("\n", " ")
    assert "is a directory" in run("bench", "--csv", tmp_path, code=2)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--sizes", "3"], ["--sizes", "all_gather of 3 bytes", "float32", "each of 2 ranks", "at least 8 bytes"]),
        (["--sizes", "1M,4"], ["all_gather of 4 bytes", "at least 8 bytes"]),
        (["--sizes", "3", "--collective", "all_reduce"], ["all_reduce of 3 bytes", "at least 4 bytes"]),
        (["--min", "8", "--max", "64", "--dtype", "float64", "--ranks", "3"], ["--min", "at least 24 bytes"]),
    ],
)
def test_bench_refuses_sizes_without_an_element(args, words, monkeypatch):
    monkeypatch.setattr(start, "run_spawned", lambda *_, **__: pytest.fail("measured"))
    text = " ".join(run("bench", "--peer", "none", *args, code=2).split())
    assert all(word in text for word in words), text


@pytest.fixture
def encoded(tmp_path):
    x = np.zeros(200_000, np.float32)
    x[::100] = 1
    x[60_000:140_000] = 2
    path = tmp_path / "x.spccl"
    path.write_bytes(spccl.encode(x))
    return path


def test_inspect_explains(encoded):
    text = run("inspect", encoded)
    for word in ("53 50 43 46", "magic", "tile", "dense", "values", "200000 elements of float32", "formats:"):
        assert word in text, word
    assert "and 3 more" in run("inspect", "--frames", "1", encoded)
    document = json.loads(run("inspect", "--json", encoded))
    assert document["error"] is None and len(document["frames"]) == 4
    assert sum(f["frame_bytes"] for f in document["frames"]) == encoded.stat().st_size
    assert all(sum(f["sections"].values()) == f["frame_bytes"] for f in document["frames"])


def test_inspect_bad_files(encoded, tmp_path):
    good = encoded.read_bytes()
    size = spccl.inspect(good)[0].frame_bytes
    bad = tmp_path / "bad.spccl"
    bad.write_bytes(good[:size] + b"\0" * 100)
    text = run("inspect", bad, code=1)
    assert f"frame at byte {size}" in text and "magic" in text and "1 frame(s)" in text
    document = json.loads(run("inspect", "--json", bad, code=1).split("\nError:")[0])
    assert f"byte {size}" in document["error"] and len(document["frames"]) == 1
    bad.write_bytes(b"")
    assert "0 bytes, wanted at least one frame" in run("inspect", bad, code=1)
    assert "does not exist" in run("inspect", tmp_path / "none", code=2)


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (["--sizes", "12Q"], "wanted bytes above 0"),
        (["--sizes", "0"], "wanted bytes above 0"),
        (["--sparsity", "1.5"], "wanted a fraction of zeros"),
        (["--sparsity", "lots"], "wanted a fraction of zeros"),
        (["--collective", "all_to_all"], "all_to_all"),
        (["--dtype", "float31"], "float31"),
        (["--dtype", "float8"], "cannot be reduced"),
        (["--op", "avg", "--peer", "gloo"], "Gloo has no avg"),
        (["--min", "4M", "--max", "1M"], "wanted 1 <= min <= max"),
    ],
)
def test_bench_bad_options(args, text):
    assert text in run("bench", *args, code=2)


def test_bench_of_a_plan_file(tmp_path, monkeypatch):
    """It measures what the file has for these ranks, and nothing of the automatic choice under the file's name."""
    source, path = Path(__file__).parents[2] / "examples/schedules/all_pairs.py", tmp_path / "pairs.plan"
    run("schedule", "compile", source, "-o", path, "--ranks", 2, "--hosts", "4x1")
    measured = []
    monkeypatch.setattr(start, "run_spawned", lambda plan, *_, **__: measured.extend(c.collective for c in plan.cases))
    how = ("--schedule", f"file:{path}", "--peer", "none", "--sizes", "64K", "--sparsity", 0)
    run("bench", *how)
    assert measured == ["reduce_scatter", "all_reduce"]
    for args, words in (
        (("--collective", "all_gather"), "has no plan for all_gather of 2 ranks; it has all_reduce of 2 ranks"),
        (("--ranks", 4), "has no plan for any collective of 4 ranks;"),
        (("--schedule", f"file:{source}"), "is Python: compile it first: spccl schedule compile"),
        (("--schedule", "file:none.plan"), "there is no such file"),
        (("--schedule", "rings"), "or file:PATH of a plan file"),
    ):
        assert words in " ".join(run("bench", *how, *args, code=2).split())
    assert len(measured) == 2


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_bench_writes_files_and_plot_reads_them(tmp_path):
    pytest.importorskip("torch")
    pytest.importorskip("matplotlib")
    csv, document, picture = tmp_path / "a.csv", tmp_path / "a.json", tmp_path / "a.png"
    what = ["--collective", "all_reduce,broadcast", "--sizes", "64K,256K", "--sparsity", "99%,0"]
    how = ["--iters", 2, "--warmup", 0, "--timeout", 600, "--schedule", "ring", "--format", "pici"]
    text = run("bench", *what, *how, "--csv", csv, "--json", document)
    rows, facts = report.read_csv(csv)
    assert {(row["schedule"], row["format"]) for row in rows} == {("ring", "pici")}
    assert "pici" in rows[0]["format_mix"] and "coo" not in rows[0]["format_mix"]
    assert "SPCCL_FORMAT=pici" in facts["settings"].split() and "SPCCL_FORMAT" not in os.environ
    assert "# cpu:" in text and "busbw" in text and text.count("all_reduce") >= 4
    assert len(json.loads(document.read_text())["rows"]) == 8
    assert "8 points drawn" in run("plot", csv, "-o", picture)
    assert picture.stat().st_size > 5000


def test_plot_refuses_other_files(tmp_path):
    (tmp_path / "x.csv").write_text("a,b\n1,2\n")
    assert "not a result of" in run("plot", tmp_path / "x.csv", "-o", tmp_path / "x.png", code=1)


@pytest.mark.slow
def test_verify_passes():
    text = run("verify", "--ranks", 2, "--timeout", 250)
    assert "cases right on every rank, bit by bit" in text
    for word in ("all_gather", "reduce_scatter", "bfloat16", "float8", "rank 0 -> 1", "frames sent"):
        assert word in text


def test_verify_reports_what_failed():
    text = run("verify", "--ranks", 2, "--transport", "pigeon", code=1)
    assert "rank 0 of 2" in text and "pigeon" in text


def test_verify_in_a_terrible_hurry():
    text = run("verify", "--ranks", 2, "--timeout", 1, code=1)
    assert "spccl verify failed" in text
