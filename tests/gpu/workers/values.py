"""Cases: the four collectives on CUDA tensors give the bits that docs/TORCH.md promises."""

from __future__ import annotations

import random

import torch
import torch.distributed as dist
from gpu_common import DEVICE, KINDS, cuda, main, patterned, same
from workers.common import FLOATS, INTEGERS, OPS, RANK, WORLD, made, reduced

MOVED = (*FLOATS, *INTEGERS, torch.bool, torch.complex64, torch.complex128, torch.uint16, torch.float8_e4m3fn)
SIZES = (0, 1, 31, 4097, 70001, 1 << 20)


def inputs(shape, dtype, seed=0):
    return [made(r, shape, dtype, seed=seed) for r in range(WORLD)]


def all_reduce_values():
    for dtype in (*FLOATS, *INTEGERS):
        for name, op in OPS.items():
            for size in SIZES if dtype in (torch.float32, torch.bfloat16) and name == "sum" else (1, 4097):
                xs = inputs(size, dtype)
                x = cuda(xs[RANK])
                assert dist.all_reduce(x, op) is None
                same(x, reduced(xs, name), f"all_reduce {dtype} {name} {size}")


def reduce_scatter_values():
    for dtype in (*FLOATS, *INTEGERS):
        for name, op in OPS.items():
            for size in SIZES if dtype == torch.float32 and name == "sum" else (33,):
                xs = inputs((WORLD, size), dtype)
                want = reduced(xs, name)[RANK]
                out = torch.full((size,), 7, dtype=dtype, device=DEVICE)
                dist.reduce_scatter_tensor(out, cuda(xs[RANK]), op)
                same(out, want, f"reduce_scatter_tensor {dtype} {name} {size}")
        out = torch.full((33,), 7, dtype=dtype, device=DEVICE)
        xs = inputs((WORLD, 33), dtype, seed=1)
        dist.reduce_scatter(out, [cuda(part) for part in xs[RANK]])
        same(out, reduced(xs, "sum")[RANK], f"reduce_scatter of a list {dtype}")


def all_gather_values():
    for dtype in MOVED:
        for size in SIZES if dtype == torch.float32 else (1, 4097):
            xs = inputs(size, dtype)
            out = torch.ones((WORLD, size), dtype=torch.uint8, device=DEVICE).to(dtype)
            dist.all_gather_into_tensor(out.view(-1), cuda(xs[RANK]))
            same(out, torch.stack(xs), f"all_gather_into_tensor {dtype} {size}")
        outs = [torch.ones(4097, dtype=torch.uint8, device=DEVICE).to(dtype) for _ in range(WORLD)]
        xs = inputs(4097, dtype, seed=1)
        dist.all_gather(outs, cuda(xs[RANK]))
        for r in range(WORLD):
            same(outs[r], xs[r], f"all_gather {dtype} of rank {r}")


def broadcast_values():
    for dtype in MOVED:
        for root in range(WORLD):
            xs = inputs(4097, dtype, seed=root)
            x = cuda(xs[RANK])
            dist.broadcast(x, root)
            same(x, xs[root], f"broadcast {dtype} from {root}")
    for size in SIZES:
        x = cuda(made(RANK, size, torch.float32))
        dist.broadcast(x, WORLD - 1)
        same(x, made(WORLD - 1, size, torch.float32), f"broadcast of {size}")


