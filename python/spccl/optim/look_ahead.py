"""Look-ahead: the part of what a rank has not sent that its own weights hold.

With look-ahead h, e is what this rank has not sent, z the global weights, and the rank's weights are w = z + h e. With
more ranks a rank's e is more of its own noise, and a forward pass that uses less of it trains better. So a step of
the optimizer changes w by h times what it changes e: its learning rates are multiplied by h inside `slower`, and 16-bit
parameters, whose small changes would be rounded away, take h times their change in `Bucket.absorb`. An exchange
selects from w - z = h e and divides the average over ranks by h (`Bucket.apply`). It takes no memory.

What others change in weights of 32 and 64 bits between two steps counts 1 / h times in the global weights.
"""

import contextlib
from collections.abc import Iterator, Sequence

import torch

from spccl._pruning.checks import require

from .bucket import Weight

# Their steps are proportional to the learning rate.
_PROPORTIONAL = tuple(
    getattr(torch.optim, name)
    for name in ("SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Adagrad", "Adadelta", "Muon")
    if hasattr(torch.optim, name)  # Muon: torch 2.9
)


class LookAhead:
    """The look-ahead `part` of one optimizer.

    Raises: ValueError for a part below 1 with an optimizer whose step may not be proportional to the learning rate.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, weights: Sequence[Weight], part: float):
        self.optimizer, self.part = optimizer, part
        self._groups: list[dict] = []
        if part == 1:
            return
        ours = {id(w.param): w for w in weights}
        for group in optimizer.param_groups:
            there = [ours[id(p)] for p in group["params"] if id(p) in ours]
            if all(w.flat.dtype.itemsize == 2 for w in there):
                for w in there:
                    w.absorbed = part
            else:
                self._groups.append(group)
        if self._groups:
            kinds = ", ".join(kind.__name__ for kind in _PROPORTIONAL)
            require("SparseSync", "look_ahead", part, type(optimizer) in _PROPORTIONAL,
                    f"1 with a {type(optimizer).__name__}: below 1 the step must be proportional to the learning rate, "
                    f"as those of {kinds} are")  # fmt: skip

    @contextlib.contextmanager
    def slower(self) -> Iterator[None]:
        """Inside the block the optimizer's step changes the weights `part` times as much."""
        kept = [group["lr"] for group in self._groups]
        for group in self._groups:
            group["lr"] = group["lr"] * self.part
        try:
            yield
        finally:
            for group, rate in zip(self._groups, kept, strict=True):
                group["lr"] = rate
