"""spccl.sync over a folder, where nothing fails: every receiver gets the publisher's bits, by the cheapest route."""

from __future__ import annotations

import json
import os
import stat

import pytest

torch = pytest.importorskip("torch", reason="spccl.sync is for torch tensors, and none is installed")
pytest.importorskip("safetensors", reason="spccl.sync writes safetensors files, and it is not installed")

from sync_runs import Net, change, published, raw, received, state  # noqa: E402

from spccl.sync import Place, Publisher, Subscriber, _encode, _staged, delta  # noqa: E402


@pytest.mark.parametrize("wire_dtype", [None, torch.bfloat16, torch.float16])
def test_each_version_is_the_publishers(tmp_path, wire_dtype):
    """Float32 weights that are rounded on the way, tied ones, integers, empty tensors; one that takes all versions."""
    net, copy = Net(), Net(1)
    copy.to(wire_dtype or torch.float32)
    pull = Subscriber(tmp_path, copy)
    with Publisher(tmp_path, net, wire_dtype=wire_dtype) as push:
        for number in range(1, 5):
            assert push.publish() == pull.apply() == number == pull.verify() == push.verify()
            assert state(copy) == state(net, wire_dtype)
            change(net, number)
    assert copy.head.weight is copy.embed.weight


def test_special_values_travel(tmp_path):
    """NaN payloads, -0.0 and infinities, which a sum or a comparison as numbers would lose, in many dtypes."""
    values = torch.tensor([0.0, -0.0, float("nan"), float("inf"), 1.0, 1e-40])
    odd = torch.tensor([0x7FC00001, 0x7F800001, 0], dtype=torch.int32).view(torch.float32)
    names = ("float64", "float32", "bfloat16", "float16", "int64", "int8", "uint8", "bool", "float8_e4m3fn", "uint16")
    tensors = {name: values.nan_to_num(0, 1, 0).to(getattr(torch, name)) for name in names}
    copies = {name: torch.zeros_like(x) for name, x in tensors.items()}
    tensors["odd"], copies["odd"] = torch.zeros(3), torch.ones(3)
    pull = Subscriber(tmp_path, copies)
    with Publisher(tmp_path, tensors) as push:
        push.publish()
        pull.apply()
        tensors["odd"].copy_(odd)
        for name in ("float64", "float32", "bfloat16", "float16"):
            tensors[name].copy_(values)
        for name in ("bool", "int8", "uint8", "int64"):
            tensors[name].copy_(values.nan_to_num(1, 1, 0).flip(0))
        tensors["float8_e4m3fn"].view(torch.uint8).copy_(torch.tensor([0x7F, 0x80, 0xFF, 1, 2, 3]))
        push.publish()
        pull.apply()
    assert {n: raw(x) for n, x in copies.items()} == {n: raw(x) for n, x in tensors.items()}


def test_a_late_receiver_takes_the_fewest_bytes(tmp_path):
    """Deltas where they are fewer bytes than an anchor; the anchor where they are more, or were removed."""
    net, early, late = Net(), Net(1), Net(2)
    pull, other = Subscriber(tmp_path, early), Subscriber(tmp_path, late)
    routes = []
    with Publisher(tmp_path, net, keep=2, anchor_share=10) as push:
        push.publish()
        assert pull.apply() == 1
        for number in (1, 2):
            change(net, number)
            push.publish()
        pull.stage()
        routes.append([(step.version, step.from_anchor) for step in pull._staged[0]])
        assert pull.commit() == 3
        other.stage()
        routes.append([(step.version, step.from_anchor) for step in other._staged[0]])
        push.anchor_share = 0
        for number in (3, 4, 5):
            change(net, number, density=0.9)
            push.publish()
    assert routes == [[(2, False), (3, False)], [(1, True), (2, False), (3, False)]]
    pull.stage()
    assert [(step.version, step.from_anchor) for step in pull._staged[0]] == [(6, True)]
    assert pull.commit() == other.apply() == 6
    assert state(early) == state(late) == state(net)
    # keep=2: version 5, which has an anchor, and 6.
    assert sorted(p for p in os.listdir(tmp_path) if p.startswith("v")) == ["v000005", "v000006"]


def test_an_anchor_comes_when_the_chain_is_long(tmp_path):
    """anchor_share: a receiver that joins never reads more than that beside the anchor, and old files go."""
    net = Net()
    published(tmp_path, net, 30, keep=1, anchor_share=0.5)
    there = {path.name: json.loads((path / "manifest.json").read_text()) for path in tmp_path.glob("v*")}
    assert sum(bool(manifest["anchor"]) for manifest in there.values()) == 1
    assert there[min(there)]["anchor"] and min(there) > "v000001"
    assert received(tmp_path) == (30, state(net))


