"""spccl.sync with a real vLLM server: over HTTP it takes versions, bit for bit, or keeps what it had.

`make test-vllm` runs these tests, in an environment of its own. The reference is a second server that loads the
checkpoint of each version whole, by vLLM's own reload.
"""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="needs the environment of `make test-vllm`")

import tokenizers
import torch
import transformers
from server import Server, serving

from spccl.errors import StateError
from spccl.sync import Publisher, VllmClient

ENGINE = ("--weight-transfer-config", '{"backend": "spccl"}')
PROMPT = [3, 141, 59, 26, 5, 35]
N_VERSIONS = 5
EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "rl" / "grpo_vllm.py"
DEADLINE_S = 120

pytestmark = pytest.mark.timeout(1500)


@dataclasses.dataclass
class Trained:
    """Versions of a trainer in `folder`, and the checkpoint of each."""

    folder: Path
    checkpoints: dict[int, Path]


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Trained:
    """A small Qwen3 with random weights. Version 1 is what the servers load; each later one changes 1% of it."""
    top = tmp_path_factory.mktemp("trained")
    random = torch.Generator().manual_seed(7)
    torch.manual_seed(7)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    heads = {"num_key_value_heads": 2, "head_dim": 32, "vocab_size": 250, "tie_word_embeddings": False}
    model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(max_position_embeddings=128, **sizes, **heads))
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"t{i}": i for i in range(250)}, unk_token="t0"))
    checkpoints = {}
    with Publisher(top / "run", model, wire_dtype=torch.bfloat16, keep=N_VERSIONS, anchor_share=9) as push:
        for number in range(1, N_VERSIONS + 1):
            checkpoints[number] = top / f"checkpoint{number}"
            saved = {name: x.to(torch.bfloat16) for name, x in model.state_dict().items()}
            model.save_pretrained(checkpoints[number], state_dict=saved)
            transformers.PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(checkpoints[number])
            assert push.publish() == number
            with torch.no_grad():
                for x in model.parameters():
                    x += torch.randn(x.shape, generator=random) * (torch.rand(x.shape, generator=random) < 0.01)
    return Trained(top / "run", checkpoints)


@dataclasses.dataclass
class Loaded:
    """What a server has after a full load of each version."""

    parameters: dict[int, list[dict[str, torch.Tensor]]]
    tokens: dict[int, list[int]]


@pytest.fixture(scope="module", params=[1, 2], ids=["tp1", "tp2"])
def ranks(request) -> int:
    return request.param


