"""Used by every worker: joining the group, running cases, inputs and expected results.

Every rank can make every rank's input (`made`). So each rank computes the expected result itself, in rank order as
docs/ALGORITHMS.md says, and compares its own result with it.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
FOLDER = os.environ["SPCCL_TEST_FOLDER"]
SEED = int(os.environ.get("SPCCL_TEST_SEED", "0"))  # the same on all ranks
FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)
SIZES = (0, 1, 31, 4097, 70001)


def report(case: str, **what: object) -> None:
    # One write, with its newline first: C++ may have left a line unfinished.
    sys.stdout.write("\n@case " + json.dumps({"case": case, **what}) + "\n")
    sys.stdout.flush()


def join(backend: str = "spccl", timeout_s: float = 180, name: str = "store", **kwargs: object) -> None:
    dist.init_process_group(
        backend,
        init_method=f"file://{FOLDER}/{name}",
        rank=RANK,
        world_size=WORLD,
        timeout=timedelta(seconds=timeout_s),
        **kwargs,
    )


def held() -> tuple[int, int, int]:
    """Number of file descriptors, of threads and of mapped segments of transport shm of this process."""
    with open("/proc/self/maps") as maps:
        segments = sum("/memfd:spccl" in line for line in maps)
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), segments


def wait_for(true, within_s: float = 5) -> bool:
    """Poll until `true()`; a thread that has ended stays in /proc for a moment. Returns False after `within_s`."""
    deadline = time.monotonic() + within_s
    while not true():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def tell(what: str) -> None:
    """Let await_told(what) return, on any rank."""
    Path(FOLDER, what).touch()


def await_told(what: str) -> None:
    assert wait_for(Path(FOLDER, what).exists, 60), f"no rank told: {what}"


def main(cases: list[Callable[[], dict | None]], backend: str = "spccl") -> None:
    """Run all cases, or those named on the command line. Exits with 1 at the first case that fails on this rank."""
    wanted = sys.argv[1:]
    if os.environ.get("SPCCL_TEST_DEVICE") == "cuda":
        torch.cuda.set_device(RANK % torch.cuda.device_count())
    join(backend)
    for case in cases:
        if wanted and case.__name__ not in wanted:
            continue
        started = time.monotonic()
        try:
            extra = case() or {}
        except BaseException:
            report(case.__name__, ok=False, error=traceback.format_exc())
            os._exit(1)  # the peers then see that the links are closed, and end
        report(case.__name__, ok=True, seconds=round(time.monotonic() - started, 3), **extra)
    dist.destroy_process_group()


@contextlib.contextmanager
def raises(kind: type[BaseException], *words: str):
    """The block must raise `kind` with every word of `words` in its text."""
    try:
        yield
    except kind as error:
        missing = [w for w in words if w not in str(error)]
        assert not missing, f"no {missing} in: {error}"
        return
    raise AssertionError(f"nothing raised, wanted {kind.__name__}")


def made(rank: int, shape: int | tuple[int, ...], dtype: torch.dtype, zeros: float = 0.8, seed: int = 0):
    """Rank `rank`'s input: random values, a fraction `zeros` of them zero. Floats have some -0.0."""
    shape = (shape,) if isinstance(shape, int) else shape
    g = torch.Generator().manual_seed((SEED + 1000 * seed + rank) % (1 << 63))
    keep = torch.rand(shape, generator=g) >= zeros
    if dtype == torch.bool:
        return keep
    if dtype.is_complex:
        return torch.where(keep, torch.randn(shape, generator=g, dtype=dtype), 0)
    if dtype.is_floating_point:
        x = torch.where(keep, torch.randn(shape, generator=g, dtype=torch.float64), 0.0)
        x = torch.where(torch.rand(shape, generator=g) < 0.02, -0.0, x)
        return x.to(dtype)
    low = 0 if dtype in (torch.uint8, torch.uint16, torch.uint32, torch.uint64) else -3
    x = torch.randint(low, 4, shape, generator=g)
    return torch.where(keep, x, 0).to(dtype)


def reduced(inputs: list[torch.Tensor], op: str) -> torch.Tensor:
    """The expected reduction: in rank order from +0.0; 16-bit floats are added in float32 and rounded once."""
    dtype = inputs[0].dtype
    wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    wide_inputs = [x.to(wide) for x in inputs]
    if op in ("sum", "avg"):
        total = torch.zeros_like(wide_inputs[0])
        for x in wide_inputs:
            total = total + x
        if op == "avg":
            n = len(inputs)
            total = total / n if dtype.is_floating_point else total.div(n, rounding_mode="trunc")
    elif op == "product":
        total = wide_inputs[0]
        for x in wide_inputs[1:]:
            total = total * x
    else:
        total = wide_inputs[0]
        for x in wide_inputs[1:]:
            # equal values: the lowest rank's bits stay
            better = x < total if op == "min" else x > total
            total = torch.where(better, x, total)
    return total.to(dtype)


OPS = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.AVG,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "product": dist.ReduceOp.PRODUCT,
}


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(-1).view(torch.uint8)


def same_bits(got: torch.Tensor, want: torch.Tensor, what: str) -> None:
    assert got.shape == want.shape and got.dtype == want.dtype, f"{what}: {got.shape} {want.shape}"
    if torch.equal(bits(got), bits(want)):
        return
    g, w = got.reshape(-1), want.reshape(-1)
    wrong = (bits(got).view(g.numel(), -1) != bits(want).view(g.numel(), -1)).any(1).nonzero().view(-1)
    i = int(wrong[0])
    raise AssertionError(f"{what}: {wrong.numel()} of {g.numel()} elements, first [{i}]: got {g[i]}, wanted {w[i]}")


def same_everywhere(x: torch.Tensor, what: str) -> None:
    """Check that all ranks hold the same bits. The ranks compare them by all_gather_object."""
    all_bits: list = [None] * WORLD
    dist.all_gather_object(all_bits, bits(x).numpy().tobytes())
    assert all(b == all_bits[0] for b in all_bits), f"{what}: ranks differ"
