"""What a subscriber has read and checked, and how that gets into its tensors: whole, or not at all.

A small change lies in memory with the old values, so it can be undone. A large one, and an anchor, are read from the
disk file by file while they are written; if that fails, the tensors hold neither version.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from spccl.errors import FormatError, MismatchError

from . import _blob, delta
from ._route import Step
from ._source import Source
from ._tensors import Box, apart, bits, flat
from .manifest import MASK, File, Manifest, Part

Frame = tuple[torch.Tensor, int]  # what has it, and from which byte on
Boxes = Sequence[Sequence[Box]]  # of each tensor
Needed = Sequence[tuple[Part, Box]]
Files = Mapping[tuple[int, str], _blob.Blob]  # of each version and name, verified


class Staged(NamedTuple):
    """What `commit` writes. `changes`: in memory; None: the route is read from `files`, which are open."""

    route: Sequence[Step]
    changes: list[Change] | None
    boxes: list[list[Box]]
    files: Files


@dataclasses.dataclass
class Change:
    """Frames of a version, and the places that they go to. `olds`: the values before, once a check has read them."""

    step: Step
    targets: delta.Packed
    parts: list[tuple[Box, Part]]  # of each target
    changes: list[int] = dataclasses.field(default_factory=list)
    olds: list[tuple[delta.Packed, torch.Tensor]] = dataclasses.field(default_factory=list)
    is_checked: bool = False

    def __post_init__(self) -> None:
        self.changes = [0] * len(self.parts)

    def check(self, keep_old: bool) -> None:
        """Read the old values, and compare what the sums become with the manifest. Writes nothing to the tensors.

        Raises: MismatchError, FormatError that name the tensor and the version.
        """
        if self.parts:
            self.changes = self._check(range(len(self.parts)), self.targets, self.targets, keep_old)
        self.end_checks()

    def check_some(self, numbers: Sequence[int], copies: delta.Packed) -> None:
        """As `check`, of some targets, in copies of what lies at the places; `end_checks` compares."""
        here = delta.Packed([self.targets.targets[number] for number in numbers], self.targets.key)
        for number, change in zip(numbers, self._check(numbers, copies, here, keep_old=True), strict=True):
            self.changes[number] = change

    def _check(self, numbers: Sequence[int], where: delta.Packed, here: delta.Packed, keep_old: bool) -> list[int]:
        old = None
        try:
            if keep_old:
                old = torch.empty(delta.old_bytes(here), dtype=torch.uint8, device=here.device)
            changes = delta.check(where, self.targets.key, old)
        except FormatError as error:
            text = self._named(numbers, str(error))
            raise FormatError(f"subscriber: version {self.step.version}: {text}") from error
        if old is not None:
            self.olds.append((here, old))
        return changes

    def end_checks(self) -> None:
        """Compare. All that a GPU needs to apply and to undo the change is made here, so that `commit` only queues it.

        Raises: MismatchError that names the first part whose change is not the manifest's; OutOfMemoryError.
        """
        self._compare()
        if self.parts:
            delta.prepare(self.targets)
        for targets, _ in self.olds:
            delta.prepare(targets)
        self.is_checked = True

    def _compare(self) -> None:
        """A part that lies here whole, in one place or in several together, has the change of the manifest."""
        found: dict[tuple[str, Part], dict[Box, int]] = {}
        for (box, part), change in zip(self.parts, self.changes, strict=True):
            if not box.is_whole or change != part.sum_change:
                found.setdefault((box.entry.name, part), {})[box] = change
        for (name, part), changes in found.items():
            sets = [[box] for box in changes]
            if len(sets) > 1:
                sets.append(apart(list(changes)))
            for boxes in sets:
                is_whole = sum(box.n_within(part.first, part.n_elems) for box in boxes) == part.n_elems
                if is_whole and (sum(changes[box] for box in boxes) - part.sum_change) & MASK:
                    raise MismatchError(
                        f"subscriber: version {self.step.version}: tensor {name!r}: elements "
                        f"{part.first} to {part.first + part.n_elems} are not those of version "
                        f"{self.step.version - 1}: something else wrote to them"
                    )

    def _named(self, numbers: Sequence[int], text: str) -> str:
        """The text of an error of delta.py, with the tensor's name in place of its number."""
        name = lambda m: f"tensor {self.parts[numbers[int(m[1])]][0].entry.name!r}"  # noqa: E731
        return re.sub(r"targets\[(\d+)\]", name, text, count=1)

    def apply(self) -> None:
        if self.parts:
            delta.apply(self.targets)

    def undo(self) -> None:
        for targets, old in self.olds:
            delta.undo(targets, old)

    def count(self, sign: int = 1) -> None:
        """The sums of the boxes follow."""
        for (box, _), change in zip(self.parts, self.changes, strict=True):
            box.sum = (box.sum + sign * change) & MASK


