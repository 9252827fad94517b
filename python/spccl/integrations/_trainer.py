"""Callbacks for transformers.Trainer."""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback

from spccl.optim import SparseSync

from ._files import (
    clips_own_gradient,
    conflicting_settings,
    figures,
    has_ddp,
    load_state,
    save_state,
    use_global_weights,
    use_own_weights,
)

if TYPE_CHECKING:
    from spccl.ddp import PrunedGradients


class _RankStates(TrainerCallback):
    """Loads the state of each rank from the checkpoint that train() resumes from, and logs what was sent.

    A Trainer does not tell its callbacks that folder, and TensorBoard's and W&B's callbacks are called before this one.
    So two methods of this one trainer are replaced: train and log.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._resumes: Any = None  # what train() was told to resume from: a folder, True or nothing
        self._train, trainer.train = trainer.train, self._train_and_remember
        self._log, trainer.log = trainer.log, self._log_more

    def _part(self) -> Any:
        """The hook or optimizer that is in use; None if there is none."""
        raise NotImplementedError

    def _train_and_remember(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        self._resumes = resume_from_checkpoint
        return self._train(resume_from_checkpoint, *args, **kwargs)

    def _log_more(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log the statistics where the Trainer logs a loss of training; evaluate() logs none."""
        if "loss" in logs and (part := self._part()) is not None:
            logs.update(figures(part))
        self._log(logs, *args, **kwargs)

    def _load(self, part: Any, args: Any, state: Any) -> None:
        """If train() resumes: load this rank's state.

        Raises: RuntimeError if the Trainer resumes from a folder that train() was not given; of `load_state`.
        """
        if state.global_step == 0:
            return
        if self._resumes is True:  # from the last checkpoint in its output folder
            folder = _folder(args, state)
        elif self._resumes:
            folder = Path(self._resumes)
        else:
            raise RuntimeError(
                f"{type(self).__name__}: the Trainer resumes at step {state.global_step} from a folder that train() "
                "was not given; call trainer.train(resume_from_checkpoint=FOLDER) of the trainer that the callback got"
            )
        load_state(part, folder, args.process_index, args.world_size)


class PrunedGradientsCallback(_RankStates):
    """Installs a `PrunedGradients` on the model that a transformers.Trainer trains, and writes the hook's state
    into the Trainer's checkpoints.

        hook = spccl.ddp.PrunedGradients(density=0.01, momentum=0.9, clip_norm=1.0)
        trainer = Trainer(model, TrainingArguments(..., ddp_backend="spccl", max_grad_norm=0, optim="sgd"), ...)
        trainer.add_callback(spccl.integrations.PrunedGradientsCallback(trainer, hook))

    Each rank writes its state into each checkpoint folder. Training that resumes from a checkpoint loads the
    state, on another number of ranks too. The numbers of `hook.stats()` are logged beside the loss, as "spccl/NAME".
    Without DDP (one process) the callback warns and does nothing. It also warns of settings that spoil training with
    pruning: gradient clipping by the Trainer, Adam, and momentum in both the optimizer and the hook.

    The callback replaces two methods of this trainer: train and log.

    Args:
        trainer: the transformers.Trainer that the callback is added to.
        hook: a `PrunedGradients` that is not registered yet and is used by this callback alone.
    """

    def __init__(self, trainer: Any, hook: PrunedGradients) -> None:
        super().__init__(trainer)
        self.hook = hook
        self._model: Any = lambda: None  # weak reference to the model that has the hook

    def _part(self) -> Any:
        return None if self._model() is None else self.hook

    def on_train_begin(self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any) -> None:
        if args.world_size == 1:
            warnings.warn("PrunedGradientsCallback: one process has nothing to send: not installed", stacklevel=2)
            return
        model = self._trainer.model_wrapped
        if self._model() is model:  # a second train()
            self._load(self.hook, args, state)
            return
        for text in conflicting_settings(self.hook, args.max_grad_norm, optimizer):
            warnings.warn(f"PrunedGradientsCallback: {text}", stacklevel=2)
        if self.hook.grad_scaler is None:
            self.hook.grad_scaler = getattr(self._trainer.accelerator, "scaler", None)
        self.hook.register(model, allow_adam=True)  # what was warned of is not said again
        self._model = weakref.ref(model)
        self._load(self.hook, args, state)  # fits it to the hosts, which are known now

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._model() is not None:
            save_state(self.hook, _folder(args, state), args.process_index, args.world_size)


