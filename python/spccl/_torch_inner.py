"""The inner Gloo and NCCL of a group: the backends of torch that run what spccl does not.

The glue asks for them once spccl has connected the ranks of a new group, through an op that `offer` defines.
"""

from __future__ import annotations

import functools
import os
from datetime import timedelta
from typing import Any


@functools.cache
def offer() -> None:
    """Define the op through which the glue gets the inner groups of a new group, once spccl has connected its ranks."""
    import torch
    import torch.distributed as dist

    def with_inner_groups(boxed: Any, name: str, ranks: list[int], timeout_ms: int, local_ip: str) -> Any:
        _add(dist.ProcessGroup.unbox(boxed), name, list(ranks), timeout_ms, local_ip)
        return boxed

    library = torch.library.Library("spccl", "FRAGMENT")  # ends with its owner: this cache
    group = "__torch__.torch.classes.c10d.ProcessGroup"
    library.define(f"with_inner_groups({group} bare, str name, int[] ranks, int timeout_ms, str local_ip) -> {group}")
    library.impl("with_inner_groups", with_inner_groups, "CompositeExplicitAutograd")
    offer.library = library  # type: ignore[attr-defined]


def _add(bare: Any, name: str, ranks: list[int], timeout_ms: int, local_ip: str) -> None:
    """Add the inner Gloo and, where torch has it, NCCL to `bare`, a group that has a store and no backends."""
    import torch
    import torch.distributed as dist

    timeout = timedelta(milliseconds=timeout_ms)
    kinds = dist.ProcessGroup.BackendType
    bare._register_backend(torch.device("cpu"), kinds.GLOO, _make_gloo(dist, bare, name, ranks, timeout, local_ip))
    if dist.is_nccl_available() and torch.cuda.is_available():
        bare._register_backend(torch.device("cuda"), kinds.NCCL, _make_nccl(dist, bare, name, ranks, timeout))


def _make_gloo(dist: Any, bare: Any, name: str, ranks: list[int], timeout: timedelta, local_ip: str) -> Any:
    """The inner Gloo, made as torch's _new_process_group_helper makes one, but at the address `local_ip`.

    By default torch takes the address of this host's name. Debian and Ubuntu map that to 127.0.1.1, which no other host
    can reach. GLOO_SOCKET_IFNAME overrides both.
    """
    if not dist.is_gloo_available():
        raise RuntimeError("spccl: this torch was built without Gloo, which spccl needs for calls that it does not run")
    store = dist.PrefixStore("gloo/", bare.get_group_store())
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "")
    try:
        if interface:
            gloo = dist.ProcessGroupGloo(store, bare.rank(), bare.size(), timeout=timeout)
        else:
            options = dist.ProcessGroupGloo._Options()
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=local_ip)]
            options._threads = 2  # as torch, per device
            options._timeout = timeout
            gloo = dist.ProcessGroupGloo(store, bare.rank(), bare.size(), options)
    except RuntimeError as error:
        where = f"the interface {interface} (GLOO_SOCKET_IFNAME)" if interface else f"{local_ip}, as spccl's own links"
        raise dist.DistBackendError(
            f"spccl: rank {bare.rank()} of {bare.size()}, group '{name}': the inner Gloo, which runs barriers, objects "
            f"and send/recv, did not connect over {where}: set GLOO_SOCKET_IFNAME on each host to the interface that "
            f"reaches the others (Gloo: {str(error).splitlines()[0]})"
        ) from error
    gloo.options.global_ranks_in_group = ranks
    gloo.options.group_name = name
    gloo._set_sequence_number_for_group()
    return gloo


def _make_nccl(dist: Any, bare: Any, name: str, ranks: list[int], timeout: timedelta) -> Any:
    """The inner NCCL, made as `_make_gloo` makes Gloo. It connects on first use, or at once if a device is bound."""
    options = dist.ProcessGroupNCCL.Options()
    options.is_high_priority_stream = False
    options._timeout = timeout
    options.global_ranks_in_group = ranks
    options.group_name = name
    store = dist.PrefixStore("nccl/", bare.get_group_store())
    nccl = dist.ProcessGroupNCCL(store, bare.rank(), bare.size(), options)
    nccl._set_sequence_number_for_group()
    return nccl
