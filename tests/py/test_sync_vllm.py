"""spccl.sync for vLLM against stubs of two versions of it. No vLLM is needed.

tests/vllm has the tests with a real server; these also run where none can be installed.
"""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

torch = pytest.importorskip("torch", reason="spccl.sync is for torch tensors, and none is installed")
pytest.importorskip("safetensors", reason="spccl.sync writes safetensors files, and it is not installed")

import vllm_stubs  # noqa: E402
from vllm_models import RANKS, WAIT_S, Model, Run, Threads, bits, damage, fail, loaded, weights  # noqa: E402
from vllm_stubs import VERSIONS, Checkpoint, Executor, Http, Worker  # noqa: E402

from spccl.errors import ArgumentError, PeerError, StateError, TimeoutError  # noqa: E402
from spccl.sync import VllmClient, _staged  # noqa: E402
from spccl.sync import vllm as ours  # noqa: E402
from spccl.sync._replica import OneWorker, Replica  # noqa: E402


@pytest.fixture
def run(tmp_path):
    found = Run(tmp_path / "run", anchor_share=9, keep=9)
    yield found
    found.push.close()


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
    routes = [
        "get_world_size",
        "init_weight_transfer_engine",
        "pause?mode=keep",
        "start_weight_update",
        "update_weights",
    ]
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


@pytest.mark.parametrize("version", VERSIONS)
def test_errors_of_several_workers_leave_no_answer_behind(monkeypatch, run, version):
    """vLLM stops reading the workers' answers at an error. What it did not read would be the answers of later calls."""
    factory = vllm_stubs.install(monkeypatch, Checkpoint(weights(1)))
    ours.register()
    workers = [Worker(version, factory, loaded(weights(1), r, RANKS), world_size=RANKS) for r in range(RANKS)]
    from spccl.sync import _vllm_engine

    executor = Executor(workers, Threads.group(RANKS))
    monkeypatch.setattr(sys.modules["vllm.distributed.parallel_state"], "get_world_group", executor.group_of_thread)
    monkeypatch.setattr(_vllm_engine, "TorchWorkers", lambda group: group)
    with Http(executor) as server:
        client = VllmClient(server.url, run.folder, timeout_s=WAIT_S)
        client.update(run.publish())
        path, good = damage(run, run.publish())
        for call, text in (
            (lambda: client.update(2), "SHA-256.*serves on"),
            (lambda: VllmClient(server.url, run.folder / "none", timeout_s=1).open(), "no version within"),
            (lambda: client._post("init_weight_transfer_engine", {"init_info": {"x": 1}}), "unexpected keyword"),
            *(
                (
                    lambda x=x: client._post("init_weight_transfer_engine", {"init_info": x}),
                    f"{next(iter(x))} .*: wanted",
                )
                for x in ({"timeout_s": "30"}, {"timeout_s": float("nan")}, {"folder": 3}, {"world_size": "2"})
            ),
            *(
                (lambda x=x: client._session({"version": 2, **x}, None), f"{next(iter(x))} .*: wanted")
                for x in ({"version": "2"}, {"timeout_s": "30"}, {"timeout_s": 1e400}, {"action": ["update"]})
            ),
        ):
            with pytest.raises(StateError, match=text):
                call()
            assert not any(executor.answers), text
        executor.call("start_weight_update")  # of a client that ended there
        path.write_bytes(good)
        assert client.update(2) == 2 and not any(executor.answers)
    assert all(bits(w.engine.model) == bits(loaded(run.was[2], r, RANKS)) for r, w in enumerate(workers))


