"""The simulation behind the loss curves of docs/TRAINING.md: bytes as spccl writes them, steps as torch's AdamW."""

from __future__ import annotations

import csv
import itertools
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
spccl = pytest.importorskip("spccl")
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench" / "quality"))

from checkpoints import Checkpoint  # noqa: E402
from coding import rounded, two_levels  # noqa: E402
from model import Layout, ModelSize, losses  # noqa: E402
from recipes import Recipe, named, parse  # noqa: E402
from simulate import Simulation, chunk_listed  # noqa: E402
from text import windows  # noqa: E402
from wire import all_reduce_bytes, chunk_bytes, frame_bytes, slice_stats  # noqa: E402

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


@pytest.mark.parametrize("n_sent", [1, 41, 64, 348, 1024, 2048, 4000])
def test_bytes_of_a_chunk_are_those_of_the_wrapper(n_sent: int) -> None:
    from spccl.optim.packed import Layout

    assert chunk_bytes(torch.tensor([n_sent]), 4096).item() == Layout(4096, n_sent / 4096).row_bytes


def test_chunk_lists_exactly_k_of_each_and_two_levels() -> None:
    x = torch.randn(2, 3 * 4096, generator=torch.Generator().manual_seed(4))
    x[0, 4096:8192] = x[0, 4096:8192].sign()  # equal magnitudes: the first ones
    whole = torch.tensor([False, False, True])
    listed = chunk_listed(x, torch.tensor([410]), whole)
    assert listed.unflatten(-1, (-1, 4096)).sum(-1).tolist() == [[410, 410, 4096]] * 2
    assert listed[0, 4096 : 4096 + 410].all()
    coded = two_levels(torch.where(listed, x, 0.0), whole)
    assert [len(row.abs().unique()) for row in coded[:, :4096]] == [3, 3]  # 0 and two levels
    assert torch.equal(coded[:, 8192:], x[:, 8192:]) and (coded * x >= 0).all()
    assert abs(coded[1, :4096].abs().sum() / x[1, :4096][listed[1, :4096]].abs().sum() - 1) < 0.005


