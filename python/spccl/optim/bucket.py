"""A bucket: parameters that are exchanged in one all-reduce, their global weights, and the rule of one exchange.

Symbols: w the local weights of this rank, z the global weights, t the threshold of the parameter. One exchange is

    d = w - z;   send s = d where |d| >= t, else 0;   w = z where all of d was sent
    a = the average of s over ranks;   z += a;   w += a

so an entry that is sent has w = z afterwards, and for one that is not, w - z is what this rank still has to send. With
outer momentum u the step is a' = outer_lr (a + outer_momentum u) with u = outer_momentum u + a, in place of a. With a
decay below 1, what is not sent shrinks: w = z + decay (w - z).

Where w or z is not finite nothing is sent, and w becomes z.

Weights of 16 bits are kept as float32 (the masters) beside the parameter. What the optimizer changed in the parameter
is added to the master, and after the exchange the parameter is the rounded master.
"""

from collections.abc import Sequence

import torch

from spccl import prune


class Weight:
    """One trained parameter.

    Attributes:
        index: its number in the optimizer, counted over all groups.
        flat: its memory as [numel], in memory order.
        slot: threshold and counts of the prune kernels.
        begin: its first element in the bucket.
    """

    __slots__ = ("begin", "flat", "index", "name", "numel", "param", "pointer", "slot")

    def __init__(self, index: int, name: str, param: torch.Tensor, pruned: bool, state: torch.Tensor):
        self.index = index
        self.name = name
        self.param = param
        self.flat = flat_memory(param, name)
        self.numel = self.flat.numel()
        self.pointer = self.flat.data_ptr()
        self.slot = prune.Slot(name, self.numel, pruned, state)
        self.begin = 0


def own_memory(param: torch.Tensor) -> torch.Tensor:
    """The values of `param` on this rank: of a DTensor its local part."""
    local = getattr(param, "_local_tensor", param)
    return local.detach()


def flat_memory(param: torch.Tensor, name: str) -> torch.Tensor:
    """The memory of `param` as [numel]. Raises: ValueError if it has gaps or overlaps."""
    data = own_memory(param)
    expected = 1
    for size, stride in sorted(zip(data.shape, data.stride(), strict=True), key=lambda pair: pair[1]):
        if size > 1 and stride != expected:
            raise ValueError(
                f"SparseSync: parameter {name} has shape {tuple(data.shape)} and strides {data.stride()}, wanted "
                "memory without gaps or overlaps; make it contiguous before the optimizer is made"
            )
        expected *= size
    return data.as_strided((data.numel(),), (1,))


