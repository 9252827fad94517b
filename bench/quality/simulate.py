"""Exact simulation of N data-parallel workers on one device: a step of each recipe on stacked, flat state.

State, all float32: `weights` [n] are the weights that all workers agree on; `unsent` [N, n] is what a worker has
subtracted from its own copy and not sent yet; `m`, `v` are Adam's moments, [N, n] per worker or [1, n] global; `kept`
[n] is what the owners of the shards have not sent of the averages.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch
from coding import rounded, signs, two_levels
from model import SLICE, TILE, Layout, ModelSize, losses
from recipes import Recipe
from text import windows
from torch import Tensor
from wire import all_gather_bytes, all_reduce_bytes, chunk_bytes, dense_bytes, one_bit_bytes

EPSILON = 1e-8
GLOBAL_MOMENTS = ("oracle", "averaged")  # second moments of the averaged gradient
SAMPLE = 4096  # entries that a threshold is estimated from


def adam_update(m: Tensor, v: Tensor, grad: Tensor, square: Tensor, s: dict[str, Tensor]) -> None:
    """Advance the moments. `square` is the gradient whose square v averages."""
    m.add_((grad - m) * (1 - s["beta1"]))
    v.add_((square * square - v) * (1 - s["beta2"]) * s["fresh"])


def adam_direction(m: Tensor, v: Tensor, s: dict[str, Tensor], moment: str, ratio: Tensor) -> Tensor:
    """Adam's step before the learning rate, with the second moment that `moment` names."""
    mean, second = m / s["fix1"], v / s["fix2"]
    n = s["workers"]
    if moment == "corrected":
        second = second / n + (1 - 1 / n) * mean * mean
    elif moment == "unbiased":
        second = second * (1 - s["noise_part"]) + s["noise_part"] * mean * mean
    elif moment == "scaled":
        second = second / n
    elif moment == "ratio":
        second = (second.unflatten(-1, (-1, TILE)) * ratio).flatten(-2)
    elif moment == "averaged":  # an entry may have its first gradient since the second moment last changed
        second = torch.maximum(second, mean * mean / n)
    return mean / (second.sqrt() + EPSILON)


def local_step(state: dict[str, Tensor], grad: Tensor, s: dict[str, Tensor], moment: str) -> None:
    """AdamW of each worker, on its own copy of the weights: the change goes to `unsent`."""
    g = grad.float()
    square = g.mean(0, keepdim=True) if moment in GLOBAL_MOMENTS else g
    adam_update(state["m"], state["v"], g, square, s)
    step = adam_direction(state["m"], state["v"], s, moment, state["ratio"])
    decay = s["decay"] * (state["weights"] - state["unsent"])
    state["unsent"].add_((step + decay) * s["lr"])


def global_step(state: dict[str, Tensor], mean: Tensor, s: dict[str, Tensor]) -> None:
    """AdamW of the averaged gradient `mean` [1, n], on the weights of all."""
    adam_update(state["m"], state["v"], mean, mean, s)
    step = adam_direction(state["m"], state["v"], s, "local", state["ratio"])[0]
    weights = state["weights"]
    weights.mul_(1 - s["lr"] * (s["decay"] + s["global_decay"])).sub_(step * s["lr"])


def add_clipped(m: Tensor, grads: Tensor, most: Tensor, s: dict[str, Tensor]) -> None:
    """Advance SGD's velocities m [N, n] by the rows of `grads`, each clipped to the norm `most`."""
    g = grads.float()
    norm = g.square().sum(1, keepdim=True).sqrt()
    m.mul_(s["beta1"]).add_(g * (most / (norm + 1e-6)).clamp(max=1))


def reaches(unsent: Tensor, v: Tensor, limit: Tensor, power: int) -> Tensor:
    """Which entries have |e| v^(power/4) >= limit [N, n / TILE, 1]. [N, n] bool."""
    score = unsent.abs() if power == 0 else unsent.abs() * v.pow(power / 4)
    return (score.unflatten(-1, (-1, TILE)) >= limit).flatten(-2) & (unsent != 0)


