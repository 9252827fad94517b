"""Checkpoints of Accelerate."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ._files import in_ddp, is_sparse_sync, load_state, save_state, use_own_weights, with_global_weights

if TYPE_CHECKING:
    from spccl.ddp import PrunedGradients
    from spccl.optim import SparseSync


def keep_states(accelerator: Any, part: PrunedGradients | SparseSync) -> None:
    """Make `accelerator.save_state` and `load_state` keep the state of each rank, in the checkpoint's folder.

    With a SparseSync the model in the checkpoint has the global weights. A run that loads the checkpoint continues bit
    for bit, except with PrunedGradients(clip_norm=) (docs/FRAMEWORKS.md). It may have another number of ranks.

        model = accelerator.prepare_model(model, evaluation_mode=True)                  # no DDP
        opt = spccl.optim.SparseSync(torch.optim.AdamW(model.parameters(), lr=3e-4), density=0.01)
        spccl.integrations.keep_states(accelerator, opt)                                # before prepare(opt)
        opt, loader, scheduler = accelerator.prepare(opt, loader, scheduler)

    Call it once for each part, in the same order in the run that saves and in the one that loads.

    Args:
        accelerator: accelerate.Accelerator.
        part: the hook, or the SparseSync itself (not Accelerate's wrapper of it).
    Raises: TypeError for anything else, such as Accelerate's wrapper; RuntimeError if the weights of a SparseSync are
        in a DistributedDataParallel module.
    """
    from spccl.ddp import PrunedGradients

    if not is_sparse_sync(part) and not isinstance(part, PrunedGradients):
        raise TypeError(
            f"keep_states: got a {type(part).__name__}, wanted a SparseSync or a PrunedGradients; give the SparseSync "
            "itself, before accelerator.prepare(optimizer); of a PrunedShards, save hook.state_dict() in a file of "
            "each rank"
        )
    states = _States(accelerator, part)
    if is_sparse_sync(part):
        if in_ddp(part):
            raise RuntimeError(
                "keep_states: Accelerate has wrapped the model in DistributedDataParallel, which averages the "
                "gradients; under SparseSync use accelerator.prepare_model(model, evaluation_mode=True)"
            )
        part.states_apart = True
    accelerator.register_save_state_pre_hook(states.save)
    accelerator.register_load_state_pre_hook(states.find)
    accelerator.register_for_checkpointing(states)  # Accelerate loads it last: after the model and the optimizer


class _States:
    """One part. Accelerate calls `save` on each rank, and load_state_dict on each rank at the end of load_state."""

    def __init__(self, accelerator: Any, part: PrunedGradients | SparseSync) -> None:
        self.accelerator, self.part = accelerator, part
        self.place = len(accelerator._custom_objects)
        self.folder: Path | None = None

    def _folder(self, checkpoint: str) -> Path:
        return Path(checkpoint) / f"spccl-{self.place}"

    def save(self, models: list[Any], weights: list[dict[str, Any]], output_dir: str) -> None:
        save_state(self.part, self._folder(output_dir), self.accelerator.process_index, self.accelerator.num_processes)
        if not is_sparse_sync(self.part):
            return
        writes = self.accelerator.is_main_process or self.accelerator.project_configuration.save_on_each_node
        weights[:] = [with_global_weights(self.part, state, writes) for state in weights]

    def find(self, models: list[Any], input_dir: str) -> None:
        if is_sparse_sync(self.part):
            use_own_weights(self.part)
        self.folder = self._folder(input_dir)

    def state_dict(self) -> dict[str, Any]:
        return {"part": type(self.part).__name__}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["part"] != type(self.part).__name__:
            raise ValueError(
                f"keep_states: the checkpoint's part {self.place} is a {state['part']}, this run's is a "
                f"{type(self.part).__name__}; call keep_states for the same parts in the same order"
            )
        assert self.folder is not None  # load_state calls `find` first
        load_state(self.part, self.folder, self.accelerator.process_index, self.accelerator.num_processes)
