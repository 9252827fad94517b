"""spccl.sync for vLLM against stubs of two versions of it, and the votes of several workers. No vLLM is needed.

tests/vllm has the tests with a real server; these also run where none can be installed.
"""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
import threading
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="spccl.sync is for torch tensors, and none is installed")
pytest.importorskip("safetensors", reason="spccl.sync writes safetensors files, and it is not installed")

import vllm_stubs  # noqa: E402
from vllm_stubs import VERSIONS, Checkpoint, Http, Worker  # noqa: E402

from spccl.errors import ArgumentError, Error, PeerError, StateError, TimeoutError  # noqa: E402
from spccl.sync import Publisher, VllmClient, _staged  # noqa: E402
from spccl.sync import vllm as ours  # noqa: E402
from spccl.sync._replica import INTACT, OneWorker, Replica, TorchWorkers  # noqa: E402
from spccl.sync._source import Folder  # noqa: E402

WIDTH, RANKS, WAIT_S = 8, 2, 100
SHAPES = {"embed": (10, WIDTH), "q": (8, WIDTH), "k": (4, WIDTH), "o": (WIDTH, 8), "norm": (WIDTH,)}


def weights(seed: int, dtype=torch.bfloat16) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=random).to(dtype) for name, shape in SHAPES.items()}