def test_a_mixture_stays_paused(http, run, monkeypatch):
    """An anchor that fails in the middle cannot be taken back. The client leaves the server paused, until it is."""
    client = VllmClient(http.url, run.folder, timeout_s=WAIT_S)
    run.publish()
    monkeypatch.setattr(_staged, "commit_large", fail)
    with pytest.raises(StateError, match=r"mixture.*stays paused"):
        client.update(1)
    assert http.is_paused
    monkeypatch.undo()
    vllm_stubs.install(monkeypatch, Checkpoint(weights(1)))
    client.update(1)
    assert not http.is_paused and bits(http.worker.engine.model) == bits(loaded(run.was[1]))


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
    VllmClient(http.url, run.folder).update(1)  # the first start imports much
    with pytest.raises(StateError, match=r"version 7: stage: worker 0 of 1: TimeoutError: .*waited .* for version 7"):
        VllmClient(http.url, run.folder, timeout_s=1).update(7)
    assert not http.is_paused
    http.world_size = 2  # data parallel, each engine with a vote of its own
    with pytest.raises(StateError, match="the server has 2 workers, 1 of them vote together"):
        VllmClient(http.url, run.folder).update(1)
    with pytest.raises(StateError, match=r"/nothing: status 404.*VLLM_SERVER_DEV_MODE"):
        VllmClient(http.url)._post("nothing")
    port = http._server.server_address[1]
    http.__exit__()
    with pytest.raises(PeerError, match=rf"127\.0\.0\.1:{port}/get_world_size.*is the server up"):
        VllmClient(http.url, run.folder).update(1)


def test_a_server_that_does_not_answer(run):
    import socket

    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(TimeoutError, match=r"get_world_size: no answer within 0\.2 s"):
            VllmClient(url, run.folder, timeout_s=0.2).update(1)


def test_a_server_whose_text_of_an_error_stalls(run):
    """The status has come, its text does not: an error of spccl within the time, not one of sockets."""
    import socket

    def answer():
        peer, _ = silent.accept()
        peer.recv(65536)
        peer.sendall(b"HTTP/1.1 500 Failed\r\nContent-Length: 9\r\n\r\nx")
        done.wait(WAIT_S)
        peer.close()

    done = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(StateError, match="get_world_size: status 500: Failed; the server's text did not arrive"):
            VllmClient(url, run.folder, timeout_s=0.5).update(1)
        done.set()
        thread.join(WAIT_S)


def test_an_interrupted_update_closes_its_session(http, run, monkeypatch):
    """And says that the server is paused."""
    client, send = VllmClient(http.url, run.folder, timeout_s=WAIT_S), VllmClient._send

    def interrupted(self, method, route, *args):
        if route == "update_weights":
            raise KeyboardInterrupt
        return send(self, method, route, *args)

    monkeypatch.setattr(VllmClient, "_send", interrupted)
    with pytest.raises(KeyboardInterrupt) as caught:
        client.update(run.publish())
    assert "stays paused" in caught.value.__notes__[0] and http.is_paused and not http.worker.is_active
    monkeypatch.undo()


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


def test_weights_that_are_derived_at_first_use_are_refused_then(http, run):
    """As vLLM's router does, which joins two gates in its first forward pass."""
    client = VllmClient(http.url, run.folder, timeout_s=WAIT_S)
    client.update(run.publish())
    derived(http.worker.engine.model)
    with pytest.raises(StateError, match=r"its 'w_uk' was made from the weights.*serves on"):
        client.update(run.publish())
    assert bits(http.worker.engine.model) == bits(loaded(run.was[1]))


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
    replica = Replica("vllm", model, lambda: more.items(), OneWorker(), lambda: None)
    replica.open(run.folder, WAIT_S)
    replica.update(1, WAIT_S)
    assert bits(model) == bits(loaded(run.was[1]))
    lacks = {name: x for name, x in more.items() if name != "q"}
    with pytest.raises(StateError, match="tensor 'q': the publisher has it, the server's checkpoint does not"):
        Replica("vllm", model, lambda: lacks.items(), OneWorker(), lambda: None).open(run.folder, WAIT_S)


def test_no_module_but_the_engine_imports_vllm(tmp_path):
    """`import spccl` and spccl.sync must not: it takes seconds, and trainers do not have it."""
    (tmp_path / "vllm.py").write_text("raise SystemExit('vllm was imported')")
    code = "import spccl, spccl.sync, spccl.sync.vllm, spccl.sync._replica"
    subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": str(tmp_path)}, check=True, timeout=500)


def test_entry_point():
    from importlib.metadata import entry_points

    (found,) = (one for one in entry_points(group="vllm.general_plugins") if one.name == "spccl")
    assert found.load() is ours.register
