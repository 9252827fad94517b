"""Gradient pruning for DistributedDataParallel: `PrunedGradients`, a communication hook.

Holds what DDP needs around `spccl.prune`: buckets, state per parameter, schedules, mixed precision,
checkpoints, statistics. Imports torch; knows nothing of formats or transports: it hands each bucket,
mostly zeros by then, to the group's own all_reduce, once.
"""

import math
import time
import warnings
from typing import Any

import torch
import torch.distributed as dist

from spccl import prune

_AVERAGING_BACKENDS = ("spccl", "nccl")
_STATE_VERSION = 1


def pruned_gradients_hook(state, bucket):  # unannotated: DDP refuses annotations kept as strings
    """Communication hook for `DistributedDataParallel.register_comm_hook(state, hook)`.

    Args:
        state: a `PrunedGradients`; `PrunedGradients.register` calls register_comm_hook for you.
        bucket: torch.distributed.GradBucket, flat gradient [n], any floating dtype.
    Returns: torch.futures.Future of the average over ranks, [n], the bucket's dtype and device; it is
        the bucket's own buffer.
    Raises: TypeError if torch.compile calls it per parameter (`optimize_ddp="python_reducer"`).
    """
    return state.exchange(bucket)


class PrunedGradients:
    """Sends only the largest entries of each gradient; keeps the rest for later steps.

    Each rank replaces its local gradient by its entries above a threshold and adds the others to a
    residual that later steps release (error feedback). What is sent is a dense tensor that is mostly
    zeros; the backend makes the saving: with backend="spccl" only the non-zeros travel. With another
    backend training is the same and no bytes are saved (one warning says so).

        hook = spccl.ddp.PrunedGradients(density=0.01, momentum=0.9, warmup_steps=200).register(ddp_model)
        optimizer = torch.optim.SGD(ddp_model.parameters(), lr=0.1)          # momentum is in the hook

    Args:
        density: share of each parameter's entries sent per step, (0, 1]. Steady to within a few percent
            on average over parameters, not exact.
        sample: share of a parameter looked at to find the threshold, (0, 1]; raised for small parameters so
            that 16 sampled entries lie above it.
        error_feedback: keep what is not sent (4 bytes per parameter entry). False drops it.
        leak: factor on the residual per step, (0, 1]. 1 loses nothing; below 1 forgets old entries.
        dense_steps: first steps in which everything is sent.
        warmup_steps: steps after those in which the density falls geometrically from 1 to `density`.
        min_numel: parameters with fewer elements, and those with fewer than two dimensions, are always sent whole.
        momentum: momentum correction, [0, 1): momentum is applied to the local gradient before it is
            kept or sent (another 4 bytes per entry), and cleared where an entry is sent. Set the
            optimizer's own momentum to 0. Needs error_feedback.
        clip_norm: bound on the gradient's norm, None for none. Applied to local gradients before they are
            accumulated, at clip_norm * sqrt(ranks), as a local gradient is that much larger than an average
            of independent ones. Buckets of this step that are not there yet count with their norm of the
            step before.
        grad_scaler: the torch.amp.GradScaler of the training loop, if any: residual and velocity follow its
            changes of scale. Without one, gradients are taken as they are.
        norm_every: measure the residual's norm every so many steps for `stats`; 0 never.
        seed: moves the sampled places.
    Errors: ValueError for a setting out of range, with its name and the allowed range.

    DDP features. no_sync: the hook sees the accumulated gradient once. gradient_as_bucket_view,
    static_graph and bucket rebuilding: state belongs to parameters, so nothing changes.
    find_unused_parameters: a parameter whose whole local gradient is 0 is left alone in that step, its residual
    waits. Uneven inputs (Join): a rank that has joined counts as having gradient 0 and goes on sending its
    residual. A bucket with inf or nan goes out whole and leaves residual and velocity alone, so
    that every rank sees it and GradScaler skips the step; what other buckets and ranks sent in that step is lost with
    it, as in dense DDP. Sparse gradients (nn.Embedding(sparse=True)) are averaged as they are.

    Sources: Lin et al. 2018, "Deep Gradient Compression", ICLR, sections 3 and 5; Hough et al., "SpCCL",
    section VI.B. The threshold's control and the local clipping from running norms are this project's.
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
        self.step = 0  # completed hook steps: backward passes that synchronised
        self._group: dist.ProcessGroup | None = None
        self._names: dict[int, str] = {}
        self._numels: dict[str, int] = {}
        self._slots: dict[int, prune.Slot] = {}
        self._loaded: dict[str, dict[str, Any]] = {}
        self._skip_unused = False
        self._static_graph = False
        self._averages: dict[torch.device, bool] = {}
        self._scale: float | None = None  # loss scale that residual and velocity are multiplied with
        self._bucket_squares: dict[int, float | torch.Tensor] = {}
        # The backend's thread may be the last to let go of a bucket, and a tensor that Python has seen needs
        # Python to die: at exit that aborts (Gloo, 4 of 90 short runs). So this keeps them for a step.
        self._held: list[torch.Tensor] = []
        self._now = _Tally()
        self._last = _Tally()
        self._totals = {"steps": 0, "elems": 0, "sent": 0, "select_s": 0.0, "nonfinite_buckets": 0}
        self._residual_norm: float | None = None

    # -- registration ------------------------------------------------------------------------------

    def register(self, model: torch.nn.parallel.DistributedDataParallel) -> "PrunedGradients":
        """Install this hook on `model`, once, before its first backward pass. Returns self.

        Raises: TypeError if `model` is not DistributedDataParallel; RuntimeError if this object is already on a
            model; ValueError if loaded state does not fit the model.
        """
        if not isinstance(model, torch.nn.parallel.DistributedDataParallel):
            raise TypeError(
                f"PrunedGradients.register: wanted DistributedDataParallel, got {type(model).__name__}; "
                "wrap the model first"
            )
        if self._group is not None:
            raise RuntimeError("PrunedGradients.register: already registered on a model; make one object per model")
        trained = {n: p for n, p in model.module.named_parameters() if p.requires_grad}
        numels = {n: p.numel() for n, p in trained.items()}
        _check_fit(self._loaded, numels)
        model.register_comm_hook(self, pruned_gradients_hook)
        self._group = model.process_group
        self._names = {id(p): n for n, p in trained.items()}
        self._numels = numels
        self._static_graph = bool(model.static_graph)
        self._skip_unused = bool(model.find_unused_parameters or model.static_graph)
        return self

    # -- one bucket --------------------------------------------------------------------------------

    def exchange(self, bucket: dist.GradBucket) -> torch.futures.Future:
        """Prune one bucket and start its all-reduce. See `pruned_gradients_hook`."""
        if not isinstance(bucket, dist.GradBucket):
            raise TypeError(
                f"pruned_gradients_hook: wanted a GradBucket, got {type(bucket).__name__}; "
                'torch._dynamo.config.optimize_ddp = "python_reducer" is not supported, use "ddp_optimizer"'
            )
        began = time.perf_counter()
        if bucket.index() == 0:
            self._begin_step()
        buffer = bucket.buffer()
        average = self._backend_averages(buffer.device)
        scale = 1.0 if average else 1.0 / dist.get_world_size(self._group)
        if buffer.is_sparse or not buffer.is_floating_point():
            buffer.mul_(scale)
            self._now.add(buffer._nnz() if buffer.is_sparse else buffer.numel(), 0, buffer.element_size())
        else:
            self._prune_bucket(bucket, buffer, scale)
        op = dist.ReduceOp.AVG if average else dist.ReduceOp.SUM
        if buffer.is_sparse and average:  # sparse all-reduce has no AVG in any backend
            buffer.mul_(1.0 / dist.get_world_size(self._group))
            op = dist.ReduceOp.SUM
        self._now.select_s += time.perf_counter() - began
        if bucket.is_last():
            self._end_step()
        work = dist.all_reduce(buffer, op=op, group=self._group, async_op=True)
        self._held.append(buffer)
        if buffer.device.type == "cpu" and not buffer.is_sparse and self._ends_with_backward():
            return _finished_by_backward(work, buffer)
        return work.get_future().then(_first_tensor)

    def _ends_with_backward(self) -> bool:
        """Whether a callback queued now runs before DDP waits for this bucket.

        Not outside a backward pass (the shadow passes of Join), and not in static_graph's first step,
        where DDP starts and awaits all buckets within one such callback.
        """
        return torch._C._current_graph_task_id() != -1 and not (self._static_graph and self.step <= 1)

    def _begin_step(self) -> None:
        self._held.clear()
        self._now = _Tally(density=self.density_at(self.step))
        if self.grad_scaler is None:
            return
        scale = float(self.grad_scaler.get_scale())
        if self._scale is not None and scale != self._scale:
            for slot in self._slots.values():
                for state in (slot.residual, slot.velocity):
                    if state is not None:
                        state.mul_(scale / self._scale)
                if slot.threshold is not None:
                    slot.threshold = slot.threshold * (scale / self._scale)
            for index in self._bucket_squares:
                self._bucket_squares[index] *= (scale / self._scale) ** 2
        self._scale = scale

    def _end_step(self) -> None:
        self._last = self._now
        self.step += 1
        totals = self._totals
        totals["steps"] += 1
        totals["elems"] += self._now.elems
        totals["sent"] = totals["sent"] + self._now.sent
        totals["select_s"] += self._now.select_s
        if self.norm_every and self.step % self.norm_every == 0:
            squares = [s.residual.square().sum().item() for s in self._slots.values() if s.residual is not None]
            self._residual_norm = math.sqrt(sum(squares)) / (self._scale or 1.0)

    def _prune_bucket(self, bucket: dist.GradBucket, buffer: torch.Tensor, scale: float) -> None:
        rule = prune.Rule(
            density=self._now.density,
            sample=self.sample,
            leak=self.leak,
            momentum=self.momentum,
            error_feedback=self.error_feedback,
            scale=scale,
        )
        on_host = buffer.device.type == "cpu"
        norm = torch.linalg.vector_norm(buffer, dtype=torch.float32 if buffer.element_size() < 4 else buffer.dtype)
        alive = None if on_host else torch.isfinite(norm)
        if on_host and not math.isfinite(norm.item()):
            self._totals["nonfinite_buckets"] += 1
            self._now.add(buffer.numel(), buffer.numel(), buffer.element_size())
            buffer.mul_(scale)
            return
        factor = self._clip_factor(bucket.index(), norm.item() if on_host else norm)
        if not on_host:
            self._totals["nonfinite_buckets"] = self._totals["nonfinite_buckets"] + (~alive).long()
            if factor is not None:
                buffer.mul_(factor)
        for param, grad in zip(bucket.parameters(), bucket.gradients(), strict=True):
            flat = buffer.as_strided((grad.numel(),), (1,), grad.storage_offset())
            self._send_parameter(param, flat, rule, alive, factor if on_host else None)

    def _send_parameter(
        self,
        param: torch.Tensor,
        grad: torch.Tensor,
        rule: prune.Rule,
        alive: torch.Tensor | None,
        factor: float | None,
    ) -> None:
        """Prune one parameter's part of the bucket, `grad` [numel], in place."""
        slot = self._slot(param)
        pruned = slot.pruned and rule.density < 1
        slot.prepare(grad, rule, pruned)
        if self._skip_unused:
            used = torch.count_nonzero(grad) > 0
            if alive is not None:
                alive = alive & used
            elif not used:
                self._now.add(slot.numel, 0, grad.element_size())
                return
        if not pruned:
            if factor is not None:
                grad.mul_(factor)
            prune.send_all(grad, slot, rule, alive)
            sent = slot.numel
        elif alive is None:
            sent = prune.prune_host(
                grad, slot, rule, seed=self.seed, step=self.step, factor=1.0 if factor is None else factor
            )
        else:
            sent = prune.prune_device(grad, slot, rule, alive, seed=self.seed, step=self.step)
        self._now.add(slot.numel, sent, grad.element_size(), pruned)

    def _clip_factor(self, index: int, norm):
        """Factor on this bucket's gradient, float or 0-dim tensor; None for 1. Also keeps the norm."""
        self._bucket_squares[index] = norm * norm
        if self.clip_norm is None:
            return None
        total = sum(self._bucket_squares.values()) ** 0.5
        bound = self.clip_norm * math.sqrt(dist.get_world_size(self._group)) * (self._scale or 1.0)
        if isinstance(total, torch.Tensor):
            return (bound / (total + 1e-12)).clamp(max=1.0).nan_to_num(1.0)
        return bound / total if total > bound else None

    def _slot(self, param: torch.Tensor) -> prune.Slot:
        slot = self._slots.get(id(param))
        if slot is None:
            name = self._names[id(param)]
            pruned = param.dim() > 1 and param.numel() >= self.min_numel
            slot = self._slots[id(param)] = prune.Slot(name, param.numel(), pruned)
            if name in self._loaded:
                _fill_slot(slot, self._loaded.pop(name), param.device, self._scale or 1.0)
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
            grad_norm          local gradient's norm in the last step, before clipping
            residual_norm      residual's norm when last measured (norm_every); None before
            residual_ratio     residual_norm / grad_norm: how many steps' worth of gradient waits
            select_ms          time in this hook in the last step, without the exchange; on asynchronous devices
                               the time to queue it
            select_ms_mean     the same, averaged over the run
            nonfinite_buckets  buckets with inf or nan so far
        Reading it waits for the device, on CUDA.
        """
        last, totals = self._last, self._totals
        grad_norm = math.sqrt(max(0.0, float(sum(self._bucket_squares.values())))) / (self._scale or 1.0)
        residual = self._residual_norm
        return {
            "step": self.step,
            "density_target": last.density,
            "density_sent": int(last.sent) / max(1, last.elems),
            "density_pruned": int(last.pruned_sent) / last.pruned_elems if last.pruned_elems else None,
            "density_mean": int(totals["sent"]) / max(1, totals["elems"]),
            "dense_bytes": last.dense_bytes,
            "sent_bytes": int(last.sent_bytes),
            "grad_norm": grad_norm,
            "residual_norm": residual,
            "residual_ratio": residual / grad_norm if residual is not None and grad_norm > 0 else None,
            "select_ms": last.select_s * 1e3,
            "select_ms_mean": totals["select_s"] * 1e3 / max(1, totals["steps"]),
            "nonfinite_buckets": int(totals["nonfinite_buckets"]),
        }

    # -- checkpoints -------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """This rank's state: save one per rank, next to the model's.

        Returns {"version", "world_size", "step", "seed", "parameters"}; parameters maps the model's
        parameter names to {"residual", "velocity": flat tensors [numel] or None, in units of the
        unscaled gradient; "threshold": float or None}. Tensors are copies.
        """
        unscale = 1.0 / (self._scale or 1.0)
        parameters = {name: dict(entry) for name, entry in self._loaded.items()}
        for slot in self._slots.values():
            parameters[slot.name] = {
                "residual": None if slot.residual is None else slot.residual * unscale,
                "velocity": None if slot.velocity is None else slot.velocity * unscale,
                "threshold": None if slot.threshold is None else float(slot.threshold) * unscale,
            }
        world_size = dist.get_world_size(self._group) if self._group is not None else None
        return {
            "version": _STATE_VERSION,
            "world_size": world_size,
            "step": self.step,
            "seed": self.seed,
            "parameters": parameters,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict` of the same rank; before or after `register`.

        Raises: ValueError if it is of another version, another number of ranks (use `reshard` first), or
            names or sizes differ from the model's.
        """
        if state.get("version") != _STATE_VERSION:
            raise ValueError(
                f"PrunedGradients.load_state_dict: version {state.get('version')!r}, wanted {_STATE_VERSION}"
            )
        world_size = dist.get_world_size(self._group) if dist.is_initialized() else None
        if None not in (world_size, state["world_size"]) and world_size != state["world_size"]:
            raise ValueError(
                f"PrunedGradients.load_state_dict: state of {state['world_size']} ranks, this group has "
                f"{world_size}; pass all ranks' states through PrunedGradients.reshard(states, {world_size})"
            )
        loaded = {name: dict(entry) for name, entry in state["parameters"].items()}
        if self._group is not None:
            _check_fit(loaded, self._numels)
        self._loaded = loaded
        self.step = int(state["step"])
        self.seed = int(state["seed"])
        self._slots.clear()  # filled again from the loaded entries as buckets arrive
        self._scale = None
        self._bucket_squares.clear()

    @staticmethod
    def reshard(states: list[dict[str, Any]], world_size: int) -> list[dict[str, Any]]:
        """States for `world_size` ranks from those of any other number of ranks, in rank order.

        New rank r gets the sum over old ranks r, r + world_size, ... times world_size / len(states):
        what the averages still owe to the model, sum of residuals / ranks, stays the same. Thresholds are found anew.
        Raises: ValueError if a rank's state is missing or the states differ in step.
        """
        if not states or world_size < 1:
            raise ValueError(f"PrunedGradients.reshard: {len(states)} states for {world_size} ranks")
        if any(s["world_size"] != len(states) or s["step"] != states[0]["step"] for s in states):
            raise ValueError(
                "PrunedGradients.reshard: wanted the states of all ranks at one step, got "
                f"{[(s['world_size'], s['step']) for s in states]} as (ranks, step)"
            )
        factor = world_size / len(states)
        resharded = []
        for rank in range(world_size):
            mine = states[rank::world_size]
            parameters = {}
            for name, entry in states[0]["parameters"].items():
                parameters[name] = {"threshold": None}
                for key in ("residual", "velocity"):
                    parts = [s["parameters"][name][key] for s in mine]
                    parts = [p for p in parts if p is not None] or [None]
                    if parts[0] is None:
                        parameters[name][key] = None if entry[key] is None else torch.zeros_like(entry[key])
                    else:
                        parameters[name][key] = sum(parts[1:], parts[0].clone()) * factor
            resharded.append({**states[0], "world_size": world_size, "parameters": parameters})
        return resharded


