"""Faults through torch.distributed: every survivor gets an error in time that names the cause, and can make a new
group afterwards. No process is left."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="torch.distributed is what is tested here")

from launch import check_case, run_ranks


def run(case: str, n_ranks: int = 3, survivors: int | None = None, within_s: float = 15) -> list[dict]:
    """Run a case. Returns the reports of the survivors, which are the first ranks."""
    ranks = run_ranks("faults", n_ranks, case, timeout_s=300)
    alive = ranks[: survivors or n_ranks]
    reports = check_case(alive, case)
    assert [r.returncode for r in alive] == [0] * len(alive), "\n".join(r.report() for r in ranks)
    for report in reports:
        assert report["after_s"] < within_s, report
    return reports


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("size_mismatch", ("1000", "1001", "all_reduce")),
        ("dtype_mismatch", ("float32", "int32", "all_reduce")),
        ("operation_mismatch", ("all_reduce", "broadcast")),
    ],
)
def test_ranks_that_disagree(case, words):
    reports = run(case)
    texts = [report["text"] for report in reports]
    for rank, text in enumerate(texts):
        assert f"rank {rank} of 3" in text, text
        assert "rank" in text and ("all_reduce" in text or "broadcast" in text), text
    # the rank that notices it first names the arguments of both ranks
    assert any(all(w in text for w in words) for text in texts), texts


def test_broken_group_stays_broken():
    for report in run("broken_group_stays_broken"):
        for text in report["again"]:
            assert "SPCCL_ERR" in text and "rank" in text, text


@pytest.mark.parametrize("case", ["killed_peer", "killed_peer_async"])
def test_killed_peer(case):
    reports = run(case, survivors=2)
    for report in reports:  # a rank that learns it from another rank reports the same cause
        assert "rank 2 is gone" in report["text"] and "all_reduce" in report["text"], reports
        assert str(1 << 20) in report["text"], reports
    assert any("SPCCL_ERR_PEER" in report["text"] for report in reports), reports
    assert any("see its output" in report["text"] for report in reports), reports


def test_killed_peer_while_the_sparse_runner_is_made():
    for report in run("killed_peer_while_the_sparse_runner_is_made", survivors=2):
        assert "rank 2 is gone" in report["text"] and "all_reduce" in report["text"], report


@pytest.mark.slow
def test_hanging_peer():
    reports = run("hanging_peer")
    for report in reports[:2]:  # the second rank may learn it from the first
        assert "all_reduce" in report["text"] and "rank 2" in report["text"], reports
    assert any("SPCCL_ERR_TIMEOUT" in report["text"] for report in reports[:2]), reports
    assert any("raise the timeout" in report["text"] for report in reports[:2]), reports


@pytest.mark.parametrize("case", ["abort_from_a_thread", "abort_work"])
def test_abort(case):
    reports = run(case, n_ranks=2, within_s=10)
    assert "SPCCL_ERR_ABORTED" in reports[0]["text"], reports
    assert any(word in reports[1]["text"] for word in ("SPCCL_ERR_ABORTED", "SPCCL_ERR_PEER")), reports


@pytest.mark.parametrize(("case", "absent"), [("absent_rank_at_start", 2), ("absent_rank_0_at_start", 0)])
def test_absent_rank_at_start(case, absent):
    for rank, report in enumerate(run(case, n_ranks=3, within_s=60)):
        if rank != absent:
            assert f"rank {rank} of 3" in report["text"], report
            assert f": rank {absent} did not come within 3000 ms" in report["text"], report


def test_exit_without_destroy():
    run("exit_without_destroy", n_ranks=2)


def test_tensor_of_no_memory():
    for report in run("meta_tensor_is_refused", n_ranks=2):
        assert "CPU and CUDA tensors" in report["text"] and "tensor.cpu()" in report["text"], report
