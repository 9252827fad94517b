"""Types of the C extension. The package `spccl` wraps it and documents it."""

import builtins
from typing import Any, TypedDict, final

class Error(RuntimeError):
    status: int

class ArgumentError(Error, ValueError): ...
class FormatError(Error, ValueError): ...
class StateError(Error): ...
class UnsupportedError(Error, NotImplementedError): ...
class SettingError(Error, ValueError): ...
class OutOfMemoryError(Error, MemoryError): ...
class SystemCallError(Error, OSError): ...
class PeerError(Error, ConnectionError): ...
class TimeoutError(Error, builtins.TimeoutError): ...
class MismatchError(Error, ValueError): ...
class AbortedError(Error): ...
class AuthError(Error, PermissionError): ...
class UnreachableError(Error, ConnectionError): ...
class DeviceError(Error): ...
class InternalError(Error): ...

class _Frame(TypedDict):
    offset: int
    version: int
    format: str
    dtype: str
    is_delta: bool
    n_elems: int
    nnz: int
    frame_bytes: int
    index_off: int
    meta_off: int
    values_off: int

class _Stats(TypedDict):
    n_collectives: int
    dense_bytes_sent: int
    wire_bytes_sent: int
    wire_bytes_received: int
    buffer_bytes: int
    n_frames_sent: dict[str, int]

# Arrays are objects with the buffer protocol or DLPack; Python 3.11 has no type for either.

def encode(
    x: Any, *, base: Any = None, format: str = "auto", dtype: str | None = None, slice_elems: int = 0
) -> bytes: ...
def decode(encoded: Any, out: Any, verb: str = "set", dtype: str | None = None) -> None: ...
def inspect(encoded: Any, offset: int = 0) -> _Frame: ...
def prune_plan(
    segments: list[tuple[int, int, int, int, int, int, bool]], n_elems: int, dtype: str, device: int
) -> object: ...
def prune(
    plan: object,
    grad: int,
    rule: tuple[float, float, float, float, float, int, int, int, bool, int],
    factor: int,
    loss_scale: int,
    clip: tuple[int, int, int, int, float],
    residual_bf16: bool,
    on_gpu: bool,
    stream: int,
) -> None: ...
def prune_options(
    plan: object,
    grad: int,
    rule: tuple[float, float, float, float, float, int, int, int, bool, int],
    factor: int,
    loss_scale: int,
    clip: tuple[int, int, int, int, float],
    residual_bf16: bool,
    on_gpu: bool,
    stream: int,
) -> tuple[int, int, object]: ...
def weights_send(
    plan: object,
    out: int,
    density: float,
    sample: float,
    leak: float,
    scale: float,
    seed: int,
    chunk: int,
    levels: int,
    stream: int,
) -> None: ...
def weights_receive(plan: object, change: int, stream: int) -> None: ...
def get_unique_id() -> bytes: ...
def info() -> list[tuple[str, str, str, str]]: ...
def version() -> str: ...
@final
class Request:
    def done(self) -> bool: ...
    def wait(self, timeout_ms: int = -1) -> None: ...
    @property
    def error(self) -> Error | None: ...

@final
class Communicator:
    def __new__(
        cls,
        rank: int,
        world_size: int,
        *,
        store: Any = None,
        unique_id: bytes | None = None,
        name: str | None = None,
        timeout_ms: int = 0,
        format: str = "auto",
        slice_bytes: int = 0,
        transports: str | None = None,
        n_sockets: int = 0,
        secret: bytes | None = None,
        schedule: str | None = None,
        host_id: str | None = None,
    ) -> Communicator: ...
    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    @property
    def closed(self) -> bool: ...
    # The collectives return a Request if async_op=True, else None.
    def all_gather(
        self, input: Any, output: Any, *, dtype: str | None = None, async_op: bool = False
    ) -> Request | None: ...
    def reduce_scatter(
        self, input: Any, output: Any, op: str = "sum", *, dtype: str | None = None, async_op: bool = False
    ) -> Request | None: ...
    def all_reduce(
        self,
        input: Any,
        output: Any = None,
        op: str = "sum",
        *,
        dtype: str | None = None,
        async_op: bool = False,
    ) -> Request | None: ...
    def broadcast(
        self, buffer: Any, root: int = 0, *, dtype: str | None = None, async_op: bool = False
    ) -> Request | None: ...
    def abort(self, reason: str | None = None) -> None: ...
    def async_error(self) -> Error | None: ...
    def set_timeout(self, timeout_ms: int) -> None: ...
    def stats(self) -> _Stats: ...
    def describe_link(self, peer: int) -> str: ...
    def describe_schedules(self) -> list[str]: ...
    def close(self) -> None: ...