class _Tally:
    """Counts of one step. Counts of entries sent are 0-dim tensors on asynchronous devices."""

    def __init__(self, density: float = 1.0):
        self.density = density
        self.elems = 0
        self.pruned_elems = 0
        self.dense_bytes = 0
        self.sent = 0
        self.pruned_sent = 0
        self.sent_bytes = 0
        self.select_s = 0.0

    def add(self, elems: int, sent, elem_bytes: int, pruned: bool = False) -> None:
        self.elems += elems
        self.dense_bytes += elems * elem_bytes
        self.sent = self.sent + sent
        self.sent_bytes = self.sent_bytes + sent * elem_bytes
        if pruned:
            self.pruned_elems += elems
            self.pruned_sent = self.pruned_sent + sent


def _require(name: str, value: object, ok: bool, wanted: str) -> None:
    if not ok:
        raise ValueError(f"PrunedGradients: {name}={value!r}, wanted {wanted}")


def _finished_by_backward(work: dist.Work, buffer: torch.Tensor) -> torch.futures.Future:
    """Future of `buffer`, completed by this thread at the end of its backward pass.

    A callback on the backend's thread would need Python there, and what goes wrong would arrive
    wrapped; this way errors come out of backward() as the backend raised them.
    """
    future: torch.futures.Future = torch.futures.Future()

    def finish() -> None:
        work.wait()
        future.set_result(buffer)

    torch.autograd.Variable._execution_engine.queue_callback(finish)
    return future


