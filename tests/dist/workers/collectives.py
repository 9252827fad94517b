"""Cases: collectives that spccl runs, through torch.distributed: values, layouts, async, futures, bad arguments."""

from __future__ import annotations

import threading
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from workers.common import (
    FLOATS,
    INTEGERS,
    OPS,
    RANK,
    SIZES,
    WORLD,
    await_told,
    made,
    main,
    raises,
    reduced,
    same_bits,
    tell,
)

MOVED = (*FLOATS, *INTEGERS, torch.bool, torch.complex64, torch.complex128, torch.uint16, torch.float8_e4m3fn)


def inputs(shape, dtype, seed=0):
    return [made(r, shape, dtype, seed=seed) for r in range(WORLD)]


def all_reduce_values():
    for dtype in (*FLOATS, *INTEGERS):
        for name, op in OPS.items():
            for size in SIZES if dtype == torch.float32 else (1, 4097):
                xs = inputs(size, dtype)
                x = xs[RANK].clone()
                assert dist.all_reduce(x, op) is None
                same_bits(x, reduced(xs, name), f"all_reduce {dtype} {name} {size}")


def reduce_scatter_values():
    for dtype in (*FLOATS, *INTEGERS):
        for name, op in OPS.items():
            for size in SIZES if dtype == torch.float32 else (33,):
                xs = inputs((WORLD, size), dtype)
                want = reduced(xs, name)[RANK]
                out = torch.full((size,), 7, dtype=dtype)
                dist.reduce_scatter_tensor(out, xs[RANK].clone(), op)
                same_bits(out, want, f"reduce_scatter_tensor {dtype} {name} {size}")
                out = torch.full((size,), 7, dtype=dtype)
                dist.reduce_scatter(out, [part.clone() for part in xs[RANK]], op)
                same_bits(out, want, f"reduce_scatter {dtype} {name} {size}")


def all_gather_values():
    for dtype in MOVED:
        for size in SIZES if dtype == torch.float32 else (1, 4097):
            xs = inputs(size, dtype)
            out = torch.ones((WORLD, size), dtype=torch.uint8).to(dtype)
            dist.all_gather_into_tensor(out.view(-1), xs[RANK])
            same_bits(out, torch.stack(xs), f"all_gather_into_tensor {dtype} {size}")
            outs = [torch.ones(size, dtype=torch.uint8).to(dtype) for _ in range(WORLD)]
            dist.all_gather(outs, xs[RANK])
            for r in range(WORLD):
                same_bits(outs[r], xs[r], f"all_gather {dtype} {size} of rank {r}")


def broadcast_values():
    for dtype in MOVED:
        for root in range(WORLD):
            xs = inputs(4097, dtype, seed=root)
            x = xs[RANK].clone()
            dist.broadcast(x, root)
            same_bits(x, xs[root], f"broadcast {dtype} from {root}")
    for size in SIZES:
        x = made(RANK, size, torch.float32)
        dist.broadcast(x, WORLD - 1)
        same_bits(x, made(WORLD - 1, size, torch.float32), f"broadcast of {size}")


def special_values_survive_gather():
    raw = torch.tensor([0x80000000, 0x7FC12345, 0xFF800000, 0x00000001, 0x7F800000, 0], dtype=torch.int64)
    x = raw.to(torch.int32).view(torch.float32)
    out = torch.zeros(WORLD * 6)
    dist.all_gather_into_tensor(out, x)
    same_bits(out, x.repeat(WORLD), "-0.0, NaN payload, infinities, denormal")


def in_place():
    xs = inputs(5000, torch.float32)
    whole = torch.zeros(WORLD, 5000)
    whole[RANK] = xs[RANK]
    dist.all_gather_into_tensor(whole.view(-1), whole[RANK])
    same_bits(whole, torch.stack(xs), "all_gather_into_tensor in place")
    whole = torch.zeros(WORLD, 5000)
    whole[RANK] = xs[RANK]
    dist.all_gather(list(whole), whole[RANK])
    same_bits(whole, torch.stack(xs), "all_gather in place into views of one buffer")
    ins = inputs((WORLD, 5000), torch.float32)
    mine = ins[RANK].clone()
    dist.reduce_scatter_tensor(mine[RANK], mine)
    same_bits(mine[RANK], reduced(ins, "sum")[RANK], "reduce_scatter_tensor in place")


