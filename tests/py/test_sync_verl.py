"""spccl.sync for verl 0.9: the engine, driven in the order of verl's manager, with stubs of verl's classes.

Read in the wheel verl-0.9.1: checkpoint_engine/base.py (`CheckpointEngineRegistry`, `CheckpointEngineManager`),
checkpoint_engine/delta_checkpoint_engine.py, and what takes flushes, workers/rollout/vllm_rollout/vllm_rollout.py
(`_update_delta_weights`) and delta_weight_transfer.py (`decode_delta_payload`).
"""

from __future__ import annotations

import asyncio
import importlib
import json
import sys
import threading
import types

import pytest

torch = pytest.importorskip("torch", reason="spccl.sync is for torch tensors, and none is installed")
pytest.importorskip("safetensors", reason="spccl.sync writes safetensors files, and it is not installed")

from sync_runs import raw  # noqa: E402

from spccl.errors import FormatError, MismatchError, StateError, TimeoutError, UnsupportedError  # noqa: E402
from spccl.sync import _encode  # noqa: E402

WAIT_S = 60
BUCKET_BYTES = 100_000


def checksum(positions, values) -> int:
    return sum(raw(positions)) ^ (sum(raw(values)) << 1)


class Registry:
    _registry = {}  # noqa: RUF012 (as verl's)

    @staticmethod
    def register(backend):
        return lambda cls: Registry._registry.setdefault(backend, cls)


class DeltaSharded:
    """verl's, as far as its subclass calls it. It starts a server at rank 0 of the trainer."""

    wire_format = "delta_flush"

    def __init__(self, *args, encoding="indices", batch_gather=32, verify_every=0, **kwargs):
        self._init_nccl(*args, **kwargs)
        self.encoding, self.verify_every = encoding, verify_every

    def _init_nccl(self, bucket_size, group_name="default", is_master=False, rollout_dtype=torch.bfloat16):
        self.bucket_size, self.is_master, self.rollout_dtype = bucket_size, is_master, rollout_dtype
        if is_master:
            self._start_zmq_server()

    def _start_zmq_server(self):
        raise AssertionError("a socket")


@pytest.fixture
def backend(monkeypatch):
    """The class that verl finds by the name "delta_sharded"."""
    contents = {
        "verl": {},
        "verl.checkpoint_engine": {},
        "verl.checkpoint_engine.base": {"CheckpointEngineRegistry": Registry},
        "verl.checkpoint_engine.delta_checkpoint_engine": {"DeltaShardedCheckpointEngine": DeltaSharded},
        "verl.checkpoint_engine.delta_sync": {},
        "verl.checkpoint_engine.delta_sync.encode": {"checksum": checksum},
    }
    for name, content in contents.items():
        module = types.ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "spccl.sync.verl", raising=False)
    Registry._registry.clear()
    importlib.import_module("spccl.sync.verl")
    yield Registry._registry["delta_sharded"]
    sys.modules.pop("spccl.sync.verl", None)


class Training:
    """A training engine: all ranks of the trainer export whole tensors."""

    def __init__(self):
        random = torch.Generator().manual_seed(1)
        shapes = {"embed": (300, 400), "body": (7, 9), "scale": (), "nothing": (0, 4), "steps": (3,)}
        self.weights = {name: torch.randn(shape, generator=random) for name, shape in shapes.items()}
        self.weights["steps"] = torch.tensor([1, 2, 3])
        self.n_exports = 0

    def step(self, share: float) -> None:
        for x in self.weights.values():
            x += ((torch.rand(x.shape) < share) * 3).to(x.dtype)

    def get_per_tensor_param(self):
        self.n_exports += 1
        return iter(list(self.weights.items())), None

    def bits(self) -> dict[str, bytes]:
        return {n: raw(x.bfloat16() if x.is_floating_point() else x) for n, x in self.weights.items() if x.numel()}


class Consumer:
    """A rollout worker's server. It takes a stream as verl's does, and fails where it is told to."""

    def __init__(self):
        self.weights: dict[str, torch.Tensor] = {}
        self.fails = False
        self.encodings: list[str] = []

    def update_weights(self, flushes) -> None:
        saw_last, self.encodings = None, []
        for named, is_last in flushes:
            assert not saw_last
            saw_last = is_last
            self.take(dict(named))
        assert saw_last in (True, None)

    def take(self, tensors) -> None:
        values, positions = tensors["__values__"], tensors.get("__positions__", torch.empty(0, dtype=torch.uint8))
        spec = json.loads(raw(tensors["__delta_spec__"]))
        assert spec["checksum"] == checksum(positions, values)
        self.encodings.append(spec["encoding"])
        assert len(set(self.encodings)) == 1  # "One weight update cannot mix dense and sparse"
        assert len({p["name"] for p in spec["params"]}) == len(spec["params"])  # parts of a tensor are one entry
        for p in spec["params"]:
            assert values.dtype == getattr(torch, p["dtype"])
            mine = values[p["val_start"] : p["val_end"]]
            if spec["encoding"] == "dense":
                self.weights[p["name"]] = mine.view(p["shape"]).clone()
                continue
            at = positions[p["pos_start"] : p["pos_end"]].view(torch.int32).long()
            assert p["pos_width"] == 4 and at.numel() == mine.numel() == at.unique().numel()
            self.weights[p["name"]].view(-1)[at] = mine
        if self.fails:
            raise RuntimeError("the rollout's GPU")

    def bits(self) -> dict[str, bytes]:
        return {name: raw(x) for name, x in self.weights.items()}


