"""spccl under Accelerate, transformers.Trainer, Lightning, Fabric and torchft: the lines of docs/FRAMEWORKS.md, and
examples/accelerate, trainer and lightning."""

from __future__ import annotations

import importlib.util
import os
import sys
import types
import warnings
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="the frameworks train torch models")

from launch import check_case, run_ranks, torchrun  # noqa: E402

from spccl import ddp, integrations, optim  # noqa: E402
from spccl.integrations import _files  # noqa: E402

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
# The libraries that a group of cases needs -> its cases, in order: a run that resumes follows the one that saves.
CASES = {
    ("accelerate", "transformers"): [
        "accelerate_sparse_sync",
        "accelerate_sparse_sync_resumed",
        "accelerate_pruned",
        "accelerate_pruned_resumed",
        "accelerate_refusals",
        "trainer_sparse_sync",
        "trainer_sparse_sync_resumed",
        "trainer_pruned",
        "trainer_pruned_resumed",
    ],
    ("lightning",): [
        "lightning_sparse_sync",
        "lightning_sparse_sync_resumed",
        "lightning_pruned",
        "lightning_pruned_resumed",
        "lightning_refusals",
        "fabric",
        "fabric_sparse_sync",
    ],
    ("torchft",): ["torchft"],
}


def why_missing(libraries: tuple[str, ...]) -> str | None:
    """Why these libraries cannot be used; None if they can. `make test` says so if it could not install them."""
    failed = os.environ.get("SPCCL_TEST_FRAMEWORKS")
    missing = [name for name in libraries if importlib.util.find_spec(name) is None]
    if failed and libraries != ("torchft",):
        return f"{', '.join(libraries)}: {failed}"
    if missing:
        return f"not installed: {', '.join(missing)} (pip install; not a dependency of spccl)"
    return None


@pytest.fixture(scope="module")
def ranks():
    """What 2 ranks reported of all cases whose libraries are installed.

    Each case has a store in this process, as torchrun's agent has one: no port that another program could take.
    """
    cases = [case for libraries, some in CASES.items() if why_missing(libraries) is None for case in some]
    stores = {case: torch.distributed.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False) for case in cases}
    words = [f"{case}={store.port}" for case, store in stores.items()]
    return run_ranks("frameworks", 2, *words, timeout_s=600)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("libraries", "case"), [(libraries, case) for libraries, cases in CASES.items() for case in cases]
)
def test_real_library(libraries, case, request):
    reason = why_missing(libraries)
    if reason:
        pytest.skip(reason)
    ranks = request.getfixturevalue("ranks")
    check_case(ranks, case)
    assert [r.returncode for r in ranks] == [0, 0], "\n".join(r.report() for r in ranks)


@pytest.mark.slow
def test_example_under_torchrun():
    reason = why_missing(("accelerate", "transformers"))
    if reason:
        pytest.skip(reason)
    status, output = torchrun(str(EXAMPLES / "accelerate" / "train.py"), "--steps=6")
    assert status == 0 and "last step sent" in output and "% of the weights: " in output, output


# ---- without the libraries ----


class Settings:
    """Stands in for TrainingArguments, TrainerState and Trainer, with the attributes that the callback reads."""

    def __init__(self, **values):
        self.__dict__.update(values)


@pytest.fixture
def callback_class(monkeypatch):
    """PrunedGradientsCallback, derived from a stand-in for transformers' TrainerCallback."""
    module = types.ModuleType("transformers")
    module.TrainerCallback = type("TrainerCallback", (), {})
    monkeypatch.setitem(sys.modules, "transformers", module)
    sys.modules.pop("spccl.integrations._trainer", None)
    yield integrations.PrunedGradientsCallback
    sys.modules.pop("spccl.integrations._trainer", None)


@pytest.fixture
def model(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(100, 100))
    torch.distributed.destroy_process_group()


