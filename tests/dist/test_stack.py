"""torch's own libraries on backend="spccl": delegated calls, groups, sparse_coo, DDP, FSDP2, DTensor, checkpoints."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="torch.distributed is what is tested here")

from launch import over_ranks

test_case, test_ranks_end_well = over_ranks("stack", "spccl-2", "spccl-3")
