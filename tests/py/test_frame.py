"""Tests of encode, decode and inspect."""

import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import spccl
from spccl.frame import DTYPES, FORMATS, dtype_name, iter_frames, numpy_dtype

EDGES = [0, 1, 31, 32, 33, 255, 256, 257, 4095, 4096, 4097, 3 * 4096 + 7, 65536, 65537]


def pattern(n, dtype, zeros=0.9, seed=0):
    """[n] elements of random bits; a fraction of about `zeros` of them is zero."""
    rng = np.random.default_rng([int(os.environ["SPCCL_TEST_SEED"]), seed, n])
    storage = numpy_dtype(dtype)
    x = np.frombuffer(rng.bytes(n * storage.itemsize), storage).copy()
    x[rng.random(n) < zeros] = 0
    return x


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", EDGES)
def test_round_trip_keeps_every_bit(n, dtype):
    for zeros in (0.0, 0.9, 1.0):
        x = pattern(n, dtype, zeros)
        encoded = spccl.encode(x, dtype=dtype)
        back = spccl.decode(encoded)
        assert back.dtype == x.dtype and back.tobytes() == x.tobytes()
        frames = spccl.inspect(encoded)
        assert {f.dtype for f in frames} == {dtype} and sum(f.n_elems for f in frames) == n


@pytest.mark.parametrize("format", ["tile", "pici", "coo", "dense"])
def test_forced_formats(format):
    x = pattern(10_000, "float32")
    frames = spccl.inspect(spccl.encode(x, format=format))
    assert {f.format for f in frames} == {format}
    assert spccl.decode(spccl.encode(x, format=format)).tobytes() == x.tobytes()
    for frame in frames:
        assert sum(frame.sections().values()) == frame.frame_bytes and frame.sections()["header"] == 64


def test_special_values_travel():
    x = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 5e-324, 0.0], np.float64)
    x[4:5].view(np.uint64)[0] = 0x7FF0DEADBEEF0001  # a signalling NaN with a payload
    encoded = spccl.encode(x)
    assert spccl.decode(encoded).tobytes() == x.tobytes()


def test_slice_elems_sets_frames():
    x = pattern(20_000, "int16")
    assert [f.n_elems for f in spccl.inspect(spccl.encode(x, slice_elems=8192))] == [8192, 8192, 3616]


def test_delta_and_verbs():
    base, new = pattern(9000, "int32", 0.5, 1), pattern(9000, "int32", 0.5, 1)
    new[::50] += 1
    delta = spccl.encode(new, base=base)
    assert all(f.is_delta for f in spccl.inspect(delta)) and len(delta) < new.nbytes / 10
    out = base.copy()
    assert spccl.decode(delta, out, "overwrite") is out
    assert out.tobytes() == new.tobytes()
    with pytest.raises(spccl.FormatError, match="delta"):
        spccl.decode(delta)
    out = np.ones(9000, np.int32)
    spccl.decode(spccl.encode(new), out, "add")
    assert np.array_equal(out, new + 1)
    with pytest.raises(spccl.ArgumentError, match="pass out="):
        spccl.decode(delta, verb="overwrite")
    for out in (None, np.zeros(9000, np.int32)):
        with pytest.raises(spccl.ArgumentError, match='verb: got "max"; wanted set, add or overwrite'):
            spccl.decode(delta, out, "max")
    with pytest.raises(spccl.UnsupportedError):
        spccl.decode(spccl.encode(b"\x01", dtype="float8"), bytearray(1), "add", "float8")


def test_wrong_destination():
    encoded = spccl.encode(np.ones(10, np.float32))
    with pytest.raises(spccl.FormatError, match="float32"):
        spccl.decode(encoded, np.zeros(10, np.int32))
    for n in (0, 9, 11):
        with pytest.raises(spccl.FormatError, match=f"encoded has 10 elements, out has {n}$"):
            spccl.decode(encoded, np.zeros(n, np.float32))
    for n in (9, 10, 25):  # of three frames some are decoded
        with pytest.raises(spccl.FormatError, match=f"encoded has 30 elements, out has {n}$"):
            spccl.decode(encoded * 3, np.zeros(n, np.float32))


