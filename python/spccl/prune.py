"""Selects the entries of a flat gradient to send now, and keeps the others for later steps.

Thin objects over `spccl_prune` and `spccl_cuda_prune` (csrc/spccl.h) for `spccl.ddp` and `spccl.fsdp`; knows no
process group, DDP or FSDP2. `spccl.optim` uses the columns of its state. Symbols: g the local gradient, u the velocity
(momentum correction), v the residual, m the momentum, l the leak, t the threshold. One step is

    u = m u + g;   v = l v + u;   send s = v unless |v| < t, else 0;   v -= s;   u = 0 where sent

Without momentum u is g. Without error feedback v is g, and what is not sent is dropped. If g or v is not finite, g is
sent as it is, and u and v of that entry stay. t is the quantile of a fresh sample of |v| in every step, for each
parameter. What is sent whole keeps its velocity: the average of local velocities is the velocity of the average, so
such a parameter follows SGD with momentum exactly.

Sources: Lin et al. 2018, "Deep Gradient Compression", sections 3.1 (error feedback), 3.2 (momentum correction, momentum
factor masking) and 5 (threshold from a sample); Hough et al., "SpCCL", section VI.B (99% sparsity, threshold from 0.1%
of the gradient, leaky error feedback). docs/KERNELS.md says how the operation works.
"""

import ctypes
import struct
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from . import _ext

# On the host, after this many times the wanted entries of a parameter, each block sends only its wanted share (ties,
# jumps). So a call sends at most MAX_OVERSHOOT + 1 times the wanted entries, if they are finite.
MAX_OVERSHOOT = 4
# Columns of the int64 tensor that holds `spccl_prune_state`; the first two are float64.
THRESHOLD, LOSS_SCALE, STEP, N_SENT, N_SENT_ALL, N_NONFINITE_ALL = range(6)
STATE_COLUMNS = 6
# spccl_prune_segment: first element, elements, addresses of residual, velocity and state, key, whole. Also
# spccl_weights_segment, with own and shared weights for residual and velocity.
SEGMENT = struct.Struct("=QQQQQII")


_SENT = {torch.float16: 2, torch.bfloat16: 3}  # spccl_dtype


class Options(ctypes.Structure):
    """`spccl_prune_options`, field by field."""

    _fields_ = (
        ("struct_bytes", ctypes.c_size_t),
        *((name, ctypes.c_double) for name in ("density", "sample", "momentum", "leak", "scale", "max_norm")),
        *((name, ctypes.c_void_p) for name in ("norm", "squares", "factor", "loss_scale")),
        *((name, ctypes.c_uint32) for name in ("n_squares", "square", "dense_steps", "warmup_steps", "seed")),
        *((name, ctypes.c_uint32) for name in ("keep_thresholds", "skip_zeros", "residual_bf16")),
        ("sent", ctypes.c_void_p),
        ("sent_dtype", ctypes.c_uint64),
    )


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums, norms, residuals and velocities: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class Rule(NamedTuple):
    """Settings of one call, the same for every parameter: fields of `Options`.

    density       wanted share of entries sent, (0, 1]; 1 sends everything
    sample        share of entries looked at to find the threshold, (0, 1]; at least 32 / density entries
    leak          factor on the residual before the new gradient is added, (0, 1]
    momentum      m above, [0, 1)
    scale         factor on what is sent (1 / ranks where the backend cannot average)
    dense_steps   steps of a state in which everything is sent
    warmup_steps  steps after those in which the density falls geometrically
    seed          of the sampled places, 0 to 2^32 - 1
    skip_zeros    leave a parameter alone whose whole gradient is 0
    """

    density: float
    sample: float
    leak: float
    momentum: float
    scale: float = 1.0
    dense_steps: int = 0
    warmup_steps: int = 0
    seed: int = 0
    skip_zeros: bool = False


class Clip(NamedTuple):
    """Bounds the norm of a gradient of several buckets: one bucket's part. All tensors lie beside the gradient.

    norm      [1] float32 (float64 for float64 gradients): norm of this bucket's gradient, loss scale included
    squares   [n_squares] float64: squared norms of all buckets, without loss scale. The call stores that of this
              bucket, unless it is inf or nan, and uses the last ones of the others.
    square    this bucket's entry of squares
    max_norm  above 0; infinity: store the square, clip nothing
    """

    norm: torch.Tensor
    squares: torch.Tensor
    square: int
    max_norm: float


