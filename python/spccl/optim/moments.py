"""The second moment of the averaged gradient, estimated from that of this rank's own gradient.

An Adam-like optimizer on one rank divides by the root of v, the running mean of its squared gradient. The gradient of
one of N ranks is noisier than the average over ranks, so its v is larger and its steps are smaller than those of dense
training. The variance of an average of N independent gradients is Var / N, so the second moment of the average is about
v / N + (1 - 1/N) m^2 with the first moment m as estimate of the mean ("corrected"). Where noise is most of the gradient
v / N alone is close to that ("scaled"). A v that is N times smaller is a learning rate and an eps that are sqrt(N)
times larger, so it costs nothing.
"""

import contextlib
import math
from collections.abc import Iterator

import torch

from .bucket import Bucket, Scratch, Weight, local_part
from .settings import Settings

# Above this number of ranks the default is "corrected". There v / N can make steps up to sqrt(N) times Adam's longest,
# where the gradient is not mostly noise. Measured with 4 ranks only.
MOST_RANKS_SCALED = 8


def is_correctable(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer is torch's Adam or AdamW, in the variant whose steps this file can correct."""
    if type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW):
        return False
    return not any(group.get("amsgrad") or group.get("maximize") for group in optimizer.param_groups)


def decide(optimizer: torch.optim.Optimizer, settings: Settings, n_ranks: int) -> str:
    """Which second moment divides a step: "local", "scaled" or "corrected"."""
    wanted, possible = settings.correct_second_moment, is_correctable(optimizer)
    if wanted and not possible:
        raise ValueError(
            f"SparseSync: correct_second_moment={wanted!r} with a {type(optimizer).__name__}, wanted torch's Adam "
            "or AdamW without amsgrad and maximize; leave the setting out"
        )
    if wanted is None:
        wanted = ("scaled" if n_ranks <= MOST_RANKS_SCALED else True) if possible and settings.every == 1 else False
    if not wanted or n_ranks == 1:
        return "local"
    return "corrected" if wanted is True else "scaled"


@contextlib.contextmanager
def scaled(optimizer: torch.optim.Optimizer, n_ranks: int) -> Iterator[None]:
    """Inside the block the optimizer's step has v / n_ranks in the place of v. Decoupled weight decay stays."""
    root, kept = math.sqrt(n_ranks), []
    decoupled = isinstance(optimizer, torch.optim.AdamW)
    for group in optimizer.param_groups:
        kept.append({key: group[key] for key in ("lr", "eps", "weight_decay")})
        group["lr"] = group["lr"] * root
        group["eps"] = group["eps"] * root
        if group.get("decoupled_weight_decay", decoupled):
            group["weight_decay"] = group["weight_decay"] / root
    try:
        yield
    finally:
        for group, values in zip(optimizer.param_groups, kept, strict=True):
            group.update(values)


def correct_step(
    optimizer: torch.optim.Optimizer, bucket: Bucket, n_ranks: int, scratch: Scratch, look_ahead: float = 1.0
) -> None:
    """Replace the step that the optimizer has just made by one with the corrected second moment. Takes 13 passes.

    With fused or capturable optimizers, whose step numbers are in GPU memory, and with learning rates there, the host
    waits for the device once a bucket.

    A step is -lr m' / (sqrt(v') + eps), with the bias-corrected m' and v'. This adds it again and subtracts the step
    with v' / N + (1 - 1/N) m'^2 in the place of v'.

    Args:
        look_ahead: factor on what the step changed.
        scratch: overwritten.
    """
    group_of = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    places = [i for i, w in enumerate(bucket.weights) if w.param.grad is not None and optimizer.state.get(w.param)]
    if not places:
        return
    weights = [bucket.weights[i] for i in places]
    groups = [group_of[id(w.param)] for w in weights]
    states = [optimizer.state[w.param] for w in weights]
    settings = [x for g in groups for x in (*g["betas"], g["eps"], g["lr"])]
    numbers = _numbers([*(s["step"] for s in states), *settings])
    steps, settings = numbers[: len(states)], numbers[len(states) :]
    beta1, beta2, epsilons, rates = (settings[i::4] for i in range(4))
    bias1 = [1 - beta**t for beta, t in zip(beta1, steps, strict=True)]
    bias2 = [1 - beta**t for beta, t in zip(beta2, steps, strict=True)]
    mean = [bucket.split(scratch[0])[i] for i in places]
    root = [bucket.split(scratch[1])[i] for i in places]
    local = [bucket.locals[i] for i in places]
    first = [_flat(s["exp_avg"], w) for s, w in zip(states, weights, strict=True)]
    second = [_flat(s["exp_avg_sq"], w) for s, w in zip(states, weights, strict=True)]
    torch._foreach_copy_(mean, first)
    torch._foreach_mul_(mean, [1 / b for b in bias1])
    for sign, share in ((1.0, 1.0), (-1.0, 1.0 / n_ranks)):
        torch._foreach_copy_(root, second)
        torch._foreach_mul_(root, [share / b for b in bias2])
        if share < 1:
            torch._foreach_addcmul_(root, mean, mean, value=1 - share)
        torch._foreach_sqrt_(root)
        torch._foreach_add_(root, epsilons)
        torch._foreach_addcdiv_(local, mean, root, [sign * look_ahead * rate for rate in rates])


def _numbers(values: list[float | torch.Tensor]) -> list[float]:
    """Numbers and tensors of one element, as numbers. Waits at most once for each device that has some of them."""
    found = {id(v): v for v in values if isinstance(v, torch.Tensor)}
    read: dict[int, float] = {}
    for device in {v.device for v in found.values()}:
        same = {key: v.detach().reshape(()).double() for key, v in found.items() if v.device == device}
        read |= zip(same, torch.stack(list(same.values())).tolist(), strict=True)
    return [read[id(v)] if isinstance(v, torch.Tensor) else float(v) for v in values]


def _flat(moment: torch.Tensor, weight: Weight) -> torch.Tensor:
    """A moment's memory, in the order of its parameter's memory, of what `weight` is of the parameter."""
    whole = local_part(moment)
    return whole.as_strided((whole.numel(),), (1,))[slice(*weight.span)]