class SparseSyncCallback(_RankStates):
    """Puts the Trainer's optimizer into a `SparseSync`, in place of DDP, and writes its states into the checkpoints.

        args = TrainingArguments(..., ddp_backend="spccl", max_grad_norm=0)
        trainer = Trainer(model, args, train_dataset=data)
        trainer.add_callback(spccl.integrations.SparseSyncCallback(trainer, density=0.01, clip_norm=1.0))

    The optimizer, its groups, the learning rate and the schedule are those of TrainingArguments, or what
    Trainer(optimizers=) was given. The Trainer evaluates, predicts and saves the global weights. Each rank writes its
    state into each checkpoint folder, and loads it when training resumes, on another number of ranks too. After
    train() the model has the global weights, or those of the best checkpoint with load_best_model_at_end. The numbers
    of the statistics of the SparseSync are logged beside the loss, as "spccl/NAME".

    The callback replaces seven methods of this trainer: train, log, create_optimizer, evaluate, predict, save_model,
    and prepare_model of its accelerator, which then makes no DDP module.

    Args:
        trainer: the transformers.Trainer that the callback is added to, before its first train().
        settings: of `SparseSync`.
    Attributes:
        optimizer: the SparseSync; None before train().
    Raises: RuntimeError in train() with DeepSpeed, FSDP or a model in DDP.
    """

    def __init__(self, trainer: Any, **settings: Any) -> None:
        super().__init__(trainer)
        self._settings = settings
        self.optimizer: Any = None
        self._training = False
        self._create_optimizer = trainer.create_optimizer
        trainer.create_optimizer = self._create_sparse_sync
        self._prepare_model = trainer.accelerator.prepare_model
        trainer.accelerator.prepare_model = self._prepare_without_ddp
        for name in ("evaluate", "predict", "save_model"):
            setattr(trainer, name, self._with_global_weights(getattr(trainer, name)))

    def _part(self) -> Any:
        return self.optimizer

    def _create_sparse_sync(self, *args: Any, **kwargs: Any) -> Any:
        """The Trainer has put the model on its device by now. SparseSync needs weights that do not move."""
        made = self._create_optimizer(*args, **kwargs)
        if self.optimizer is None:
            self.optimizer = SparseSync(made, **self._settings)
            self.optimizer.states_apart = True
            self._trainer.optimizer = self.optimizer
        return self._trainer.optimizer

    def _prepare_without_ddp(self, model: Any, device_placement: Any = None, evaluation_mode: bool = True) -> Any:
        """Accelerate adds mixed precision and compilation, and no DDP. It would move a CPU model even to its place."""
        return self._prepare_model(model, device_placement=False, evaluation_mode=True)

    def _with_global_weights(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            if not self._training or self.optimizer.in_globals:
                return method(*args, **kwargs)
            with self.optimizer.global_weights():
                return method(*args, **kwargs)

        return call

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        theirs = getattr(self._trainer.optimizer, "optimizer", self._trainer.optimizer)
        if self.optimizer is None or theirs is not self.optimizer or has_ddp(self._trainer.model_wrapped):
            raise RuntimeError(
                "SparseSyncCallback: the trainer has made a DistributedDataParallel module or an optimizer "
                f"({type(theirs).__name__}) without this callback; make the callback before the first train(), give "
                "Trainer a model without DDP, and leave out DeepSpeed and FSDP"
            )
        if args.max_grad_norm and args.world_size > 1:
            text = clips_own_gradient(args.max_grad_norm, args.world_size)
            warnings.warn(f"SparseSyncCallback: max_grad_norm: {text}", stacklevel=2)
        use_own_weights(self.optimizer)  # in a second train()
        self._load(self.optimizer, args, state)
        self._training = True

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        save_state(self.optimizer, _folder(args, state), args.process_index, args.world_size)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._training = False
        if not (args.load_best_model_at_end and state.best_model_checkpoint):
            use_global_weights(self.optimizer)


def _folder(args: Any, state: Any) -> Path:
    return Path(args.output_dir) / f"checkpoint-{state.global_step}"
