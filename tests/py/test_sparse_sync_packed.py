"""Two bits per value (spccl.optim.packed), and exchanges that end in the next forward pass (spccl.optim.overlap)."""

from __future__ import annotations

import copy
import re

import pytest

torch = pytest.importorskip("torch", reason="SparseSync is for torch, and none is installed")

from spccl._pruning import ranks  # noqa: E402
from spccl.optim import SparseSync  # noqa: E402
from spccl.optim.packed import Layout, add_packed, pack, packed_bytes  # noqa: E402


def selected(n_rows: int, chunk: int, n_sent: int, seed: int) -> torch.Tensor:
    """Rows with up to n_sent entries of two magnitudes: none in the first row, one in the second."""
    g = torch.Generator().manual_seed(seed)
    table = torch.zeros(n_rows, chunk)
    for r in range(n_rows):
        count = min(r, 1) if r < 2 else n_sent
        places = torch.randperm(chunk, generator=g)[:count]
        levels = torch.rand(2, generator=g).add(0.1).to(torch.bfloat16).float()
        signs = torch.randint(0, 2, (count,), generator=g) * 2 - 1
        table[r, places] = levels[torch.randint(0, 2, (count,), generator=g)] * signs
    return table.flatten()


@pytest.mark.parametrize("chunk", [256, 1024, 4096])
@pytest.mark.parametrize("density", [1e-6, 0.01, 0.085, 0.25, 0.5, 0.9, 0.9999])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_is_unpacked_is_what_was_packed(chunk, density, dtype):
    layout = Layout(chunk, density)
    tail = torch.randn(12, generator=torch.Generator().manual_seed(1))
    values = torch.cat([selected(5, chunk, layout.n_sent, 3), tail]).to(dtype)
    packed = pack(values, 5 * chunk, layout)
    assert packed.dtype == torch.uint8 and len(packed) == packed_bytes(len(values), 5 * chunk, layout, values.itemsize)
    out = torch.zeros_like(values)
    add_packed(packed, out, 5 * chunk, layout, 0)
    assert torch.equal(out, values)
    add_packed(packed, out, 5 * chunk, layout, 0)
    assert torch.equal(out, values + values)


def test_a_row_bit_by_bit():
    """The example of docs/FORMAT.md, section 9."""
    layout = Layout(256, 3 / 256)
    assert (layout.n_sent, layout.low_bits, layout.row_bytes) == (3, 6, 4 + 3 + 1 + 1)
    values = torch.zeros(256)
    values[3], values[66], values[200] = 1.0, -2.0, 1.0
    packed = pack(values, 256, layout)
    assert bytes(packed.tolist()).hex() == "803f0040" + "838000" + "25" + "0c"


def test_bytes_of_a_chunk():
    """What docs/FORMAT.md says: entries of 4096, and bytes of a row with them."""
    assert {d: Layout(4096, d).row_bytes for d in (0.01, 0.0156, 0.085, 0.25, 0.5)} == {
        0.01: 60, 0.0156: 84, 0.085: 330, 0.25: 772, 0.5: 1028,
    }  # fmt: skip


def all_reduce_bytes(density: float, ranks: int) -> float:
    """Bytes per entry that a rank sends in a sparse all-reduce of bfloat16: its own at `density` and the union."""

    def values(d: float) -> float:
        return min(2.0, 1 / 8 + 2 * d, 1 / 256 + 3 * d)

    return (values(density) + values(1 - (1 - density) ** ranks)) * (ranks - 1) / ranks


@pytest.mark.parametrize("ranks, density, wins", [(4, 0.085, True), (8, 0.085, True), (16, 0.085, True),
                                                  (16, 0.0156, True), (32, 0.085, False)])  # fmt: skip
def test_when_two_bits_are_fewer_bytes_than_bfloat16(ranks, density, wins):
    packed = Layout(4096, density).row_bytes / 4096 * (ranks - 1)
    assert (packed < all_reduce_bytes(density, ranks)) == wins, (packed, all_reduce_bytes(density, ranks))


