"""spccl.sync for SGLang: the loader, called as SGLang 0.5.23 calls it, on the workers of a server of stubs.

Read in the wheel sglang-0.5.23: srt/model_executor/model_runner_components/weight_updater.py
(`dynamic_import(load_format)(model, named_tensors)`), srt/distributed (`get_tp_group`, `get_pp_group`),
srt/runtime_context.py (`get_parallel`).
"""

from __future__ import annotations

import importlib
import sys
import threading
import types

import pytest

torch = pytest.importorskip("torch", reason="spccl.sync is for torch tensors, and none is installed")
pytest.importorskip("safetensors", reason="spccl.sync writes safetensors files, and it is not installed")

from safetensors.torch import save_file  # noqa: E402
from vllm_models import RANKS, WAIT_S, Run, Threads, bits, damage, loaded, weights  # noqa: E402

from spccl.errors import ArgumentError, Error, StateError, UnsupportedError  # noqa: E402
from spccl.sync import sglang as ours  # noqa: E402

LOADER = "spccl.sync.sglang.load"


@pytest.fixture
def run(tmp_path):
    found = Run(tmp_path / "run", anchor_share=9)
    save_file(weights(1), tmp_path / "model.safetensors")
    found.publish()
    yield found
    found.push.close()


@pytest.fixture
def group(monkeypatch):
    """The group of a tensor-parallel server whose workers are threads; of one worker elsewhere."""
    threads = Threads.group(RANKS)

    def get_tp_group():
        name = threading.current_thread().name
        if not name.startswith("worker"):
            return types.SimpleNamespace(world_size=1, cpu_group=None)
        return types.SimpleNamespace(world_size=RANKS, cpu_group=threads[int(name[6:])])

    for name in ("sglang", "sglang.srt", "sglang.srt.distributed", "sglang.srt.runtime_context"):
        module = types.ModuleType(name)
        module.get_tp_group, module.get_pp_group = get_tp_group, lambda: types.SimpleNamespace(world_size=1)
        module.get_parallel = lambda: types.SimpleNamespace(dp_size=1)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(ours, "TorchWorkers", lambda group: group)


def update_weights_from_tensor(model, named_tensors, load_format):
    """SGLang's, as far as its own loader goes."""
    module, _, name = load_format.rpartition(".")
    getattr(importlib.import_module(module), name)(model, [(n, x.to("cpu")) for n, x in named_tensors])
    return True, "Success"


def test_one_worker(run, group, tmp_path):
    model = loaded(weights(1))
    for _ in range(2):
        told = ours.command(run.folder, run.publish(), tmp_path, WAIT_S)
        assert update_weights_from_tensor(model, told, LOADER) == (True, "Success")
        assert bits(model) == bits(loaded(run.now))
    path, _ = damage(run, run.publish())
    with pytest.raises(StateError, match=r"sglang: version 4: stage: worker 0 of 1: .*SHA-256.*holds what it held"):
        update_weights_from_tensor(model, ours.command(run.folder, 4, tmp_path, WAIT_S), LOADER)
    assert bits(model) == bits(loaded(run.was[3])) and path.exists()


def test_several_workers(run, group, tmp_path):
    models = [loaded(weights(1), rank, RANKS) for rank in range(RANKS)]
    errors: list[str] = []

    def work(rank: int, told) -> None:
        try:
            update_weights_from_tensor(models[rank], told, LOADER)
        except Error as error:
            errors.append(str(error))

    def on_all(told) -> None:
        threads = [threading.Thread(target=work, args=(rank, told), name=f"worker{rank}") for rank in range(RANKS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(2 * WAIT_S)

    for _ in range(2):
        on_all(ours.command(run.folder, run.publish(), tmp_path, WAIT_S))
        assert not errors
        assert all(bits(model) == bits(loaded(run.now, rank, RANKS)) for rank, model in enumerate(models))
    damage(run, run.publish())
    on_all(ours.command(run.folder, 4, tmp_path, WAIT_S))
    assert len(errors) == RANKS
    assert all(bits(model) == bits(loaded(run.was[3], rank, RANKS)) for rank, model in enumerate(models))


def test_what_cannot_work_is_refused(run, group, tmp_path):
    model = loaded(weights(1))
    with pytest.raises(ArgumentError, match=r"wanted what spccl\.sync\.sglang\.command returns"):
        update_weights_from_tensor(model, [("w", torch.zeros(3))], LOADER)
    with pytest.raises(StateError, match="no safetensors files"):
        ours.load(model, ours.command(run.folder, 1, tmp_path / "run", WAIT_S))
    other = loaded(weights(2))
    with pytest.raises(StateError, match="the receiver does not hold these bits at its place"):
        ours.load(other, ours.command(run.folder, 1, tmp_path, WAIT_S))
    other.w_kc = torch.ones(4, 4)  # as MLA attention has
    with pytest.raises(StateError, match="its 'w_kc' was made from the weights after loading"):
        ours.load(other, ours.command(run.folder, 1, tmp_path, WAIT_S))
    sys.modules["sglang.srt.distributed"].get_pp_group = lambda: types.SimpleNamespace(world_size=2)
    with pytest.raises(UnsupportedError, match="pipeline of 2 stages"):
        ours.load(loaded(weights(1)), ours.command(run.folder, 1, tmp_path, WAIT_S))
    sys.modules["sglang.srt.runtime_context"].get_parallel = lambda: types.SimpleNamespace(dp_size=2)
    with pytest.raises(UnsupportedError, match="2 data-parallel replicas vote apart"):
        ours.load(loaded(weights(1)), ours.command(run.folder, 1, tmp_path, WAIT_S))
