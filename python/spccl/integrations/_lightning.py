"""Strategies for Lightning."""

from __future__ import annotations

import abc
import os
import shutil
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import DDPStrategy

from spccl.optim import SparseSync

from ._files import (
    clips_own_gradient,
    conflicting_settings,
    figures,
    load_state,
    save_state,
    use_global_weights,
    use_own_weights,
    with_global_weights,
)

if TYPE_CHECKING:
    from spccl.ddp import PrunedGradients


class _LogFigures(Callback):
    """Gives the numbers of each part's statistics to the trainer's loggers, every log_every_n_steps steps."""

    def __init__(self, parts: Callable[[], list[Any]]) -> None:
        self._parts = parts
        self._last = 0  # step that was logged

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        step, every = trainer.global_step, trainer.log_every_n_steps
        if not trainer.loggers or not every or step % every or step == self._last:  # the same one: accumulation
            return
        self._last = step
        found, parts = {}, self._parts()
        for place, part in enumerate(parts):
            found |= figures(part, "spccl" if len(parts) == 1 else f"spccl-{place}")
        for logger in trainer.loggers:
            logger.log_metrics(found, step=step - 1)  # Lightning counts from 0 there


class _RankStates(DDPStrategy):
    """DDPStrategy over spccl that keeps the states of the ranks in a folder beside each checkpoint: NAME.ckpt.spccl.

    Every rank must see the folder's file system. The folder must stay beside the checkpoint. It also logs statistics.
    Raises: ValueError for a checkpoint with optimizer states at an address such as "s3://bucket/x.ckpt".
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**{"process_group_backend": "spccl", **kwargs})
        self._loaded_from: Any = None  # path of the checkpoint

    @abc.abstractmethod
    def _parts(self) -> list[Any]:
        """The hooks or optimizers whose states are kept, in the same order on all ranks."""

    def setup_optimizers(self, trainer: Any) -> None:
        super().setup_optimizers(trainer)
        trainer.callbacks[:] = [c for c in trainer.callbacks if not isinstance(c, _LogFigures)]  # of an earlier fit()
        trainer.callbacks.append(_LogFigures(self._parts))

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        if "optimizer_states" in checkpoint:  # not with weights only
            for place, part in enumerate(self._parts()):
                save_state(part, _folder(filepath) / str(place), self.global_rank, self.world_size)
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def remove_checkpoint(self, filepath: Any) -> None:
        super().remove_checkpoint(filepath)
        if self.is_global_zero and not _is_remote(filepath):
            shutil.rmtree(_folder(filepath), ignore_errors=True)

    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        self._loaded_from = checkpoint_path
        return super().load_checkpoint(checkpoint_path, *args, **kwargs)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        super().load_optimizer_state_dict(checkpoint)
        assert self._loaded_from is not None  # Lightning has called load_checkpoint
        for place, part in enumerate(self._parts()):
            load_state(part, _folder(self._loaded_from) / str(place), self.global_rank, self.world_size)


def _is_remote(filepath: Any) -> bool:
    return "://" in str(filepath)


def _folder(filepath: Any) -> Path:
    """The folder beside a checkpoint. ModelCheckpoint(save_last="link") makes last.ckpt a link.

    Raises: ValueError for the address of a remote file system.
    """
    if _is_remote(filepath):
        raise ValueError(
            f"spccl.integrations: got the checkpoint {str(filepath)!r}, wanted a path of a file system that all ranks "
            "have mounted: the states of the ranks are files beside the checkpoint. Set ModelCheckpoint(dirpath=) and "
            "ckpt_path= to such a path, or save weights only"
        )
    return Path(os.path.realpath(filepath) + ".spccl")


class PrunedGradientsStrategy(_RankStates):
    """DDPStrategy with a `PrunedGradients`, on CPU and GPU, whose states are kept beside Lightning's checkpoints.

        hook = spccl.ddp.PrunedGradients(density=0.01, momentum=0.9, clip_norm=1.0)
        trainer = lightning.Trainer(strategy=spccl.integrations.PrunedGradientsStrategy(hook, bucket_cap_mb=100))

    A run that resumes from a checkpoint continues bit for bit, except with clip_norm (docs/FRAMEWORKS.md). The number
    of ranks may change. The numbers of `hook.stats()` are logged as "spccl/NAME". Warns of settings that spoil training
    with pruning: clipping by Lightning, Adam, and momentum in both the optimizer and the hook.

    Args:
        hook: a `PrunedGradients` that is not registered yet and is used by one fit().
        kwargs: of DDPStrategy. The backend is "spccl" unless process_group_backend names another one.
    """

    def __init__(self, hook: PrunedGradients, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.hook = hook

    def _parts(self) -> list[Any]:
        return [self.hook]

    def configure_ddp(self) -> None:
        super().configure_ddp()
        if self.hook.grad_scaler is None:
            self.hook.grad_scaler = getattr(self.precision_plugin, "scaler", None)
        self.hook.register(self.model, allow_adam=True)  # setup_optimizers warns of it

    def setup_optimizers(self, trainer: Any) -> None:
        super().setup_optimizers(trainer)
        norm = trainer.gradient_clip_val
        texts = {t: None for opt in self.optimizers for t in conflicting_settings(self.hook, norm, opt)}
        for text in texts:
            warnings.warn(f"PrunedGradientsStrategy: {text}", stacklevel=2)


class SparseSyncStrategy(_RankStates):
    """Trains with `SparseSync` in place of DDP. Its states are kept beside Lightning's checkpoints.

        class Module(lightning.LightningModule):
            def configure_optimizers(self):
                return spccl.optim.SparseSync(torch.optim.AdamW(self.parameters(), lr=3e-4), density=0.01)

        trainer = lightning.Trainer(strategy=spccl.integrations.SparseSyncStrategy())

    The model is not wrapped: each rank steps its own weights. Rank 0's parameters and buffers are sent to all ranks
    before the first step. Validation, checkpoints and the module after fit() have the global weights. A run that
    resumes from a checkpoint continues bit for bit. The number of ranks may change. The numbers of the statistics of
    the SparseSync are logged as "spccl/NAME"; with several optimizers as "spccl-I/NAME".

    Args:
        kwargs: of DDPStrategy, such as timeout. The backend is "spccl" unless process_group_backend names another one.
    Raises: TypeError in fit() if configure_optimizers returns an optimizer that is not a SparseSync.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._training = False

    def _parts(self) -> list[Any]:
        return list(self.optimizers)

    def configure_ddp(self) -> None:
        """Make no DDP module. What DDP would send when it is made is sent here."""
        assert self.model is not None
        for tensor in (*self.model.parameters(), *self.model.buffers()):
            dist.broadcast(tensor.detach(), src=0)

    def setup_optimizers(self, trainer: Any) -> None:
        super().setup_optimizers(trainer)
        for opt in self.optimizers:
            if not isinstance(opt, SparseSync):
                raise TypeError(
                    f"SparseSyncStrategy: configure_optimizers returned a {type(opt).__name__}, wanted SparseSync: "
                    "without it each rank would train a model of its own. Return spccl.optim.SparseSync(optimizer, "
                    "density=0.01)"
                )
            opt.states_apart = True
        self._training = True
        if trainer.gradient_clip_val and self.world_size > 1:
            text = clips_own_gradient(trainer.gradient_clip_val, self.world_size)
            warnings.warn(f"SparseSyncStrategy: gradient_clip_val: {text}", stacklevel=2)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Of rank 0, which writes the checkpoint, the global weights."""
        for opt in self.optimizers:
            opt.wait()
        state = super().lightning_module_state_dict()
        for opt in self.optimizers:
            state = with_global_weights(opt, state, self.is_global_zero)
        return state

    def on_validation_start(self) -> None:
        super().on_validation_start()
        for opt in self.optimizers:
            use_global_weights(opt)

    def on_validation_end(self) -> None:
        super().on_validation_end()
        for opt in self.optimizers if self._training else ():
            use_own_weights(opt)

    def on_train_end(self) -> None:
        super().on_train_end()
        self._training = False
        for opt in self.optimizers:
            use_global_weights(opt)