class Model(torch.nn.Module):
    """What a rank of a tensor-parallel server has: fused rows, columns of a matrix, a padded vocabulary."""

    def __init__(self, rank: int = 0, ranks: int = 1):
        super().__init__()
        self.rank, self.ranks = rank, ranks
        padded = -(-10 // (4 * ranks)) * 4
        for name, shape in {
            "embed": (padded, WIDTH),
            "qk": (12 // ranks, WIDTH),
            "o": (WIDTH, 8 // ranks),
            "norm": (WIDTH,),
        }.items():
            self.register_parameter(name, torch.nn.Parameter(torch.zeros(shape, dtype=torch.bfloat16)))

    def load_weights(self, named):
        r, n = self.rank, self.ranks
        for name, x in named:
            if name == "embed":
                mine = x[r * len(self.embed) :][: len(self.embed)]
                self.embed.data[: len(mine)].copy_(mine)
                self.embed.data[len(mine) :].fill_(0)
            elif name in ("q", "k"):
                rows = x.shape[0] // n
                self.qk.data.narrow(0, (name == "k") * 8 // n, rows).copy_(x.narrow(0, r * rows, rows))
            elif name == "o":
                self.o.data.copy_(x.chunk(n, dim=1)[r])
            else:
                self.norm.data.copy_(x)


def bits(model: torch.nn.Module) -> list[list[int]]:
    return [x.detach().view(torch.int16).flatten().tolist() for x in model.parameters()]


def loaded(named: dict[str, torch.Tensor], rank: int = 0, ranks: int = 1) -> Model:
    model = Model(rank, ranks)
    model.load_weights(list(named.items()))
    return model


class Run:
    """A publisher of weights whose version n has the bits of `weights(n)`, few of them changed."""

    def __init__(self, folder: Path, **options):
        self.folder, self.now = folder, weights(1)
        self.push = Publisher(folder, self.now, **options)
        self.was: dict[int, dict[str, torch.Tensor]] = {}

    def publish(self) -> int:
        for x in self.now.values() if self.was else ():
            x.view(-1)[:: 3 + len(self.was)] = float(len(self.was))
        version = self.push.publish()
        self.was[version] = {name: x.clone() for name, x in self.now.items()}
        return version


@pytest.fixture
def run(tmp_path):
    found = Run(tmp_path / "run", anchor_share=9, keep=9)
    yield found
    found.push.close()


def damage(run: Run, version: int) -> tuple[Path, bytes]:
    (path,) = (run.folder / f"v{version:06d}").glob("delta*")
    good = path.read_bytes()
    path.chmod(0o644)
    path.write_bytes(good[:-3] + bytes([good[-3] ^ 1]) + good[-2:])
    return path, good


@pytest.fixture(params=VERSIONS)
def http(request, monkeypatch, run):
    """A server of a stub of vLLM that has loaded version 1."""
    factory = vllm_stubs.install(monkeypatch, Checkpoint(weights(1)))
    for _ in range(2):
        ours.register()
    with Http(Worker(request.param, factory, loaded(weights(1)))) as server:
        yield server


def test_updates_in_vllms_order(http, run):
    client = VllmClient(http.url, run.folder, timeout_s=WAIT_S)
    routes = ["init_weight_transfer_engine", "pause?mode=keep", "start_weight_update", "update_weights"]
    routes += ["finish_weight_update", "weight_info", "resume"]
    for _ in range(3):
        http.calls.clear()
        version = run.publish()
        assert client.update(version) == version and http.calls == routes and client.version() == str(version)
        assert bits(http.worker.engine.model) == bits(loaded(run.was[version]))
    version = run.publish()
    client.stage(version)
    assert bits(http.worker.engine.model) == bits(loaded(run.was[version - 1])) and not http.is_paused
    http.worker.start_weight_update()  # of a client that ended there
    client.update(version)
    assert bits(http.worker.engine.model) == bits(loaded(run.was[version]))
    http.worker.start_weight_update()
    http.worker.update_weights([client._info(version, "update")])  # a list by rank is the engine's business too


def test_a_failed_update_leaves_the_old_version_in_service(http, run):
    client = VllmClient(http.url, run.folder, timeout_s=WAIT_S)
    client.update(run.publish())
    path, good = damage(run, run.publish())
    with pytest.raises(StateError, match=r"update_weights: status 500: .*version 2: stage: worker 0 of 1: .*SHA-256"):
        client.update(2)
    assert not http.is_paused and client.version() == "1"
    assert bits(http.worker.engine.model) == bits(loaded(run.was[1]))
    path.write_bytes(good)
    client.update(2)
    assert bits(http.worker.engine.model) == bits(loaded(run.was[2]))


def test_a_mixture_stays_paused(http, run, monkeypatch):
    """An anchor that fails in the middle cannot be taken back. The client leaves the server paused, until it is."""
    client = VllmClient(http.url, run.folder, timeout_s=WAIT_S)
    run.publish()
    monkeypatch.setattr(_staged, "commit_large", _raise)
    with pytest.raises(StateError, match=r"mixture.*stays paused"):
        client.update(1)
    assert http.is_paused
    monkeypatch.undo()
    vllm_stubs.install(monkeypatch, Checkpoint(weights(1)))
    client.update(1)
    assert not http.is_paused and bits(http.worker.engine.model) == bits(loaded(run.was[1]))


def _raise(*args, **kwargs):
    raise RuntimeError("the test's own failure")


def test_requests_that_cannot_work(http, run):
    """Each error says who, where, and what to do."""
    run.publish()
    with pytest.raises(ArgumentError, match="wanted http://host:port"):
        VllmClient("localhost:8000")
    for version in (0, True, "7"):
        with pytest.raises(ArgumentError, match="wanted what publish"):
            VllmClient(http.url).update(version)
    with pytest.raises(StateError, match="no folder: give one to VllmClient"):
        VllmClient(http.url, timeout_s=WAIT_S).update(1)
    with pytest.raises(StateError, match=r"version 7: stage: worker 0 of 1: TimeoutError: .*waited .* for version 7"):
        VllmClient(http.url, run.folder, timeout_s=0.5).update(7)
    assert not http.is_paused
    with pytest.raises(StateError, match=r"/nothing: status 404.*VLLM_SERVER_DEV_MODE"):
        VllmClient(http.url)._post("nothing")
    port = http._server.server_address[1]
    http.__exit__()
    with pytest.raises(PeerError, match=rf"127\.0\.0\.1:{port}/init.*is the server up"):
        VllmClient(http.url, run.folder).update(1)


def test_a_server_that_does_not_answer(run):
    import socket

    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(TimeoutError, match=r"init_weight_transfer_engine: no answer within 0\.2 s"):
            VllmClient(url, run.folder, timeout_s=0.2).update(1)


def test_the_servers_own_folder(monkeypatch, run, tmp_path):
    """--additional-config names it: then the client need not, and cannot name another."""
    factory = vllm_stubs.install(monkeypatch, Checkpoint(weights(1)))
    ours.register()
    config = {"spccl": {"folder": str(run.folder)}}
    with Http(Worker("0.33.0", factory, loaded(weights(1)), additional_config=config)) as server:
        assert VllmClient(server.url).update(run.publish()) == 1
        with pytest.raises(StateError, match="takes no other"):
            VllmClient(server.url, tmp_path).open()


def test_without_weight_transfer_the_plugin_does_nothing(monkeypatch, caplog):
    """An older vLLM: the plugin must not end the server. vLLM itself then refuses the backend's name."""
    vllm_stubs.install(monkeypatch, None)
    monkeypatch.setitem(sys.modules, "vllm.distributed.weight_transfer", None)
    ours.register()
    assert "no weight transfer in this vLLM" in caplog.text


def packed(model):
    model.cpu_linear = lambda x, weight, bias: x


def derived(model):
    model.w_uk = torch.ones(4, 4)


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (packed, "layer '': vLLM on CPUs packs its weight"),
        (derived, "its 'w_uk' was made from the weights"),
        (lambda model: model.qk.data.add_(1), r"tensor 'q': the receiver does not hold these bits"),
        (lambda model: setattr(model.o, "data", torch.zeros(8, 8)), r"'o' \(load_weights casts it"),
    ],
    ids=["packs", "derives", "repacks", "casts"],
)
def test_what_changes_weights_after_loading_is_refused_by_name(monkeypatch, run, spoil, text):
    factory = vllm_stubs.install(monkeypatch, Checkpoint(weights(1)))
    ours.register()
    run.publish()
    model = loaded(weights(1))
    spoil(model)
    before = [x.clone() for x in model.parameters()]
    with Http(Worker("0.29.0", factory, model)) as server, pytest.raises(StateError, match=text):
        VllmClient(server.url, run.folder, timeout_s=WAIT_S).update(1)
    assert all(torch.equal(x, y) for x, y in zip(model.parameters(), before, strict=True)) and not server.is_paused


def test_quantized_models_and_loaders_without_checkpoint_are_refused(monkeypatch, run):
    factory = vllm_stubs.install(monkeypatch, object())
    ours.register()
    run.publish()
    for options, text in (({"quantization": "fp8"}, "quantization 'fp8'"), ({}, "load_format 'auto': there is no")):
        worker = Worker("0.33.0", factory, loaded(weights(1)), **options)
        with pytest.raises(StateError, match=text):
            worker.init_weight_transfer_engine({"folder": str(run.folder), "timeout_s": WAIT_S})


def test_checkpoint_in_another_dtype_and_with_more_tensors(run):
    """Servers cast float32 checkpoints as the publisher does. What load_weights leaves out may be missing there."""
    run.publish()
    model = loaded({name: x.float() for name, x in weights(1).items()})
    more = {**{name: x.float() for name, x in weights(1).items()}, "unused": torch.ones(3)}
    model.load_weights = lambda named: Model.load_weights(model, ((n, x) for n, x in named if n != "unused"))
    replica = Replica("vllm", model, lambda: more.items(), OneWorker())
    replica.open(run.folder, WAIT_S)
    replica.update(1, WAIT_S)
    assert bits(model) == bits(loaded(run.was[1]))
    lacks = {name: x for name, x in more.items() if name != "q"}
    with pytest.raises(StateError, match="tensor 'q': the publisher has it, the server's checkpoint does not"):
        Replica("vllm", model, lambda: lacks.items(), OneWorker()).open(run.folder, WAIT_S)


class Threads:
    """Workers that are threads of this process."""

    size = RANKS

    def __init__(self, rank: int, barrier: threading.Barrier, answers: list[str]):
        self.rank, self.barrier, self.answers = rank, barrier, answers

    def exchange(self, answer: str, timeout_s: float) -> list[str]:
        self.answers[self.rank] = answer
        self.barrier.wait(timeout_s)
        found = list(self.answers)
        self.barrier.wait(timeout_s)
        return found


class Group:
    """The workers of a tensor-parallel server: each call is made on all of them."""

    def __init__(self, n: int = RANKS):
        barrier, answers = threading.Barrier(n), [""] * n
        self.models = [loaded(weights(1), rank, n) for rank in range(n)]
        self.replicas = [
            Replica("vllm", model, lambda: weights(1).items(), Threads(rank, barrier, answers))
            for rank, model in enumerate(self.models)
        ]

    def call(self, name: str, *args) -> list[str]:
        """Errors of all workers, "" where there is none."""
        errors = [""] * len(self.replicas)

        def work(rank: int) -> None:
            try:
                getattr(self.replicas[rank], name)(*args, WAIT_S)
            except Error as error:
                errors[rank] = str(error)

        threads = [
            threading.Thread(target=work, args=(rank,), name=f"worker{rank}") for rank in range(len(self.replicas))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(2 * WAIT_S)
        return errors

    def holds(self, named: dict[str, torch.Tensor]) -> bool:
        n = len(self.models)
        return all(bits(model) == bits(loaded(named, rank, n)) for rank, model in enumerate(self.models))


@pytest.fixture
def group(run):
    run.publish()
    found = Group()
    assert found.call("open", run.folder) == found.call("update", 1) == ["", ""]
    return found


def test_shards_take_versions_together(run, group):
    assert group.holds(run.was[1])
    for _ in range(2):
        version = run.publish()
        assert group.call("stage", version) == ["", ""]
        assert group.call("update", version) == ["", ""] and group.holds(run.was[version])
    assert group.call("update", version) == ["", ""]  # again: nothing to do


def test_one_worker_cannot_stage(run, group, monkeypatch):
    """No worker writes; all say which worker failed, and that they hold what they held."""
    version = run.publish()
    monkeypatch.setattr(group.replicas[1]._pull, "before_read", _raise)
    errors = group.call("update", version)
    assert all("worker 1 of 2: RuntimeError: the test's own failure" in e and INTACT in e for e in errors)
    assert group.holds(run.was[1])
    group.replicas[1]._pull.before_read = None
    assert group.call("update", version) == ["", ""] and group.holds(run.was[version])


@pytest.mark.parametrize("when", ["before", "after"])
def test_one_worker_fails_while_it_writes(run, group, monkeypatch, when):
    """The other one has written all of it, and takes it back."""
    version = run.publish()
    if when == "before":  # its elements are written, its sums are not: Subscriber.commit restores them
        monkeypatch.setattr(_staged.Change, "count", _fails_on_worker_0)
    else:
        commit = group.replicas[0]._pull.commit
        monkeypatch.setattr(group.replicas[0]._pull, "commit", lambda: (commit(), _raise()))
    errors = group.call("update", version)
    assert all("worker 0 of 2: RuntimeError" in e and INTACT in e for e in errors) and group.holds(run.was[1])
    monkeypatch.undo()
    assert group.call("update", version) == ["", ""] and group.holds(run.was[version])


def _fails_on_worker_0(self, sign=1):
    if threading.current_thread().name == "worker0":
        raise RuntimeError("the test's own failure")


def test_an_anchor_that_fails_on_one_worker_is_a_mixture_until_it_is_written(run, group, monkeypatch):
    run.push.anchor_share = 0
    version = run.publish()
    for replica in group.replicas:
        replica._pull._have = None  # what an anchor begins with
    pull = group.replicas[1]._pull
    monkeypatch.setattr(pull, "_finish", _raise)
    errors = group.call("update", version)
    assert all("mixture" in e and INTACT not in e for e in errors)
    path, good = damage(run, run.publish())
    monkeypatch.undo()
    assert all(INTACT not in e and e for e in group.call("update", version + 1))  # not even staged: still a mixture
    path.write_bytes(good)
    assert group.call("update", version) == ["", ""] and group.holds(run.was[version])
    assert group.call("update", version + 1) == ["", ""] and group.holds(run.was[version + 1])


def test_parts_that_something_else_wrote_to(run, group):
    """Of a tensor in column shards no worker alone sees it: the sums of all workers do, and all take it back."""
    version = run.publish()
    with torch.no_grad():
        group.models[1].o.view(torch.int16)[3, 0] ^= 1  # one that version 2 changes
    spoilt = bits(group.models[1])
    errors = group.call("update", version)
    assert all(e and INTACT in e for e in errors), errors
    assert bits(group.models[1]) == spoilt and bits(group.models[0]) == bits(loaded(run.was[1], 0, RANKS))


def test_workers_whose_folders_differ(run, group, tmp_path):
    """The same version number of two publishers, as two copies of a folder may have it."""
    other = Run(tmp_path / "other", anchor_share=9)
    other.publish()
    run.publish()
    other.publish()
    group.replicas[1]._pull._source = Folder(other.folder)
    errors = group.call("update", 2)
    assert all("different files" in e and INTACT in e for e in errors) and group.holds(run.was[1])
    other.push.close()


def test_workers_that_lack_a_part(run):
    """Two ranks of a server of three: refused, because no sum of the whole tensor could be made."""
    run.publish()
    group = Group()
    for rank, model in enumerate(group.models):
        model.__init__(rank, 4)
        model.load_weights(list(weights(1).items()))
    errors = group.call("open", run.folder)
    assert all("the workers hold" in e and "of its" in e for e in errors), errors


def test_a_worker_that_does_not_vote(run, monkeypatch):
    """The others give up at their deadline, and do not say that they may go on serving."""
    run.publish()
    group = Group()
    monkeypatch.setattr(sys.modules[__name__], "WAIT_S", 1)
    monkeypatch.setattr(Threads, "exchange", _late(Threads.exchange))
    assert group.call("open", run.folder)[0].startswith("late")


def _late(exchange):
    def late(self, answer, timeout_s):
        if self.rank == 1:
            raise StateError("gone")
        try:
            return exchange(self, answer, 0.1)
        except threading.BrokenBarrierError as error:
            raise TimeoutError("late") from error

    return late


def _gloo_rank(rank: int, store: str, found, done) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    workers = TorchWorkers(torch.distributed.group.WORLD)
    found.put((rank, workers.exchange("a" * (1 + 5000 * rank), WAIT_S)))
    if rank == 0:
        try:
            workers.exchange("alone", 0.3)
        except TimeoutError as error:
            found.put((2, str(error)))
    else:
        done.wait(2 * WAIT_S)


def test_votes_over_torch_distributed(tmp_path):
    """Answers of other lengths, and a deadline where a rank does not come."""
    context = multiprocessing.get_context("fork")  # spawn would import torch twice
    found, done = context.Queue(), context.Event()
    args = (str(tmp_path / "store"), found, done)
    ranks = [context.Process(target=_gloo_rank, args=(rank, *args), daemon=True) for rank in range(2)]
    for rank in ranks:
        rank.start()
    try:
        got = dict(found.get(timeout=2 * WAIT_S) for _ in range(3))
        assert got[0] == got[1] == ["a", "a" * 5001] and "worker 0: a worker of the server did not answer" in got[2]
    finally:
        done.set()
        for rank in ranks:
            rank.join(WAIT_S)
            rank.kill()


def test_no_module_but_the_engine_imports_vllm(tmp_path):
    """`import spccl` and spccl.sync must not: it takes seconds, and trainers do not have it."""
    (tmp_path / "vllm.py").write_text("raise SystemExit('vllm was imported')")
    code = "import spccl, spccl.sync, spccl.sync.vllm, spccl.sync._replica"
    subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": str(tmp_path)}, check=True, timeout=120)


def test_entry_point():
    from importlib.metadata import entry_points

    (found,) = (one for one in entry_points(group="vllm.general_plugins") if one.name == "spccl")
    assert found.load() is ours.register
