"""One-sided channels for kernels: a kernel writes to another rank's memory, reads from it and signals it.

    comm.attach_gpu(device)
    with spccl.channels.Channels(comm, window_bytes=1 << 20) as channels:
        to_peer = channels.memory_channel(peer)     # a ctypes.Structure
        launch(kernel, to_peer, ...)
        comm.wait_gpu(stream)                       # raises what a wait of the kernel failed with

A channel is the C struct that the functions of `spccl_device.cuh` take, so ctypes passes it to a C launcher by value.
`bytes(channel)` are the bytes of a kernel's parameter, for CUDA-Python. Its fields are the addresses with which a
Triton kernel loads and stores. `include_dir()` has the headers, for nvcc.

Experimental: any version may change this module and the structs. LAYOUT counts the versions of the structs.
Source: docs/CHANNELS.md.
"""

from __future__ import annotations

import ctypes
import dataclasses
from pathlib import Path
from types import TracebackType
from typing import Any

from . import _ext
from .comm import Communicator

LAYOUT = 2
"""SPCCL_CHANNEL_LAYOUT of the structs below: `ChannelBase.layout` of each channel has it."""

_KINDS = {"memory": 1, "port": 2}


class ChannelState(ctypes.Structure):
    """What a channel has done: 64 bytes of GPU memory at `ChannelBase.state`. Kernels change it.

    Fields: signals_sent (of memory channels), signals_taken: of the peer. triggers_posted, triggers_done: of port
    channels. blocks_met, blocks_here: of the barrier of blocks.
    """

    _fields_ = (
        ("signals_sent", ctypes.c_uint64),
        ("signals_taken", ctypes.c_uint64),
        ("triggers_posted", ctypes.c_uint64),
        ("triggers_done", ctypes.c_uint64),
        ("blocks_met", ctypes.c_uint64),
        ("blocks_here", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32 * 5),
    )


class ChannelBase(ctypes.Structure):
    """What both kinds of channels have. Addresses are integers, as this rank's GPU sees them.

    Fields: layout: LAYOUT. index: number of the channel. rank, peer. window: this rank's memory, window_bytes long.
    peer_bytes: length of the peer's memory. timeout_ns: of each wait. state: a ChannelState. signals: uint64, how many
    signals the peer has sent; only the peer writes it. claimed: uint32, 1 once a thread writes the report. abort:
    uint32 in host memory; 1 ends all waits. report: why a kernel gave up.
    """

    _fields_ = (
        ("layout", ctypes.c_uint32),
        ("index", ctypes.c_uint32),
        ("rank", ctypes.c_int32),
        ("peer", ctypes.c_int32),
        ("window", ctypes.c_uint64),
        ("window_bytes", ctypes.c_uint64),
        ("peer_bytes", ctypes.c_uint64),
        ("timeout_ns", ctypes.c_uint64),
        ("state", ctypes.c_uint64),
        ("signals", ctypes.c_uint64),
        ("claimed", ctypes.c_uint64),
        ("abort", ctypes.c_uint64),
        ("report", ctypes.c_uint64),
    )


class MemoryChannel(ctypes.Structure):
    """spccl_memory_channel: 104 bytes.

    Fields: base. peer_window: the peer's memory, base.peer_bytes long. peer_signals: uint64, to which this rank stores
    the number of its last signal.
    """

    _fields_ = (
        ("base", ChannelBase),
        ("peer_window", ctypes.c_uint64),
        ("peer_signals", ctypes.c_uint64),
    )


class PortChannel(ctypes.Structure):
    """spccl_port_channel: 128 bytes.

    Fields: base. fifo: fifo_triggers triggers of 32 bytes. posted, done: uint64, triggers that kernels have written and
    that the proxy has carried out. number: of the channel, as triggers name it. dst_memory, src_memory: numbers of the
    peer's memory and of this rank's. fifo, posted and done lie in host memory.
    """

    _fields_ = (
        ("base", ChannelBase),
        ("fifo", ctypes.c_uint64),
        ("posted", ctypes.c_uint64),
        ("done", ctypes.c_uint64),
        ("fifo_triggers", ctypes.c_uint32),
        ("number", ctypes.c_uint32),
        ("dst_memory", ctypes.c_uint32),
        ("src_memory", ctypes.c_uint32),
    )


@dataclasses.dataclass(frozen=True)
class Window:
    """Memory into which the peers put.

    Attributes:
        device: address on this rank's GPU.
        host: address on the host, of port channels; 0: it is GPU memory.
        n_bytes: length.
    """

    device: int
    host: int
    n_bytes: int


def include_dir() -> str:
    """The folder of `spccl_device.cuh` and `spccl_channel.h`, for nvcc -I.

    Raises: UnsupportedError if this installation has no headers.
    """
    folder = Path(__file__).parent / "include"
    if not (folder / "spccl_device.cuh").is_file():
        raise _ext.UnsupportedError(f"spccl.channels: {folder} has no spccl_device.cuh: install spccl as a wheel")
    return str(folder)


def _address(memory: Any, n_bytes: int | None) -> tuple[int, int]:
    """A tensor, or an address with its length -> both as integers. The tensor's elements lie one after the other."""
    if isinstance(memory, int):
        if n_bytes is None:
            raise _ext.ArgumentError("memory: got an address without n_bytes; wanted both, or a tensor")
        return memory, n_bytes
    if not (hasattr(memory, "data_ptr") and hasattr(memory, "is_contiguous")):
        raise _ext.ArgumentError(f"memory: got {type(memory).__name__}; wanted a tensor, or an address and n_bytes")
    if not memory.is_contiguous():
        raise _ext.ArgumentError("memory: the tensor is not contiguous")
    found = memory.numel() * memory.element_size()
    if n_bytes is not None and n_bytes > found:
        raise _ext.ArgumentError(f"memory: n_bytes is {n_bytes}, the tensor has {found}")
    return memory.data_ptr(), found if n_bytes is None else n_bytes


