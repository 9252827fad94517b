"""The files of a version: what changed, encoded part by part in a buffer of bounded size, and anchors."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from spccl.errors import ArgumentError, StateError, Status

from . import delta
from ._tensors import Named, flat, frame_dtype
from .manifest import MASK, Entry, File, Part, file_name

Pairs = Sequence[tuple[torch.Tensor, torch.dtype]]
Cut = tuple[int, int, int]  # a part: place of its tensor, first element, number of elements
Write = Callable[[str, dict[str, torch.Tensor], tuple[int, ...]], File]  # a delta's frames are on the tensors' device

SLICE_ELEMS = 1 << 16  # of a frame; parts are of whole slices
PART_ELEMS, N_PARTS = 1 << 22, 4096  # parts are of the first, or larger: so many of a model
BASE_BYTES = 256 << 20  # of a base in host memory, copied to a GPU at a time
GPU_PART_ELEMS, GPU_N_PARTS = 1 << 24, 512  # each part costs the hosts about 20 us
WHOLE_TIMES = {"cpu": 1, "cuda": 4}  # so much larger are parts where all receivers are known to hold whole tensors


def sum_of(x: torch.Tensor, key: int) -> int:
    return sums_of([x], key)[0]


def sums_of(tensors: Sequence[torch.Tensor], key: int) -> list[int]:
    """0 of one without elements, whose address need not be one."""
    found = iter(delta.checksums([(flat(x), 0) for x in tensors if x.numel()], key))
    return [next(found) if x.numel() else 0 for x in tensors]


def sum_after(old: Entry, parts: Sequence[Part]) -> int:
    return (old.sum + sum(part.sum_change for part in parts)) & MASK


class Cuts:
    """The parts of a model's tensors that are encoded, and what the library is told of them: kept from one version to
    the next, while no tensor moves. `fits`: whether the buffer is likely to take the frames of all.
    """

    def __init__(self) -> None:
        self.parts: list[Cut] = []
        self.fits = True
        self._of: tuple[object, ...] = ()
        self._sources: delta.PackedSources | None = None  # None: copies are made for a call

    def find(
        self,
        named: Sequence[Named],
        now: Pairs,
        base: Sequence[torch.Tensor],
        staging_bytes: int,
        key: int,
        all_whole: bool,
    ) -> Cuts:
        """Of these tensors. Args: named: the same list as before if no tensor moved; base: likewise. all_whole: whether
        all receivers hold whole tensors."""
        of = named, base, staging_bytes, key, all_whole
        if len(self._of) == len(of) and all(was is one for was, one in zip(self._of, of, strict=True)):
            return self
        self._of = ()
        device = now[0][0].device if now else torch.device("cpu")
        # Parts are small because a shard stages each part whole, also what other shards hold of it.
        least, n_parts = (PART_ELEMS, N_PARTS) if device.type == "cpu" else (GPU_PART_ELEMS, GPU_N_PARTS)
        least *= WHOLE_TIMES[device.type] if all_whole else 1
        part_elems = max(least, sum(x.numel() for x in base) // n_parts)
        self.parts = [
            (place, first, n)
            for place, x in enumerate(base)
            for first, n in _cut(x.numel(), frame_dtype(x.dtype), staging_bytes, part_elems)
        ]
        self._sources = None
        flats = _Flats(now, base)
        if not flats.is_far and all(x.is_contiguous() for x, _ in now):
            self._sources = delta.PackedSources([flats.source(*part, {}) for part in self.parts], key)
        self._of = of
        return self

    def encode(self, out: torch.Tensor, raw: bool) -> list[delta.Frame] | None:
        """All parts in one call. None: their frames do not fit, or are likely not to."""
        if self._sources is None or not self.fits or not self.parts:
            return None
        try:
            return delta.encode(self._sources, self._sources.key, out, raw)
        except ArgumentError as error:
            if error.status != Status.DST_SMALL:
                raise
            return None


class Writer:
    """Makes the files of one version: `write(name, tensors, places)` puts one where it belongs.

    `files`: the delta's. `kept`: the frames of the only one of them, still in memory; None if there are several.
    """

    def __init__(self, write: Write, key: int, staging_bytes: int, raw: bool = False):
        self.write, self.key, self.staging_bytes, self.raw = write, key, staging_bytes, raw
        self.files: list[File] = []
        self.kept: torch.Tensor | None = None

    def delta(self, now: Pairs, base: Sequence[torch.Tensor], cuts: Cuts) -> list[tuple[Part, ...]]:
        """Encode what differs from the base. Returns the parts of each tensor that changed."""
        parts: list[list[Part]] = [[] for _ in base]
        device = now[0][0].device if now else torch.device("cpu")
        out = torch.empty(self.staging_bytes, dtype=torch.uint8, device=device)
        frames = cuts.encode(out, self.raw)
        if frames is None:
            used = self._in_pieces(now, base, cuts.parts, out, parts)
        else:
            used = self._take(cuts.parts, frames, 0, parts)
        is_only = not self.files
        self._flush(out[:used])
        self.kept = out[:used] if is_only else None
        cuts.fits = is_only and used <= out.numel() // (1 if device.type == "cpu" else 2)  # a GPU reads once then
        return [tuple(found) for found in parts]

    def _take(self, cut: Sequence[Cut], frames: Sequence[delta.Frame], used: int, parts: list[list[Part]]) -> int:
        """Frames from byte `used` of a file on become parts. Returns where the next one begins."""
        file, offset, n_bytes = len(self.files), 0, 0
        for (place, first, n), (offset, n_bytes, nnz, sum_change) in zip(cut, frames, strict=True):
            if nnz:
                parts[place].append(Part(file, used + offset, n_bytes, first, n, nnz, sum_change))
        return used + -(-(offset + n_bytes) // 8) * 8

    def _in_pieces(
        self, now: Pairs, base: Sequence[torch.Tensor], todo: Sequence[Cut], out: torch.Tensor, parts: list[list[Part]]
    ) -> int:
        """Encode so much at a time as fits whatever changed. Returns the bytes of `out` that are not in a file yet."""
        used, flats = 0, _Flats(now, base)
        while todo:
            n_taken = _fitting(todo, base, self.staging_bytes - used, flats.most_base_bytes)
            if n_taken == 0:
                self._flush(out[:used])
                used = 0
                continue
            taken, todo = todo[:n_taken], todo[n_taken:]
            copies: dict[int, torch.Tensor] = {}
            sources = [flats.source(*part, copies) for part in taken]
            used = self._take(taken, delta.encode(sources, self.key, out[used:], self.raw), used, parts)
        return used

    def _flush(self, frames: torch.Tensor) -> None:
        name = file_name("delta", len(self.files) + 1)
        self.files.append(self.write(name, {"frames": frames}, ()))

    def anchor(self, entries: Sequence[Entry], now: Pairs) -> tuple[File, ...]:
        """Write the tensors themselves, several to a file of at most `staging_bytes` if a tensor is not larger.

        Raises: StateError if a tensor is not what the sums say: something changed it since they were computed.
        """
        files: list[File] = []
        held: dict[int, torch.Tensor] = {}

        def flush() -> None:
            name = file_name("anchor", len(files) + 1)
            files.append(self.write(name, {entries[i].name: x for i, x in held.items()}, tuple(held)))
            held.clear()

        n_bytes = 0
        for place, (entry, (x, dtype)) in enumerate(zip(entries, now, strict=True)):
            if not entry.numel:
                continue
            size = entry.numel * dtype.itemsize
            if held and n_bytes + size > self.staging_bytes:
                flush()
                n_bytes = 0
            held[place] = rounded(x, dtype).cpu()
            n_bytes += size
            if sum_of(held[place], self.key) != entry.sum:
                raise StateError(f"publisher: tensor {entry.name!r} was changed while it was published")
        if held:
            flush()
        return tuple(files)


def rounded(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A contiguous tensor of `dtype`, with the bits of deltas: a NaN keeps sign and payload, which torch drops."""
    y = x.to(dtype).contiguous()
    if dtype == x.dtype or not bool(torch.isnan(y).any()):
        return y
    target = flat(y)
    buffer = torch.empty(delta.bound(y.numel(), dtype), dtype=torch.uint8, device=y.device)
    (frame,) = delta.encode([delta.Source(flat(x.contiguous()), target)], 0, buffer, raw=True)
    found = buffer[frame.offset : frame.offset + frame.bytes]
    delta.apply([delta.Target(found, y.numel(), dtype, [delta.Place.whole(target)])])
    return y


