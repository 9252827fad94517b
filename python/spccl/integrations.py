"""Ready-made parts for training frameworks. A framework is imported only when its part is used.

    PrunedGradientsCallback    pruned gradients under transformers.Trainer

The other frameworks need a few lines of their own and no part of this module: docs/FRAMEWORKS.md.
"""

from __future__ import annotations

import functools
import warnings
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .ddp import PrunedGradients

__all__ = ["PrunedGradientsCallback"]  # noqa: F822 (made by __getattr__)


def __getattr__(name: str) -> Any:
    if name == "PrunedGradientsCallback":
        return _trainer_callback()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@functools.cache
def _trainer_callback() -> type:
    """The class, made on first use, because its base class is transformers'."""
    try:
        from transformers import TrainerCallback
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "spccl.integrations.PrunedGradientsCallback needs transformers, which is not installed: "
            "pip install transformers"
        ) from error

    class PrunedGradientsCallback(TrainerCallback):
        """Installs a `PrunedGradients` on the model that a transformers.Trainer trains, and writes the hook's state
        into the Trainer's checkpoints.

            hook = spccl.ddp.PrunedGradients(density=0.01, momentum=0.9, clip_norm=1.0)
            trainer = Trainer(model, TrainingArguments(..., ddp_backend="spccl", max_grad_norm=0, optim="sgd"), ...)
            trainer.add_callback(spccl.integrations.PrunedGradientsCallback(trainer, hook))

        Each rank writes its state into each checkpoint folder. Training that resumes from a checkpoint loads the
        state, on another number of ranks too. Without DDP (one process) the callback warns and does nothing. It also
        warns of settings that spoil training with pruning: gradient clipping by the Trainer, Adam, and momentum in
        both the optimizer and the hook.

        Args:
            trainer: the transformers.Trainer that the callback is added to.
            hook: a `PrunedGradients` that is not registered yet and is used by this callback alone.
        """

        def __init__(self, trainer: Any, hook: PrunedGradients) -> None:
            self._trainer, self.hook = trainer, hook
            self._model: Any = lambda: None  # weak reference to the model that has the hook

        def on_train_begin(self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any) -> None:
            if args.world_size == 1:
                warnings.warn("PrunedGradientsCallback: one process has nothing to send: not installed", stacklevel=2)
                return
            model = self._trainer.model_wrapped
            if self._model() is model:  # a second train()
                return
            for text in fights(self.hook, args.max_grad_norm, optimizer):
                warnings.warn(f"PrunedGradientsCallback: {text}", stacklevel=2)
            if self.hook.grad_scaler is None:
                self.hook.grad_scaler = getattr(self._trainer.accelerator, "scaler", None)
            if state.global_step > 0:
                load_state(self.hook, _resumed_from(args, state), args.process_index, args.world_size)
            self.hook.register(model)
            self._model = weakref.ref(model)

        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if self._model() is not None:
                folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
                save_state(self.hook, folder, args.process_index, args.world_size)

    return PrunedGradientsCallback


def _resumed_from(args: Any, state: Any) -> Path:
    """The checkpoint that the Trainer resumes from. The Trainer gives a callback the step, but not the folder."""
    named = args.resume_from_checkpoint
    folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
    return Path(named) if isinstance(named, str) and not folder.is_dir() else folder


def fights(hook: PrunedGradients, max_grad_norm: float | None, optimizer: Any) -> list[str]:
    """Settings of a training loop that spoil training with pruned gradients: one sentence for each.

    Args:
        hook: the hook that the loop uses.
        max_grad_norm: the norm at which the loop clips the averaged gradient; 0 or None = no clipping.
        optimizer: torch.optim.Optimizer, or Accelerate's wrapper of one; None if unknown.
    """
    optimizer = getattr(optimizer, "optimizer", optimizer)
    kind = type(optimizer).__name__
    defaults = getattr(optimizer, "defaults", {})
    texts = []
    if max_grad_norm:
        texts.append(
            f"max_grad_norm={max_grad_norm} clips sums of pruned entries as if they were gradients; set it to 0 "
            f"and pass clip_norm={max_grad_norm} to PrunedGradients"
        )
    if "adam" in kind.lower():
        texts.append(
            f"{kind} does not converge on pruned gradients; use SGD, or spccl.optim.SparseSync in place of "
            "DDP (docs/TRAINING.md has the measurement)"
        )
    if hook.momentum and defaults.get("momentum"):
        texts.append(
            f"momentum={defaults['momentum']} in {kind} and momentum={hook.momentum} in PrunedGradients: set the "
            "optimizer's to 0"
        )
    return texts


# ---- the hook's state beside a checkpoint: one file per rank -------------------------------------------------


def save_state(hook: PrunedGradients, folder: Path, rank: int, world_size: int) -> None:
    """Write this rank's state of `hook` into `folder`. Every rank calls it."""
    import torch

    folder.mkdir(parents=True, exist_ok=True)
    torch.save(hook.state_dict(), folder / f"spccl-rank-{rank}-of-{world_size}.pt")


def load_state(hook: PrunedGradients, folder: Path, rank: int, world_size: int) -> None:
    """Load this rank's state from `folder`, saved by `save_state` on any number of ranks. Warns if there is none.

    Raises: ValueError if the states of some ranks are missing.
    """
    import torch

    mine = folder / f"spccl-rank-{rank}-of-{world_size}.pt"
    if mine.is_file():
        hook.load_state_dict(torch.load(mine, weights_only=True))
        return
    files = list(folder.glob("spccl-rank-*-of-*.pt"))
    if not files:
        warnings.warn(
            f"PrunedGradients: {folder} has no spccl-rank-*.pt: training goes on without what was not sent yet",
            stacklevel=3,
        )
        return
    files.sort(key=lambda file: int(file.name.split("-")[2]))
    states = [torch.load(file, weights_only=True) for file in files]
    hook.load_state_dict(hook.reshard(states, world_size)[rank])
