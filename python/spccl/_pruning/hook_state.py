"""State of a pruning hook: what it keeps on each device, and its checkpoints. `spccl.ddp` says what a user sees."""

import warnings
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from spccl import prune

from . import hosts
from .sums import shaped_kept

OF_HOSTS = ("hosts", "layouts")  # entries of a state where hosts prune
VERSION, WITH_SUMS = 2, 3  # of a checkpoint; 1 had flat tensors in the order of the memory, without shapes


def version_of(parameters: dict[str, dict[str, Any]], loaded: int | None) -> int:
    """Of a checkpoint. Args: loaded: the version of a state that was loaded and not used yet."""
    return loaded or (WITH_SUMS if any("kept" in entry for entry in parameters.values()) else VERSION)


def plain_name(name: str) -> str:
    """A parameter's name without the prefix of torch.compile."""
    return name.replace("_orig_mod.", "")


class Layout(NamedTuple):
    """Shape of a parameter (of this rank's shard of it) and the strides that its flat gradient has in memory."""

    shape: torch.Size
    strides: tuple[int, ...]

    def shaped(self, flat: torch.Tensor) -> torch.Tensor:
        """`flat`, in the order of the memory, as a contiguous tensor of `shape`."""
        return flat.as_strided(self.shape, self.strides).contiguous()

    def flat(self, shaped: torch.Tensor, device: torch.device) -> torch.Tensor:
        """A copy on `device` of a tensor of `shape`, flat in the order of the memory."""
        flat = torch.empty(self.shape.numel(), dtype=shaped.dtype, device=device)
        flat.as_strided(self.shape, self.strides).copy_(shaped)
        return flat


def contiguous(shape: torch.Size) -> Layout:
    return Layout(shape, torch.empty(shape, device="meta").stride())