def test_a_queue_that_is_cut_off_ends_with_the_same_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A queue that stops at every evaluation ends with the losses of one that never stops. Its clock counts calls."""
    import run

    recipes = "dense: mode=dense\nlocal: every=2 density=0.1 select=chunk wire=2bit outer_momentum=0.5\n"
    (tmp_path / "recipes.txt").write_text(recipes)
    text = torch.randint(0, 256, (9000,), generator=torch.Generator().manual_seed(1)).to(torch.uint8)
    torch.save({"train": text, "held_out": text[:3000].clone(), "digest": "random"}, tmp_path / "text.pt")

    def call(name: str, seconds: int) -> int:
        options = "--device cpu --size tiny --steps 6 --batch 1 --evaluate-every 2"
        options += " --evaluate-windows 2 --final-windows 4"
        paths = {"--text-cache": "text.pt", "--recipes": "recipes.txt", "--checkpoints": name, "--out": f"{name}.csv"}
        words = [word for option, path in paths.items() for word in (option, str(tmp_path / path))]
        monkeypatch.setattr(sys, "argv", ["run.py", *options.split(), *words, "--seconds", str(seconds)])
        clock = itertools.count()
        monkeypatch.setattr(run, "time", SimpleNamespace(monotonic=lambda: float(next(clock))))
        try:
            run.main()
        except SystemExit as end:
            return int(end.code or 0)
        return 0

    def rows(name: str) -> list[str]:
        lines = (tmp_path / f"{name}.csv").read_text().splitlines()
        return [line.rpartition(",")[0] for line in lines if not line.startswith("#")]

    assert call("straight", 1000) == 0
    assert len(rows("straight")) == 1 + 2 * 3
    assert [call("pieces", 3), call("pieces", 3)] == [3, 3]
    assert len(rows("pieces")) == 1 + 2
    with (tmp_path / "pieces.csv").open("a") as file:  # killed between a row and the next checkpoint
        file.write("dense,0,6,4,0,0,0,0,9.9,9.9,0,0\n")
    assert [call("pieces", 3) for _ in range(4)] == [3, 3, 3, 0]
    assert rows("pieces") == rows("straight")
    assert not list((tmp_path / "pieces").glob("*"))


def test_a_checkpoint_that_is_not_complete_is_not_used(tmp_path: Path) -> None:
    saved = Checkpoint(tmp_path / "run", most_bytes=1000)
    saved.save({"step": 1, "x": torch.arange(2000)})
    assert max(p.stat().st_size for p in (tmp_path / "run").iterdir()) == 1000
    saved.save({"step": 2, "x": torch.arange(2000)})
    assert saved.load()["step"] == 2
    (tmp_path / "run.new").mkdir()  # killed while it wrote the next one
    (tmp_path / "run.new" / "part-0").write_bytes(b"half")
    assert saved.load()["step"] == 2
    (tmp_path / "run").rename(tmp_path / "run.old")  # killed between the two renames
    assert torch.equal(saved.load()["x"], torch.arange(2000))
    saved.save({"step": 3})
    assert saved.load() == {"step": 3} and not (tmp_path / "run.old").exists()
    saved.remove()
    assert saved.load() is None


LOSSLESS = [{"density": 0.1}, {"density": 0.1, "select": "rotate"}, {"density": 0.1, "select": "chunk"}]
LOSSLESS += [{"density": 0.1, "sum_density": 0.1}, {"wire": "1bit"}, {"wire": "1bit", "magnitude": "rms", "chunk": 512}]


@pytest.mark.parametrize("fields", LOSSLESS, ids=lambda fields: "-".join(map(str, fields.values())))
def test_nothing_is_lost(fields: dict[str, object]) -> None:
    """What is sent plus what is kept, by workers and owners, is what there was: the mean of the workers' copies does
    not depend on the exchange."""
    sim = simulation(Recipe(weight_decay=0.0, **fields), workers=4)
    for _ in range(3):  # the first update of Adam has one magnitude
        sim.advance()

    def mean_of_copies() -> torch.Tensor:
        return sim.state["weights"] - sim.state["unsent"].mean(0) - sim.state.get("kept", torch.zeros(1))

    before = mean_of_copies()
    unsent = sim.state["unsent"].clone()
    mean = sim.exchange(torch.tensor(0.1))
    sim.state["weights"].sub_(mean[0])
    after = mean_of_copies()
    torch.testing.assert_close(after, before, rtol=0, atol=2e-5)  # the sum is rounded to bfloat16
    sent = unsent - sim.state["unsent"]
    share = (sent != 0).float().mean().item()
    assert share > 0.4 if "wire" in fields else 0.02 < share < 0.35
    back = (mean != 0).float().mean().item()
    assert back > 0.4 if "wire" in fields else back < (0.12 if "sum_density" in fields else 0.4)


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


RANKS_RECIPES = [
    Recipe(moment="local", every=4, density=0.1, select="chunk", wire="float32", decay=0.5),
    Recipe(moment="local", every=4, density=0.1, select="chunk"),
    Recipe(moment="local", every=4, density=0.1, select="chunk", wire="2bit", look_ahead=0.5, outer_momentum=0.5),
    Recipe(moment="local", wire="1bit", warmup=3, look_ahead=0.5),
]


@pytest.mark.parametrize("recipe", RANKS_RECIPES, ids=["decay", "chunk", "2bit", "1bit"])
def test_the_wrapper_in_ranks_follows_the_simulation(recipe: Recipe) -> None:
    """ranks.py and run.py with one worker: chunks have no sampled threshold, so only rounding differs, and
    which of nearly equal entries it makes the larger."""
    import ranks
    from model import SIZES

    text = torch.randint(0, 256, (5000,), generator=torch.Generator().manual_seed(1)).to(torch.uint8)
    args = SimpleNamespace(size="tiny", steps=12, batch=1, seed=3)
    trainer = ranks.Trainer(args, recipe, text)
    run = {"steps": 12, "workers": 1, "batch": 1, "seed": 3, "compile": False, "graph": False}
    sim = Simulation(SIZES["tiny"], recipe, run, text)
    start = sim.state["weights"].clone()
    for _ in range(12):
        sim.advance()
        trainer.advance()
    moved = (sim.state["weights"] - start).norm()
    expected = sim.layout.views(sim.state["weights"][None])
    with torch.no_grad(), trainer.optimizer.global_weights():
        off = sum((trainer.weights[name] - z).square().sum() for name, z in expected.items()).sqrt()
    assert moved > 0.1 and off / moved < 0.02, off / moved


@pytest.mark.parametrize(
    "field, value",
    [
        ("mode", "gradient"),
        ("sum_density", 0.1),
        ("select", "rotate"),
        ("moment", "ratio"),
        ("power", 1),
        ("decay_in_change", False),
    ],
)
def test_ranks_refuses_what_the_wrapper_does_not_have(field: str, value: object) -> None:
    import ranks

    with pytest.raises(ValueError, match=f"recipe has {field}={value}, which SparseSync does not have, wanted"):
        ranks.settings_of(Recipe(**{field: value}), steps=10)


PUBLISHED = [
    ("quality-25m", "recipes", "25m"),
    ("quality-25m-every-16", "recipes", "25m"),
    ("quality-25m-1000-steps", "recipes-25m-1000-steps", "25m"),
    ("quality-25m-16-ranks", "recipes-16-ranks", "25m"),
    ("quality-25m-16-ranks-5000-steps", "recipes-16-ranks", "25m"),
    ("quality-25m-4-ranks", "recipes-16-ranks", "25m"),
    ("quality-3m", "recipes-3m", "3m"),
    ("quality-half", "recipes-half", "half"),
    ("quality-tiny", "recipes-tiny", "tiny"),
    ("quality-ranks", "recipes", "tiny"),
]


@pytest.mark.parametrize("results, recipes, size", PUBLISHED)
def test_published_curves_have_their_recipes(results: str, recipes: str, size: str) -> None:
    """Each name in a CSV is in the file of recipes, which sends the densities that the CSV has."""
    from model import SIZES
    from recipes import read_recipes

    repository = Path(__file__).resolve().parents[2]
    known = read_recipes(repository / "bench" / "quality" / f"{recipes}.txt")
    lines = (repository / "bench" / "results" / f"{results}.csv").read_text().splitlines()
    rows = list(csv.DictReader(line for line in lines if not line.startswith("#")))
    layout = Layout(SIZES[size])
    matrices = sum(layout.numel(name) for name in layout.matrices)
    assert rows
    for row in rows:
        recipe, step = known[row["name"].partition(", simulated")[0].partition(", SparseSync")[0]], int(row["step"])
        before = max((int(r["step"]) for r in rows if same_run(r, row) and int(r["step"]) < step), default=0)
        if recipe.mode == "dense" or not row["density"]:
            continue
        sent = [recipe.density_at(t, int(row["steps"])) for t in range(before + 1, step + 1) if t % recipe.every == 0]
        vectors = len(sent) * (layout.n_params - matrices)
        wanted = (sum(sent) * matrices + vectors) / (step - before) / layout.n_elems
        off = 0.5 if recipe.mode == "gradient" else 0.08  # residuals pile up below the sampled threshold
        assert float(row["density"]) == pytest.approx(wanted, rel=off), row


def same_run(a: dict[str, str], b: dict[str, str]) -> bool:
    return all(a[key] == b[key] for key in ("name", "seed", "steps"))


def test_names_of_recipes_may_have_commas() -> None:
    recipes = {name: Recipe() for name in ("dense", "H16 chunk", "H16 chunk 2bit", "raw, top 1%")}
    assert named("", recipes) == list(recipes)
    assert named("raw, top 1%,H16 chunk,dense", recipes) == ["dense", "H16 chunk", "raw, top 1%"]
    for only, wrong in (("dens", "dens"), ("dense,top 9%", "top 9%"), ("raw, top 1%,H16", "H16")):
        with pytest.raises(ValueError, match=f"--only: {wrong} is not one of dense; H16 chunk"):
            named(only, recipes)
