"""Ways in which spccl.optim.SparseSync exchanges: each case of workers/sparse_exchange.py, on spccl and on Gloo."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="SparseSync is for torch, and none is installed")

from launch import check_case, run_ranks

WORKER = Path(__file__).parent / "workers" / "sparse_exchange.py"
CASES = re.search(r"^CASES = \[(.*?)\]", WORKER.read_text(), re.M | re.S).group(1).replace(",", " ").split()


@pytest.fixture(scope="module", params=["spccl-4", pytest.param("gloo-2", marks=pytest.mark.slow)])
def ranks(request):
    backend, n_ranks = request.param.split("-")
    return run_ranks("sparse_exchange", int(n_ranks), env={"SPCCL_TEST_BACKEND": backend})


@pytest.mark.parametrize("case", CASES)
def test_case(ranks, case):
    check_case(ranks, case)


def test_ranks_end_well(ranks):
    assert {r.returncode for r in ranks} == {0}, "\n".join(r.report() for r in ranks)
