"""The four collectives on 1, 2 and 4 GPUs: exact values, every dtype, size, density and pattern."""

from __future__ import annotations

import pytest
from gpu_launch import check_case, run_gpus

pytestmark = pytest.mark.gpu
CASES = [
    "all_reduce_values",
    "reduce_scatter_values",
    "all_gather_values",
    "broadcast_values",
    "special_bits",
    "any_size_density_and_pattern",
    "large",
    "in_place_and_layouts",
    "equals_nccl",
]


@pytest.fixture(scope="module", params=[1, 2, 4], ids=lambda n: f"{n} GPUs")
def ranks(request):
    return run_gpus("values", request.param)


@pytest.mark.parametrize("case", CASES)
def test_case(ranks, case):
    check_case(ranks, case)


@pytest.mark.parametrize("setting", ["SPCCL_FORMAT=pici", "SPCCL_FORMAT=coo", "SPCCL_FORMAT=dense", "SPCCL_MAX_CTAS=4"])
def test_results_do_not_depend_on(setting):
    name, value = setting.split("=")
    cases = ["all_reduce_values", "any_size_density_and_pattern"]
    ranks = run_gpus("values", 2, *cases, **{name: value})
    for case in cases:
        check_case(ranks, case)