@pytest.fixture(scope="module")
def loaded(trained, ranks, tmp_path_factory) -> Loaded:
    top = tmp_path_factory.mktemp("loaded")
    found = Loaded({}, {})
    with serving(trained.checkpoints[1], top, ranks=ranks) as server:
        for number, checkpoint in trained.checkpoints.items():
            if number > 1:
                server.call("pause", {})
                server.call("collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(checkpoint)}})
                server.call("resume", {})
            found.parameters[number] = server.parameters(top / f"parameters{number}")
            found.tokens[number] = server.tokens(PROMPT)
    assert len({str(tokens) for tokens in found.tokens.values()}) == N_VERSIONS  # else they would prove nothing
    return found


@pytest.fixture(scope="module")
def server(trained, ranks, tmp_path_factory) -> Iterator[Server]:
    with serving(trained.checkpoints[1], tmp_path_factory.mktemp("server"), *ENGINE, ranks=ranks) as started:
        yield started


def require_version(server: Server, loaded: Loaded, number: int, folder: Path) -> None:
    """The server holds a version: the bits of all parameters, and the tokens."""
    for rank, (have, want) in enumerate(zip(server.parameters(folder), loaded.parameters[number], strict=True)):
        assert have.keys() == want.keys()
        for name, x in want.items():
            same = torch.equal(have[name].contiguous().view(torch.uint8), x.contiguous().view(torch.uint8))
            assert same, f"version {number}: worker {rank}: parameter {name}"
    assert server.tokens(PROMPT) == loaded.tokens[number]


def test_versions_and_a_failure(trained, loaded, server, tmp_path):
    """Anchor, delta, a delta staged before; a damaged one changes nothing and the server answers; then two at once."""
    client = VllmClient(server.url, trained.folder, timeout_s=DEADLINE_S)
    assert client.version() == "default"
    for number in (1, 2):
        assert client.update(number) == number
        require_version(server, loaded, number, tmp_path)
    client.stage(3)
    assert server.tokens(PROMPT) == loaded.tokens[2]
    assert client.update(3) == 3 and client.version() == "3"
    require_version(server, loaded, 3, tmp_path)

    (delta,) = (trained.folder / "v000004").glob("delta*")
    good = delta.read_bytes()
    damaged = bytearray(good)
    damaged[-20] ^= 4
    delta.chmod(0o644)
    delta.write_bytes(damaged)
    with pytest.raises(StateError, match=r"version 4: stage: worker 0 .*SHA-256.*serves on"):
        client.update(4)
    require_version(server, loaded, 3, tmp_path)
    assert client.version() == "3"
    delta.write_bytes(good)
    assert client.update(5) == 5
    require_version(server, loaded, 5, tmp_path)


def test_a_worker_that_fails_while_it_writes(trained, loaded, server, tmp_path):
    """The last worker fails in the middle of a delta. All workers take it back, also where it was written whole."""
    client = VllmClient(server.url, trained.folder, timeout_s=DEADLINE_S)
    client.update(5)
    number, client = republished(trained, server, loaded, tmp_path)
    server.call("collective_rpc", {"method": "spccl_test_fail_once", "args": [len(loaded.parameters[1]) - 1]})
    with pytest.raises(StateError, match=r"the test's own failure.*serves on"):
        client.update(number)
    require_version(server, loaded, 1, tmp_path)
    client.update(number)
    require_version(server, loaded, 2, tmp_path)


def republished(trained: Trained, server: Server, loaded: Loaded, top: Path) -> tuple[int, VllmClient]:
    """Another folder, whose versions are the bits of versions 1 and 2: the server takes 1. Returns the next one."""
    folder = top / "again"
    client = VllmClient(server.url, folder, timeout_s=DEADLINE_S)
    load = transformers.Qwen3ForCausalLM.from_pretrained
    model = load(trained.checkpoints[1], dtype=torch.bfloat16)
    with Publisher(folder, model) as push:
        client.update(push.publish())
        require_version(server, loaded, 1, top)
        with torch.no_grad():
            model.load_state_dict(load(trained.checkpoints[2], dtype=torch.bfloat16).state_dict())
        return push.publish(), client


def test_a_client_that_died(trained, loaded, server, tmp_path):
    """Between start and finish, and while the server was paused. The next client's update ends both; a request that
    waited meanwhile gets its answer, with the new weights."""
    client = VllmClient(server.url, trained.folder, timeout_s=DEADLINE_S)
    client.update(4)
    server.call("pause?mode=keep", {})
    server.call("start_weight_update", {})
    answers: list[list[int]] = []
    waiting = threading.Thread(target=lambda: answers.append(server.tokens(PROMPT)))
    waiting.start()
    VllmClient(server.url, trained.folder, timeout_s=DEADLINE_S).update(5)
    waiting.join(DEADLINE_S)
    assert answers == [loaded.tokens[5]]
    require_version(server, loaded, 5, tmp_path)


def test_a_folder_of_another_model(trained, loaded, server, tmp_path):
    """The error names the tensor; the server keeps its weights, and takes versions of its own folder."""
    VllmClient(server.url, trained.folder, timeout_s=DEADLINE_S).update(4)
    with Publisher(tmp_path / "other", {"model.embed_tokens.weight": torch.zeros(3, 4)}) as push:
        push.publish()
    with pytest.raises(StateError, match=r"open .*tensor '[\w.]+': the plan has it, the publisher does not"):
        VllmClient(server.url, tmp_path / "other", timeout_s=DEADLINE_S).open()
    VllmClient(server.url, trained.folder, timeout_s=DEADLINE_S).update(5)
    require_version(server, loaded, 5, tmp_path)


def test_the_example(trained, loaded, server, tmp_path):
    """examples/rl/grpo_vllm.py as a user runs it."""
    command = [sys.executable, str(EXAMPLE), "--url", server.url, "--folder", str(tmp_path / "run"), "--steps", "3"]
    done = subprocess.run([*command, "--lr", "1e-4"], capture_output=True, text=True, timeout=600)
    steps = re.findall(r"^step (\d): reward [\d.]+, version (\d): ([\d.]+)% changed", done.stdout, re.M)
    assert done.returncode == 0 and [(n, v) for n, v, _ in steps] == [("0", "1"), ("1", "2"), ("2", "3")], done
    assert all(0 < float(changed) < 90 for _, _, changed in steps[1:])


def test_a_server_that_repacks(trained, tmp_path):
    """vLLM on CPUs as it is: its layers pack their weights. It is refused by name, and goes on serving."""
    config = ("--additional-config", f'{{"spccl": {{"folder": "{trained.folder}"}}}}')
    with serving(trained.checkpoints[1], tmp_path, *ENGINE, *config, plugin=False) as server:
        before = server.tokens(PROMPT)
        with pytest.raises(StateError, match=r"takes no other"):
            VllmClient(server.url, tmp_path, timeout_s=DEADLINE_S).open()
        with pytest.raises(StateError, match=r"layer 'model\.[\w.]+': vLLM on CPUs packs its weight"):
            VllmClient(server.url, timeout_s=DEADLINE_S).update(1)
        assert server.tokens(PROMPT) == before