class Channels:
    """One rank's part of a set of channels: n_per_peer channels to each other rank, and a window on each rank.

    All ranks make it, add memories and close it, at the same places in their order of calls. Use it as a context
    manager, or call `close`. Memory that the set was given is referenced until the communicator is closed: a peer that
    closes the set late may use it so long.
    """

    def __init__(
        self,
        comm: Communicator,
        window_bytes: int | None = None,
        *,
        kind: str = "memory",
        n_per_peer: int = 1,
        n_triggers: int = 0,
        window: Any = None,
    ) -> None:
        """Make a set of channels.

        Args:
            comm: with a GPU (`Communicator.attach_gpu`).
            window_bytes: of each rank's window, a multiple of 16; None: as long as `window`.
            kind: "memory": GPU memory that the ranks of one host map. "port": pinned host memory, between any hosts.
            n_per_peer: channels of each pair of ranks, 1 to 1024.
            n_triggers: of port channels: length of a FIFO, a power of two; 0 = 64.
            window: of memory channels: the caller's GPU memory, on all ranks or none: a contiguous tensor, or an
                address. It comes from cudaMalloc; PyTorch's does unless it has expandable_segments.
        Raises: ArgumentError, StateError (no GPU is attached), MismatchError, OutOfMemoryError, DeviceError,
            UnreachableError, PeerError, TimeoutError. Each rank gets the same, but for what this rank's Python refuses
            before the call (a tensor that is not contiguous, a wrong kind): then the other ranks time out.
        """
        if kind not in _KINDS:
            raise _ext.ArgumentError(f"kind: got {kind!r}; wanted 'memory' or 'port'")
        if window is None and window_bytes is None:
            raise _ext.ArgumentError("Channels: pass window_bytes=, window=, or both")
        address, window_bytes = (0, window_bytes) if window is None else _address(window, window_bytes)
        self._kind, self._n_bytes, self._memory = kind, window_bytes, [window]
        self._set = _ext.Channels(comm._comm, _KINDS[kind], window_bytes, n_per_peer, n_triggers, address)
        self._comm = comm
        comm._channels.append(self)  # memory that peers map must live until the communicator is closed

    @property
    def closed(self) -> bool:
        """Whether `close` was called, of this set or of its communicator."""
        return self._set.closed

    @property
    def window(self) -> Window:
        """This rank's window."""
        return Window(*self._set.window(), self._n_bytes)

    def add_memory(self, memory: Any, n_bytes: int | None = None) -> int:
        """Let channels use memory of the caller beside the windows. All ranks call it, with the same number of bytes.

        Args:
            memory: a contiguous tensor, or an address: of memory channels GPU memory as `window`; of port channels
                pinned host memory. Address and length are multiples of 16.
            n_bytes: length; None: all of the tensor.
        Returns: the memory's number, the same on all ranks: 1 to 15.
        Raises: as making a set.
        """
        address, n_bytes = _address(memory, n_bytes)
        number = self._set.add_memory(address, n_bytes)
        self._memory.append(memory)
        return number

    def memory_channel(self, peer: int, index: int = 0, *, peer_memory: int = 0, own_memory: int = 0) -> MemoryChannel:
        """The memory channel number `index` to `peer`, for kernels on this rank's GPU.

        Args: peer_memory, own_memory: numbers of memories; 0 is the window. Puts go to the peer's, packets come in this
            rank's.
        Raises: ArgumentError, StateError. UnreachableError: the peer is on another host.
        """
        return self._get(MemoryChannel, "memory", (peer, index, peer_memory, own_memory))

    def port_channel(self, peer: int, index: int = 0, *, peer_memory: int = 0, own_memory: int = 0) -> PortChannel:
        """The port channel number `index` to `peer`. Its puts are from own_memory to peer_memory.

        Args, raises: as `memory_channel`.
        """
        return self._get(PortChannel, "port", (peer, index, peer_memory, own_memory))

    def _get(self, struct: type[Any], kind: str, args: tuple[int, int, int, int]) -> Any:
        if self._kind != kind:
            raise _ext.ArgumentError(f"{kind}_channel: the set has {self._kind} channels")
        content = self._set.get(*args)
        channel = struct.from_buffer_copy(content) if len(content) == ctypes.sizeof(struct) else None
        if channel is None or channel.base.layout != LAYOUT:
            raise _ext.InternalError(
                f"spccl.channels: {struct.__name__} has {ctypes.sizeof(struct)} bytes and layout {LAYOUT}, the library "
                f"gave {len(content)}: two installations are mixed; reinstall spccl"
            )
        return channel

    def close(self) -> None:
        """Free the set, once all ranks have called this. Before it, wait for the kernels that use the channels.

        Waits at most for the communicator's timeout. A closed communicator has freed its sets. Idempotent.
        """
        self._set.close()
        if self in self._comm._channels and all(memory is None for memory in self._memory):
            self._comm._channels.remove(self)

    def __enter__(self) -> Channels:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # After an exception the other ranks may not come here: the communicator, which ends too, frees the set.
        if error is None:
            self.close()