class ParamState:
    """State of one parameter: residual and velocity, flat [numel] in the parameter's memory order.

    Both are float32 (float64 for float64 gradients) on the gradient's device, and None where not kept. The residual
    may be bfloat16 instead; then each step rounds it at random, so that the mean is right (docs/KERNELS.md). `state`
    is [STATE_COLUMNS] int64 there, a `spccl_prune_state`. The three are in units of the loss scale that `state` holds.
    """

    __slots__ = ("elem_bytes", "key", "name", "numel", "pruned", "residual", "state", "velocity")

    def __init__(self, name: str, numel: int, pruned: bool, state: torch.Tensor):
        self.name = name
        self.numel = numel
        self.pruned = pruned
        self.state = state
        self.key = zlib.crc32(name.encode())
        self.elem_bytes = 0
        self.residual: torch.Tensor | None = None
        self.velocity: torch.Tensor | None = None

    def prepare(
        self, dtype: torch.dtype, residual: bool, velocity: bool, residual_dtype: torch.dtype = torch.float32
    ) -> None:
        """Allocate what a gradient of `dtype` needs and is not there; convert float32 and bfloat16 residuals.

        residual_dtype: float32 (float64 for float64 gradients) or bfloat16.
        Raises: ValueError for a residual of bfloat16 with float64 gradients.
        """
        wide = wide_dtype(dtype)
        if residual_dtype == torch.bfloat16 and wide == torch.float64:
            raise ValueError(f"spccl.prune: {self.name!r} has float64 gradients, which need a residual of float64")
        if residual_dtype != torch.bfloat16:
            residual_dtype = wide
        self.elem_bytes = dtype.itemsize
        if residual and self.residual is None:
            self.residual = torch.zeros(self.numel, dtype=residual_dtype, device=self.state.device)
        if self.residual is not None and self.residual.dtype in (torch.float32, torch.bfloat16):
            self.residual = self.residual.to(residual_dtype)
        if velocity and self.velocity is None:
            self.velocity = torch.zeros(self.numel, dtype=wide, device=self.state.device)

    def loss_scale(self) -> float:
        """Loss scale that residual and velocity contain. Waits for the device."""
        return float(self.state[LOSS_SCALE : LOSS_SCALE + 1].view(torch.float64)) or 1.0