class OnDevice:
    """What the hook keeps beside the gradients of one device, so that the host need not wait for it.

    states      [n_params, prune.STATE_COLUMNS] int64: a spccl_prune_state for each parameter
    last_sent   [n_params] int64: entries sent in the last complete step
    """

    def __init__(self, n_params: int, device: torch.device):
        self.states = torch.zeros(n_params, prune.STATE_COLUMNS, dtype=torch.int64, device=device)
        self.last_sent = torch.zeros(n_params, dtype=torch.int64, device=device)
        self.has_scale = False  # of this step
        self.prunes_later = False  # some bucket of this step is pruned inside its all-reduce
        self._sent_in_states = False  # last_sent is still to be copied from states
        self._scale = torch.ones(1, dtype=torch.float32, device=device)
        self._product = torch.ones_like(self._scale)
        self._factor = torch.ones(1, dtype=torch.float32, device=device)
        self._norm32 = torch.zeros(1, dtype=torch.float32, device=device)
        self._norm64 = torch.zeros(1, dtype=torch.float64, device=device)
        # Squared norm of each bucket's unscaled gradient, of its last finite one. There are at most n_params buckets.
        self._squares = torch.zeros(n_params, dtype=torch.float64, device=device)
        self._used = self._squares[:0]  # those of buckets seen
        self._own_squares = torch.zeros_like(self._squares)  # of this rank's part, where several ranks have parts

    def read_scale(self, scaler: "torch.amp.GradScaler | None", divisor: float = 1.0) -> torch.Tensor | None:
        """GradScaler's scale times `divisor`, [1] on this device; None if both are 1."""
        scale = self._read_scaler(scaler)
        if divisor == 1:
            return scale
        if scale is None:
            return self._product.fill_(divisor)
        return torch.mul(scale, divisor, out=self._product)

    def _read_scaler(self, scaler: "torch.amp.GradScaler | None") -> torch.Tensor | None:
        if scaler is None or not scaler.is_enabled():
            return None
        if not self.has_scale:
            scale = scaler._scale  # get_scale() would wait for the device
            if scale is None:
                self._scale.fill_(scaler.get_scale())
            else:
                self._scale.copy_(scale)
            self.has_scale = True
        return self._scale

    def add_norm(
        self,
        index: int,
        grad: torch.Tensor,
        loss_scale: torch.Tensor | None,
        group: dist.ProcessGroup | None,
    ) -> None:
        """Measure the norm of bucket `index` with torch operations. One with inf or nan counts with its norm of the
        step before.

        Args: group: ranks that have the other parts of this gradient; None: `grad` is all of it.
        """
        norm = torch.linalg.vector_norm(grad, dtype=prune.wide_dtype(grad.dtype))
        self._use(index)
        norm = norm.double() if loss_scale is None else norm.double() / loss_scale
        place = slice(index, index + 1)
        square = self._squares[place] if group is None else self._own_squares[place]
        square.copy_(torch.where(norm.isfinite(), norm * norm, square))
        if group is not None:
            self._squares[place] = square
            dist.all_reduce(self._squares[place], group=group)

    def clip(self, index: int, grad: torch.Tensor, bound: float) -> prune.Clip:
        """Measure the norm of bucket `index`, for the pruning call to bound the norm of all buckets by `bound`.

        It does what `add_norm` without a group and `clip_factor` do. Infinity as bound: only measure.
        """
        norm = self._norm64 if grad.dtype == torch.float64 else self._norm32
        torch.linalg.vector_norm(grad, dim=0, keepdim=True, dtype=norm.dtype, out=norm)
        self._use(index)
        return prune.Clip(norm, self._used, index, bound)

    def _use(self, index: int) -> None:
        if index >= len(self._used):
            self._used = self._squares[: index + 1]

    def norms(self) -> torch.Tensor:
        """Squared norms [2, n_params] of each bucket: of this rank's part where others have parts, and of all of it."""
        return torch.stack([self._own_squares, self._squares])

    def set_norms(self, norms: torch.Tensor, n_buckets: int) -> None:
        """Continue from `norms()` of a state: the next step clips by those of all `n_buckets` buckets."""
        self._own_squares.copy_(norms[0])
        self._squares.copy_(norms[1])
        self._used = self._squares[:n_buckets]

    def clip_factor(self, bound: float) -> torch.Tensor:
        """The factor [1] that bounds the norm of all buckets."""
        self._factor.copy_((bound / self._squares.sum().sqrt()).clamp(max=1.0))
        return self._factor

    def begin_step(self) -> None:
        self.has_scale = self.prunes_later = False
        if self._sent_in_states:
            self.last_sent.copy_(self.states[:, prune.N_SENT])
            self._sent_in_states = False

    def end_step(self, last_bucket: int) -> None:
        # What all-reduces prune is not there yet.
        self._sent_in_states = self.prunes_later
        if not self.prunes_later:
            self.last_sent.copy_(self.states[:, prune.N_SENT])
        if last_bucket + 1 < len(self._used):  # DDP made fewer buckets than before
            self._squares[last_bucket + 1 :].zero_()
            self._used = self._squares[: last_bucket + 1]

    def read_sent(self) -> list[int]:
        """Entries that each parameter sent in the last complete step. Waits for the device."""
        return (self.states[:, prune.N_SENT] if self._sent_in_states else self.last_sent).tolist()

    def read_counts(self) -> tuple[float, float, int, int]:
        """Squared norm of the gradient, and of this rank's part of it; entries sent, and entries not finite, so far.
        Waits for the device."""
        totals = self.states[:, prune.N_SENT_ALL : prune.N_NONFINITE_ALL + 1].sum(dim=0).tolist()
        whole, part = self._squares.sum(), self._own_squares.sum()
        return float(whole), float(part) or float(whole), *totals


