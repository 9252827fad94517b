"""Four ranks: meshes of two dimensions, callbacks that wait, uneven ranks, torch's optimizers and compiler."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="torch.distributed is what is tested here")

from launch import over_ranks

test_case, test_ranks_end_well = over_ranks("mesh", "spccl-4")
