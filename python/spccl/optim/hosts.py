"""What the ranks of a host do together where hosts prune: average gradients, decide on a step, gather the weights.

All ranks of a host have the same local weights and step them with the same gradient, the average over the host in
float32. Each rank owns a part of every parameter: of that part it keeps the global weights, prunes the change, and
exchanges it with the ranks of its place on the other hosts. Then the ranks of the host gather the parts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from spccl import backend
from spccl._pruning import hosts
from spccl._pruning.ranks import Ranks, all_gather

from .bucket import Bucket, Weight, local_part, own_memory

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from .sync import SparseSync

_NONE, _DENSE, _SPARSE = range(3)  # what a parameter has as gradient
_CALLS = ("step()", "global_weights()", "the end of global_weights()", "consolidate()")


class Host:
    """The ranks of this rank's host. Every method is a collective of them."""

    def __init__(self, ranks: Ranks):
        assert ranks.hosts.inner is not None
        self.group = ranks.hosts.inner
        self.n, self.place = ranks.hosts.per_host, ranks.hosts.place
        self._buckets: list[Bucket] = []

    def own(self, weights: Sequence[Weight]) -> list[Weight]:
        """This rank's part of each parameter, which may be empty."""
        return [w.part(hosts.part(w.numel, self.n, self.place)) for w in weights]

    def use(self, buckets: list[Bucket]) -> None:
        """Make the buffers: two for each device and dtype, as long as the longest bucket of all parts."""
        self._buckets = buckets
        most: dict[tuple[torch.device, torch.dtype], int] = {}
        for b in buckets:
            kind = (b.device, b.globals.dtype)
            most[kind] = max(most.get(kind, 0), self.n * self._longest(b))
        self._buffers = {
            (device, dtype): tuple(torch.empty(n, dtype=dtype, device=device) for _ in range(2))
            for (device, dtype), n in most.items()
        }
        self._copies = [self._copies_of(b, [w.flat for w in b.weights], [w.flat for w in b.members]) for b in buckets]
        on_host = any(d.type == "cpu" for d in self.group._device_types)
        self._flags_device = torch.device("cpu") if on_host else buckets[0].device
        self._averages = {b.device: backend.name_for(self.group, b.device) in backend.AVERAGING for b in buckets}

    # -- gradients ---------------------------------------------------------------------------------

    def average(self, found_inf: float, scale: float, loss_scale: float) -> tuple[bool, float, float]:
        """Average the gradients of the host's ranks, in float32 (float64 of float64), in place.

        A gradient that some ranks do not have counts as 0. One that none has stays None.

        Args: found_inf: not 0: this rank's gradients are not finite. scale: what they contain. loss_scale: of the
            scaler.
        Returns: the same of the host: whether one rank found inf, and nothing was averaged; the smallest scales.
        """
        kinds = [_kind(w.param.grad) for b in self._buckets for w in b.members]
        found, least, least_loss, *kinds = self.agree("step()", float(found_inf != 0), -scale, -loss_scale, *kinds)
        if found == 0:
            self._average([int(k) for k in kinds], -least / scale)
        return found != 0, -least, -least_loss

    def agree(self, call: str, *flags: float) -> list[float]:
        """The largest of each flag over the ranks of the host.

        Raises: RuntimeError, on all of them, if they do not all make the same `call` of the SparseSync.
        """
        number, room = _CALLS.index(call), 3 + sum(len(b.members) for b in self._buckets)
        given = [number, -number, *flags, *[0.0] * (room - len(flags))]
        both = torch.tensor(given, dtype=torch.float32, device=self._flags_device)
        dist.all_reduce(both, op=dist.ReduceOp.MAX, group=self.group)
        last, first, *most = both.tolist()
        if last != -first:
            raise RuntimeError(
                f"SparseSync: this rank is at {call}, and the ranks of its host are at {_CALLS[int(-first)]} and "
                f"{_CALLS[int(last)]}; where hosts prune each rank has a part of the global weights, so all ranks of "
                "a host make these calls together: enter `with opt.global_weights()` on all of them, and save on one"
            )
        return most

    def average_for(self, sync: SparseSync) -> None:
        """Give all ranks of the host one gradient, one loss scale, and one answer to whether there is inf or nan."""
        found_inf, scale = getattr(sync, "found_inf", None), getattr(sync, "grad_scale", None)  # of GradScaler
        scaler = sync._scaler() if found_inf is not None and sync._scaler is not None else None
        loss_scale = 1.0 if scaler is None else scaler.get_scale()
        found, least, least_loss = self.average(
            0.0 if found_inf is None else float(found_inf), 1.0 if scale is None else float(scale), loss_scale
        )
        if scale is not None:
            sync.grad_scale = torch.full_like(scale, least)
        if found_inf is not None and found:
            sync.found_inf = torch.ones_like(found_inf) if isinstance(found_inf, torch.Tensor) else 1.0
        if scaler is not None:
            if least_loss != loss_scale:
                scaler._scale.fill_(least_loss)
            for flag in scaler._per_optimizer_states[id(sync)]["found_inf_per_device"].values() if found else ():
                flag.fill_(1.0)

    def _average(self, kinds: list[int], factor: float) -> None:
        under_way: list[tuple[object, torch.Tensor, list]] = []
        for i, b in enumerate(self._buckets):
            of_bucket, kinds = kinds[: len(b.members)], kinds[len(b.members) :]
            rows = [(w, kind) for w, kind in zip(b.members, of_bucket, strict=True) if kind != _NONE]
            if not rows:
                continue
            buffer = self._buffers[b.device, b.globals.dtype][i % 2][: sum(w.numel for w, _ in rows)]
            parts = [
                p.view(own_memory(w.param).shape)
                for p, (w, _) in zip(buffer.split([w.numel for w, _ in rows]), rows, strict=True)
            ]
            _copy(parts, [_dense(w.param) for w, _ in rows])
            if factor != 1:
                buffer.mul_(factor)
            op = dist.ReduceOp.AVG if self._averages[b.device] else dist.ReduceOp.SUM
            work = dist.all_reduce(buffer, op=op, group=self.group, async_op=True)
            under_way.append((work, buffer, list(zip(rows, parts, strict=True))))
            if len(under_way) == 2:
                self._write_back(*under_way.pop(0))
        for one in under_way:
            self._write_back(*one)

    def _write_back(self, work: dist.Work | None, buffer: torch.Tensor, rows: list) -> None:
        if work is not None:
            work.wait()
        if not self._averages[buffer.device]:
            buffer.div_(self.n)
        into, parts = [], []
        for (w, kind), part in rows:
            if kind == _SPARSE:
                dim = w.param.grad.sparse_dim() if w.param.grad is not None and w.param.grad.is_sparse else 1
                w.param.grad = part.to(w.param.dtype).to_sparse(dim)
                continue
            if w.param.grad is None:
                w.param.grad = torch.zeros_like(w.param)
            into.append(local_part(w.param.grad))
            parts.append(part)
        if into:
            torch._foreach_copy_(into, parts)

    # -- weights -----------------------------------------------------------------------------------

    def gather(self, numbers: int | None = None) -> None:
        """Give each rank the parameters of the parts that others own, of one bucket, or of all."""
        for i in range(len(self._buckets)) if numbers is None else [numbers]:
            self._gather(*self._copies[i])

    def gather_changes(self, corrected: bool) -> None:
        """After a step without an exchange: what the owner of a part alone has changed, by a `corrected` second moment
        or by rounding masters."""
        if corrected or any(b.masters is not None for b in self._buckets):
            self.gather()

    def gather_whole(self) -> dict[int, tuple[torch.Tensor, torch.Tensor | None]]:
        """(Global weights, velocity or None) of each parameter, whole, flat, by its number in the optimizer."""
        whole: dict[int, tuple[torch.Tensor, torch.Tensor | None]] = {}
        for b in self._buckets:
            kinds = [b.globals] if b.velocity is None else [b.globals, b.velocity]
            found = [[x.new_empty(w.numel) for w in b.members] for x in kinds]
            for x, flats in zip(kinds, found, strict=True):
                own = b.split(x)
                self._gather(*self._copies_of(b, own, flats))
                by_index = dict(zip((w.index for w in b.members), flats, strict=True))
                for w, part in zip(b.weights, own, strict=True):
                    by_index[w.index][slice(*w.span)] = part
            for place, w in enumerate(b.members):
                whole[w.index] = found[0][place], found[1][place] if len(found) > 1 else None
        return whole

    def _longest(self, b: Bucket) -> int:
        """Most elements that a rank owns of a bucket."""
        return max(
            sum(end - first for first, end in (hosts.part(w.numel, self.n, p) for w in b.members))
            for p in range(self.n)
        )

    def _copies_of(self, b: Bucket, own: list[torch.Tensor], whole: list[torch.Tensor]) -> tuple:
        """What `_gather` takes: buffers, and views of them beside what they are copied from and to."""
        longest, dtype = self._longest(b), own[0].dtype
        received, mine = (x.view(dtype) for x in self._buffers[b.device, b.globals.dtype])
        received, mine = received[: self.n * longest], mine[:longest]
        into: list[torch.Tensor] = []
        come: list[torch.Tensor] = []
        for place in range(self.n):
            at = place * longest
            for w, x in zip(b.members, whole, strict=True):
                first, end = hosts.part(w.numel, self.n, place)
                if place != self.place and end > first:
                    into.append(x[first:end])
                    come.append(received[at : at + end - first])
                at += end - first
        by_index = {w.index: x for w, x in zip(b.weights, own, strict=True)}
        sent = [by_index[w.index] for w in b.members if by_index[w.index].numel()]
        slots = list(mine[: sum(x.numel() for x in sent)].split([x.numel() for x in sent])) if sent else []
        return received, mine, sent, slots, into, come

    def _gather(self, received, mine, sent, slots, into, come) -> None:
        if sent:
            torch._foreach_copy_(slots, sent)
        all_gather(self.group, mine, received).wait()
        if into:
            torch._foreach_copy_(into, come)

    def require_fine(self, fault: Exception | None) -> None:
        """Raises: `fault`; on the host's other ranks a ValueError with its text, so that none waits for that rank."""
        everyone: list[str | None] = [None] * self.n
        dist.all_gather_object(everyone, None if fault is None else str(fault), group=self.group)
        if fault is not None:
            raise fault
        theirs = next((text for text in everyone if text is not None), None)
        if theirs is not None:
            raise ValueError(f"{theirs} (raised on another rank of this host too)")


def _kind(grad: torch.Tensor | None) -> int:
    return _NONE if grad is None else _SPARSE if local_part(grad).is_sparse else _DENSE


def _dense(param: torch.Tensor) -> torch.Tensor | None:
    """This rank's gradient of its part of `param`; None for 0."""
    if param.grad is None:
        return None
    grad = local_part(param.grad)
    return grad.to_dense() if grad.is_sparse else grad


def _copy(into: Iterable[torch.Tensor], grads: Iterable[torch.Tensor | None]) -> None:
    pairs = [(x, g) for x, g in zip(into, grads, strict=True)]
    there = [(x, g) for x, g in pairs if g is not None]
    for x, g in pairs:
        if g is None:
            x.zero_()
    if there:
        torch._foreach_copy_([x for x, _ in there], [g for _, g in there])