class Bucket:
    """Parameters of one dtype and device.

    globals     [numel] z, float32 (float64 for float64 parameters)
    masters     [numel] w, float32, of 16-bit parameters; None if w is the parameter itself
    velocity    [numel] u, with outer momentum; else None
    """

    def __init__(self, weights: Sequence[Weight], outer_momentum: float):
        self.weights = list(weights)
        first = self.weights[0].flat
        self.dtype, self.device = first.dtype, first.device
        wide = torch.float64 if self.dtype == torch.float64 else torch.float32
        self.numel = sum(w.numel for w in self.weights)
        begin = 0
        for w in self.weights:
            w.begin = begin
            begin += w.numel
        self.globals = torch.empty(self.numel, dtype=wide, device=self.device)
        self.masters = torch.empty_like(self.globals) if self.dtype != wide else None
        self.velocity = torch.zeros_like(self.globals) if outer_momentum > 0 else None
        self.params = [w.flat for w in self.weights]
        self.locals = self.params if self.masters is None else self.split(self.masters)
        self.global_parts = self.split(self.globals)
        self.plan: prune.Plan | None = None
        self.n_nonfinite = torch.zeros(1, dtype=torch.int64, device=self.device)
        self.in_globals = False

    def split(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Views of the parameters' parts of a flat tensor [numel]."""
        return list(flat.split([w.numel for w in self.weights]))

    def start(self) -> None:
        """Take z from the parameters."""
        torch._foreach_copy_(self.global_parts, self.params)
        if self.masters is not None:
            self.masters.copy_(self.globals)

    def prepare(self) -> None:
        """Make the prune plan: the addresses of the parameters are now final."""
        for w in self.weights:
            w.slot.prepare(self.globals.dtype, residual=False, velocity=False)
        segments = [(w.begin, w.slot) for w in self.weights]
        self.plan = prune.Plan(segments, self.numel, self.globals.dtype, self.device)

    def reset(self) -> None:
        """w = z on this rank: what is not sent is dropped."""
        torch._foreach_copy_(self.locals, self.global_parts)
        self.publish()

    # -- one exchange ------------------------------------------------------------------------------

    def absorb(self, scratch: torch.Tensor) -> None:
        """16-bit parameters: add to the masters what the optimizer changed."""
        if self.masters is None:
            return
        rounded = scratch.view(self.dtype)[: self.numel]
        change = torch.empty_like(self.masters)
        rounded.copy_(self.masters)
        torch._foreach_copy_(self.split(change), self.params)
        self.masters.add_(change.sub_(rounded))

    def publish(self) -> None:
        """16-bit parameters: round the masters into them."""
        if self.masters is not None:
            torch._foreach_copy_(self.params, self.locals)

    def select(self, out: torch.Tensor, rule: prune.Rule, decay: float) -> None:
        """Write what is sent now to `out` [numel], zeros elsewhere, and set w = z where it is sent."""
        parts = self.split(out)
        torch._foreach_copy_(parts, self.locals)
        out.sub_(self.globals)
        bad = ~torch.isfinite(out)
        out.masked_fill_(bad, 0.0)
        self.n_nonfinite += bad.sum()
        self.plan.run(out, rule)
        bad.logical_or_(out != 0)
        for local, common, taken in zip(self.locals, self.global_parts, self.split(bad), strict=True):
            if decay < 1:
                local.sub_(common).mul_(decay).add_(common)
            torch.where(taken, common, local, out=local)

    def apply(self, average: torch.Tensor, outer_lr: float, outer_momentum: float) -> None:
        """Advance z and w by the average [numel] that has arrived, which is overwritten."""
        if self.velocity is not None:
            self.velocity.mul_(outer_momentum).add_(average)
            average.add_(self.velocity, alpha=outer_momentum)
        if outer_lr != 1:
            average.mul_(outer_lr)
        self.globals.add_(average)
        torch._foreach_add_(self.locals, self.split(average))

    # -- global and local weights ------------------------------------------------------------------

    def swap(self, scratch: torch.Tensor) -> None:
        """Exchange z and w, so that the parameters hold the other one. Called twice it does nothing."""
        self.in_globals = not self.in_globals
        if self.masters is not None:
            torch._foreach_copy_(self.params, self.global_parts if self.in_globals else self.locals)
            return
        kept = scratch[: self.numel]
        torch._foreach_copy_(self.split(kept), self.params)
        torch._foreach_copy_(self.params, self.global_parts)
        self.globals.copy_(kept)

    def values(self, place: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies of z and w of the parameter at `place`, flat, also while the two are swapped."""
        common, own = self.global_parts[place], self.locals[place]
        if self.in_globals and self.masters is None:
            common, own = own, common
        return common.clone(), own.clone()

    def checksum(self) -> torch.Tensor:
        """[1] int64 of the bits of z; a changed bit or two swapped entries change it."""
        bits = self.globals.view(torch.int32)
        whole = bits.numel() // _COLUMNS * _COLUMNS
        weights = torch.arange(1, 2 * _COLUMNS, 2, dtype=torch.int64, device=self.device)
        columns = bits[:whole].view(-1, _COLUMNS).sum(dim=0, dtype=torch.int64)
        columns[: bits.numel() - whole] += bits[whole:]
        return (columns * weights).sum().view(1)


_COLUMNS = 4093  # a prime: no row of a matrix is a multiple of it


def make_buckets(weights: Sequence[Weight], most_bytes: int, outer_momentum: float) -> list[Bucket]:
    """Buckets of at most `most_bytes` of float32 (or one parameter), in the order of the parameters."""
    by_kind: dict[tuple[torch.dtype, torch.device], list[list[Weight]]] = {}
    for w in weights:
        lists = by_kind.setdefault((w.flat.dtype, w.flat.device), [[]])
        if lists[-1] and 4 * (sum(x.numel for x in lists[-1]) + w.numel) > most_bytes:
            lists.append([])
        lists[-1].append(w)
    return [Bucket(some, outer_momentum) for lists in by_kind.values() for some in lists]
