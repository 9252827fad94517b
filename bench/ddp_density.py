"""The density that PrunedGradients sends, step by step: gradients of a real GPT, and random ones.

    torchrun --nproc-per-node 1 bench/ddp_density.py [--size medium] [--densities 0.01,0.001] [--steps 500]

One rank: what is in the gradients after the exchange is what was sent. Rank 0 prints for each run the range of two
means over the pruned parameters, divided by the density asked for: weighted by their elements, and not weighted.
"""

import argparse
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import spccl
from spccl.bench import report

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples" / "gpt2"))
import tokens
from gpt import GPT, SIZES

MIN_NUMEL = 4096  # smaller parameters, and those with one dimension, are sent whole


@dataclass(frozen=True)
class Row:
    """One step. sent: entries sent over entries of all pruned parameters. mean, least, most: over the parameters."""

    gradients: str
    density: float
    step: int
    loss: float
    sent: float
    mean: float
    least: float
    most: float


class RandomGradients(torch.nn.Module):
    """A GPT's parameters, whose gradients are new random numbers in each step, of another size for each parameter."""

    def __init__(self, gpt: GPT):
        super().__init__()
        self.gpt = gpt

    def forward(self) -> torch.Tensor:
        parameters = list(self.gpt.parameters())
        return sum((p * torch.randn_like(p)).sum() * 2.0 ** (i % 7) for i, p in enumerate(parameters))


def sent_per_parameter(model: torch.nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    """Entries sent, and entries, of each pruned parameter, float64 [n_parameters] on the host."""
    pruned = [p for p in model.parameters() if p.dim() > 1 and p.numel() >= MIN_NUMEL]
    sent = torch.stack([torch.count_nonzero(p.grad) for p in pruned]).double().cpu()
    return sent, torch.tensor([p.numel() for p in pruned], dtype=torch.float64)


def run(gradients: str, density: float, args: argparse.Namespace, device: torch.device) -> list[Row]:
    size = SIZES[args.size]
    with device:
        gpt = GPT(size)
    module = gpt if gradients == "real" else RandomGradients(gpt)
    model = DistributedDataParallel(module, bucket_cap_mb=128, gradient_as_bucket_view=True)
    spccl.ddp.PrunedGradients(density=density, min_numel=MIN_NUMEL, momentum=args.momentum).register(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr if gradients == "real" else 0.0)
    text = tokens.load("python", size.vocab).to(device)
    batches = tokens.Batches(text, args.micro_batch, min(512, size.context), seed=1)
    rows = []
    for step in range(1, args.steps + 1):
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = model(*batches()) if gradients == "real" else model()
        loss.backward()
        sent, elems = sent_per_parameter(gpt)
        share = sent / elems
        total = float(sent.sum() / elems.sum())
        means = (total, float(share.mean()), float(share.min()), float(share.max()))
        rows.append(Row(gradients, density, step, round(loss.item(), 5), *(round(x, 7) for x in means)))
        optimizer.step()
        optimizer.zero_grad()
    return rows


def summary(rows: list[Row], seconds: float) -> str:
    after = rows[10:]
    first = rows[0]
    text = [f"{first.gradients} gradients, density {first.density:g}, {len(rows)} steps in {seconds:.0f} s"]
    for name in ("sent", "mean"):
        ratios = sorted(getattr(row, name) / first.density for row in after)
        outside = sum(not 0.8 <= ratio <= 1.2 for ratio in ratios)
        what = "weighted by elements" if name == "sent" else "not weighted"
        text.append(
            f"  mean over parameters, {what}, over density, steps 11 on: {ratios[0]:.3f} to {ratios[-1]:.3f}, "
            f"median {ratios[len(ratios) // 2]:.3f}; outside 0.8 to 1.2: {outside}"
        )
    least, most = min(row.least for row in after), max(row.most for row in after)
    text.append(f"  one parameter in one step: {least / first.density:.3f} to {most / first.density:.3f}")
    text.append(f"  loss {first.loss:.3f} at first, {rows[-1].loss:.3f} at last")
    return "\n".join(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="medium")
    parser.add_argument("--densities", default="0.01,0.001")
    parser.add_argument("--gradients", default="real,random")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--momentum", type=float, default=0.0)
    parser.add_argument("--micro-batch", type=int, default=2)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--csv", type=Path)
    args = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("spccl")
    if dist.get_world_size() != 1 or args.steps <= 10:
        parser.error(f"wanted 1 rank and more than 10 steps, got {dist.get_world_size()} and {args.steps}")
    facts = report.machine() | {"command": report.command().replace("spccl", Path(sys.argv[0]).name, 1)}
    if on_gpu:
        facts["gpu"] = torch.cuda.get_device_name()
    rows: list[Row] = []
    for gradients in args.gradients.split(","):
        for density in map(float, args.densities.split(",")):
            began = time.perf_counter()
            mine = run(gradients, density, args, device)
            print(summary(mine, time.perf_counter() - began), flush=True)
            rows += mine
            if args.csv:
                args.csv.write_text(report.to_csv(rows, facts))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
