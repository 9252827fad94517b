"""Gradient pruning for DistributedDataParallel: `PrunedGradients`, a communication hook.

`spccl.prune` selects the entries of one bucket. This file adds what DDP needs around it. Imports torch; knows nothing
of formats or transports. For each bucket it makes one call of `spccl.prune` and one all_reduce; most elements of the
bucket are zero by then. `_pruning` finds the model, and has what this hook shares with `spccl.fsdp`.
"""

import time
import weakref
from typing import Any

import torch
import torch.distributed as dist

from spccl import prune

from ._pruning import hook_state
from ._pruning import hosts as hosts_
from ._pruning.backward import at_end_of_backward, in_backward
from ._pruning.ddp_model import (
    LastAverages,
    find_ddp,
    find_ddp_by_hook,
    layouts,
    named,
    refuse_second_hook,
)
from ._pruning.hook import PruningHook
from ._pruning.hook_sums import Transfer
from ._pruning.host_buckets import HostBucket
from ._pruning.optimizers import refuse_adam, refuse_momentum, warn_at_first_step
from ._pruning.sums import Piece

_INSTEAD = "without DDP"  # how SparseSync is used in place of this hook


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


class PrunedGradients(PruningHook):
    """Sends only the largest entries of each gradient; keeps the rest for later steps.

    Each rank replaces its local gradient by its entries above a threshold and adds the others to a residual,
    which later steps send (error feedback). The hook hands the backend a dense tensor that is mostly zeros.
    With backend="spccl" only the non-zeros travel. With another backend training is the same and no bytes
    are saved; one warning says so.

        optimizer = torch.optim.SGD(ddp_model.parameters(), lr=0.1)          # momentum is in the hook
        hook = spccl.ddp.PrunedGradients(density=0.01, momentum=0.9, warmup_steps=200)
        hook.register(ddp_model, optimizer=optimizer)

    `ddp_model.register_comm_hook(hook, spccl.ddp.pruned_gradients_hook)` is the same as `hook.register`.

    Args:
        density: share of each parameter's entries sent per step, (0, 1]; None: what was measured for so many ranks,
            1% (`spccl._pruning.recipes`, stats()["recipe"]), with a warning above the measured ranks. The share holds
            to within a few percent on average over parameters; it is not exact.
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
        hosts: "auto": with two hosts or more of the same number of ranks, 2 or more, those of a host average their
            gradients in float32, each prunes its part of every parameter, and hosts are the "ranks" above. The backward
            pass then waits for the other ranks of the host in each bucket. "off": all ranks prune. "on": refuse other
            hosts, when the hook is registered. `stats()["hosts"]` says what was decided.
        sum_density: share of the averages' entries that the owner of a shard sends, (0, 1]; the rest waits there, so
            that 16 ranks send 3% more than 4. It falls from 1 as the density does. hosts="auto" is "off" with it. Costs
            4 bytes per parameter / ranks. None: all are sent, more with more ranks.
    Errors: ValueError for a setting out of range, with its name and the allowed range.

    DDP features:
        no_sync: the hook sees the accumulated gradient once.
        Several backward passes before an optimizer step without no_sync: refused with momentum, which would count
            the average of the pass before again. Without momentum the sum is right, unless clip_norm, leak below 1
            or error_feedback=False acts on that average too.
        gradient_as_bucket_view, static_graph, bucket rebuilding: no effect, as state belongs to parameters.
        find_unused_parameters: a parameter whose whole local gradient is 0 sends nothing in that step; its
            residual stays.
        copy.deepcopy, AveragedModel, torch.save of the model: the copy has no hook; a warning says so.
        Join (uneven inputs): a rank that has joined counts as having gradient 0 and goes on sending its
            residual. With find_unused_parameters every parameter then counts as used.
        inf and nan: such an entry is sent as it is and leaves its residual and velocity unchanged, so every rank
            sees the value and GradScaler skips the step. All else that was sent in that step is lost with it.
        sparse gradients (nn.Embedding(sparse=True)): averaged without pruning.

    On CUDA the host never waits, but for norm_every. All that changes from step to step is in GPU memory, where a
    replayed graph finds it. A captured step prunes beside the rest of the backward pass. Gradients are float16,
    bfloat16, float32 or float64, on the host or on CUDA; CUDA needs an spccl that was built with it. On the host one
    thread prunes.

    Sources: Lin et al. 2018, "Deep Gradient Compression", ICLR, sections 3 and 5; Hough et al., "SpCCL",
    section VI.B. The local clipping from running norms is this project's.
    """

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
            optimizer: the one that will take the averaged gradients, to be checked. None: checked at its first
                step, with a warning.
            allow_adam: accept an optimizer with a running second moment, which pruned gradients do not suit. Without
                `optimizer` nothing is checked then.
        Raises: TypeError if there is no DistributedDataParallel in `model`, or more than one; RuntimeError if this
            object is already on a model, or the model already has a hook; ValueError if loaded state does not fit the
            model, if hook and optimizer both apply momentum, or for an Adam-like optimizer without allow_adam; on all
            ranks if they differ in settings other than `seed`.
        """
        if optimizer is not None:
            if not allow_adam:
                refuse_adam("PrunedGradients.register", optimizer, _INSTEAD)
            refuse_momentum("PrunedGradients.register", self.momentum, optimizer)
        wrapped = find_ddp(model)
        if self._group is not None:
            raise RuntimeError("PrunedGradients.register: already registered on a model; make one object per model")
        refuse_second_hook(wrapped)
        self._fit_loaded(wrapped)
        wrapped.register_comm_hook(self, pruned_gradients_hook)
        self._attach(wrapped)
        if optimizer is None and not allow_adam:
            warn_at_first_step(self, wrapped.parameters(), _INSTEAD)
        return self

    def _fit_loaded(self, model: torch.nn.parallel.DistributedDataParallel) -> None:
        group = model.process_group
        self._require_same(group)
        mode, device = self.hosts if self.sum_density is None else "off", next(model.parameters()).device
        self._hosts = hosts_.find("PrunedGradients", mode, group, device)
        if mode != self.hosts and group.size() > 1:
            self._hosts = self._hosts._replace(why="off: with sum_density all ranks prune")
        self._wholes = layouts(model)
        if self._loaded:
            self._check_hosts({**self._loaded_hosts, "world_size": self._loaded_ranks}, group)
        version, n_ranks = self._loaded_version, self._loaded_ranks
        self._loaded = self._fit(self._loaded, version, n_ranks, self._parts(), group)
        self._loaded_version = hook_state.VERSION

    def _parts(self) -> dict[str, hook_state.Layout]:
        """The layouts of what this rank owns of each parameter: all of it, or where hosts prune a flat part."""
        h, whole = self._hosts, self._wholes
        if h is None or h.inner is None:
            return whole
        numels = {name: hosts_.part(layout.shape.numel(), h.per_host, h.place) for name, layout in whole.items()}
        return {name: hook_state.contiguous(torch.Size([end - first])) for name, (first, end) in numels.items()}

    def _described_hosts(self) -> dict[str, Any]:
        numbers = hosts_.numbers(self._hosts)
        kept = {name: (tuple(layout.shape), tuple(layout.strides)) for name, layout in self._wholes.items()}
        return {} if numbers is None else {"hosts": numbers, "layouts": kept}

    def _check_hosts(self, state: dict[str, Any], group: dist.ProcessGroup | None = None) -> None:
        group = self._group if group is None else group
        assert group is not None
        who = f"PrunedGradients.load_state_dict: rank {group.rank()}"
        ours, theirs = hosts_.numbers(self._hosts), state.get("hosts")
        hosts_.require_same_shape(who, theirs, state["world_size"], ours, group.size())
        kept = {hook_state.plain_name(name): value for name, value in state.get("layouts", {}).items()}
        for name, layout in self._wholes.items():
            wanted = (tuple(layout.shape), tuple(layout.strides))
            if ours is not None and kept.get(name, wanted) != wanted:
                raise ValueError(
                    f"{who}: {name!r} has shape and strides {kept[name]} in the state, wanted {wanted}; load the state "
                    "of the run that saved this model's weights, in its memory format"
                )

    def _attach(self, model: torch.nn.parallel.DistributedDataParallel) -> None:
        """Take group, parameter names and DDP settings from the model that calls this hook."""
        self._layouts = self._parts()
        self._join(model.process_group)
        self._norm_group = None if self._hosts is None else self._hosts.inner
        self._host_plans: dict[int, tuple[tuple[int, ...], HostBucket, prune.Plan | None]] = {}  # by bucket
        self._model = weakref.ref(model)
        params = named(model)
        self._names: dict[int, str] = {id(p): n for n, p in params}
        self._last_averages = LastAverages(params) if self.momentum else None
        # Buckets on the host that this pass has handed to the backend; the future is None where the backend has it.
        # They are kept for one step. Otherwise the backend's thread may drop the last reference, and freeing a tensor
        # that Python has seen needs Python: at exit that aborts the process (Gloo, 4 of 90 short runs). On CUDA they
        # would pin a whole set of gradients while DDP makes its buckets anew.
        self._on_host: list[
            tuple[dist.Work | Transfer | None, torch.futures.Future | None, torch.Tensor, HostBucket | None]
        ] = []
        self._streams: dict[tuple[torch.device, str], torch.cuda.Stream] = {}

    def _attach_to_caller(self) -> None:
        """Find the model after `model.register_comm_hook(self, ...)`: DDP does not tell a hook whose it is.

        Searches this process's objects, once. Raises: RuntimeError if no model, or more than one, has this hook.
        """
        model = find_ddp_by_hook(self)
        self._fit_loaded(model)
        self._attach(model)
        warn_at_first_step(self, model.parameters(), _INSTEAD)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        if self._group is not None:
            self._host_plans.clear()
        if self._group is not None and self._last_averages is not None:
            self._last_averages.read_values_again()

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
        if self._last_averages is not None:
            self._refuse_second_pass(self._last_averages, bucket)
        buffer = bucket.buffer()
        waits = self._norm_group is not None and not buffer.is_sparse  # for the other ranks of this host
        exchange = self._exchange_between_hosts if waits and buffer.is_floating_point() else self._exchange
        if not (buffer.is_cuda and (waits or torch.cuda.is_current_stream_capturing())):
            return exchange(bucket, buffer)
        # On a stream of its own, so that a replay prunes beside the rest of the backward pass. Not in other eager
        # steps: the host needs longer to change streams than the GPU gains (bench/notes/gpt2.md).
        stream = self._stream(buffer.device, "prune")
        stream.wait_stream(torch.cuda.current_stream(buffer.device))
        with torch.cuda.stream(stream):
            return exchange(bucket, buffer)

    def _stream(self, device: torch.device, use: str) -> torch.cuda.Stream:
        stream = self._streams.get((device, use))
        if stream is None:
            stream = self._streams[device, use] = torch.cuda.Stream(device, priority=-1)
        return stream

    def _exchange(self, bucket: dist.GradBucket, buffer: torch.Tensor) -> torch.futures.Future:
        """The same on the current stream, on which the future's value is ready."""
        began = time.perf_counter()
        if bucket.index() == 0:
            self._begin_step()
        call = None
        average = self._backend_averages(buffer.device)
        scale = 1.0 if average else 1.0 / dist.get_world_size(self._group)
        if buffer.is_sparse or not buffer.is_floating_point():
            buffer.mul_(scale)
            if self._across is self._group:  # else counts are of parts, and this bucket has none
                self._statistics.now.add(buffer._nnz() if buffer.is_sparse else buffer.numel(), buffer.element_size())
        else:
            call = self._prune_bucket(bucket, buffer, scale, self._prunes_later(buffer, average))
        op = dist.ReduceOp.AVG if average else dist.ReduceOp.SUM
        if buffer.is_sparse and average:  # NCCL and Gloo have no AVG for sparse tensors
            buffer.mul_(1.0 / dist.get_world_size(self._group))
            op = dist.ReduceOp.SUM
        self._statistics.now.select_s += time.perf_counter() - began
        if bucket.is_last():
            self._end_step(bucket.index())
        if self.sum_density is not None and not buffer.is_sparse and dist.get_world_size(self._group) > 1:
            future = self._exchange_sums(bucket, buffer, average)
        else:
            future = self._all_reduce(buffer, op, call)
        if bucket.is_last():
            self._end_pass()
        return future

    def _exchange_between_hosts(self, bucket: dist.GradBucket, buffer: torch.Tensor) -> torch.futures.Future:
        """The same where hosts prune: average over this host, prune this rank's part, average it over hosts, gather."""
        if bucket.index() == 0:
            self._begin_step()
        memory = self._memory(buffer.device)
        host, plan = self._host_plan(bucket, buffer, memory)
        host.average(buffer)
        began = time.perf_counter()
        average = self._backend_averages(buffer.device)
        scale = 1.0 if average else 1.0 / dist.get_world_size(self._across)
        self._prune_flat(bucket.index(), host.part, plan, memory, scale)
        self._statistics.now.select_s += time.perf_counter() - began
        if bucket.is_last():
            self._end_step(bucket.index())
        work = None
        if not host.part.numel():
            self._statistics.now.n_calls -= 1
        else:
            op = dist.ReduceOp.AVG if average else dist.ReduceOp.SUM
            with self._limited():
                work = dist.all_reduce(host.part, op=op, group=self._across, async_op=not buffer.is_cuda)
        if buffer.is_cuda:
            host.gather(buffer)
            future = _completed(buffer)
        else:
            future = torch.futures.Future()
            self._on_host.append((work, future, buffer, host))
        if bucket.is_last():
            self._end_pass()
        return future

    def _host_plan(
        self, bucket: dist.GradBucket, buffer: torch.Tensor, memory: hook_state.OnDevice
    ) -> tuple[HostBucket, prune.Plan | None]:
        """How this bucket is shared on the host, and the plan of this rank's part; None if that is empty."""
        params = bucket.parameters()
        key = tuple(map(id, params))
        if self._host_plans.get(bucket.index(), ((),))[0] != key:
            host = HostBucket(self._hosts, [param.numel() for param in params], buffer)
            segments = [
                (begin, self._state_of(param, buffer.dtype, memory, end - first))
                for param, begin, (first, end) in zip(params, host.begins, host.spans, strict=True)
                if end > first
            ]
            plan = prune.Plan(segments, host.part.numel(), buffer.dtype, buffer.device) if segments else None
            self._host_plans[bucket.index()] = key, host, plan
        return self._host_plans[bucket.index()][1:]

    def _all_reduce(
        self, buffer: torch.Tensor, op: dist.ReduceOp, call: tuple[int, int, object] | None
    ) -> torch.futures.Future:
        if dist.get_world_size(self._group) == 1:
            return _completed(buffer)
        with self._limited():
            if call is not None:
                work = self._pruned_all_reduce(buffer, call)
            else:
                work = dist.all_reduce(buffer, op=op, group=self._group, async_op=True)
        if buffer.is_cuda:
            return work.get_future().then(_first_tensor)
        if buffer.is_sparse:
            self._on_host.append((work, None, buffer, None))
            return work.get_future().then(_first_tensor)
        future: torch.futures.Future = torch.futures.Future()
        self._on_host.append((work, future, buffer, None))
        return future

    def _exchange_sums(self, bucket: dist.GradBucket, buffer: torch.Tensor, average: bool) -> torch.futures.Future:
        """Start the exchange of a bucket whose sums are pruned again.

        On CUDA the sums of a bucket are pruned on a stream of their own, once the next bucket has started; on the host
        at the end of the pass, as waiting for them would hold up the backward pass. All ranks do the same.
        """
        params, memory = bucket.parameters(), self._memory(buffer.device)
        pieces = [
            Piece.of(self._state_of(param, buffer.dtype, memory), grad.storage_offset() - buffer.storage_offset())
            for param, grad in zip(params, bucket.gradients(), strict=True)
            if param.numel()
        ]
        keeps, key = self.error_feedback and self.density < 1, tuple(map(id, params))
        kept = self._sums.of_bucket(
            key, pieces, buffer, self._group, self._params, self._layouts, keeps, self.step
        )  # fmt: skip
        with self._limited():
            transfer = Transfer(kept, buffer, self._group, average, memory.read_scale(self.grad_scaler))
            self._statistics.now.n_calls += transfer.n_calls - 1
            self._sums.turning.append(transfer)
            if not buffer.is_cuda:
                self._on_host.append((transfer, transfer.future, buffer, None))
                return transfer.future
            with torch.cuda.stream(self._stream(buffer.device, "sums")):
                self._sums.turn(self._sum_rule(), 0 if bucket.is_last() else 1)
        return transfer.future

    def _end_pass(self) -> None:
        """After the last bucket: have the futures of buckets on the host completed before DDP waits for them.

        Usually DDP waits in a callback at the end of the backward pass, which it queues after this call; a callback
        queued here runs before. Where no node of the graph runs, DDP waits right after this call: in the first pass
        with static_graph, which is such a callback itself, and in the shadow passes of Join.
        """
        if torch._C._current_autograd_node() is not None:
            at_end_of_backward(self._finish_buckets)
        else:
            self._finish_buckets()

    def _finish_buckets(self) -> None:
        """Complete the futures of this pass on this thread.

        A callback of the backend's futures would run on the backend's thread, need Python there, and wrap errors in a
        RuntimeError. This way backward() raises errors as the backend raised them.
        """
        self._sums.turn(self._sum_rule(), 0)
        for work, future, buffer, host in self._on_host:
            if future is not None:
                if work is not None:
                    work.wait()
                if host is not None:
                    host.gather(buffer)
                future.set_result(buffer)
        if self._last_averages is not None and in_backward():
            at_end_of_backward(self._last_averages.keep)  # after DDP's, which writes the gradients

    def _begin_step(self) -> None:
        self._on_host.clear()
        model = self._model()
        assert model is not None  # it calls
        self._skip_unused = bool(model.find_unused_parameters or model.static_graph)
        if self._skip_unused and not in_backward():
            # A shadow pass of Join. It sends residuals, which the other ranks take only of used parameters.
            self._skip_unused = False
            if model.find_unused_parameters:
                model.reducer._get_local_used_map().fill_(1)
        super()._begin_step()

    def _refuse_second_pass(self, averages: LastAverages, bucket: dist.GradBucket) -> None:
        """Raises: RuntimeError if a gradient in `bucket` holds the average of an earlier pass."""
        name = averages.first_reused([self._names.get(id(param), "") for param in bucket.parameters()])
        if name is not None:
            raise RuntimeError(
                f"PrunedGradients: rank {dist.get_rank(self._group)}: a second backward pass adds to the gradient of "
                f"{name!r}, which still holds the average of the last one, and momentum={self.momentum} would count "
                "that average again. Of the passes of one step run all but the last, forward and backward, under "
                "model.no_sync(); or call model.zero_grad() between them (an optimizer zeroes only its own "
                "parameters), or freeze what no optimizer trains. A pass whose gradients of this model are not used "
                "(a GAN's generator step) belongs under no_sync() too. Start again: this DistributedDataParallel "
                "cannot go on"
            )

    def _prune_bucket(
        self, bucket: dist.GradBucket, buffer: torch.Tensor, scale: float, later: bool
    ) -> tuple[int, int, object] | None:
        """Replace a bucket's gradients by what is sent now; `later`: returns what the all-reduce needs to do it."""
        memory = self._memory(buffer.device)
        plan = self._plan(bucket, buffer, memory)
        return self._prune_flat(bucket.index(), buffer, plan, memory, scale, later=later)

    def _plan(self, bucket: dist.GradBucket, buffer: torch.Tensor, memory: hook_state.OnDevice) -> prune.Plan | None:
        """The plan of this bucket; None for an empty one. DDP may fill its buckets anew after the first step."""
        params = bucket.parameters()
        key = tuple(map(id, params))
        plan = self._plans.get(key)
        if key not in self._plans:
            first = buffer.storage_offset()
            segments = [
                (grad.storage_offset() - first, self._state_of(param, buffer.dtype, memory))
                for param, grad in zip(params, bucket.gradients(), strict=True)
                if param.numel()
            ]
            if segments:
                plan = prune.Plan(segments, buffer.numel(), buffer.dtype, buffer.device)
            self._plans[key] = plan
        return plan

    def _state_of(
        self, param: torch.Tensor, dtype: torch.dtype, memory: hook_state.OnDevice, numel: int | None = None
    ) -> prune.ParamState:
        """Args: numel: of this rank's part; None: all of it."""
        name = self._names.get(id(param))
        if name is None:
            raise RuntimeError(
                f"PrunedGradients: a parameter of shape {tuple(param.shape)} is not of the model that this object "
                "was registered on first; make one object per model"
            )
        pruned = param.dim() > 1 and param.numel() >= self.min_numel
        return self._param_state(name, param.numel() if numel is None else numel, pruned, dtype, memory)


def _completed(buffer: torch.Tensor) -> torch.futures.Future:
    """Future of `buffer` that is complete; on CUDA its users wait for what is on the current stream."""
    future: torch.futures.Future = torch.futures.Future(devices=[buffer.device] if buffer.is_cuda else None)
    future.set_result(buffer)
    return future


def _first_tensor(future: torch.futures.Future) -> torch.Tensor:
    value = future.value()
    return value if isinstance(value, torch.Tensor) else value[0]
