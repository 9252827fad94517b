"""spccl.sync.record: what load_weights copies where. Models here fuse, shard, tie and cast as those of servers do."""

from concurrent.futures import ThreadPoolExecutor

import pytest

torch = pytest.importorskip("torch")

from spccl.errors import MismatchError  # noqa: E402
from spccl.sync.record import prove, record  # noqa: E402

HIDDEN, RANKS = 8, 2
SHAPES = {
    "embed": (10, HIDDEN),
    "q": (8, HIDDEN),
    "k": (4, HIDDEN),
    "v": (4, HIDDEN),
    "o": (HIDDEN, 8),
    "gate": (12, HIDDEN),
    "up": (12, HIDDEN),
    "norm": (HIDDEN,),
    "head": (10, HIDDEN),
}


def checkpoint(shapes=SHAPES, dtype=torch.bfloat16, seed=1):
    g = torch.Generator().manual_seed(seed)
    return [(name, torch.randn(shape, generator=g).to(dtype)) for name, shape in shapes.items()]


def meta(tensors):
    return [(name, x.dtype, x.shape) for name, x in tensors]


class Server(torch.nn.Module):
    """One rank of a layer with fused and sharded weights, a padded vocabulary, and the head tied to it."""

    def __init__(self, rank):
        super().__init__()
        self.rank = rank
        for name, shape in {
            "embed": (6, HIDDEN),
            "qkv": (8, HIDDEN),
            "gate_up": (12, HIDDEN),
            "o": (HIDDEN, 4),
            "norm": (HIDDEN,),
            "norm_again": (HIDDEN,),
        }.items():
            x = torch.full(shape, 7.0, dtype=torch.bfloat16)
            self.register_parameter(name, torch.nn.Parameter(x, requires_grad=False))

    def load_weights(self, weights):
        r = self.rank
        for name, x in weights:
            if name == "embed":
                mine = x[r * 6 : r * 6 + 6]
                self.embed.data[: len(mine)].copy_(mine)
                self.embed.data[len(mine) :].fill_(0)
            elif name in "qkv":
                first, n = {"q": (0, 4), "k": (4, 2), "v": (6, 2)}[name]
                self.qkv.data.narrow(0, first, n).copy_(x.chunk(RANKS)[r])
            elif name in ("gate", "up"):
                self.gate_up.data[6 * (name == "up") :][:6] = x.narrow(0, 6 * r, 6)
            elif name == "o":
                self.o.data.copy_(x.narrow(1, 4 * r, 4))
            elif name == "norm":
                self.norm.data.copy_(x)
                self.norm_again.data.view(2, 4).copy_(x.view(2, 4))


def apply(plan, tensors):
    """A slow reading of the places."""
    for name, x in tensors:
        for p in plan[name]:
            rows = x.reshape(-1, p.row_elems)[p.row_first : p.row_first + p.n_rows]
            p.dst.copy_(rows[:, p.col_first : p.col_first + p.n_cols])


@pytest.mark.parametrize("rank", range(RANKS))
def test_plan_equals_load_weights(rank):
    server, other = Server(rank), Server(rank)
    before = {name: p.clone() for name, p in server.named_parameters()}
    plan = record(server.load_weights, meta(checkpoint()))
    assert all(torch.equal(p, before[name]) for name, p in server.named_parameters())  # recording writes nothing
    assert not plan.dense and plan["head"] == [] and len(plan["norm"]) == 2
    server.load_weights(checkpoint())
    prove(plan, checkpoint(), server.named_parameters())
    apply(plan, checkpoint(seed=2))
    other.load_weights(checkpoint(seed=2))
    for (name, mine), (_, theirs) in zip(server.named_parameters(), other.named_parameters(), strict=True):
        assert torch.equal(mine.view(torch.int16), theirs.view(torch.int16)), name


