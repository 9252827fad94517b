"""The text of `spccl.backend.describe_group`, from counters of GPUs that are not here."""

from spccl._group_stats import CudaStats, description


def stats(**changed):
    values = {"path": "engine", "why": "", "device": 1, "n_ctas": 132, "inbox_bytes": 187 << 20, "n_collectives": 3}
    values |= {"wire_bytes_sent": 4, "frames_sent": {}, "pinned_bytes": 0, "n_proxies": 0, "n_remote": 0}
    return CudaStats(**(values | changed))


def test_one_host():
    assert description(1, 2, stats(), {0: "shm: same host"}).splitlines() == [
        "rank 1 of 2",
        "CUDA tensors: spccl on GPU 1, at most 132 thread blocks",
        "GPU memory for peers: 187.0 MiB",
        "rank 0: shm: same host",
    ]


def test_several_hosts():
    lines = description(0, 3, stats(pinned_bytes=280 << 20, n_proxies=8, n_remote=1), {1: "a", 2: "b"}).splitlines()
    assert lines[3:] == ["pinned memory for 1 peer on other hosts: 280.0 MiB", "proxies: 8", "rank 1: a", "rank 2: b"]


def test_not_moved_by_spccl():
    assert "CUDA tensors: nccl, because no NVLink" in description(0, 1, stats(path="nccl", why="no NVLink"), {})
    assert "CUDA tensors: no collective yet" in description(0, 1, stats(path="unknown"), {})
