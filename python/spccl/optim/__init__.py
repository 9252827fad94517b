"""Low-traffic training with any torch optimizer: `SparseSync`.

    opt = spccl.optim.SparseSync(torch.optim.AdamW(model.parameters(), lr=3e-4), density=0.01)   # no DDP wrapper
    ...
    loss.backward()
    opt.step()                            # a local step, then an exchange of the largest changes
    with opt.global_weights():            # for evaluation and checkpoints
        evaluate(model)

docs/TRAINING.md says for whom this is, and how good the trained models are.
"""

from spccl._pruning.density import Geometric

from .sync import SparseSync

__all__ = ["Geometric", "SparseSync"]