class Plan:
    """The parameters of one bucket, checked once.

    Args:
        segments: (first element, state) of each parameter; its `prepare` was called.
        numel, dtype: of the bucket's gradient: float16, bfloat16, float32 or float64.
        device: host or CUDA.
    Raises: ValueError if a state's tensors do not fit, or residuals have several dtypes; spccl.Error if the segments do
        not fit, or this build of spccl has no CUDA.
    """

    def __init__(
        self, segments: Sequence[tuple[int, ParamState]], numel: int, dtype: torch.dtype, device: torch.device
    ):
        if device.type not in ("cpu", "cuda"):
            raise ValueError(f"spccl.prune: gradients on {device}, wanted host or CUDA memory")
        self.params = [param for _, param in segments]
        for param in self.params:
            _check_param(param, dtype, device)
        residual_dtypes = {s.residual.dtype for s in self.params if s.residual is not None}
        if len(residual_dtypes) > 1:
            raise ValueError(f"spccl.prune: residuals of {sorted(map(str, residual_dtypes))}, wanted one dtype")
        self._residual_bf16 = torch.bfloat16 in residual_dtypes
        self.numel, self.dtype, self.device = numel, dtype, device
        rows = b"".join(
            SEGMENT.pack(
                begin, s.numel, _address(s.residual), _address(s.velocity), _address(s.state), s.key, not s.pruned
            )
            for begin, s in segments
        )
        ordinal = -1 if device.type == "cpu" else device.index
        self._memory = [(s.residual, s.velocity, s.state) for s in self.params]  # the plan holds their addresses
        self._owner, self._plan = _ext.prune_plan(rows, numel, str(dtype).removeprefix("torch."), ordinal)

    def run(self, grad: torch.Tensor, rule: Rule, *given: Any, **named: Any) -> None:
        """Replace `grad` [numel] by the entries to send, and keep the others in their states.

        Args: given, named: those of `_options`.
        On CUDA this queues two or three kernels on the current stream and does not wait; a graph may capture them.
        """
        options = self._options(grad, rule, *given, **named)
        on_gpu = self.device.type == "cuda"
        stream = torch.cuda.current_stream(self.device).cuda_stream if on_gpu else 0
        _ext.prune(self._plan, grad.data_ptr(), ctypes.addressof(options), on_gpu, stream)

    def call(self, grad: torch.Tensor, rule: Rule, *given: Any, **named: Any) -> tuple[int, int, object]:
        """What `torch.ops.spccl.pruned_all_reduce` needs to do what `run` does, on CUDA.

        Args: given, named: those of `_options`.
        Returns: (address of a spccl_prune_plan, address of spccl_prune_options, the object that owns the options).
        """
        options = self._options(grad, rule, *given, **named)
        return self._plan, ctypes.addressof(options), options

    def _options(
        self,
        grad: torch.Tensor,
        rule: Rule,
        factor: torch.Tensor | None = None,
        loss_scale: torch.Tensor | None = None,
        clip: Clip | None = None,
        sent: torch.Tensor | None = None,
    ) -> Options:
        """Check one call, and give its options.

        Args:
            factor: [1] float32 beside grad: multiplies the gradient first.
            loss_scale: [1] float32 beside grad: the scale that grad contains.
            clip: multiply the gradient first by min(1, max_norm / norm of all buckets).
            sent: [numel] float16 or bfloat16 beside a float32 grad: what is sent goes there, and grad stays. What is in
                no segment stays too.
        Raises: ValueError for a tensor of another size, dtype or device.
        """
        if grad.numel() != self.numel or grad.dtype != self.dtype or not grad.is_contiguous():
            raise ValueError(
                f"spccl.prune: got a gradient of {grad.numel()} {grad.dtype} with strides {grad.stride()}, wanted "
                f"{self.numel} contiguous {self.dtype}"
            )
        norm, squares = (None, None) if clip is None else (clip.norm, clip.squares)
        given = (("grad", grad), ("factor", factor), ("loss_scale", loss_scale), ("norm", norm), ("squares", squares),
                 ("sent", sent))  # fmt: skip
        for name, tensor in given:
            if tensor is not None and tensor.device != self.device:
                raise ValueError(f"spccl.prune: {name} is on {tensor.device}, wanted {self.device}")
        options = Options(
            struct_bytes=ctypes.sizeof(Options),
            factor=_address(factor),
            loss_scale=_address(loss_scale),
            residual_bf16=self._residual_bf16,
            **rule._asdict(),
        )
        if clip is not None:
            self._set_clip(options, clip)
        if sent is not None:
            if sent.numel() != self.numel or sent.dtype not in _SENT or not sent.is_contiguous():
                raise ValueError(
                    f"spccl.prune: sent is {sent.numel()} {sent.dtype}, wanted {self.numel} contiguous float16 or "
                    "bfloat16"
                )
            options.sent, options.sent_dtype = _address(sent), _SENT[sent.dtype]
        return options

    def _set_clip(self, options: Options, clip: Clip) -> None:
        """Raises: ValueError for a tensor of another dtype."""
        wide = wide_dtype(self.dtype)
        for name, tensor, wanted in (("norm", clip.norm, wide), ("squares", clip.squares, torch.float64)):
            if tensor.dtype != wanted or not tensor.is_contiguous():
                raise ValueError(f"spccl.prune: {name} is {tensor.dtype}, wanted contiguous {wanted}")
        options.norm, options.squares = _address(clip.norm), _address(clip.squares)
        options.n_squares, options.square, options.max_norm = clip.squares.numel(), clip.square, clip.max_norm


def _check_param(param: ParamState, dtype: torch.dtype, device: torch.device) -> None:
    """ValueError unless the param's tensors fit a gradient of `dtype` on `device`: C gets their addresses."""
    wide = wide_dtype(dtype)
    is_bf16 = param.residual is not None and param.residual.dtype == torch.bfloat16 and wide == torch.float32
    for what, tensor, wanted_dtype, numel in (
        ("state", param.state, torch.int64, STATE_COLUMNS),
        ("residual", param.residual, torch.bfloat16 if is_bf16 else wide, param.numel),
        ("velocity", param.velocity, wide, param.numel),
    ):
        if tensor is None:
            continue
        if (tensor.dtype, tensor.numel(), tensor.device) != (wanted_dtype, numel, device) or not tensor.is_contiguous():
            raise ValueError(
                f"spccl.prune: {what} of {param.name!r} is {tensor.numel()} {tensor.dtype} on {tensor.device} with "
                f"strides {tensor.stride()}, wanted {numel} contiguous {wanted_dtype} on {device}"
            )


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
