"""One bit per value (spccl.optim.signs) on one rank: shards, states, what is refused."""

from __future__ import annotations

import copy
import re
import types

import pytest

torch = pytest.importorskip("torch", reason="SparseSync is for torch, and none is installed")

from spccl._pruning.sums import Piece  # noqa: E402
from spccl.optim import SparseSync  # noqa: E402
from spccl.optim.signs import CHUNK, KeptSigns  # noqa: E402


def conv(channels_last: bool = False) -> torch.nn.Module:
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Conv2d(16, 40, 3), torch.nn.Tanh(), torch.nn.Conv2d(40, 24, 3))
    return net.to(memory_format=torch.channels_last) if channels_last else net


def train(net, opt, n_steps: int, first: int = 0) -> None:
    for seed in range(first, first + n_steps):
        opt.zero_grad()
        net(torch.randn(2, 16, 8, 8, generator=torch.Generator().manual_seed(seed))).square().mean().backward()
        opt.step()


def sync(net, **settings) -> SparseSync:
    return SparseSync(torch.optim.AdamW(net.parameters(), lr=1e-2), bits=1, **settings)


def keep_something(opt: SparseSync) -> None:
    """One rank alone keeps nothing at the owner: all of its sums have one magnitude."""
    generator = torch.Generator().manual_seed(5)
    for kept in opt.transfers.kept.values():
        for part in kept.parts:
            part.values.copy_(torch.randn(part.values.shape, generator=generator) * 1e-3)


@pytest.mark.parametrize("n_ranks", [1, 2, 3, 5, 9, 16])
def test_shards_hold_each_element_once(n_ranks):
    """Parameters that end within a chunk, more ranks than chunks, shards behind the end."""
    numels, begin, pieces = (5000, CHUNK, 3 * CHUNK + 1), 0, []
    for index, numel in enumerate(numels):
        pieces.append(Piece(f"{index}", begin, numel, True))
        begin += -(-numel // CHUNK) * CHUNK
    bucket = types.SimpleNamespace(pieces=lambda: pieces, length=begin, device=torch.device("cpu"))
    owned = [torch.zeros(numel) for numel in numels]
    sizes = set()
    for rank in range(n_ranks):
        kept = KeptSigns(bucket, types.SimpleNamespace(number=rank, n_pruning=n_ranks))
        sizes.add(kept.n_chunks)
        assert int(kept.lengths.sum()) == sum(part.values.numel() for part in kept.parts)
        assert kept.lengths.min() >= 0 and kept.lengths.max() <= CHUNK
        for part in kept.parts:
            owned[int(part.name)][part.first : part.first + part.values.numel()] += 1
    assert all(bool((n == 1).all()) for n in owned) and len(sizes) == 1


def test_nothing_is_lost_to_a_dense_exchange():
    """What sender and owner kept is in the next exchange of whole values."""
    net = conv()
    opt = sync(net)
    train(net, opt, 3)
    keep_something(opt)
    with opt.global_weights():
        start = [p.detach().clone() for p in net.parameters()]
    state = opt.state_dict()["sparse_sync"]["parameters"]
    assert [entry["kept"] is not None for entry in state] == [True, False, True, False]
    opt.consolidate()
    for z, p, entry in zip(start, net.parameters(), state, strict=True):
        due = entry["local"] - entry["global"]
        if entry["kept"] is not None:
            due = due + entry["kept"]["values"].view_as(due)
        torch.testing.assert_close(p - z, due, rtol=1e-4, atol=1e-6)


def test_a_state_of_another_look_ahead():
    """What is kept, as what is unsent, counts by the look-ahead: a dense exchange gives the same weights."""
    nets = [conv(), conv()]
    opts = [sync(nets[0]), sync(nets[1], look_ahead=0.25)]
    train(nets[0], opts[0], 3)
    keep_something(opts[0])
    opts[1].load_state_dict(copy.deepcopy(opts[0].state_dict()))
    for opt in opts:
        opt.consolidate()
    for a, b in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_nothing_changes_where_nothing_did():
    net = conv()
    before = [p.detach().clone() for p in net.parameters()]
    opt = sync(net)
    for _ in range(2):
        opt.step()  # no gradients
    assert all(torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))


def test_inf_and_nan_are_dropped_and_counted():
    net = conv()
    opt = sync(net, check_finite=False)
    train(net, opt, 1)
    with torch.no_grad():
        net[0].weight.view(-1)[[3, 700]] = torch.tensor([float("inf"), float("nan")])
    opt.consolidate()
    assert opt.stats()["nonfinite_elems"] == 2
    assert all(bool(p.isfinite().all()) for p in net.parameters())


def test_a_state_of_other_shards_is_refused_by_name():
    """Of another memory format, of other buckets, of other settings. reshard() and consolidate() make it fit."""
    net, last, dense = conv(), conv(channels_last=True), conv()
    opt = sync(net)
    train(net, opt, 3)
    keep_something(opt)
    state = copy.deepcopy(opt.state_dict())
    others = [sync(last), SparseSync(torch.optim.AdamW(dense.parameters()), density=0.1)]
    for other in others:
        with pytest.raises(ValueError, match="what the rank kept of sums of parameter 0, elements 0 to 5760, which"):
            other.load_state_dict(state)
    for new in (SparseSync.reshard([copy.deepcopy(state)], 1)[0], None):
        if new is None:
            opt.consolidate()
            new = copy.deepcopy(opt.state_dict())
        for other in others:
            other.load_state_dict(copy.deepcopy(new))
            other.consolidate()
        for a, b in zip(last.parameters(), dense.parameters(), strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize(
    "settings, words",
    [
        ({"density": 0.5}, "density=0.5, wanted None with bits=1, which prunes nothing"),
        ({"density": lambda exchange: 0.5}, "wanted None with bits=1, which prunes nothing"),
        ({"chunk": 256}, "chunk=256, wanted 0 with bits=1"),
        ({"wire_dtype": torch.bfloat16}, "bits=1, wanted None with wire_dtype"),
    ],
)
def test_settings_that_fight(settings, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        sync(conv(), **settings)


def test_float64_is_refused():
    with pytest.raises(ValueError, match="bits=1 with parameter 0 of float64"):
        sync(conv().double())
