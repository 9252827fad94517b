"""A checkpoint of a run as a folder of files of at most 16 MiB, replaced at once: a run may be killed at any time."""

from __future__ import annotations

import io
import shutil
from pathlib import Path

import torch

MOST_BYTES = 16 << 20


class Checkpoint:
    """One run's last checkpoint.

    `folder` holds part-0, part-1, ... of what torch.save writes, and last a file "complete" with their number. A new
    one is written beside it and takes its name; what is not complete counts as absent.
    """

    def __init__(self, folder: Path, most_bytes: int = MOST_BYTES) -> None:
        self.folder, self.most_bytes = folder, most_bytes

    def _old(self) -> Path:
        return self.folder.with_name(self.folder.name + ".old")

    def save(self, state: dict) -> None:
        buffer = io.BytesIO()
        torch.save(state, buffer)
        new, view = self.folder.with_name(self.folder.name + ".new"), buffer.getbuffer()
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir(parents=True)
        starts = range(0, len(view), self.most_bytes)
        for i, start in enumerate(starts):
            (new / f"part-{i}").write_bytes(view[start : start + self.most_bytes])
        (new / "complete").write_text(str(len(starts)))
        shutil.rmtree(self._old(), ignore_errors=True)
        if self.folder.exists():
            self.folder.rename(self._old())
        new.rename(self.folder)
        shutil.rmtree(self._old(), ignore_errors=True)

    def load(self) -> dict | None:
        """The last complete checkpoint, on the host; None if there is none."""
        for folder in (self.folder, self._old()):
            if (folder / "complete").exists():
                n_parts = int((folder / "complete").read_text())
                joined = b"".join((folder / f"part-{i}").read_bytes() for i in range(n_parts))
                return torch.load(io.BytesIO(joined), map_location="cpu")
        return None

    def remove(self) -> None:
        for folder in (self.folder, self._old()):
            shutil.rmtree(folder, ignore_errors=True)