def test_bad_encoded_arrays_say_where():
    good = spccl.encode(np.ones(10, np.float32))
    for encoded, offset in [
        (b"", "byte 0"),
        (b"x" * 100, "byte 0"),
        (good[:-1], "byte 0"),
        (good + b"x", f"byte {len(good)}"),
        (good + good[:70], f"byte {len(good)}"),
    ]:
        with pytest.raises(spccl.FormatError, match=offset):
            spccl.inspect(encoded)
        with pytest.raises(spccl.FormatError):
            spccl.decode(encoded, np.zeros(20, np.float32))
    frames = iter_frames(good + b"junk" * 20)
    assert next(frames).n_elems == 10
    with pytest.raises(spccl.FormatError, match=f"byte {len(good)}"):
        next(frames)


def test_mixed_dtypes_in_one_encoded_array():
    encoded = spccl.encode(np.ones(4, np.float32)) + spccl.encode(np.ones(4, np.int32))
    assert [f.dtype for f in spccl.inspect(encoded)] == ["float32", "int32"]
    with pytest.raises(spccl.FormatError, match="one array has one dtype"):
        spccl.decode(encoded)


def empty_frames(n_bytes, dtype):
    """An encoded array of zeros that has `n_bytes` when decoded. Each frame has 64 bytes."""
    frame = spccl.encode(np.zeros(1 << 20, dtype), slice_elems=1 << 20)
    return frame * (n_bytes // (np.dtype(dtype).itemsize << 20))


def test_decode_allocates_at_most_max_bytes():
    small = empty_frames(1 << 24, "float64")
    assert spccl.decode(small).nbytes == 1 << 24
    assert spccl.decode(small, max_bytes=1 << 24).nbytes == 1 << 24
    with pytest.raises(spccl.ArgumentError, match=rf"at most max_bytes={(1 << 24) - 1}\."):
        spccl.decode(small, max_bytes=(1 << 24) - 1)
    large = empty_frames((1 << 30) + (8 << 20), "float64")
    assert len(large) < 10_000
    with pytest.raises(spccl.ArgumentError, match="max_bytes=1073741824"):
        spccl.decode(large)
    assert spccl.decode(small, np.ones(1 << 21), max_bytes=1).sum() == 0, "unused with out="


def test_max_bytes_stops_at_the_frame_that_passes_it():
    """decode does not read the bytes after that frame, so a hostile length costs neither time nor memory."""
    with pytest.raises(spccl.ArgumentError, match="up to byte 128 "):
        spccl.decode(empty_frames(8 << 20, "int8") + b"junk" * 100, max_bytes=(1 << 21) - 1)


def test_the_former_keyword_stream():
    x = pattern(100, "int32")
    encoded = spccl.encode(x)
    assert spccl.decode(encoded=encoded).tobytes() == spccl.decode(stream=encoded).tobytes() == x.tobytes()
    assert spccl.inspect(encoded=encoded) == spccl.inspect(stream=encoded) == spccl.inspect(encoded)
    for call in (spccl.decode, spccl.inspect):
        with pytest.raises(TypeError, match="both"):
            call(encoded, stream=encoded)
        with pytest.raises(TypeError, match="neither"):
            call()


def test_dtype_names():
    assert dtype_name(None) is None and dtype_name("bfloat16") == "bfloat16"
    assert dtype_name(np.float16) == dtype_name(np.dtype("f2")) == "float16"
    torch = pytest.importorskip("torch")
    assert dtype_name(torch.bfloat16) == "bfloat16" and dtype_name(torch.float8_e5m2) == "float8"
    assert FORMATS == ("empty", "tile", "pici", "coo", "dense")


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(-(2**31), 2**31 - 1) | st.just(0), max_size=600),
    st.sampled_from(["auto", "pici", "coo", "dense"]),
)
def test_any_integers(values, format):
    x = np.array(values, np.int32)
    assert np.array_equal(spccl.decode(spccl.encode(x, format=format)), x)


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 400), st.integers(0, 255), st.sampled_from(["auto", "tile", "pici", "coo", "dense"]))
def test_a_changed_byte_is_an_error_or_another_array_never_a_crash(offset, value, format):
    x = np.zeros(300, np.int16)
    x[::7] = 5
    encoded = bytearray(spccl.encode(x, format=format))
    encoded[offset % len(encoded)] = value
    out = np.zeros(300, np.int16)
    try:
        spccl.decode(encoded, out)
    except spccl.Error as error:
        assert str(error)
