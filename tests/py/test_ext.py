"""Tests of the C extension alone: inputs that it takes and refuses, errors, memory."""

import array
import builtins
import ctypes
import gc
import pickle
import shutil
import subprocess
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

import spccl
from spccl import _ext

BASES = {
    "ArgumentError": ValueError,
    "FormatError": ValueError,
    "SettingError": ValueError,
    "MismatchError": ValueError,
    "TimeoutError": builtins.TimeoutError,
    "PeerError": ConnectionError,
    "UnreachableError": ConnectionError,
    "AuthError": PermissionError,
    "OutOfMemoryError": MemoryError,
    "SystemCallError": OSError,
    "UnsupportedError": NotImplementedError,
    "StateError": RuntimeError,
    "AbortedError": RuntimeError,
    "DeviceError": RuntimeError,
    "InternalError": RuntimeError,
}


@pytest.mark.parametrize(("name", "base"), BASES.items())
def test_exception_classes(name, base):
    kind = getattr(spccl, name)
    assert issubclass(kind, spccl.Error) and issubclass(kind, base) and issubclass(kind, RuntimeError)
    assert isinstance(kind.status, int) and kind.status < 0
    error = pickle.loads(pickle.dumps(kind("who, where")))
    assert type(error) is kind and str(error) == "who, where"


