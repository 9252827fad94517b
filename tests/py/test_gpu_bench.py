"""Tests `spccl bench --device cuda` without a GPU: the same code on CPU tensors, and functions without tensors."""

import ctypes
import dataclasses

import numpy as np
import pytest

torch = pytest.importorskip("torch")
click_testing = pytest.importorskip("click.testing")

from spccl import cli, verify  # noqa: E402
from spccl.bench import cases, command, gpu, gpu_codec, gpu_report, gpu_torch, gpu_verify, report, start  # noqa: E402

RATES = gpu_report.Rates(4000.0, 4000.0, 3900.0)
CPU = torch.device("cpu")


def case(collective="all_reduce", size=1 << 20, sparsity=0.99, dtype="float32", **more):
    op = "sum" if collective in cases.REDUCING else "none"
    return cases.Case(collective, size, dtype, op, sparsity, **more)


# ---- cases, floors, rows ----


def test_the_table_of_targets():
    found = list(cases.gpu_targets())
    wanted = {(c.collective, c.dtype, c.size_bytes >> 20, c.sparsity, c.max_ctas): c.target for c in found}
    assert len(wanted) == len(found) == 28
    assert wanted["all_gather", "float32", 512, 0.99, 0] == 8.0
    assert wanted["all_reduce", "float32", 512, 0.9, 0] == 3.6
    assert wanted["reduce_scatter", "float32", 16, 0.99, 0] == 4.5
    assert wanted["all_reduce", "float32", 512, 0.99, 32] == 3.0
    assert wanted["all_gather", "float32", 2048, 0.99, 0] is None


def test_bytes_that_memory_and_links_must_move():
    mib = 1 << 20
    gather, scatter, reduce = (case(c, 512 * mib) for c in cases.COLLECTIVES[:3])
    assert gpu_report.hbm_bytes(gather, 4, True) == (128 * mib, 384 * mib)
    assert gpu_report.hbm_bytes(gather, 4, False) == (128 * mib, 512 * mib)
    assert gpu_report.hbm_bytes(scatter, 4, False) == (512 * mib, 128 * mib)
    assert gpu_report.hbm_bytes(reduce, 4, True) == (512 * mib, 512 * mib)
    assert [gpu_report.dense_bytes_sent(c, 4) / mib for c in (gather, scatter, reduce)] == [384, 384, 768]
    assert gpu_report.floor_s(4e9, 4e9, 0, RATES) == pytest.approx(2e-3)
    assert gpu_report.floor_s(4e9, 4e9, 3.57e9, RATES) == pytest.approx(10e-3)  # the links take longer


def measured(**times):
    return report.Measured(
        times={name: np.array(t) for name, t in times.items()},
        wrong=dict.fromkeys(times, 0),
        wire_bytes=1000.0,
        frames={"coo": 3, "dense": 1},
        host={"spccl": 2e-5, "nccl": 1e-5},
    )


def gpu_row(c=None, m=None, **how):
    m = m or measured(spccl=[1e-3] * 3, nccl=[8e-3] * 3, nccl_symm=[6e-3, 6e-3, 7e-3])
    how = {"world_size": 4, "device": "cuda", "in_place": True, "graph": False, "rates": RATES} | how
    return gpu_report.make_gpu_row(c or case(target=8.0), m, **how)


def test_the_better_peer_counts():
    row = gpu_row()
    assert (row.peer, row.ratio) == ("nccl_symm", pytest.approx(6.0))
    assert row.nccl_time_us == pytest.approx(8000) and row.nccl_symm_time_us == pytest.approx(6000)
    assert row.host_us == pytest.approx(20) and row.nccl_host_us == pytest.approx(10)
    assert row.floor_us == pytest.approx(2 * (1 << 20) / 4000e9 * 1e6) and 0 < row.of_floor < 1
    other = gpu_row(m=measured(spccl=[1e-3], nccl=[2e-3], nccl_symm=[6e-3]))
    assert (other.peer, other.ratio) == ("nccl", pytest.approx(2.0))
    alone = gpu_row(m=measured(spccl=[1e-3]), rates=None)
    assert (alone.peer, alone.ratio, alone.floor_us, alone.peer_wrong) == ("none", None, None, None)