def layouts():
    """Strided, transposed, channels-last, conjugated and misaligned tensors are copied in and out."""
    xs = inputs((40, 60), torch.float32)
    want = reduced(xs, "sum")
    x = xs[RANK].t().contiguous().t()
    dist.all_reduce(x)
    same_bits(x, want, "transposed")
    assert x.stride() == (1, 40)
    wide = torch.zeros(40, 120)
    wide[:, ::2] = xs[RANK]
    view = wide[:, ::2]
    dist.all_reduce(view)
    same_bits(wide[:, ::2], want, "every second column")
    assert not wide[:, 1::2].any(), "columns between were written"
    images = [made(r, (2, 3, 5, 7), torch.float32) for r in range(WORLD)]
    x = images[RANK].to(memory_format=torch.channels_last)
    dist.broadcast(x, 1)
    same_bits(x, images[1], "channels_last broadcast")
    out = torch.zeros(60, WORLD * 40).t()
    dist.all_gather_into_tensor(out, xs[RANK].t().contiguous().t())
    same_bits(out, torch.cat(xs), "all_gather_into_tensor into a transposed tensor")
    outs = [torch.zeros(60, 40).t() for _ in range(WORLD)]
    dist.all_gather(outs, xs[RANK])
    same_bits(torch.stack(outs), torch.stack(xs), "all_gather into transposed tensors")
    parts = [torch.zeros(40, 2)[:, 0] for _ in range(WORLD)]
    out = torch.zeros(80)[::2]
    for p, row in zip(parts, xs[RANK][:WORLD, :40], strict=True):
        p.copy_(row)
    dist.reduce_scatter(out, parts)
    same_bits(out, want[RANK, :40], "reduce_scatter with strided parts and output")
    odd = torch.frombuffer(bytearray(4 * 101 + 1), dtype=torch.float32, offset=1)
    odd.fill_(RANK + 1.0)
    dist.all_reduce(odd)
    assert torch.equal(odd, torch.full((odd.numel(),), sum(range(1, WORLD + 1)) * 1.0)), "misaligned"
    with torch.no_grad():
        leaf = torch.nn.Parameter(xs[RANK].t().contiguous().t())
    dist.broadcast(leaf, 0)
    same_bits(leaf.detach(), xs[0], "a strided parameter")
    lazy = made(0, 100, torch.complex64).conj().imag  # torch negates it only when it is read
    assert lazy.is_neg()
    outs = [torch.zeros(100) for _ in range(WORLD)]
    dist.all_gather(outs, lazy)
    same_bits(outs[1], lazy.resolve_neg().contiguous(), "lazily negated input")


def inference_mode():
    """Tensors of inference mode may be written only in that mode. spccl writes them from any thread."""
    with torch.inference_mode():
        for async_op in (False, True):
            plain, strided = torch.ones(6), torch.ones(6, 2)[:, 0]
            coo = torch.eye(3).to_sparse_coo()
            works = [dist.all_reduce(t, async_op=async_op) for t in (plain, strided, coo)]
            if async_op:
                finish(works)
            for t in (plain, strided):
                assert torch.equal(t, torch.full((6,), float(WORLD))), (async_op, t)
            assert torch.equal(coo.to_dense(), WORLD * torch.eye(3))
        normal = torch.zeros(WORLD)
    outside = torch.nn.Parameter(torch.ones(6, 2))
    with torch.inference_mode():
        dist.broadcast(outside[:, 0], 0)
        dist.all_gather_into_tensor(normal, torch.full((1,), float(RANK)))
    assert normal.tolist() == [float(r) for r in range(WORLD)]
    assert torch.is_grad_enabled() and not torch.is_inference_mode_enabled()