def test_an_older_version_and_back(tmp_path):
    net, copy = Net(), Net(1)
    states = published(tmp_path, net, 4, keep=4)
    pull = Subscriber(tmp_path, copy)
    for version in (3, 2, 4, 1, 4):
        assert pull.apply(version) == version
        assert state(copy) == states[version]


def test_rollback(tmp_path):
    """Several deltas in one commit go back to the version before them all, and forward again."""
    net, copy = Net(), Net(1)
    pull = Subscriber(tmp_path, copy)
    states = [{}]
    with Publisher(tmp_path, net) as push:
        for number in range(1, 4):
            change(net, number)
            push.publish()
            states.append(state(net))
            if number == 1:
                pull.apply()
    assert pull.apply() == 3
    assert pull.rollback() == 1 == pull.verify()
    assert state(copy) == states[1]
    assert pull.apply() == 3 == pull.verify()
    assert state(copy) == states[3]


def test_staging_is_bounded(tmp_path):
    """A publisher whose buffer is small writes several files. A receiver with little memory takes them one by one, and
    reads all back."""
    net, copy = torch.nn.Linear(1024, 1024), torch.nn.Linear(1024, 1024)
    pull = Subscriber(tmp_path, copy, staging_bytes=1 << 20)
    with Publisher(tmp_path, net, staging_bytes=3 << 20, anchor_share=100) as push:
        push.publish()
        pull.apply()
        change(net, 1, density=1.0)
        push.publish()
        push.verify()
        files = sorted((tmp_path / "v000002").glob("delta-*"))
        assert push.stats()["base_bytes"] == 4 * (1024 * 1024 + 1024) and push.stats()["staging_bytes"] == 3 << 20
        assert len(files) > 1 and all(path.stat().st_size <= (3 << 20) + 200 for path in files)
        pull.stage()
        assert pull._staged[1] is None
        assert pull.commit() == 2
        assert state(copy) == state(net)
        change(net, 2)  # the base followed, though its frames were on the disk only
        push.publish()
    assert Subscriber(tmp_path, copy).apply() == 3
    assert state(copy) == state(net)


def test_a_restarted_publisher_goes_on(tmp_path):
    """Its base is the folder's newest version, not its own weights: a receiver needs only what differs from that."""
    net, copy = Net(), Net(1)
    states = published(tmp_path, net, 3, wire_dtype=torch.bfloat16)
    copy.to(torch.bfloat16)
    pull = Subscriber(tmp_path, copy)
    pull.apply()
    with Publisher(tmp_path, net, wire_dtype=torch.bfloat16) as push:
        assert (push.epoch, push.version) == (2, 3)
        assert push.publish() == 4
        assert not list((tmp_path / "v000004").glob("anchor*"))
        assert pull.apply() == 4
        assert state(copy) == states[3]
        change(net, 9)
        push.publish()
    assert pull.apply() == 5
    assert state(copy) == state(net, torch.bfloat16)


@pytest.mark.parametrize("what", ["parameter", "memory"])
def test_parameters_that_are_replaced(tmp_path, what):
    """A model that got other parameters (load_state_dict(assign=True)), or other memory for the same ones, is read and
    written where they are now."""
    net, copy = Net(), Net(1)
    pull = Subscriber(tmp_path, copy)
    with Publisher(tmp_path, net) as push:
        for number in range(5):
            for model in (net, copy) if number > 1 else ():
                other = model.body.weight.detach().clone()
                if what == "memory":
                    model.body.weight.data = other
                else:
                    model.body.weight = torch.nn.Parameter(other)
            change(net, number)
            push.publish()
            pull.apply()
            assert state(copy) == state(net)
    pull.verify()


def test_places_that_move(tmp_path):
    """The tensor of a place gets other memory: it is written there. Sums are carried over."""
    w, copy = torch.randn(4, 300), torch.zeros(2, 300)
    pull = Subscriber(tmp_path, places={"w": [box(copy, w.shape, (1, 3), (0, 300))]})
    with Publisher(tmp_path, {"w": w}) as push:
        for _ in range(4):
            w[:, 7] += 1
            push.publish()
            pull.apply()
            assert torch.equal(copy, w[1:3]) and pull.verify() == push.version
            old, copy.data = copy.data, copy.data.clone()
            old.zero_()


def test_weights_of_inference_mode(tmp_path):
    """A server may have made its weights in torch.inference_mode(), which refuses writes outside of it."""
    net = Net()
    with torch.inference_mode():
        copy = Net(1)
    pull = Subscriber(tmp_path, copy)
    with Publisher(tmp_path, net) as push:
        for number in range(2):
            change(net, number)
            push.publish()
            pull.apply()
    assert state(copy) == state(net)
    assert pull.rollback() == 1 == pull.verify()


