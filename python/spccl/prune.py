"""Selects the entries of one parameter's gradient to send now, and keeps the others for later steps.

Tensor arithmetic for `spccl.ddp`, one parameter at a time; knows no process group and no DDP. There are two
forms of the same rule. `prune_host` works through the parameter in blocks that stay in the cache, and returns
plain numbers. `prune_device` never waits for the device, and returns 0-dim tensors.

Symbols: g the local gradient, u the velocity (momentum correction), v the residual, m the momentum,
l the leak, t the threshold. With error feedback and momentum one step is

    u = m u + g;   v = l v + u;   send s = v where |v| > t, else 0;   v -= s;   u = 0 where s != 0

Without momentum u is g. Without error feedback v is g, and what is not sent is dropped.

Sources: Lin et al. 2018, "Deep Gradient Compression", sections 3.1 (error feedback), 3.2 (momentum
correction, momentum factor masking) and 5 (threshold from a sample); Hough et al., "SpCCL",
section VI.B (99% sparsity, threshold from 0.1% of the gradient, leaky error feedback). Changed from both: the
threshold is kept from step to step, and the sample only bounds it, so that bytes per step are steady.
"""

import math
import zlib
from dataclasses import dataclass

import torch

# A sample must hold this many entries above the threshold: with 16, a factor of two in density is
# four standard deviations one way and two the other.
SAMPLE_HITS = 16
# The carried threshold is kept while the sample puts its density within this factor of the target.
GUARD = 2.0
# Gain of the controller that moves the carried threshold: threshold *= (sent / wanted) ** GAIN. The
# tail of a normal distribution at 1% loses 7% of its entries per 1% of threshold, so 0.2 does not swing.
GAIN = 0.2
# More than this many times the wanted entries are never sent from one parameter (ties, jumps).
MAX_OVERSHOOT = 4
# Elements per block and thread on the host: gradient, velocity, residual and scratch in 1 MiB of cache.
BLOCK_ELEMS = 65536

_hardshrink = torch.ops.aten.hardshrink.out
_hardshrink_mask = torch.ops.aten.hardshrink_backward.grad_input


@dataclass(frozen=True)
class Rule:
    """Settings of one step, the same for every parameter.

    density         wanted share of entries sent, (0, 1]; 1 sends everything
    sample          share of entries looked at to find the threshold, (0, 1]
    leak            factor on the residual before the new gradient is added, (0, 1]
    momentum        m above, [0, 1); 0 keeps no velocity
    error_feedback  whether a residual is kept
    scale           factor on what is sent (1 / ranks where the backend cannot average)
    """

    density: float
    sample: float
    leak: float
    momentum: float
    error_feedback: bool
    scale: float = 1.0


class Slot:
    """State of one parameter: residual and velocity, flat [numel] in the parameter's memory order.

    Both are float32 (float64 for float64 gradients) on the gradient's device, in units of the gradient
    that the hook sees, and None until first needed. `threshold` is a float (host) or a 0-dim tensor.
    """

    __slots__ = ("key", "name", "numel", "pruned", "residual", "threshold", "velocity")

    def __init__(self, name: str, numel: int, pruned: bool):
        self.name = name
        self.numel = numel
        self.pruned = pruned
        self.key = zlib.crc32(name.encode())
        self.residual: torch.Tensor | None = None
        self.velocity: torch.Tensor | None = None
        self.threshold: float | torch.Tensor | None = None

    def prepare(self, grad: torch.Tensor, rule: Rule, pruned: bool) -> None:
        """Allocate what this step needs."""
        dtype = torch.float64 if grad.dtype == torch.float64 else torch.float32
        if rule.momentum > 0 and self.velocity is None:
            self.velocity = torch.zeros(self.numel, dtype=dtype, device=grad.device)
        if pruned and rule.error_feedback and self.residual is None:
            self.residual = torch.zeros(self.numel, dtype=dtype, device=grad.device)


def sample_places(slot: Slot, rule: Rule, seed: int, step: int) -> tuple[int, int]:
    """Start and stride of this step's sample.

    The stride is 32 i + 1, so that the sample does not follow a column of a matrix (as in Lin et al.'s code).
    The start depends on seed, step and name only, so a resumed run samples the same places.
    """
    hits = math.ceil(SAMPLE_HITS / rule.density)
    n_samples = min(slot.numel, max(math.ceil(rule.sample * slot.numel), hits))
    stride = slot.numel // n_samples
    if stride > 32:
        stride = stride // 32 * 32 + 1
    mixed = ((slot.key ^ seed) * 2654435761 + step * 0x9E3779B1) & 0xFFFFFFFF
    return (mixed >> 7) % stride, stride


