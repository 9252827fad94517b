"""Gradient pruning for FSDP2 (`fully_shard`): `prune`.

FSDP2 reduce-scatters a gradient within a replica; then each rank averages its shard over replicas. This file replaces
that average by a pruned one. `_pruning` finds torch's parameter groups, and has what it shares with the hook for DDP.
Imports torch; knows nothing of formats or transports.
"""

import functools
import time
from typing import Any

import torch
import torch.distributed as dist

from spccl import prune as prune_

from ._pruning import hook_state
from ._pruning.backward import at_end_of_backward, pass_number
from ._pruning.checks import require
from ._pruning.fsdp_model import Unit, find_units
from ._pruning.hook import PruningHook
from ._pruning.optimizers import refuse_adam, refuse_momentum, warn_at_first_step

_WHO = "spccl.fsdp.prune"
# How SparseSync is used in place of this hook.
_INSTEAD = 'with fully_shard(..., mesh=mesh["shard"]) and group=mesh.get_group("replicate")'


def prune(
    model: torch.nn.Module,
    density: float | None = None,
    *,
    group: "dist.ProcessGroup | None" = None,
    optimizer: torch.optim.Optimizer | None = None,
    allow_adam: bool = False,
    **settings: Any,
) -> "PrunedShards":
    """Average gradients over replicas by sending only their largest entries; keep the rest for later steps.

        mesh = init_device_mesh("cuda", (n_hosts, 8), mesh_dim_names=("replicate", "shard"))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)          # momentum is in the hook
        hook = spccl.fsdp.prune(model, density=0.01, momentum=0.9, warmup_steps=200, optimizer=optimizer)

    Call it once on all ranks, after the last `fully_shard` and before the first backward pass; parameters that are
    frozen later are refused. Within a replica nothing changes: all-gathers and reduce-scatters stay dense.

    Args:
        model: sharded by `fully_shard` over a mesh of 2 dimensions, replicas and shards. Parameter groups whose mesh
            has shards alone (experts, say) are left as they are.
        density: share of each shard's entries sent per step, (0, 1]; None: as in `spccl.ddp.PrunedGradients`, by the
            number of replicas. 1.0 sends everything, which gives the bits of
            torch's own all-reduce on this backend; with a reduce_dtype of float16 torch rounds more.
        group: for a model that is sharded over a mesh of 1 dimension: the ranks that hold the same shard, this rank
            included. Each pair of them must hold the same shard of every parameter. None: the mesh has the replicas.
        optimizer: the one that will take the averaged gradients, to be checked. None: checked at its first step, with
            a warning.
        allow_adam: accept an optimizer with a running second moment, which pruned gradients do not suit. Without
            `optimizer` nothing is checked then.
        settings: those of `spccl.ddp.PrunedGradients`. `clip_norm` bounds the norm of a replica's whole gradient, as
            clip_norm * sqrt(replicas), and costs an all-reduce of 8 bytes over the shards per parameter group; not
            with tensor parallelism.
            `min_numel` counts the elements of the whole parameter.
    Returns: a `PrunedShards`, which is needed for statistics and checkpoints alone.
    Raises: TypeError if `fully_shard` was not called on the model; ValueError for a setting out of range, a model
        without replicas, a group that this rank is not in or whose ranks hold different shards, modules with several
        meshes or another all-reduce hook, ranks that differ in settings other than `seed`, clip_norm with tensor
        parallelism, momentum in both the hook and the
        optimizer, or for an Adam-like optimizer without allow_adam (use `spccl.optim.SparseSync`: docs/TRAINING.md).
    """
    hook = PrunedShards(density, **settings)
    if optimizer is not None:
        if not allow_adam:
            refuse_adam(_WHO, optimizer, _INSTEAD)
        refuse_momentum(_WHO, hook.momentum, optimizer)
    hook._attach(find_units(_WHO, model, group))
    if optimizer is None and not allow_adam:
        warn_at_first_step(hook, model.parameters(), _INSTEAD)
    return hook


