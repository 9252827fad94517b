"""spccl.channels without a GPU: the layout of its structs, and sentences instead of kernels.

What needs a GPU is tested on GPUs in software (tests/gpusim/python) and on real ones (tests/gpu/test_gpu_channels.py).
"""

import ctypes

import pytest
from test_comm import run_threads

import spccl
from spccl import channels


def test_layout():
    """The numbers of csrc/spccl_channel.h; tests/c/test_abi.c has the same."""
    base, memory, port = channels.ChannelBase, channels.MemoryChannel, channels.PortChannel
    state = channels.ChannelState
    sizes = [ctypes.sizeof(struct) for struct in (state, base, memory, port)]
    assert (channels.LAYOUT, sizes) == (2, [64, 88, 104, 128])
    assert [base.window.offset, base.peer_bytes.offset, base.state.offset] == [16, 32, 48]
    assert [base.signals.offset, base.abort.offset, base.report.offset] == [56, 72, 80]
    assert [state.signals_taken.offset, state.blocks_here.offset] == [8, 40]
    assert [memory.peer_window.offset, memory.peer_signals.offset] == [88, 96]
    assert [port.fifo.offset, port.done.offset, port.src_memory.offset] == [88, 104, 124]


def test_refuses_without_gpu():
    def rank_main(comm):
        with pytest.raises(spccl.StateError, match="spccl_cuda_attach"):
            channels.Channels(comm, 64)
        with pytest.raises(spccl.StateError, match="spccl_cuda_attach"):
            comm.wait_gpu()
        with pytest.raises(spccl.ArgumentError, match="wanted 'memory' or 'port'"):
            channels.Channels(comm, 64, kind="nvlink")
        with pytest.raises(spccl.ArgumentError, match="pass window_bytes=, window=, or both"):
            channels.Channels(comm)
        with pytest.raises(spccl.ArgumentError, match="got an address without n_bytes"):
            channels.Channels(comm, window=4096)
        with pytest.raises(spccl.ArgumentError, match="got list; wanted a tensor"):
            channels.Channels(comm, window=[1])
        with pytest.raises(spccl.Error) as error:
            comm.attach_gpu(4095)  # no machine has so many
        assert isinstance(error.value, (spccl.UnsupportedError, spccl.ArgumentError, spccl.DeviceError))
        assert "GPU" in str(error.value) or "CUDA" in str(error.value)

    run_threads(2, rank_main)