def finish(works):
    """Poll until all works are complete, so that another thread copies the outputs; then call wait()."""
    deadline = time.monotonic() + 30
    for work in works:
        while not work.is_completed():
            assert time.monotonic() < deadline
            time.sleep(0.001)
        work.wait()


def premul_sum():
    for dtype in FLOATS:
        xs = inputs(1000, dtype)
        x = xs[RANK].clone()
        dist.all_reduce(x, dist._make_nccl_premul_sum(0.5))
        same_bits(x, reduced([v * 0.5 for v in xs], "sum"), f"premul_sum {dtype}")
    whole = inputs((WORLD, 50), torch.float32)
    out = torch.zeros(50)
    keep = whole[RANK].clone()
    dist.reduce_scatter_tensor(out, keep, dist._make_nccl_premul_sum(torch.tensor(0.25)))
    same_bits(out, reduced([v * 0.25 for v in whole], "sum")[RANK], "premul_sum by a tensor")
    same_bits(keep, whole[RANK], "input of reduce_scatter is not changed")


def many_in_flight():
    xs = [inputs(20000, torch.float32, seed=s) for s in range(12)]
    tensors = [x[RANK].clone() for x in xs]
    works = [dist.all_reduce(t, async_op=True) for t in tensors]
    for i in reversed(range(12)):
        works[i].wait()
        assert works[i].is_completed() and works[i].is_success()
        same_bits(tensors[i], reduced(xs[i], "sum"), f"collective {i} of 12 in flight")
    gathered = [torch.zeros(WORLD * 20000) for _ in range(4)]
    works = [dist.all_gather_into_tensor(g, x[RANK], async_op=True) for g, x in zip(gathered, xs, strict=False)]
    for g, x, w in zip(gathered, xs, works, strict=False):
        w.wait()
        same_bits(g, torch.cat(x), "gathers in flight")


def dropped_work():
    """The program drops the Work and the tensors. spccl keeps the memory until it is done with it."""
    for s in range(20):
        dist.all_reduce(made(RANK, 50000, torch.float32, seed=s), async_op=True)
        dist.all_gather(
            [torch.zeros(100, 2)[:, 0] for _ in range(WORLD)], made(RANK, 100, torch.float32), async_op=True
        )
    x = torch.ones(1)
    dist.all_reduce(x)
    assert x.item() == WORLD


def polling():
    xs = inputs((WORLD, 300), torch.float32)
    outs = [torch.zeros(300, 2)[:, 0] for _ in range(WORLD)]  # copied out before is_completed() is true
    work = dist.all_gather(outs, xs[RANK][0], async_op=True)
    deadline = time.monotonic() + 30
    while not work.is_completed():
        assert time.monotonic() < deadline
        time.sleep(0.001)
    same_bits(torch.stack(outs), torch.stack([x[0] for x in xs]), "polled, never waited")
    assert [t.data_ptr() for t in work.result()] == [t.data_ptr() for t in outs]


def futures():
    order: list[int] = []
    tensors = [torch.full((1000,), float(i)) for i in range(8)]
    works = [dist.all_reduce(t, async_op=True) for t in tensors]

    def then(i):
        def run(future):
            order.append(i)
            return future.value()[0] * 2

        return run

    chained = [w.get_future().then(then(i)) for i, w in enumerate(works)]
    for i, future in enumerate(chained):
        assert torch.equal(future.wait(), torch.full((1000,), 2.0 * WORLD * i))
    assert sorted(order) == list(range(8))
    work = dist.all_reduce(torch.ones(1), async_op=True)
    work.wait()
    assert work.get_future().wait()[0].item() == WORLD, "a future asked for after the end"
    assert work.get_future().done()


def slow_callback():
    """A callback that blocks delays no collective, because callbacks run on a thread of their own."""
    release = threading.Event()
    ended = None
    if RANK == 0:  # the other ranks join later, so the callback is attached before the collective ends
        work = dist.all_reduce(torch.ones(1), async_op=True)
        ended = work.get_future().then(lambda f: release.wait(20))
        tell("attached")
    else:
        await_told("attached")
        dist.all_reduce(torch.ones(1))
    for _ in range(3):
        dist.all_reduce(torch.ones(1000))
        dist.all_reduce(torch.ones(1000), async_op=True).wait()
    release.set()
    assert ended is None or ended.wait() is True, "the collectives waited for the callback"


