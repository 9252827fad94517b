"""Train one model by several recipes and write loss over steps and bytes.

    python bench/quality/run.py --recipes bench/quality/recipes.txt --out bench/results/quality-NAME.csv [...]

The CSV gets a row per evaluation. Runs that are complete in it are skipped, so a queue that was cut off goes on where
it was. With --checkpoints FOLDER a run goes on from its last evaluation, with the same bits as a run that was not cut
off. Without --checkpoints, a run is not started that would not end within --seconds, going by the longest run so far.
Ends with status 3 if --seconds were over before the queue was done.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import os
import platform
import sys
import time
from pathlib import Path

import torch
from checkpoints import Checkpoint
from model import SIZES, Layout
from recipes import Recipe, named, read_recipes
from simulate import Simulation
from text import read_text
from wire import dense_bytes

COLUMNS = [
    "name", "seed", "steps", "step", "bytes_per_param", "saving", "density",
    "train_loss", "loss", "loss_consolidated", "unsent_ratio", "seconds",
]  # fmt: skip


def arguments() -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--recipes", type=Path, required=True, help="file with a recipe per line (recipes.parse)")
    p.add_argument("--only", default="", help="comma-separated names; the others are skipped")
    p.add_argument("--out", type=Path, required=True)
    p.add_argument("--size", choices=sorted(SIZES), default="25m")
    p.add_argument("--steps", type=int, default=5000)
    p.add_argument("--workers", type=int, default=4)
    p.add_argument("--batch", type=int, default=8, help="windows per worker and step")
    p.add_argument("--seeds", default="0")
    p.add_argument("--evaluate-every", type=int, default=250)
    p.add_argument("--evaluate-windows", type=int, default=256)
    p.add_argument("--final-windows", type=int, default=2048)
    p.add_argument("--text-mb", type=int, default=160)
    p.add_argument("--text-cache", type=Path)
    p.add_argument("--checkpoints", type=Path)
    p.add_argument("--seconds", type=float, default=1e9, help="stop at the first evaluation after so many")
    p.add_argument("--run-seconds", type=float, default=0.0, help="longest run so far, before the first one ended")
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    p.add_argument("--at-once", type=int, default=1, help="runs that share the device; for small models")
    p.add_argument("--no-compile", action="store_true")
    p.add_argument("--no-graph", action="store_true")
    return p.parse_args()


def finished(path: Path) -> set[tuple[str, int, int]]:
    """(name, seed, steps) of the runs that reached their last step."""
    if not path.exists():
        return set()
    with path.open() as file:
        rows = csv.DictReader(line for line in file if not line.startswith("#"))
        return {(r["name"], int(r["seed"]), int(r["steps"])) for r in rows if r["step"] == r["steps"]}


def keep_rows(path: Path, kept: list[dict]) -> None:
    """Leave only the rows of finished runs and `kept` in the CSV: unfinished runs go on from their checkpoints."""
    done = finished(path)
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    facts = [line for line in lines if line.startswith("#")]
    rows = [r for r in csv.DictReader(lines[len(facts) :]) if (r["name"], int(r["seed"]), int(r["steps"])) in done]
    if lines:
        new = path.with_suffix(".new")
        with new.open("w") as file:
            file.writelines(facts)
            writer = csv.DictWriter(file, COLUMNS)
            writer.writeheader()
            writer.writerows(rows + kept)
        new.replace(path)


def start_file(path: Path, facts: dict[str, object]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        with path.open("w") as file:
            file.writelines(f"# {name}: {value}\n" for name, value in facts.items())
            csv.writer(file).writerow(COLUMNS)


def facts_of(args: argparse.Namespace, digest: str, text: torch.Tensor) -> dict[str, object]:
    device = torch.cuda.get_device_name() if args.device == "cuda" else platform.processor() or platform.machine()
    return {
        "commit": os.environ.get("SPCCL_COMMIT", "unknown"),
        "device": device,
        "torch": torch.__version__,
        "model": f"{args.size}, {Layout(SIZES[args.size]).n_params} parameters",
        "workers": args.workers,
        "batch": f"{args.batch} windows of {SIZES[args.size].context} bytes per worker and step",
        "text": f"{len(text)} bytes, digest {digest}",
    }


def checkpoint_of(args: argparse.Namespace, job: tuple[str, Recipe, int]) -> Checkpoint | None:
    name, recipe, seed = job
    if args.checkpoints is None:
        return None
    run = (name, recipe, seed, args.steps, args.size, args.workers, args.batch, args.text_mb, args.evaluate_every)
    return Checkpoint(args.checkpoints / hashlib.sha256(repr(run).encode()).hexdigest()[:16])


class Run:
    """One recipe and seed, from its checkpoint or from the start, to the last step."""

    def __init__(self, args: argparse.Namespace, job: tuple[str, Recipe, int], texts: tuple) -> None:
        self.args, (self.name, self.recipe, self.seed), self.texts = args, job, texts
        on_gpu = args.device == "cuda"
        run = {
            "steps": args.steps, "workers": args.workers, "batch": args.batch, "seed": self.seed,
            "compile": on_gpu and not args.no_compile, "graph": on_gpu and not args.no_graph,
        }  # fmt: skip
        self.sim = Simulation(SIZES[args.size], self.recipe, run, texts[0])
        self.seen, self.spent_s = {"loss": 0.0, "bytes": 0.0, "density": 0.0}, 0.0
        self.seen_step = 0
        self.rows: list[dict[str, object]] = []
        self.checkpoint = checkpoint_of(args, job)
        if self.checkpoint is not None and (saved := self.checkpoint.load()) is not None:
            self.sim.load(saved)
            self.seen, self.spent_s, self.seen_step = saved["seen"], saved["spent_s"], self.sim.step
            self.rows = saved["rows"]

    def row(self) -> dict[str, object]:
        """Evaluate and make a row of the CSV."""
        args, sim = self.args, self.sim
        sums = sim.read_sums()
        since = max(1, sim.step - self.seen_step)
        n = sim.layout.n_params
        sent = max(1.0, sums["bytes"])
        if self.recipe.mode == "dense":
            sent = dense_bytes(n, args.workers) * sim.step
        windows = args.final_windows if sim.step == args.steps else args.evaluate_windows
        row = {
            "name": self.name, "seed": self.seed, "steps": args.steps, "step": sim.step,
            "bytes_per_param": f"{sent / n:.5g}",
            "saving": f"{dense_bytes(n, args.workers) * sim.step / sent:.4g}",
            "density": f"{(sums['density'] - self.seen['density']) / since:.4g}",
            "train_loss": f"{(sums['loss'] - self.seen['loss']) / since:.5f}",
            "loss": f"{sim.evaluate(self.texts[1], windows, False):.5f}",
            "loss_consolidated": f"{sim.evaluate(self.texts[1], windows, True):.5f}",
            "unsent_ratio": f"{sim.norms():.4g}",
            "seconds": f"{self.spent_s:.1f}",
        }  # fmt: skip
        self.seen, self.seen_step = sums, sim.step
        return row

    def record(self, seconds: float) -> bool:
        """After some steps: write a checkpoint and a row. Returns whether the run is to go on."""
        args, sim = self.args, self.sim
        self.spent_s += seconds
        row = self.row()
        self.rows.append(row)
        going = sim.step < args.steps and float(row["loss"]) < 50  # also stops at nan
        if self.checkpoint is not None and going:
            extra = {"seen": self.seen, "spent_s": self.spent_s, "rows": self.rows}
            self.checkpoint.save(sim.save() | extra)
        with args.out.open("a") as file:
            csv.DictWriter(file, COLUMNS).writerow(row)
        if self.checkpoint is not None and not going:
            self.checkpoint.remove()
        if not going:
            print(
                f"{self.name:34s} seed {self.seed} step {sim.step} loss {row['loss']} "
                f"consolidated {row['loss_consolidated']} saving {row['saving']}x density {row['density']} "
                f"unsent {row['unsent_ratio']} {self.spent_s:.1f} s",
                flush=True,
            )
        return going


def wait_for_device() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def go(runs: list[Run], evaluate_every: int, until: float) -> bool:
    """Take all runs to their last step, or to the first evaluation after the time `until`. Returns whether they ended.

    On CUDA each has a stream of its own, so that small kernels overlap.
    """
    streams = [torch.cuda.Stream() if run.args.device == "cuda" else None for run in runs]
    going = list(zip(runs, streams, strict=True))
    wait_for_device()
    while going:
        start = time.monotonic()
        for _ in range(evaluate_every):
            for run, stream in going:
                if run.sim.step < run.args.steps:
                    with torch.cuda.stream(stream):
                        run.sim.advance()
        wait_for_device()
        seconds = time.monotonic() - start
        going = [(run, stream) for run, stream in going if run.record(seconds)]
        if going and time.monotonic() > until:
            return False
    return True


def main() -> None:
    args = arguments()
    torch.set_float32_matmul_precision("high")
    train, held_out, digest = read_text(args.text_mb * 1_000_000, args.text_cache)
    texts = (train.to(args.device), held_out.to(args.device))
    until = time.monotonic() + args.seconds
    recipes = read_recipes(args.recipes)
    wanted = [(name, recipes[name]) for name in named(args.only, recipes)]
    done = finished(args.out)
    jobs = [(name, recipe, int(seed)) for seed in args.seeds.split(",") for name, recipe in wanted]
    jobs = [job for job in jobs if (job[0], job[2], args.steps) not in done]
    saved = [c.load() for job in jobs if (c := checkpoint_of(args, job)) is not None]
    keep_rows(args.out, [row for state in saved if state is not None for row in state["rows"]])
    del saved
    start_file(args.out, facts_of(args, digest, train))
    longest = 0.0 if args.checkpoints else args.run_seconds
    for i in range(0, len(jobs), args.at_once):
        now, start = jobs[i : i + args.at_once], time.monotonic()
        ended = start + longest < until
        ended = ended and go([Run(args, job, texts) for job in now], args.evaluate_every, until)
        if args.checkpoints is None:
            longest = max(longest, time.monotonic() - start)
        if not ended:
            print(f"time is over; left: {', '.join(f'{name} seed {seed}' for name, _, seed in jobs[i:])}", flush=True)
            sys.exit(3)
    print("the queue is done", flush=True)


if __name__ == "__main__":
    main()