def test_csv_and_summary(tmp_path):
    codec = gpu_report.make_codec_row("encode", case(size=4_000_000), 1_000_000, [1e-6, 2e-6, 3e-6], 0, RATES)
    assert codec.gbs == pytest.approx(2000) and codec.of_rate == pytest.approx(0.5) and codec.target == 0.85
    assert codec.moved_gbs == pytest.approx(2500) and codec.floor_us == pytest.approx(1.25)
    text = gpu_report.summary([gpu_row()], [codec], [case(size=4096)])
    assert text.startswith("# summary") and "6.00<" in text and "0.50<" in text
    assert "1 left out, 0 wrong" in text and "size_bytes=4096" in text
    path = tmp_path / "r.csv"
    path.write_text(report.to_csv([gpu_row()], {"gpu": "4 x a GPU"}))
    rows, facts = report.read_csv(path)
    assert facts == {"gpu": "4 x a GPU"} and rows[0]["max_ctas"] == "0" and rows[0]["peer"] == "nccl_symm"
    assert "of_rate" in report.to_csv([codec], {})
    head, line = gpu_report.GpuRow.head(), gpu_row().line()
    assert "symm" in head and "6.00x" in line and "8.00x" in line


def test_budget():
    assert gpu.iterations(None, 10, 1.0, 20) == 20
    assert gpu.iterations(100.0, 10, 0.1, 20) == 20
    assert gpu.iterations(10.0, 10, 0.1, 20) == 10
    assert gpu.iterations(1.0, 10, 0.1, 20) == 5
    assert gpu.iterations(1.0, 10, 0.1, 3) == 3
    assert gpu.iterations(0.0, 10, 0.1, 20) == 0


def test_commit_from_the_environment(monkeypatch):
    monkeypatch.setenv("SPCCL_COMMIT", "abc123")
    assert report.machine()["commit"] == "abc123"


# ---- data ----


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_inputs_are_sparse_random_and_the_same_everywhere(dtype):
    c = case("reduce_scatter", 1 << 20, 0.9, dtype)
    x, again, other = (gpu_torch.input_of(c, r, 4, CPU) for r in (1, 1, 2))
    assert torch.equal(x, again) and not torch.equal(x, other)
    assert float((x == 0).float().mean()) == pytest.approx(0.9, abs=0.01)
    total = gpu_torch.expected_output(c, 3, 4, CPU)
    n = c.block_elems(4)
    wanted = sum(gpu_torch.input_of(c, r, 4, CPU)[3 * n :].double() for r in range(4))
    assert torch.equal(total.double(), wanted)
    dense = gpu_torch.input_of(dataclasses.replace(c, sparsity=0.0), 0, 4, CPU)
    assert int((dense == 0).sum()) == 0


def test_a_wrong_answer_is_counted(monkeypatch):
    """The check before timing finds a system that does nothing: the poison stays in its output."""
    monkeypatch.setattr(gpu, "starter", lambda *args: lambda: None)
    source, target = gpu_torch.buffers(CPU, 1 << 20, 1 << 20)
    for c, n_right in ((case("reduce_scatter"), 0), (case("all_gather"), 1 << 17)):
        data = gpu_torch.input_of(c, 0, 2, CPU)
        trial = gpu.Trial(gpu.System("none", None, source, target), c, data, 0, 2, gpu.GpuPlan((c,)))
        wanted = gpu_torch.expected_output(c, 0, 2, CPU)
        assert trial.wrong(wanted) == wanted.numel() - n_right  # in place: its own block is right


def test_encoded_by_the_cpu():
    x = gpu_torch.input_of(case(dtype="bfloat16"), 0, 1, CPU)
    encoded = gpu_codec.encoded_by_cpu(x, "bfloat16", 8192)
    import spccl

    back = np.asarray(spccl.decode(encoded.numpy().tobytes())).view(np.uint8)
    assert back.tobytes() == x.view(torch.uint8).numpy().tobytes()


# ---- over processes ----


@pytest.mark.slow
@pytest.mark.parametrize("in_place", [True, False])
def test_all_of_it_over_two_processes(in_place):
    chosen = tuple(cases.cases(cases.COLLECTIVES, [1 << 12, 1 << 19], ["float32", "bfloat16"], "sum", [0.99, 0.0]))
    plan = gpu.GpuPlan(chosen, device="cpu", iters=3, warmup=1, host_calls=20, in_place=in_place, timeout_s=60)
    heard = []
    rows = start.run_spawned(plan, 2, deadline_s=600, on_message=heard.append)
    kinds = [kind for kind, _ in heard]
    assert kinds == ["facts", *["row"] * len(chosen), "left out"] and heard[-1][1] == []
    assert "nccl_symm skipped: only CUDA memory" in heard[0][1]["peers"]
    for row, c in zip(rows, chosen, strict=True):
        assert (row.collective, row.size_bytes, row.sparsity) == (c.collective, c.size_bytes, c.sparsity)
        assert row.wrong == 0 and row.peer_wrong == 0 and row.peer == "nccl" and row.ratio > 0
        assert row.host_us > 0 and row.iters == 3
        if c.size_bytes == 1 << 19 and c.sparsity == 0.99:
            assert 0 < row.wire_bytes < row.dense_bytes / 5 and "dense" not in row.format_mix


