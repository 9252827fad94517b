"""Gradient pruning for DistributedDataParallel: `PrunedGradients`, a communication hook.

`spccl.prune` selects the entries of one bucket. This file adds what DDP needs around it: state per parameter,
clipping, mixed precision, checkpoints, statistics. Imports torch; knows nothing of formats or transports. For each
bucket it makes one call of `spccl.prune` and one all_reduce; most elements of the bucket are zero by then.
`_ddp_model.py` finds the model, `_ddp_state.py` has the memory per device and the checkpoints, `_ddp_stats.py` the
counts.
"""

import contextlib
import math
import time
import warnings
from typing import Any

import torch
import torch.distributed as dist

from spccl import _ddp_state, backend, prune

from ._ddp_model import find_ddp, find_ddp_by_hook, refuse_adam, trained, trained_numels
from ._ddp_stats import Statistics, Tally

_AVERAGING_BACKENDS = ("spccl", "nccl")


def pruned_gradients_hook(state, bucket):  # unannotated: DDP refuses annotations kept as strings
    """Communication hook for `DistributedDataParallel.register_comm_hook(state, hook)`.

    Args:
        state: a `PrunedGradients`. `PrunedGradients.register(model)` does the same, and also finds the
            DDP module inside a wrapper.
        bucket: torch.distributed.GradBucket, flat gradient [n], any floating dtype.
    Returns: torch.futures.Future of the average over ranks, [n], the bucket's dtype and device; it is
        the bucket's own buffer.
    Raises: TypeError if torch.compile calls it per parameter (`optimize_ddp="python_reducer"`).
    """
    return state.exchange(bucket)


