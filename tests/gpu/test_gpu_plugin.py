"""An NCCL net plugin on GPUs, tests/c/net_plugin: loaded by NCCL and by spccl in one process, and under the rings of
ranks whose hosts have different names."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from gpu_launch import check_case, needs, run_gpus

pytestmark = pytest.mark.gpu
SOURCES = Path(__file__).resolve().parents[1] / "c" / "net_plugin"
SHAPES = [(2, 1), (4, 2)]  # ranks, ranks per host
VALUES = ["all_reduce_values", "reduce_scatter_values", "all_gather_values", "broadcast_values", "large"]


@pytest.fixture(scope="module")
def plugin(tmp_path_factory) -> str:
    """Path of the plugin, a library whose name is the one that NCCL looks for."""
    needs(2)
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler (cc, gcc) to build the test plugin")
    path = tmp_path_factory.mktemp("plugin") / "libnccl-net-spccltest.so"
    sources = [str(SOURCES / name) for name in ("net_faults.c", "net_plugin.c", "net_versions.c")]
    flags = ["-std=c11", "-D_GNU_SOURCE", "-O2", "-shared", "-fPIC", "-fvisibility=hidden", "-pthread"]
    subprocess.run([compiler, *flags, *sources, "-o", str(path)], check=True)
    return str(path)


def settings(plugin: str) -> dict[str, str]:
    return {
        "SPCCL_CUDA_ROUTE": "spccl",
        "SPCCL_TRANSPORTS": "shm,ncclnet",
        "SPCCL_NET_PLUGIN": plugin,
        "TEST_NET_SPEED": "100000",
    }


@pytest.mark.parametrize("case", ["nccl_first", "spccl_first"])
def test_shared_with_nccl(plugin, case):
    """NCCL_NET names the plugin, so NCCL fails if it cannot use it; spccl takes it from NCCL_NET_PLUGIN."""
    env = settings(plugin) | {"SPCCL_NET_PLUGIN": "", "NCCL_NET_PLUGIN": plugin, "NCCL_NET": "Test Sockets"}
    env |= {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_SOCKET_IFNAME": "lo", "NCCL_DEBUG": "WARN"}
    env |= {"TEST_NET_NCCL": "1", "TEST_NET_ENV": "1", "TEST_NET_KEPT": "kept"}
    ranks = run_gpus("plugin", 2, case, timeout_s=180, RANKS_PER_HOST="1", **env)
    check_case(ranks, case)


@pytest.mark.parametrize(("n_ranks", "per_host"), SHAPES)
def test_values(plugin, n_ranks, per_host):
    ranks = run_gpus("values", n_ranks, *VALUES, RANKS_PER_HOST=str(per_host), **settings(plugin))
    for case in VALUES:
        check_case(ranks, case)


@pytest.mark.parametrize(("n_ranks", "per_host"), SHAPES)
def test_killed_peer(plugin, n_ranks, per_host):
    env = settings(plugin)
    ranks = run_gpus("faults", n_ranks, "killed_peer", timeout_s=120, RANKS_PER_HOST=str(per_host), **env)
    assert ranks[-1].returncode == -9, ranks[-1].report()
    for reported in check_case(ranks[:-1], "killed_peer"):
        assert "SPCCL_ERR_PEER" in reported["text"] or "SPCCL_ERR_ABORTED" in reported["text"], reported
        assert f"rank {n_ranks - 1}" in reported["text"], reported
