"""Where a receiver puts each tensor of a checkpoint, recorded from its own load_weights.

    plan = record(model.load_weights, [(name, dtype, shape), ...])
    prove(plan, checkpoint, model.named_parameters())      # after the receiver has loaded that checkpoint
    pull = spccl.sync.Subscriber(folder, places=plan)

`record` notes each `copy_` from a source to memory that was there before, and does not execute it. Sources work only in
the thread that called `record`: load_weights that copies them in other threads is refused.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from spccl.errors import MismatchError

from .delta import Place

MOST_BOXES = 65536  # of one copy_: a copy of more is refused
_READS = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default)  # their results are no tensors


class _Refused(Exception):
    """A copy that is no list of boxes. The text says why."""


class _Source(torch.Tensor):
    """A source, or what was made from it: its memory is unset. Only a recorder reads it."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # results are of the class that the recorder gives them
    recorder: _Recorder
    plain: torch.Tensor

    @classmethod
    def of(cls, x: torch.Tensor, recorder: _Recorder) -> _Source:
        made = torch.Tensor._make_subclass(cls, x)
        made.recorder, made.plain = recorder, x
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """A call that the recorder did not see: of another thread, or after `record`."""
        source = next(x for x in tree_leaves((args, kwargs)) if isinstance(x, _Source))
        names = source.recorder.names_of(source.plain)
        source.recorder.unseen = MismatchError(
            f"record: tensor {names}: load_weights uses it in another thread ({func}), where no copy is recorded; that "
            "thread may have written other memory: load all weights again before they serve"
        )
        raise source.recorder.unseen


@dataclasses.dataclass(frozen=True)
class Plan(Mapping[str, list[Place]]):
    """Places of each tensor of a checkpoint, for `Subscriber(places=)`. An empty list: not on this rank.

    Attributes:
        places: of each name.
        dense: names that no place describes, and why. They are not keys of this mapping, so a `Subscriber` refuses
            them by name: only load_weights loads them.
        fixed: memory that load_weights fills otherwise: with constants, such as padding, or from a `dense` tensor.
    """

    places: dict[str, list[Place]]
    dense: dict[str, str]
    fixed: list[torch.Tensor]

    def __getitem__(self, name: str) -> list[Place]:
        return self.places[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.places)

    def __len__(self) -> int:
        return len(self.places)


def record(
    load_weights: Callable[[Iterator[tuple[str, torch.Tensor]]], object],
    tensors: Iterable[tuple[str, torch.dtype, Sequence[int]]],
) -> Plan:
    """Call `load_weights` with a tensor of unset memory for each of `tensors`, and note where it copies them.

    The calling thread writes nothing to memory that was there before. Memory of a source is never touched, unless
    load_weights computes with it.
    Args:
        load_weights: takes an iterator of (name, CPU tensor), as vLLM's models do.
        tensors: name, dtype and shape of each tensor of the checkpoint.
    Raises: MismatchError where load_weights uses a source in another thread: the receiver must not serve before all
        weights were loaded again. And where it gives a parameter other memory (`.data =`): the parameter has its own
        again, if load_weights is a method of the module.
    """
    recorder = _Recorder()
    owner = getattr(load_weights, "__self__", None)
    memory = _Memory(owner if isinstance(owner, torch.nn.Module) else torch.nn.Module())
    try:
        with torch.no_grad(), recorder, _Assignments(recorder, memory):
            load_weights(recorder.sources(tensors))
    finally:
        moved = memory.restore()
    if moved:
        raise MismatchError(f"record: parameter {moved[0]!r}: load_weights gives it other memory")
    if recorder.unseen is not None:
        raise recorder.unseen
    recorder.name_derived()
    places = {name: found for name, found in recorder.places.items() if name not in recorder.dense}
    fixed = recorder.fixed + [place.dst for name in recorder.dense for place in recorder.places[name]]
    return Plan(places, recorder.dense, fixed)