@pytest.mark.slow
def test_a_spent_budget_leaves_cases_out_on_all_ranks():
    chosen = tuple(cases.cases(["all_gather"], [1 << 16], ["float32"], "sum", [0.9, 0.5]))
    plan = gpu.GpuPlan(chosen, device="cpu", host_calls=0, seconds=1e-6, timeout_s=60)
    heard = []
    assert start.run_spawned(plan, 2, deadline_s=600, on_message=heard.append) == []
    assert heard[-1] == ("left out", list(chosen))


# ---- the command ----


def run(*args, code=0):
    done = click_testing.CliRunner().invoke(cli.main, ["bench", *map(str, args)])
    assert done.exit_code == code, done.output
    return done.output


def options(**changes):
    base = {p.name: p.default for p in cli.main.commands["bench"].params}
    base |= {"smallest": 64 << 10, "largest": 16 << 20, "device": "cuda"}
    return base | changes


def test_plan_without_and_with_chosen_cases():
    plan = command.plan_of({}, options())
    assert plan.cases == tuple(cases.gpu_targets()) and len(plan.codec) == 10 and plan.with_peers
    assert {c.dtype for c in plan.codec} == {"float32", "bfloat16"}
    given = {"collectives": ("all_reduce",), "max_ctas": (0, 32)}
    plan = command.plan_of(given, options(**given, sparsities=(0.99,), graph=True, peer="none"))
    assert [(c.size_bytes >> 20, c.max_ctas, c.target) for c in plan.cases] == [(512, 0, 8.0), (512, 32, 3.0)]
    assert plan.codec == () and plan.graph and not plan.with_peers


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (["--device", "cuda", "--via", "torch"], "--via: is for --device cpu"),
        (["--device", "cuda", "--transport", "tcp"], "--transport: is for --device cpu"),
        (["--device", "cuda", "--peer", "gloo"], "gloo needs --device cpu"),
        (["--device", "cuda", "--dtype", "float8"], "cannot be reduced"),
        (["--device", "cuda", "--op", "avg"], "rounds avg differently"),
        (["--device", "cuda", "--min", "8", "--max", "4"], "wanted 1 <= min <= max"),
        (["--graph"], "--graph: is for --device cuda"),
        (["--seconds", "10"], "--seconds: is for --device cuda"),
        (["--codec-csv", "x.csv"], "--codec-csv: is for --device cuda"),
        (["--peer", "nccl"], "nccl needs --device cuda"),
    ],
)
def test_options_that_do_not_fit(args, text):
    assert text in run(*args, code=2)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there are GPUs")
def test_without_gpus_it_says_so():
    assert "4 GPU(s) wanted, torch" in run("--device", "cuda", "--ranks", 4, code=1)


def test_what_was_measured_before_a_failure_is_written(monkeypatch, tmp_path):
    def fail(plan, world, *, deadline_s, on_message):
        on_message(("facts", {"gpu": "1 x a GPU"}))
        on_message(("row", gpu_row()))
        raise command.RanksFailed("rank 1 of 4: died without a message")

    monkeypatch.setattr(command, "n_ranks", lambda command, asked: 4)
    monkeypatch.setattr(start, "run_spawned", fail)
    text = run("--device", "cuda", "--csv", tmp_path / "r.csv", code=1)
    assert "rank 1 of 4: died without a message" in text and "1 rows" in text
    rows, facts = report.read_csv(tmp_path / "r.csv")
    assert len(rows) == 1 and facts["failed"] == "rank 1 of 4: died without a message"


# ---- verify ----


@pytest.mark.slow
def test_verify_over_two_processes():
    heard = []
    result = gpu_verify.verify_gpus(2, deadline_s=600, on_progress=heard.append, device="cpu")
    assert result.n_wrong == 0 and not result.examples, result.examples
    n_cases = sum(1 for _ in verify.cases())
    assert sum(tally.n_cases for tally in result.tallies.values()) == n_cases
    assert heard and heard == sorted(heard) and sum(result.frames.values()) > n_cases
    assert result.links == ["rank 0: host memory", "rank 1: host memory"]


