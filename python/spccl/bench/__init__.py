"""Code of `spccl bench` and `spccl verify`: starts ranks on this machine, measures, and checks results."""