def special_bits():
    """-0.0, payloads of quiet and signalling NaN, infinities, denormals: moved unchanged, reduced as on the CPU."""
    raw = [0x80000000, 0x7FC12345, 0xFFC00001, 0x7F812345, 0xFF800000, 0x7F800000, 0x00000001, 0x807FFFFF, 0]
    g = torch.Generator().manual_seed(RANK)
    for dtype, integer in (
        (torch.float32, torch.int32),
        (torch.float16, torch.int16),
        (torch.bfloat16, torch.int16),
        (torch.float64, torch.int64),
    ):
        if dtype == torch.float32:
            pool = torch.tensor(raw).to(torch.int32)
        elif dtype == torch.float64:
            pool = torch.tensor([-(2**63), 0x7FF8000000012345, 0x7FF0000000012345, 0x7FF0000000000000, 1, 0])
        elif dtype == torch.float16:
            pool = torch.tensor([0x8000, 0x7E12, 0xFE01, 0x7C12, 0xFC00, 0x7C00, 1, 0x83FF, 0]).to(torch.int16)
        else:
            pool = torch.tensor([0x8000, 0x7FC1, 0xFFC1, 0x7F81, 0xFF80, 0x7F80, 1, 0x807F, 0]).to(torch.int16)
        x = pool[torch.randint(pool.numel(), (20000,), generator=g)].to(integer).view(dtype)
        outs = [torch.empty(WORLD * 20000, dtype=dtype, device=d) for d in ("cpu", DEVICE)]
        for out in outs:
            dist.all_gather_into_tensor(out, x.to(out.device))
        same(outs[1], outs[0], f"all_gather of special {dtype}")
        same(outs[1].view(WORLD, -1)[RANK], x, f"own part of special {dtype}")
        for name, op in OPS.items():
            host, device = x.clone(), cuda(x)
            dist.all_reduce(host, op)
            dist.all_reduce(device, op)
            same(device, host, f"all_reduce({name}) of special {dtype}")
        device = cuda(x)
        dist.broadcast(device, 0)
        host = x.clone()
        dist.broadcast(host, 0)
        same(device, host, f"broadcast of special {dtype}")


def any_size_density_and_pattern():
    """Random draws of all parameters. The same call on CPU tensors must give the same bits."""
    rng = random.Random(20)
    dtypes = (*FLOATS, *INTEGERS)
    for draw in range(120):
        dtype = rng.choice(dtypes)
        kind = rng.choice(KINDS)
        density = rng.choice([0.0, 0.001, 0.01, 0.1, 0.3, 0.5, 0.9, 1.0])
        numel = int(2 ** rng.uniform(0, 20)) + rng.randint(0, 3)
        offset = rng.choice([0, 0, 1, 3])
        what = f"draw {draw}: {dtype} {kind} {density} x {numel} + {offset}"
        op = rng.choice(list(OPS))
        call = rng.choice(["all_reduce", "all_gather", "reduce_scatter", "broadcast"])
        root = rng.randrange(WORLD)
        total = numel * WORLD if call == "reduce_scatter" else numel
        host = patterned(kind, RANK, WORLD, total, density, dtype, draw)
        device = cuda(host, offset)
        results = []
        for x in (host, device):
            if call == "all_reduce":
                dist.all_reduce(x, OPS[op])
                results.append(x)
            elif call == "broadcast":
                dist.broadcast(x, root)
                results.append(x)
            elif call == "all_gather":
                out = torch.full((WORLD * numel + offset,), 3, dtype=dtype, device=x.device)[offset:]
                dist.all_gather_into_tensor(out, x)
                results.append(out)
            else:
                out = torch.full((numel + offset,), 3, dtype=dtype, device=x.device)[offset:]
                dist.reduce_scatter_tensor(out, x, OPS[op])
                results.append(out)
        same(results[1], results[0], f"{what} {call} {op}")


def large():
    """Arrays with many slices per worker, in every pattern."""
    for kind, dtype in (*((kind, torch.float32) for kind in KINDS), ("random", torch.bfloat16)):
        numel = (24 << 20) // dtype.itemsize + 5
        xs = [patterned(kind, r, WORLD, numel, 0.02, dtype, 5) for r in range(WORLD)]
        x = cuda(xs[RANK])
        dist.all_reduce(x)
        same(x, reduced(xs, "sum"), f"large all_reduce {kind} {dtype}")
        out = torch.empty(WORLD * numel, dtype=dtype, device=DEVICE)
        dist.all_gather_into_tensor(out, cuda(xs[RANK]))
        same(out, torch.cat(xs), f"large all_gather {kind} {dtype}")


