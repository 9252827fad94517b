"""Training text that is on every machine: the source files of Python's own standard library."""

import sysconfig
from pathlib import Path

import torch

_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "lib2to3"}


def load(max_bytes: int = 16_000_000) -> tuple[torch.Tensor, torch.Tensor]:
    """Read the standard library's .py files. Every tenth file is for validation, the others are for training.

    The files are sorted by their paths in the library: every rank and every run with the same Python gets the
    same text.
    Returns: (train, validation), uint8 [n] each, at most max_bytes together.
    Raises: FileNotFoundError if there is less than 1 MB of source, as in a stripped Python.
    """
    root = Path(sysconfig.get_path("stdlib"))
    paths = sorted(
        (p for p in root.rglob("*.py") if not _SKIPPED_FOLDERS.intersection(p.relative_to(root).parts)),
        key=lambda p: p.relative_to(root).as_posix(),
    )
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    total = 0
    for i, path in enumerate(paths):
        text = path.read_bytes()
        if total + len(text) > max_bytes:
            break
        total += len(text)
        parts[i % 10 == 9].append(text)
    if total < 1_000_000:
        raise FileNotFoundError(f"{root}: {total} bytes of .py files, wanted 1000000 or more")
    train, validation = (torch.frombuffer(bytearray(b"".join(p)), dtype=torch.uint8) for p in parts)
    return train, validation


def batch(text: torch.Tensor, size: int, context: int, generator: torch.Generator):
    """Random windows: (inputs, targets), int64 [size, context] each. Targets are one byte later than inputs."""
    starts = torch.randint(text.numel() - context - 1, (size,), generator=generator)
    windows = torch.stack([text[s : s + context + 1] for s in starts.tolist()]).long()
    return windows[:, :-1], windows[:, 1:]


def windows(text: torch.Tensor, size: int, context: int, n_batches: int):
    """Evenly spread windows, the same on every call: a list of (inputs, targets) as in `batch`."""
    starts = torch.linspace(0, text.numel() - context - 2, size * n_batches).long()
    rows = torch.stack([text[s : s + context + 1] for s in starts.tolist()]).long()
    return [(r[:, :-1], r[:, 1:]) for r in rows.split(size)]
