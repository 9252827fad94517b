"""Tokens to train on: random ones, or the bytes of the Python sources on this machine."""

import sysconfig
from pathlib import Path

import torch


def load(kind: str, vocab: int, max_tokens: int = 4_000_000) -> torch.Tensor:
    """A text as uint8 or int32 [n]. Every rank of one machine gets the same.

    kind: "random" (uniform over the vocabulary) or "python" (bytes of the standard library's .py files).
    Raises: FileNotFoundError if there are no 100,000 bytes of .py files, as in a stripped Python.
    """
    if kind == "random":
        return torch.randint(vocab, (max_tokens,), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    root = Path(sysconfig.get_path("stdlib"))
    parts, total = [], 0
    for path in sorted(root.glob("*.py")):
        parts.append(path.read_bytes())
        total += len(parts[-1])
        if total >= max_tokens:
            break
    if total < 100_000:
        raise FileNotFoundError(f"{root}: {total} bytes of .py files, wanted 100000 or more; try --data random")
    return torch.frombuffer(bytearray(b"".join(parts)), dtype=torch.uint8)


class Batches:
    """Random windows of a text: call it for (tokens, targets), int64 [size, context] each, on the text's device.

    Targets are one token later than inputs. Ranks with different seeds get different windows.
    """

    def __init__(self, text: torch.Tensor, size: int, context: int, seed: int):
        self.text, self.size = text, size
        self.generator = torch.Generator().manual_seed(seed)
        self.offsets = torch.arange(context + 1, device=text.device)

    def __call__(self) -> tuple[torch.Tensor, torch.Tensor]:
        last = self.text.numel() - self.offsets.numel()
        starts = torch.randint(last + 1, (self.size, 1), generator=self.generator)
        windows = self.text[starts.to(self.text.device, non_blocking=True) + self.offsets].long()
        return windows[:, :-1], windows[:, 1:]