def test_verify_can_fail():
    class Done:
        def wait(self):
            pass

    wanted = np.arange(8, dtype=np.float32)
    got, source = torch.arange(8.0), torch.arange(8.0)
    bits = gpu_verify._bits
    assert verify.problem(Done(), got, wanted, source, wanted, bits) is None
    source[3] = -1.0
    assert "the input was changed: 1 of 8" in verify.problem(Done(), got, wanted, source, wanted, bits)
    got[7] = 0.0
    assert "1 of 8 elements wrong, the first at 7" in verify.problem(Done(), got, wanted, None, wanted, bits)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there are GPUs")
def test_verify_without_gpus_says_so():
    done = click_testing.CliRunner().invoke(cli.main, ["verify", "--device", "cuda"])
    assert done.exit_code == 1 and "spccl verify --device cuda: 1 GPU(s) wanted" in done.output


# ---- the codec, with the CPU's encoder instead of the GPU's ----


class HostLibrary:
    """The functions of libspccl.so that gpu_codec calls, on the host. Each encoded array has `damage` wrong bytes."""

    damage = 0

    def spccl_cuda_slice_elems(self, dtype, wanted):
        return 2048

    def spccl_encode_bound(self, n_elems, dtype, options):
        return 8 * n_elems + 4096

    def spccl_cuda_encode_scratch_bytes(self, n_elems, dtype, slice_elems):
        return 64

    def spccl_last_error(self):
        return b"the device said no"

    def spccl_cuda_encode(self, x, n_elems, dtype, options, dst, dst_cap, offsets, scratch, status, stream):
        import spccl

        name = spccl.frame.DTYPES[dtype - 1]
        array = np.ctypeslib.as_array(ctypes.cast(x, ctypes.POINTER(ctypes.c_uint8)), (n_elems * 4,))
        frames = bytearray(spccl.encode(array.view(np.float32), dtype=name, slice_elems=2048))
        starts = [f.offset for f in spccl.frame.iter_frames(bytes(frames))] + [len(frames)]
        for i in range(self.damage):
            frames[-1 - i] ^= 1
        ctypes.memmove(dst, bytes(frames), len(frames))
        ctypes.memmove(offsets, np.array(starts, np.int64).tobytes(), 8 * len(starts))
        return 0

    def spccl_cuda_decode(self, frames, n_bytes, offsets, verb, dst, n_elems, dtype, slice_elems, status, stream):
        import spccl

        back = spccl.decode(ctypes.string_at(frames, n_bytes)).tobytes()
        ctypes.memmove(dst, back, len(back))
        return 0


@pytest.fixture
def host_codec(monkeypatch):
    stream = type("Stream", (), {"cuda_stream": 0})
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(gpu_codec.torch, "device", lambda *_: CPU)
    monkeypatch.setattr(gpu_codec, "_library", HostLibrary)
    monkeypatch.setattr(gpu_torch, "stream_seconds", lambda call, iters: (call(), [1e-3] * iters)[1])


def test_codec_rows(host_codec):
    chosen = gpu_codec.codec_cases(["float32"], [0.99, 0.0], 1 << 18)
    sent = []
    rows = gpu_codec.measure(RATES, chosen, 3, sent.append)
    assert rows == sent and [(r.what, r.sparsity) for r in rows] == [
        ("encode", 0.99),
        ("decode", 0.99),
        ("encode", 0.0),
        ("decode", 0.0),
    ]
    assert all(r.wrong == 0 and r.iters == 3 for r in rows)
    assert rows[0].encoded_bytes < rows[0].dense_bytes / 5 < rows[2].encoded_bytes


def test_codec_faults_show(host_codec, monkeypatch):
    monkeypatch.setattr(HostLibrary, "damage", 3)
    chosen = gpu_codec.codec_cases(["float32"], [0.0], 1 << 16)
    encode, decode = gpu_codec.measure(RATES, chosen, 1)
    assert encode.wrong == 3 and decode.wrong == 1  # the last three bytes are in the last element
    monkeypatch.setattr(HostLibrary, "spccl_cuda_encode", lambda *_: -50)
    with pytest.raises(RuntimeError, match="status -50: the device said no"):
        gpu_codec.measure(RATES, chosen, 1)