@pytest.mark.parametrize("rank", range(RANKS))
def test_subscriber_with_a_recorded_plan(rank, tmp_path):
    """An anchor and a delta reach fused and sharded parameters as a full load does."""
    pytest.importorskip("safetensors")
    from spccl.sync import Publisher, Subscriber

    weights = dict(checkpoint())
    push = Publisher(tmp_path / "run", weights)
    server, other = Server(rank), Server(rank)
    server.load_weights(checkpoint(seed=3))  # writes the padding too
    pull = Subscriber(tmp_path / "run", places=record(server.load_weights, meta(checkpoint())))
    for version in (1, 2):
        if version == 2:
            for x in weights.values():
                x.view(-1)[::5] = float("nan")
        assert push.publish() == version and pull.apply() == version
        other.load_weights(list(weights.items()))
        for (name, mine), (_, theirs) in zip(server.named_parameters(), other.named_parameters(), strict=True):
            assert torch.equal(mine.view(torch.int16), theirs.view(torch.int16)), name


def test_experts_are_several_boxes():
    dst = torch.zeros(3, 5, 4)

    def load_weights(weights):
        for _, x in weights:
            dst[:, 1:3, :2].copy_(x[:, 2:4, 1:3])

    plan = record(load_weights, [("w", dst.dtype, (3, 4, 4))])
    x = torch.arange(48.0).view(3, 4, 4)
    apply(plan, [("w", x)])
    want = torch.zeros(3, 5, 4)
    want[:, 1:3, :2] = x[:, 2:4, 1:3]
    assert torch.equal(dst, want) and len(plan["w"]) == 3