class PrunedGradients:
    """Sends only the largest entries of each gradient; keeps the rest for later steps.

    Each rank replaces its local gradient by its entries above a threshold and adds the others to a residual,
    which later steps send (error feedback). The hook hands the backend a dense tensor that is mostly zeros.
    With backend="spccl" only the non-zeros travel. With another backend training is the same and no bytes
    are saved; one warning says so.

        hook = spccl.ddp.PrunedGradients(density=0.01, momentum=0.9, warmup_steps=200).register(ddp_model)
        optimizer = torch.optim.SGD(ddp_model.parameters(), lr=0.1)          # momentum is in the hook

    `ddp_model.register_comm_hook(hook, spccl.ddp.pruned_gradients_hook)` is the same as `hook.register`.

    Args:
        density: share of each parameter's entries sent per step, (0, 1]. The share holds to within a few
            percent on average over parameters; it is not exact.
        sample: share of a parameter that is looked at to find the threshold, (0, 1]. Small parameters take a
            larger share, so that 16 to 32 sampled entries lie above the threshold.
        error_feedback: keep what is not sent (4 bytes per parameter entry). False drops it.
        leak: factor on the residual per step, (0, 1]. 1 loses nothing; below 1 forgets old entries.
        dense_steps: number of first steps in which everything is sent.
        warmup_steps: number of steps after those in which the density falls geometrically from 1 to `density`.
        min_numel: parameters with fewer elements are always sent whole, as are those with fewer than two
            dimensions.
        momentum: momentum correction, [0, 1): momentum is applied to the local gradient before entries are
            selected (another 4 bytes per entry), and cleared where an entry is sent. Set the optimizer's own
            momentum to 0. Needs error_feedback.
        clip_norm: bound on the gradient's norm, None for none. It applies to local gradients before they are
            added to the residual, as clip_norm * sqrt(ranks): a local gradient is that much larger than an
            average of independent ones. Buckets that have not arrived in this step count with their norm of
            the step before.
        grad_scaler: the torch.amp.GradScaler of the training loop, if any: residual and velocity follow its
            changes of scale. Without one, gradients are taken as they are.
        norm_every: measure the residual's norm every so many steps for `stats`; 0 never.
        seed: of the random choice of sampled places, and of the rounding below.
        max_ctas: most thread blocks of this hook's all-reduces on CUDA; None = all of the group's. Fewer leave
            multiprocessors to the backward pass, and the exchange takes longer. All ranks give the same number. Other
            backends than spccl and the CPU ignore it.
        residual_dtype: torch.float32 (float64 for float64 gradients), or torch.bfloat16 to keep 2 bytes per entry
            instead of 4. A bfloat16 residual is rounded at random in every step, so that its mean is right; but what
            is sent and what is kept then no longer add up exactly. Not for float64 gradients.
    Errors: ValueError for a setting out of range, with its name and the allowed range.

    DDP features:
        no_sync: the hook sees the accumulated gradient once.
        gradient_as_bucket_view, static_graph, bucket rebuilding: no effect, as state belongs to parameters.
        find_unused_parameters: a parameter whose whole local gradient is 0 sends nothing in that step; its
            residual stays.
        Join (uneven inputs): a rank that has joined counts as having gradient 0 and goes on sending its
            residual.
        inf and nan: such an entry is sent as it is and leaves its residual and velocity unchanged, so every rank
            sees the value and GradScaler skips the step. All else that was sent in that step is lost with it.
        sparse gradients (nn.Embedding(sparse=True)): averaged without pruning.

    On CUDA the host never waits, but for norm_every, and all that changes from step to step is in GPU memory, where a
    replayed graph finds it. Gradients are float16, bfloat16, float32 or float64, on the host or on CUDA; CUDA needs
    an spccl that was built with it. On the host one thread prunes.

    Sources: Lin et al. 2018, "Deep Gradient Compression", ICLR, sections 3 and 5; Hough et al., "SpCCL",
    section VI.B. The local clipping from running norms is this project's.
    """

    def __init__(
        self,
        density: float = 0.01,
        sample: float = 0.001,
        error_feedback: bool = True,
        leak: float = 1.0,
        *,
        dense_steps: int = 0,
        warmup_steps: int = 0,
        min_numel: int = 4096,
        momentum: float = 0.0,
        clip_norm: float | None = None,
        grad_scaler: "torch.amp.GradScaler | None" = None,
        norm_every: int = 0,
        seed: int = 0,
        max_ctas: int | None = None,
        residual_dtype: torch.dtype = torch.float32,
    ):
        _require("density", density, 0 < density <= 1, "in (0, 1]")
        _require("sample", sample, 0 < sample <= 1, "in (0, 1]")
        _require("leak", leak, 0 < leak <= 1, "in (0, 1]")
        _require("momentum", momentum, 0 <= momentum < 1, "in [0, 1)")
        _require("momentum", momentum, momentum == 0 or error_feedback, "0 when error_feedback is False")
        _require("dense_steps", dense_steps, dense_steps >= 0, "0 or more")
        _require("warmup_steps", warmup_steps, warmup_steps >= 0, "0 or more")
        _require("min_numel", min_numel, min_numel >= 1, "1 or more")
        _require("clip_norm", clip_norm, clip_norm is None or clip_norm > 0, "above 0, or None")
        _require("norm_every", norm_every, norm_every >= 0, "0 or more")
        _require("max_ctas", max_ctas, max_ctas is None or max_ctas >= 1, "1 or more, or None")
        known = residual_dtype in (torch.float32, torch.bfloat16)
        _require("residual_dtype", residual_dtype, known, "torch.float32 or torch.bfloat16")
        self.density = density
        self.sample = sample
        self.error_feedback = error_feedback
        self.leak = leak
        self.dense_steps = dense_steps
        self.warmup_steps = warmup_steps
        self.min_numel = min_numel
        self.momentum = momentum
        self.clip_norm = clip_norm
        self.grad_scaler = grad_scaler
        self.norm_every = norm_every
        self.seed = seed
        self.max_ctas = max_ctas
        self.residual_dtype = residual_dtype
        self.step = 0  # number of backward passes that called this hook and have ended
        self._group: dist.ProcessGroup | None = None
        self._names: dict[int, str] = {}
        self._numels: dict[str, int] = {}
        self._slots: dict[int, prune.Slot] = {}  # by id of the parameter
        self._plans: dict[tuple[int, ...], prune.Plan] = {}  # by ids of the bucket's parameters
        self._devices: dict[torch.device, _ddp_state.OnDevice] = {}
        self._loaded: dict[str, dict[str, Any]] = {}
        self._skip_unused = False
        self._static_graph = False
        self._averages: dict[torch.device, bool] = {}
        self._limit: contextlib.AbstractContextManager[None] | None = None
        # Buckets are kept for one step. Otherwise the backend's thread may drop the last reference, and freeing a
        # tensor that Python has seen needs Python: at exit that aborts the process (Gloo, 4 of 90 short runs).
        self._held: list[torch.Tensor] = []
        self._statistics = Statistics()

    # -- registration ------------------------------------------------------------------------------

    def register(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        allow_adam: bool = False,
    ) -> "PrunedGradients":
        """Install this hook on `model`, once, before its first backward pass. Returns self.

        Args:
            model: DistributedDataParallel, or a module that wraps one: torch.compile(ddp), what Accelerate's
                prepare() or Fabric's setup() returned, Trainer.model_wrapped.
            optimizer: the one that will take the averaged gradients, to be checked; None: not checked.
            allow_adam: accept an optimizer with a running second moment, which pruned gradients do not suit.
        Raises: TypeError if there is no DistributedDataParallel in `model`, or more than one; RuntimeError if this
            object is already on a model; ValueError if loaded state does not fit the model, or for an Adam-like
            optimizer without allow_adam.
        """
        if optimizer is not None and not allow_adam:
            refuse_adam(optimizer)
        wrapped = find_ddp(model)
        if self._group is not None:
            raise RuntimeError("PrunedGradients.register: already registered on a model; make one object per model")
        _ddp_state.check_fit(self._loaded, trained_numels(wrapped))
        wrapped.register_comm_hook(self, pruned_gradients_hook)
        self._attach(wrapped)
        return self

    def _attach(self, model: torch.nn.parallel.DistributedDataParallel) -> None:
        """Take group, parameter names and DDP settings from the model that calls this hook."""
        self._numels = trained_numels(model)
        _ddp_state.check_fit(self._loaded, self._numels)
        self._group = model.process_group
        self._names = {id(p): n for n, p in trained(model)}
        self._static_graph = bool(model.static_graph)
        self._skip_unused = bool(model.find_unused_parameters or model.static_graph)

    def _attach_to_caller(self) -> None:
        """Find the model after `model.register_comm_hook(self, ...)`: DDP does not tell a hook whose it is.

        Searches this process's objects, once. Raises: RuntimeError if no model, or more than one, has this hook.
        """
        self._attach(find_ddp_by_hook(self))

    # -- one bucket --------------------------------------------------------------------------------

    def exchange(self, bucket: dist.GradBucket) -> torch.futures.Future:
        """Prune one bucket and start its all-reduce. See `pruned_gradients_hook`."""
        if not isinstance(bucket, dist.GradBucket):
            raise TypeError(
                f"pruned_gradients_hook: wanted a GradBucket, got {type(bucket).__name__}; "
                'torch._dynamo.config.optimize_ddp = "python_reducer" is not supported, use "ddp_optimizer"'
            )
        if self._group is None:
            self._attach_to_caller()
        began = time.perf_counter()
        if bucket.index() == 0:
            self._begin_step()
        buffer = bucket.buffer()
        average = self._backend_averages(buffer.device)
        scale = 1.0 if average else 1.0 / dist.get_world_size(self._group)
        if buffer.is_sparse or not buffer.is_floating_point():
            buffer.mul_(scale)
            self._statistics.now.add(buffer._nnz() if buffer.is_sparse else buffer.numel(), buffer.element_size())
        else:
            self._prune_bucket(bucket, buffer, scale)
        op = dist.ReduceOp.AVG if average else dist.ReduceOp.SUM
        if buffer.is_sparse and average:  # NCCL and Gloo have no AVG for sparse tensors
            buffer.mul_(1.0 / dist.get_world_size(self._group))
            op = dist.ReduceOp.SUM
        self._statistics.now.select_s += time.perf_counter() - began
        if bucket.is_last():
            self._end_step(bucket.index())
        if dist.get_world_size(self._group) == 1:
            return _completed(buffer)
        with self._limited():
            work = dist.all_reduce(buffer, op=op, group=self._group, async_op=True)
        self._held.append(buffer)
        if buffer.device.type == "cpu" and not buffer.is_sparse and self._ends_with_backward():
            return _finished_by_backward(work, buffer)
        return work.get_future().then(_first_tensor)

    def _limited(self) -> contextlib.AbstractContextManager[None]:
        """The context in which a bucket's all-reduce is called."""
        if self._limit is None:
            ours = self.max_ctas is not None and "spccl" in [
                _backend_name(self._group, d) for d in self._group._device_types
            ]
            self._limit = backend.limit_ctas(self.max_ctas, self._group) if ours else contextlib.nullcontext()
        return self._limit

    def _ends_with_backward(self) -> bool:
        """Whether a callback queued now runs before DDP waits for this bucket.

        Not outside a backward pass (the shadow passes of Join), and not in static_graph's first step,
        where DDP starts and awaits all buckets within one such callback.
        """
        return torch._C._current_graph_task_id() != -1 and not (self._static_graph and self.step <= 1)

    def _begin_step(self) -> None:
        self._held.clear()
        self._statistics.now = Tally(density=self.density_at(self.step))
        for memory in self._devices.values():
            memory.has_scale = False

    def _end_step(self, last_bucket: int) -> None:
        self.step += 1
        self._statistics.end_step()
        for memory in self._devices.values():
            memory.end_step(last_bucket)
        if self.norm_every and self.step % self.norm_every == 0:
            self._statistics.measure_residual(self._slots.values())

    def _prune_bucket(self, bucket: dist.GradBucket, buffer: torch.Tensor, scale: float) -> None:
        """Replace a bucket's gradients by what is sent now."""
        memory = self._devices.get(buffer.device)
        if memory is None:
            memory = self._devices[buffer.device] = _ddp_state.OnDevice(len(self._names), buffer.device)
        plan = self._plan(bucket, buffer, memory)
        rule = prune.Rule(
            density=self.density,
            sample=self.sample,
            leak=self.leak,
            momentum=self.momentum,
            scale=scale,
            dense_steps=self.dense_steps,
            warmup_steps=self.warmup_steps,
            seed=self.seed & 0xFFFFFFFF,
            skip_zeros=self._skip_unused,
        )
        loss_scale = memory.read_scale(self.grad_scaler)
        factor = None
        if self.clip_norm is not None or (self.norm_every and (self.step + 1) % self.norm_every == 0):
            memory.add_norm(bucket.index(), buffer, loss_scale)
        if self.clip_norm is not None:
            factor = memory.clip_factor(self.clip_norm * math.sqrt(dist.get_world_size(self._group)))
        plan.run(buffer, rule, factor, loss_scale)
        self._statistics.now.add(buffer.numel(), buffer.element_size())

    def _plan(self, bucket: dist.GradBucket, buffer: torch.Tensor, memory: _ddp_state.OnDevice) -> prune.Plan:
        """The plan of this bucket. DDP may put parameters into other buckets after the first step."""
        params = bucket.parameters()
        key = tuple(map(id, params))
        plan = self._plans.get(key)
        if plan is None:
            slots = [self._slot(param, buffer.dtype, memory) for param in params]
            first = buffer.storage_offset()
            begins = [grad.storage_offset() - first for grad in bucket.gradients()]
            segments = list(zip(begins, slots, strict=True))
            plan = self._plans[key] = prune.Plan(segments, buffer.numel(), buffer.dtype, buffer.device)
        return plan

    def _slot(self, param: torch.Tensor, dtype: torch.dtype, memory: _ddp_state.OnDevice) -> prune.Slot:
        slot = self._slots.get(id(param))
        if slot is None:
            name = self._names.get(id(param))
            if name is None:
                raise RuntimeError(
                    f"PrunedGradients: a parameter of shape {tuple(param.shape)} is not of the model that this object "
                    "was registered on first; make one object per model"
                )
            pruned = param.dim() > 1 and param.numel() >= self.min_numel
            slot = prune.Slot(name, param.numel(), pruned, memory.states[list(self._names).index(id(param))])
            slot.state[prune.STEP] = self.step
            if name in self._loaded:
                _ddp_state.fill_slot(slot, self._loaded.pop(name), self.error_feedback)
            keeps = pruned and self.error_feedback and self.density < 1
            slot.prepare(dtype, keeps, self.momentum > 0, self.residual_dtype)
            self._slots[id(param)] = slot
        return slot

    def _backend_averages(self, device: torch.device) -> bool:
        """Whether the group's backend for this device has ReduceOp.AVG; warns once if it is not spccl."""
        if device not in self._averages:
            name = _backend_name(self._group, device)
            self._averages[device] = name in _AVERAGING_BACKENDS
            if name != "spccl":
                warnings.warn(
                    f"PrunedGradients: the group's backend for {device.type} is {name!r}, not 'spccl': "
                    "gradients are pruned, but all bytes still travel. "
                    'Use init_process_group("spccl") to save them.',
                    stacklevel=2,
                )
        return self._averages[device]

    # -- schedule, statistics ----------------------------------------------------------------------

    def density_at(self, step: int) -> float:
        """Wanted density in step `step` (0 is the first synchronising backward pass)."""
        if step < self.dense_steps:
            return 1.0
        done = (step - self.dense_steps + 1) / (self.warmup_steps + 1)
        return self.density ** min(1.0, done)

    def stats(self) -> dict[str, float | int | None]:
        """Numbers of the last complete step and of the run since it started (or was loaded).

        Returns a dict:
            step               completed steps
            density_target     wanted density of pruned parameters in the last step
            density_sent       entries sent / entries of all parameters, last step (unpruned ones included)
            density_pruned     the same over pruned parameters only; None if there were none
            density_mean       density_sent averaged over the run
            dense_bytes        bytes of all gradients, per step
            sent_bytes         bytes of the entries sent, last step: values only, before any format
            grad_norm          local gradient's norm, before clipping, in the last step that measured it: each step with
                               clip_norm, else each norm_every steps; 0 before
            residual_norm      residual's norm when last measured (norm_every); None before
            residual_ratio     residual_norm / grad_norm: how many steps' worth of gradient waits
            select_ms          time in this hook in the last step, without the exchange; on asynchronous devices
                               the time to queue it
            select_ms_mean     the same, averaged over the run
            nonfinite_elems    entries with inf or nan so far
        Reading it waits for the device, on CUDA.
        """
        slots = list(self._slots.values())
        return self._statistics.report(self.step, list(self._devices.values()), slots, self._last_sent())

    def _last_sent(self) -> dict[str, int]:
        """Entries sent in the last complete step, by parameter name. Waits for the device."""
        columns = {device: memory.last_sent.tolist() for device, memory in self._devices.items()}
        places = {name: i for i, name in enumerate(self._names.values())}
        return {slot.name: columns[slot.state.device][places[slot.name]] for slot in self._slots.values()}

    # -- checkpoints -------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """This rank's state: save one per rank, next to the model's.

        Returns {"version", "world_size", "step", "seed", "parameters"}; parameters maps the model's
        parameter names to {"residual", "velocity": flat tensors [numel] or None, in units of the
        unscaled gradient; "threshold": float or None}. Tensors are copies.
        """
        parameters = {name: dict(entry) for name, entry in self._loaded.items()}
        step = self.step
        step = _ddp_state.pack(self._slots.values(), parameters, step)
        world_size = dist.get_world_size(self._group) if self._group is not None else None
        return {
            "version": _ddp_state.VERSION,
            "world_size": world_size,
            "step": step,
            "seed": self.seed,
            "parameters": parameters,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict` of the same rank; before or after `register`.

        Raises: ValueError if it is of another version, another number of ranks (use `reshard` first), or
            names or sizes differ from the model's.
        """
        world_size = dist.get_world_size(self._group) if dist.is_initialized() else None
        loaded = _ddp_state.unpack(state, world_size)
        if self._group is not None:
            _ddp_state.check_fit(loaded, self._numels)
        self._loaded = loaded
        self.step = int(state["step"])
        self.seed = int(state["seed"])
        # made again from the loaded entries as buckets arrive
        self._plans.clear()
        self._slots.clear()
        self._devices.clear()
        self._statistics.forget_totals()

    @staticmethod
    def reshard(states: list[dict[str, Any]], world_size: int) -> list[dict[str, Any]]:
        """States for `world_size` ranks from those of any other number of ranks, in rank order.

        New rank r gets the sum over old ranks r, r + world_size, ... times world_size / len(states). So the sum
        of residuals / ranks, which the averages still owe to the model, stays the same. Thresholds start anew.
        Raises: ValueError if a rank's state is missing or the states differ in step.
        """
        return _ddp_state.reshard(states, world_size)