def trainer_of(model, **more):
    """Its `train` and `log` keep what they were given."""
    calls = {"train": [], "log": []}
    methods = {name: lambda *given, kept=kept: kept.append(given) for name, kept in calls.items()}
    return Settings(model_wrapped=model, accelerator=Settings(scaler=None), calls=calls, **methods, **more)


def begin(callback, args, global_step=0, optimizer=None):
    callback.on_train_begin(args, Settings(global_step=global_step), None, model=None, optimizer=optimizer)


def arguments(tmp_path, **more):
    values = {"world_size": 2, "process_index": 0, "max_grad_norm": 0, "resume_from_checkpoint": None}
    return Settings(output_dir=str(tmp_path), **(values | more))


@pytest.mark.filterwarnings("ignore:PrunedGradients. the group's backend")
def test_trainer_callback_registers_saves_and_resumes(callback_class, model, tmp_path):
    hook = ddp.PrunedGradients(min_numel=1, density=0.1)
    trainer = trainer_of(model)
    callback = callback_class(trainer, hook)
    args = arguments(tmp_path)
    trainer.log({"loss": 1.0})
    trainer.train()
    begin(callback, args)
    begin(callback, args)  # train() called again: nothing is registered twice
    model(torch.randn(8, 100)).sum().backward()
    assert hook.step == 1
    trainer.log({"loss": 0.5}, 7.0)
    trainer.log({"eval_loss": 0.5})
    (before, _), (logged, start), (evaluated, _) = ((*given, None)[:2] for given in trainer.calls["log"])
    assert before == {"loss": 1.0} and evaluated == {"eval_loss": 0.5} and start == 7.0
    assert logged.pop("loss") == 0.5 and logged["spccl/density_sent"] == hook.stats()["density_sent"]
    assert all(type(value) in (int, float) for value in logged.values()), logged
    callback.on_save(args, Settings(global_step=1), None)
    (file,) = (tmp_path / "checkpoint-1").iterdir()
    assert file.name == "spccl-rank-0-of-2.pt"

    other = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(100, 100))
    resumed = ddp.PrunedGradients(min_numel=1, density=0.1)
    state = torch.load(file, weights_only=True) | {"world_size": 1}
    torch.save(state, file)
    trainer = trainer_of(other)
    callback = callback_class(trainer, resumed)
    with pytest.raises(RuntimeError, match=r"resumes at step 1 from a folder that train\(\) was not given"):
        begin(callback, args, global_step=1)
    trainer.train(str(tmp_path / "elsewhere"))
    with pytest.raises(FileNotFoundError, match=r"PrunedGradients: .*elsewhere has no spccl-rank-\*\.pt"):
        begin(callback, args, global_step=1)
    trainer.train(resume_from_checkpoint=True)  # the last checkpoint in output_dir
    begin(callback, args, global_step=1)
    assert resumed.step == 1 and resumed.state_dict()["parameters"].keys() == {"weight", "bias"}
    resumed.step = 5
    begin(callback, args, global_step=1)  # a second train() resumes too
    assert resumed.step == 1


def test_state_of_another_number_of_ranks(tmp_path):
    def state(rank):
        entry = {"residual": torch.full((4,), rank + 1.0), "velocity": None, "threshold": None}
        return {"version": 1, "world_size": 12, "step": 7, "seed": 0, "parameters": {"w": entry}}

    for rank in range(12):
        integrations.save_state(Settings(state_dict=lambda rank=rank: state(rank)), tmp_path, rank, 12)
    hook = ddp.PrunedGradients()
    integrations.load_state(hook, tmp_path, 1, 2)
    held = hook.state_dict()["parameters"]["w"]["residual"]
    assert hook.step == 7 and torch.equal(held, torch.full((4,), sum(range(2, 13, 2)) * 2 / 12))
    with pytest.raises(FileNotFoundError, match=r"PrunedGradients: .*nothing has no spccl-rank-\*\.pt"):
        integrations.load_state(hook, tmp_path / "nothing", 0, 2)
    (tmp_path / "spccl-rank-3-of-12.pt").unlink()
    with pytest.raises(ValueError, match="all ranks"):
        integrations.load_state(hook, tmp_path, 0, 2)


