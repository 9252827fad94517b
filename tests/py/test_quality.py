"""The simulation behind the loss curves of docs/TRAINING.md: bytes as spccl writes them, steps as torch's AdamW."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
spccl = pytest.importorskip("spccl")
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench" / "quality"))

from model import Layout, ModelSize, losses  # noqa: E402
from recipes import Recipe, parse  # noqa: E402
from simulate import Simulation, rounded  # noqa: E402
from text import windows  # noqa: E402
from wire import all_reduce_bytes, frame_bytes, slice_stats  # noqa: E402

SIZE = ModelSize(layers=1, width=64, heads=2, context=32)


def simulation(recipe: Recipe, workers: int = 2, steps: int = 20) -> Simulation:
    text = torch.randint(0, 256, (5000,), generator=torch.Generator().manual_seed(1)).to(torch.uint8)
    run = {"steps": steps, "workers": workers, "batch": 2, "seed": 3, "compile": False, "graph": False}
    return Simulation(SIZE, recipe, run, text)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("density", [0.0, 0.0002, 0.003, 0.03, 0.12, 0.3, 0.95, 1.0])
def test_frame_bytes_are_those_of_encode(dtype: torch.dtype, density: float) -> None:
    n = 131072 // dtype.itemsize
    generator = torch.Generator().manual_seed(5)
    for full in (False, True):
        x = torch.rand(n, generator=generator).add(0.5).to(dtype)
        x[torch.rand(n, generator=generator) >= density] = 0
        if full:
            x[512:1024] = 1
        nnz, blocks = slice_stats(x != 0, n)
        encoded = spccl.encode(x)
        assert len(list(spccl.inspect(encoded))) == 1
        assert frame_bytes(nnz, n, dtype.itemsize, blocks).item() == len(bytes(encoded))


def test_all_reduce_bytes_of_a_dense_vector() -> None:
    sent = torch.ones(4, 65536, dtype=torch.bool)
    per_slice = 131072 + 64 + 32
    assert all_reduce_bytes(sent, sent[0], 4).item() == 0.75 * 2 * 2 * per_slice


@pytest.mark.parametrize("mode", ["dense", "update"])
def test_one_worker_is_torch_adamw(mode: str) -> None:
    recipe = Recipe(mode=mode, moment="local", wire="float32")
    sim = simulation(recipe, workers=1)
    layout = Layout(SIZE)
    flat = layout.initial(SIZE, 3)[None]
    weights = {name: view.clone().requires_grad_() for name, view in layout.views(flat).items()}
    optimizer = torch.optim.AdamW(weights.values(), lr=recipe.lr, betas=(0.9, 0.95), weight_decay=0.1)
    for t in range(8):
        sim.advance()
        optimizer.param_groups[0]["lr"] = recipe.lr_at(t + 1, 20)
        optimizer.zero_grad()
        losses(weights, windows(sim.text, sim.tables["starts"][t], SIZE.context + 1), SIZE).sum().backward()
        optimizer.step()
    for name, view in layout.views(sim.state["weights"][None]).items():
        torch.testing.assert_close(view, weights[name].detach(), rtol=1e-4, atol=1e-5)


def test_rounded_is_a_cast_to_bfloat16() -> None:
    x = torch.randn(20000, generator=torch.Generator().manual_seed(2)) * torch.logspace(-30, 30, 20000)
    x[:4] = torch.tensor([0.0, -0.0, 1.00390625, 1.01171875])  # zeros and ties
    assert torch.equal(rounded(x, "bfloat16"), x.to(torch.bfloat16).float())
    assert torch.equal(rounded(x, "float32"), x)


@pytest.mark.parametrize("select", ["top", "rotate"])
def test_nothing_is_lost(select: str) -> None:
    """What is sent plus what is kept is what there was: the mean of the workers' copies does not depend on density."""
    sim = simulation(Recipe(density=0.1, select=select, weight_decay=0.0), workers=4)
    sim.advance()
    before = sim.state["weights"] - sim.state["unsent"].mean(0)
    unsent = sim.state["unsent"].clone()
    mean = sim.exchange(torch.tensor(0.1))
    sim.state["weights"].sub_(mean[0])
    after = sim.state["weights"] - sim.state["unsent"].mean(0)
    torch.testing.assert_close(after, before, rtol=0, atol=2e-5)  # the sum is rounded to bfloat16
    sent = unsent - sim.state["unsent"]
    share = (sent != 0).float().mean().item()
    assert 0.02 < share < 0.35


def test_a_saved_run_goes_on_bit_for_bit() -> None:
    recipe = Recipe(density=0.05, every=2, outer_momentum=0.5)
    first, second = simulation(recipe), simulation(recipe)
    for _ in range(3):
        first.advance()
    second.load(first.save())
    for _ in range(3):
        first.advance()
        second.advance()
    for name, tensor in first.state.items():
        assert torch.equal(tensor, second.state[name]), name


def test_a_wrong_field_is_named() -> None:
    with pytest.raises(ValueError, match="'densty'"):
        parse("x: densty=1")
