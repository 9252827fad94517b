"""Random numbers of the Python tests: one seed, printed, and set again by SPCCL_TEST_SEED=... pytest ..."""

from __future__ import annotations

import os
import random

import pytest


def pytest_configure(config: pytest.Config) -> None:
    seed = os.environ.setdefault("SPCCL_TEST_SEED", str(random.SystemRandom().randrange(1 << 31)))  # ranks inherit it
    if getattr(config.option, "hypothesis_seed", "none") is None:
        config.option.hypothesis_seed = seed


def pytest_report_header() -> str:
    return f"SPCCL_TEST_SEED={os.environ['SPCCL_TEST_SEED']}"


@pytest.fixture(autouse=True)
def _seeded(request: pytest.FixtureRequest) -> None:
    """Every test starts from the seed, so that one test alone repeats what it did in the whole run."""
    random.seed(f"{os.environ['SPCCL_TEST_SEED']} {request.node.nodeid}")


@pytest.fixture(scope="module")
def ranks(request: pytest.FixtureRequest) -> list:
    """The ranks of a worker, after they have run its cases: see `over_ranks` of tests/dist/launch.py."""
    return request.param()