def read_change(source: Source, step: Step, wanted: Needed) -> Change:
    """The frames of a version that a receiver needs."""
    frames: dict[Part, Frame] = {}
    for place, file in enumerate(step.manifest.delta):
        frames.update(_frames_of_file(source.load(step.version, file), step, wanted, place))
    return change_of(step, wanted, frames)


def _frames_of_file(blob: _blob.Blob, step: Step, wanted: Needed, place: int) -> dict[Part, Frame]:
    """The frames of a file that a receiver needs, on its device."""
    whole = read_frames(blob, step, place)
    device = wanted[0][1].place.dst.device if wanted else whole.device
    mine = dict.fromkeys([part for part, _ in wanted if part.file == place])
    if sum(part.bytes for part in mine) < whole.numel() // 2:
        return _compact(whole, mine, device)
    whole = whole.to(device)
    return {part: (whole, part.offset) for part in mine}


def _compact(whole: torch.Tensor, parts: Iterable[Part], device: torch.device) -> dict[Part, Frame]:
    """Copies of some frames, for a rank that has little of the tensors: it keeps little of the file."""
    starts, n_bytes = {}, 0
    for part in parts:
        starts[part] = n_bytes
        n_bytes += (part.bytes + 7) // 8 * 8
    copies = torch.empty(n_bytes, dtype=torch.uint8, device=whole.device)
    for part, start in starts.items():
        copies[start : start + part.bytes] = whole[part.offset : part.offset + part.bytes]
    copies = copies.to(device)
    return {part: (copies, start) for part, start in starts.items()}


def frames_of(frames: torch.Tensor, manifest: Manifest) -> dict[Part, Frame]:
    """All frames of a version whose only file's frames are these."""
    return {part: (frames, part.offset) for entry in manifest.tensors for part in entry.parts}


def needed(step: Step, boxes: Boxes) -> Needed:
    """The parts of a version that may have elements at a receiver's places, with these."""
    return [
        (part, box)
        for entry, places in zip(step.manifest.tensors, boxes, strict=True)
        if places
        for part in entry.parts
        for box in places
        if box.is_whole or box.n_within(part.first, part.n_elems)
    ]


