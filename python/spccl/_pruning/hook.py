"""What the hooks for DDP and for FSDP2 share: settings, state of the parameters, statistics, checkpoints.

Imports torch; knows neither DDP nor FSDP. `spccl.ddp` and `spccl.fsdp` hand it one flat gradient at a time.
`hook_state.py` has the memory per device and the checkpoints, `hook_stats.py` the counts.
"""

import contextlib
import inspect
import math
import warnings
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from spccl import backend, prune

from . import checks, hook_state, recipes
from . import hosts as hosts_
from .checks import ABOVE_0, COUNT, FRACTION, SHARE, is_share, is_whole
from .density import falling
from .hook_stats import Statistics
from .hook_sums import HookSums, to_residual
from .ranks import averages, gather, require_same
from .stats import HasStats
from .sums import density_sums

_RULES: dict[str, checks.Rule] = {
    "sample": SHARE,
    "leak": SHARE,
    "momentum": FRACTION,
    "dense_steps": COUNT,
    "warmup_steps": COUNT,
    "min_numel": (lambda x: is_whole(x, 1, 2**63 - 1), "a whole number, 1 or more"),
    "clip_norm": (lambda x: x is None or x == math.inf or ABOVE_0[0](x), "above 0, or None"),
    "norm_every": COUNT,
    "seed": (lambda x: is_whole(x, -(2**63), 2**64 - 1), "a whole number of 64 bits"),
    "max_ctas": (lambda x: x is None or is_whole(x, 1), "a whole number from 1, or None"),
    "hosts": hosts_.MODE,
    "sum_density": (lambda x: x is None or is_share(x), "in (0, 1], or None"),
    "residual_dtype": (lambda x: x in (torch.float32, torch.bfloat16), "torch.float32 or torch.bfloat16"),
}


