"""Train the same small GPT twice on this machine: with dense gradients, then with 99% pruned ones through spccl.

    python demo.py [--steps 1500] [--out FOLDER] [--hosts 4 --rate 1gbit]

There are two ranks with one thread each. With --hosts (as root) there is one rank on each of so many emulated hosts:
network namespaces whose links have that rate. Each step then waits for a network. The text is the source of Python's
own standard library (see corpus.py). The demo prints a table at the end, and writes loss.png and result.json to FOLDER
(default: demo-out/ at the top of the project).
"""

import argparse
import contextlib
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from spccl.bench import hosts

HERE = Path(__file__).resolve().parent
N_RANKS = 2
RUN_TIMEOUT_S = 1200
TITLES = {"dense": "dense (Gloo)", "pruned": "99% pruned (spccl)"}


class Failed(Exception):
    """A rank failed; the text names the rank, its exit status and what it printed."""


def run(name: str, n_steps: int, names: list[str], progress: Progress) -> dict:
    """One run: a rank on each of the emulated hosts `names`, or N_RANKS ranks if there are none.

    Returns {"curve": [[step, loss, sent_bytes], ...], and rank 0's results}.
    """
    n_ranks = len(names) or N_RANKS
    with tempfile.TemporaryDirectory(prefix="spccl-demo-") as folder:
        command = [sys.executable, str(HERE / "demo_rank.py")]
        interface = hosts.IFNAME if names else "lo"
        env = dict(os.environ, OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME=interface, PYTHONUNBUFFERED="1")
        logs = [open(Path(folder) / f"rank-{r}.log", "w+") for r in range(n_ranks)]  # noqa: SIM115
        ranks = []
        try:
            for r in range(n_ranks):
                where = ["ip", "netns", "exec", names[r]] if names else []
                ranks.append(
                    subprocess.Popen(
                        [*where, *command, name, str(r), str(n_ranks), str(n_steps), f"{folder}/store"],
                        stdin=subprocess.DEVNULL,
                        stdout=subprocess.PIPE if r == 0 else logs[r],
                        stderr=logs[r],
                        env=env,
                        text=True,
                    )
                )
            result = follow(name, n_steps, ranks, progress)
            if result is None:
                raise Failed(report(name, ranks, logs))
            return result
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
            for log in logs:
                log.close()


def follow(name: str, n_steps: int, ranks: list[subprocess.Popen], progress: Progress) -> dict | None:
    """Show the messages of rank 0 until all ranks have ended. Returns None if a rank failed or time is up."""
    lines: queue.Queue[str] = queue.Queue()
    threading.Thread(target=lambda: [lines.put(line) for line in ranks[0].stdout], daemon=True).start()
    task = progress.add_task(TITLES[name], total=n_steps, loss="starting")
    result: dict = {"curve": []}
    deadline = time.monotonic() + RUN_TIMEOUT_S
    while time.monotonic() < deadline:
        try:
            message = json.loads(lines.get(timeout=0.1))
        except queue.Empty:
            codes = [rank.poll() for rank in ranks]
            if any(codes):
                return None
            if all(code == 0 for code in codes):
                return result if "done" in result else None
            continue
        kind = message.pop("kind")
        if kind == "step":
            progress.update(task, completed=message["step"], loss=f"loss {message['loss']:.3f}")
        elif kind == "validation":
            step, loss = message["step"], message["loss"]
            result["curve"].append([step, loss, message["sent_bytes"]])
            progress.update(task, completed=step, loss=f"validation {loss:.3f}")
            if not progress.console.is_terminal:  # a log cannot show the progress bar
                progress.console.print(f"{TITLES[name]}: step {step}, validation {loss:.3f}")
        else:
            result.update(message, done=True)
    return None


def report(name: str, ranks: list[subprocess.Popen], logs: list) -> str:
    parts = [f"the {name} run failed"]
    for r, (rank, log) in enumerate(zip(ranks, logs, strict=True)):
        code = rank.poll()
        log.seek(0)
        ended = f"still running after {RUN_TIMEOUT_S} s" if code is None else f"exit status {code}"
        parts.append(f"--- rank {r}: {ended}\n{log.read()[-3000:]}")
    return "\n".join(parts)


def table(dense: dict, pruned: dict) -> Table:
    out = Table(title="What pruning changed", title_justify="left")
    out.add_column("")
    for name in ("dense", "pruned"):
        out.add_column(TITLES[name], justify="right")
    rows = [
        ("validation loss (nats/byte)", lambda r: f"{r['curve'][-1][1]:.3f}"),
        ("time per step", lambda r: f"{r['step_ms']:.1f} ms"),
        ("  computing alone", lambda r: f"{r['compute_ms']:.1f} ms"),
        ("  waiting for slowest rank", lambda r: f"{r['together_ms'] - r['compute_ms']:.1f} ms"),
        ("  exchange, update", lambda r: difference(r["step_ms"], r["together_ms"])),
        ("    of it choosing entries", lambda r: f"{r['hook'].get('select_ms_mean', 0):.1f} ms"),
        ("sent per step and rank", lambda r: bytes_text(r["sent_bytes_per_step"])),
        ("gradient entries sent", lambda r: f"{r['hook'].get('density_mean', 1.0):.2%}"),
        ("slices by wire format", lambda r: mix(r["frames"])),
    ]
    for label, value in rows:
        out.add_row(label, value(dense), value(pruned))
    return out


def difference(step_ms: float, together_ms: float) -> str:
    return f"{step_ms - together_ms:.1f} ms" if step_ms > together_ms else "too little to measure"


def bytes_text(n: float) -> str:
    return f"{n / 1e6:.2f} MB" if n >= 1e6 else f"{n / 1e3:.1f} kB"


