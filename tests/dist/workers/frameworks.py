"""Runs examples/accelerate, trainer and lightning, and more lines of docs/FRAMEWORKS.md, with the real libraries.

    frameworks.py CASE=PORT ...    PORT is that of the case's store, which the test serves as torchrun's agent does

A rank imports the libraries once and forks a process for each case, because each library keeps state.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import sys
import time
import traceback
import types
import warnings
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

import spccl
from spccl import ddp
from workers.common import FOLDER, RANK, WORLD, raises, report, same_everywhere

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
STEPS = 6  # of a whole run; its checkpoint is at step 3, in the middle of an epoch


def example(name: str) -> types.ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / name / "train.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def options(module: types.ModuleType, case: str, *more: str) -> argparse.Namespace:
    return module.arguments([f"--steps={STEPS}", f"--folder={FOLDER}/{case}", *more])


def lightning_options(module: types.ModuleType, case: str, *more: str) -> argparse.Namespace:
    """Lightning resumes at the start of an epoch only: 4 steps here."""
    return module.arguments(["--steps=8", f"--folder={FOLDER}/{case}", *more])


def own_weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def keep(case: str, model: torch.nn.Module, part) -> None:
    """Write what this rank ended with, for `compare` in the run that resumes."""
    torch.save([own_weights(model), state_of(part)], f"{FOLDER}/{case}-ended-{RANK}.pt")


def compare(case: str, model: torch.nn.Module, part) -> None:
    weights, state = torch.load(f"{FOLDER}/{case}-ended-{RANK}.pt", weights_only=True)
    assert_same(own_weights(model), weights, "weights")
    assert_same(state_of(part), state, "state")


def state_of(part) -> dict:
    return spccl.optim.checkpoint.save(part) if isinstance(part, spccl.optim.SparseSync) else part.state_dict()


def assert_same(got, want, where: str) -> None:
    """Bit for bit, all tensors and numbers of two nested structures."""
    assert type(got) is type(want), f"{where}: {type(got)} {type(want)}"
    if isinstance(got, dict):
        assert got.keys() == want.keys(), f"{where}: {got.keys()} {want.keys()}"
        for key in got:
            assert_same(got[key], want[key], f"{where}.{key}")
    elif isinstance(got, (list, tuple)):
        assert len(got) == len(want), where
        for i, (a, b) in enumerate(zip(got, want, strict=True)):
            assert_same(a, b, f"{where}[{i}]")
    elif isinstance(got, torch.Tensor):
        assert torch.equal(got, want), f"{where}: {(got != want).sum()} of {got.numel()} differ"
    else:
        assert got == want, f"{where}: {got} {want}"


def check_pruned(hook: ddp.PrunedGradients, model: torch.nn.Module, n_steps: int) -> None:
    stats = hook.stats()
    assert stats["steps"] == n_steps and stats["density_sent"] < 1, stats
    for name, param in model.named_parameters():
        same_everywhere(param.detach(), name)


def check_synced(opt: spccl.optim.SparseSync, n_steps: int) -> None:
    stats = opt.stats()
    with contextlib.ExitStack() as stack:
        if opt.in_globals:
            spccl.integrations._files.use_own_weights(opt)
            stack.callback(spccl.integrations._files.use_global_weights, opt)
        opt.check()
    assert (stats["steps"], stats["exchanges"]) == (n_steps, n_steps) and stats["density_sent"] < 1, stats
    assert opt.param_groups[0]["lr"] == 3e-3, "the schedule's warm-up is over"


def check_saved_weights(saved: dict[str, torch.Tensor], names: list[str], state: Path) -> None:
    """The model in a checkpoint has the global weights of the states beside it, and a rank's own differ."""
    entries = torch.load(state, weights_only=True)["sparse_sync"]["parameters"]
    assert len(entries) == len(names)
    for name, entry in zip(names, entries, strict=True):
        assert torch.equal(saved[name], entry["global"]), name
    assert not all(torch.equal(entry["local"], entry["global"]) for entry in entries)


# ---- Accelerate -----------------------------------------------------------------------------------------------


def accelerate_sparse_sync() -> None:
    from safetensors.torch import load_file

    module = example("accelerate")
    _, model, opt, losses = module.train(options(module, "accelerate"))
    assert losses[-1] < losses[0], losses
    assert not isinstance(model, torch.nn.parallel.DistributedDataParallel) and model.training
    check_synced(opt, STEPS)
    keep("accelerate", model, opt)
    names = [name for name, _ in model.named_parameters()]
    folder = Path(FOLDER, "accelerate")
    saved = load_file(folder / "model.safetensors")
    check_saved_weights(saved, names, folder / "spccl-0" / f"spccl-rank-{RANK}-of-{WORLD}.pt")