def test_memory_of_another_order(tmp_path):
    """A publisher's tensors need not be contiguous."""
    net = torch.nn.Conv2d(8, 8, 3).to(memory_format=torch.channels_last)
    net.extra = torch.nn.Parameter(torch.rand(30, 20).t())
    copy = torch.nn.Conv2d(8, 8, 3)
    copy.extra = torch.nn.Parameter(torch.rand(20, 30))
    pull = Subscriber(tmp_path, copy)
    with Publisher(tmp_path, net) as push:
        for number in range(3):
            change(net, number)
            push.publish()
            pull.apply()
            assert state(copy) == state(net)


def test_untied_receiver(tmp_path):
    """Weights that are tied at the publisher alone are written twice."""
    net, copy = Net(), Net(1)
    copy.head.weight = torch.nn.Parameter(copy.head.weight.detach().clone())
    pull = Subscriber(tmp_path, copy)
    with Publisher(tmp_path, net) as push:
        for number in range(2):
            change(net, number)
            push.publish()
            pull.apply()
            pull.verify()
    assert raw(copy.head.weight) == raw(copy.embed.weight) == raw(net.embed.weight)


def box(dst, whole_shape, rows, cols) -> Place:
    """The place of a block of a matrix, at the first element of `dst`."""
    return Place(dst, whole_shape[1], rows[0], rows[1] - rows[0], cols[0], cols[1] - cols[0], dst.stride(0))


def test_places_of_fused_and_sharded_receivers(tmp_path):
    """Two ranks of tensor parallelism: q and k fused in one matrix and cut by rows, o cut by columns, a norm on both,
    an expert on one. The sums of the parts of both ranks are those of the whole."""
    torch.manual_seed(0)
    tensors = {n: torch.randn(8, 6) for n in ("q", "k", "o", "expert")} | {"norm": torch.randn(6)}
    fused = [torch.zeros(8, 6) for _ in range(2)]
    outs, norms, expert = [torch.zeros(8, 3) for _ in range(2)], [torch.zeros(6) for _ in range(2)], torch.zeros(8, 6)
    again = torch.zeros(4, 6)  # rank 0 has its part of k twice
    pulls = []
    for rank in range(2):
        rows = (4 * rank, 4 * rank + 4)
        places = {
            "q": [box(fused[rank], (8, 6), rows, (0, 6))],
            "k": [box(dst, (8, 6), rows, (0, 6)) for dst in ([fused[0][4:], again], [fused[1][4:]])[rank]],
            "o": [box(outs[rank], (8, 6), (0, 8), (3 * rank, 3 * rank + 3))],
            "expert": [box(expert, (8, 6), (0, 8), (0, 6))] if rank else [],
            "norm": [Place(norms[rank], 6, 0, 1, 0, 6, 6)],
        }
        pulls.append(Subscriber(tmp_path, places=places))
    with Publisher(tmp_path, tensors) as push:
        for number in range(3):
            push.publish()
            assert [pull.apply() for pull in pulls] == [number + 1] * 2
            assert torch.equal(torch.cat([fused[0][:4], fused[1][:4]]), tensors["q"])
            assert torch.equal(torch.cat([fused[0][4:], fused[1][4:]]), tensors["k"])
            assert torch.equal(again, tensors["k"][:4])
            assert torch.equal(torch.cat(outs, dim=1), tensors["o"])
            assert torch.equal(expert, tensors["expert"])
            assert all(torch.equal(norm, tensors["norm"]) for norm in norms)
            sums = [pull.sums() for pull in pulls]
            assert set(sums[0]) == {"q", "k", "o"}
            for name, (mine, whole) in sums[0].items():
                assert (mine + sums[1][name][0]) % (1 << 64) == whole
            for pull in pulls:
                pull.verify()
            for x in tensors.values():
                x.view(-1)[number] += 1
        fused[0][5, 3] += 1
        with pytest.raises(Exception, match="tensor 'k'"):
            pulls[0].verify()


def test_a_sharded_rank_keeps_its_share(tmp_path, monkeypatch):
    """Of eight ranks that have 64 rows each: one keeps an eighth of the frames, and all have the bits."""
    monkeypatch.setattr(_encode, "PART_ELEMS", 1 << 16)
    w = torch.randn(512, 1024)
    shards = [torch.zeros(64, 1024) for _ in range(8)]
    places = [{"w": [box(x, w.shape, (64 * rank, 64 * rank + 64), (0, 1024))]} for rank, x in enumerate(shards)]
    pulls = [Subscriber(tmp_path, places=mine) for mine in places]
    with Publisher(tmp_path, {"w": w}) as push:
        for _ in range(2):
            push.publish()
            for pull in pulls:
                pull.stage()
            staged = [pull._staged[1] for pull in pulls]
            for pull in pulls:
                pull.commit()
            assert torch.equal(torch.cat(shards), w)
            w.view(-1)[torch.randperm(w.numel())[:9999]] += 1
    for (found,) in staged:
        (target,) = found.targets.targets
        assert target.frame.untyped_storage().nbytes() < push.stats()["delta_bytes"] / 7
    assert sum(pull.sums()["w"][0] for pull in pulls) % (1 << 64) == pulls[0].sums()["w"][1]


