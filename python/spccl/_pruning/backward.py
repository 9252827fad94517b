"""Whether torch's backward pass is under way, and calls at its end. Only this file has torch's names for them."""

from collections.abc import Callable

import torch


def pass_number() -> int:
    """torch's number of the backward pass under way on this thread; -1 outside of one."""
    return torch._C._current_graph_task_id()


def in_backward() -> bool:
    return pass_number() != -1


def at_end_of_backward(call: Callable[[], None]) -> None:
    """Run `call` when the backward pass under way has ended, after the calls queued before."""
    torch.autograd.Variable._execution_engine.queue_callback(call)
