"""Weight sync for reinforcement learning: `Publisher` writes what changed in a model, `Subscriber` takes it over.

    push = spccl.sync.Publisher("/shared/run1", model, wire_dtype=torch.bfloat16)
    version = push.publish()                          # after optimizer.step()
    pull = spccl.sync.Subscriber("/shared/run1", model)
    version = pull.apply()                            # stages first, then one short pause; all or nothing

docs/SYNC.md says what is promised.
"""

from .delta import Place
from .publisher import Publisher
from .subscriber import Subscriber
from .vllm import VllmClient

__all__ = ["Place", "Publisher", "Subscriber", "VllmClient"]
