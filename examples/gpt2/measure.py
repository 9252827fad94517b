"""Where the time of a GPT-2 step goes under DDP: computing, exchange of gradients, pruning. See README.md.

    torchrun --nproc-per-node 4 measure.py --size xl
    torchrun --nproc-per-node 2 measure.py --size tiny --device cpu

All ranks run every mode in turns, --rounds times. Rank 0 prints a table and writes a CSV.
"""

import argparse
import gc
import os
import shlex
import sys
import time
from dataclasses import replace
from pathlib import Path

import results
import tokens
import torch
import torch.distributed as dist
from gpt import GPT, SIZES
from modes import DEFAULT_BUCKET_MB, MODES, VARIANTS, Mode, Training
from results import Run

N_BATCHES = 8


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="xl")
    parser.add_argument("--variant", choices=VARIANTS, default="eager", help="of the step; README.md explains them")
    parser.add_argument("--modes", default=",".join(MODES), help="default: all; momentum:128 has that bucket size only")
    parser.add_argument("--buckets", default="25,128,512", help="bucket sizes in MB of all modes but dense")
    parser.add_argument("--max-ctas", type=int, help="PrunedGradients(max_ctas=...): thread blocks of its all-reduces")
    parser.add_argument("--density", type=float, default=0.01, help="share of the gradient that is sent")
    parser.add_argument("--rounds", type=int, default=5, help="runs of each mode, in turns")
    parser.add_argument("--prune-rounds", type=int, help="rounds in which pruning alone is measured (all)")
    parser.add_argument("--seconds", type=float, help="begin no round after so many seconds")
    parser.add_argument("--steps", type=int, default=5, help="timed steps of a run, with exchange and without")
    parser.add_argument("--micro-batch", type=int, help="sequences per rank and step (2; large-batch: 16)")
    parser.add_argument("--context", type=int, default=512, help="tokens per sequence, at most those of the size")
    parser.add_argument("--data", choices=["random", "python"], default="random")
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--csv", type=Path, help="file to write (gpt2-SIZE-VARIANT.csv)")
    args = parser.parse_args()
    named = [mode.partition(":") for mode in args.modes.split(",")]
    wrong = {name for name, _, _ in named} - set(MODES)
    if wrong:
        parser.error(f"--modes {args.modes}: {', '.join(sorted(wrong))} is not one of {', '.join(MODES)}")
    sizes = args.buckets.split(",") + [size for _, colon, size in named if colon]
    if not all(size.isdigit() and int(size) > 0 for size in sizes):
        parser.error(f"--buckets {args.buckets} --modes {args.modes}: wanted sizes in MB, as in 25,128,512")
    if min(args.rounds, args.steps) < 1:
        parser.error(f"--rounds {args.rounds} --steps {args.steps}: wanted 1 or more")
    if args.variant == "graph" and args.device == "cpu":
        parser.error("--variant graph: CUDA graphs need --device cuda")
    if "RANK" not in os.environ:
        parser.error(f"start it by torchrun: torchrun --nproc-per-node 1 {shlex.join(sys.argv)}")
    if args.device == "cuda" and int(os.environ["LOCAL_RANK"]) >= torch.cuda.device_count():
        parser.error(
            f"--device cuda: torch sees {torch.cuda.device_count()} GPUs, wanted one for each of the "
            f"{os.environ['LOCAL_WORLD_SIZE']} processes; --nproc-per-node has their number"
        )
    args.micro_batch = args.micro_batch or (16 if args.variant == "large-batch" else 2)
    args.context = min(args.context, SIZES[args.size].context)
    args.csv = args.csv or Path(f"gpt2-{args.size}-{args.variant}.csv")
    if not args.csv.parent.is_dir():
        parser.error(f"--csv {args.csv}: there is no folder {args.csv.parent}")
    return args


def cases(args: argparse.Namespace) -> list[tuple[str, int]]:
    """(mode, bucket size in MB) of each row."""
    found = []
    for mode in args.modes.split(","):
        name, _, only = mode.partition(":")
        default = str(DEFAULT_BUCKET_MB) if name == "dense" else args.buckets
        found += [(name, int(mb)) for mb in (only or default).split(",")]
    return found


