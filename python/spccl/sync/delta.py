"""Deltas of lists of tensors: find what changed, encode, check, apply, undo, and checksums.

A thin face of the functions spccl_delta_* of spccl.h, which says more; docs/FORMAT.md, section 11, has the bytes. Each
function takes a whole list, because a model has thousands of tensors. All tensors of a call are on the CPU, or all on
one GPU. There `encode`, `check` and `checksum` wait for the current stream; `apply` and `undo` are queued on it, and
`settle` waits for them. Errors are those of `spccl.errors`; their text names the entry, such as "sources[3]".
"""

from __future__ import annotations

import contextlib
import os
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from spccl import _ext
from spccl.errors import OutOfMemoryError, TimeoutError

from . import _pack
from ._pack import Frame, PackedSources, Place, Source, Target

__all__ = [
    "Frame",
    "Packed",
    "PackedSources",
    "Place",
    "Source",
    "Target",
    "apply",
    "bound",
    "check",
    "checksum",
    "checksums",
    "encode",
    "old_bytes",
    "prepare",
    "settle",
    "undo",
]


@contextlib.contextmanager
def _stream_of(device: torch.device) -> Iterator[int]:
    """Makes a GPU the current one. Its current stream; 0 of a CPU."""
    if device.type == "cpu":
        yield 0
        return
    with torch.cuda.device(device):
        yield torch.cuda.current_stream(device).cuda_stream


def _with_memory(device: torch.device, call: Callable[[], Any]) -> Any:
    """What a call of the library returns. It takes memory from CUDA: if there is none, torch gives back what it keeps
    for later, and the call is made once more."""
    try:
        return call()
    except OutOfMemoryError:
        if device.type == "cpu":
            raise
    torch.cuda.empty_cache()
    return call()


def _timeout_s() -> float:
    """SPCCL_TIMEOUT_MS, as the library reads it; a bad value is refused where the library reads it."""
    text = os.environ.get("SPCCL_TIMEOUT_MS") or "600000"
    scale = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}.get(text[-1], 1)
    digits = text[:-1] if scale > 1 else text
    return int(digits) * scale / 1000 if digits.isdecimal() else 600.0


def _wait(event: Any, timeout_s: float) -> bool:
    """Whether an event of a GPU comes in time. Raises: the error of the GPU, of torch."""
    start = time.monotonic()
    while not event.query():
        waited_s = time.monotonic() - start
        if waited_s > timeout_s:
            return False
        if waited_s > 2e-4:
            time.sleep(5e-5)
    return True


def settle(device: torch.device) -> None:
    """Wait until a GPU has done what the current stream has, at most SPCCL_TIMEOUT_MS. Nothing to do on a CPU.

    Raises: TimeoutError; what torch raises for an error of the GPU.
    """
    if device.type == "cpu":
        return
    with torch.cuda.device(device):
        event = torch.cuda.Event()
        event.record()
        timeout_s = _timeout_s()
        if not _wait(event, timeout_s):
            raise TimeoutError(f"delta: {device}: the stream still had work after {timeout_s:g} s")


def _used(device: torch.device, tensors: Sequence[torch.Tensor]) -> None:
    """The current stream uses the memory, which may be another stream's: it is not given away before that is done."""
    stream = torch.cuda.current_stream(device)
    for x in tensors:
        x.record_stream(stream)


class Packed:
    """A list of targets, packed once for `check`, `apply` and `undo`: packing thousands takes longer than writing few
    elements to each. Their memory must stay where it is. On a GPU the first of these calls makes a plan in GPU memory;
    frames must not change afterwards.

    Args:
        key: of `check`.
        old_bytes: what `old_bytes` says, where that is known.
    Raises: ArgumentError, UnsupportedError, as the calls for the list itself.
    """

    def __init__(self, targets: Sequence[Target], key: int, old_bytes: int | None = None):
        self.targets, self.key = tuple(targets), key
        self.packed, self.device = _pack_targets("pack", self.targets, key)
        self.old_bytes = old_bytes
        self.is_checked = False
        self._frames: list[torch.Tensor] | None = None  # one of each memory that has frames
        self._plan = 0
        self._events: dict[int, Any] = {}  # the last use of the plan on each stream

    def plan(self, stream: int) -> int:
        """The address of the plan. Raises: as `check`."""
        if not self._plan:
            make = lambda: _ext.delta_plan(*self.packed, stream)  # noqa: E731
            self._plan, self.old_bytes = _with_memory(self.device, make)
            weakref.finalize(self, _destroy_plan, self._plan, self.device, self._events).atexit = False
        return self._plan

    def used(self, stream: int, *old: torch.Tensor) -> None:
        """The current stream was given work with the plan, the frames and `old`."""
        if stream not in self._events:
            self._events[stream] = torch.cuda.Event()
        self._events[stream].record()
        if self._frames is None:
            one_each = {id(t.frame): t.frame for t in self.targets}.values()
            self._frames = list({frame.untyped_storage().data_ptr(): frame for frame in one_each}.values())
        _used(self.device, [*self._frames, *old])


