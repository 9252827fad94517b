"""Bytes per change of real Adam steps: a small GPT, fp32 masters that are published as bfloat16.

    python bench/quality/changes.py [--model 3m] [--warm-up 60] [--steps 12] [--rates 3e-6 1e-6 3e-7]

After a warm-up at 3e-4, as of pretraining, AdamW goes on with each learning rate from the same weights and moments,
first some steps that are not counted. Each step is encoded as `spccl.sync` does. Prints what share of the weights
changed their bits, and the bytes for each change, coded and with raw values, headers of frames included.
"""

import argparse
import copy
import statistics

import model as gpt
import text as texts
import torch

from spccl.sync import delta

SKIPPED = 3  # steps after a change of the learning rate


class Trainer:
    """fp32 masters, products in bfloat16."""

    def __init__(self, name: str, batch: int):
        self.size, self.batch = gpt.SIZES[name], batch
        self.layout = gpt.Layout(self.size)
        flat = self.layout.initial(self.size, seed=1)
        self.masters = {n: x[0].clone().requires_grad_() for n, x in self.layout.views(flat[None]).items()}
        self.opt = torch.optim.AdamW(self.masters.values(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1)
        self.text = texts.read_text(4_000_000)[0]
        self.random = torch.Generator().manual_seed(2)

    def step(self, rate: float) -> float:
        for group in self.opt.param_groups:
            group["lr"] = rate
        starts = torch.randint(0, self.text.numel() - self.size.context - 1, (1, self.batch), generator=self.random)
        weights = {n: x[None].to(torch.bfloat16) if x.dim() > 1 else x[None] for n, x in self.masters.items()}
        loss = gpt.losses(weights, texts.windows(self.text, starts, self.size.context + 1), self.size).sum()
        self.opt.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(list(self.masters.values()), 1.0)
        self.opt.step()
        return loss.item()

    def published(self) -> dict[str, torch.Tensor]:
        return {n: x.detach().to(torch.bfloat16).flatten() for n, x in self.masters.items()}


def encoded(now: dict[str, torch.Tensor], base: dict[str, torch.Tensor], raw: bool) -> tuple[int, int]:
    """Changes and bytes of the frames of a step."""
    sources = [delta.Source(now[name], base[name]) for name in now]
    out = torch.empty(sum(delta.bound(x.numel(), x.dtype) + 8 for x in base.values()), dtype=torch.uint8)
    frames = [f for f in delta.encode(sources, 1, out, raw=raw) if f.nnz]
    return sum(f.nnz for f in frames), sum(f.bytes for f in frames)


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--model", choices=list(gpt.SIZES), default="3m")
    p.add_argument("--batch", type=int, default=8)
    p.add_argument("--warm-up", type=int, default=60)
    p.add_argument("--steps", type=int, default=12)
    p.add_argument("--rates", type=float, nargs="+", default=[3e-6, 1e-6, 3e-7])
    args = p.parse_args()
    trainer = Trainer(args.model, args.batch)
    loss = 0.0
    for _ in range(args.warm_up):
        loss = trainer.step(3e-4)
    n_elems = sum(x.numel() for x in trainer.masters.values())
    print(f"{args.model}: {n_elems} weights, loss {loss:.3f} after {args.warm_up} steps", flush=True)
    saved = copy.deepcopy((trainer.masters, trainer.opt.state_dict()))
    for rate in args.rates:
        for name, x in saved[0].items():
            trainer.masters[name].data.copy_(x.data)
        trainer.opt.load_state_dict(copy.deepcopy(saved[1]))
        rows = []
        base = None
        for number in range(SKIPPED + args.steps):
            trainer.step(rate)
            now = trainer.published()
            if number >= SKIPPED:
                (n, coded), (_, raw) = (encoded(now, base, raw) for raw in (False, True))
                rows.append((n / n_elems, coded / n, raw / n))
            base = now
        shares, coded, raw = zip(*rows, strict=True)
        print(
            f"lr {rate:g}: changed {statistics.median(shares):.3%} ({min(shares):.3%} to {max(shares):.3%}), "
            f"{statistics.median(coded):.2f} bytes a change coded ({min(coded):.2f} to {max(coded):.2f}), "
            f"{statistics.median(raw):.2f} raw",
            flush=True,
        )


if __name__ == "__main__":
    main()