REFUSED = {
    "cast": (lambda p, x: p.copy_(x.half()), "computes"),
    "cast by copy_": (lambda p, x: p.view(torch.int32).copy_(x), "casts"),
    "scaled": (lambda p, x: p.copy_(x * 2), "computes"),
    "permuted": (lambda p, x: p.copy_(x.t()), "permutes"),
    "broadcast": (lambda p, x: p.copy_(x[0]), "spreads"),
    "expanded": (lambda p, x: p.copy_(x[:1].expand(4, 4)), "several"),
    "repacked": (lambda p, x: p.copy_(x.t().contiguous()), "computes"),
    "added": (lambda p, x: p.add_(x), "computes"),
    "changed after": (lambda p, x: p.copy_(x).mul_(2), "where it lies"),
    "quantized after": (lambda p, x: (p.copy_(x), p.copy_(p.round())), "where it lies"),
    "read": (lambda p, x: p.fill_(x[0, 0].item()), "computes"),
    "through a temporary": (lambda p, x: p.copy_(torch.empty(4, 4).copy_(x)), "computes"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_by_name(case):
    act, why = REFUSED[case]
    param, good = torch.full((4, 4), 3.0), torch.zeros(2)

    def load_weights(weights):
        for name, x in weights:
            good.copy_(x) if name == "good" else act(param, x)

    plan = record(load_weights, [("bad", param.dtype, (4, 4)), ("good", good.dtype, (2,))])
    assert list(plan) == ["good"] and why in plan.dense["bad"]
    assert torch.equal(param, torch.full((4, 4), 3.0))


@pytest.mark.parametrize("raises", [True, False])
def test_other_threads_are_refused(raises):
    """Only here: a mode of torch is of one thread, so a pool's copies of unset memory would reach live weights."""
    param = torch.full((64, 64), 3.0)

    def load_weights(weights):
        with ThreadPoolExecutor(1) as pool:
            for copies in [pool.submit(param.copy_, x[:]) for _, x in weights]:
                copies.result() if raises else copies.exception()

    with pytest.raises(MismatchError, match=r"'w'.*another thread.*before they serve"):
        record(load_weights, [("w", param.dtype, (64, 64))])
    assert torch.equal(param, torch.full((64, 64), 3.0))


DERIVED = {
    "copied": lambda embed, head: head.copy_(embed),
    "copied in part": lambda embed, head: head[:2].copy_(embed.t()[:2]),
    "through a temporary": lambda embed, head: head.copy_(torch.empty(4, 4).copy_(embed * 2)),
    "added": lambda embed, head: head.add_(embed),
    "a number": lambda embed, head: head.fill_(embed.max().item()),
}


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("case", DERIVED)
def test_a_source_of_other_weights_is_refused(case, first):
    """Only here: what load_weights makes from loaded weights, before or after them, would stay behind in an update.
    What it makes from constants alone is none of that."""
    embed, head, good = (torch.full((4, 4), 3.0) for _ in range(3))
    table, rope = torch.arange(4.0), torch.zeros(4)

    def load_weights(weights):
        good.copy_(torch.zeros_like(good))
        for name, x in weights:
            if first and name == "embed":
                DERIVED[case](embed, head)
            (embed if name == "embed" else good).copy_(x)
        rope.copy_(table * 2)
        if not first:
            DERIVED[case](embed, head)

    plan = record(load_weights, [("embed", embed.dtype, (4, 4)), ("good", good.dtype, (4, 4))])
    assert "makes others from it" in plan.dense["embed"] and list(plan) == ["good"]
    assert torch.equal(head, torch.full((4, 4), 3.0))


def assign(net, x):
    net.w.data = x


def replace(net, x):
    net.w = torch.nn.Parameter(x, requires_grad=False)


def assign_in_a_thread(net, x):
    with ThreadPoolExecutor(1) as pool:
        pool.submit(assign, net, torch.zeros(4, 4)).result()


@pytest.mark.parametrize("act", [assign, replace, assign_in_a_thread])
def test_other_memory_is_refused_and_restored(act):
    """Only here: an assignment is no copy, so the live model would keep unset memory."""

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.w = torch.nn.Parameter(torch.full((4, 4), 3.0), requires_grad=False)

        def load_weights(self, weights):
            for _, x in weights:
                act(self, x)

    net = Net()
    memory = net.w, net.w.data_ptr()
    with pytest.raises(MismatchError, match="'w': load_weights gives it other memory"):
        record(net.load_weights, [("w", torch.float32, (4, 4))])
    assert net.w is memory[0] and net.w.data_ptr() == memory[1] and torch.equal(net.w, torch.full((4, 4), 3.0))
    if act is assign:  # a function of its own: what it changes is not known, so the assignment itself is refused
        with pytest.raises(MismatchError, match="other memory"):
            record(lambda weights: [act(net, x) for _, x in weights], [("w", torch.float32, (4, 4))])
        assert net.w.data_ptr() == memory[1]


def test_proof_names_the_tensor():
    server = Server(0)
    plan = record(server.load_weights, meta(checkpoint()))
    server.load_weights(checkpoint())
    server.gate_up.data[8, 3].neg_()
    with pytest.raises(MismatchError, match="'up'"):
        prove(plan, checkpoint(), server.named_parameters())
    server.load_weights(checkpoint())
    extra = torch.nn.Parameter(torch.zeros(3))
    with pytest.raises(MismatchError, match="'extra': 3 of 3"):
        prove(plan, checkpoint(), [("extra", extra)])
    with pytest.raises(MismatchError, match="'head'"):
        prove(plan, checkpoint()[:-1], [])


def test_proof_of_a_plan_with_dense_tensors():
    """What load_weights writes of a dense tensor is known; a parameter that nothing wrote is named nevertheless."""
    params = {name: torch.zeros(4, 4) for name in ("cast", "half", "twice", "plain", "other")}

    def load_weights(weights):
        for name, x in weights:
            params[name].view(torch.int32).copy_(x) if name == "cast" else params[name].copy_(x)
            if name == "half":
                params[name][:2].mul_(2)
            if name == "twice":
                params[name].copy_(x * 2)

    names = ["cast", "half", "twice", "plain"]
    plan = record(load_weights, [(name, torch.float32, (4, 4)) for name in names])
    assert set(plan.dense) == {"cast", "half", "twice"}
    weights = [(name, torch.rand(4, 4)) for name in names]
    load_weights(weights)
    prove(plan, weights, [(name, params[name]) for name in names])
    with pytest.raises(MismatchError, match="'other': 16 of 16"):
        prove(plan, weights, params.items())