class PruningHook(HasStats):
    """Settings and state of a pruning hook. `spccl.ddp.PrunedGradients` says what each setting does.

    A subclass sets `_group` and `_layouts` when it is registered, and then calls for each flat gradient `_param_state`,
    `_prune_flat` and, around its all-reduce, `_limited`; `_begin_step` and `_end_step` around each backward pass.
    """

    _made_by: str | None = None  # the function that a user calls to make one, if not the class

    def __init__(
        self,
        density: float | None = None,
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
        hosts: str = "auto",
        sum_density: float | None = None,
        **unknown: Any,
    ):
        self._who = type(self).__name__
        self._by = self._made_by or self._who
        if unknown:
            checks.refuse_unknown(self._by, unknown, list(inspect.signature(PruningHook).parameters)[:-1])
        self.recipe = "as given" if density is not None else "chosen when the number of ranks is known"
        self._by_recipe = density is None
        density = recipes.PLAIN["density"] if density is None else density
        checks.check_density(self._by, density)
        checks.check(self._by, locals(), _RULES)
        keeps = momentum == 0 or error_feedback
        checks.require(self._by, "momentum", momentum, keeps, "0 when error_feedback is False")
        between = sum_density is None or hosts != "on"
        checks.require(self._by, "sum_density", sum_density, between, "None with hosts='on', where parts are exchanged")
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
        self.hosts = hosts
        self.sum_density = sum_density
        self.step = 0  # number of backward passes that called this hook and have ended
        self._group: dist.ProcessGroup | None = None  # of the average
        self._hosts: hosts_.Hosts | None = None  # None: all ranks of the group prune with each other
        self._norm_group: dist.ProcessGroup | None = None  # ranks that have parts of one gradient; None: no others
        self._layouts: dict[str, hook_state.Layout] = {}  # of the model's parameters, on this rank, by name
        self._params: dict[str, prune.ParamState] = {}  # by parameter name
        self._plans: dict[Any, Any] = {}  # a subclass says by what
        self._devices: dict[torch.device, hook_state.OnDevice] = {}
        self._loaded: dict[str, dict[str, Any]] = {}
        self._loaded_ranks: int | None = None  # that saved what was loaded
        self._loaded_version = hook_state.VERSION
        self._loaded_hosts: dict[str, Any] = {}  # see hook_state.describe_hosts
        self._skip_unused = False
        self._averages: dict[torch.device, bool] = {}
        self._limit: contextlib.AbstractContextManager[None] | None = None
        self._sums = HookSums()
        self._statistics = Statistics()

    def _require_same(self, *groups: dist.ProcessGroup) -> None:
        """Raises: ValueError, on all ranks, if they differ in settings other than `seed`.

        Args: groups: what ranks have gathered over the first is gathered over the next.
        """
        mine = {name: getattr(self, name) for name in _settings() if name != "seed"}
        mine |= {"density": None if self._by_recipe else self.density, "grad_scaler": self.grad_scaler is not None}
        found = {dist.get_rank() if dist.is_initialized() else 0: mine}
        for group in groups:
            if group.size() > 1 and hosts_.is_known(group):
                found = {rank: theirs for one in gather(group, found) for rank, theirs in one.items()}
        require_same(self._by, "the hook", dict(sorted(found.items())))

    def _join(self, group: dist.ProcessGroup) -> None:
        """The group of the average is known. density=None then has its recipe."""
        self._group = group
        if self._by_recipe:
            n = group.size() if self._hosts is None else self._hosts.n_pruning
            given, self.recipe = recipes.choose({"density": None}, n, recipes.SGD, self._by)
            self.density = given["density"]

    @property
    def _across(self) -> dist.ProcessGroup | None:
        """The group in which this rank prunes and exchanges."""
        return self._group if self._hosts is None else self._hosts.across

    def _begin_step(self) -> None:
        self._statistics.begin_step(self.density_at(self.step), self._across)
        for memory in self._devices.values():
            memory.begin_step()

    def _end_step(self, last_bucket: int) -> None:
        self.step += 1
        self._statistics.end_step()
        for memory in self._devices.values():
            memory.end_step(last_bucket)
        if self.norm_every and self.step % self.norm_every == 0:
            self._statistics.measure_residual(self._params.values())

    # -- one flat gradient -------------------------------------------------------------------------

    def _memory(self, device: torch.device) -> hook_state.OnDevice:
        """What this hook keeps on `device`."""
        memory = self._devices.get(device)
        if memory is None:
            memory = self._devices[device] = hook_state.OnDevice(len(self._layouts), device)
        return memory

    def _param_state(self, name: str, numel: int, pruned: bool, dtype: torch.dtype, memory: hook_state.OnDevice):
        """The state of a parameter. The first call makes it, from the loaded checkpoint if there is one."""
        param = self._params.get(name)
        if param is None:
            param = prune.ParamState(name, numel, pruned, memory.states[list(self._layouts).index(name)])
            param.state[prune.STEP] = self.step
            if name in self._loaded:
                entry = self._loaded.pop(name)
                hook_state.fill_state(param, entry, self._layouts[name], self.error_feedback)
                if "kept" in entry:
                    self._sums.loaded[name] = entry["kept"]
            keeps = pruned and self.error_feedback and self.density < 1
            param.prepare(dtype, keeps, self.momentum > 0, self.residual_dtype)
            if self.sum_density is None and name in self._sums.loaded:
                to_residual(param, self._sums.loaded.pop(name), self._layouts[name], dist.get_world_size(self._group))
            self._params[name] = param
        return param

    def _prune_flat(
        self,
        index: int,
        grad: torch.Tensor,
        plan: prune.Plan | None,
        memory: hook_state.OnDevice,
        scale: float,
        divisor: float = 1.0,
        later: bool = False,
    ) -> tuple[int, int, object] | None:
        """Replace the flat gradient of bucket `index` by what is sent now, times `scale`.

        Args:
            plan: None if no parameter has an element in it; then it is measured alone.
            divisor: by what the caller divides later; `grad` is that much larger than the gradient.
            later: `_pruned_all_reduce` does it, which takes what is returned; see `_prunes_later`.
        """
        rule = prune.Rule(
            density=self.density,
            sample=self.sample,
            leak=self.leak,
            momentum=self.momentum,
            scale=scale,
            dense_steps=0 if later else self.dense_steps,
            warmup_steps=0 if later else self.warmup_steps,
            seed=self.seed & 0xFFFFFFFF,
            skip_zeros=self._skip_unused,
        )
        loss_scale = memory.read_scale(self.grad_scaler, divisor)
        factor = clip = None
        if self.clip_norm is not None or (self.norm_every and (self.step + 1) % self.norm_every == 0):
            bound = (self.clip_norm or math.inf) * math.sqrt(dist.get_world_size(self._across))
            if plan is not None and self._norm_group is None:
                clip = memory.clip(index, grad, bound)
            else:
                memory.add_norm(index, grad, loss_scale, self._norm_group)
                factor = memory.clip_factor(bound)
        self._statistics.now.add(grad.numel(), grad.element_size())
        if plan is not None and later:
            memory.prunes_later = True
            return plan.call(grad, rule, factor, loss_scale, clip)
        if plan is not None:
            plan.run(grad, rule, factor, loss_scale, clip)
        return None

    def _prunes_later(self, grad: torch.Tensor, average: bool) -> bool:
        """Whether spccl prunes this gradient inside its all-reduce. Then the GPUs of a host exchange lists of what they
        send, which is faster (spccl_cuda_prune_all_reduce). All ranks decide the same.

        Not while the density still falls: a captured step would keep what was decided at its capture. Not in a step
        that measures the norm of the residuals: it does so before the all-reduce is done. Not with
        TORCH_DISTRIBUTED_DEBUG=DETAIL, where torch checks each all_reduce.
        """
        if self.sum_density is not None or (self.norm_every and (self.step + 1) % self.norm_every == 0):
            return False
        if not (grad.is_cuda and grad.dtype == torch.float32 and average) or dist.get_world_size(self._group) == 1:
            return False
        if (
            backend.name_for(self._group, grad.device) != backend.NAME
            or self.step < self.dense_steps + self.warmup_steps
        ):
            return False
        return dist.get_debug_level() != dist.DebugLevel.DETAIL

    def _sum_rule(self) -> prune.Rule:
        """By which an owner prunes sums."""
        return prune.Rule(
            self.sum_density or 1.0, self.sample, self.leak, momentum=0.0, dense_steps=self.dense_steps,
            warmup_steps=self.warmup_steps, seed=self.seed & 0xFFFFFFFF, skip_zeros=self._skip_unused,
        )  # fmt: skip

    def _pruned_all_reduce(self, grad: torch.Tensor, call: tuple[int, int, object]) -> dist.Work:
        """Prune `grad` and average it; `call` is what `_prune_flat` returned."""
        plan, options, _owner = call
        stream = torch.cuda.current_stream(grad.device).cuda_stream
        return dist.Work.unbox(
            torch.ops.spccl.pruned_all_reduce(backend.boxed(self._group), grad, plan, options, stream)
        )

    def _limited(self) -> contextlib.AbstractContextManager[None]:
        """The context in which a bucket's all-reduce is called."""
        if self._limit is None:
            ours = self.max_ctas is not None and backend.NAME in backend.names_of(self._across)
            self._limit = backend.limit_ctas(self.max_ctas, self._across) if ours else contextlib.nullcontext()
        return self._limit

    def _backend_averages(self, device: torch.device) -> bool:
        """Whether the group's backend for this device has ReduceOp.AVG; warns once if it is not spccl."""
        if device not in self._averages:
            self._averages[device] = averages(self._by, self._across, device)
        return self._averages[device]

    # -- schedule, statistics ----------------------------------------------------------------------

    def density_at(self, step: int) -> float:
        """Wanted density in step `step` (0 is the first synchronising backward pass)."""
        return falling(self.density, (step - self.dense_steps + 1) / (self.warmup_steps + 1))

    def stats(self) -> dict[str, Any]:
        params = list(self._params.values())
        density = self.density_at(self.step)
        told = self._hosts or hosts_.alone(None, 0, 1 if self._group is None else self._group.size(), "")
        missing = "not known yet" if self._group is None else "off: FSDP2 averages over shards"
        sums, sent = density_sums(self._sums.kept.values()), self._last_sent()
        figures = self._statistics.report(self.step, density, self._across, self._devices, params, sent, sums)
        return {**figures, "recipe": self.recipe, "pruning_ranks": told.n_pruning,
                "hosts": told.why or missing}  # fmt: skip

    def _last_sent(self) -> dict[str, int]:
        """Entries sent in the last complete step, by parameter name. Waits for the device."""
        columns = {device: memory.read_sent() for device, memory in self._devices.items()}
        places = {name: i for i, name in enumerate(self._layouts)}
        return {param.name: columns[param.state.device][places[param.name]] for param in self._params.values()}

    # -- checkpoints -------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """This rank's state: save one per rank, next to the model's.

        Returns {"version", "world_size", "step", "seed", "parameters"}; parameters maps the model's
        parameter names to {"residual", "velocity": contiguous tensors of the parameter's shape or None, in
        units of the unscaled gradient; "threshold": float or None; with sum_density "kept": what this rank keeps of
        sums, of the elements that it owns}. Tensors are copies.
        """
        parameters = {name: dict(entry) for name, entry in self._loaded.items()}
        step = self.step
        step = hook_state.pack(self._params.values(), self._layouts, parameters, step)
        self._sums.save(parameters, self._layouts)
        world_size = self._loaded_ranks if self._group is None else dist.get_world_size(self._group)
        return {
            "version": hook_state.version_of(parameters, self._loaded_version if self._group is None else None),
            "world_size": world_size,
            "step": step,
            "seed": self.seed,
            "parameters": parameters,
            **(self._loaded_hosts if self._group is None else self._described_hosts()),
        }

    def _described_hosts(self) -> dict[str, Any]:
        """Entries of the state where hosts prune."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict` of the same rank; before or after `register`.

        Raises: ValueError if it is of another version, another number of ranks (use `reshard` first), or
            names or shapes differ from the model's. A state of version 1 has sizes alone.
        """
        loaded, version = hook_state.unpack(self._who, state), state["version"]
        if self._group is not None:
            self._check_hosts(state)
            loaded = self._fit(loaded, version, state["world_size"], self._layouts, self._group)
        self._loaded_hosts = {key: state[key] for key in hook_state.OF_HOSTS if key in state}
        self._loaded, self._loaded_ranks, self._loaded_version = loaded, state["world_size"], version
        self.step = int(state["step"])
        self.seed = int(state["seed"])
        # made again from the loaded entries as buckets arrive
        self._plans.clear()
        self._params.clear()
        self._devices.clear()
        self._sums = HookSums()
        self._statistics.forget_totals()

    def _check_hosts(self, state: dict[str, Any]) -> None:
        """Raises: ValueError for a state of another shape of hosts."""

    def _fit(
        self,
        loaded: dict[str, dict[str, Any]],
        version: int,
        n_ranks: int | None,
        layouts: dict[str, hook_state.Layout],
        group: dist.ProcessGroup,
    ) -> dict[str, dict[str, Any]]:
        """Loaded entries of `version` as those of this version.

        Raises: ValueError unless they are of as many ranks as `group` has, and fit a model of `layouts`.
        """
        rank = dist.get_rank() if dist.is_initialized() else group.rank()  # a group may be all there is
        who = f"{self._who}.load_state_dict: rank {rank}"
        world_size = group.size()
        if n_ranks not in (None, world_size):
            raise ValueError(
                f"{who}: got the state of {n_ranks} ranks, this group has {world_size}; pass all ranks' states through "
                f"{self._who}.reshard(states, {world_size})"
            )
        return hook_state.fit(who, loaded, version, layouts)

    @classmethod
    def reshard(
        cls, states: list[dict[str, Any]], world_size: int, ranks: Iterable[int] | None = None, *, per_host: int = 1
    ) -> list[dict[str, Any]]:
        """States for `world_size` ranks from those of any other number of ranks, in rank order, or of other hosts.

        New rank r gets the sum over old ranks r, r + world_size, ... times world_size / len(states). So the sum
        of residuals / ranks, which the averages have not had yet, stays the same. What was kept of sums becomes
        residual of every new rank. Thresholds start anew. Where hosts prune, hosts count in the place of ranks.

        Args: ranks: the new ranks whose states are made; None: all. per_host: ranks of each new host where hosts will
            prune, numbered host by host; 1: all ranks prune.
        Raises: ValueError if a rank's state is missing or the states differ in step or version, or `per_host` does not
            divide `world_size`.
        """
        return hook_state.reshard(cls.__name__, states, world_size, ranks, per_host)

    # -- settings ----------------------------------------------------------------------------------

    def __repr__(self) -> str:
        """The density, every setting that is not at its default, and the steps done."""
        values = ((name, getattr(self, name), default) for name, default in _settings().items())
        shown = [f"{name}={value!r}" for name, value, default in values if name == "density" or value != default]
        return f"{self._by}({', '.join(shown)}; step {self.step})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copies and pickles of a model with this hook have none. A hook that is on no model is copied."""
        return super().__reduce_ex__(protocol) if self._group is None else (_left_out, (self._who,))


def _settings() -> dict[str, Any]:
    """The settings of a hook, with their defaults."""
    return {p.name: p.default for p in inspect.signature(PruningHook).parameters.values() if p.name != "unknown"}


class LeftOutHook:
    """Stands in a copied or unpickled model where the original had a pruning hook. The copy has no hook."""

    def __init__(self, who: str):
        self._who = who

    def __repr__(self) -> str:
        return f"<{self._who} of the original, not of this copy>"


def _left_out(who: str) -> LeftOutHook:
    warnings.warn(
        f"{who}: a copy of a model has no hook, and averages whole gradients if it is trained. To prune them, make a "
        f"new {who} for the copy; state_dict() and load_state_dict() move residuals",
        stacklevel=2,
    )
    return LeftOutHook(who)