def change_of(step: Step, wanted: Needed, frames: Mapping[Part, Frame]) -> Change:
    """A version's change. Args: frames: those that are here; the change is of these. Their headers have the manifest's
    numbers of changes, as `read_frames` found."""
    parts, targets, old_bytes = [], [], 0
    for part, box in wanted:
        if part in frames:
            whole, start = frames[part]
            dtype = box.place.dst.dtype
            parts.append((box, part))
            targets.append(delta.Target(whole, part.n_elems, dtype, (box.place,), part.first, start, part.bytes))
            old_bytes += -(-part.nnz * dtype.itemsize // 8) * 8
    return Change(step, delta.Packed(targets, step.manifest.key, old_bytes), parts)


def _device(boxes: Boxes) -> torch.device:
    return next((box.place.dst.device for places in boxes for box in places), torch.device("cpu"))


def read_frames(blob: _blob.Blob, step: Step, place: int) -> torch.Tensor:
    """The frames of a delta's file. The manifest's numbers of changes are those of the frames."""
    mine = [(entry, part) for entry in step.manifest.tensors for part in entry.parts if part.file == place]
    least = max((part.offset + part.bytes for _, part in mine), default=0)
    if isinstance(blob, _blob.Frames):
        found = _blob.Header("uint8", tuple(blob.data.shape), 0, blob.n_bytes)
    else:
        found = _blob.headers(blob).get("frames")
    if found is None or found.dtype != "uint8" or len(found.shape) != 1 or found.n_bytes < least:
        raise FormatError(f"{blob.where}: tensor frames is {found and found[:2]}, wanted uint8 [{least}] or more")
    frames = blob.data if isinstance(blob, _blob.Frames) else _blob.tensor(blob, found)
    words = frames[: frames.numel() // 8 * 8].view(torch.int64)  # a part begins at a multiple of 8
    at = torch.tensor([part.offset // 8 + 2 for _, part in mine], dtype=torch.int64)
    for (entry, part), nnz in zip(mine, words[at.to(words.device)].tolist(), strict=True):
        if nnz != part.nnz:
            raise FormatError(
                f"{blob.where}: version {step.version}: tensor {entry.name!a}: a frame of {nnz} changes, its manifest "
                f"says {part.nnz}"
            )
    return frames


def open_files(source: Source, route: Sequence[Step]) -> dict[tuple[int, str], _blob.Blob]:
    """All files of a route, with the sizes and hashes of the manifests. They stay open."""
    files: dict[tuple[int, str], _blob.Blob] = {}
    try:
        for step in route:
            for file in step.manifest.anchor if step.from_anchor else step.manifest.delta:
                files[step.version, file.name] = source.open(step.version, file)
    except BaseException:
        close_files(files)
        raise
    return files


def close_files(files: Files) -> None:
    for blob in files.values():
        blob.close()


def staged_bytes(wanted: Sequence[Needed]) -> int:
    """Bytes that the frames of a route's steps and the old values take at a receiver."""
    old = sum([part.nnz * box.place.dst.itemsize for found in wanted for part, box in found])
    return old + sum([part.bytes for found in wanted for part in dict.fromkeys([part for part, _ in found])])


def commit_small(changes: Sequence[Change], begun: list[Change]) -> None:
    """Apply all changes. One that is not checked yet is checked where the one before left off.

    Args: begun: gets each change before it is applied. If this raises, the caller undoes these.
    """
    for change in changes:
        if not change.is_checked:
            change.check(keep_old=True)
        begun.append(change)
        change.apply()


def settle(boxes: Boxes) -> None:
    """Wait until a GPU has written. Raises: as delta.settle."""
    delta.settle(_device(boxes))


def undo_all(changes: Sequence[Change]) -> None:
    for change in reversed(changes):
        change.undo()


def commit_large(files: Files, route: Sequence[Step], boxes: Boxes) -> None:
    """Write a route to the tensors file by file. If this raises, they hold a mixture."""
    for step in route:
        if step.from_anchor:
            for file in step.manifest.anchor:
                write_anchor(files[step.version, file.name], step, file, boxes)
            continue
        wanted = needed(step, boxes)
        for place, file in enumerate(step.manifest.delta):
            frames = _frames_of_file(files[step.version, file.name], step, wanted, place)
            change = change_of(step, wanted, frames)
            change.check(keep_old=False)
            change.apply()
            change.count()


def anchor_headers(blob: _blob.Blob, step: Step, file: File) -> Iterator[tuple[int, _blob.Header]]:
    """The places of the tensors in an anchor's file, and where they lie in it. Raises: FormatError for another kind."""
    found = _blob.headers(blob)
    for place in file.tensors:
        entry = step.manifest.tensors[place]
        header = found.get(entry.name)
        if header is None or (header.dtype, header.shape) != (entry.dtype, entry.shape):
            raise FormatError(f"{blob.where}: tensor {entry.name!a} is {header and header[:2]}")
        yield place, header


def write_anchor(blob: _blob.Blob, step: Step, file: File, boxes: Boxes) -> None:
    """Each tensor of an anchor's file is compared with the manifest's sum, written, and read back."""
    for place, header in anchor_headers(blob, step, file):
        entry = step.manifest.tensors[place]
        if not boxes[place]:
            continue  # not on this rank
        x = _blob.tensor(blob, header)
        if delta.checksum(flat(x), step.manifest.key) != entry.sum:
            raise FormatError(f"{blob.where}: tensor {entry.name!a} has another sum than the manifest says")
        for box in boxes[place]:
            wanted = box.of(x.to(box.place.dst.device))
            box.view().copy_(wanted)
            if not torch.equal(bits(box.view()), bits(wanted)):
                raise MismatchError(f"subscriber: version {step.version}: tensor {entry.name!r} was not written right")
            box.sum = entry.sum if box.is_whole else box.read_sum(step.manifest.key)


def check_sums(version: int, key: int, boxes: Boxes) -> None:
    """Read all tensors. Raises: MismatchError that names the first one that is not what the version says."""
    for places in boxes:
        for box in places:
            found = box.read_sum(key)
            if found != box.sum or (box.is_whole and found != box.entry.sum):
                raise MismatchError(
                    f"subscriber: version {version}: tensor {box.entry.name!r} has sum {found:016x}, wanted "
                    f"{box.sum:016x}: something else wrote to it"
                )