def wait_timeout():
    """A wait with a short timeout raises. The work goes on and may be waited for again."""
    x = torch.ones(100)
    if RANK == 0:
        work = dist.all_reduce(x, async_op=True)
        with raises(dist.DistBackendError, "all_reduce", "100 x Float", "300 ms", "rank 0"):
            work.wait(timedelta(milliseconds=300))
        assert not work.is_completed()
        tell("timed_out")
        work.wait()
    else:
        await_told("timed_out")
        dist.all_reduce(x)
    assert torch.equal(x, torch.full((100,), float(WORLD)))


def coalesced():
    from torch.distributed.distributed_c10d import _coalescing_manager

    xs = [inputs(n, torch.float32, seed=n) for n in (5, 5000, 1)]
    tensors = [x[RANK].clone() for x in xs]
    with _coalescing_manager():
        for t in tensors:
            dist.all_reduce(t)
    for t, x in zip(tensors, xs, strict=True):
        same_bits(t, reduced(x, "sum"), "all_reduce coalesced")
    outs = [torch.zeros(WORLD * x[0].numel()) for x in xs]
    with _coalescing_manager(async_ops=True) as manager:
        for o, x in zip(outs, xs, strict=True):
            dist.all_gather_into_tensor(o, x[RANK])
    manager.wait()
    for o, x in zip(outs, xs, strict=True):
        same_bits(o, torch.cat(x), "all_gather_into_tensor coalesced")
    ins = [inputs((WORLD, n), torch.float32, seed=n) for n in (5, 5000)]
    outs = [torch.zeros(x[0].shape[1]) for x in ins]
    with _coalescing_manager():
        for o, x in zip(outs, ins, strict=True):
            dist.reduce_scatter_tensor(o, x[RANK].clone())
    for o, x in zip(outs, ins, strict=True):
        same_bits(o, reduced(x, "sum")[RANK], "reduce_scatter_tensor coalesced")
    # An exception inside a batch leaves the batch open. The next batch must still be complete.
    group, cpu, t = dist.group.WORLD, torch.device("cpu"), torch.ones(7)
    group._start_coalescing(cpu)
    dist.all_reduce(t, async_op=True).wait()
    group._start_coalescing(cpu)
    dist.all_reduce(t, async_op=True)
    group._end_coalescing(cpu).wait()
    assert torch.equal(t, torch.full((7,), float(WORLD**2)))


def functional():
    import torch.distributed._functional_collectives as fc

    xs = inputs((8, 30), torch.float32)
    x = xs[RANK].clone()
    total = fc.all_reduce(x, "sum", dist.group.WORLD)
    same_bits(total + 0, reduced(xs, "sum"), "functional all_reduce")
    same_bits(x, xs[RANK], "functional all_reduce leaves its input")
    same_bits(fc.all_gather_tensor(x, 0, dist.group.WORLD) + 0.0, torch.cat(xs) + 0.0, "functional all_gather")
    whole = inputs((WORLD * 2, 3), torch.float32)
    part = fc.reduce_scatter_tensor(whole[RANK], "avg", 0, dist.group.WORLD)
    same_bits(part + 0.0, reduced(whole, "avg")[2 * RANK : 2 * RANK + 2] + 0.0, "functional reduce_scatter")
    several = fc.all_reduce_coalesced([x, x * 2], "sum", dist.group.WORLD)
    same_bits(several[1] + 0.0, reduced([v * 2 for v in xs], "sum") + 0.0, "functional all_reduce_coalesced")
    same_bits(fc.broadcast(x, 0, dist.group.WORLD) + 0.0, xs[0] + 0.0, "functional broadcast")