def _first_tensor(future: torch.futures.Future) -> torch.Tensor:
    value = future.value()
    return value if isinstance(value, torch.Tensor) else value[0]


def _backend_name(group: dist.ProcessGroup, device: torch.device) -> str:
    """Name of the backend that serves `device` in a group, "cpu:gloo,cuda:spccl" groups included."""
    return group._get_backend(device).name()


def _check_fit(loaded: dict[str, dict[str, Any]], numels: dict[str, int]) -> None:
    """ValueError unless every loaded entry names a trained parameter and has its size."""
    for name, entry in loaded.items():
        if name not in numels:
            raise ValueError(f"PrunedGradients: loaded state has {name!r}, the model has no such parameter")
        for key in ("residual", "velocity"):
            if entry[key] is not None and entry[key].numel() != numels[name]:
                raise ValueError(
                    f"PrunedGradients: loaded {key} of {name!r} has {entry[key].numel()} elements, "
                    f"the parameter has {numels[name]}"
                )


def _fill_slot(slot: prune.Slot, entry: dict[str, Any], device: torch.device, scale: float) -> None:
    for key in ("residual", "velocity"):
        if entry[key] is not None:
            setattr(slot, key, entry[key].to(device=device, copy=True).flatten() * scale)
    slot.threshold = None if entry["threshold"] is None else entry["threshold"] * scale