def pack(
    params: Iterable[prune.ParamState], layouts: dict[str, Layout], parameters: dict[str, dict[str, Any]], step: int
) -> int:
    """Write the state of each parameter to `parameters`, by name, as `PruningHook.state_dict` describes it.

    Returns the steps done: `step`, or more if replays of a captured graph did more. Waits for the device.
    """
    for param in params:
        shaped = layouts[param.name].shaped
        unscale = 1.0 / param.loss_scale()
        state = param.state.cpu()
        threshold = float(state.view(torch.float64)[prune.THRESHOLD])
        parameters[param.name] = {
            "residual": None if param.residual is None else shaped(param.residual * unscale),
            "velocity": None if param.velocity is None else shaped(param.velocity * unscale),
            "threshold": threshold * unscale if threshold else None,
        }
        step = max(step, int(state[prune.STEP]))  # replays of a captured graph advance this one alone
    return step


def unpack(who: str, state: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Entries of a checkpoint, by plain parameter name. ValueError for what is no checkpoint."""
    missing = {"version", "world_size", "step", "seed", "parameters"}.difference(state)
    if missing:
        raise ValueError(
            f"{who}.load_state_dict: the state has no {', '.join(sorted(missing))}; wanted what {who}.state_dict() "
            "returned"
        )
    if state["version"] not in (1, VERSION, WITH_SUMS):
        raise ValueError(f"{who}.load_state_dict: version {state['version']!r}, wanted 1, {VERSION} or {WITH_SUMS}")
    for name, entry in state["parameters"].items():
        missing = {"residual", "velocity"}.difference(entry)
        if missing:
            raise ValueError(
                f"{who}.load_state_dict: the entry of parameter {name!r} has no {', '.join(sorted(missing))}; wanted "
                f"what {who}.state_dict() returned"
            )
    return {plain_name(name): dict(entry) for name, entry in state["parameters"].items()}


def require_one_shard(who: str, shards: Iterable[Sequence[Any]]) -> None:
    """ValueError unless all states to reshard are of one shard. `shards`: the entry "shard" of each."""
    found = {tuple(shard) for shard in shards}
    if len(found) > 1:
        raise ValueError(
            f"{who}.reshard: wanted the states of the ranks that hold one shard, got shards {sorted(found)} (number, "
            "of how many)"
        )


def reshard(
    who: str,
    states: list[dict[str, Any]],
    world_size: int,
    ranks: Iterable[int] | None = None,
    per_host: int = 1,
) -> list[dict[str, Any]]:
    """The body of `PruningHook.reshard`."""
    if not states or world_size < 1:
        raise ValueError(
            f"{who}.reshard: got {len(states)} states for {world_size} ranks, wanted the states of all ranks of one "
            "save, and 1 rank or more"
        )
    states = hosts.whole(who, states, _join)
    found = [(s["world_size"], s["step"], s["version"]) for s in states]
    if any(f != (len(states), *found[0][1:]) for f in found):
        raise ValueError(
            f"{who}.reshard: wanted the states of all ranks at one step, got {found} as (ranks, step, version)"
        )
    require_one_shard(who, (s.get("shard", ()) for s in states))
    n_pruning = hosts.n_pruning(who, world_size, per_host)
    factor = n_pruning / len(states)
    resharded = []
    for rank in range(world_size) if ranks is None else ranks:
        mine = states[rank // per_host :: n_pruning]
        parameters = {}
        for name, entry in states[0]["parameters"].items():
            parameters[name] = {"threshold": None}
            for key in ("residual", "velocity"):
                parts = [s["parameters"][name][key] for s in mine]
                parts = [p for p in parts if p is not None] or [None]
                if parts[0] is None:
                    parameters[name][key] = None if entry[key] is None else torch.zeros_like(entry[key])
                else:
                    wide = torch.promote_types(parts[0].dtype, torch.float32)
                    total = sum((p.to(parts[0].device, wide) for p in parts[1:]), parts[0].to(wide))
                    parameters[name][key] = (total * factor).to(parts[0].dtype)
            for saved in (s["parameters"][name].get("kept") for s in states):
                residual = parameters[name]["residual"]
                if saved is not None and residual is not None:
                    residual.add_(shaped_kept(saved, residual.shape).to(residual.device, residual.dtype))
        new = {**states[0], "world_size": world_size, "parameters": parameters}
        new["version"] = min(VERSION, states[0]["version"])
        resharded.append(new if per_host == 1 else _cut(new, *divmod(rank, per_host), per_host))
    return resharded


def _join(parts: list[dict[str, Any]], host: int, n_hosts: int) -> dict[str, Any]:
    """The state of a host's whole parameters from those of its ranks, in the order of their places."""
    parameters = {}
    for name, (shape, strides) in parts[0]["layouts"].items():
        entries = [part["parameters"][name] for part in parts]
        parameters[name] = {
            key: hosts.joined([e[key] for e in entries]).as_strided(shape, strides).contiguous()
            if all(e[key] is not None for e in entries)
            else None
            for key in ("residual", "velocity")
        } | {"threshold": None}
    return {**parts[0], "world_size": n_hosts, "hosts": None, "parameters": parameters}


def _cut(state: dict[str, Any], host: int, place: int, per_host: int) -> dict[str, Any]:
    """The state of a rank from that of its host's whole parameters."""
    known, layouts, parameters = state.get("layouts", {}), {}, {}
    for name, entry in state["parameters"].items():
        parameters[name] = dict(entry)
        for key in ("residual", "velocity"):
            if (tensor := entry[key]) is not None:
                layouts[name] = known.get(name) or (tuple(tensor.shape), tensor.contiguous().stride())
                flat = Layout(tensor.shape, layouts[name][1]).flat(tensor, tensor.device)
                parameters[name][key] = flat[slice(*hosts.part(flat.numel(), per_host, place))].clone()
    numbers = {"per_host": per_host, "host": host, "place": place}
    return {**state, "hosts": numbers, "layouts": layouts, "parameters": parameters}


def fit(
    who: str, loaded: dict[str, dict[str, Any]], version: int, layouts: dict[str, Layout]
) -> dict[str, dict[str, Any]]:
    """The entries of a checkpoint of `version` as those of VERSION.

    Raises: ValueError unless each names a parameter of the model and has its shape (of version 1: its size).
    """
    fitted = {}
    for name, entry in loaded.items():
        if name not in layouts:
            raise ValueError(
                f"{who}: the state has parameter {name!r}, the model has no such parameter; load the state of the run "
                "that saved this model's weights"
            )
        layout = layouts[name]
        fitted[name] = dict(entry)
        for key in ("residual", "velocity"):
            if entry[key] is None:
                continue
            wanted = layout.shape if version > 1 else (layout.shape.numel(),)
            if entry[key].shape != torch.Size(wanted):
                raise ValueError(
                    f"{who}: {key} of {name!r} has shape {tuple(entry[key].shape)} in the state, wanted "
                    f"{tuple(wanted)}; load the state of the run that saved this model's weights, of this rank"
                )
            if version == 1:
                fitted[name][key] = layout.shaped(entry[key])
    if version == 1:
        _warn_of_version_1(who, [name for name in loaded if len(layouts[name].shape) in (4, 5)])
    return fitted


def _warn_of_version_1(who: str, convolutions: list[str]) -> None:
    """Version 1 does not say which memory format the tensors had."""
    if convolutions:
        warnings.warn(
            f"{who}: the state is of version 1, which does not say in which memory format it was saved. "
            f"{convolutions[0]!r} and {len(convolutions) - 1} others are read in that of this model; if the run that "
            "saved them used another one (channels_last, or not), leave the state out",
            stacklevel=3,
        )


def fill_state(param: prune.ParamState, entry: dict[str, Any], layout: Layout, error_feedback: bool) -> None:
    for key in ("residual", "velocity"):
        if entry[key] is not None and (error_feedback or key != "residual"):
            setattr(param, key, layout.flat(entry[key], param.state.device))
    param.state.view(torch.float64)[prune.LOSS_SCALE] = 1.0  # that is what state_dict() stores them in
