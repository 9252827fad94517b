"""What `spccl.ddp`, `spccl.fsdp` and `spccl.optim` share: schedules of density, statistics, checks, checkpoints.

It may use `spccl.prune` and `spccl.backend`, and knows none of the three.
"""