def mix(frames: dict[str, int]) -> str:
    """The formats that at least 1% of the slices have, most frequent first, one a line."""
    total = sum(frames.values())
    fractions = sorted(((n / total, name) for name, n in frames.items() if n >= 0.01 * total), reverse=True)
    return "\n".join(f"{name} {fraction:.0%}" for fraction, name in fractions) or "all dense"


def exchange_ms(result: dict) -> float:
    """A step less the time until all ranks have computed: the cores that ranks share are no matter of the network."""
    return result["step_ms"] - result["together_ms"]


def network_summary(dense: dict, pruned: dict, n_hosts: int, rate: str) -> str:
    least = min(exchange_ms(dense), exchange_ms(pruned))
    if least <= 0:
        return "Other programs kept this machine busy: a step took no longer than computing alone. Run it again."
    waiting = [r["step_ms"] - r["compute_ms"] for r in (dense, pruned)]
    return (
        f"{n_hosts} emulated hosts at {rate}: exchange and update took {exchange_ms(dense):.1f} ms a step "
        f"dense and {exchange_ms(pruned):.1f} ms pruned: {exchange_ms(dense) / exchange_ms(pruned):.1f} times less. "
        f"With the waiting for the slowest rank it is {waiting[0]:.1f} and {waiting[1]:.1f} ms: the ranks share this "
        f"machine's cores. Computing alone took {dense['compute_ms']:.1f} and {pruned['compute_ms']:.1f} ms."
    )


def summary(dense: dict, pruned: dict, n_steps: int) -> str:
    a, b = dense["curve"][-1][1], pruned["curve"][-1][1]
    less = dense["sent_bytes_per_step"] / pruned["sent_bytes_per_step"]
    quality = "as good as" if abs(b - a) <= 0.03 else "better than" if b < a else "worse than"
    faster = dense["step_ms"] / pruned["step_ms"]
    speed = f"{faster:.2f} times as fast" if faster >= 1.03 else "no faster" if faster >= 0.97 else "slower"
    # A step computes, chooses entries and exchanges them. Computing alone takes as long only if other programs ran
    # while it was measured.
    busy = any(r["compute_ms"] >= r["step_ms"] - r["hook"].get("select_ms_mean", 0) for r in (dense, pruned))
    times = "Other programs kept this machine busy, so the times above say little. " if busy else ""
    return (
        f"After {n_steps} steps the pruned run is {quality} the dense one ({b:.3f} against {a:.3f}; runs that "
        f"differ only in their seed differ by 0.03), and it sent {less:.0f} times fewer bytes. Its steps were "
        f"{speed}. {times}Two processes of one machine exchange bytes through memory, so fewer bytes save little time "
        "here. Over a network a step waits for the bytes.\n"
        "Each run used its best learning rate from 0.3 to 1.0 (dense 0.4, pruned 0.8). Gloo does not count its "
        "bytes; its number is what its ring all-reduce must send."
    )


def draw(dense: dict, pruned: dict, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (by_step, by_bytes) = pyplot.subplots(1, 2, figsize=(10, 4), sharey=True, layout="constrained")
    for name, result, colour in (("dense", dense, "#4c566a"), ("pruned", pruned, "#d1603d")):
        steps, losses, sent = zip(*result["curve"], strict=True)
        by_step.plot(steps, losses, color=colour, label=TITLES[name])
        by_bytes.plot([s / 1e6 for s in sent], losses, color=colour, label=TITLES[name])
    by_step.set(xlabel="step", ylabel="validation loss, nats per byte")
    by_bytes.set(xlabel="MB sent by each rank (log scale)", xscale="log")
    by_step.set_title("Validation loss by step")
    by_bytes.set_title("Validation loss by bytes sent")
    for axes in (by_step, by_bytes):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    by_step.legend(frameon=False)
    figure.savefig(path, dpi=150)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=1500, help="of each run (default: 1500, about 4 minutes)")
    parser.add_argument("--hosts", type=int, default=0, help="ranks on so many emulated hosts (root, iproute2)")
    parser.add_argument("--rate", default="1gbit", help="of an emulated host's link, as tc writes it (default: 1gbit)")
    parser.add_argument("--out", type=Path, default=HERE.parent.parent / "demo-out")
    args = parser.parse_args()
    if args.steps < 1:
        parser.error(f"--steps {args.steps}: wanted 1 or more")
    console = Console()
    text = "Training a byte-level GPT on Python's standard library"
    console.print(f"{text}: {args.steps} steps on {args.hosts or N_RANKS} ranks, twice.\n")
    began = time.monotonic()
    columns = (
        TextColumn("{task.description:18}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[loss]:16}"),
        TimeRemainingColumn(),
    )
    try:
        args.out.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as stack:
            names = stack.enter_context(hosts.emulated(args.hosts, args.rate)) if args.hosts else []
            progress = stack.enter_context(Progress(*columns, console=console))
            results = {name: run(name, args.steps, names, progress) for name in TITLES}
        draw(results["dense"], results["pruned"], args.out / "loss.png")
        (args.out / "result.json").write_text(json.dumps(results, indent=1) + "\n")
    except (Failed, OSError, ValueError, hosts.CannotEmulate) as error:
        console.print(f"demo: {error}", style="red", markup=False, highlight=False)
        return 1
    except KeyboardInterrupt:
        console.print("demo: interrupted; its ranks are ended")
        return 130
    console.print()
    console.print(table(results["dense"], results["pruned"]))
    if args.hosts:
        text = network_summary(results["dense"], results["pruned"], args.hosts, args.rate)
    else:
        text = summary(results["dense"], results["pruned"], args.steps)
    console.print(text, highlight=False)
    console.print(f"\nCurves: {args.out / 'loss.png'}    took {time.monotonic() - began:.0f} s", soft_wrap=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
