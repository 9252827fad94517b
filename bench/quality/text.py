"""The text: Python sources under sys.prefix and the standard library, in a fixed order, with a held-out part."""

from __future__ import annotations

import hashlib
import sysconfig
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

HELD_OUT = 50  # every 50th file is held out


def read_text(limit_bytes: int, cache: Path | None = None) -> tuple[Tensor, Tensor, str]:
    """Training text, held-out text (uint8) and a digest of both that names them.

    Files are taken in the order of their paths relative to the folder they are found in, until `limit_bytes` of
    training text are there. Two machines with the same packages get the same text.
    """
    if cache is not None and cache.exists():
        saved = torch.load(cache)
        return saved["train"], saved["held_out"], saved["digest"]
    paths = sysconfig.get_paths()
    train, held_out = bytearray(), bytearray()
    count = 0
    for folder in dict.fromkeys((paths["purelib"], paths["stdlib"])):
        root = Path(folder)
        files = (p for p in root.rglob("*.py") if folder == paths["purelib"] or "site-packages" not in p.parts)
        for path in sorted(files, key=lambda p: p.relative_to(root).as_posix()):
            if len(train) >= limit_bytes:
                break
            try:
                content = path.read_bytes()
            except OSError:
                continue
            (held_out if count % HELD_OUT == 0 else train).extend(content)
            count += 1
    digest = hashlib.sha256(bytes(train) + b"|" + bytes(held_out)).hexdigest()[:12]
    both = [torch.from_numpy(np.frombuffer(bytes(part), dtype=np.uint8).copy()) for part in (train, held_out)]
    if cache is not None:
        torch.save({"train": both[0], "held_out": both[1], "digest": digest}, cache)
    return both[0], both[1], digest


def windows(text: Tensor, starts: Tensor, length: int) -> Tensor:
    """Windows of `length` bytes as int64, [*starts.shape, length]."""
    return text[starts[..., None] + torch.arange(length, device=text.device)].long()
