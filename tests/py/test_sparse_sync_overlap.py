"""SparseSync(overlap=model) on one rank: who waits for the exchange, and what is left when the object is dropped.

One rank alone has pending exchanges too: what it sent is missing from its weights until they end.
"""

from __future__ import annotations

import copy
import io
import warnings
import weakref

import pytest

torch = pytest.importorskip("torch", reason="SparseSync is for torch, and none is installed")

from torch.nn.utils import prune, spectral_norm, weight_norm  # noqa: E402

from spccl.optim import SparseSync  # noqa: E402


class Lists(torch.nn.Module):
    """Parameters in modules that are never called: a list, one in a list of modules, and a module without forward()."""

    def __init__(self):
        super().__init__()

        def param():
            return torch.nn.Parameter(torch.randn(70, 70) / 8)

        self.own = torch.nn.ParameterList([param()])
        self.nested = torch.nn.ModuleList([torch.nn.ParameterDict({"weight": param()})])
        self.holder = torch.nn.Module()
        self.holder.weight = param()

    def forward(self, x):
        return x @ self.own[0] @ self.nested[0]["weight"] @ self.holder.weight


def pruned(layer):
    return prune.l1_unstructured(layer, "weight", 0.3)


LAYERS = {
    "weight_norm": lambda: weight_norm(torch.nn.Linear(70, 70)),
    "spectral_norm": lambda: spectral_norm(torch.nn.Linear(70, 70)),
    "prune": lambda: pruned(torch.nn.Linear(70, 70)),
    "lists": Lists,
}


def made(layer, overlap: bool):
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch recommends its parametrizations
        net = torch.nn.Sequential(layer(), torch.nn.Tanh(), torch.nn.Linear(70, 70))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    return net, SparseSync(optimizer, density=0.1, overlap=net if overlap else None)


def train(net, opt, steps: int) -> None:
    for t in range(steps):
        opt.zero_grad()
        net(torch.randn(8, 70, generator=torch.Generator().manual_seed(t))).square().mean().backward()
        opt.step()


@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
def test_weights_used_before_the_forward_pass_of_their_module(layer):
    """A pre-hook that was there first computes a weight; a list's parameters are used by the module above it."""
    (net, opt), (other, plain) = made(layer, True), made(layer, False)
    train(net, opt, 6)
    assert opt.transfers.pending
    train(other, plain, 6)
    opt.wait()
    for ours, theirs in zip(net.parameters(), other.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_loading_a_model_ends_the_exchange():
    net, opt = made(Lists, True)
    start = {name: value.clone() for name, value in net.state_dict().items()}
    train(net, opt, 2)
    assert opt.transfers.pending
    net.load_state_dict(start)
    assert not opt.transfers.pending
    with torch.no_grad():
        net(torch.randn(2, 70))
    assert all(torch.equal(value, start[name]) for name, value in net.state_dict().items())


def test_a_copy_or_a_saved_model_waits_for_nothing():
    net, opt = made(Lists, True)
    train(net, opt, 2)
    file = io.BytesIO()
    torch.save(net, file)
    file.seek(0)
    for other in (copy.deepcopy(net), torch.load(file, weights_only=False)):
        train(net, opt, 1)
        assert opt.transfers.pending
        other(torch.randn(8, 70)).sum().backward()
        assert opt.transfers.pending


def test_a_dropped_object_leaves_nothing_in_the_model():
    """`del opt` ends the exchange, and frees hooks and buffers at once; a copy of the model keeps hooks that do
    nothing."""
    (net, opt), (other, plain) = made(Lists, True), made(Lists, False)
    train(net, opt, 3)
    train(other, plain, 3)
    assert opt.transfers.pending
    buffers = weakref.ref(opt.transfers)
    average = torch.optim.swa_utils.AveragedModel(net)
    del opt
    assert buffers() is None
    for module in net.modules():
        assert not module._forward_pre_hooks and not module._load_state_dict_pre_hooks
        assert not module._state_dict_pre_hooks
    for ours, theirs in zip(net.parameters(), other.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    average(torch.randn(2, 70))