def saved_by(folder, n_ranks, step):
    """Every rank of a job saves a state of `step` into `folder`."""
    entry = {"residual": torch.full((4,), float(step)), "velocity": None, "threshold": None}
    state = {"version": 1, "world_size": n_ranks, "step": step, "seed": 0, "parameters": {"w": entry}}
    for rank in range(n_ranks):
        integrations.save_state(Settings(state_dict=lambda: state), folder, rank, n_ranks)


def test_files_of_an_older_save_are_gone(tmp_path):
    """4 ranks save, then 2 ranks save into the same folder, then 4 ranks load: the states of the second save."""
    saved_by(tmp_path, 4, step=100)
    saved_by(tmp_path, 2, step=200)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["spccl-rank-0-of-2.pt", "spccl-rank-1-of-2.pt"]
    for rank in range(4):
        hook = ddp.PrunedGradients()
        integrations.load_state(hook, tmp_path, rank, 4)
        assert hook.step == 200
    saved_by(tmp_path, 12, step=300)
    assert len(list(tmp_path.iterdir())) == 12
    (tmp_path / "spccl-rank-0-of-2.pt").write_bytes((tmp_path / "spccl-rank-0-of-12.pt").read_bytes())
    with pytest.raises(ValueError, match=rf"{tmp_path.name}: PrunedGradients.*all ranks"):
        integrations.load_state(ddp.PrunedGradients(), tmp_path, 0, 3)


def test_save_that_fails_leaves_the_older_file(tmp_path, monkeypatch):
    saved_by(tmp_path, 1, step=1)

    def full(state, path):
        Path(path).write_bytes(b"half")
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", full)
        with pytest.raises(OSError, match="No space"):
            saved_by(tmp_path, 1, step=2)
    assert [file.name for file in tmp_path.iterdir()] == ["spccl-rank-0-of-1.pt"]
    hook = ddp.PrunedGradients()
    integrations.load_state(hook, tmp_path, 0, 1)
    assert hook.step == 1