def is_far(x: torch.Tensor, base: torch.Tensor) -> bool:
    """Whether the base is in host memory, the tensor on a GPU."""
    return x.device != base.device


class _Flats:
    """Parts of tensors, [n]; of one that is not contiguous, and of a base in host memory, copies that live for one
    call, the latter of at most `most_base_bytes`, or one part."""

    def __init__(self, now: Pairs, base: Sequence[torch.Tensor]):
        self.now = [flat(x) if x.is_contiguous() else x for x, _ in now]
        self.base = [flat(x) for x in base]
        self.is_far = any(is_far(x, y) for x, y in zip(self.now, self.base, strict=True))
        self.most_base_bytes = BASE_BYTES if self.is_far else None

    def source(self, place: int, first: int, n: int, copies: dict[int, torch.Tensor]) -> delta.Source:
        x = self.now[place]
        if not x.is_contiguous():
            x = copies[place] = copies[place] if place in copies else flat(x.contiguous())
        base = self.base[place]
        if n != base.numel():
            x, base = x[first : first + n], base[first : first + n]
        return delta.Source(x, base.to(x.device, non_blocking=True) if self.is_far else base, first=first)


def _cut(n_elems: int, dtype: torch.dtype, staging_bytes: int, part_elems: int) -> list[tuple[int, int]]:
    """(first, number of elements) of the parts of a tensor. Each fits into half of the buffer, whatever changed."""
    most = max(SLICE_ELEMS, min(staging_bytes // (4 * dtype.itemsize), part_elems) // SLICE_ELEMS * SLICE_ELEMS)
    while most > SLICE_ELEMS and delta.bound(most, dtype) > staging_bytes // 2:
        most = max(SLICE_ELEMS, most // 2 // SLICE_ELEMS * SLICE_ELEMS)
    least = delta.bound(min(most, n_elems), dtype) if n_elems else 0
    if least > staging_bytes:
        raise ArgumentError(f"publisher: staging_bytes={staging_bytes}: wanted at least {least}")
    return [(first, min(most, n_elems - first)) for first in range(0, n_elems, most)]


def _fitting(todo: Sequence[Cut], base: Sequence[torch.Tensor], room: int, base_room: int | None) -> int:
    """How many of the parts fit into `room` bytes, whatever changed in them, and their base into `base_room`."""
    for count, (place, _, n) in enumerate(todo):
        if base_room is not None:
            base_room -= n * base[place].itemsize
            if base_room < 0 and count:
                return count
        room -= -(-delta.bound(n, frame_dtype(base[place].dtype)) // 8) * 8
        if room < 0:
            return count
    return len(todo)
