"""Manifests that anyone may have written: parsed, or refused as FormatError; a receiver never half follows one."""

from __future__ import annotations

import copy
import json

import pytest

torch = pytest.importorskip("torch", reason="spccl.sync is for torch tensors, and none is installed")
pytest.importorskip("safetensors", reason="spccl.sync writes safetensors files, and it is not installed")

from hypothesis import HealthCheck, example, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from sync_runs import Net, published, state  # noqa: E402

import spccl  # noqa: E402
from spccl.sync import Subscriber  # noqa: E402
from spccl.sync.manifest import parse, parse_latest, sha256  # noqa: E402

NUMBERS = st.integers(-2, 70) | st.sampled_from([1 << 31, 1 << 40, 1 << 50, 1 << 63, 1 << 64, 10**400, -(1 << 63)])
TEXTS = st.text(max_size=20) | st.sampled_from(
    ["../../x", "/etc/passwd", "delta-00001.safetensors", "0" * 16, "\ud800"]
)
LEAVES = st.none() | st.booleans() | NUMBERS | st.floats() | TEXTS
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3), max_leaves=6
)


def paths(value: object, here: tuple = ()) -> list[tuple]:
    """The way to each place of a JSON value."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [here] + [path for key, item in inner for path in paths(item, (*here, key))]


@st.composite
def changed(draw, good: dict) -> dict:
    """A good manifest with one to three places that are other values, gone, twice, or exchanged."""
    bad = {"top": copy.deepcopy(good)}
    for _ in range(draw(st.integers(1, 3))):
        path = ("top", *draw(st.sampled_from(paths(bad["top"])[1:] or [()])))
        owner = bad
        for key in path[:-1]:
            owner = owner[key]
        what = draw(st.sampled_from(["value", "near", "gone", "twice"]))
        old = owner[path[-1]]
        if what == "near" and type(old) is int:
            owner[path[-1]] = old + draw(st.integers(-9, 9))
        elif what == "gone" and len(path) > 1:
            del owner[path[-1]]
        elif what == "twice" and isinstance(owner, list):
            owner.append(old)
        else:
            owner[path[-1]] = draw(VALUES)
        if not isinstance(bad["top"], dict):
            break
    return bad["top"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """(folder, its version 2, states, a receiver's model, the manifest of version 2)."""
    folder = tmp_path_factory.mktemp("run")
    states = published(folder, Net(), 2, anchor_share=0)
    newest = folder / "v000002"
    return folder, newest, states, Net(1), json.loads((newest / "manifest.json").read_text())


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_changed_manifests(run, data):
    """With the hash in `latest` to match, so that nothing but the reader's checks is in the way. A receiver at version
    1 raises an error of spccl and keeps its bits, or has version 2."""
    folder, newest, states, net, good = run
    bad = json.dumps(data.draw(changed(good))).encode()
    try:
        manifest = parse("it", bad)
    except spccl.FormatError as error:
        manifest = None
        assert str(error).startswith("it") and str(error).isascii()
    else:
        assert parse("it", manifest.dump()) == manifest
    restore(run)
    pull = Subscriber(folder, net)
    pull.apply(1)
    (newest / "manifest.json").write_bytes(bad)
    (folder / "latest").write_text(latest(bad))
    try:
        pull.apply()
    except spccl.Error:
        assert state(net) == states[1] or not pull.synced
    else:
        assert manifest is not None and state(net) == states[2]


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_changed_files_of_tensors(run, data):
    """Files that safetensors or the decoder of frames must refuse, with sizes and hashes to match. One receiver takes
    the delta, one the anchor."""
    folder, newest, states, net, good = run
    kind = data.draw(st.sampled_from(["delta", "anchor"]))
    path = newest / f"{kind}-00001.safetensors"
    whole = path.read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    bad = bytearray(whole)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, header + 200) | st.integers(0, len(bad)))
        bad[at : at + data.draw(st.integers(0, 2))] = data.draw(st.binary(max_size=2))
    bad = bad[: data.draw(st.just(len(bad)) | st.integers(8, len(bad)))]
    files = [{**good[kind][0], "bytes": len(bad), "sha256": sha256(bytes(bad))}]
    manifest = json.dumps({**good, kind: files, "anchor": files if kind == "anchor" else []}).encode()
    restore(run)
    pull = Subscriber(folder, net)
    if kind == "delta":
        pull.apply(1)
    before = state(net)
    try:
        path.write_bytes(bad)
        (newest / "manifest.json").write_bytes(manifest)
        (folder / "latest").write_text(latest(manifest))
        pull.apply()
    except spccl.Error:
        assert state(net) == before or not pull.synced
    else:
        assert state(net) == states[2]
    finally:
        path.write_bytes(whole)