class Job:
    """Two ranks of a trainer, rollout workers, and verl's manager: `update` is its update_weights."""

    def __init__(self, backend, folder, n_rollouts: int = 2, **options):
        self.backend, self.training = backend, Training()
        self.options = {"bucket_size": BUCKET_BYTES, "folder": str(folder), "timeout_s": WAIT_S, **options}
        self.actors = [backend(is_master=rank == 0, **self.options) for rank in range(2)]
        self.rollouts, self.consumers = [], []
        for _ in range(n_rollouts):
            self.add()

    def add(self) -> None:
        self.rollouts.append(self.backend(**self.options))
        self.consumers.append(Consumer())

    def update(self) -> list[Exception]:
        """One step's errors of the rollout workers; one of the trainer is raised."""
        everyone = [*self.actors, *self.rollouts]
        metadata = [engine.prepare() for engine in everyone]
        kwargs = self.backend.build_topology(len(self.actors), len(self.rollouts), metadata)
        for engines, given in zip((self.actors, self.rollouts), kwargs, strict=True):
            assert all(len(values) == len(engines) for values in given.values())
            for place, engine in enumerate(engines):
                engine.init_process_group(**{name: values[place] for name, values in given.items()})
        errors: list[Exception] = []

        def receive(place: int) -> None:
            try:
                self.consumers[place].update_weights(self.rollouts[place].receive_weights(global_steps=1))
            except Exception as error:
                errors.append(error)

        threads = [threading.Thread(target=receive, args=(place,)) for place in range(len(self.rollouts))]
        for thread in threads:
            thread.start()
        try:
            found = [asyncio.run(engine.send_weights(self.training, global_steps=1)) for engine in self.actors]
            assert found[0]["checkpoint_engine/payload_mbytes"] >= 0 and found[1] is None
        finally:
            for thread in threads:
                thread.join(2 * WAIT_S)
        assert not any(thread.is_alive() for thread in threads)
        for engine in everyone:
            engine.finalize()
        return errors

    def check(self, *encodings: str | None) -> None:
        """All consumers have the trainer's bits; each got these flushes."""
        for consumer, encoding in zip(self.consumers, encodings, strict=True):
            assert consumer.bits() == self.training.bits()
            assert set(consumer.encodings) == ({encoding} if encoding else set())

    def end(self) -> None:
        self.actors[0]._push.close()


def test_steps(backend, tmp_path, monkeypatch):
    """The first one hands over all weights, later ones what changed, one without a change nothing. A worker that comes
    later, and one that failed half way, get all weights; the others still get the changes. A new trainer goes on."""
    monkeypatch.setattr(_encode, "PART_ELEMS", _encode.SLICE_ELEMS)  # embed has two parts
    job = Job(backend, tmp_path / "run")
    assert job.update() == []
    job.check("dense", "dense")
    assert len(job.consumers[0].encodings) > 2  # several buckets
    for share in (0.01, 0.9, 0):
        job.training.step(share)
        assert job.update() == []
        job.check(*["indices" if share else None] * 2)
    job.add()
    job.training.step(0.3)
    assert job.update() == []
    job.check("indices", "indices", "dense")
    job.training.step(0.3)
    job.consumers[1].fails = True
    assert [str(error) for error in job.update()] == ["the rollout's GPU"]
    job.consumers[1].fails = False
    job.training.step(0.01)
    assert job.update() == []
    job.check("indices", "dense", "indices")
    assert job.training.n_exports == 2 * 7
    job.end()
    other = Job(backend, tmp_path / "run", 1)
    other.training = job.training
    assert other.update() == []
    other.check("dense")
    other.end()


def test_faults(backend, tmp_path):
    """A damaged file is found before the consumer gets anything; a trainer that fails leaves workers that end in time;
    an export that changes its names is refused."""
    job = Job(backend, tmp_path / "run", 1, timeout_s=1)
    assert job.update() == []
    had = job.consumers[0].bits()
    job.training.step(0.01)
    push, rollout = job.actors[0]._push, job.rollouts[0]
    place = push._put_in_place  # damaged before a worker can look
    push._put_in_place = lambda work, *rest: (damage(work / "delta-00001.safetensors"), place(work, *rest))
    (error,) = job.update()
    assert isinstance(error, FormatError) and "damaged" in str(error)
    assert job.consumers[0].bits() == had
    push._put_in_place = place
    for name, shape in (("more", 3), ("body", 63)):
        was = job.training.weights
        job.training.weights = {**was, name: torch.zeros(shape)}
        with pytest.raises(MismatchError, match=f"'{name}': earlier exports did not have it, or as another kind"):
            job.update()
        job.training.weights = was
    del job.training.weights["body"]
    with pytest.raises(MismatchError, match="'body': earlier exports had it, this one does not"):
        job.update()
    assert job.consumers[0].bits() == had
    with pytest.raises(TimeoutError, match="no version 3 within 1 s"):
        next(rollout.receive_weights())
    rollout.rank = 0
    with pytest.raises(StateError, match="wanted a rollout worker"):
        next(rollout.receive_weights())
    with pytest.raises(UnsupportedError, match="verify_every=2"):
        Job(backend, tmp_path, verify_every=2)
    job.end()


def damage(path) -> None:
    data = bytearray(path.read_bytes())
    data[-20] ^= 1
    path.write_bytes(data)
