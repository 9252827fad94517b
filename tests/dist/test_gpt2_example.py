"""examples/gpt2 as a user runs it, at its tiny size: torchrun with 2 ranks on the CPU."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("torch", reason="the example trains a torch model")

from launch import run_command

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "gpt2"
pytestmark = pytest.mark.slow


def torchrun(folder: Path, *program: str, n_ranks: int = 2) -> tuple[int, str]:
    """Exit status and output of a program of the example under torchrun, in `folder`."""
    script, *args = program
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={n_ranks}"]
    # Its files go where it is started.
    start = f"import os, sys; os.chdir({str(folder)!r}); os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
    settings = dict(os.environ, OMP_NUM_THREADS="1", COLUMNS="200")
    return run_command([sys.executable, "-c", start, *command[1:], str(EXAMPLE / script), *args], settings)


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gpt2")
    args = (
        "--size",
        "tiny",
        "--device",
        "cpu",
        "--buckets",
        "25",
        "--rounds",
        "2",
        "--steps",
        "2",
        "--prune-rounds",
        "1",
    )
    status, output = torchrun(folder, "measure.py", *args)
    assert status == 0, output
    return folder / "gpt2-tiny-eager.csv", output


@pytest.fixture
def results(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLE))
    import results

    yield results
    for name in ("results", "modes", "gpt", "tokens", "measure"):
        sys.modules.pop(name, None)


def test_csv(measured, results):
    rows, facts = results.read_csv(measured[0])
    assert [(row.mode, row.bucket_mb) for row in rows] == [
        (mode, 25) for mode in ("dense", "tuned", "pruned", "momentum")
    ]
    assert facts["commit"] and facts["torch"] and "--size tiny" in facts["command"]
    for row in rows:
        pruned = row.mode in ("pruned", "momentum")
        assert (row.ranks, row.runs, row.steps, row.n_parameters) == (2, 2, 2, 120576)
        assert 0 < row.step_min_ms <= row.step_ms <= row.step_max_ms
        assert 0 < row.compute_min_ms <= row.compute_ms <= row.compute_max_ms
        assert row.exposed_min_ms <= row.exposed_ms <= row.exposed_max_ms
        assert (row.prune_ms is not None) == (row.hook_us is not None) == pruned
        assert row.density == (0.01 if pruned else 1.0)
        assert 0.5 * row.density <= row.density_sent <= 2 * row.density
        # A model that knows nothing about 256 equally likely tokens.
        assert abs(row.loss - math.log(256)) < 0.2
    losses = {row.mode: row.loss for row in rows}
    assert losses["dense"] == pytest.approx(losses["tuned"], abs=1e-5)  # same start, same data, same rule
    assert losses["dense"] != losses["pruned"]


def test_table(measured):
    output = measured[1]
    for text in (
        "GPT-2 tiny, 0.1 M parameters, 2 x cpu, eager",
        "compute alone",
        "of it",
        "density",
        "wrote gpt2-tiny",
    ):
        assert text in output, output
    assert len(re.findall(r"^│ \w[^│]*│ +\d+ │", output, re.M)) == 4, output
    assert re.search(r"^Exposed, best bucket size of each: dense .* ms", output, re.M), output


def test_figure(measured, results):
    pytest.importorskip("matplotlib", reason="the figure is drawn by it")
    csv = measured[0]
    drawn = csv.with_suffix(".png")
    command = [sys.executable, str(EXAMPLE / "figure.py"), str(csv), str(csv), "-o", str(drawn)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0 and "8 bars" in done.stdout, done.stderr
    assert drawn.read_bytes()[:4] == b"\x89PNG"
    other = csv.with_name("other.csv")
    other.write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match="not a CSV of measure"):
        results.read_csv(other)


def test_the_peak_of_memory_is_that_of_the_steps_after_the_warm_up(results):
    """Its measurement begins after the warm-up, in which DDP makes its buckets anew."""
    import modes

    calls = []
    fake = SimpleNamespace(next_batch=lambda: None, step=lambda exchange: calls.append("step"))
    with modes.Training.stepper(fake, True, False, lambda: calls.append("reset")) as step:
        step()
    assert calls == ["step", "step", "step", "reset", "step"]


@pytest.mark.parametrize("dense", [False, True])
def test_training_lowers_the_loss(tmp_path, dense):
    status, output = torchrun(tmp_path, "train.py", "--size", "tiny", "--steps", "40", *(["--dense"] if dense else []))
    assert status == 0, output
    losses = [float(text) for text in re.findall(r"loss (\d+\.\d+)", output)]
    assert len(losses) == 4 and losses[-1] < 4.0 < math.log(256), output
    assert ("of the gradient sent" in output) != dense


@pytest.mark.parametrize(
    ("args", "text"),
    [
        ("--modes dense,sparse", "sparse is not one of dense, tuned, pruned, momentum"),
        ("--buckets 25,0", "wanted sizes in MB"),
        ("--modes tuned,pruned:x", "wanted sizes in MB"),
        ("--variant graph --device cpu", "CUDA graphs need --device cuda"),
        ("--csv no/such/x.csv --device cpu", "there is no folder no/such"),
        ("--device cuda", "wanted one for each of the 99 processes"),
    ],
)
def test_wrong_arguments(monkeypatch, capsys, results, args, text):
    import measure

    monkeypatch.setattr(sys, "argv", ["measure.py", *args.split()])
    for name, value in (("RANK", "98"), ("LOCAL_RANK", "98"), ("LOCAL_WORLD_SIZE", "99")):
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit, match="2"):
        measure.arguments()
    assert text in capsys.readouterr().err
    monkeypatch.delenv("RANK")
    monkeypatch.setattr(sys, "argv", ["measure.py"])
    with pytest.raises(SystemExit, match="2"):
        measure.arguments()
    assert "start it by torchrun: torchrun --nproc-per-node 1 measure.py" in capsys.readouterr().err
