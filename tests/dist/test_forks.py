"""Two ranks: a child of fork uses its parent's group."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="torch.distributed is what is tested here")

from launch import over_ranks

test_case, test_ranks_end_well = over_ranks("forks", "spccl-2")
