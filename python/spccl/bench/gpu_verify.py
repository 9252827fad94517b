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
from .._launch import Rank
from ..frame import FORMATS
from . import gpu_torch
from .start import torch_store


def _bits(x: torch.Tensor, like: verify.Array) -> verify.Array:
    return x.view(torch.uint8).cpu().numpy().view(like.dtype)


def _tensor(bits: verify.Array, dtype: str, device: torch.device) -> torch.Tensor:
    x = torch.empty(bits.size, dtype=gpu_torch.DTYPES[dtype], device=device)
    x.view(torch.uint8).copy_(torch.from_numpy(bits.view(np.uint8).copy()))
    return x


def start(
    case: verify.Case, index: int, inputs: list[verify.Array], rank: int, device: torch.device, group: Any
) -> Callable[[], str | None]:
    """Start the case on `inputs[rank]`. Returns what waits, and says what is wrong, or None.

    torch's all-reduce is always in place.
    """
    root = index % len(inputs)
    in_place = case.in_place or case.collective == "all_reduce"
    x, out, stays = verify.buffers(case, inputs, rank, root, lambda bits: _tensor(bits, case.dtype, device), in_place)
    wanted = verify.expected(case, inputs, rank, root)
    work = gpu_torch.starter(case, group, x, out, root, async_op=True)()
    return lambda: verify.problem(work, out, wanted, x if stays else None, inputs[rank], _bits)


def _verify_rank(rank: Rank, device_name: str, store_file: str, timeout_s: float) -> verify.Outcome:
    device = gpu_torch.take_device(device_name, rank.rank)
    timeout = datetime.timedelta(seconds=timeout_s)
    store = torch_store(store_file, rank.world_size, timeout_s)
    dist.init_process_group("gloo", store=store, rank=rank.rank, world_size=rank.world_size, timeout=timeout)
    group = gpu_torch.spccl_group(timeout)
    tallies, examples = verify.run_cases(
        rank, lambda case, index, inputs: start(case, index, inputs, rank.rank, device, group)
    )
    frames = gpu_torch.counters(group, device_name)()[2:]
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
        args = (device, os.path.join(folder, "store"), min(60.0, deadline_s))
        return verify.run(_verify_rank, world_size, args, deadline_s, on_progress)