def accelerate_sparse_sync_resumed() -> None:
    module = example("accelerate")
    _, model, opt, losses = module.train(options(module, "accelerate", "--resume"))
    assert len(losses) == STEPS // 2
    compare("accelerate", model, opt)


def accelerate_pruned() -> None:
    module = example("accelerate")
    _, model, hook, losses = module.train(options(module, "accelerate-pruned", "--pruned"))
    assert losses[-1] < losses[0], losses
    check_pruned(hook, model, STEPS)
    keep("accelerate-pruned", model, hook)


def accelerate_pruned_resumed() -> None:
    module = example("accelerate")
    _, model, hook, _ = module.train(options(module, "accelerate-pruned", "--pruned", "--resume"))
    check_pruned(hook, model, STEPS)
    compare("accelerate-pruned", model, hook)


def accelerate_refusals() -> None:
    """What Accelerate ignores or refuses, and what keep_states refuses. docs/FRAMEWORKS.md says so."""
    from accelerate import Accelerator
    from accelerate.utils import DistributedDataParallelKwargs

    class Subclass(DistributedDataParallelKwargs):
        pass

    dist.init_process_group("spccl")
    with raises(KeyError, "Subclass"):
        Accelerator(cpu=True, kwargs_handlers=[Subclass()])
    kwargs = DistributedDataParallelKwargs(comm_hook=ddp.pruned_gradients_hook)
    accelerator = Accelerator(cpu=True, kwargs_handlers=[kwargs])
    model = accelerator.prepare(torch.nn.Linear(80, 80))
    assert model._comm_hooks == [], "Accelerate ignores a hook that is not one of its own five, without an error"
    opt = spccl.optim.SparseSync(torch.optim.AdamW(model.parameters()))
    prepared = accelerator.prepare(opt)
    with raises(TypeError, "keep_states: got a AcceleratedOptimizer", "before accelerator.prepare"):
        spccl.integrations.keep_states(accelerator, prepared)
    with raises(TypeError, "got a PrunedShards", "save hook.state_dict() in a file of each rank"):
        spccl.integrations.keep_states(accelerator, spccl.fsdp.PrunedShards())
    with raises(RuntimeError, "DistributedDataParallel", "evaluation_mode=True"):
        spccl.integrations.keep_states(accelerator, opt)


# ---- Trainer --------------------------------------------------------------------------------------------------