class _Memory:
    """Which memory the parameters and buffers of a module have."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._all: list[tuple[str, dict[str, Any], str, torch.Tensor, torch.Tensor]] = []
        for prefix, part in module.named_modules():
            both: list[dict[str, Any]] = [part._parameters, part._buffers]
            for tensors in both:
                for key, x in tensors.items():
                    if x is not None:
                        self._all.append((f"{prefix}.{key}" if prefix else key, tensors, key, x, x.data))

    def name_of(self, x: torch.Tensor) -> str:
        return next((repr(name) for name, _, _, y, _ in self._all if x is y), f"of shape {list(x.shape)}")

    def restore(self) -> list[str]:
        """Give each its memory again. Returns the names of those that had other memory."""
        moved = []
        for name, tensors, key, x, data in self._all:
            now = tensors.get(key)
            if now is None or not _is_same_memory(now, data):
                moved.append(name)
                tensors[key] = x
            if not _is_same_memory(x, data):
                x.data = data
        return moved


class _Assignments(TorchFunctionMode):
    """Refuses `x.data = y` for memory that was there before. Dispatch does not see it."""

    def __init__(self, recorder: _Recorder, memory: _Memory) -> None:
        super().__init__()
        self._recorder, self._memory = recorder, memory

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_assignment = func == torch.Tensor.data.__set__  # type: ignore[attr-defined]
        if is_assignment and self._recorder.is_live(args[0]) and not _is_same_memory(*args):
            name = self._memory.name_of(args[0])
            raise MismatchError(f"record: parameter {name}: load_weights gives it other memory, with `.data =`")
        return func(*args, **(kwargs or {}))


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.places: dict[str, list[Place]] = {}
        self.dense: dict[str, str] = {}
        self.fixed: list[torch.Tensor] = []
        self.unseen: MismatchError | None = None
        self._sources: dict[int, tuple[str, torch.Tensor]] = {}  # by storage; the tensor keeps its storage alive
        self._made: dict[int, torch.UntypedStorage] = {}  # meanwhile, so not of the receiver; kept, so no number recurs
        self._from: dict[int, list[torch.Tensor]] = {}  # by storage of those: memory of the receiver they come from
        self._derived: list[tuple[torch.Tensor, Any]] = []  # memory of the receiver that others come from, and how

    def sources(self, tensors: Iterable[tuple[str, torch.dtype, Sequence[int]]]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, dtype, shape in tensors:
            if name in self.places:
                raise MismatchError(f"record: two tensors are named {name!r}")
            x = torch.empty(tuple(shape), dtype=dtype, device="cpu")
            self._sources[_storage(x)] = name, x
            self.places[name] = []
            yield name, _Source.of(x, self)

    def names_of(self, x: torch.Tensor) -> str:
        """For a message: the name of a source, or those that had come when x was made from some."""
        found = self._sources.get(_storage(x))
        return repr(found[0]) if found else f"made from one of {', '.join(map(repr, list(self.places)[-3:]))}"

    def is_live(self, x: torch.Tensor) -> bool:
        return _storage(x) not in self._sources and _storage(x) not in self._made

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given_args, given_kwargs = args, kwargs or {}
        args, kwargs = tree_map_only(_Source, lambda x: x.plain, (given_args, given_kwargs))
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        read = [self._sources[s] for s in {_storage(x) for x in given} if s in self._sources]
        written = self._written(func, args, kwargs)
        live = [x for x in written if self.is_live(x)]
        origins = self._origins(func, given, live)
        if live or func in _READS:
            self._derived += [(x, func) for x in origins]
        if live:
            self._write(func, args, live, [name for name, _ in read])
            return _result(func, written)
        out = func(*args, **kwargs)
        before = {_storage(x) for x in given}
        new = [x for x in tree_leaves(out) if isinstance(x, torch.Tensor) and _storage(x) not in before]
        for x in new:
            self._made[_storage(x)] = x.untyped_storage()
        if origins:
            for x in (*new, *written):
                self._from[_storage(x)] = origins
        is_view = not written and not new and any(isinstance(x, torch.Tensor) for x in tree_leaves(out))
        for name, _ in read if not is_view else ():
            self.dense.setdefault(name, f"load_weights computes with it: {func}")
        if written and not new:
            return _result(func, self._written(func, given_args, given_kwargs)) if func._schema.returns else out
        if not any(isinstance(x, _Source) for x in tree_leaves((given_args, given_kwargs))):
            return out
        return tree_map_only(torch.Tensor, lambda x: _Source.of(x, self), out)

    def _origins(self, func: Any, given: list[torch.Tensor], live: list[torch.Tensor]) -> list[torch.Tensor]:
        """Memory of the receiver whose values the call reads, itself or by what was made of them."""
        if func._schema.name.endswith("_like") or "::new_" in func._schema.name:
            return []
        found: dict[tuple[int, int, int], torch.Tensor] = {}
        for x in given:
            if not any(x is y for y in live):
                for y in [x] if self.is_live(x) else self._from.get(_storage(x), []):
                    found[_storage(y), *_span(y)] = y
        return list(found.values())

    def name_derived(self) -> None:
        """Tensors whose places others were made from are dense: a write of the places would not reach the others."""
        for x, func in self._derived:
            for name, places in self.places.items():
                if any(_meet(x, place.dst) for place in places):
                    self.dense.setdefault(name, f"load_weights makes others from it, where it lies: {func}")

    @staticmethod
    def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
        found = []
        for i, arg in enumerate(func._schema.arguments):
            if arg.alias_info is not None and arg.alias_info.is_write:
                value = args[i] if i < len(args) else kwargs.get(arg.name)
                found += [x for x in tree_leaves(value) if isinstance(x, torch.Tensor)]
        return found

    def _write(self, func: Any, args: Sequence[Any], live: list[torch.Tensor], names: list[str]) -> None:
        """The call would write memory of the receiver. Note what it would write."""
        if func is torch.ops.aten.copy_.default and len(names) == 1 and _storage(args[1]) in self._sources:
            name, source = self._sources[_storage(args[1])]
            try:
                self.places[name] += list(_boxes(args[0], args[1], source))
            except _Refused as why:
                self.dense.setdefault(name, str(why))
                self.fixed.append(args[0])
            return
        for name in names:
            self.dense.setdefault(name, f"load_weights computes with it: {func}")
        for x in live:
            for name, places in self.places.items():
                if any(_meet(x, place.dst) for place in places):
                    self.dense.setdefault(name, f"load_weights changes it where it lies: {func}")
            self.fixed.append(x)


def _result(func: Any, written: list[torch.Tensor]) -> Any:
    n = len(func._schema.returns)
    return None if n == 0 else written[0] if n == 1 else tuple(written[:n])


def _storage(x: torch.Tensor) -> int:
    return x.untyped_storage()._cdata


def _is_same_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (a.data_ptr(), a.dtype, a.shape, a.stride()) == (b.data_ptr(), b.dtype, b.shape, b.stride())


def _span(x: torch.Tensor) -> tuple[int, int]:
    """Addresses from the first byte of a tensor to behind its last one."""
    last = sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))
    return x.data_ptr(), x.data_ptr() + ((last + 1) * x.itemsize if x.numel() else 0)


def _meet(a: torch.Tensor, b: torch.Tensor) -> bool:
    (a0, a1), (b0, b1) = _span(a), _span(b)
    return a0 < b1 and b0 < a1


def _boxes(dst: torch.Tensor, src: torch.Tensor, source: torch.Tensor) -> Iterator[Place]:
    """The boxes of one copy_. Raises: _Refused."""
    if dst.dtype != source.dtype or src.dtype != source.dtype or src.is_conj() or src.is_neg():
        raise _Refused(f"load_weights casts it: {source.dtype} to {dst.dtype}")
    if src.numel() != dst.numel():
        raise _Refused(f"load_weights spreads it: {list(src.shape)} to {list(dst.shape)}")
    if not src.numel():
        return
    dims = _merged(dst, src)
    if any(s == 0 or d == 0 for _, s, d in dims):
        raise _Refused("load_weights copies an element to several places, or several to one")
    if any(a[1] < b[1] or a[2] < b[2] for a, b in itertools.pairwise(dims)):
        raise _Refused("load_weights permutes it")
    if not dims or dims[-1][1:] != (1, 1):
        dims.append((1, 1, 1))
    rows = dims[-2] if len(dims) > 1 else (1, source.numel(), dims[-1][0])
    n_cols, outer = dims[-1][0], dims[:-2]
    if math.prod(n for n, _, _ in outer) > MOST_BOXES:
        raise _Refused("load_weights permutes it")
    n_rows, row_elems, dst_row_elems = rows
    for at in itertools.product(*(range(n) for n, _, _ in outer)):
        first = src.storage_offset() + sum(i * s for i, (_, s, _) in zip(at, outer, strict=True))
        dst_first = dst.storage_offset() + sum(i * d for i, (_, _, d) in zip(at, outer, strict=True))
        row, col = divmod(first, row_elems)
        if source.numel() % row_elems or col + n_cols > row_elems or n_cols > dst_row_elems:
            raise _Refused("load_weights permutes it")
        memory = dst.detach().as_strided((n_rows, n_cols), (dst_row_elems, 1), dst_first)
        yield Place(memory, row_elems, row, n_rows, col, n_cols, dst_row_elems)


def _merged(dst: torch.Tensor, src: torch.Tensor) -> list[tuple[int, int, int]]:
    """(size, stride of src, stride of dst) of each dimension, those in one merged that lie in one in both."""
    shape = [n for n in src.shape if n != 1]
    if shape != [n for n in dst.shape if n != 1]:
        raise _Refused(f"load_weights spreads it: {list(src.shape)} to {list(dst.shape)}")
    src_strides = [s for n, s in zip(src.shape, src.stride(), strict=True) if n != 1]
    dst_strides = [s for n, s in zip(dst.shape, dst.stride(), strict=True) if n != 1]
    dims: list[tuple[int, int, int]] = []
    for n, s, d in zip(shape, src_strides, dst_strides, strict=True):
        if dims and dims[-1][1:] == (n * s, n * d):
            dims[-1] = dims[-1][0] * n, s, d
        else:
            dims.append((n, s, d))
    return dims


def prove(
    plan: Plan,
    checkpoint: Iterable[tuple[str, torch.Tensor]],
    parameters: Iterable[tuple[str, torch.Tensor]],
) -> None:
    """Compare what lies at the places with the checkpoint that the receiver has loaded, bit for bit.

    Args:
        checkpoint: (name, CPU tensor), one after the other.
        parameters: of the receiver: each element of them must have a place, or be of a dense tensor's or `fixed`.
    Raises: MismatchError that names the tensor or the parameter.
    """
    missing = set(plan) | set(plan.dense)
    for name, x in checkpoint:
        if name not in missing:
            raise MismatchError(f"prove: tensor {name!r}: the plan does not have it")
        missing.discard(name)
        for place in plan.places.get(name, ()):
            if x.dtype != place.dst.dtype or x.numel() % place.row_elems:
                raise MismatchError(f"prove: tensor {name!r}: {x.dtype} {list(x.shape)} is not what was recorded")
            rows = x.detach().contiguous().view(-1, place.row_elems)[place.row_first : place.row_first + place.n_rows]
            want = rows[:, place.col_first : place.col_first + place.n_cols].contiguous()
            have = place.dst.cpu().contiguous()
            if have.shape != want.shape or not torch.equal(have.view(torch.uint8), want.view(torch.uint8)):
                raise MismatchError(f"prove: tensor {name!r}: the receiver does not hold these bits at its place")
    if missing:
        raise MismatchError(f"prove: tensor {min(missing)!r}: the checkpoint does not have it")
    _require_covered(plan, parameters)


def _require_covered(plan: Plan, parameters: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Raises: MismatchError that names a parameter of which a part has no place: its memory was written otherwise."""
    known = [place.dst for found in plan.places.values() for place in found] + plan.fixed
    for name, x in parameters:
        seen = torch.zeros(x.untyped_storage().nbytes(), dtype=torch.bool)
        for part in known:
            if _storage(part) == _storage(x):
                _bytes_of(part, seen).fill_(True)
        mine = _bytes_of(x, seen).all(-1)
        if not bool(mine.all()):
            n = int((~mine).sum())
            raise MismatchError(f"prove: parameter {name!r}: {n} of {x.numel()} elements have no place")


def _bytes_of(x: torch.Tensor, flags: torch.Tensor) -> torch.Tensor:
    """Of flags for each byte of a storage, those of a tensor: its shape, and the bytes of an element."""
    n = x.itemsize
    return flags.as_strided((*x.shape, n), (*(n * stride for stride in x.stride()), 1), n * x.storage_offset())