class PrunedShards(PruningHook):
    """What `spccl.fsdp.prune` keeps: settings, residuals of this rank's shards, statistics.

    Each parameter group of FSDP2 is pruned as one bucket, on torch's stream for all-reduces. Residual and velocity
    have the size of the shard: 4 bytes per entry of it each. `stats()` counts this rank's shards; its `update_norm` is
    that of the replica.

    FSDP2 features:
        set_requires_gradient_sync(False): the hook sees the accumulated gradient once.
        set_requires_all_reduce(False): reduce-scattered gradients are added up on this rank, and the sum is pruned in
            the next backward pass that all-reduces. Until then the parameters' gradients are 0.
        A module that runs twice in a forward pass is exchanged twice.
        MixedPrecisionPolicy: the gradient has reduce_dtype: float16, bfloat16, float32 or float64. Residuals are
            float32 all the same.
        set_gradient_divide_factor, set_force_sum_reduction_for_comms, CPU offloading, reshard_after_forward: no effect
            on what is sent.
        Parameters that get no gradient: every parameter of a group must get one in each backward pass, or call
            set_reduce_scatter_unused_params(True) (torch 2.13). A parameter whose whole gradient is 0 then sends
            nothing in that step, and its residual stays.
        Activation checkpoints: around a sharded module only with use_reentrant=False.
        torch.nn.utils.clip_grad_norm_: see docs/TRAINING.md; use clip_norm in its place.
    """

    _made_by = _WHO

    def __init__(self, density: float | None = None, **settings: Any):
        super().__init__(density, **settings)
        require(_WHO, "hosts", self.hosts, self.hosts != "on", "'auto' or 'off': FSDP2 averages over the shards first")
        require(_WHO, "sum_density", self.sum_density, self.sum_density is None, "None with FSDP2: SparseSync has it")
        self._shard: tuple[int, int] | None = None  # number of this rank's shard, of how many; None before prune()
        self._units: list[Unit] = []
        self._norms: torch.Tensor | None = None  # of a loaded state
        self._backward = -1  # torch's number of the backward pass that called last

    def _attach(self, units: list[Unit]) -> None:
        """Take groups and names from torch's parameter groups, and install this hook on them."""
        split = next((unit.split for unit in units if unit.split), None)
        if split and self.clip_norm is not None:
            raise ValueError(
                f"{_WHO}: clip_norm={self.clip_norm!r} with parameter {split!r}, which tensor parallelism has split "
                "too: the norm over the shards of FSDP2 is not that of the whole gradient; leave clip_norm out"
            )
        self._require_same(units[0].replicas, units[0].shards)
        self._join(units[0].replicas)
        self._shard = (units[0].shards.rank(), units[0].shards.size())
        self._norm_group = units[0].shards if self._shard[1] > 1 else None
        self._layouts = {part.name: hook_state.contiguous(part.shape) for unit in units for part in unit.parts}
        self._units = units
        for unit in units:
            unit.install(functools.partial(self._exchange, unit))

    # -- one parameter group -----------------------------------------------------------------------

    @torch.no_grad()
    def _exchange(self, unit: Unit, grad: torch.Tensor) -> None:
        """torch's all-reduce hook: replace `grad` [n], this rank's shard, by the pruned average over replicas.

        The current stream is torch's for all-reduces, and torch waits for it at the end of the backward pass.
        """
        if grad.is_cuda:  # torch may free it on another stream, while this one still uses it
            grad.record_stream(torch.cuda.current_stream(grad.device))
        if unit.hold_back(grad):
            return
        began = time.perf_counter()
        if self._backward != pass_number():
            self._begin_step()
        world_size = dist.get_world_size(self._group)
        average = self._backend_averages(grad.device) and not unit.sums() and not unit.forces_sum()
        scale = 1.0 if average or unit.sums() else 1.0 / world_size
        memory = self._memory(grad.device)
        plan = self._plan(unit, grad, memory)
        self._skip_unused = unit.may_be_unused()
        self._prune_flat(unit.index, grad, plan, memory, scale, unit.divisor(grad.dtype))
        self._statistics.now.select_s += time.perf_counter() - began
        if world_size > 1:
            with self._limited():
                dist.all_reduce(grad, dist.ReduceOp.AVG if average else dist.ReduceOp.SUM, group=self._group)

    def _begin_step(self) -> None:
        self._backward = pass_number()
        super()._begin_step()
        at_end_of_backward(self._finish_step)

    def _finish_step(self) -> None:
        self._backward = -1
        if self._units[0].in_backward():
            raise RuntimeError(
                f"{_WHO}: rank {dist.get_rank()}: a backward pass has ended inside the backward pass of the "
                "model, as with checkpoint(..., use_reentrant=True) around modules that fully_shard() was called on; "
                "each would count as a step. Use use_reentrant=False, or checkpoint inside these modules"
            )
        self._end_step(len(self._units) - 1)

    def _memory(self, device: torch.device) -> hook_state.OnDevice:
        known = device in self._devices
        memory = super()._memory(device)
        if not known and self._norms is not None:
            memory.set_norms(self._norms, len(self._units))
        return memory

    def _plan(self, unit: Unit, grad: torch.Tensor, memory: hook_state.OnDevice) -> prune_.Plan | None:
        """The plan of a parameter group; None if all its shards on this rank are empty."""
        if grad.numel() != unit.length:
            names = ", ".join(part.name for part in unit.parts)
            raise RuntimeError(
                f"{_WHO}: rank {dist.get_rank()}: the reduced gradient of ({names}) has {grad.numel()} elements, "
                f"wanted {unit.length}: some of these parameters got no gradient in this backward pass, or were frozen "
                "or unfrozen after spccl.fsdp.prune(). Freeze parameters before it; for parameters that are used only "
                "at times call model.set_reduce_scatter_unused_params(True) (torch 2.13), or give them a fully_shard() "
                "of their own"
            )
        key = (unit.index, grad.dtype, grad.device)
        if key not in self._plans:
            params = []
            for part in unit.parts:
                pruned = len(part.whole) > 1 and part.whole.numel() >= self.min_numel
                numel = part.shape.numel()
                if numel:
                    params.append((part.begin, self._param_state(part.name, numel, pruned, grad.dtype, memory)))
            self._plans[key] = prune_.Plan(params, unit.length, grad.dtype, grad.device) if params else None
        return self._plans[key]

    # -- checkpoints -------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """This rank's state: save one per rank, next to the model's.

        Returns what `PrunedGradients.state_dict` returns, with the number of replicas as "world_size" and with
        "shard": (number of this rank's shard, number of shards), and "norms", which clip_norm needs. Tensors have
        the shape of this rank's shard.
        """
        norms = next((memory.norms().cpu() for memory in self._devices.values()), self._norms)
        return {**super().state_dict(), "shard": self._shard, "norms": norms}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict` of the same rank.

        Raises: ValueError if it is of another version, shard or number of replicas (pass the states of all replicas
            of one shard through `reshard` first), or names or sizes differ from the model's; RuntimeError for an
            object that `prune` has not made.
        """
        if self._shard is None:
            raise RuntimeError(
                "PrunedShards.load_state_dict: this object is on no model; call hook = spccl.fsdp.prune(model), which "
                "makes one, and load the state into that"
            )
        if tuple(state.get("shard", ())) != self._shard:
            raise ValueError(
                f"PrunedShards.load_state_dict: rank {dist.get_rank()}: got the state of shard "
                f"{state.get('shard', 'none')}, this rank has {self._shard} (number, of how many); load the file that "
                "this rank saved. States cannot be moved to another number of shards"
            )
        super().load_state_dict(state)
        self._norms = state["norms"]