def _require(name: str, value: object, ok: bool, wanted: str) -> None:
    if not ok:
        raise ValueError(f"PrunedGradients: {name}={value!r}, wanted {wanted}")


def _finished_by_backward(work: dist.Work, buffer: torch.Tensor) -> torch.futures.Future:
    """Future of `buffer`, completed by this thread at the end of its backward pass.

    A callback would run on the backend's thread, need Python there, and wrap errors in a RuntimeError. This way
    backward() raises errors as the backend raised them.
    """
    future: torch.futures.Future = torch.futures.Future()

    def finish() -> None:
        work.wait()
        future.set_result(buffer)

    torch.autograd.Variable._execution_engine.queue_callback(finish)
    return future


def _completed(buffer: torch.Tensor) -> torch.futures.Future:
    """Future of `buffer` that is complete; on CUDA its users wait for what is on the current stream."""
    future: torch.futures.Future = torch.futures.Future(devices=[buffer.device] if buffer.is_cuda else None)
    future.set_result(buffer)
    return future


def _first_tensor(future: torch.futures.Future) -> torch.Tensor:
    value = future.value()
    return value if isinstance(value, torch.Tensor) else value[0]


def _backend_name(group: dist.ProcessGroup, device: torch.device) -> str:
    """Name of the backend that serves `device` in a group, "cpu:gloo,cuda:spccl" groups included."""
    return group._get_backend(device).name()
