"""spccl.backend.make_process_group: groups outside of init_process_group."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="torch.distributed is what is tested here")

from launch import over_ranks

test_case, test_ranks_end_well = over_ranks("factory", "spccl-3")
