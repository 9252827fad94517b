"""Measuring and self-testing over ranks on this machine: `spccl bench` and `spccl verify`."""