def bad_arguments():
    """Bad arguments are refused on this rank before anything is sent, so the group stays usable."""
    x = torch.ones(6)
    with raises(ValueError, "all_reduce", "expanded", "clone"):
        dist.all_reduce(torch.ones(1).expand(6))
    with raises(TypeError, "all_reduce(sum)", "Float8", "float16, bfloat16, float32, float64"):
        dist.all_reduce(torch.ones(6).to(torch.float8_e4m3fn))
    with raises(ValueError, "broadcast", f"rank {WORLD + 4}", f"wanted a rank of this group, 0 to {WORLD - 1}"):
        dist.broadcast(x, WORLD + 4)
    with raises(TypeError, "avg", "Bool"):
        dist.all_reduce(torch.ones(6, dtype=torch.bool), dist.ReduceOp.AVG)
    with raises(TypeError, "band", "Float"):
        dist.all_reduce(x, dist.ReduceOp.BAND)
    group = dist.group.WORLD
    with raises(ValueError, "tensor_list", f"wanted {WORLD}"):
        group.allgather([[torch.ones(6)]], [x])
    with raises(ValueError, "output_tensor", "5 elements", f"wanted {6 * WORLD}"):
        group._allgather_base(torch.ones(5), x)
    with raises(TypeError, "output_tensor", "Double"):
        group._allgather_base(torch.ones(6 * WORLD, dtype=torch.float64), x)
    with raises(ValueError, "overlap"):
        buffer = torch.ones(6 * WORLD + 1)
        group._allgather_base(buffer[: 6 * WORLD], buffer[1 + 6 * RANK : 7 + 6 * RANK]).wait()
    with raises(ValueError, "src"):
        opts = dist.BroadcastOptions()
        opts.rootRank = WORLD
        group.broadcast([x], opts)
    dist.all_reduce(x)
    assert torch.equal(x, torch.full((6,), float(WORLD)))


def profiler_names():
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU]) as p:
        dist.all_reduce(torch.ones(10))
        dist.all_reduce(torch.ones(10), async_op=True).wait()
        dist.broadcast(torch.ones(3), 0)
    names = [e.name for e in p.events()]
    assert names.count("spccl:all_reduce") == 2, names
    assert "spccl:broadcast" in names, names


def stats_and_links():
    from spccl import backend

    before = backend.stats()
    x = torch.zeros(1 << 20)
    x[::1000] = 1.0
    dist.all_reduce(x)
    after = backend.stats()
    assert after.n_collectives == before.n_collectives + 1
    dense = after.dense_bytes_sent - before.dense_bytes_sent
    wire = after.wire_bytes_sent - before.wire_bytes_sent
    assert 0 < wire < dense / 50, (wire, dense)
    assert sum(after.frames_sent.values()) > sum(before.frames_sent.values())
    text = backend.describe_link((RANK + 1) % WORLD)
    assert text, "no words about the link"
    lines = backend.describe_group().splitlines()
    assert lines[:2] == [f"rank {RANK} of {WORLD}", "CUDA tensors: no collective yet"], lines
    assert f"rank {(RANK + 1) % WORLD}: {text}" in lines and len(lines) == WORLD + 1, lines
    return {"link": text, "wire": wire, "dense": dense, "buffer_bytes": after.buffer_bytes}


def sequence_and_names():
    group = dist.group.WORLD
    device_backend = group._get_backend(torch.device("cpu"))
    assert dist.get_backend() == "spccl" and device_backend.name() == "spccl"
    first = device_backend._get_sequence_number_for_group()
    dist.all_reduce(torch.ones(1))
    dist.barrier()
    assert device_backend._get_sequence_number_for_group() == first + 2
    group.set_timeout(timedelta(seconds=50))
    dist.all_reduce(torch.ones(1))


main(
    [
        all_reduce_values,
        reduce_scatter_values,
        all_gather_values,
        broadcast_values,
        special_values_survive_gather,
        in_place,
        layouts,
        inference_mode,
        premul_sum,
        many_in_flight,
        dropped_work,
        polling,
        futures,
        slow_callback,
        wait_timeout,
        coalesced,
        functional,
        bad_arguments,
        profiler_names,
        stats_and_links,
        sequence_and_names,
    ]
)
