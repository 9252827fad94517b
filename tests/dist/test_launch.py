"""Tests how a program gets backend="spccl": by torchrun, by backend strings, without `import spccl`, in debug mode.
Also tests registration and options."""

from __future__ import annotations

import subprocess
import sys
from datetime import timedelta
from importlib import metadata
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="torch.distributed is what is tested here")

import launch  # noqa: E402
from launch import HERE  # noqa: E402

from spccl import backend  # noqa: E402

LAUNCHED = Path(HERE) / "workers" / "launched.py"


def torchrun(*program: str, **env: str) -> None:
    """Run a program under torchrun with 2 ranks on a free port. Both must print "launched ok"."""
    status, output = launch.torchrun(*program, **env)
    assert status == 0 and output.count("launched ok") == 2, f"exit {status}\n{output}"


@pytest.fixture
def installed():
    """The name "spccl" without an import needs the entry point of an installed package."""
    if not any(e.name == "spccl" for e in metadata.entry_points(group="torch.backends")):
        pytest.fail("spccl's entry point torch.backends is not installed: run the tests on an installed package")


@pytest.mark.parametrize("name", ["spccl", pytest.param("cpu:spccl", marks=pytest.mark.slow), "cpu:spccl,cuda:nccl"])
def test_torchrun_without_importing_spccl(installed, name):
    if "nccl" in name and not torch.distributed.is_nccl_available():
        pytest.skip("this torch has no NCCL")
    torchrun(str(LAUNCHED), name)


@pytest.mark.slow
def test_debug_detail_wraps_it(installed):
    """TORCH_DISTRIBUTED_DEBUG=DETAIL puts torch's checking wrapper around the backend. The group is made only once:
    with any backend, a second wrapper's own Gloo finds the addresses of the first one in the agent's store. The job
    waits before it ends: a thread of that Gloo may still free a tensor of Python's, and aborts if Python is ending
    ("terminate called without an active exception", 1 of 6 runs on a busy machine)."""
    code = LAUNCHED.read_text().replace('assert name == "spccl", name', "").replace("range(2)", "range(1)")
    code += "import time\ntime.sleep(1)\n"
    torchrun("--no-python", sys.executable, "-c", code, "spccl", TORCH_DISTRIBUTED_DEBUG="DETAIL")


def test_import_torch_registers_lazily(installed):
    """After `import torch` the name is known, and the glue is not loaded."""
    code = (
        "import torch, sys; from torch.distributed import Backend; assert 'SPCCL' in Backend._plugins; "
        "assert Backend('spccl') == 'spccl'; assert 'libspccl_torch' not in open('/proc/self/maps').read()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=500)


def test_autoload_never_raises(monkeypatch):
    def broken():
        raise OSError("no such thing")

    monkeypatch.setattr(backend, "register", broken)
    with pytest.warns(RuntimeWarning, match="no such thing"):
        backend.autoload()


def test_register_twice():
    backend.register()
    backend.register()
    assert "SPCCL" in torch.distributed.Backend._plugins


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"format": "zip"}, "wanted one of auto, tile"),
        ({"slice_bytes": -1}, "slice_bytes=-1"),
        ({"n_sockets": 1.5}, "n_sockets=1.5"),
        ({"timeout": timedelta(0)}, "timeout"),
        ({"cuda_route": "zip"}, "wanted one of auto, spccl"),
        ({"cuda_fallback": "zip"}, "wanted one of nccl, stage"),
    ],
)
def test_options_are_checked(wrong, text):
    with pytest.raises(ValueError, match=text):
        backend.Options(**wrong)


def test_old_options_become_a_route():
    with pytest.warns(FutureWarning, match="write cuda_route='stage'"):
        options = backend.Options(cuda_engine=False, cuda_fallback="stage")
    assert options == backend.Options(cuda_route="stage") == backend._with_environment(options)
    assert (options.cuda_engine, options.cuda_fallback) == (False, "stage")
    assert (backend.Options().cuda_engine, backend.Options().cuda_fallback) == (True, "nccl")


def test_stats_without_a_group():
    with pytest.raises(ValueError, match="init_process_group"):
        backend.stats()


def test_stats_of_another_backend(tmp_path):
    dist = torch.distributed
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        with pytest.raises(ValueError, match="gloo, wanted 'spccl'"):
            backend.stats()
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(("options", "text"), [({}, "timeout_ms is missing"), (None, "zip is not known")])
def test_options_cross_to_the_glue_by_name(options, text):
    """A Python package and a glue of different versions raise an error, and do not mix up options."""
    backend._torch_glue.load()
    known = ("timeout_ms", "format", "slice_bytes", "n_sockets", "stage", "order_per_group", "blocking_wait")
    known += ("max_ctas", "inbox_bytes", "cuda_engine", "between_hosts", "zip")
    scratch = torch.distributed.ProcessGroup(torch.distributed.HashStore(), 0, 1).boxed()
    given = dict.fromkeys(known, 0) if options is None else options
    with pytest.raises(ValueError, match=text):
        torch.ops.spccl.make_process_group(scratch, "g", [0], given, "")


class SplitSource:
    """A default group with the attributes that torch reads. Its backend supports splitting, as spccl's does beside
    NCCL."""

    bound_device_id = torch.device("cuda:0")
    supports_splitting = True

    def __init__(self, name):
        self.name = lambda: name

    def _get_backend(self, device):
        return self


def test_nccl_does_not_split_our_backend():
    """With a bound device, new_group(backend="nccl") gives this choice to NCCL's options, which refuse spccl."""
    from torch.distributed import distributed_c10d

    backend._offer_split()
    if not hasattr(distributed_c10d, "_get_split_source"):
        pytest.skip(f"torch {torch.__version__} chooses what to split in another way")
    assert distributed_c10d._get_split_source(SplitSource("spccl")) is None
    other = SplitSource("nccl")
    assert distributed_c10d._get_split_source(other) is other