def test_late_shards(tmp_path, monkeypatch):
    """Three deltas in one commit are checked in copies of what a receiver has, here rows, columns, and single ranges;
    and back. What a GPU needs to write and to undo all is made in stage."""
    monkeypatch.setattr(_encode, "PART_ELEMS", 1 << 16)
    prepared = []
    monkeypatch.setattr(delta, "prepare", prepared.append)
    w = torch.randn(512, 1024)
    has = [(slice(60, 128), slice(None)), (slice(None), slice(100, 300)), (slice(7, 8), slice(3, 999))]
    shards = [w[rows, cols].clone() for rows, cols in has]
    pulls = []
    for x, (rows, cols) in zip(shards, has, strict=True):
        (r0, r1, _), (c0, c1, _) = rows.indices(512), cols.indices(1024)
        pulls.append(Subscriber(tmp_path, places={"w": [box(x, w.shape, (r0, r1), (c0, c1))]}))
    with Publisher(tmp_path, {"w": w}) as push:
        push.publish()
        before = [x.clone() for x in shards]
        for pull in pulls:
            pull.adopt()
        for _ in range(3):
            w.view(-1)[torch.randperm(w.numel())[:9999]] += 1
            push.publish()
    for pull, x, old, (rows, cols) in zip(pulls, shards, before, has, strict=True):
        pull.stage()
        changes = pull._staged[1]
        assert [change.is_checked for change in changes] == [True] * 3
        assert all(packed in prepared for change in changes for packed, _ in [(change.targets, 0), *change.olds])
        assert pull.commit() == 4 == pull.verify()
        assert torch.equal(x, w[rows, cols])
        assert pull.rollback() == 1 == pull.verify()
        assert torch.equal(x, old)


def test_adopt(tmp_path):
    """A receiver that loaded the publisher's checkpoint by other means needs no anchor."""
    net, copy = Net(), Net()
    pull = Subscriber(tmp_path, copy)
    with Publisher(tmp_path, net) as push:
        push.publish()
        assert pull.adopt() == 1
        change(net, 1)
        push.publish()
    pull.stage()
    assert [step.from_anchor for step in pull._staged[0]] == [False]
    pull.commit()
    assert state(copy) == state(net)
    with pytest.raises(ValueError, match=r"tensor 'count' is not that of version 2"):
        Subscriber(tmp_path, Net()).adopt()


def test_hooks(tmp_path):
    """Where files are copied by other means, the hooks say when: after `latest` is in place, before it is read."""
    net, seen = Net(), []
    with Publisher(
        tmp_path, net, after_write=lambda path: seen.append((path.name, (tmp_path / "latest").is_file()))
    ) as push:
        push.publish()
        push.after_write = lambda path: 1 / 0
        with pytest.raises(ZeroDivisionError):
            push.publish()
        assert push.version == 2
    Subscriber(tmp_path, Net(1), before_read=lambda path: seen.append(path)).apply()
    assert seen == [("v000001", True), tmp_path]


def test_files_can_be_read_by_other_users(tmp_path):
    """safetensors writes files that only their owner can read; receivers often run as someone else."""
    published(tmp_path, Net(), 2)
    umask = os.umask(0)
    os.umask(umask)
    for path in tmp_path.glob("v*/*"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~umask, path


def test_waits_for_a_version(tmp_path):
    """timeout_s: a receiver that joins first; every wait ends."""
    with pytest.raises(TimeoutError, match=r"waited 0.1 s for a version, the newest is none"):
        Subscriber(tmp_path, Net()).apply(timeout_s=0.1)
    net, copy, n_calls = Net(), Net(1), []

    def publish_at_last(_) -> None:
        n_calls.append(1)
        if len(n_calls) == 3:
            published(tmp_path, net, 1)

    assert Subscriber(tmp_path, copy, before_read=publish_at_last).apply(1, timeout_s=30) == 1
    assert state(copy) == state(net)


def test_old_values_are_few(tmp_path):
    """What a receiver holds between stage and commit follows the change, not the model."""
    net, copy = torch.nn.Linear(1024, 1024), torch.nn.Linear(1024, 1024)
    pull = Subscriber(tmp_path, copy)
    with Publisher(tmp_path, net) as push:
        push.publish()
        pull.apply()
        change(net, 1, density=0.001)
        push.publish()
    pull.stage()
    (staged,) = pull._staged[1]
    assert isinstance(staged, _staged.Change) and staged.olds[0][1].numel() < 4 * 1024 * 1024 // 32
