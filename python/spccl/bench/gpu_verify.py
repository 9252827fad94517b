"""`spccl verify --device cuda`: checks the cases of verify.py on GPU memory, bit by bit, through torch.distributed.

One process per GPU. The expected results are those of verify.py, computed by numpy on the host. Also runs on CPU
tensors, so that it can be tested without a GPU. Needs torch.
"""

from __future__ import annotations

import datetime
import os
import tempfile
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from .. import verify
from .._launch import Rank, run_ranks
from ..frame import FORMATS
from . import gpu_torch
from .start import torch_store


def _bits(x: torch.Tensor, like: verify.Array) -> verify.Array:
    return x.view(torch.uint8).cpu().numpy().view(like.dtype)


def _tensor(bits: verify.Array, dtype: str, device: torch.device) -> torch.Tensor:
    x = torch.empty(bits.size, dtype=gpu_torch.DTYPES[dtype], device=device)
    x.view(torch.uint8).copy_(torch.from_numpy(bits.view(np.uint8).copy()))
    return x


def _poisoned(n_elems: int, dtype: str, device: torch.device) -> torch.Tensor:
    out = torch.empty(n_elems, dtype=gpu_torch.DTYPES[dtype], device=device)
    gpu_torch.poison(out)
    return out


def start(
    case: verify.Case, index: int, inputs: list[verify.Array], rank: int, device: torch.device, group: Any
) -> Callable[[], str | None]:
    """Start the case on `inputs[rank]`. Returns what waits, and says what is wrong, or None.

    torch's all-reduce is always in place.
    """
    mine, n = inputs[rank], case.n_elems
    x = _tensor(mine, case.dtype, device)
    own = slice(rank * n, (rank + 1) * n)
    root = index % len(inputs)
    source: torch.Tensor | None = x
    if case.collective == "all_gather":
        out = _poisoned(len(inputs) * n, case.dtype, device)
        if case.in_place:
            out[own].copy_(x)
            x, source = out[own], None
    elif case.collective == "reduce_scatter":
        out = x[own] if case.in_place else _poisoned(n, case.dtype, device)
        source = None if case.in_place else x
    else:
        is_input = case.collective == "all_reduce" or rank == root
        out, source = x if is_input else _poisoned(n, case.dtype, device), None
    wanted = verify.expected(case, inputs, rank, root)
    work = gpu_torch.starter(case, group, x, out, root, async_op=True)()
    return lambda: _problem(work, out, wanted, source, mine)


def _problem(
    work: Any, out: torch.Tensor, wanted: verify.Array, source: torch.Tensor | None, before: verify.Array
) -> str | None:
    """Wait and check. Returns what is wrong, or None. source: the input, if it must not change."""
    work.wait()
    text = verify.difference(_bits(out, wanted), wanted)
    if text is None and source is not None:
        changed = verify.difference(_bits(source, before), before)
        text = None if changed is None else f"the input was changed: {changed}"
    return text


def _verify_rank(rank: Rank, device_name: str, store_file: str, timeout_s: float) -> verify.Outcome:
    device = gpu_torch.take_device(device_name, rank.rank)
    timeout = datetime.timedelta(seconds=timeout_s)
    store = torch_store(store_file, rank.world_size, timeout_s)
    dist.init_process_group("gloo", store=store, rank=rank.rank, world_size=rank.world_size, timeout=timeout)
    group = gpu_torch.spccl_group(0, timeout)
    tallies, examples = verify.run_cases(
        rank, lambda case, index, inputs: start(case, index, inputs, rank.rank, device, group)
    )
    frames = gpu_torch.counters(group, device_name)()[1:]
    links = [f"rank {rank.rank}: {_path(group, device)}"]
    dist.barrier()
    dist.destroy_process_group()
    return tallies, examples, links, {k: int(n) for k, n in zip(FORMATS, frames, strict=True)}


def _path(group: Any, device: torch.device) -> str:
    from .. import backend

    if device.type != "cuda":
        return "host memory"
    c = backend.cuda_stats(group)
    name = torch.cuda.get_device_name(device)
    return f"GPU {c.device} ({name}), {c.n_ctas} thread blocks, {c.inbox_bytes / 2**20:.1f} MiB for peers"


def verify_gpus(
    world_size: int, *, deadline_s: float = 300.0, on_progress: Any = None, device: str = "cuda"
) -> verify.Result:
    """Run every case over `world_size` new processes, one per GPU.

    Raises: RanksFailed if a rank failed otherwise than by a wrong answer, took too long, or spccl's own kernels
    did not do the work.
    """
    with tempfile.TemporaryDirectory(prefix="spccl-verify-") as folder:
        outcomes = run_ranks(
            _verify_rank,
            world_size,
            (device, os.path.join(folder, "store"), min(60.0, deadline_s)),
            deadline_s=deadline_s,
            on_message=None if on_progress is None else lambda _rank, n: on_progress(n),
        )
    return verify.merged(outcomes)
