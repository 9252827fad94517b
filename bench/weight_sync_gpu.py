"""Weight sync on one GPU: a delta of a whole model from comparing to the last write, against torch and a peer.

    python bench/weight_sync_gpu.py [--gb 14] [--changed 0.01] [--peer FILE] [--csv FILE]
    torchrun --nproc-per-node 4 bench/weight_sync_gpu.py [--cpu-backend gloo] [...]    one GPU to the others, beside a
                                                                                       dense broadcast

The weights are bfloat16 matrices of 4096 columns, 128 MiB each; a share of them, at random places, takes random bits
that are no NaN. Rows: calls of spccl.sync.delta, for all tensors at once; `torch`: the same by torch's own operations,
tensor by tensor: compare, nonzero, gather (6 bytes a change), and writing with index_put_. --peer: vLLM's file
checkpoint_weight_patch.py, whose load_checkpoint_weight_patches gets the places and values that torch has packed. Times
are medians of 5, on the host's clock between two synchronizations. What was written is compared bit for bit.
Under torchrun rank 0 publishes and the others apply; a time has everything from comparing the weights to the last write
of the slowest rank; what of the base's update is left after the last vote is apart. The dense broadcast is NCCL's; with
--device cpu it is the --cpu-backend's.
"""

from __future__ import annotations

import argparse
import csv
import importlib.util
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from spccl.sync import Publisher, Subscriber, delta

COLUMNS, ROWS, KEY, ROUNDS = 4096, 16384, 1, 5


def median_ms(work: Callable[[], object], before: Callable[[], object] = lambda: None) -> tuple[float, float, float]:
    """Median, least and most of ROUNDS; the first call warms up."""
    times = []
    for i in range(ROUNDS + 1):
        before()
        torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        torch.cuda.synchronize()
        if i:
            times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times), min(times), max(times)


def changed(base: torch.Tensor, share: float, generator: torch.Generator) -> torch.Tensor:
    """A copy of [rows, columns] bfloat16 `base` of which a share of the elements has other bits, none a NaN."""
    places = torch.rand(base.shape, device=base.device, generator=generator) < share
    bits = torch.randint(0, 0x3F80, base.shape, device=base.device, generator=generator, dtype=torch.int16)
    old = base.view(torch.int16)
    return torch.where(places, torch.where(bits == old, bits ^ 1, bits), old).view(torch.bfloat16)


class Receiver(torch.nn.Module):
    """Weights by name, with the loader that the peer calls."""

    def __init__(self, weights: list[torch.Tensor]):
        super().__init__()
        self.weights = {str(i): w for i, w in enumerate(weights)}

    def load_weights(self, named: list[tuple[str, torch.Tensor]]) -> set[str]:
        for name, weight in named:
            self.weights[name].copy_(weight)
        return {name for name, _ in named}