def chunk_listed(unsent: Tensor, n_sent: Tensor, whole: Tensor) -> Tensor:
    """Which entries are the `n_sent` ([1] int64) largest of their chunk of TILE; of equal ones the first. [N, n] bool.

    `whole` [n / TILE] bool marks chunks that are sent whole. Zeros are never listed.
    """
    size = unsent.unflatten(-1, (-1, TILE)).abs()
    limit = size.sort(dim=-1, descending=True).values.gather(-1, (n_sent - 1).expand(*size.shape[:2], 1))
    above, equal = size > limit, size == limit
    rank = equal.cumsum(-1, dtype=torch.int32) + above.sum(-1, keepdim=True, dtype=torch.int32)
    listed = above | (equal & (rank <= n_sent)) | whole[None, :, None]
    return (listed & (size != 0)).flatten(-2)


def take_listed(unsent: Tensor, listed: Tensor, whole: Tensor, wire: str, decay: Tensor) -> Tensor:
    """Take what is listed from `unsent` and shrink the rest. Returns the sum of what was sent, [1, n] float32."""
    sent = torch.where(listed, unsent, 0.0)
    sent = two_levels(sent, whole) if wire == "2bit" else rounded(sent, wire)
    unsent.sub_(sent).mul_(decay)
    return sent.sum(0, keepdim=True)


def take_signs(unsent: Tensor, kept: Tensor, whole: Tensor, chunk: int, magnitude: str) -> Tensor:
    """One bit at both ends. Returns the average that the owners send, [1, n]; `unsent` and `kept` hold the errors."""
    sent = signs(unsent, whole, chunk, magnitude)
    unsent.sub_(sent)
    kept.add_(sent.mean(0))
    results = signs(kept, whole, chunk, magnitude)
    kept.sub_(results)
    return results[None]


def take_sums(kept: Tensor, listed: Tensor, wire: str, decay: Tensor) -> Tensor:
    """Take what is listed from `kept` [n] and shrink the rest. Returns it as it is on the wire, [1, n]."""
    sent = rounded(torch.where(listed, kept, 0.0), wire)
    kept.sub_(sent).mul_(decay)
    return sent[None]


def average(rows: Tensor) -> Tensor:
    """Mean over the workers, [1, n] float32."""
    return rows.float().mean(0, keepdim=True)


def write_copies(weights: Tensor, unsent: Tensor, part: Tensor, low: Tensor, exact: Tensor) -> None:
    """Write the weights that forward reads: the agreed ones minus `part` of `unsent` [N, n], or [1, 1] for none."""
    full = (weights - unsent * part).expand(low.shape[0], -1)
    low.copy_(full)
    exact.copy_(full[:, low.shape[1] - exact.shape[1] :])


def apply_outer(state: dict[str, Tensor], mean: Tensor, lr: float, momentum: float) -> None:
    """Subtract the averaged change from the weights, with a Nesterov step if momentum is not 0."""
    if momentum:
        state["outer"].mul_(momentum).add_(mean[0])
        state["weights"].sub_((mean[0] + momentum * state["outer"]) * lr)
    else:
        state["weights"].sub_(mean[0] * lr)


def batch_starts(text_bytes: int, context: int, run: tuple[int, int, int], seed: int) -> Tensor:
    """Where each window of each batch starts in the text, int64 [steps, workers, batch], which `run` gives."""
    generator = torch.Generator().manual_seed(100 + seed)
    return torch.randint(0, text_bytes - context - 1, run, generator=generator)


@functools.cache
def compiled(function: Callable) -> Callable:
    """`function` compiled once for all runs of this process."""
    torch._dynamo.config.recompile_limit = 64
    torch._dynamo.config.fail_on_recompile_limit_hit = True  # rather than a slow run
    return torch.compile(function, dynamic=False)


