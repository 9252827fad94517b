"""What `stats()` of the pruning hooks and of `SparseSync` reports, and the bytes that one of them sends in a group."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from spccl import backend

from .checks import warn_of_old_word


def report(names: Iterable[str], **figures: Any) -> dict[str, Any]:
    """The dictionary that `HasStats.stats` describes; None where a figure is not known.

    Args: names: of the backends that carry the exchanges. figures: "part_norm" is update_norm of this rank's part
        alone, where that is of more.
    """
    unsent, update = figures["unsent_norm"], figures.pop("part_norm", figures["update_norm"])
    ratio = unsent / update if update and unsent is not None else None
    unknown = dict.fromkeys(
        ("density_sums", "select_ms", "select_ms_mean", "exchange_ms", "exchange_ms_mean", "pruning_ranks", "hosts")
    )
    return {**unknown, **figures, "residual_ratio": ratio, "backend": ", ".join(sorted(names)) or "none"}


class HasStats:
    """Base of the objects that train with sparse exchanges."""

    def stats(self) -> dict[str, Any]:
        """Figures of this rank, for logs. Reading them waits for the device, on CUDA.

        The keys are the same for every object. An exchange is that of a hook in one backward pass, or that of
        SparseSync after `every` steps. With FSDP2 all counts are those of this rank's shards.

            steps              completed steps; a hook's step is a backward pass that exchanges
            exchanges          completed exchanges
            recipe             a sentence: the settings that density=None has chosen, and where they were measured; "as
                               given" for a density that was given
            density_target     wanted density of the last exchange; before the first one, that of the first
            density_sent       entries sent / entries of all parameters, last exchange; those sent whole included
            density_pruned     the same over pruned parameters only; None if nothing was pruned
            density_mean       density_sent averaged over all exchanges; of SparseSync those of the run that saved a
                               loaded state included
            density_sums       with sum_density: entries that this rank sent as an owner / entries of its shards, last
                               exchange; else None
            dense_bytes        bytes of the values of a dense exchange; of a hook 0 before the first
            sent_bytes         bytes of the values sent in the last exchange, before any format; with bits=2 all bytes
                               that this rank gives to the all-gather, with bits=1 to the all-to-all
            wire_bytes         bytes that this object's exchanges have put on the wire so far, with indices and headers;
                               of an all-to-all, which Gloo or NCCL carries, without headers.
                               On the host collectives that others run in the group during an exchange are counted too.
                               A GPU counts for its whole group: None once others, DDP included, have run a collective
                               in it. None if the backend is not spccl
            update_norm        norm of what an exchange selects from, when last measured: of a hook the local
                               gradient's before clipping, measured with clip_norm or norm_every; of SparseSync the
                               change by the local steps, estimated, measured with norm_every. None before
            unsent_norm        norm of what was then still unsent (of a hook its residuals), measured with norm_every;
                               None before
            residual_ratio     unsent_norm / update_norm: how many exchanges' worth of change waits; of a hook where
                               other ranks have parts (hosts, FSDP2) both are those of this rank's part; None before
            select_ms          of a hook: its time in the last exchange, without the transfer; None for SparseSync
            select_ms_mean     the same, averaged over the run
            exchange_ms        of SparseSync: time of the last exchange; None for a hook, whose exchange ends in the
                               backward pass
            exchange_ms_mean   the same, averaged over the run. On CUDA all four are the time to queue the work
            skipped_steps      local steps that SparseSync left out because of inf or nan; 0 for a hook
            nonfinite_elems    of a hook: entries of gradients with inf or nan so far; of SparseSync: weights that had
                               become inf or nan and were set to the global ones
            backend            what carries the exchange: "spccl", "nccl", ..., "none" for one rank
            pruning_ranks      ranks that prune and exchange with each other: hosts, where a host's ranks average first.
                               Entries and bytes are those of this rank's part then, wire_bytes those between hosts:
                               a hook's sparse gradients, which all ranks average, are not in it
            hosts              a sentence: whether hosts prune, and why
        """
        raise NotImplementedError

    def summary(self) -> dict[str, Any]:
        """The older name of `stats`."""
        warn_of_old_word(type(self).__name__, "summary()", "stats()")
        return self.stats()


class OwnBytes:
    """The bytes that one object sends in a group that others use too.

    On the host intervals around the object's exchanges count them. A GPU counts in its own memory, for the whole group,
    and an interval would have to wait for it twice; there the count holds as long as nobody else runs a collective.

    It keeps no group, so that its owner can be copied and pickled. `group` is the same in every call; None: no other
    ranks.
    """

    def __init__(self, group: dist.ProcessGroup | None):
        there = group is not None and backend.NAME in backend.names_of(group)
        self._bytes = 0
        self._opened_at: int | None = None  # the host's count when the open interval began
        self._cuda_start = backend.cuda_stats(group) if there else None

    def begin(self, group: dist.ProcessGroup | None) -> None:
        """Open an interval, before an exchange."""
        self.end(group)
        if group is not None and self._cuda_start is not None:
            self._opened_at = _sent_by_host(group)

    def end(self, group: dist.ProcessGroup | None) -> None:
        """Close the interval, if one is open, after the exchange."""
        if group is not None and self._opened_at is not None:
            self._bytes += _sent_by_host(group) - self._opened_at
            self._opened_at = None

    def read(self, group: dist.ProcessGroup | None, devices: Iterable[torch.device], n_calls: int) -> int | None:
        """The bytes so far; None if they are not known.

        Args: devices: those of the tensors that the object exchanges. n_calls: collectives that it has called.
        """
        self.end(group)
        start = self._cuda_start
        kinds = {d.type: d for d in devices}
        ours = {kind for kind, d in kinds.items() if start is not None and backend.name_for(group, d) == backend.NAME}
        if start is None or not ours:
            return None
        now = backend.cuda_stats(group)
        if "cuda" not in ours or now.path == "stage":  # CUDA tensors then travel through host memory
            return self._bytes
        alone = now.path == "engine" and now.n_collectives - start.n_collectives == n_calls
        return self._bytes + now.wire_bytes_sent - start.wire_bytes_sent if alone else None


def _sent_by_host(group: dist.ProcessGroup) -> int:
    """`backend.stats(group).wire_bytes_sent` in half of its time: it is read twice in each exchange."""
    return torch.ops.spccl.stats(backend.boxed(group))[2]