def restore(run) -> None:
    """The good version 2."""
    folder, newest, _, _, good = run
    manifest = json.dumps(good).encode()
    (newest / "manifest.json").write_bytes(manifest)
    (folder / "latest").write_text(latest(manifest))


def latest(manifest: bytes, **fields) -> str:
    return json.dumps({"spccl_sync": 1, "version": 2, "epoch": 1, "sha256": sha256(manifest), **fields})


@settings(max_examples=100, deadline=None)
@given(data=st.binary(max_size=200) | st.builds(lambda value: json.dumps(value).encode(), VALUES))
@example(data=b"[" * 100000)
@example(data=b"1" * 5000)
@example(data=b'{"a":1,"a":2}')
@example(data=b"NaN")
def test_any_bytes(data):
    """Neither file makes the reader raise anything but FormatError."""
    for read in (parse, parse_latest):
        with pytest.raises(spccl.FormatError):
            read("it", data)


@pytest.mark.parametrize(
    ("way", "value", "text"),
    [
        (("delta", 0, "name"), "../../../etc/passwd", "delta 1: name is '../../../etc/passwd'"),
        (("delta", 0, "name"), "delta-00002.safetensors", "wanted delta-00001.safetensors"),
        (("delta", 0, "bytes"), 1 << 60, "bytes is"),
        (("delta", 0, "bytes"), True, "bytes is True"),
        (("tensors", 1, "dtype"), "object", "tensor 'embed.weight': dtype is 'object'"),
        (("tensors", 1, "shape"), [1 << 40, 1 << 40], "tensor 'embed.weight': shape is"),
        (("tensors", 1, "shape"), [3], "a part at 0 of 8000 elements overlaps, or lies outside"),
        (("tensors", 1, "sum"), "0" * 16, "sum is not sum_before and the changes"),
        (("tensors", 1, "name"), "nothing", "tensor 'nothing' is there twice"),
        (("tensors", 1, "parts", 0, "offset"), 1 << 40, "are not in delta-00001.safetensors of"),
        (("tensors", 1, "parts", 0, "offset"), 4, "bytes at 4 are not in"),
        (("tensors", 1, "parts", 0, "file"), 1, "file is 1"),
        (("tensors", 1, "parts", 0, "nnz"), 8001, "nnz is 8001"),
        (("anchor", 0, "tensors"), [0, 1], "the anchor's files hold tensors"),
        (("tensors",), [], "the anchor's files hold tensors"),
        (("tensors", 1, "shape"), [1] * 65, "tensor 'embed.weight': shape is"),
        (("tensors", 1, "shape"), [True], "tensor 'embed.weight': shape is [True]"),
        (("tensors", 1, "sum"), "0" * 15, "tensor 'embed.weight': sum is"),
        (("tensors", 1, "parts", 0, "sum_change"), "0" * 15 + "A", "tensor 'embed.weight': a part: sum_change is"),
        (("parent",), 7, "parent is 7, wanted a number from 1 to 1"),
        (("parent",), None, "sum_before is"),
        (("key",), 7, "key is 7"),
        (("spccl_sync",), 2, "spccl_sync is 2, wanted a number from 1 to 1"),
    ],
)
def test_refusals(run, way, value, text):
    """One of each kind, by what it says."""
    bad = copy.deepcopy(run[-1])
    order = {entry["name"]: place for place, entry in enumerate(bad["tensors"])}
    bad["tensors"].insert(1, bad["tensors"].pop(order["embed.weight"]))
    bad["anchor"][0]["tensors"] = [place for place, entry in enumerate(bad["tensors"]) if 0 not in entry["shape"]]
    parse("it", json.dumps(bad).encode())
    owner = bad
    for key in way[:-1]:
        owner = owner[key]
    owner[way[-1]] = value
    with pytest.raises(spccl.FormatError) as caught:
        parse("it", json.dumps(bad).encode())
    assert text in str(caught.value)