def _destroy_plan(plan: int, device: torch.device, events: dict[int, Any]) -> None:
    """Free a plan, when kernels no longer use it. One of a GPU that does not end or has failed keeps its memory."""
    with contextlib.suppress(RuntimeError), torch.cuda.device(device):
        if all(_wait(event, _timeout_s()) for event in events.values()):
            _ext.delta_plan_destroy(plan)


def _device_of(targets: Sequence[Target] | Packed) -> torch.device:
    """That of the first tensor of the list; a CPU if there is none."""
    if isinstance(targets, Packed):
        return targets.device
    return targets[0].frame.device if targets else torch.device("cpu")


def _packed(call: str, targets: Sequence[Target] | Packed, key: int | None = None) -> Packed:
    """The targets with the plan that a GPU needs."""
    if not isinstance(targets, Packed):
        return Packed(targets, key or 0)
    if key not in (None, targets.key):
        raise _pack.bad(f"{call}: key {key}; wanted {targets.key}, which the targets were packed with")
    return targets


def _pack_targets(
    call: str, targets: Sequence[Target] | Packed, key: int | None = None
) -> tuple[tuple[bytes, bytes], torch.device]:
    """Targets and places, and their device. A target's pointer to places is 0, and the extension fills it in."""
    if isinstance(targets, Packed):
        return _packed(call, targets, key).packed, targets.device
    device = _device_of(targets)
    key = key or 0
    packed, places = bytearray(), bytearray()
    whole, address, size, known, number = None, 0, 0, None, 0  # frame and dtype before, which often are these too
    for i, (frame, n_elems, dtype, at, first, start, n_bytes) in enumerate(targets):
        if frame is not whole:
            _pack.as_bytes(frame, f"{call}: targets[{i}].frame", device)
            whole, address, size = frame, frame.data_ptr(), frame.numel()
        if dtype is not known:
            known, number = dtype, _pack.number(dtype, f"{call}: targets[{i}]")
        n_bytes = size - start if n_bytes is None else n_bytes
        if not 0 <= start <= start + n_bytes <= size:
            raise _pack.bad(f"{call}: targets[{i}]: {n_bytes} bytes at {start} of {size}")
        for p, place in enumerate(at):
            places += _pack.pack_place(place, dtype, f"{call}: targets[{i}].places[{p}]", device)
        if not 0 <= n_elems <= _pack.MASK:
            raise _pack.bad(f"{call}: targets[{i}]: n_elems {n_elems}")
        packed += _pack.TARGET.pack(
            address + start, n_bytes, n_elems, first & _pack.MASK, 0, len(at), key & _pack.MASK, number, 0
        )
    return (bytes(packed), bytes(places)), device


def bound(n_elems: int, dtype: torch.dtype) -> int:
    """Bytes that always suffice for the frame of one source."""
    return _ext.delta_bound(n_elems, _pack.number(dtype, "bound"))


def encode(sources: Sequence[Source] | PackedSources, key: int, out: torch.Tensor, raw: bool = False) -> list[Frame]:
    """Encode each source against its base, frames back to back. The base stays: `apply` of the frame advances it.

    Args:
        key: any number; of the checksums.
        out: [n] uint8; the sum of `bound` of all sources suffices, and where few elements changed far less does. On a
            GPU it starts at a multiple of 8 bytes, and twice what is written saves a second reading then.
        raw: True: all values as they are. False: as differences to the base where that is smaller; such a frame is
            applied once, to exactly that base.
    Raises: ArgumentError (its `status` is DST_SMALL where `out` is too small), OutOfMemoryError, UnsupportedError (a
        frame above 16 GiB).
    """
    device = _pack.as_bytes(out, "encode: out")
    if isinstance(sources, PackedSources):
        if (sources.device, sources.key) != (device, key):
            raise _pack.bad(f"encode: on {device} with key {key}; wanted {sources.device} and {sources.key}, as packed")
        packed = sources.packed
    else:
        packed = _pack.pack_sources(sources, key, device)
    with _stream_of(device) as stream:
        args = packed, raw, out.data_ptr(), out.numel(), device.type != "cpu", stream
        rows = _with_memory(device, lambda: _ext.delta_encode(*args))
    return [Frame._make(row) for row in rows]


def old_bytes(targets: Sequence[Target] | Packed) -> int:
    """Bytes that `old` of `check` needs. It reads the headers of the frames; `check` checks them."""
    if isinstance(targets, Packed):
        if targets.old_bytes is None and targets.device.type != "cpu":
            with _stream_of(targets.device) as stream:
                targets.plan(stream)
        elif targets.old_bytes is None:
            targets.old_bytes = old_bytes(targets.targets)
        return targets.old_bytes
    total = 0
    heads = [t.frame[t.start :][:24][16:] for t in targets]
    if heads and heads[0].device.type != "cpu":  # one copy for all
        all_heads = torch.cat(heads)
        settle(all_heads.device)
        heads = list(all_heads.cpu().split([head.numel() for head in heads]))
    for t, head in zip(targets, heads, strict=True):
        nnz = int.from_bytes(head.tolist(), "little") if head.numel() == 8 else 0
        total += (min(nnz, t.n_elems) * t.dtype.itemsize + 7) // 8 * 8
    return total