def trainer_sparse_sync() -> None:
    from safetensors.torch import load_file

    module = example("trainer")
    args = options(module, "trainer")
    trainer, opt = module.train(args, args.folder)
    check_synced(opt, STEPS)
    assert not spccl.integrations._files.has_ddp(trainer.model_wrapped)
    check_trainer_log(trainer)
    keep("trainer", trainer.model, opt)
    names = ordered_names(trainer.model, opt)
    for step in (STEPS // 2, STEPS):
        folder = Path(args.folder, f"checkpoint-{step}")
        saved = load_file(folder / "model.safetensors")
        check_saved_weights(saved, names, folder / f"spccl-rank-{RANK}-of-{WORLD}.pt")
    for name, value in trainer.model.state_dict().items():
        same_everywhere(value, f"{name} after train()")
    same_everywhere(torch.tensor(trainer.evaluate()["eval_loss"]), "loss of the global weights")
    with warnings.catch_warnings(record=True) as seen:  # a second train(), from here
        warnings.simplefilter("always")
        trainer.args.max_steps, trainer.args.max_grad_norm, trainer.args.save_strategy = 2, 1.0, "no"
        trainer.train()
    assert any("max_grad_norm" in str(w.message) and "sqrt(2)" in str(w.message) for w in seen)
    assert opt.steps == STEPS + 2 and opt.in_globals


def check_trainer_log(trainer) -> None:
    """What was sent is logged beside each loss."""
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert logged and all(0 < entry["spccl/density_sent"] <= 1 for entry in logged), logged
    assert logged[0]["spccl/density_target"] > logged[-1]["spccl/density_target"], "the warm-up is seen"


def ordered_names(model: torch.nn.Module, opt: spccl.optim.SparseSync) -> list[str]:
    """Names of the trained parameters in the optimizer's order: the Trainer makes groups."""
    names = {id(param): name for name, param in model.named_parameters()}
    return [names[id(param)] for group in opt.param_groups for param in group["params"]]


def resume_elsewhere(args: argparse.Namespace, output: Path):
    """The example's Trainer, which resumes from the checkpoint in args.folder and has another output folder."""
    trainer, callback = example("trainer").make_trainer(args, str(output))
    trainer.train(resume_from_checkpoint=f"{args.folder}/checkpoint-{STEPS // 2}")
    return trainer, callback


def trainer_sparse_sync_resumed() -> None:
    """The output folder has the states of another run's checkpoint of this step: those of the last step here."""
    args = options(example("trainer"), "trainer", "--resume")
    output = Path(FOLDER, "trainer-elsewhere")
    stale, name = output / f"checkpoint-{STEPS // 2}", f"spccl-rank-{RANK}-of-{WORLD}.pt"
    stale.mkdir(parents=True, exist_ok=True)
    (stale / name).write_bytes(Path(args.folder, f"checkpoint-{STEPS}", name).read_bytes())
    trainer, callback = resume_elsewhere(args, output)
    compare("trainer", trainer.model, callback.optimizer)


def trainer_pruned() -> None:
    module = example("trainer")
    args = options(module, "trainer-pruned", "--pruned")
    trainer, hook = module.train(args, args.folder)
    check_pruned(hook, trainer.model, STEPS)
    check_trainer_log(trainer)
    keep("trainer-pruned", trainer.model, hook)


def trainer_pruned_resumed() -> None:
    """The output folder is not there yet."""
    args = options(example("trainer"), "trainer-pruned", "--pruned", "--resume")
    trainer, callback = resume_elsewhere(args, Path(FOLDER, "trainer-pruned-elsewhere"))
    check_pruned(callback.hook, trainer.model, STEPS)
    compare("trainer-pruned", trainer.model, callback.hook)


# ---- Lightning ------------------------------------------------------------------------------------------------


def train_and_log(module: types.ModuleType, args: argparse.Namespace):
    """Like module.train, with one of Lightning's loggers: what was sent is logged for every second step."""
    import csv

    from lightning.pytorch.loggers import CSVLogger

    make = module.lightning.Trainer
    logger = CSVLogger(args.folder, version=0)
    module.lightning.Trainer = lambda **given: make(**{**given, "logger": logger, "log_every_n_steps": 2})
    trainer, model = module.train(args, args.folder)
    if RANK == 0:
        logger.save()
        with open(Path(logger.log_dir, "metrics.csv")) as file:
            rows = [row for row in csv.DictReader(file) if row["spccl/density_sent"]]
        assert [int(row["step"]) for row in rows] == [1, 3, 5, 7], rows
        assert all(0 < float(row["spccl/density_sent"]) <= 1 for row in rows), rows
    return trainer, model


def lightning_sparse_sync() -> None:
    module = example("lightning")
    args = lightning_options(module, "lightning")
    trainer, model = train_and_log(module, args)
    (opt,) = trainer.strategy.optimizers
    check_synced(opt, 8)
    assert trainer.strategy.model is model, "no DDP module"
    keep("lightning", model, opt)
    for name, value in model.state_dict().items():
        same_everywhere(value, f"{name} after fit()")
    names = [name for name, _ in model.named_parameters()]
    for step in (4, 8):
        path = Path(args.folder, f"step={step}.ckpt")
        saved = torch.load(path, weights_only=False)["state_dict"]
        check_saved_weights(saved, names, Path(f"{path}.spccl", "0", f"spccl-rank-{RANK}-of-{WORLD}.pt"))
    dist.barrier()
    trainer.strategy.remove_checkpoint(path)
    dist.barrier()
    assert not path.exists() and not Path(f"{path}.spccl").exists()


def lightning_sparse_sync_resumed() -> None:
    module = example("lightning")
    args = lightning_options(module, "lightning", "--resume")
    trainer, model = module.train(args, args.folder)
    compare("lightning", model, trainer.strategy.optimizers[0])


def lightning_pruned() -> None:
    module = example("lightning")
    args = lightning_options(module, "lightning-pruned", "--pruned")
    trainer, model = train_and_log(module, args)
    check_pruned(trainer.strategy.hook, model, 8)
    keep("lightning-pruned", model, trainer.strategy.hook)


def lightning_pruned_resumed() -> None:
    module = example("lightning")
    args = lightning_options(module, "lightning-pruned", "--pruned", "--resume")
    trainer, model = module.train(args, args.folder)
    check_pruned(trainer.strategy.hook, model, 8)
    compare("lightning-pruned", model, trainer.strategy.hook)


def lightning_refusals() -> None:
    """SparseSyncStrategy wants SparseSync; a checkpoint without its states stops the next step."""
    module = example("lightning")
    args = lightning_options(module, "lightning", "--resume")
    with raises(TypeError, "SparseSyncStrategy", "SGD", "model of its own"):
        module.Model = lambda pruned, kind=module.Model: kind(True)
        module.train(args, args.folder)
    strategy = spccl.integrations.PrunedGradientsStrategy(ddp.PrunedGradients())
    with raises(ValueError, "'s3://bucket/x.ckpt'", "a file system that all ranks have mounted", "dirpath="):
        strategy.save_checkpoint({"optimizer_states": []}, "s3://bucket/x.ckpt")
    assert not Path("s3:").exists()


def launched_fabric():
    import lightning

    dist.init_process_group("spccl")
    fabric = lightning.Fabric(
        accelerator="cpu",
        devices=WORLD,
        strategy=lightning.fabric.strategies.DDPStrategy(process_group_backend="spccl"),
    )
    fabric.launch()
    return fabric


def fabric() -> None:
    fabric = launched_fabric()
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(80, 80), torch.nn.ReLU(), torch.nn.Linear(80, 8))
    model, optimizer = fabric.setup(module, torch.optim.SGD(module.parameters(), lr=0.1))
    hook = ddp.PrunedGradients(density=0.05).register(model)
    batch = torch.randn(16, 80, generator=torch.Generator().manual_seed(RANK))
    for _ in range(3):
        optimizer.zero_grad()
        fabric.backward(model(batch).square().mean())
        optimizer.step()
    check_pruned(hook, module, 3)