def synced(lr: float = 0.1) -> tuple[torch.nn.Module, optim.SparseSync]:
    """A model of tied weights and a buffer, and its SparseSync after two steps: something is unsent."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(80, 80), torch.nn.BatchNorm1d(80), torch.nn.Linear(80, 80))
    net[2].weight = net[0].weight
    opt = optim.SparseSync(torch.optim.AdamW(net.parameters(), lr=lr), density=0.1)
    train(net, opt, 2)
    return net, opt


def train(net, opt, n_steps):
    for seed in range(n_steps):
        opt.zero_grad()
        net(torch.randn(16, 80, generator=torch.Generator().manual_seed(seed))).square().mean().backward()
        opt.step()


def test_global_weights_for_a_frameworks_file():
    net, opt = synced()
    own = {name: value.clone() for name, value in net.state_dict().items()}
    saved = _files.with_global_weights(opt, net.state_dict())
    with opt.global_weights():
        assert all(torch.equal(saved[name], value) for name, value in net.state_dict().items())
        again = _files.with_global_weights(opt, net.state_dict())
        assert all(torch.equal(saved[name], value) for name, value in again.items())
    assert not torch.equal(saved["0.weight"], own["0.weight"]) and torch.equal(own["0.weight"], net[0].weight)
    assert saved["0.weight"].data_ptr() == saved["2.weight"].data_ptr() != net[0].weight.data_ptr()


def test_sparse_sync_state_of_another_number_of_ranks(tmp_path):
    net, opt = synced()
    states = opt.reshard([optim.checkpoint.save(opt)], 12)
    for rank, state in enumerate(states):
        torch.save(state, tmp_path / f"spccl-rank-{rank}-of-12.pt")
    other, resumed = synced(lr=0.2)
    integrations.load_state(resumed, tmp_path, 0, 1)
    for rank in range(12):
        (tmp_path / f"spccl-rank-{rank}-of-12.pt").write_bytes(b"")  # nothing is mapped from the files any more
    assert all(torch.isfinite(moments["exp_avg"]).all() for moments in resumed.state.values())
    want = {name: value.clone() for name, value in net.state_dict().items()}
    for name, param in other.named_parameters():
        torch.testing.assert_close(param, want[name])
    with opt.global_weights(), resumed.global_weights():
        for ours, theirs in zip(net.parameters(), other.parameters(), strict=True):
            assert torch.equal(ours, theirs)
    for rank, state in enumerate(states[:11]):
        torch.save(state, tmp_path / f"spccl-rank-{rank}-of-12.pt")
    (tmp_path / "spccl-rank-11-of-12.pt").unlink()
    with pytest.raises(ValueError, match="all ranks"):
        integrations.load_state(resumed, tmp_path, 0, 1)


def test_sparse_sync_without_its_file_stops(tmp_path):
    net, opt = synced()
    opt.load_state_dict({**optim.checkpoint.mark(opt), "sparse_sync": {"version": 1, "apart": True, "steps": 7}})
    with pytest.raises(FileNotFoundError, match=r"SparseSync: .* has no spccl-rank.*load the model alone"):
        integrations.load_state(opt, tmp_path, 0, 1)
    with pytest.raises(RuntimeError, match=r"checkpoint of step 7.*at step 2"):
        train(net, opt, 1)


def test_sparse_sync_in_ddp_is_seen(model):
    opt = optim.SparseSync(torch.optim.AdamW(model.parameters()))
    assert _files.in_ddp(opt) and not _files.in_ddp(synced()[1])


def test_trainer_callback_warns_of_conflicting_settings(callback_class, model, tmp_path):
    weights = list(model.parameters())
    for optimizer, more, words in (
        (torch.optim.SGD(weights, lr=1.0), {"max_grad_norm": 1.0}, ["max_grad_norm=1.0", "clip_norm=1.0"]),
        (torch.optim.AdamW(weights), {}, ["AdamW does not converge"]),
        (torch.optim.RMSprop(weights), {}, ["RMSprop does not converge"]),
        (type("Lion", (torch.optim.Adam,), {})(weights), {}, ["Lion does not converge"]),
        (Settings(optimizer=torch.optim.AdamW(weights)), {}, ["AdamW does not converge"]),
        (torch.optim.SGD(weights, lr=1.0, momentum=0.5), {}, ["momentum=0.5 in SGD"]),
        (torch.optim.SGD(weights, lr=1.0), {}, []),
        (None, {}, []),
    ):
        one = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(10, 10))
        trainer = trainer_of(one)
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            begin(
                callback_class(trainer, ddp.PrunedGradients(momentum=0.9)),
                arguments(tmp_path, **more),
                optimizer=optimizer,
            )
        texts = [str(w.message) for w in seen]
        assert len(texts) == bool(words) and all(word in texts[0] for word in words), texts


def test_trainer_callback_without_ddp(callback_class, tmp_path):
    callback = callback_class(trainer_of(torch.nn.Linear(1, 1)), ddp.PrunedGradients())
    with pytest.warns(UserWarning, match="one process has nothing to send"):
        begin(callback, arguments(tmp_path, world_size=1))
    callback.on_save(arguments(tmp_path), Settings(global_step=1), None)
    assert not list(tmp_path.iterdir())


def test_transformers_is_imported_only_when_used(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    sys.modules.pop("spccl.integrations._trainer", None)
    with pytest.raises(ModuleNotFoundError, match="pip install transformers"):
        _ = integrations.PrunedGradientsCallback
    with pytest.raises(AttributeError):
        _ = integrations.SomethingElse
