"""What spccl.ddp.PrunedGradients costs in a step: entries sent, torch operations, memory, reads of the device's values.

On the host: `tests/gpu/test_gpu_pruned.py` counts launches and allocations of the GPU.
"""

from __future__ import annotations

import collections
import gc

import pytest

torch = pytest.importorskip("torch", reason="the DDP hook is for torch, and none is installed")

import torch.distributed as dist  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from spccl import ddp, prune  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:PrunedGradients")


@pytest.fixture
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


# ---- entries sent --------------------------------------------------------------------------------------------

N_PARAMETERS = 16  # as many as the demo's model prunes. With 5 the sampling error alone is 8% a step
NUMEL = 30_000


@pytest.mark.parametrize("density", [0.01, 0.001])
def test_the_density_stays_within_20_percent_for_500_steps(density):
    """The mean over parameters, in each step after the first ten. Gradients are random, of another size in each
    parameter."""
    g = torch.Generator().manual_seed(11)
    states = torch.zeros(N_PARAMETERS, prune.STATE_COLUMNS, dtype=torch.int64)
    params = [prune.ParamState(f"weight {i}", NUMEL, True, states[i]) for i in range(N_PARAMETERS)]
    for param in params:
        param.prepare(torch.float32, residual=True, velocity=False)
    segments = [(i * NUMEL, param) for i, param in enumerate(params)]
    numbers = torch.randn(1 << 22, generator=g)  # each step takes others of them
    sizes = (2.0 ** torch.arange(N_PARAMETERS)).repeat_interleave(NUMEL)
    plan = prune.Plan(segments, sizes.numel(), torch.float32, torch.device("cpu"))
    rule = prune.Rule(density, sample=0.001, leak=1.0, momentum=0.0, seed=5)
    ratios = []
    for step in range(500):
        begin = step * 1_000_003 % (numbers.numel() - sizes.numel())
        plan.run(numbers[begin : begin + sizes.numel()] * sizes, rule)
        ratios.append(float(states[:, prune.N_SENT].double().mean()) / NUMEL / density)
    late = ratios[10:]
    assert min(late) >= 0.8 and max(late) <= 1.2, (min(late), max(late))
    assert sum(late) / len(late) == pytest.approx(1, abs=0.05)


# ---- torch operations, waits ---------------------------------------------------------------------------------


class Recorder(TorchDispatchMode):
    """While `on`, counts torch operations by name, and calls that read a tensor's values: on CUDA these wait."""

    READS = ("item", "tolist", "cpu", "numpy", "__bool__", "__float__", "__int__", "__index__")

    def __init__(self, monkeypatch):
        super().__init__()
        self.on = False
        self.ops = collections.Counter()
        self.reads = collections.Counter()
        for name in self.READS:
            monkeypatch.setattr(torch.Tensor, name, self._counted(name, getattr(torch.Tensor, name)))

    def _counted(self, name, method):
        def counted(tensor, *args, **kwargs):
            if self.on:
                self.reads[name] += 1
            return method(tensor, *args, **kwargs)

        return counted

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if self.on:
            self.ops[func._schema.name] += 1
        return func(*args, **(kwargs or {}))


N_BEFORE, N_COUNTED = 3, 3  # steps


def count_hook(recorder, n_layers, settings):
    """Train n_layers layers in one bucket. What `recorder` has then are N_COUNTED steps of the hook alone."""
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(n_layers)))
    model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    hook = ddp.PrunedGradients(density=0.1, min_numel=1, **settings)

    def recorded(state, bucket):
        assert bucket.is_last()
        recorder.on = state.step >= N_BEFORE
        try:
            return ddp.pruned_gradients_hook(state, bucket)
        finally:
            recorder.on = False

    model.register_comm_hook(hook, recorded)
    with recorder:
        for _ in range(N_BEFORE + N_COUNTED):
            model(torch.randn(8, 64)).square().mean().backward()
            model.zero_grad()
    assert hook.step == N_BEFORE + N_COUNTED
    return hook


def scaler():
    made = torch.amp.GradScaler("cpu", init_scale=8.0)
    made.scale(torch.ones(1))  # the first call makes the tensor that holds the scale
    return made


@pytest.mark.parametrize(
    "settings",
    [
        dict,
        lambda: {"momentum": 0.9, "clip_norm": 1.0},
        lambda: {"grad_scaler": scaler(), "dense_steps": 2, "warmup_steps": 50},
    ],
    ids=["plain", "momentum and clip_norm", "grad_scaler and warm-up"],
)
def test_the_hook_calls_no_operation_for_a_parameter_and_reads_no_value(one_rank, monkeypatch, settings):
    """Its operations do not become more with more parameters. GradScaler's scale is read on the device. Only stats()
    reads values."""
    recorder = Recorder(monkeypatch)
    seen = []
    for n_layers in (2, 20):
        recorder.ops.clear()
        hook = count_hook(recorder, n_layers, settings())
        seen.append(dict(recorder.ops))
        assert not recorder.reads, recorder.reads
    assert seen[0] == seen[1]
    assert 0 < sum(seen[0].values()) <= 8 * N_COUNTED, seen[0]
    recorder.on = True
    hook.stats()
    recorder.on = False
    assert recorder.reads["tolist"] > 0


def test_the_device_keeps_the_scale_that_a_scaler_changes(one_rank, monkeypatch):
    """residual and velocity are kept in units of the scale of their step, without a read of the scale."""
    given = scaler()
    hook = count_hook(Recorder(monkeypatch), 2, {"grad_scaler": given})
    states = hook._devices[torch.device("cpu")].states
    assert states[:, prune.LOSS_SCALE].view(torch.float64).tolist() == [8.0] * 4
    given.update(new_scale=2.0)
    monkeypatch.setattr(torch.amp.GradScaler, "get_scale", lambda _: pytest.fail("get_scale waits for the device"))
    memory = hook._devices[torch.device("cpu")]
    memory.begin_step()
    assert memory.read_scale(given).tolist() == [2.0]


# ---- memory --------------------------------------------------------------------------------------------------


def bytes_by_storage():
    """Bytes of all tensors of this process that Python knows, by address."""
    gc.collect()
    tensors = [t for t in gc.get_objects() if type(t) in (torch.Tensor, torch.nn.Parameter)]
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}


@pytest.mark.parametrize(
    "settings, entry_bytes",
    [
        ({}, 4),
        ({"residual_dtype": torch.bfloat16}, 2),
        ({"momentum": 0.9, "clip_norm": 1.0}, 8),
    ],
    ids=["residual", "bfloat16", "momentum"],
)
def test_the_hook_keeps_the_residual_and_nothing_else(one_rank, settings, entry_bytes):
    """Over rebuilt buckets: DDP changes them after the first step."""
    model = torch.nn.Sequential(*(torch.nn.Linear(300, 300, bias=False) for _ in range(8)))
    n_parameters, n_entries = 8, 8 * 300 * 300
    model = DistributedDataParallel(model, bucket_cap_mb=1, gradient_as_bucket_view=True)
    hook = ddp.PrunedGradients(**settings).register(model)
    before = bytes_by_storage()
    for _ in range(4):
        model.zero_grad()
        model(torch.randn(2, 300)).sum().backward()
    hook._on_host.clear()  # DDP's own buckets
    grads = {p.grad.untyped_storage().data_ptr() for p in model.parameters()}
    after = bytes_by_storage()
    kept = sum(n for address, n in after.items() if address not in before and address not in grads)
    wanted = entry_bytes * n_entries
    assert wanted <= kept <= wanted + 150 * n_parameters + 100, (kept, wanted)
