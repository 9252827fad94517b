"""The ways to exchange gradients that measure.py compares, and the variants of the step around them."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from gpt import GPT
from torch.nn.parallel import DistributedDataParallel

from spccl.ddp import PrunedGradients

DEFAULT_BUCKET_MB = 25  # DDP's
# DDP times its own first 10 steps and every 100th with CUDA events that a capture does not allow.
STEPS_BEFORE_CAPTURE = 11
VARIANTS = ("eager", "graph", "compile", "large-batch")


@dataclass(frozen=True)
class Mode:
    """ddp: settings of DistributedDataParallel. hook: settings of PrunedGradients; None: no hook."""

    title: str
    ddp: dict[str, Any] = field(default_factory=dict)
    hook: dict[str, Any] | None = None


# With a hook static_graph stays off: it would make the hook look for parameters that were not used, one pass more.
MODES = {
    "dense": Mode("dense, DDP's defaults"),
    "tuned": Mode("dense, tuned", {"gradient_as_bucket_view": True, "static_graph": True}),
    "pruned": Mode("pruned", {"gradient_as_bucket_view": True}, {}),
    "momentum": Mode(
        "pruned, momentum, clipping", {"gradient_as_bucket_view": True}, {"momentum": 0.9, "clip_norm": 1.0}
    ),
}


class Training:
    """A model in DDP in one mode, with its optimizer. It begins with GPT-2's initial values.

    Args:
        model: on its device.
        group: what DDP exchanges gradients over.
        batches: (tokens, targets) on the model's device, used in turn.
    """

    def __init__(
        self,
        model: GPT,
        mode: Mode,
        group: dist.ProcessGroup,
        batches: list[tuple[torch.Tensor, torch.Tensor]],
        *,
        bucket_mb: int,
        lr: float,
    ):
        model.reset()
        self.ddp = DistributedDataParallel(model, process_group=group, bucket_cap_mb=bucket_mb, **mode.ddp)
        self.hook = None
        if mode.hook is not None:
            self.hook = PrunedGradients(**mode.hook).register(self.ddp)
        self.optimizer = torch.optim.SGD(self.ddp.parameters(), lr=lr)
        self.lr = lr
        self.batches = batches
        self.input = tuple(torch.clone(part) for part in batches[0])  # a captured graph reads from fixed addresses
        self.device = self.input[0].device
        self.n_steps = 0

    def step(self, exchange: bool) -> torch.Tensor:
        """Forward, backward and update, with the exchange of gradients or without. Returns the loss.

        Without the exchange the learning rate is 0: the ranks' parameters stay equal.
        """
        self.optimizer.zero_grad()
        with contextlib.nullcontext() if exchange else self.ddp.no_sync():
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
                loss = self.ddp(*self.input)
            loss.backward()
        self.optimizer.param_groups[0]["lr"] = self.lr if exchange else 0.0
        self.optimizer.step()
        return loss.detach()

    def next_batch(self) -> None:
        for to, part in zip(self.input, self.batches[self.n_steps % len(self.batches)], strict=True):
            to.copy_(part, non_blocking=True)
        self.n_steps += 1

    @contextlib.contextmanager
    def stepper(
        self, exchange: bool, captured: bool, warmed_up: Callable[[], None]
    ) -> Iterator[Callable[[], torch.Tensor]]:
        """What makes one step, warmed up: `step`, or replays of a graph that holds it. Ends the graph at the end.

        Calls `warmed_up` after the warm-up and before the capture: a capture allocates what each replay uses.
        """
        for _ in range(STEPS_BEFORE_CAPTURE if captured and exchange else 3):
            self.next_batch()
            loss = self.step(exchange)
        warmed_up()
        if not captured:
            yield lambda: self.step(exchange)
            return
        graph = torch.cuda.CUDAGraph()
        # thread_local: threads of NCCL and spccl may ask for events while this thread captures.
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"):
            loss = self.step(exchange)

        def replay() -> torch.Tensor:
            graph.replay()
            return loss

        yield replay
        torch.cuda.synchronize()  # a graph must not run while it is destroyed
        graph.reset()

    def n_buckets(self) -> int:
        """Buckets of DDP, which makes them anew after the first step."""
        data = self.ddp._get_ddp_logging_data()
        sizes = data.get("rebuilt_bucket_sizes") or data["bucket_sizes"]
        return len(sizes.split(","))