def fabric_sparse_sync() -> None:
    """The module is not set up by Fabric, which would wrap it in DDP."""
    fabric = launched_fabric()
    torch.manual_seed(0)
    module = fabric.to_device(torch.nn.Linear(80, 80))
    opt = spccl.optim.SparseSync(torch.optim.AdamW(module.parameters(), lr=3e-3), density=0.05)
    optimizer = fabric.setup_optimizers(opt)
    batch = torch.randn(16, 80, generator=torch.Generator().manual_seed(RANK))
    for _ in range(3):
        optimizer.zero_grad()
        with fabric.autocast():
            loss = module(batch).square().mean()
        loss.backward()
        optimizer.step()
    check_synced(opt, 3)


def torchft() -> None:
    from torchft.process_group import ProcessGroupWrapper

    from spccl import backend

    class ProcessGroupSpccl(ProcessGroupWrapper):
        def __init__(self, timeout=timedelta(seconds=60)):
            super().__init__(timeout)

        def _create_pg(self, store, rank, world_size):
            return backend.make_process_group(store, rank, world_size, name="torchft", timeout=self._timeout)

        def getBackendName(self):
            return "torchft-spccl"

    group = ProcessGroupSpccl()
    for n_ranks in (WORLD, WORLD - 1):
        if n_ranks > RANK:
            store = dist.FileStore(f"{FOLDER}/torchft-{n_ranks}", n_ranks)
            group._pg = group._create_pg(store, RANK, n_ranks)  # configure() does it with a store of torchft's
            x = torch.ones(100)
            group.allreduce([x], dist.AllreduceOptions()).wait()
            assert x[0] == n_ranks
            store.set(f"done-{RANK}", "")  # abort() would break the call of a rank that is still in it
            store.wait([f"done-{r}" for r in range(n_ranks)])
            group.abort()


# What a case imports, before the fork: the processes of later cases need not import it again.
IMPORTS = {
    "accelerate": ("accelerate", "transformers.models.gpt2.modeling_gpt2"),
    "trainer": ("transformers.trainer", "transformers.models.gpt2.modeling_gpt2"),
    "lightning": ("lightning.pytorch",),
    "fabric": ("lightning",),
    "torchft": ("torchft",),
}


# ---- one process for each case ----------------------------------------------------------------------------------


def run(name: str, port: str) -> None:
    """Run a case with the variables that torchrun would set. Never returns."""
    os.environ.update(
        LOCAL_RANK=str(RANK),
        LOCAL_WORLD_SIZE=str(WORLD),
        GROUP_RANK="0",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=port,
        TORCHELASTIC_RUN_ID="test",
        TORCHELASTIC_RESTART_COUNT="0",
        TORCHELASTIC_MAX_RESTARTS="0",
        TORCHELASTIC_USE_AGENT_STORE="True",
    )
    status, began = 1, time.monotonic()
    try:
        globals()[name]()
        if dist.is_initialized():
            dist.destroy_process_group()
        report(name, ok=True, seconds=round(time.monotonic() - began, 1), cpu_s=round(time.process_time(), 1))
        status = 0
    except BaseException:
        report(name, ok=False, error=traceback.format_exc())
    sys.stdout.flush()
    os._exit(status)


def main() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("error", RuntimeWarning)
    os.environ["HF_HUB_OFFLINE"] = "1"
    importlib.import_module("torch._dynamo")  # torch.optim imports it; each case would
    cases = [word.split("=") for word in sys.argv[1:]]
    for name, port in cases:
        for module in IMPORTS[name.split("_")[0]]:
            importlib.import_module(module)
        child = os.fork()
        if child == 0:
            run(name, port)
        os.waitpid(child, 0)


if __name__ == "__main__":
    main()