def in_place_and_layouts():
    xs = inputs(5001, torch.float32)
    whole = torch.zeros(WORLD, 5001, device=DEVICE)
    whole[RANK] = cuda(xs[RANK])
    dist.all_gather_into_tensor(whole.view(-1), whole[RANK])
    same(whole, torch.stack(xs), "all_gather_into_tensor in place")
    whole = torch.zeros(WORLD, 5001, device=DEVICE)
    whole[RANK] = cuda(xs[RANK])
    dist.all_gather(list(whole), whole[RANK])
    same(whole, torch.stack(xs), "all_gather in place into views of one buffer")
    ins = inputs((WORLD, 5001), torch.float32)
    mine = cuda(ins[RANK])
    dist.reduce_scatter_tensor(mine[RANK], mine)
    same(mine[RANK], reduced(ins, "sum")[RANK], "reduce_scatter_tensor in place")

    ys = inputs((40, 60), torch.float32, seed=2)
    want = reduced(ys, "sum")
    x = cuda(ys[RANK]).t().contiguous().t()
    for async_op in (False, True):
        y = x.clone()
        work = dist.all_reduce(y, async_op=async_op)
        if async_op:
            work.wait()
        same(y, want, "transposed")
        assert y.stride() == (1, 40)
    wide = torch.zeros(40, 120, device=DEVICE)
    wide[:, ::2] = cuda(ys[RANK])
    dist.all_reduce(wide[:, ::2])
    same(wide[:, ::2], want, "every second column")
    assert not wide[:, 1::2].any(), "columns between were written"
    outs = [torch.zeros(60, 40, device=DEVICE).t() for _ in range(WORLD)]
    dist.all_gather(outs, cuda(ys[RANK]))
    same(torch.stack(outs), torch.stack(ys), "all_gather into transposed tensors")
    with torch.no_grad():
        leaf = torch.nn.Parameter(cuda(ys[RANK]).t())
    dist.broadcast(leaf, 0)
    same(leaf.detach(), ys[0].t(), "a strided parameter")
    with torch.inference_mode():
        t = torch.ones(6, 2, device=DEVICE)[:, 0]
        dist.all_reduce(t, async_op=True).wait()
        assert torch.equal(t, torch.full((6,), float(WORLD), device=DEVICE))


def equals_nccl():
    """Integers, and floats of two ranks, must equal NCCL's. Floats of more ranks may differ by rounding, because NCCL
    adds in another order."""
    nccl = dist.new_group(backend="nccl")
    for dtype in (torch.int32, torch.float32, torch.bfloat16):
        for numel in (1000, 1 << 20):
            x = cuda(patterned("random", RANK, WORLD, numel * WORLD, 0.1, dtype, 3))
            ours, theirs = x.clone(), x.clone()
            dist.all_reduce(ours)
            dist.all_reduce(theirs, group=nccl)
            if dtype == torch.int32 or (WORLD <= 2 and dtype == torch.float32):
                assert torch.equal(ours, theirs), f"{dtype} {numel}"
            else:
                torch.testing.assert_close(ours, theirs, rtol=4e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-2)
            gathers = [torch.empty(WORLD * x.numel(), dtype=dtype, device=DEVICE) for _ in range(2)]
            dist.all_gather_into_tensor(gathers[0], x)
            dist.all_gather_into_tensor(gathers[1], x, group=nccl)
            same(gathers[0], gathers[1], f"all_gather {dtype} {numel}")
    dist.destroy_process_group(nccl)


if __name__ == "__main__":
    main(
        [
            all_reduce_values,
            reduce_scatter_values,
            all_gather_values,
            broadcast_values,
            special_bits,
            any_size_density_and_pattern,
            large,
            in_place_and_layouts,
            equals_nccl,
        ]
    )