def packed_by_torch(x: list[torch.Tensor], base: list[torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Places (int32) and values of what changed, for each tensor."""
    out = []
    for new, old in zip(x, base, strict=True):
        places = (new.view(torch.int16) != old.view(torch.int16)).view(-1).nonzero()[:, 0]
        out.append((places.int(), new.view(-1)[places]))
    return out


def peer_call(file: Path, model: Receiver, packed: list[tuple[torch.Tensor, torch.Tensor]]) -> Callable[[], object]:
    spec = importlib.util.spec_from_file_location("peer", file)
    assert spec is not None and spec.loader is not None
    peer = importlib.util.module_from_spec(spec)
    sys.modules["peer"] = peer
    spec.loader.exec_module(peer)
    shape = (ROWS, COLUMNS)
    patches = [
        peer.CheckpointWeightPatch(str(i), shape, torch.bfloat16, values, places)
        for i, (places, values) in enumerate(packed)
    ]
    return lambda: peer.load_checkpoint_weight_patches(model, patches)


def require(what: str, got: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    for i, (one, other) in enumerate(zip(got, wanted, strict=True)):
        assert torch.equal(one.view(torch.int16), other.view(torch.int16)), f"{what}: tensor {i} differs"


def restore(live: list[torch.Tensor], base: list[torch.Tensor]) -> None:
    for got, old in zip(live, base, strict=True):
        got.copy_(old)


def ours(raw: bool, share: float, weights: tuple[list[torch.Tensor], ...], row: Callable) -> None:
    """The calls of spccl.sync.delta, with values as they are or as differences."""
    base, x, live = weights
    kind = "raw" if raw else "coded"
    sources = [delta.Source(new, old) for new, old in zip(x, base, strict=True)]
    n_elems = sum(w.numel() for w in x)
    out = torch.empty(round(n_elems * max(0.01, 8 * share)), dtype=torch.uint8, device="cuda")
    frames = delta.encode(sources, KEY, out, raw)
    row(f"encode {kind}", median_ms(lambda: delta.encode(sources, KEY, out, raw)))
    size, nnz = sum(f.bytes for f in frames), sum(f.nnz for f in frames)
    print(f"    {size / nnz:.3f} bytes a change, {nnz} changes")
    targets = [
        delta.Target(out[f.offset : f.offset + f.bytes], w.numel(), w.dtype, [delta.Place.whole(w)])
        for f, w in zip(frames, live, strict=True)
    ]
    row(f"pack {kind}: the list, once", median_ms(lambda: delta.Packed(targets, KEY)))
    plan = delta.Packed(targets, KEY)
    old = torch.empty(delta.old_bytes(plan), dtype=torch.uint8, device="cuda")
    changes = delta.check(plan, KEY, old)
    assert changes == [f.sum_change for f in frames], "check: another sum change than encode's"
    row(f"check {kind}", median_ms(lambda: delta.check(plan, KEY, old)))
    row(f"apply {kind}: the pause", median_ms(lambda: delta.apply(plan), lambda: restore(live, base)))
    require(f"apply {kind}", live, x)
    row(f"undo {kind}", median_ms(lambda: delta.undo(plan, old)))
    require(f"undo {kind}", live, base)


def over_group(args: argparse.Namespace) -> None:
    """The weights of rank 0 to all ranks, changed before each round: over a group of spccl, and whole over NCCL."""
    rank, n_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    on_gpu = args.device == "cuda"
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group(f"cpu:{args.cpu_backend},cuda:nccl" if on_gpu else args.cpu_backend)
    generator = torch.Generator(device).manual_seed(1)
    n = max(1, round(args.gb * 1e9 / (2 * ROWS * COLUMNS)))
    weights = [torch.rand(ROWS, COLUMNS, device=device, generator=generator).bfloat16() for _ in range(n)]

    def timed(work: Callable[[], object]) -> float:
        """Milliseconds of the slowest rank."""
        if on_gpu:
            torch.cuda.synchronize()
        dist.barrier()
        start = time.perf_counter()
        work()
        if on_gpu:
            torch.cuda.synchronize()
        ms = torch.tensor(1e3 * (time.perf_counter() - start))
        dist.all_reduce(ms, dist.ReduceOp.MAX)
        return ms.item()

    named = {str(i): w for i, w in enumerate(weights)}
    one = Publisher(dist.group.WORLD, named) if rank == 0 else Subscriber(dist.group.WORLD, named)
    base: list[float] = []
    if rank == 0:
        advance = one._advance_group

        def advanced(*words: object) -> None:
            start = time.perf_counter()
            advance(*words)
            if on_gpu:
                torch.cuda.synchronize()
            base.append(1e3 * (time.perf_counter() - start))

        one._advance_group = advanced
    step = one.publish if rank == 0 else one.apply
    step()
    ours, dense = [], []
    for _ in range(ROUNDS + 1):
        news = [changed(w, args.changed, generator) for w in weights]
        if rank == 0:
            restore(weights, news)
        ours.append(timed(step))
        require("weight sync", weights, news)
        dense.append(timed(lambda: [dist.broadcast(w, 0) for w in weights]))
    if rank == 0:
        gb = n * ROWS * COLUMNS * 2 / 1e9
        of = f"votes over {args.cpu_backend}, {n_ranks - 1} receivers, {gb:.2f} GB, {args.changed:.2%} changed"
        name = torch.cuda.get_device_name() if on_gpu else "CPU"
        print(f"{name}, {of}, {one.stats()['delta_bytes'] / 1e6:.1f} MB sent to each")
        rows = [("publish, apply; base in it", ours), ("base, after the vote", base), ("dense broadcast", dense)]
        rows = [(what, statistics.median(t[-ROUNDS:]), min(t[-ROUNDS:]), max(t[-ROUNDS:])) for what, t in rows]
        for what, *ms in rows:
            print(f"{what:44s} {ms[0]:10.3f} ms ({ms[1]:.3f} to {ms[2]:.3f})")
        if args.csv:
            write_csv(args.csv, f"gpu: {name}, {of}", rows)
    dist.destroy_process_group()


def write_csv(path: Path, facts: str, rows: list[tuple[str, float, float, float]]) -> None:
    with path.open("w", newline="") as file:
        file.write(f"# {facts}, commit: {os.environ.get('SPCCL_COMMIT', 'unknown')}\n")
        writer = csv.writer(file)
        writer.writerow(["what", "median_ms", "least_ms", "most_ms"])
        writer.writerows([what, *(f"{ms:.3f}" for ms in times)] for what, *times in rows)


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--gb", type=float, default=14.0, help="1e9 bytes of bfloat16")
    p.add_argument("--changed", type=float, default=0.01)
    p.add_argument("--peer", type=Path)
    p.add_argument("--csv", type=Path)
    p.add_argument("--cpu-backend", choices=["spccl", "gloo"], default="spccl", help="for manifests and votes")
    p.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: under torchrun only")
    args = p.parse_args()
    if "RANK" in os.environ:
        over_group(args)
        return
    n = max(1, round(args.gb * 1e9 / (2 * ROWS * COLUMNS)))
    generator = torch.Generator("cuda").manual_seed(1)
    base = [torch.rand(ROWS, COLUMNS, device="cuda", generator=generator).bfloat16() for _ in range(n)]
    x = [changed(b, args.changed, generator) for b in base]
    live = [b.clone() for b in base]
    rows: list[tuple[str, float, float, float]] = []

    def row(what: str, times: tuple[float, float, float]) -> None:
        rows.append((what, *times))
        print(f"{what:44s} {times[0]:10.3f} ms ({times[1]:.3f} to {times[2]:.3f})", flush=True)

    gb = n * ROWS * COLUMNS * 2 / 1e9
    print(f"{torch.cuda.get_device_name()}, {n} tensors, {gb:.2f} GB, {args.changed:.2%} changed")
    for raw in (True, False):
        ours(raw, args.changed, (base, x, live), row)
    packed = packed_by_torch(x, base)
    row("torch: compare, nonzero, gather", median_ms(lambda: packed_by_torch(x, base)))

    def put() -> None:
        for weight, (places, values) in zip(live, packed, strict=True):
            weight.view(-1)[places] = values

    row("torch: index_put_", median_ms(put, lambda: restore(live, base)))
    require("torch", live, x)
    if args.peer:
        call = peer_call(args.peer, Receiver(live), packed)
        row("peer: load_checkpoint_weight_patches", median_ms(call, lambda: restore(live, base)))
        require("peer", live, x)
    if args.csv:
        of = f"{n} tensors of {ROWS} x {COLUMNS} bfloat16, {args.changed} changed"
        write_csv(args.csv, f"gpu: {torch.cuda.get_device_name()}, {of}", rows)


if __name__ == "__main__":
    main()
