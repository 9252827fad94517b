"""A bucket: parameters that are exchanged in one all-reduce, their global weights, and the rule of one exchange.

Symbols: w the local weights of this rank, z the global weights, t the threshold of the parameter. One exchange is

    d = w - z;   send s = d where |d| >= t, else 0;   w = z where all of d was sent
    a = the average of s over ranks;   z += a;   w += a

so an entry that is sent has w = z afterwards, and for one that is not, w - z is what this rank still has to send. With
outer momentum u the step is a' = outer_lr (a + outer_momentum u) with u = outer_momentum u + a, in place of a. With a
leak below 1, what is not sent shrinks: w = z + leak (w - z). With a look-ahead h below 1, w - z is h times what is
unsent, and a is divided by h when it has arrived (see `look_ahead`).

With `chunk`, there is no threshold: s has the k largest entries of each `chunk` neighbouring entries of a parameter,
exactly, where k is the density times their number, rounded, at least 1.

Where w or z is not finite nothing is sent, and w becomes z.

Weights of 16 bits are kept as float32 (the masters) beside the parameter. After each step what the optimizer changed in
the parameter is added to the master, and the parameter becomes the rounded master.
"""

import zlib
from collections.abc import Callable, Sequence

import torch

from spccl import _ext, prune
from spccl._pruning.sums import Piece

from .settings import Settings

Own = Callable[[Sequence["Weight"]], list["Weight"]]  # the parts of parameters that this rank owns
Scratch = tuple[torch.Tensor, torch.Tensor]  # both at least as long as the bucket, of its wide dtype
_ALIGN = 4  # elements: the GPU's kernels want weights at multiples of 16 bytes