def check(targets: Sequence[Target] | Packed, key: int, old: torch.Tensor | None = None) -> list[int]:
    """Check all frames completely, and look at what lies at the places now. Writes no place.

    Args:
        old: uint8 [old_bytes(targets)]: gets the old values, for `undo`; None: they are not kept.
    Returns: the sum change of each target, of the elements that lie at a place. An element at several places counts
        once.
    Raises: FormatError (a bad frame; one of another dtype or length; places of one element with different bits),
        ArgumentError, OutOfMemoryError.
    """
    device = _device_of(targets)
    if old is not None:
        _pack.as_bytes(old, "check: old", device)
    where = (0, 0) if old is None else (old.data_ptr(), old.numel())
    if device.type == "cpu":
        packed, _ = _pack_targets("check", targets, key)
        return _ext.delta_check(*packed, *where)
    planned = _packed("check", targets, key)
    with _stream_of(device) as stream:
        plan, olds = planned.plan(stream), () if old is None else (old,)
        try:
            changes = _ext.delta_plan_check(plan, len(planned.targets), *where, stream)
        except TimeoutError:
            planned.used(stream, *olds)  # kernels still use it
            raise
        planned.used(stream, *olds)
    planned.is_checked = True
    return changes


def _checked(call: str, targets: Sequence[Target] | Packed) -> Packed:
    """On a GPU `check` must have accepted what is written: targets that it has accepted, maybe just now."""
    planned = _packed(call, targets)
    if not planned.is_checked:
        check(planned, planned.key)
    return planned


def prepare(targets: Packed) -> None:
    """On a GPU, all that `apply` and `undo` of these targets need: then they only queue work. Nothing on a CPU.

    Frames that follow others may be prepared while the places hold what is before these.
    Raises: as `check`.
    """
    if targets.device.type != "cpu":
        _checked("prepare", targets)


def apply(targets: Sequence[Target] | Packed) -> None:
    """Write the new values to the places. After `check` of the same frames it does not fail.

    Raises: as `check`; then part of the places may have been written, and `undo` restores them.
    """
    device = _device_of(targets)
    if device.type == "cpu":
        packed, _ = _pack_targets("apply", targets)
        _ext.delta_apply(*packed)
        return
    planned = _checked("apply", targets)
    with _stream_of(device) as stream:
        _ext.delta_plan_apply(planned.plan(stream), stream)
        planned.used(stream)


def undo(targets: Sequence[Target] | Packed, old: torch.Tensor) -> None:
    """Put back what `check` stored in `old`, whether all, some or none of the targets had been applied.

    On a GPU only targets that `check` or `prepare` took as `Packed` are put back without new checks and memory.
    """
    device = _device_of(targets)
    _pack.as_bytes(old, "undo: old", device)
    n_bytes = old_bytes(targets)
    if old.numel() < n_bytes:
        raise _pack.bad(f"undo: old has {old.numel()} bytes; wanted {n_bytes}, as check wrote")
    if device.type == "cpu":
        packed, _ = _pack_targets("undo", targets)
        _ext.delta_undo(*packed, old.data_ptr(), n_bytes)
        return
    for planned in [targets] if isinstance(targets, Packed) else _one_place_each(targets):
        _checked("undo", planned)
        with _stream_of(device) as stream:
            _ext.delta_plan_undo(planned.plan(stream), old.data_ptr(), n_bytes, stream)
            planned.used(stream, old)


def _one_place_each(targets: Sequence[Target]) -> Iterator[Packed]:
    """The same frames with the first place of each, then with the second, ...: a check refuses an element whose places
    differ, as they do where only some were written."""
    for number in range(max((len(t.places) for t in targets), default=0)):
        yield Packed([t._replace(places=tuple(t.places[number : number + 1])) for t in targets], 0)


def checksum(x: torch.Tensor, key: int, first: int = 0) -> int:
    """Checksum of a contiguous tensor, or of its part from element `first` on. Checksums of parts add up mod 2^64."""
    return checksums([(x, first)], key)[0]


def checksums(parts: Sequence[tuple[torch.Tensor, int]], key: int) -> list[int]:
    """Of several, each with its first element. On a GPU there is one wait for all."""
    device: torch.device | None = None
    asked = []
    for x, first in parts:
        device = _pack.flat(x, "checksum: x", device)
        asked.append(
            (x.data_ptr(), x.numel(), _pack.number(x.dtype, "checksum: x"), first & _pack.MASK, key & _pack.MASK)
        )
    if device is None or device.type == "cpu":
        return [_ext.delta_checksum(*args) for args in asked]
    with _stream_of(device) as stream:
        out = torch.zeros(len(asked), dtype=torch.int64, device=device)
        for place, args in enumerate(asked):
            if args[1]:
                _ext.delta_cuda_checksum(*args, out.data_ptr() + 8 * place, stream)
        settle(device)
        return [found & _pack.MASK for found in out.tolist()]