def test_import_needs_neither_torch_nor_numpy():
    code = (
        "import sys; sys.modules['numpy'] = None; sys.modules['torch'] = None\n"
        "import spccl, array\n"
        "x = array.array('f', [0, 0, 3, 0]); out = array.array('f', [9] * 4)\n"
        "assert spccl.decode(spccl.encode(x), out) is out and out == x\n"
        "try: spccl.decode(spccl.encode(x))\n"
        "except ModuleNotFoundError as e: assert 'pip install numpy' in str(e)\n"
        "else: raise SystemExit('numpy came from nowhere')\n"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr


def test_free_threaded_python_is_refused():
    code = "import sys; sys.abiflags = 't'\ntry: import spccl\nexcept ImportError as e: print(e)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=500)
    assert "does not support free-threaded Python" in done.stdout, done.stdout + done.stderr


def test_free_threaded_build_is_refused(tmp_path):
    """The compiler refuses too, for builds of the extension without spccl's CMake files."""
    compiler = shutil.which("cc")
    source = Path(__file__).resolve().parents[2] / "python" / "ext" / "module.h"
    if compiler is None or not source.is_file():
        pytest.skip("needs a C compiler and the sources")
    (tmp_path / "pyconfig.h").write_text("#define Py_GIL_DISABLED 1\n")
    command = [compiler, "-fsyntax-only", "-x", "c", f"-I{tmp_path}", str(source)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert done.returncode != 0 and "spccl._ext needs a Python with the GIL" in done.stderr


NUMPY_DTYPES = ["float32", "float16", "float64", "int8", "int16", "int32", "int64", "uint8"]


@pytest.mark.parametrize("dtype", NUMPY_DTYPES)
def test_buffer_dtypes(dtype):
    x = np.array([0, 1, 0, 2], dtype)
    encoded = _ext.encode(x)
    assert _ext.inspect(encoded)["dtype"] == dtype
    for kind in (x.tobytes(), bytearray(x.tobytes()), memoryview(x), x.reshape(2, 2)):
        assert _ext.encode(kind, dtype=dtype) == encoded


def test_array_module_and_native_long():
    assert _ext.inspect(_ext.encode(array.array("l", [1])))["dtype"] == f"int{8 * array.array('l').itemsize}"
    assert _ext.inspect(_ext.encode(array.array("d", [1])))["dtype"] == "float64"


def test_explicit_dtype_of_the_same_size():
    bits = np.array([0, 0x3F80], np.uint16)
    assert _ext.inspect(_ext.encode(bits, dtype="bfloat16"))["dtype"] == "bfloat16"
    with pytest.raises(spccl.ArgumentError, match="cannot be read as dtype"):
        _ext.encode(bits, dtype="float32")


REFUSED = [
    (lambda: _ext.encode([1.0]), "x: got a list"),
    (lambda: _ext.encode(None), "x: got a NoneType"),
    (lambda: _ext.encode(np.zeros((4, 4), "f4").T[:2]), "x: the array is not C-contiguous"),
    (lambda: _ext.encode(np.zeros(4, ">f4")), "x: the elements are big-endian"),
    (lambda: _ext.encode(np.zeros(4, ">f4"), dtype="float32"), "x: the elements are big-endian"),
    (lambda: _ext.encode(np.zeros(4, "u4")), "x: elements of type.*; pass dtype= to read them as one of that size$"),
    (lambda: _ext.encode(np.zeros(4, "c8")), r'x: elements of type.*x\.view\("float32"\) in numpy'),
    (lambda: _ext.encode(np.zeros(4, "c16")), r'x: elements of type.*x\.view\("float64"\) in numpy'),
    (lambda: _ext.encode(np.zeros(4, "g")), r'x: elements of type.*; convert them, as with x\.astype\("float64"\)$'),
    (lambda: _ext.encode(b"1234567", dtype="int32"), "x: 7 bytes"),
    (lambda: _ext.encode(np.zeros(4, "f4"), dtype="float31"), 'x: dtype "float31" is not known'),
    (lambda: _ext.encode(np.zeros(4, "f4"), format="zip"), 'format: got "zip"'),
    (lambda: _ext.encode(np.zeros(4, "f4"), slice_elems=7), "slice_elems"),
    (lambda: _ext.encode(np.zeros(4, "f4"), slice_elems=1 << 40), "slice_elems: got 1099511627776;"),
    (lambda: _ext.encode(np.zeros(4, "f4"), slice_elems=(1 << 31) + 2048), "slice_elems.*at most 2147483648"),
    (lambda: _ext.encode(np.zeros(4, "f4"), slice_elems=(1 << 64) + 2048), "slice_elems: got 1844674407370955"),
    (lambda: _ext.encode(np.zeros(4, "f4"), slice_elems=-2048), "slice_elems: got -2048"),
    (
        lambda: _ext.encode(np.zeros(4, "f4"), base=np.zeros(3, "f4")),
        "base: got 3 elements of float32; wanted 4",
    ),
    (lambda: _ext.encode(np.zeros(4, "f4"), base=np.zeros(4, "i4")), "base: got 4 elements of int32"),
    (lambda: _ext.decode(_ext.encode(b"a"), b"b"), "out: the memory is read-only"),
    (lambda: _ext.decode(_ext.encode(b"a"), bytearray(1), "subtract"), 'verb: got "subtract"'),
    (lambda: _ext.inspect(_ext.encode(b"a"), -1), "offset: got -1"),
    (lambda: _ext.inspect(_ext.encode(b"a"), 1000), "offset: got 1000"),
]


@pytest.mark.parametrize(("call", "text"), REFUSED)
def test_refused_arguments_are_named(call, text):
    with pytest.raises(spccl.ArgumentError, match=text):
        call()


# ---- arrays of references are refused, whatever the dtype ----


def arrays_of_references():
    objects = np.array([object(), "text", 7, None], object)
    fields = np.zeros(4, [("O_is_a_name", "i8")])  # no reference: only the name has the letter
    assert _ext.encode(fields, dtype="int64")
    aligned = np.dtype([("a", "i4"), ("b", "O")], align=True)
    return {
        "object array": objects,
        "struct with an object": np.zeros(4, [("o", "O")]),
        "struct in a struct": np.zeros(4, [("s", [("o", "O")])]),
        "padded struct": np.zeros(2, aligned),
        "array of objects in a struct": np.zeros(2, [("o", "O", (1,))]),
        "memoryview": memoryview(objects),
        "ctypes.py_object": (ctypes.py_object * 4)(),
        "ctypes.c_char_p": (ctypes.c_char_p * 4)(),
        "ctypes.c_wchar_p": (ctypes.c_wchar_p * 4)(),
        "ctypes.c_void_p": (ctypes.c_void_p * 4)(),
        "ctypes.POINTER": (ctypes.POINTER(ctypes.c_int) * 4)(),
        "ctypes function": (ctypes.CFUNCTYPE(None) * 4)(),
    }


@pytest.mark.parametrize("kind", arrays_of_references())
@pytest.mark.parametrize("dtype", [None, "int64", "uint8", "float64"])
def test_references_are_never_read_as_numbers(kind, dtype):
    x = arrays_of_references()[kind]
    encoded = _ext.encode(np.arange(4, dtype="i8"))
    numbers = np.zeros(4, "i8")
    with spccl.Communicator(0, 1, unique_id=spccl.get_unique_id()) as comm:
        for call in (
            lambda: _ext.encode(x, dtype=dtype),
            lambda: _ext.encode(numbers, base=x, dtype=dtype),
            lambda: _ext.decode(encoded, x, "set", dtype),
            lambda: _ext.decode(x, numbers),
            lambda: _ext.inspect(x),
            lambda: comm.all_reduce(x, dtype=dtype),
            lambda: comm.all_reduce(numbers, x, dtype=dtype),
            lambda: comm.all_gather(x, numbers, dtype=dtype),
            lambda: comm.reduce_scatter(x, numbers, dtype=dtype),
            lambda: comm.broadcast(x, dtype=dtype),
        ):
            with pytest.raises(spccl.ArgumentError) as caught:
                call()
            if dtype in (None, "int64"):
                assert "references" in str(caught.value) and "dtype=" not in str(caught.value)


def test_complex_numbers_are_not_references():
    assert _ext.inspect(_ext.encode(np.zeros(4, "c8"), dtype="float64"))["n_elems"] == 4


# ---- DLPack ----


class Capsules:
    """A DLPack producer around a numpy array. It can use the old protocol, or claim to be on another device."""

    def __init__(self, x, old=False, device=(1, 0), capsule=None):
        self._x, self._old, self._device, self._capsule = x, old, device, capsule

    def __dlpack_device__(self):
        return self._device

    def __dlpack__(self, **kwargs):
        if self._capsule is not None:
            return self._capsule
        if self._old and kwargs:
            raise TypeError("unexpected keyword argument 'max_version'")
        return self._x.__dlpack__(**kwargs)


@pytest.mark.parametrize("old", [False, True])
def test_dlpack_old_and_new(old):
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    assert _ext.encode(Capsules(x, old)) == _ext.encode(x)
    out = np.zeros(6, np.float32)
    _ext.decode(_ext.encode(x), Capsules(out, old))
    assert out.tolist() == x.ravel().tolist()
    with pytest.raises(spccl.ArgumentError, match="x: the tensor is not C-contiguous"):
        _ext.encode(Capsules(x.T, old))


def test_dlpack_read_only_is_refused_as_destination():
    out = np.zeros(1, np.float32)
    out.flags.writeable = False
    encoded = _ext.encode(np.ones(1, np.float32))
    with pytest.raises((spccl.ArgumentError, BufferError), match=r"read-?only"):
        _ext.decode(encoded, Capsules(out))
    assert out[0] == 0


@pytest.mark.parametrize(
    ("device", "text"), [((2, 0), "a CUDA device"), ((10, 1), "a ROCm device"), ((8, 0), "type 8")]
)
def test_dlpack_device_memory_is_refused(device, text):
    with pytest.raises(spccl.UnsupportedError, match=text):
        _ext.encode(Capsules(np.zeros(4, np.float32), device=device))


def test_dlpack_that_is_none():
    with pytest.raises(spccl.ArgumentError, match="did not return a DLPack capsule"):
        _ext.encode(Capsules(None, capsule=object()))


def test_torch_tensors():
    torch = pytest.importorskip("torch")
    for dtype in (
        torch.float32,
        torch.bfloat16,
        torch.float16,
        torch.float64,
        torch.int8,
        torch.int64,
        torch.uint8,
    ):
        x = torch.tensor([0, 1, 0, 3]).to(dtype)
        out = torch.full_like(x, 7)
        _ext.decode(_ext.encode(x), out)
        assert torch.equal(out, x)
        assert _ext.inspect(_ext.encode(x))["dtype"] == str(dtype).removeprefix("torch.")
    x = torch.tensor([0.0, 1.0]).to(torch.float8_e4m3fn)
    assert _ext.inspect(_ext.encode(x))["dtype"] == "float8"
    with pytest.raises(spccl.ArgumentError, match="not C-contiguous"):
        _ext.encode(torch.zeros(4, 4).t()[:3])
    with pytest.raises(spccl.ArgumentError, match=r"; pass real .*\(out\) in torch$"):
        _ext.decode(_ext.encode(x), torch.zeros(4, dtype=torch.complex128))


def test_torch_tensors_that_require_grad():
    """A parameter is read and written as the memory that it is; a result of autograd is only read."""
    torch = pytest.importorskip("torch")
    values = torch.tensor([0.0, 1.0, 0.0, 3.0])
    parameter = torch.nn.Parameter(torch.full((2, 2), 7.0))
    assert spccl.decode(_ext.encode(values), parameter) is parameter
    assert torch.equal(parameter.detach().flatten(), values) and parameter.requires_grad
    assert _ext.encode(parameter) == _ext.encode(values) == _ext.encode(parameter * 1)
    with pytest.raises(BufferError, match="detach"):
        _ext.decode(_ext.encode(values), parameter * 1)


# ---- memory ----


def refs_of(things):
    return [sys.getrefcount(thing) for thing in things]


def test_no_reference_is_kept():
    x, base, out = np.zeros(5000, "f4"), np.ones(5000, "f4"), np.zeros(5000, "f4")
    encoded = _ext.encode(x)
    things = [x, base, out, encoded]
    before = refs_of(things)
    for _ in range(50):
        _ext.encode(x, base=base)
        _ext.decode(encoded, out)
        _ext.inspect(encoded)
        _ext.encode(Capsules(x))
        for call, _ in REFUSED:
            with pytest.raises(spccl.ArgumentError):
                call()
    gc.collect()
    assert refs_of(things) == before


def test_memory_does_not_grow():
    x = np.zeros(50_000, "f4")
    x[::10] = 1
    out = np.empty_like(x)

    def work(times):
        for _ in range(times):
            encoded = _ext.encode(x)
            _ext.decode(encoded, out)
            _ext.inspect(encoded)
            _ext.info()
            with pytest.raises(spccl.FormatError):
                _ext.decode(encoded[:-1], out)
            with pytest.raises(spccl.ArgumentError):
                _ext.encode([1])

    work(5)
    gc.collect()
    tracemalloc.start()
    try:
        work(5)
        gc.collect()
        before, _ = tracemalloc.get_traced_memory()
        work(100)
        gc.collect()
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after - before < 20_000, f"{after - before} bytes more after 100 rounds"


def test_buffer_is_exported_only_during_the_call():
    out = bytearray(16)
    _ext.decode(_ext.encode(bytes(16)), out)
    out.append(1)  # raises BufferError while it is exported
    assert len(out) == 17


def test_types_cannot_be_made_or_changed_by_hand():
    with pytest.raises(TypeError):
        _ext.Request()
    with pytest.raises(TypeError):
        _ext.Communicator.rank = 5


def test_module_in_two_copies():
    """With multi-phase init a second import makes a second module, with types and exceptions of its own."""
    import importlib.util

    spec = importlib.util.spec_from_file_location("spccl._ext", _ext.__file__)
    other = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(other)
    assert other.Communicator is not _ext.Communicator and other.Error is not _ext.Error
    with pytest.raises(other.ArgumentError):
        other.encode([1])
    assert other.encode(b"abc") == _ext.encode(b"abc")


def test_info_entries():
    entries = _ext.info()
    kinds = {kind for kind, _, _, _ in entries}
    assert {"setting", "transport", "kernels"} <= kinds
    assert all(name and why for _, name, _, why in entries)
    assert any(name == "scalar" and value.startswith("in") for _, name, value, _ in entries)
    assert _ext.version() == spccl.__version__
