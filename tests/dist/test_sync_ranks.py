"""spccl.sync over a group whose ranks are processes: the transports, and a receiver that is killed."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="torch.distributed is what is tested here")

from launch import check_case, run_ranks


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_versions(transport):
    ranks = run_ranks("sync", 3, "versions", env={"SPCCL_TRANSPORTS": transport})
    check_case(ranks, "versions")
    assert [rank.returncode for rank in ranks] == [0] * 3, "\n".join(rank.report() for rank in ranks)


def test_killed_receiver():
    ranks = run_ranks("sync", 3, "killed_receiver")
    check_case(ranks[:2], "killed_receiver")
