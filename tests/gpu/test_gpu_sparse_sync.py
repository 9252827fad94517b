"""spccl.optim.SparseSync on GPU memory: as on the host, and over ranks. Ranks are processes that share GPUs over Gloo,
or one process per GPU over spccl; they run the cases of workers in tests/dist/workers."""

from __future__ import annotations

from pathlib import Path

import pytest
from gpu_launch import cases_of, check_case, needs, run_gpus, run_ranks

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.gpu
WORKERS = Path(__file__).parents[1] / "dist" / "workers"
RUNS = [
    *("sparse_sync gloo 2", "sparse_sync spccl 2", "sparse_sync spccl 4"),
    *("sparse_signs gloo 2", "sparse_signs spccl 2"),
    *("sparse_sums gloo 2", "sparse_sums spccl 4"),
    "sparse_hosts spccl 4",
    *("ddp_sums gloo 2", "ddp_sums spccl 4"),
    "ddp_hosts spccl 4",
]


@pytest.fixture(scope="module")
def ranks_of():
    """The ranks of a run, started by its first case."""
    ended = {}

    def ranks(run: str):
        if run not in ended:
            worker, backend, n_ranks = run.split()
            env = {"SPCCL_TEST_BACKEND": backend, "SPCCL_TEST_DEVICE": "cuda"}
            start = run_gpus if backend == "spccl" else run_ranks
            ended[run] = start(str(WORKERS / worker), int(n_ranks), **({"env": env} if start is run_ranks else env))
        return ended[run]

    return ranks


@pytest.mark.parametrize(("run", "case"), [(run, case) for run in RUNS for case in cases_of(run.split()[0])])
def test_case(ranks_of, run, case):
    needs(1)
    if run == "sparse_signs spccl 2" and torch.cuda.device_count() < 2:
        pytest.skip("NCCL, which takes one bit to owners, refuses ranks that share a GPU")
    check_case(ranks_of(run), case)


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