class Study:
    """The model, the groups and the data of one rank, and how one mode is measured."""

    def __init__(self, args: argparse.Namespace):
        self.args = args
        self.device = torch.device(args.device, int(os.environ["LOCAL_RANK"]) if args.device == "cuda" else None)
        if args.device == "cuda":
            torch.cuda.set_device(self.device)
            # All work goes to one stream that is not the default one: a capture allows no other.
            torch.cuda.set_stream(torch.cuda.Stream())
        dist.init_process_group("spccl")
        rank = dist.get_rank()
        self.spccl = dist.group.WORLD
        backends = {"spccl": "spccl", "dense": "nccl" if args.device == "cuda" else "gloo"}
        self.dense = dist.new_group(backend=backends["dense"])
        self.alone = {
            name: dist.new_group([rank], backend=backend, use_local_synchronization=True)
            for name, backend in backends.items()
        }
        self.without_hook_s: dict[int, float] = {}  # by bucket size: a step in a group of one rank, of this round
        size = SIZES[args.size]
        with self.device:
            self.model = GPT(size)
        self.of_model = torch.cuda.memory_allocated() if args.device == "cuda" else 0  # bytes
        if args.variant == "compile":
            torch._dynamo.config.optimize_ddp = False  # a block is smaller than a bucket: DDP need not split it
            for block in self.model.blocks:
                block.compile()
        text = tokens.load(args.data, size.vocab).to(self.device)
        draw = tokens.Batches(text, args.micro_batch, args.context, seed=1 + rank)
        self.batches = [draw() for _ in range(N_BATCHES)]

    def training(self, mode: Mode, bucket_mb: int, group: dist.ProcessGroup) -> Training:
        args = self.args
        if mode.hook is not None:
            mode = replace(mode, hook=mode.hook | {"density": args.density, "max_ctas": args.max_ctas})
        return Training(self.model, mode, group, self.batches, bucket_mb=bucket_mb, lr=args.lr)

    def seconds(self, training: Training, exchange: bool) -> tuple[float, float]:
        """Seconds of a step, the mean of --steps in a row, and the loss of the last."""
        with training.stepper(exchange, self.args.variant == "graph", self.reset_peak) as step:
            self.synchronize()
            began = time.perf_counter()
            for _ in range(self.args.steps):
                training.next_batch()
                loss = step()
            self.synchronize(barrier=False)
            return (time.perf_counter() - began) / self.args.steps, loss.item()

    def alone_seconds(self, mode: Mode, bucket_mb: int) -> float:
        """Seconds of a step in a group of this rank alone: DDP and the hook do their work, and nothing is sent."""
        self.free()
        group = self.alone["dense" if mode.hook is None else "spccl"]
        return self.seconds(self.training(mode, bucket_mb, group), exchange=True)[0]

    def synchronize(self, barrier: bool = True) -> None:
        if barrier:
            dist.barrier()
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def run(self, name: str, bucket_mb: int, prune_alone: bool) -> Run:
        """Measure one mode once, and pruning alone if asked to. The result is this rank's."""
        mode, on_gpu = MODES[name], self.device.type == "cuda"
        self.free()
        left_over = torch.cuda.memory_allocated() - self.of_model if on_gpu else 0
        training = self.training(mode, bucket_mb, self.dense if mode.hook is None else self.spccl)
        step_s, loss = self.seconds(training, exchange=True)
        stats = training.hook.stats() if training.hook else {}
        n_buckets = training.n_buckets()
        memory = (torch.cuda.max_memory_allocated() - left_over) / 2**30 if on_gpu else None
        compute_s, _ = self.seconds(training, exchange=False)
        del training
        prune_s = None
        if mode.hook is not None and prune_alone:
            with_hook_s = self.alone_seconds(mode, bucket_mb) if dist.get_world_size() > 1 else step_s
            if bucket_mb not in self.without_hook_s:
                self.without_hook_s[bucket_mb] = self.alone_seconds(replace(mode, hook=None), bucket_mb)
            prune_s = with_hook_s - self.without_hook_s[bucket_mb]
        timed_on_host = bool(stats) and self.args.variant != "graph"  # replays do not call the hook
        return Run(
            step_ms=1e3 * step_s,
            compute_ms=1e3 * compute_s,
            prune_ms=None if prune_s is None else 1e3 * prune_s,
            n_buckets=n_buckets,
            density_sent=stats.get("density_pruned") if stats else 1.0,
            hook_us=1e3 * stats["select_ms"] / n_buckets if timed_on_host else None,
            memory_gib=memory,
            loss=loss,
        )

    def free(self) -> None:
        """Give back what the run before left. NCCL's thread holds its last buckets for a while: wait for that."""
        self.model.zero_grad()
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.synchronize()
            until = time.monotonic() + 3
            while torch.cuda.memory_allocated() > self.of_model and time.monotonic() < until:
                time.sleep(0.05)
            torch.cuda.empty_cache()

    def reset_peak(self) -> None:
        """Forget the peak of the warm-up, in which DDP makes its buckets anew: what is reported is that of a step."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()


def run_round(study: Study, number: int, runs: dict[tuple[str, int], list[Run]]) -> None:
    """One run of each case on all ranks. Every rank gets the same `runs`."""
    study.without_hook_s.clear()
    prune_alone = study.args.prune_rounds is None or number <= study.args.prune_rounds
    for (name, mb), done in runs.items():
        ranks: list[Run] = [None] * dist.get_world_size()
        dist.all_gather_object(ranks, study.run(name, mb, prune_alone))
        done.append(results.slowest(ranks))
        if dist.get_rank() == 0:
            print(
                f"round {number} of {study.args.rounds}: {name} {mb} MB: step {done[-1].step_ms:.1f} ms, "
                f"compute alone {done[-1].compute_ms:.1f} ms, loss {done[-1].loss:.3f}",
                flush=True,
            )


def main() -> None:
    args = arguments()
    began = time.monotonic()
    study = Study(args)
    runs: dict[tuple[str, int], list[Run]] = {case: [] for case in cases(args)}
    setting = {
        "size": args.size,
        "n_parameters": sum(p.numel() for p in study.model.parameters()),
        "variant": args.variant,
        "device": args.device,
        "ranks": dist.get_world_size(),
        "micro_batch": args.micro_batch,
        "context": args.context,
        "density": args.density,
        "max_ctas": args.max_ctas or 0,
        "steps": args.steps,
    }
    rows = []
    for number in range(1, args.rounds + 1):
        late = [args.seconds is not None and time.monotonic() - began > args.seconds]
        dist.broadcast_object_list(late, src=0)  # all ranks stop after the same round
        if late[0] and rows:
            break
        run_round(study, number, runs)
        rows = [results.make_row(setting, name, mb, done) for (name, mb), done in runs.items()]
        if dist.get_rank() == 0:
            results.write_csv(args.csv, rows)  # after each round: who stops it keeps what is there
    if dist.get_rank() == 0:
        results.show(rows)
        print(f"wrote {args.csv}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
