"""One rank of one run of the demo. demo.py starts it. Rank 0 prints its progress and results as lines of JSON.

python demo_rank.py dense|pruned RANK WORLD_SIZE STEPS STORE_FILE
"""

import dataclasses
import json
import statistics
import sys
import time

import corpus
import torch
import torch.distributed as dist
from gpt import GPT
from recipe import DENSE, PRUNED, Recipe
from torch.nn.parallel import DistributedDataParallel

import spccl.backend

CONTEXT, BATCH, EVAL_EVERY = 128, 4, 100


def emit(kind: str, **what: object) -> None:
    print(json.dumps({"kind": kind, **what}), flush=True)


class Run:
    """Model, data, recipe and measurements of one rank."""

    def __init__(self, recipe: Recipe, rank: int, n_ranks: int, n_steps: int):
        self.recipe, self.rank, self.n_ranks, self.n_steps = recipe, rank, n_ranks, n_steps
        torch.manual_seed(0)
        self.model = DistributedDataParallel(GPT(context=CONTEXT), gradient_as_bucket_view=True)
        self.optimizer, self.hook = recipe.build(self.model)
        self.train, validation = corpus.load()
        self.generator = torch.Generator().manual_seed(1 + rank)
        self.windows = corpus.windows(validation, 16, CONTEXT, 16)
        self.step_ms: list[float] = []
        self.alone_ms: list[float] = []
        self.together_ms: list[float] = []  # until the slowest rank has computed too
        self.barrier_ms: list[float] = []
        self.wire = {"bytes": 0, "frames": {}}

    def compute(self) -> torch.Tensor:
        loss = self.model(*corpus.batch(self.train, BATCH, CONTEXT, self.generator))
        loss.backward()
        return loss

    def update(self, step: int) -> None:
        if self.hook is None:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.recipe.clip_norm)
        for group in self.optimizer.param_groups:
            group["lr"] = self.recipe.lr_at(step, self.n_steps)
        self.optimizer.step()

    def compute_alone(self, n_steps: int = 8) -> None:
        """Time steps without communication, on all ranks at once, and how long the slowest rank takes. They do not
        change the model or the order of the text.

        The run does this several times, because the load of the machine may change.
        """
        generator_state = self.generator.get_state()
        dist.barrier()
        for _ in range(n_steps):
            began = time.perf_counter()
            with self.model.no_sync():
                self.compute()
            alone = time.perf_counter()
            dist.barrier()
            together = time.perf_counter()
            dist.barrier()  # all ranks are here: the time of a barrier alone
            self.barrier_ms.append((time.perf_counter() - together) * 1e3)
            self.alone_ms.append((alone - began) * 1e3)
            self.together_ms.append((together - began) * 1e3)
            self.optimizer.zero_grad()
        self.generator.set_state(generator_state)

    def validate(self, n_batches: int) -> float:
        """Mean validation loss in nats per byte. Each rank computes a part of the batches."""
        stride = max(1, len(self.windows) // n_batches)
        mine = self.windows[::stride][self.rank :: self.n_ranks]
        with torch.no_grad():
            total = torch.stack([self.model.module(*pair) for pair in mine]).mean()
        dist.all_reduce(total)
        return total.item() / self.n_ranks

    def learn(self) -> None:
        """The training loop. It prints progress and losses, and measures the times and bytes of training steps."""
        before = self.counters()
        for step in range(self.n_steps):
            began = time.perf_counter()
            loss = self.compute()
            self.update(step)
            self.optimizer.zero_grad()
            self.step_ms.append((time.perf_counter() - began) * 1e3)
            if self.rank == 0 and step % 10 == 9:
                emit("step", step=step + 1, loss=loss.item())
            if step % EVAL_EVERY == EVAL_EVERY - 1 or step == self.n_steps - 1:
                self.add_counters(before)
                value = self.validate(len(self.windows) if step == self.n_steps - 1 else 8)
                if self.rank == 0:
                    emit("validation", step=step + 1, loss=value, sent_bytes=self.sent_bytes(step + 1))
                self.compute_alone()
                before = self.counters()

    def counters(self) -> dict | None:
        if self.recipe.backend != "spccl":
            return None
        return dataclasses.asdict(spccl.backend.stats())

    def add_counters(self, before: dict | None) -> None:
        """Add what spccl sent since `before`. The traffic of validation is not counted."""
        if before is None:
            return
        now = self.counters()
        self.wire["bytes"] += now["wire_bytes_sent"] - before["wire_bytes_sent"]
        for name, n in now["frames_sent"].items():
            self.wire["frames"][name] = self.wire["frames"].get(name, 0) + n - before["frames_sent"][name]

    def sent_bytes(self, n_steps: int) -> int:
        """Bytes that this rank has sent in n_steps. spccl counts them. Gloo does not: for Gloo this is what its
        ring all-reduce must send, 2 (ranks - 1) / ranks of the gradient."""
        if self.recipe.backend == "spccl":
            return self.wire["bytes"]
        gradient = sum(p.numel() * p.element_size() for p in self.model.parameters())
        return n_steps * gradient * 2 * (self.n_ranks - 1) // self.n_ranks


def main() -> None:
    name, rank, n_ranks, n_steps = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    torch.set_num_threads(1)
    recipe = {"dense": DENSE, "pruned": PRUNED}[name]
    dist.init_process_group(recipe.backend, init_method=f"file://{sys.argv[5]}", rank=rank, world_size=n_ranks)
    run = Run(recipe, rank, n_ranks, n_steps)
    run.learn()
    if rank == 0:
        hook = run.hook.stats() if run.hook else {}
        emit(
            "done",
            n_parameters=sum(p.numel() for p in run.model.parameters()),
            train_bytes=run.train.numel(),
            compute_ms=statistics.median(run.alone_ms),
            together_ms=max(
                statistics.median(run.alone_ms),
                statistics.median(run.together_ms) - statistics.median(run.barrier_ms),
            ),
            step_ms=statistics.median(run.step_ms),
            sent_bytes_per_step=run.sent_bytes(n_steps) / n_steps,
            frames=run.wire["frames"],
            hook=hook,
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
