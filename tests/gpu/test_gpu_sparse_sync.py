"""spccl.optim.SparseSync on GPU memory: as on the host, and over ranks. Ranks are 2 processes on one GPU over
Gloo, or one process per GPU over spccl; they run the cases of tests/dist/workers/sparse_sync.py."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from gpu_launch import check_case, needs, run_gpus, run_ranks

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.gpu
WORKER = Path(__file__).parents[1] / "dist" / "workers" / "sparse_sync.py"
CASES = re.search(r"^CASES = \[(.*?)\]", WORKER.read_text(), re.M | re.S).group(1).replace(",", " ").split()


@pytest.fixture(scope="module", params=["gloo-2", "spccl-2", "spccl-4"])
def ranks(request):
    backend, n_ranks = request.param.split("-")
    env = {"SPCCL_TEST_BACKEND": backend, "SPCCL_TEST_DEVICE": "cuda"}
    if backend == "gloo":
        needs(1)
        return run_ranks("sparse_sync", int(n_ranks), env=env)
    return run_gpus(str(WORKER.with_suffix("")), int(n_ranks), **env)


@pytest.mark.parametrize("case", CASES)
def test_case(ranks, case):
    check_case(ranks, case)


def sync(device: str, dtype=torch.float32, **settings):
    """Two parameters that take known gradients with learning rate 1, so that host and GPU compute the same bits."""
    from spccl.optim import SparseSync

    g = torch.Generator().manual_seed(1)
    shapes = [(300, 401), (17,), (129, 65)]
    params = [torch.nn.Parameter(torch.randn(s, generator=g).to(device, dtype)) for s in shapes]
    return SparseSync(torch.optim.SGD(params, lr=1.0), density=0.03, bucket_mb=0.2, **settings), params


def steps(params, opt, count: int, start: int = 0) -> None:
    for t in range(start, start + count):
        g = torch.Generator().manual_seed(t + 5)
        for p in params:
            p.grad = (torch.randn(p.shape, generator=g) * 2**-7).to(p.device, p.dtype)
        opt.step()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_as_on_the_host(dtype):
    needs(1)
    states = []
    for device in ("cpu", "cuda"):
        opt, params = sync(device, dtype)
        steps(params, opt, 12)
        states.append(opt.state_dict()["sparse_sync"]["parameters"])
        assert opt.stats()["density_sent"] > 0.01
    for on_host, on_gpu in zip(*states, strict=True):
        for key in ("global", "local", "prune"):
            assert torch.equal(on_host[key], on_gpu[key].cpu()), key


def test_no_memory_after_the_first_step():
    needs(1)
    opt, params = sync("cuda", check_finite=False, check_every=0, norm_every=0)
    steps(params, opt, 2)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    opt._exchange(0.03)
    assert torch.cuda.max_memory_allocated() == before
    with opt.global_weights():
        assert torch.cuda.max_memory_allocated() == before


def test_the_host_does_not_wait():
    """Without check_finite a step has no synchronisation with the GPU."""
    needs(1)
    opt, params = sync("cuda", check_finite=False)
    steps(params, opt, 1)
    for p in params:
        p.grad = torch.zeros_like(p)
    torch.cuda.set_sync_debug_mode("error")
    try:
        opt.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