def sample_magnitudes(grad: torch.Tensor, slot: Slot, rule: Rule, start: int, stride: int) -> torch.Tensor:
    """|v| as it will be after this step's update, at the sampled places, [n_samples] float32 or 64."""
    x = grad[start::stride].to(torch.float64 if grad.dtype == torch.float64 else torch.float32)
    if slot.velocity is not None and rule.momentum > 0:
        x = torch.add(x, slot.velocity[start::stride], alpha=rule.momentum)
    if slot.residual is not None and rule.error_feedback:
        x = torch.add(x, slot.residual[start::stride], alpha=rule.leak)
    return x.abs()


def order_statistics(magnitudes: torch.Tensor, density: float) -> torch.Tensor:
    """Magnitudes [3] in the sample above which lie GUARD, 1 and 1/GUARD times the density: low, middle, high."""
    n = magnitudes.numel()
    ranks = [min(n, max(1, round(density * f * n))) for f in (GUARD, 1.0, 1.0 / GUARD)]
    top = torch.topk(magnitudes, ranks[0]).values
    return torch.stack([top[r - 1] for r in ranks])


def choose_threshold(low: float, middle: float, high: float, carried: float | None) -> float:
    """The threshold kept from the last step if it lies between low and high, else the sample's own."""
    return carried if carried is not None and low <= carried <= high else middle


def adapt_threshold(threshold: float, n_sent: int, n_wanted: float) -> float:
    """The threshold for the next step, from the number of entries that this step sent."""
    return threshold * min(4.0, max(0.25, n_sent / n_wanted)) ** GAIN


def _below(threshold: float) -> float:
    """The largest limit that still sends entries equal to the threshold. All entries of a gradient may be equal."""
    return threshold * (1.0 - 2.0**-23)


def _keep_largest(sent: torch.Tensor, n_keep: int) -> None:
    """Zero all but the n_keep largest of the non-zeros of `sent` [n], in place. Of equal ones any may stay."""
    places = sent.nonzero().flatten()
    drop = torch.topk(sent[places].abs(), places.numel() - n_keep, largest=False).indices
    sent[places[drop]] = 0


def prune_host(grad: torch.Tensor, slot: Slot, rule: Rule, *, seed: int = 0, step: int = 0, factor: float = 1.0) -> int:
    """Replace `grad`, in host memory, by the entries to send, and keep the others in `slot`.

    Args:
        grad: flat gradient [numel], float16, bfloat16, float32 or float64, finite; overwritten.
        slot: state of this parameter; `slot.prepare` was called.
        rule: this step's settings; density below 1.
        factor: multiplies the gradient first (clipping).
    Returns: number of non-zero entries now in `grad`. Never above MAX_OVERSHOOT times the wanted number,
        but for one block's share of the density.
    Source: see the top of this file. What is sent and what stays add up exactly: an entry is moved
        whole, and for 16-bit gradients the rounding error stays in the residual.
    """
    if factor != 1.0:
        grad.mul_(factor)
    start, stride = sample_places(slot, rule, seed, step)
    sample = sample_magnitudes(grad, slot, rule, start, stride)
    low, middle, high = order_statistics(sample, rule.density).tolist()
    threshold = choose_threshold(low, middle, high, slot.threshold)
    n_wanted = max(1.0, rule.density * slot.numel)
    n_sent = 0
    step_elems = min(slot.numel, BLOCK_ELEMS * torch.get_num_threads())
    scratch = torch.empty(step_elems, dtype=sample.dtype)
    for a in range(0, slot.numel, step_elems):
        block = _Block.cut(grad, slot, rule, scratch, a)
        n_here = block.grad.numel()
        room = max(math.ceil(MAX_OVERSHOOT * n_wanted) - n_sent, math.ceil(rule.density * n_here))
        n_sent += _prune_block(block, rule, _below(threshold), room)
    slot.threshold = adapt_threshold(threshold, n_sent, n_wanted)
    return n_sent


@dataclass(frozen=True)
class _Block:
    """Neighbouring elements of one parameter, small enough for the cache. All [n]."""

    grad: torch.Tensor
    velocity: torch.Tensor | None
    residual: torch.Tensor | None
    scratch: torch.Tensor

    @classmethod
    def cut(cls, grad: torch.Tensor, slot: Slot, rule: Rule, scratch: torch.Tensor, start: int) -> "_Block":
        b = min(start + scratch.numel(), slot.numel)
        return cls(
            grad[start:b],
            slot.velocity[start:b] if slot.velocity is not None and rule.momentum > 0 else None,
            slot.residual[start:b] if slot.residual is not None and rule.error_feedback else None,
            scratch[: b - start],
        )