class Weight:
    """One trained parameter.

    Attributes:
        index: its number in the optimizer, counted over all groups.
        span: (first element, end) of what this object is of the parameter's memory: all, or this rank's part where
            hosts prune.
        flat: that memory as [numel], in memory order.
        pruned: False if it is sent whole.
        absorbed: factor on what the optimizer changed in it, with 16 bits (see `look_ahead`).
        state: [prune.STATE_COLUMNS] int64, a `spccl_prune_state`: threshold and counts.
        key: moves what is sampled.
        begin: its first element in flat tensors of the bucket.
    """

    __slots__ = (
        "absorbed", "begin", "flat", "index", "key", "name", "numel", "param", "pointer", "pruned", "span", "state"
    )  # fmt: skip

    def __init__(
        self,
        index: int,
        name: str,
        param: torch.Tensor,
        pruned: bool,
        state: torch.Tensor,
        span: tuple[int, int] | None = None,
    ):
        self.index = index
        self.name = name
        self.param = param
        whole = flat_memory(param, name)
        self.span = (0, whole.numel()) if span is None else span
        self.flat = whole[slice(*self.span)]
        self.numel = self.flat.numel()
        self.pointer = whole.data_ptr()
        self.pruned = pruned
        self.state = state
        self.absorbed = 1.0
        self.key = zlib.crc32(str(index).encode())
        self.begin = 0
        if self.pointer % 16 and self.flat.is_cuda:
            raise ValueError(
                f"SparseSync: parameter {name} begins at address {self.pointer:#x}, wanted a multiple of 16; it is "
                "a view into a larger tensor: give it memory of its own before the optimizer is made"
            )

    def part(self, span: tuple[int, int]) -> "Weight":
        """A part of this parameter, with the same state."""
        part = Weight(self.index, self.name, self.param, self.pruned, self.state, span)
        part.absorbed = self.absorbed
        return part


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself; of a DTensor the part that this rank has."""
    return getattr(tensor, "_local_tensor", tensor)


def own_memory(param: torch.Tensor) -> torch.Tensor:
    """The values of `param` on this rank."""
    return local_part(param).detach()


def own_pointer(param: torch.Tensor) -> int:
    return local_part(param).data_ptr()


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
    """Parameters of one dtype and device. Flat tensors have [length] elements: each parameter's part begins at a
    multiple of 4 elements, and the gaps are 0. With `rows` > 0, pruned parameters come first and begin at multiples of
    `rows`: the first `n_chunked` elements are whole chunks.

    A bucket may have no elements, where this rank owns no part of its parameters.

    ordinal     number of the GPU; -1: host memory

    globals     [length] z, float32 (float64 for float64 parameters)
    masters     [length] w, float32, of 16-bit parameters; None if w is the parameter itself
    velocity    [length] u, with outer momentum; else None
    """

    def __init__(self, members: Sequence[Weight], outer_momentum: float, rows: int = 0, own: "Own | None" = None):
        self.members = list(members)  # the parameters, whole
        weights = self.members if own is None else own(self.members)
        self.weights = sorted(weights, key=lambda w: not w.pruned) if rows else list(weights)
        first = self.members[0].flat
        self.dtype, self.device = first.dtype, first.device
        self.ordinal = -1 if first.device.type == "cpu" else first.device.index
        wide = prune.wide_dtype(self.dtype)
        self.numel = sum(w.numel for w in self.weights)
        self.length = self.n_chunked = 0
        gaps: list[int] = []
        for w in self.weights:
            align = rows if rows and w.pruned else _ALIGN
            w.begin = self.length
            self.length += -(-w.numel // align) * align
            gaps += range(w.begin + w.numel, self.length)
            if rows and w.pruned:
                self.n_chunked = self.length
        self.globals = torch.zeros(self.length, dtype=wide, device=self.device)
        self.masters = torch.zeros_like(self.globals) if self.dtype != wide else None
        self.velocity = torch.zeros_like(self.globals) if outer_momentum > 0 else None
        self._gaps = torch.tensor(gaps, dtype=torch.int64, device=self.device) if gaps else None
        self.params = [w.flat for w in self.weights]
        self.locals = self.params if self.masters is None else self.split(self.masters)
        self.global_parts = self.split(self.globals)
        self._owner: object = None  # of the plan, which is given by address
        self._plan = 0
        self.in_globals = False

    def split(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Views of the parameters' parts of a flat tensor."""
        return [flat[w.begin : w.begin + w.numel] for w in self.weights]

    def pieces(self) -> list[Piece]:
        """The weights, each with its number in the optimizer as name."""
        return [Piece(f"{w.index}", w.begin, w.numel, w.pruned) for w in self.weights]

    def start(self) -> None:
        """Take z from the parameters."""
        torch._foreach_copy_(self.global_parts, self.params)
        if self.masters is not None:
            self.masters.copy_(self.globals)

    def prepare(self) -> None:
        """Make the plan of the exchange: the addresses of the weights are now final."""
        if self.length == 0:
            return
        rows = b"".join(
            prune.SEGMENT.pack(
                w.begin, w.numel, own.data_ptr(), common.data_ptr(), w.state.data_ptr(), w.key, not w.pruned
            )
            for w, own, common in zip(self.weights, self.locals, self.global_parts, strict=True)
            if w.numel
        )
        wide = str(self.globals.dtype).removeprefix("torch.")
        self._owner, self._plan = _ext.weights_plan(rows, self.length, wide, self.ordinal)

    def reset(self) -> None:
        """w = z on this rank: what is not sent is dropped."""
        torch._foreach_copy_(self.locals, self.global_parts)
        self.publish()

    # -- one exchange ------------------------------------------------------------------------------

    def absorb(self, scratch: Scratch) -> None:
        """16-bit parameters: add to the masters what the optimizer changed."""
        if self.masters is None:
            return
        rounded = scratch[0].view(self.dtype)[: self.length]
        rounded.copy_(self.masters)
        if all(w.absorbed == 1 for w in self.weights):
            self.masters.sub_(rounded)  # what rounding cut off: exact
            torch._foreach_add_(self.locals, self.params)
            return
        changes = self.split(scratch[1])
        torch._foreach_copy_(changes, self.params)
        torch._foreach_sub_(changes, self.split(rounded))
        torch._foreach_mul_(changes, [w.absorbed for w in self.weights])
        torch._foreach_add_(self.locals, changes)

    def publish(self) -> None:
        """16-bit parameters: round the masters into them."""
        if self.masters is not None:
            torch._foreach_copy_(self.params, self.locals)

    def select(self, out: torch.Tensor, density: float, scale: float, settings: Settings, levels: int = 0) -> None:
        """Write what is sent now, times `scale`, to `out` [length], zeros elsewhere, and keep the rest in w.

        With 2 levels each chunk sends two magnitudes.
        """
        if self.length == 0:
            return
        if self._gaps is not None:
            out.index_fill_(0, self._gaps, 0.0)
        _ext.weights_send(
            self._plan, out.data_ptr(), density, settings.sample, settings.leak, scale, settings.seed, settings.chunk,
            levels, self.stream(),
        )  # fmt: skip

    def send_signs(self, rows: torch.Tensor, leak: float) -> None:
        """Write one bit of each change to `rows`, and keep the rest in w (`spccl.optim.signs`)."""
        _ext.weights_send_signs(self._plan, rows.data_ptr(), leak, self.stream())

    def round_off(self, out: torch.Tensor, packed: torch.Tensor, scale: float) -> None:
        """Write `out` [length] to `packed`, in the dtype of that, and keep in w what rounding changed.

        `out` is what `select` wrote, with the same `scale`; it is overwritten.
        """
        packed.copy_(out)
        out.sub_(packed)
        torch._foreach_add_(self.locals, self.split(out), alpha=1.0 / scale)

    def apply(self, average: torch.Tensor, settings: Settings) -> None:
        """Advance z and w by the average [length] that has arrived, which is overwritten."""
        if self.length == 0:
            return
        if settings.look_ahead != 1:
            average.mul_(1 / settings.look_ahead)
        if self.velocity is not None:
            self.velocity.mul_(settings.outer_momentum).add_(average)
            average.add_(self.velocity, alpha=settings.outer_momentum)
        if settings.outer_lr != 1:
            average.mul_(settings.outer_lr)
        _ext.weights_receive(self._plan, average.data_ptr(), self.stream())

    def stream(self) -> int:
        """The address of the current CUDA stream; 0 on the host."""
        return torch.cuda.current_stream(self.device).cuda_stream if self.device.type == "cuda" else 0

    # -- global and local weights ------------------------------------------------------------------

    def swap(self, scratch: Scratch) -> None:
        """Exchange z and w, so that the parameters hold the other one. Called twice it does nothing."""
        self.in_globals = not self.in_globals
        if self.masters is not None:
            torch._foreach_copy_(self.params, self.global_parts if self.in_globals else self.locals)
            return
        kept = self.split(scratch[0])
        torch._foreach_copy_(kept, self.params)
        torch._foreach_copy_(self.params, self.global_parts)
        torch._foreach_copy_(self.global_parts, kept)

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


def make_buckets(
    weights: Sequence[Weight], most_bytes: int, outer_momentum: float, rows: int = 0, apart: bool = False,
    own: Own | None = None,
) -> list[Bucket]:
    """Buckets in the order of the parameters. A bucket has at most `most_bytes` of float32, and at most an eighth of
    all weights or 4 MiB, whichever is more; or one parameter.

    Args:
        rows: see `Bucket`.
        apart: parameters that are sent whole have buckets of their own.
    """
    most_bytes = min(most_bytes, max(4 << 20, 4 * sum(w.numel for w in weights) // 8))
    by_kind: dict[tuple[torch.dtype, torch.device, bool], list[list[Weight]]] = {}
    for w in weights:
        lists = by_kind.setdefault((w.flat.dtype, w.flat.device, apart and w.pruned), [[]])
        if lists[-1] and 4 * (sum(x.numel for x in lists[-1]) + w.numel) > most_bytes:
            lists.append([])
        lists[-1].append(w)
    return [Bucket(some, outer_momentum, rows, own) for lists in by_kind.values() for some in lists]