def test_damaged_bytes_are_refused():
    layout = Layout(256, 0.05)
    packed = pack(selected(3, 256, layout.n_sent, 5), 768, layout)
    for at in range(4, 4 + layout.n_bits // 8):
        packed[at] = 255
    with pytest.raises(RuntimeError, match=r"what rank 2 sent lists .* wanted at most 13 of 256"):
        add_packed(packed, torch.zeros(768), 768, layout, 2)


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = torch.nn.Linear(80, 100)
        self.attention = torch.nn.MultiheadAttention(100, 4)
        self.last = torch.nn.Linear(100, 60)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        return self.last(x + self.attention(x, x, x, need_weights=False)[0])


def step(opt, net, seed: int) -> None:
    opt.zero_grad()
    net(torch.randn(16, 80, generator=torch.Generator().manual_seed(seed))).square().mean().backward()
    opt.step()


@pytest.mark.parametrize("settings", [{}, {"chunk": 256, "bits": 2}, {"every": 3, "outer_momentum": 0.9}])
def test_overlap_on_one_rank(settings):
    """MultiheadAttention uses the weights of its child out_proj without calling it."""
    nets = [Net(), Net()]
    kinds = ({"overlap": nets[0]}, {})
    opts = [
        SparseSync(torch.optim.AdamW(net.parameters(), lr=1e-2), density=0.05, bucket_mb=0.01, **settings, **kind)
        for net, kind in zip(nets, kinds, strict=True)
    ]
    for t in range(7):
        for opt, net in zip(opts, nets, strict=True):
            step(opt, net, t)
        assert bool(opts[0].transfers.pending) == ((t + 1) % settings.get("every", 1) == 0)
    states = [net.state_dict() for net in nets]
    assert not opts[0].transfers.pending
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


@pytest.mark.parametrize("overlap_again", [True, False])
def test_a_later_object_ends_the_overlap_of_an_earlier_one(overlap_again):
    """What the earlier one has pending does not reach the later one's weights, and its hooks are gone."""
    nets, kept, kwargs = [Net(), Net()], [], {"density": 0.05, "bucket_mb": 0.01}
    for net, overlap in zip(nets, (nets[0], None), strict=True):
        earlier = SparseSync(torch.optim.AdamW(net.parameters(), lr=1e-2), overlap=overlap, **kwargs)
        step(earlier, net, 0)
        later = SparseSync(
            torch.optim.AdamW(net.parameters(), lr=1e-2), overlap=overlap if overlap_again else None, **kwargs
        )
        assert not earlier.transfers.pending and not earlier.transfers.ends_later
        for t in range(1, 4):
            step(later, net, t)
        kept.append(later)  # without it its hooks would be gone too
    states = [net.state_dict() for net in nets]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert len(nets[0].first._forward_pre_hooks) == overlap_again
    assert len(nets[0].first.weight._post_accumulate_grad_hooks or ()) == overlap_again


@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace")
def test_overlap_of_a_module_that_compiles_itself():
    nets = [Net(), Net()]
    nets[0].compile(backend="eager")
    for net, overlap in zip(nets, (nets[0], None), strict=True):
        opt = SparseSync(torch.optim.AdamW(net.parameters(), lr=1e-2), density=0.05, bucket_mb=0.01, overlap=overlap)
        for t in range(3):
            step(opt, net, t)
            assert bool(opt.transfers.pending) == (overlap is not None)
    states = [net.state_dict() for net in nets]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_refused_overlap_changes_no_weight(monkeypatch):
    """Rank 0's weights are sent only after all that is refused."""
    sent = []
    monkeypatch.setattr(ranks.Ranks, "broadcast", lambda self, tensor: sent.append(tensor))
    with pytest.raises(ValueError, match="in no module of overlap"):
        SparseSync(torch.optim.SGD(Net().parameters(), lr=0.1), overlap=torch.nn.Linear(3, 3))
    assert not sent


def test_overlap_finds_a_parameter_that_was_used_elsewhere():
    net = Net()
    opt = SparseSync(torch.optim.SGD(net.parameters(), lr=0.1), overlap=net, bucket_mb=0.01)
    step(opt, net, 0)
    with pytest.raises(RuntimeError, match="a gradient, and the exchange before was not waited for"):
        (net.last.weight.square().sum()).backward()
    opt.wait()
    net.last.weight.square().sum().backward()


@pytest.mark.parametrize(
    "settings, error, words",
    [
        ({"bits": 3}, ValueError, "bits=3, wanted 1, 2, or None"),
        ({"bits": 2}, ValueError, "None without chunk: set chunk=4096"),
        ({"bits": 2, "chunk": 256, "wire_dtype": torch.bfloat16}, ValueError, "None with wire_dtype"),
        ({"overlap": 1}, TypeError, "overlap is a int, wanted the model"),
        ({"overlap": torch.nn.Linear(3, 3)}, ValueError, "is in no module of overlap; pass the whole model"),
    ],
)
def test_settings(settings, error, words):
    with pytest.raises(error, match=re.escape(words)):
        SparseSync(torch.optim.SGD(Net().parameters(), lr=0.1), **settings)


def test_a_state_resumes_with_two_bits():
    nets = [Net(), Net()]
    opts = [SparseSync(torch.optim.AdamW(n.parameters()), density=0.1, chunk=256, bits=2, overlap=n) for n in nets]
    for t in range(3):
        step(opts[0], nets[0], t)
    opts[1].load_state_dict(copy.deepcopy(opts[0].state_dict()))  # torch shares what it loads
    for t in range(3, 6):
        for opt, net in zip(opts, nets, strict=True):
            step(opt, net, t)
    states = [opt.state_dict()["sparse_sync"]["parameters"] for opt in opts]
    for a, b in zip(*states, strict=True):
        assert torch.equal(a["global"], b["global"]) and torch.equal(a["local"], b["local"])
