"""torch.distributed over two emulated hosts with Debian's /etc/hosts (root, iproute2), without GLOO_SOCKET_IFNAME."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="backends of torch.distributed")

from launch import check_case, run_ranks

from spccl.bench import hosts

NO_HOSTS = hosts.why_not()
pytestmark = pytest.mark.skipif(NO_HOSTS is not None, reason=f"emulated hosts: {NO_HOSTS}")
CASES = ("ddp_trains", "calls_that_gloo_runs", "new_groups", "links_name_the_addresses", "wrong_interface_is_named")


def test_names_that_resolve_to_127_0_1_1():
    with hosts.emulated(2, "1gbit") as names:
        ranks = run_ranks("debian_hosts", 4, env={"SPCCL_TEST_NAMESPACES": ",".join(names)})
    for case in CASES:
        check_case(ranks, case)
