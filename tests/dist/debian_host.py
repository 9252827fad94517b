"""Enter an emulated host as an installed Debian or Ubuntu is: /etc/hosts maps the host's own name to 127.0.1.1.

As a program: `debian_host.py NAMESPACE NAME COMMAND...` runs COMMAND there. The mount and the name are this process's
and its children's.
"""

from __future__ import annotations

import ctypes
import os
import socket
import sys
import tempfile

from spccl.bench import hosts

_CLONE_NEWNS, _CLONE_NEWUTS = 0x20000, 0x4000000
_MS_BIND, _MS_REC, _MS_PRIVATE, _MNT_DETACH = 4096, 16384, 1 << 18, 2


def enter(namespace: str, name: str, more: str = "") -> None:
    """Move this process to the network namespace, and name its host. more: further lines of /etc/hosts."""
    libc = ctypes.CDLL(None, use_errno=True)

    def check(status: int, what: str) -> None:
        if status != 0:
            error = ctypes.get_errno()
            raise OSError(error, f"{what}: {os.strerror(error)}")

    hosts.enter(namespace)
    check(libc.unshare(_CLONE_NEWNS | _CLONE_NEWUTS), "unshare")
    check(libc.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None), "making mounts private")
    socket.sethostname(name)
    with tempfile.NamedTemporaryFile("w") as file:  # the mount keeps it
        os.chmod(file.name, 0o644)
        file.write(f"127.0.0.1\tlocalhost\n127.0.1.1\t{name}\n{more}")
        file.flush()
        libc.umount2(b"/etc/hosts", _MNT_DETACH)  # that of the host that this process came from, if it was on one
        check(libc.mount(file.name.encode(), b"/etc/hosts", None, _MS_BIND, None), "mounting /etc/hosts")
    assert socket.gethostbyname(name) == "127.0.1.1"


if __name__ == "__main__":
    enter(sys.argv[1], sys.argv[2], os.environ.get("SPCCL_TEST_MORE_HOSTS", ""))
    os.execvp(sys.argv[3], sys.argv[3:])
