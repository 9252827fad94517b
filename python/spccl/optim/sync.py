"""`SparseSync`: any torch optimizer, with an exchange of the largest changes of the weights in place of DDP."""

import contextlib
import inspect
import math
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from spccl import prune
from spccl._pruning import recipes
from spccl._pruning.checks import refuse_unknown
from spccl._pruning.density import Density, density_at
from spccl._pruning.ranks import Ranks
from spccl._pruning.stats import HasStats

from . import checkpoint, checks, measure, moments
from . import overlap as overlaps
from .bucket import Weight, make_buckets, own_memory
from .hosts import Host
from .look_ahead import LookAhead
from .settings import Settings, take_older
from .shards import Shards, gradient
from .stepper import Stepper, coalesce_gradients
from .transfers import Transfers


class SparseSync(HasStats, torch.optim.Optimizer):
    """Steps a torch optimizer on this rank's own gradient, then averages the largest changes over ranks.

    There is no DDP wrapper: each rank computes its own gradient and steps its own weights. Every `every` steps each
    rank sends the largest entries of (its weights - the global weights). The average over ranks is added to both.
    What is not sent stays in the rank's own weights and is sent later (error feedback with look-ahead). The global
    weights are bitwise the same on all ranks. The rule in symbols: `spccl.optim.bucket`.

        dist.init_process_group("spccl")
        opt = SparseSync(torch.optim.AdamW(model.parameters(), lr=3e-4), density=0.01, warmup_steps=1000)
        for batch in data:
            opt.zero_grad()
            loss(model, batch).backward()
            opt.step()
        with opt.global_weights():
            evaluate(model)

    At construction rank 0's parameters are sent to all ranks. Everything that changes parameters later, other than
    this object, counts as a change of this rank's own weights.

    Args:
        optimizer: any torch.optim.Optimizer whose step() needs no closure. Its parameters that require a gradient are
            trained: float32, float64, float16 or bfloat16, of any shape, in host or CUDA memory; of DTensors this
            rank's part. Learning-rate schedulers take this object or `optimizer`. GradScaler takes this object;
            float16 parameters then need an optimizer with fused=True.
        density: None: the recipe that was measured for so many ranks (`spccl._pruning.recipes`, stats()["recipe"]). It
            chooses bits, warmup_steps, look_ahead, correct_second_moment and wire_dtype too where they are not given,
            and warns where nothing was measured. Else the share of each parameter's entries sent per exchange, (0, 1],
            or a function of the exchange's number (0 the first) alone, such as `Geometric`. All ranks must give the
            same; of functions the values at 25 exchanges up to 500000 are compared, so a function is called for
            exchanges that may never come. Not with bits=1.
        every: optimizer steps between exchanges.
        warmup_steps: optimizer steps over which the density falls geometrically from 1 to `density`; with bits=1
            those in which whole values are sent; None: 0.
        group: process group; None is the world. Without torch.distributed there is one rank. With FSDP2 the ranks that
            hold the same shard (docs/TRAINING.md).
        sample: share of a parameter's entries that is sampled to find its threshold, (0, 1]. At least 32 / density
            entries are sampled.
        min_numel: parameters with fewer elements, or with one dimension, are sent whole.
        leak: factor on what is not sent, per exchange, (0, 1]. 1 loses nothing.
        outer_lr, outer_momentum: Nesterov momentum on the exchanged average (DiLoCo, SparseLoCo); 1 and 0: none.
            Momentum costs another 4 bytes per parameter.
        correct_second_moment: divide by an estimate of the second moment of the averaged gradient, in place of that of
            the rank's own (see `spccl.optim.moments`). "scaled": v / ranks, which costs nothing. True: that, plus
            (1 - 1/ranks) m^2; costs 13 passes over the weights. False: the rank's own. For torch's Adam and AdamW
            without amsgrad and maximize. None: where that is possible and `every` is 1, "scaled" for up to 8 ranks
            and True for more; else False.
        clip_norm: bound on the norm of the gradient, None for none. A rank clips its own gradient to
            clip_norm * sqrt(ranks). The gradient of one rank is about sqrt(ranks) times longer than the average of
            independent ones.
            torch.nn.utils.clip_grad_norm_ before step() works too; it bounds the norm of the rank's own gradient.
        check_finite: look at the gradient before the step. A rank whose gradient has inf or nan leaves out this local
            step, and takes part in the exchange. Costs a pass over the gradient, and the host waits for it. False: inf
            and nan go into the optimizer's state; weights that become inf or nan are set to the global ones.
        check_every: exchanges between checks that the global weights are the same on all ranks; 0: never.
        norm_every: exchanges between measurements of the norms in `stats`; 0: never.
        bucket_mb: upper bound of a bucket in MiB of float32. A bucket also stays below max(4 MiB, 1/8 of the weights).
            A parameter that is longer has a bucket of its own.
        seed: of the random choice of sampled places.
        wire_dtype: torch.bfloat16 sends values of float32 weights in 2 bytes in place of 4. What rounding changed
            stays unsent. None, and "auto" with a density: values are sent as they are.
        chunk: 0: what is sent of a parameter lies above one threshold, from a sample. A power of 2 from 256 to 4096:
            exactly the largest density * chunk of each `chunk` neighbouring entries are sent (SparseLoCo: 4096).
        bits: 1: nothing is pruned: of each value its sign is sent, and one magnitude for each 4096 (1-bit Adam). What
            that changed stays unsent, here and at the owner of a shard, who adds up what the ranks have sent. A rank
            sends at most 31.8 times fewer bytes than a dense all-reduce of float32 (16 ranks: 31.5). Needs a
            backend with all-to-all; not for float64.
            2, with `chunk`: values travel as a sign and one of two levels per chunk, in an all-gather, on any backend.
            What rounding changed stays unsent. Bytes grow with the number of ranks (docs/TRAINING.md). On CUDA
            the host waits for the device 1 + 2 ranks times per bucket.
        look_ahead: part of what this rank has not sent that its own weights hold, (0, 1]; None: 1. Below 1 for torch's
            optimizers whose steps are proportional to the learning rate, and for any with 16-bit parameters alone.
        sum_density: share of the sums' entries that the owner of a shard sends, (0, 1]; the rest waits there
            (docs/TRAINING.md). It falls with the density. None: all are sent. Costs 8 bytes per parameter / ranks.
        overlap: the model: an exchange then ends during the next forward pass, with the same bits as without (see
            `spccl.optim.overlap`). Costs 4 bytes per parameter, 6 with wire_dtype. Each module must use only its own
            parameters and those of modules that it calls; call wait() before other uses. Not with FSDP2. A later
            SparseSync on the same parameters ends it.
        hosts: "auto": with two hosts or more of the same number of ranks, 2 or more, hosts prune (`spccl.optim.hosts`):
            "ranks" above are hosts then. "off": all ranks prune. "on": refuse other hosts. See `stats()["hosts"]`.
    Raises: TypeError for an `optimizer`, `group`, `overlap` or parameter of a wrong type; ValueError for a setting that
        is out of range or no number, and for parameters that are not supported; ValueError on every rank if ranks
        differ in settings or parameters, with names, values and ranks. Warns if density is the integer 1.

    Memory beside the optimizer's: 4 bytes per float32 parameter, 8 per 16-bit one, 8 per float64 one, and two buffers
    of a bucket: at most 1 byte per parameter where no parameter is longer than an eighth of all, 1.5 with wire_dtype.
    With bits=1, beside that, 4 bytes per parameter over the number of ranks, and an eighth of a buffer.
    With bits=2, beside that, the rows of all ranks of two buckets, of all buckets with overlap, and for one rank's rows
    of one bucket a byte for each of their bits.

    If step() raises, the weights may be half exchanged: load a checkpoint.

    Sources: Stich et al. 2018, "Sparsified SGD with Memory" (error feedback); Douillard et al. 2023, "DiLoCo" (local
    steps, outer Nesterov momentum); Sarfi et al. 2025, "SparseLoCo" (sparse exchange of local changes); Tang et al.
    2021, "1-bit Adam" (signs, error feedback at both ends).
    """

    _step_supports_amp_scaling = True  # GradScaler then always calls step(), so that no rank misses an exchange

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        density: Density | None = None,
        *,
        every: int = 1,
        warmup_steps: int | None = None,
        group: "dist.ProcessGroup | None" = None,
        sample: float = 0.001,
        min_numel: int = 4096,
        leak: float = 1.0,
        outer_lr: float = 1.0,
        outer_momentum: float = 0.0,
        correct_second_moment: bool | str | None = None,
        clip_norm: float | None = None,
        check_finite: bool = True,
        check_every: int = 100,
        norm_every: int = 100,
        bucket_mb: float = 256,
        seed: int = 0,
        wire_dtype: torch.dtype | str | None = "auto",
        chunk: int = 0,
        bits: int | None = None,
        look_ahead: float | None = None,
        sum_density: float | None = None,
        overlap: torch.nn.Module | None = None,
        hosts: str = "auto",
        **older: Any,
    ):
        warmup_steps, leak = take_older(older, every, warmup_steps, leak)
        if older:
            refuse_unknown("SparseSync", older, list(inspect.signature(SparseSync).parameters)[1:-1])
        checks.check_optimizer(optimizer)
        checks.check_group(group)
        if overlap is not None:
            overlaps.check_module(overlap)
        self.inner = optimizer
        self.ranks = Ranks(group, hosts, checks.device_of(optimizer))
        given = {
            "density": density, "every": every, "warmup_steps": warmup_steps, "sample": sample, "min_numel": min_numel,
            "leak": leak, "outer_lr": outer_lr, "outer_momentum": outer_momentum,
            "correct_second_moment": correct_second_moment, "clip_norm": clip_norm, "check_finite": check_finite,
            "check_every": check_every, "norm_every": norm_every, "bucket_mb": bucket_mb, "seed": seed,
            "wire_dtype": wire_dtype, "chunk": chunk, "bits": bits, "look_ahead": look_ahead,
            "sum_density": sum_density, "overlap": overlap is not None, "hosts": hosts,
        }  # fmt: skip
        rows = recipes.rows_for(optimizer, moments.is_correctable(optimizer))
        checks.refuse_density(density, bits)
        given, self.recipe = recipes.choose(given, self.ranks.n_pruning, rows)
        self.settings = Settings(**given)
        super().__setstate__({})  # hooks of torch.optim.Optimizer; its __init__ would make parameter groups of its own
        self.steps = 0  # calls of step()
        self.exchanges = 0  # exchanges that have ended
        self._moment = moments.decide(optimizer, self.settings, self.ranks.n_pruning)
        self._schedule = self.settings.schedule()
        self._shards, self._weights = self._find_weights()
        self._look_ahead = LookAhead(optimizer, self._weights, self.settings.look_ahead)
        if overlap is not None:
            overlaps.check_weights(overlap, self._weights, self._shards.example)
        self.ranks.require_same({**self.settings.facts(), **self._facts()})
        self.host = Host(self.ranks) if self.ranks.hosts.inner is not None else None
        own = None if self.host is None else self.host.own
        n, apart = self.settings.rows, self.settings.bits == 1
        self.buckets = make_buckets(self._weights, int(bucket_mb * 2**20), outer_momentum, n, apart, own)
        if self.host is not None:
            self.host.use(self.buckets)
        self.transfers = Transfers(self.settings, self.ranks, self.buckets, self.host)
        self._shards.forget_gathered()
        overlaps.close_earlier(self._weights)
        with torch.no_grad():
            for w in self._weights if self.host is not None else ():
                self.ranks.broadcast(w.flat)
            for bucket in self.buckets:
                bucket.start()
                if self.host is None:
                    self.ranks.broadcast(bucket.globals)
                bucket.reset()
                bucket.prepare()
        self.in_globals = False  # the model has the global weights
        # After consolidate(), where hosts prune: (global weights, velocity or None) of each parameter, whole, flat.
        self.whole: dict[int, tuple[torch.Tensor, torch.Tensor | None]] = {}
        self._check_next = False
        self.states_apart = False  # state_dict() is then a mark: spccl.integrations keeps the states in files
        self._step_to_load: int | None = None  # of a mark that was loaded, until its state is loaded too
        self._tally = measure.Tally(weakref.proxy(self))  # no cycle: `del opt` frees it, and the hooks of overlap
        self._stepper = Stepper(optimizer)
        self._is_first_step = True  # of this object; a loaded state does not change it
        self._scaler: weakref.ref[torch.amp.GradScaler] | None = None  # that called the last scaled step
        self._overlap = None if overlap is None else overlaps.Overlap(overlap, self.transfers)

    # -- construction ------------------------------------------------------------------------------

    def _find_weights(self) -> tuple[Shards, list[Weight]]:
        everything = [p for group in self.inner.param_groups for p in group["params"]]
        names = [n for group in self.inner.param_groups for n in group.get("param_names", ())]
        if not any(p.requires_grad and p.numel() for p in everything):
            raise ValueError("SparseSync: no parameter of the optimizer requires a gradient; nothing would be trained")
        self._named = len(names) == len(everything)  # else a name is a number
        if not self._named:
            names = [f"{i}" for i in range(len(everything))]
        shards = Shards(((n, p) for n, p in zip(names, everything, strict=True) if p.requires_grad), self.ranks)
        trained = [(i, p) for i, p in enumerate(everything) if p.requires_grad and own_memory(p).numel()]
        devices = {p.device for _, p in trained}
        states = {d: torch.zeros(len(trained), prune.STATE_COLUMNS, dtype=torch.int64, device=d) for d in devices}
        weights = []
        for row, (i, p) in enumerate(trained):
            checks.check_param(names[i], p, self.settings.bits)
            pruned = p.dim() > 1 and p.numel() >= self.settings.min_numel
            weights.append(Weight(i, names[i], p, pruned, states[p.device][row]))
        return shards, weights

    def _facts(self) -> dict[str, object]:
        """What ranks must agree on beside the settings."""
        facts: dict[str, object] = {
            "optimizer": type(self.inner).__name__,
            "number of trained parameters": len(self._weights),
        }
        for w in self._weights:
            facts[f"parameter {w.name}"] = (str(w.flat.dtype), tuple(w.param.shape), tuple(w.param.stride()))
        return facts

    # -- torch.optim.Optimizer ---------------------------------------------------------------------

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Those of the inner optimizer: learning-rate schedulers write to them."""
        return self.inner.param_groups

    @property
    def state(self) -> Any:
        return self.inner.state

    @property
    def defaults(self) -> dict[str, Any]:
        return self.inner.defaults

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused: the other ranks' buckets would not have the new parameters."""
        raise RuntimeError(
            "SparseSync.add_param_group: parameters cannot be added later; add the group to the inner optimizer, then "
            "make a new SparseSync, on all ranks at the same step"
        )

    def __repr__(self) -> str:
        """The settings that differ from their default, and what was chosen."""
        s, given = self.settings, {"density": self.settings.density, "every": self.settings.every}
        defaults = {n: p.default for n, p in inspect.signature(SparseSync).parameters.items()} | recipes.PLAIN
        given |= {n: v for n, v in vars(s).items() if n != "overlap" and v != defaults[n]}
        given |= {"overlap": True} if s.overlap else {}
        given |= {"second_moment": self._moment, "ranks": self.ranks.world_size, "backend": self.ranks.backend_names()}
        return f"SparseSync({', '.join(f'{name}={value!r}' for name, value in given.items())}) of {self.inner!r}"

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError("SparseSync: it holds a process group and cannot be pickled; save state_dict()")

    @torch._disable_dynamo  # torch.compile(opt.step) would lose what the step writes to this object
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One local step, and after every `every`-th an exchange. All ranks must call it equally often.

        Args:
            closure: computes the loss and calls backward(). It is called once, before the local step.
        Returns: what the closure returned; None without one.
        Raises: RuntimeError if parameters were added, removed, replaced or moved, inside `global_weights`, if a check
            finds different global weights, or if a checkpoint was loaded without this rank's state, or if
            GradScaler unscaled the inner optimizer; at the first step if DDP averages the gradients over the same
            ranks; ValueError for float16 gradients that GradScaler scaled, unless the inner optimizer is fused;
            torch.distributed.DistBackendError if a rank is lost.
        """
        if self.in_globals:
            raise RuntimeError("SparseSync.step: called inside `with opt.global_weights()`; end that block first")
        checkpoint.require_loaded(self)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        checks.require_same_parameters(self.inner, self._weights)
        if self._is_first_step:
            self._refuse_other_averaging()
        if getattr(self, "found_inf", None) is not None:
            self._scaler = checks.refuse_unscaled(self.inner, self, self._scaler)
        self.wait()
        self.whole = {}
        exchanging = (self.steps + 1) % self.settings.every == 0
        self._tally.before_step()
        stepped = self._local_step()
        self._after_local_step(stepped, exchanging)
        self._tally.after_step()
        self.steps += 1
        if exchanging:
            self._exchange(density_at(self._schedule, self.exchanges))
        return loss

    def _refuse_other_averaging(self) -> None:
        """At the first step, because a DDP module may come after this object was made. The first step may also be that
        of torch's get_optimizer_state_dict()."""
        checkpoint.refuse_torch_checkpoint(self)
        if self.ranks.world_size > 1:
            checks.refuse_ddp((w.param for w in self._weights), self.ranks.members())
        self._is_first_step = False

    # -- the local step ----------------------------------------------------------------------------

    def _local_step(self) -> bool:
        """Step the inner optimizer. False if this rank's gradient has inf or nan, and the step was left out."""
        if self.host is not None:
            self.host.average_for(self)
        found_inf = getattr(self, "found_inf", None)  # of GradScaler, during its step()
        measures = self.settings.clip_norm is not None or (self.settings.check_finite and found_inf is None)
        if measures:
            coalesce_gradients(w.param for w in self._weights)
        grads = [g for w in self._weights if (g := gradient(w.param)) is not None]
        scale = self._stepper.unscale(grads, getattr(self, "grad_scale", None))
        if found_inf is not None and float(found_inf) != 0:  # a tensor; 0 if there is no gradient
            self._tally.skipped += 1
            return False
        if measures and (grads or self._shards):
            norm = self._shards.norm([w.param for w in self._weights]) / (1.0 if scale is None else float(scale))
            if self.settings.check_finite and not math.isfinite(norm):
                self._tally.skip(norm)
                return False
            scale = self._clip(grads, norm, scale)
        scaled = self._moment == "scaled"
        scaling = moments.scaled(self.inner, self.ranks.n_pruning) if scaled else contextlib.nullcontext()
        with self._look_ahead.slower(), scaling:
            self._stepper.step(scale)
        return True

    def _clip(self, grads: list[torch.Tensor], norm: float, scale: torch.Tensor | None) -> torch.Tensor | None:
        """Shorten a gradient of this norm to the bound. Returns what is still to divide by."""
        bound = (self.settings.clip_norm or math.inf) * math.sqrt(self.ranks.n_pruning)
        if not norm > bound or not grads:
            return scale
        if scale is not None:
            return scale * (norm / bound)
        torch._foreach_mul_(grads, bound / norm)
        return None

    def _after_local_step(self, stepped: bool, exchanging: bool) -> None:
        """Bring w up to date: the masters of 16-bit parameters, and the corrected second moment."""
        for bucket in self.buckets:
            scratch = self.transfers.scratch[bucket.device, bucket.globals.dtype]
            bucket.absorb(scratch)
            if self._moment == "corrected" and stepped:
                moments.correct_step(self.inner, bucket, self.ranks.n_pruning, scratch, self.settings.look_ahead)
            if not exchanging:
                bucket.publish()
        if self.host is not None and not exchanging:
            self.host.gather_changes(self._moment == "corrected")

    # -- the exchange ------------------------------------------------------------------------------

    def _exchange(self, density: float, exact: bool = False) -> None:
        """Send, receive, apply: each bucket is selected while the one before travels. `exact` ignores wire_dtype and
        bits. With overlap the averages are applied in the next forward pass."""
        began = time.perf_counter()
        self._tally.begin_exchange(density)
        self.transfers.start(density, exact or self.settings.warms_up(self.exchanges))
        every = self.settings.check_every
        checks_now = self._check_next or (every > 0 and (self.exchanges + 1) % every == 0)
        if not self.transfers.ends_later or exact or checks_now or self._tally.waits_for_exchange():
            self.wait()
        self.exchanges += 1
        self._tally.end_exchange(time.perf_counter() - began)
        if checks_now:
            self._check_next = False
            self.check()

    def wait(self) -> None:
        """With overlap: end the exchange that is under way, so that local and global weights are up to date. Where
        hosts prune, all ranks of a host call it."""
        self.transfers.finish(list(self.transfers.pending))

    def _wait_at(self, call: str) -> None:
        self.wait()
        if self.host is not None:
            self.host.agree(call)

    @torch.no_grad()
    def check(self) -> None:
        """Compare the global weights of all ranks, on all ranks. Raises: RuntimeError that names ranks if they
        differ."""
        if self.in_globals:
            raise RuntimeError("SparseSync.check: called inside `with opt.global_weights()`; end that block first")
        self.wait()
        sums = [int(bucket.checksum()) for bucket in self.buckets]
        self.ranks.require_equal_weights(sums, self.exchanges)

    @torch.no_grad()
    def consolidate(self) -> None:
        """Exchange everything that was not sent yet, so that local and global weights are the same. A collective: call
        it on all ranks, for instance after the last step. Local steps since the last exchange are included. Values
        are not rounded.

        Raises: RuntimeError inside `global_weights`, or if parameters were added, removed or moved;
            torch.distributed.DistBackendError if a rank is lost.
        """
        if self.in_globals:
            raise RuntimeError("SparseSync.consolidate: called inside `with opt.global_weights()`; end the block first")
        checks.require_same_parameters(self.inner, self._weights)
        self._wait_at("consolidate()")
        self._shards.forget_gathered()
        for bucket in self.buckets:
            bucket.absorb(self.transfers.scratch[bucket.device, bucket.globals.dtype])
        self._exchange(1.0, exact=True)
        if self.host is not None:
            self.whole = self.host.gather_whole()

    @contextlib.contextmanager
    def global_weights(self) -> Iterator[None]:
        """Inside the block the model has the global weights, the same on all ranks; afterwards this rank's own again.

        16-bit parameters then hold the global float32 weights, rounded.

        For evaluation and for saving the model. No communication: ranks may enter it alone. But all shards of a replica
        of FSDP2 enter together, because FSDP2 then gathers all parameters again; and so do the ranks of a host where
        hosts prune, because each has a part of the global weights; step() of others of them meanwhile raises
        RuntimeError on all. No step() inside.
        """
        self._swap(True)
        try:
            yield
        finally:
            self._swap(False)

    @torch.no_grad()
    def _swap(self, inside: bool) -> None:
        if inside == self.in_globals:
            raise RuntimeError("SparseSync.global_weights: this block is already inside one")
        self._wait_at("global_weights()" if inside else "the end of global_weights()")
        self._shards.forget_gathered()
        for bucket in self.buckets:
            scratch = self.transfers.scratch[bucket.device, bucket.globals.dtype]
            if inside:
                bucket.absorb(scratch)
            bucket.swap(scratch)
        if self.host is not None:
            self.host.gather()
        self.in_globals = inside

    # -- reports, checkpoints ----------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        self.transfers.advance()
        return self._tally.stats()

    def state_dict(self) -> dict[str, Any]:
        """This rank's state, in torch's layout with one more key, "sparse_sync". See `spccl.optim.checkpoint`.

        It has each parameter's local and global weights (float32, or float64 of float64 parameters), in its shape.
        These are copies; the inner optimizer's tensors are not, as in torch.optim.

        Raises: RuntimeError if torch's get_optimizer_state_dict() calls it, which would drop those weights.
        """
        checkpoint.refuse_torch_checkpoint(self)
        return checkpoint.mark(self) if self.states_apart else checkpoint.save(self)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from `state_dict()`, and write this rank's weights into the model. See `spccl.optim.checkpoint`.

        Raises: ValueError for the state of another rank, model, version or number of ranks, and for one without
            "sparse_sync". A parameter whose name or shape differs is named.
        """
        self.wait()
        checkpoint.load(self, state_dict)

    reshard = staticmethod(checkpoint.reshard)
