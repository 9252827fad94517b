"""Counters of a group, and the text of `spccl.backend.describe_group`. Imports no torch."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class GroupStats:
    """Counters of one rank of one group since the group was made, without the calls that Gloo or NCCL ran.

    Attributes:
        n_collectives: calls.
        dense_bytes_sent: bytes that the sent payloads would have if they were dense.
        wire_bytes_sent, wire_bytes_received: bytes on the wire: frames and envelopes.
        frames_sent: number of slices by format.
        buffer_bytes: bytes of host memory that the communicators hold now.
    """

    n_collectives: int
    dense_bytes_sent: int
    wire_bytes_sent: int
    wire_bytes_received: int
    frames_sent: dict[str, int]
    buffer_bytes: int


@dataclasses.dataclass(frozen=True)
class CudaStats:
    """State and counters of one rank of one group on its GPU.

    Attributes:
        path: what runs CUDA collectives: "engine" (spccl, GPU to GPU), "nccl", "stage" (through host memory), or
            "unknown" before the first CUDA collective.
        why: the reason for "nccl" and "stage".
        device: CUDA ordinal; -1 before the first CUDA collective.
        n_ctas: most thread blocks that a collective uses.
        inbox_bytes: bytes of GPU memory for the data that peers send.
        n_collectives: launches and captures.
        wire_bytes_sent: bytes of frames that ended collectives have written to peers.
        frames_sent: number of slices by format.
        pinned_bytes: bytes of pinned memory for peers on other hosts.
        n_proxies: proxy threads of this rank.
        n_remote: peers on other hosts.
    """

    path: str
    why: str
    device: int
    n_ctas: int
    inbox_bytes: int
    n_collectives: int
    wire_bytes_sent: int
    frames_sent: dict[str, int]
    pinned_bytes: int
    n_proxies: int
    n_remote: int


def description(rank: int, n_ranks: int, cuda: CudaStats, links: dict[int, str]) -> str:
    """The text of `backend.describe_group`. links: by peer, as describe_link says it."""
    lines = [f"rank {rank} of {n_ranks}"]
    if cuda.path == "unknown":
        lines.append("CUDA tensors: no collective yet")
    elif cuda.path == "engine":
        lines.append(f"CUDA tensors: spccl on GPU {cuda.device}, at most {cuda.n_ctas} thread blocks")
        lines.append(f"GPU memory for peers: {cuda.inbox_bytes / 2**20:.1f} MiB")
        if cuda.n_remote:
            peers = f"{cuda.n_remote} peer{'s' * (cuda.n_remote > 1)}"
            lines.append(f"pinned memory for {peers} on other hosts: {cuda.pinned_bytes / 2**20:.1f} MiB")
            lines.append(f"proxies: {cuda.n_proxies}")
    else:
        lines.append(f"CUDA tensors: {cuda.path}, because {cuda.why}")
    return "\n".join(lines + [f"rank {peer}: {text}" for peer, text in links.items()])
