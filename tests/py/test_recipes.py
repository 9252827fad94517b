"""density=None: the recipe for a number of ranks, what was given wins, and where nothing was measured."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="SparseSync is for torch, and none is installed")

from spccl._pruning import recipes  # noqa: E402
from spccl._pruning.ranks import Ranks  # noqa: E402
from spccl.optim import SparseSync  # noqa: E402

RESULTS = Path(__file__).resolve().parents[2] / "bench" / "results"


def opt(n_ranks: int, kind=torch.optim.AdamW, **settings) -> SparseSync:
    """One rank that takes itself for one of `n_ranks`; it exchanges nothing."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Ranks, "n_pruning", property(lambda ranks: n_ranks))
        return SparseSync(kind(torch.nn.Linear(100, 100).parameters(), lr=1e-3), **settings)


@pytest.fixture(autouse=True)
def warns_again(monkeypatch):
    monkeypatch.setattr(recipes, "_warned", set())


@pytest.mark.parametrize("row", [*recipes.ADAM, *recipes.SGD], ids=lambda row: f"{row.ranks}-{row.source}")
def test_every_row_is_measured(row):
    """Its file is there, and SparseSync takes its settings together."""
    assert (RESULTS / row.source).exists()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made = opt(row.ranks, every=row.local_steps, **row.settings)
    assert {name: getattr(made.settings, name) for name in row.settings} == dict(row.settings)


def test_the_recipe_is_that_of_at_least_as_many_ranks():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = {n: opt(n) for n in (1, 2, 4, 5, 16)}
    first, last = (next(row for row in recipes.ADAM if row.ranks == n) for n in (4, 16))
    for n, row in ((2, first), (4, first), (5, last), (16, last)):
        assert str(row) in found[n].stats()["recipe"]
        assert all(getattr(found[n].settings, name) == value for name, value in row.settings.items())
    assert found[1].stats()["recipe"] == "one rank, which sends nothing"
    assert opt(4, density=0.1).stats()["recipe"] == "as given"
    assert opt(4, density=0.1).settings.look_ahead == 1.0  # as without recipes


def test_what_was_given_wins():
    made = opt(4, look_ahead=0.25, wire_dtype=None, warmup_steps=0)
    assert (made.settings.look_ahead, made.settings.wire_dtype, made.settings.warmup_steps) == (0.25, None, 0)
    assert made.settings.density == recipes.ADAM[0].settings["density"]
    assert "look_ahead" not in made.stats()["recipe"]
    one_bit = opt(16, bits=1, warmup_steps=3)
    assert (one_bit.settings.density, one_bit.settings.warmup_steps) == (1.0, 3)
    assert opt(16, chunk=4096).settings.bits is None  # chunks of one bit are not those
    packed = opt(4, every=16, chunk=4096, bits=2)  # whose values are not of 16 bits
    assert (packed.settings.density, packed.settings.wire_dtype) == (0.105, None)
    given = {"density": None, "look_ahead": None, "sum_density": 0.05}
    assert recipes.choose(given, 16, recipes.ADAM)[0]["look_ahead"] == 0.5


def test_beyond_what_was_measured_one_warning_names_the_nearest():
    most = max(row.ranks for row in recipes.ADAM if row.local_steps == 1)
    with pytest.warns(UserWarning, match=f"64 ranks prune.*The nearest.*measured with {most} pruning ranks") as seen:
        made = [opt(64), opt(64)]
    assert len(seen) == 1
    assert made[1].stats()["recipe"].startswith("not measured with 64 pruning ranks; ")
    with pytest.warns(UserWarning, match=r"density=None is 0\.01 here, which was not measured with this optimizer"):
        assert opt(4, torch.optim.SGD).settings.density == 0.01