def _prune_block(block: _Block, rule: Rule, limit: float, room: int) -> int:
    """One step on a block: send the entries above `limit`, at most `room` of them. Returns their number."""
    grad, velocity, residual, scratch = block.grad, block.velocity, block.residual, block.scratch
    narrow = grad.dtype != scratch.dtype
    # mixed-type arithmetic is eight times slower than a conversion followed by plain arithmetic
    wide = scratch.copy_(grad) if narrow else grad
    total = wide
    if velocity is not None:
        total = torch.add(wide, velocity, alpha=rule.momentum, out=velocity)
    if residual is not None:
        total = torch.add(total, residual, alpha=rule.leak, out=residual)
    _hardshrink(total, limit, out=wide)
    n_sent = int(torch.count_nonzero(wide))
    thinned = n_sent > room
    if thinned:
        _keep_largest(wide, room)
        n_sent = room
    if narrow:
        info = torch.finfo(grad.dtype)
        grad.copy_(wide.clamp_(info.min, info.max))
        wide.copy_(grad)
    if velocity is not None:
        if thinned or narrow:
            velocity.masked_fill_(wide != 0, 0.0)
        else:  # the sent part of u by the same comparison, taken off: a third of a masked_fill_'s time
            velocity.sub_(_hardshrink_mask(velocity, total, limit, grad_input=scratch))
    if residual is not None:
        residual.sub_(wide)
    if rule.scale != 1.0:
        grad.mul_(rule.scale)
    return n_sent


def prune_device(
    grad: torch.Tensor,
    slot: Slot,
    rule: Rule,
    alive: torch.Tensor,
    *,
    seed: int = 0,
    step: int = 0,
) -> torch.Tensor:
    """`prune_host` without waiting for the device, for CUDA and other asynchronous devices.

    Args:
        alive: 0-dim bool tensor; where False, gradient and state are left as they are.
    Returns: 0-dim int64 tensor, entries sent. There is no upper bound here: all of a constant gradient
        is sent at once (thinning it would need its count on the host).
    """
    start, stride = sample_places(slot, rule, seed, step)
    sample = sample_magnitudes(grad, slot, rule, start, stride)
    low, middle, high = order_statistics(sample, rule.density).unbind()
    carried = middle if slot.threshold is None else slot.threshold
    carried = torch.as_tensor(carried, dtype=sample.dtype, device=grad.device)
    threshold = torch.where((low <= carried) & (carried <= high), carried, middle)
    update = grad.to(sample.dtype)
    velocity = residual = None
    if slot.velocity is not None and rule.momentum > 0:
        velocity = update = torch.add(update, slot.velocity, alpha=rule.momentum)
    if slot.residual is not None and rule.error_feedback:
        residual = update = torch.add(update, slot.residual, alpha=rule.leak)
    picked = (update.abs() > _below(threshold)) & alive
    info = torch.finfo(grad.dtype)
    sent = torch.where(picked, update.clamp(info.min, info.max), 0).to(grad.dtype)
    if velocity is not None:
        slot.velocity.copy_(torch.where(alive, velocity.masked_fill(picked, 0), slot.velocity))
    if residual is not None:
        slot.residual.copy_(torch.where(alive, residual - sent.to(residual.dtype), slot.residual))
    grad.copy_(torch.where(alive, sent, grad))
    if rule.scale != 1.0:
        grad.mul_(rule.scale)
    n_sent = torch.count_nonzero(picked)
    ratio = n_sent / max(1.0, rule.density * slot.numel)
    adapted = threshold * ratio.clamp(0.25, 4.0) ** GAIN
    slot.threshold = torch.where(alive, adapted, carried)
    return n_sent


def send_all(grad: torch.Tensor, slot: Slot, rule: Rule, alive: torch.Tensor | None = None) -> None:
    """Send every entry of `grad`, with momentum, and all that earlier steps kept.

    The velocity stays local and is not masked: the average of local velocities is the velocity of the
    average, so a parameter that is always sent whole follows SGD with momentum exactly.
    `alive` as in `prune_device`; None means True.
    """
    update = grad
    velocity = None
    if slot.velocity is not None and rule.momentum > 0:
        velocity = update = torch.add(grad, slot.velocity, alpha=rule.momentum)
    if slot.residual is not None and rule.error_feedback:
        update = torch.add(update, slot.residual, alpha=rule.leak)
    if alive is None:
        if velocity is not None:
            slot.velocity.copy_(velocity)
        if slot.residual is not None:
            slot.residual.zero_()
        grad.copy_(update)
    else:
        if velocity is not None:
            slot.velocity.copy_(torch.where(alive, velocity, slot.velocity))
        if slot.residual is not None:
            slot.residual.mul_(~alive)
        grad.copy_(torch.where(alive, update.to(grad.dtype), grad))
    if rule.scale != 1.0:
        grad.mul_(rule.scale)