class Simulation:
    """One run of one recipe.

    Args:
        run: steps, workers, batch (windows per worker and step), seed, compile and graph (CUDA only).
        text: training text, uint8, on the device of the run.
    """

    def __init__(self, size: ModelSize, recipe: Recipe, run: dict[str, int], text: Tensor) -> None:
        self.size, self.recipe, self.text = size, recipe, text
        self.steps, self.workers, self.batch = run["steps"], run["workers"], run["batch"]
        self.device = text.device
        self.layout = Layout(size)
        n = self.layout.n_elems
        own = recipe.mode == "update" or (recipe.mode == "gradient" and recipe.optimizer == "sgd")
        rows = self.workers if own else 1

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(*shape, device=self.device)

        self.state = {
            "weights": self.layout.initial(size, run["seed"]).to(self.device),
            "m": zeros(rows, n),
            "v": zeros(1 if recipe.moment in GLOBAL_MOMENTS else rows, n),
            "ratio": torch.ones(self.workers, n // TILE, 1, device=self.device),
        }
        if recipe.mode != "dense":
            self.state["unsent"] = zeros(self.workers, n)
        if recipe.wire == "1bit" or recipe.sum_density:
            self.state["kept"] = zeros(n)
        if recipe.outer_momentum:
            self.state["outer"] = zeros(n)
        self.sums = {"loss": zeros(1).double(), "bytes": zeros(1).double(), "density": zeros(1).double()}
        self._make_leaves()
        self._make_tables(run["seed"])
        self._compile(bool(run["compile"]))
        self.refresh()
        self.step = 0
        self.use_graph = bool(run["graph"]) and self.device.type == "cuda"
        self.graphs: dict[bool, torch.cuda.CUDAGraph] = {}

    # ---- set-up ----

    def _make_leaves(self) -> None:
        """Copies of the weights that forward reads: matrices in bfloat16 on CUDA, vectors in float32."""
        low = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        n = self.layout.n_elems
        self.low = torch.zeros(self.workers, n, dtype=low, device=self.device)
        self.exact = torch.zeros(self.workers, n - self.layout.n_matrix_elems, device=self.device)
        self.grads = torch.zeros(self.workers, n, dtype=low, device=self.device)
        self.nothing = torch.zeros(1, 1, device=self.device)
        self.leaves: dict[str, Tensor] = {}
        views = self.layout.views(self.low)
        for name, shape in self.layout.shapes.items():
            if len(shape) > 1:
                leaf = views[name]
            else:
                start = self.layout.offset[name] - self.layout.n_matrix_elems
                leaf = self.exact[:, start : start + shape[0]]
            self.leaves[name] = leaf.detach().requires_grad_()
        self.grad_views = list(self.layout.views(self.grads).values())

    def _make_tables(self, seed: int) -> None:
        """Everything that depends on the step alone, by step, on the device."""
        r, steps = self.recipe, self.steps
        generator = torch.Generator().manual_seed(200 + seed)
        run = (steps, self.workers, self.batch)
        columns: dict[str, list[float]] = {
            name: [] for name in ("lr", "density", "fix1", "fix2", "noise_part", "fresh")
        }
        n_fresh = 0
        for t in range(1, steps + 1):
            fresh = r.moment != "averaged" or r.is_fresh(t)
            n_fresh += fresh
            columns["fresh"].append(float(fresh))
            columns["lr"].append(r.lr_at(t, steps))
            columns["density"].append(r.density_at(t, steps) if t % r.every == 0 else 0.0)
            columns["fix1"].append(1 - r.beta1**t)
            columns["fix2"].append(1 - r.beta2 ** max(1, n_fresh))
            noise = (1 - r.beta1) * (1 + r.beta1**t) / ((1 + r.beta1) * (1 - r.beta1**t))
            columns["noise_part"].append(min(0.95, (1 - 1 / self.workers) / max(1 - noise, 1e-3)))
        self.tables = {name: torch.tensor(values).to(self.device) for name, values in columns.items()}
        self.tables["starts"] = batch_starts(len(self.text), self.size.context, run, seed).to(self.device)
        self.tables["offset"] = torch.randint(0, 1 << 30, (steps,), generator=generator).to(self.device)
        constants = {
            "beta1": r.beta1,
            "clip": r.clip,
            "beta2": r.beta2,
            "workers": float(self.workers),
            "decay": r.weight_decay if r.decay_in_change else 0.0,
            "look_ahead": r.look_ahead,
            "unsent_decay": r.decay,
            "sum_decay": r.sum_decay,
            "global_decay": 0.0 if r.decay_in_change else r.weight_decay,
        }
        self.constants = {name: torch.tensor(value, device=self.device) for name, value in constants.items()}
        self.now = torch.zeros(1, dtype=torch.int64, device=self.device)
        self._make_sample()

    def _make_sample(self) -> None:
        """Positions from which thresholds are sampled: a regular grid in each matrix, moved in each step."""
        counts = [math.prod(self.layout.shapes[name]) for name in self.layout.matrices]
        starts = [self.layout.offset[name] for name in self.layout.matrices]
        sample = min(SAMPLE, min(counts))
        grid = torch.arange(sample)
        self.sample_grid = torch.stack([grid * (c // sample) for c in counts]).to(self.device)
        self.sample_count = torch.tensor(counts).to(self.device)[:, None]
        self.sample_start = torch.tensor(starts).to(self.device)[:, None]
        self.tile_tensor = self.layout.tile_tensor.to(self.device)
        n_slices = self.layout.n_elems // SLICE
        unit = SLICE if n_slices >= 32 else TILE
        tile_unit = torch.arange(self.layout.n_elems // TILE) // (unit // TILE)
        self.tile_unit = tile_unit.to(self.device)
        self.vector_tiles = (self.layout.tile_tensor == len(self.layout.matrices)).to(self.device)

    def _compile(self, use: bool) -> None:
        def made(function: Callable) -> Callable:
            return compiled(function) if use else function

        self.losses, self.bytes = made(losses), made(all_reduce_bytes)
        self.local_step, self.global_step = made(local_step), made(global_step)
        self.reaches, self.take_listed = made(reaches), made(take_listed)
        self.take_signs, self.take_sums = made(take_signs), made(take_sums)
        self.average, self.write_copies = made(average), made(write_copies)
        self.add_clipped = made(add_clipped)

    # ---- one step ----

    def refresh(self) -> None:
        """Write the weights that forward reads: the agreed ones minus what each worker has not sent."""
        unsent = self.state["unsent"] if self.recipe.mode == "update" else self.nothing
        self.write_copies(self.state["weights"], unsent, self.constants["look_ahead"], self.low, self.exact)

    def scalars(self) -> dict[str, Tensor]:
        at = {name: table[self.now][0] for name, table in self.tables.items() if name not in ("starts", "offset")}
        return at | self.constants

    def compute_gradients(self) -> None:
        starts = self.tables["starts"][self.now][0]
        value = self.losses(self.leaves, windows(self.text, starts, self.size.context + 1), self.size)
        grads = torch.autograd.grad(value.sum(), list(self.leaves.values()))
        torch._foreach_copy_(self.grad_views, list(grads))
        self.sums["loss"] += value.detach().mean()

    def limits(self, density: Tensor) -> Tensor:
        """Threshold of each tile, [N, n / TILE, 1], for the wanted density."""
        if self.recipe.select == "rotate":
            period = (1 / density).round().clamp(min=1).long()
            turn = (self.tile_unit + self.now // self.recipe.every) % period == 0
            limit = torch.where(turn | self.vector_tiles, 0.0, math.inf)
            return limit[None, :, None].expand(self.workers, -1, 1)
        index = self.sample_index()
        score = self.state["unsent"][:, index].abs()
        if self.recipe.power:
            score = score * self.state["v"][:, index].pow(self.recipe.power / 4)
        return self.sampled_limits(score, density)

    def sample_index(self) -> Tensor:
        """Positions of this step's sample, [matrices, SAMPLE]."""
        return self.sample_start + (self.sample_grid + self.tables["offset"][self.now]) % self.sample_count

    def sampled_limits(self, score: Tensor, density: Tensor) -> Tensor:
        """Threshold of each tile, [rows, n / TILE, 1], from a sample's scores [rows, matrices, SAMPLE]."""
        ranked = score.sort(dim=-1, descending=True).values
        place = (density * ranked.shape[-1]).round().long().clamp(1, ranked.shape[-1]) - 1
        limit = ranked[..., place.expand(1)].squeeze(-1)
        limit = torch.where(density >= 1, 0.0, limit)
        limit = torch.cat([limit, torch.zeros_like(limit[:, :1])], 1)  # the vectors are sent whole
        return limit[:, self.tile_tensor][..., None]

    def exchange(self, density: Tensor) -> Tensor:
        """Average over the workers of what they send. Counts its bytes."""
        recipe, unsent = self.recipe, self.state["unsent"]
        if recipe.wire == "1bit":
            return self.exchange_signs()
        n_sent = (density * TILE).round().long().clamp(1, TILE).view(1)
        if recipe.select == "chunk":
            listed = chunk_listed(unsent, n_sent, self.vector_tiles | (n_sent == TILE))
        else:
            listed = self.reaches(unsent, self.state["v"], self.limits(density), recipe.power)
        total = self.take_listed(unsent, listed, self.vector_tiles, recipe.wire, self.constants["unsent_decay"])
        if recipe.sum_density:
            mean = self.prune_sums(total / self.workers, density)
        else:
            mean = (total if recipe.wire == "2bit" else rounded(total, recipe.wire)) / self.workers
        if recipe.wire == "2bit":
            n_tiles = self.layout.n_matrix_elems // TILE
            vectors = self.layout.n_params - sum(self.layout.numel(name) for name in self.layout.matrices)
            self.sums["bytes"] += all_gather_bytes(n_tiles * chunk_bytes(n_sent, TILE) + 4 * vectors, self.workers)
        else:
            self.sums["bytes"] += self.bytes(listed, mean[0] != 0, 4 if recipe.wire == "float32" else 2)
        self.sums["density"] += listed.sum() / listed.numel()
        return mean

    def prune_sums(self, mean: Tensor, density: Tensor) -> Tensor:
        """What the owners of the shards send of the averages, [1, n]."""
        kept = self.state["kept"]
        kept.add_(mean[0])
        wanted = (self.recipe.sum_density / self.recipe.density * density).clamp(max=1.0)
        limits = self.sampled_limits(kept[self.sample_index()][None].abs(), wanted)
        listed = self.reaches(kept[None], self.state["v"], limits, 0)[0]
        return self.take_sums(kept, listed, self.recipe.wire, self.constants["sum_decay"])

    def exchange_signs(self) -> Tensor:
        """One bit per entry at both ends; all entries in bfloat16 in the warm-up. The average, [1, n]."""
        recipe = self.recipe
        whole = self.vector_tiles | (self.now < recipe.warmup)
        mean = self.take_signs(self.state["unsent"], self.state["kept"], whole, recipe.chunk, recipe.magnitude)
        vectors = self.layout.n_params - sum(self.layout.numel(name) for name in self.layout.matrices)
        bits = one_bit_bytes(self.layout.n_matrix_elems, recipe.chunk, self.workers)
        bits += dense_bytes(vectors, self.workers) / 2
        self.sums["bytes"] += torch.where(self.now < recipe.warmup, self.dense_wire_bytes, bits)
        self.sums["density"] += 1
        return mean

    @property
    def dense_wire_bytes(self) -> float:
        """Bytes that a rank sends in a dense all-reduce in bfloat16, without frames."""
        return dense_bytes(self.layout.n_params, self.workers) / 2

    def estimate_ratio(self, s: dict[str, Tensor]) -> None:
        """Per matrix and worker: second moment of the averaged gradient over that of the local one."""
        n_tensors = len(self.layout.matrices) + 1
        parts = []
        for x in (self.state["m"].square() / s["fix1"] ** 2, self.state["v"] / s["fix2"]):
            tiles = x.unflatten(-1, (-1, TILE)).sum(-1)
            parts.append(torch.zeros(self.workers, n_tensors, device=self.device).index_add(1, self.tile_tensor, tiles))
        noise = 1 - (1 - 1 / self.workers) / s["noise_part"]
        signal = ((parts[0] / (parts[1] + 1e-30) - noise) / (1 - noise)).clamp(0, 1)
        ratio = 1 / self.workers + (1 - 1 / self.workers) * signal
        self.state["ratio"].copy_(ratio[:, self.tile_tensor][..., None])

    def _step(self, exchanges: bool) -> None:
        s = self.scalars()
        self.compute_gradients()
        recipe, state = self.recipe, self.state
        if recipe.optimizer == "sgd":
            state["weights"].sub_(self.sgd_change(s) * s["lr"])
        elif recipe.mode == "dense":
            self.global_step(state, self.average(self.grads), s)
        elif recipe.mode == "gradient":
            state["unsent"].add_(self.grads)
            self.global_step(state, self.exchange(s["density"]), s)
        else:
            if recipe.moment == "ratio":
                self.estimate_ratio(s)
            self.local_step(state, self.grads, s, recipe.moment)
            if recipe.moment == "averaged":  # in the warm-up the exchange of all entries has the average
                self.sums["bytes"] += torch.where(self.now < recipe.warmup, 0.0, s["fresh"] * self.dense_wire_bytes)
            if exchanges:
                mean = self.exchange(s["density"])
                apply_outer(state, mean, recipe.outer_lr, recipe.outer_momentum)
            if recipe.weight_decay and not recipe.decay_in_change:
                state["weights"].mul_(1 - s["lr"] * s["global_decay"])
        self.refresh()
        self.now.add_(1)

    def sgd_change(self, s: dict[str, Tensor]) -> Tensor:
        """What SGD's weights change by, over the learning rate, [n]."""
        state, n = self.state, self.workers
        if self.recipe.mode == "dense":
            self.add_clipped(state["m"], self.average(self.grads), s["clip"], s)
            return state["m"][0]
        self.add_clipped(state["m"], self.grads, s["clip"] * n**0.5, s)
        state["unsent"].add_(state["m"])
        mean = self.exchange(s["density"])[0]
        kept = (state["unsent"] != 0).unflatten(-1, (-1, TILE)) | self.vector_tiles[None, :, None]
        state["m"].mul_(kept.flatten(-2))  # an entry that was sent loses its velocity; vectors are always sent
        return mean

    def _capture(self, exchanges: bool) -> None:
        """Record the step as a CUDA graph. State is put back to what it was before."""
        kept = {name: t.clone() for name, t in (*self.state.items(), *self.sums.items(), ("now", self.now))}
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                self._step(exchanges)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._step(exchanges)
        for name, t in (*self.state.items(), *self.sums.items(), ("now", self.now)):
            t.copy_(kept[name])
        self.refresh()
        self.graphs[exchanges] = graph

    def advance(self) -> None:
        """One optimizer step of all workers."""
        self.step += 1
        exchanges = self.step % self.recipe.every == 0
        if not self.use_graph:
            self._step(exchanges)
            return
        if exchanges not in self.graphs:
            self._capture(exchanges)
        self.graphs[exchanges].replay()

    # ---- reading results ----

    def evaluate(self, text: Tensor, n_windows: int, consolidated: bool) -> float:
        """Loss on held-out text, of the agreed weights or of the mean of the workers' own copies."""
        flat = self.state["weights"]
        if consolidated and "unsent" in self.state and self.recipe.mode == "update":
            flat = flat - self.state["unsent"].mean(0)
        n_vectors = self.layout.n_matrix_elems
        views = self.layout.views(flat[None].to(self.low.dtype))
        exact = self.layout.views(flat[None])
        weights = {k: v if self.layout.offset[k] < n_vectors else exact[k] for k, v in views.items()}
        generator = torch.Generator().manual_seed(7)
        starts = torch.randint(0, len(text) - self.size.context - 1, (n_windows,), generator=generator)
        total, chunk = 0.0, 64
        with torch.no_grad():
            for part in starts.split(chunk):
                batch = windows(text, part.to(self.device)[None], self.size.context + 1)
                total += losses(weights, batch, self.size).item() * len(part)
        return total / n_windows

    def read_sums(self) -> dict[str, float]:
        return {name: total.item() for name, total in self.sums.items()}

    def norms(self) -> float:
        """Norm of what was not sent over the norm of the weights, mean over workers; 0 if all is sent."""
        if "unsent" not in self.state:
            return 0.0
        return (self.state["unsent"].norm(dim=1).mean() / self.state["weights"].norm()).item()

    def save(self) -> dict[str, object]:
        tensors = {**self.state, **{f"sum_{k}": v for k, v in self.sums.items()}}
        return {"step": self.step, "tensors": {k: v.cpu() for k, v in tensors.items()}}

    def load(self, saved: dict) -> None:
        self.step = saved["step"]
        self.now.fill_(self.step)
        for name, tensor in saved["tensors"].items():
            target = self.sums[name[4:]] if name.startswith("sum_") else self.state[name]
            target.copy_(tensor)
        self.refresh()
