"""What `SparseSync` costs on one device beside its optimizer, with one rank: the exchange is the identity.

    python bench/sparse_sync.py [--device cuda] [--millions 512] [--density 0.01] [--csv FILE]

Between measurements each weight moves by a random amount, as an optimizer's step would move it. `bytes` are what the
target of 24 bytes per float32 parameter allows. Those that must move are the two weights read, the buffer written and
read (16), plus own weights where an entry is sent and both weights where one arrives, in sectors of 32 bytes. `share`
is bytes per second over those of a copy in the same run.
"""

import argparse
import csv
import statistics
import time
from collections.abc import Callable

import torch

from spccl.optim import SparseSync

SIDE = 4096
REPEATS = 10


def seconds(device: torch.device, work: Callable[[], None]) -> float:
    """Time of one call; on CUDA between two events."""
    if device.type != "cuda":
        began = time.perf_counter()
        work()
        return time.perf_counter() - began
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    work()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def median(device: torch.device, work: Callable[[], None], before: Callable[[], None] = lambda: None) -> tuple:
    """Median, least and most seconds of `work`, each after a call of `before`; two calls warm up."""
    times = []
    for i in range(REPEATS + 2):
        before()
        taken = seconds(device, work)
        if i >= 2:
            times.append(taken)
    return statistics.median(times), min(times), max(times)


class Rows:
    """What was measured, printed as it comes."""

    def __init__(self, device: torch.device, n: int, density: float):
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
        self.fixed = {"device": name, "parameters": n, "density": density}
        self.rows: list[dict] = []

    def add(self, what: str, times: tuple, bytes_each: float) -> None:
        """A row from the median, least and most seconds and the bytes per parameter."""
        rate = bytes_each * self.fixed["parameters"] / times[0] / 1e9
        ms = dict(zip(("ms", "ms_least", "ms_most"), (round(t * 1e3, 4) for t in times), strict=True))
        share = rate / self.rows[0]["gb_s"] if self.rows else 1.0
        rates = {"bytes": bytes_each, "gb_s": round(rate, 1), "share": round(share, 3)}
        self.rows.append({"what": what, **self.fixed, **ms, **rates})
        print(self.rows[-1], flush=True)

    def save(self, path: str) -> None:
        with open(path, "a", newline="") as file:
            writer = csv.DictWriter(file, self.rows[0])
            writer.writeheader()
            writer.writerows(self.rows)


def copy_time(device: torch.device, n: int) -> tuple:
    """Time to copy n floats."""
    source = torch.empty(n // 4, device=device)
    target = torch.empty_like(source)
    return median(device, lambda: [target.copy_(source) for _ in range(4)])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--millions", type=int, default=512, help="parameters, in 2^20")
    parser.add_argument("--density", type=float, default=0.01)
    parser.add_argument("--bucket-mb", type=float, default=256)
    parser.add_argument("--csv", help="append the rows to this file")
    args = parser.parse_args()
    device = torch.device(args.device, 0) if args.device == "cuda" else torch.device(args.device)
    count = max(1, args.millions * 2**20 // SIDE**2)
    params = [torch.nn.Parameter(torch.randn(SIDE, SIDE, device=device) * 0.02) for _ in range(count)]
    n = count * SIDE**2
    for p in params:
        p.grad = torch.randn_like(p)
    rows = Rows(device, n, args.density)
    row = rows.add
    row("copy", copy_time(device, n), 8)
    noise = torch.randn(SIDE, SIDE, device=device)

    @torch.no_grad()
    def move() -> None:
        for i, p in enumerate(params):
            p.addcmul_(noise, noise.roll(i), value=1e-4)

    inner = torch.optim.AdamW(params, lr=1e-4, **({"fused": True} if device.type == "cuda" else {}))
    opt = SparseSync(inner, args.density, check_every=0, norm_every=0, check_finite=False, bucket_mb=args.bucket_mb)
    for _ in range(3):
        move()
        opt.step()
    with torch.no_grad():
        row("wrapper: exchange", median(device, lambda: opt._exchange(args.density), move), 24)
        print("density sent:", opt.stats()["density_sent"], flush=True)
        scratch = opt.transfers.scratch
        pairs = [(b, scratch[b.device, b.globals.dtype][i % 2][: b.length]) for i, b in enumerate(opt.buckets)]
        send = median(device, lambda: [b.select(s, args.density, 1.0, opt.settings) for b, s in pairs], move)
        row("select alone", send, 12)
        row("apply alone", median(device, lambda: [b.apply(s, opt.settings) for b, s in pairs]), 4)
    row("AdamW alone", median(device, opt._stepper.step), 28)
    row("AdamW and wrapper", median(device, opt.step), 28 + 24)
    opt._moment, opt.ranks.world_size = "corrected", 4  # as on 4 ranks, but nothing is exchanged
    opt.ranks.all_reduce = lambda buffer, average: None
    row("the same, corrected second moment", median(device, opt.step), 28 + 24)
    opt._moment = "local"
    object.__setattr__(opt.settings, "check_finite", True)
    row("the same, check_finite", median(device, opt.step), 28 + 24 + 4)
    if args.csv:
        rows.save(args.csv)


if __name__ == "__main__":
    main()
