"""Runs the lines of docs/FRAMEWORKS.md with the real libraries on CPU ranks. Each case has its own process, because
each library keeps state."""

from __future__ import annotations

import os
import sys
import traceback
import warnings
from datetime import timedelta

import torch
import torch.distributed as dist

import spccl
from spccl import ddp
from workers.common import FOLDER, RANK, WORLD, join, report

# The variables of torchrun. Nothing listens on the port: each case first makes the group from a file.
os.environ.update(LOCAL_RANK=str(RANK), LOCAL_WORLD_SIZE=str(WORLD), MASTER_ADDR="127.0.0.1", MASTER_PORT="1")


def net() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(80, 80), torch.nn.ReLU(), torch.nn.Linear(80, 8))


def batch() -> torch.Tensor:
    return torch.randn(16, 80, generator=torch.Generator().manual_seed(RANK))


def check(hook, model, n_steps: int) -> None:
    """Check that the hook ran in each step and pruned, and that all ranks have the same parameters."""
    stats = hook.stats()
    assert stats["step"] == n_steps and stats["density_pruned"] < 0.5, stats
    for param in model.parameters():
        gathered = [torch.empty_like(param) for _ in range(WORLD)]
        dist.all_gather(gathered, param.detach())
        assert all(torch.equal(g, gathered[0]) for g in gathered)


def accelerate() -> None:
    from accelerate import Accelerator
    from accelerate.utils import DistributedDataParallelKwargs

    join()
    hook = ddp.PrunedGradients(density=0.05, momentum=0.9)
    accelerator = Accelerator(cpu=True, kwargs_handlers=[DistributedDataParallelKwargs(bucket_cap_mb=100)])
    model, optimizer = accelerator.prepare(net(), torch.optim.SGD(net().parameters(), lr=0.1))
    hook.register(model)
    for _ in range(3):
        optimizer.zero_grad()
        accelerator.backward(model(batch()).square().mean())
        optimizer.step()
    check(hook, model, 3)


def accelerate_ignores_comm_hook() -> None:
    """Accelerate ignores a hook that is not one of its own five, without an error. docs/FRAMEWORKS.md warns of it."""
    from accelerate import Accelerator
    from accelerate.utils import DistributedDataParallelKwargs

    join()
    kwargs = DistributedDataParallelKwargs(comm_hook=ddp.pruned_gradients_hook)
    model = Accelerator(cpu=True, kwargs_handlers=[kwargs]).prepare(net())
    assert model._comm_hooks == []


class Examples(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, i):
        x = torch.randn(80, generator=torch.Generator().manual_seed(i))
        return {"x": x, "labels": x[:8]}


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.net = net()

    def forward(self, x, labels):
        return {"loss": (self.net(x) - labels).square().mean()}


def trainer() -> None:
    """Three steps, a checkpoint, and three steps from it give the same bits as six steps in one run."""
    from transformers import Trainer, TrainingArguments

    join()

    def train(folder, n_steps, resume=None):
        args = TrainingArguments(
            output_dir=f"{FOLDER}/{folder}",
            use_cpu=True,
            max_steps=n_steps,
            save_steps=3,
            per_device_train_batch_size=4,
            learning_rate=0.05,
            lr_scheduler_type="constant",
            optim="sgd",
            max_grad_norm=0,
            report_to=[],
            disable_tqdm=True,
            logging_strategy="no",
            ddp_find_unused_parameters=False,
        )
        hook = ddp.PrunedGradients(density=0.05, momentum=0.9)
        trainer = Trainer(Net(), args, train_dataset=Examples())
        trainer.add_callback(spccl.integrations.PrunedGradientsCallback(trainer, hook))
        trainer.train(resume_from_checkpoint=resume)
        return hook, trainer

    whole, trained = train("whole", 6)
    check(whole, trained.model, 6)
    train("halves", 3)
    rest, resumed = train("halves", 6, f"{FOLDER}/halves/checkpoint-3")
    check(rest, resumed.model, 6)
    for ours, theirs in zip(resumed.model.parameters(), trained.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def lightning() -> None:
    import lightning

    hook = ddp.PrunedGradients(density=0.05, momentum=0.9)

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = Net()

        def training_step(self, example):
            return self.net(**example)["loss"]

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.05)

    class Prune(lightning.Callback):  # on CPU; on CUDA DDPStrategy(ddp_comm_state=, ddp_comm_hook=) does it
        def on_train_start(self, trainer, module):
            hook.register(trainer.strategy.model)

    join()
    strategy = lightning.pytorch.strategies.DDPStrategy(
        process_group_backend="spccl", ddp_comm_state=ddp.PrunedGradients(), ddp_comm_hook=ddp.pruned_gradients_hook
    )
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=WORLD,
        strategy=strategy,
        max_steps=3,
        callbacks=[Prune()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=FOLDER,
    )
    module = Module()
    trainer.fit(module, torch.utils.data.DataLoader(Examples(), batch_size=4))
    assert hook.stats()["step"] == 3 and hook.stats()["density_pruned"] < 0.5
    assert strategy._ddp_comm_state.step == 0, "on CPU Lightning ignores the hook"


def fabric() -> None:
    import lightning

    join()
    fabric = lightning.Fabric(
        accelerator="cpu",
        devices=WORLD,
        strategy=lightning.fabric.strategies.DDPStrategy(process_group_backend="spccl"),
    )
    fabric.launch()
    module = net()
    model, optimizer = fabric.setup(module, torch.optim.SGD(module.parameters(), lr=0.1))
    hook = ddp.PrunedGradients(density=0.05).register(model)
    for _ in range(3):
        optimizer.zero_grad()
        fabric.backward(model(batch()).square().mean())
        optimizer.step()
    check(hook, module, 3)


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
        if RANK < n_ranks:
            store = dist.FileStore(f"{FOLDER}/torchft-{n_ranks}", n_ranks)
            group._pg = group._create_pg(store, RANK, n_ranks)  # configure() does it with a store of torchft's
            x = torch.ones(100)
            group.allreduce([x], dist.AllreduceOptions()).wait()
            assert x[0] == n_ranks
            store.set(f"done-{RANK}", "")  # abort() would break the call of a rank that is still in it
            store.wait([f"done-{r}" for r in range(n_ranks)])
            group.abort()


if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.simplefilter("error", RuntimeWarning)
    case = globals()[sys.argv[1]]
    try:
        case()
    except BaseException:
        report(case.__name__, ok=False, error=traceback.format_exc())
        os._exit(1)
    report(case.__name__, ok=True)
    if dist.is_initialized():
        dist.destroy_process_group()
