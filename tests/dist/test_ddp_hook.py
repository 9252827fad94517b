"""The DDP hook over ranks: each case of workers/ddp_hook.py and ddp_features.py, on Gloo and on spccl."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the DDP hook is for torch, and none is installed")

from launch import check_case, run_ranks

WORKERS = Path(__file__).parent / "workers"


def cases_of(worker: str) -> list[str]:
    text = (WORKERS / f"{worker}.py").read_text()
    return re.search(r"^CASES = \[(.*?)\]", text, re.M | re.S).group(1).replace(",", " ").split()


@pytest.fixture(scope="module", params=[pytest.param("gloo-2", marks=pytest.mark.slow), "spccl-2", "spccl-3"])
def backend(request):
    return request.param


@pytest.fixture(scope="module")
def ranks(backend):
    backend, n_ranks = backend.split("-")
    return run_ranks("ddp_hook", int(n_ranks), env={"SPCCL_TEST_BACKEND": backend})


@pytest.fixture(scope="module", params=["gloo", "spccl"])
def ranks_of_features(request):
    return run_ranks("ddp_features", 2, env={"SPCCL_TEST_BACKEND": request.param})


@pytest.mark.parametrize("case", cases_of("ddp_hook"))
def test_case(ranks, case):
    check_case(ranks, case)


@pytest.mark.parametrize("case", cases_of("ddp_features"))
def test_feature(ranks_of_features, case):
    check_case(ranks_of_features, case)


def test_ranks_end_well(ranks, backend):
    """On spccl always. On Gloo a process with Python DDP hooks may abort after its last line, torch's own hooks too: a
    thread of Gloo's then drops the last reference to a tensor that Python has seen, while Python is ending."""
    fine = {0, -6} if backend.startswith("gloo") else {0}
    assert {r.returncode for r in ranks} <= fine, "\n".join(r.report() for r in ranks)
