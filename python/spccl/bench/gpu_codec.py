"""Measures the codec on one GPU through the C API of libspccl.so, and compares it with the rates of GPU memory."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

import torch

from .. import frame
from .._torch_glue import LIBRARY
from . import gpu_torch
from .cases import ELEM_BYTES, Case
from .gpu_report import CodecRow, Rates, make_codec_row

_DTYPES = {name: i + 1 for i, name in enumerate(frame.DTYPES)}  # spccl_dtype in spccl.h
_FORMAT_AUTO, _VERB_SET = -1, 0
_COMPARED_BYTES = 16 << 20  # the first bytes of the array, which the CPU encodes too


class _EncodeOptions(ctypes.Structure):
    """spccl_encode_options of spccl.h."""

    _fields_ = (
        ("struct_bytes", ctypes.c_size_t),
        ("base", ctypes.c_void_p),
        ("format", ctypes.c_int),
        ("slice_elems", ctypes.c_uint32),
    )


def _library() -> ctypes.CDLL:
    lib = ctypes.CDLL(str(LIBRARY))
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    lib.spccl_last_error.restype = ctypes.c_char_p
    lib.spccl_cuda_slice_elems.argtypes = (ctypes.c_int, ctypes.c_uint32)
    lib.spccl_cuda_slice_elems.restype = ctypes.c_uint32
    lib.spccl_encode_bound.argtypes = (size, ctypes.c_int, pointer)
    lib.spccl_encode_bound.restype = size
    lib.spccl_cuda_encode_scratch_bytes.argtypes = (size, ctypes.c_int, ctypes.c_uint32)
    lib.spccl_cuda_encode_scratch_bytes.restype = size
    lib.spccl_cuda_encode.argtypes = (pointer, size, ctypes.c_int, pointer, pointer, size, *[pointer] * 4)
    lib.spccl_cuda_decode.argtypes = (
        *(pointer, size, pointer, ctypes.c_int, pointer, size),
        *(ctypes.c_int, ctypes.c_uint32, pointer, pointer),
    )
    return lib


class Codec:
    """Encodes and decodes arrays of up to n_elems elements of one dtype, on the current CUDA stream.

    Raises: RuntimeError with the library's text when a call fails.
    """

    def __init__(self, dtype: str, n_elems: int, device: torch.device) -> None:
        self._lib, self._dtype = _library(), _DTYPES[dtype]
        self.slice_elems = self._lib.spccl_cuda_slice_elems(self._dtype, 0)
        self._options = _EncodeOptions(ctypes.sizeof(_EncodeOptions), None, _FORMAT_AUTO, self.slice_elems)
        bound = self._lib.spccl_encode_bound(n_elems, self._dtype, ctypes.byref(self._options))
        if not self.slice_elems or not bound:
            raise RuntimeError(f"spccl: the GPU cannot encode {n_elems} elements of {dtype}: {self._error()}")
        scratch = self._lib.spccl_cuda_encode_scratch_bytes(n_elems, self._dtype, self.slice_elems)
        n_slices = -(-n_elems // self.slice_elems)
        self.encoded = torch.zeros(bound, dtype=torch.uint8, device=device)
        self._offsets = torch.zeros(n_slices + 1, dtype=torch.int64, device=device)
        self._scratch = torch.zeros(max(scratch, 1), dtype=torch.uint8, device=device)
        self._status = torch.zeros(1, dtype=torch.int32, device=device)

    def encode(self, x: torch.Tensor) -> None:
        self._check(
            self._lib.spccl_cuda_encode(
                *(x.data_ptr(), x.numel(), self._dtype, ctypes.byref(self._options)),
                *(self.encoded.data_ptr(), self.encoded.numel(), self._offsets.data_ptr()),
                *(self._scratch.data_ptr(), self._status.data_ptr(), torch.cuda.current_stream().cuda_stream),
            )
        )

    def encoded_bytes(self, n_elems: int) -> int:
        """Bytes of the last encoded array of n_elems elements. Waits for the GPU."""
        self.finish()
        return int(self._offsets[-(-n_elems // self.slice_elems)].item())

    def decode(self, out: torch.Tensor, encoded_bytes: int) -> None:
        self._check(
            self._lib.spccl_cuda_decode(
                *(self.encoded.data_ptr(), encoded_bytes, self._offsets.data_ptr(), _VERB_SET),
                *(out.data_ptr(), out.numel(), self._dtype, self.slice_elems),
                *(self._status.data_ptr(), torch.cuda.current_stream().cuda_stream),
            )
        )

    def finish(self) -> None:
        """Wait for the GPU. Raises: RuntimeError if it found an error."""
        status = int(self._status.item())
        if status:
            raise RuntimeError(f"spccl: the codec on the GPU ended with status {-status} (spccl.h)")

    def _check(self, status: int) -> None:
        if status != 0:
            raise RuntimeError(f"spccl: status {status}: {self._error()}")

    def _error(self) -> str:
        return self._lib.spccl_last_error().decode()


def encoded_by_cpu(x: torch.Tensor, dtype: str, slice_elems: int) -> torch.Tensor:
    """`x` as encoded by the CPU, as bytes."""
    bits = x.cpu().view(torch.uint8).numpy().view(frame.numpy_dtype(dtype))
    encoded = frame.encode(bits, dtype=dtype, slice_elems=slice_elems)
    return torch.frombuffer(bytearray(encoded), dtype=torch.uint8)


def wrong_bytes(codec: Codec, x: torch.Tensor, dtype: str) -> int:
    """Encode the first part of `x` on GPU and CPU; number of bytes that differ."""
    part = x[: _COMPARED_BYTES // x.element_size()]
    codec.encode(part)
    got = codec.encoded[: codec.encoded_bytes(part.numel())].cpu()
    wanted = encoded_by_cpu(part, dtype, codec.slice_elems)
    n = min(got.numel(), wanted.numel())
    return int((got[:n] != wanted[:n]).sum()) + abs(got.numel() - wanted.numel())


def measure(
    rates: Rates, cases: Sequence[Case], iters: int, send: Callable[[CodecRow], None] | None = None
) -> list[CodecRow]:
    """Encode and decode the array of each case (dtype, size, sparsity) on the current device: check, then time.

    Raises: RuntimeError on a codec error. Wrong elements are counted and raise nothing.
    """
    rows: list[CodecRow] = []
    device = torch.device("cuda", torch.cuda.current_device())
    for case in cases:
        x = gpu_torch.input_of(case, 0, 1, device)
        codec = Codec(case.dtype, x.numel(), device)
        strange = wrong_bytes(codec, x, case.dtype)
        codec.encode(x)
        size = codec.encoded_bytes(x.numel())
        out = torch.empty_like(x)
        gpu_torch.poison(out)
        codec.decode(out, size)
        codec.finish()
        lost = out.numel() - gpu_torch.same_bits(out, x)
        encode = gpu_torch.stream_seconds(lambda x=x, codec=codec: codec.encode(x), iters)
        codec.finish()
        decode = gpu_torch.stream_seconds(lambda out=out, codec=codec, size=size: codec.decode(out, size), iters)
        codec.finish()
        for what, seconds, wrong in (("encode", encode, strange), ("decode", decode, lost)):
            rows.append(make_codec_row(what, case, size, seconds, wrong, rates))
            if send is not None:
                send(rows[-1])
    return rows


def codec_cases(dtypes: Sequence[str], sparsities: Sequence[float], size_bytes: int) -> tuple[Case, ...]:
    """One array per dtype and sparsity; its size is rounded down to whole elements."""
    return tuple(
        Case("all_reduce", size_bytes // ELEM_BYTES[dtype] * ELEM_BYTES[dtype], dtype, "sum", sparsity)
        for dtype in dtypes
        for sparsity in sparsities
    )
