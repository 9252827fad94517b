"""The lock of a folder's publisher: the file `publisher.lock`, made exclusively, with the epoch and who holds it.

A lock is stale if its process is dead. That can be said only on the holder's host and in its PID namespace; there a new
publisher takes it over with a new epoch. Any other lock is refused with its holder's name.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from spccl import _ext
from spccl.errors import StateError

from . import _folder

NAME = "publisher.lock"
_WAIT_S = 10


class Lock:
    """A lock that this process holds. Args: epoch: of this publisher, above those of all before it."""

    def __init__(self, folder: Path, least_epoch: int):
        self.path = folder / NAME
        self.token = secrets.token_hex(16)
        with _takeover(folder):
            found = _read(self.path)
            if found is not None and not _is_stale(found):
                raise StateError(
                    f"publisher: {self.path} is held by {_who(found)}: end that publisher; if it cannot be running, "
                    "remove the file"
                )
            self.epoch = max(least_epoch, 1 + (found or {}).get("epoch", 0))
            self.holder = {**_me(), "epoch": self.epoch, "token": self.token}
            made = self.path.with_name(f"{_folder.UNFINISHED}lock-{self.token}")
            try:
                _folder.write_bytes(made, json.dumps(self.holder).encode())
                if found is None:
                    os.link(made, self.path)  # fails where another host's publisher was faster
                    os.unlink(made)
                else:
                    os.replace(made, self.path)
            except FileExistsError as error:
                raise StateError(f"publisher: {self.path} is held by {_who(_read(self.path) or {})}") from error
                _folder.sync_folder(folder)
            except OSError as error:
                self.release()
                raise _folder.system_error("publisher", made, error) from error
            finally:
                with contextlib.suppress(OSError):
                    made.unlink(missing_ok=True)

    def require(self) -> None:
        """Raises: StateError if the folder's lock is another publisher's now, or gone."""
        if os.getpid() != self.holder["pid"]:
            raise StateError(
                f"publisher: {self.path} is held by {_who(self.holder)}, which made this one; not by its child"
            )
        found = _read(self.path)
        if found is None or found.get("token") != self.token:
            raise StateError(
                f"publisher: lost {self.path}: {'it is gone' if found is None else f'now held by {_who(found)}'}; "
                f"epoch {self.epoch} publishes no more"
            )

    def release(self) -> None:
        """Remove the lock, if it is still this one and this is no child of the process that took it."""
        if os.getpid() != self.holder["pid"]:
            return
        with contextlib.suppress(OSError, StateError):
            found = _read(self.path)
            if found is not None and found.get("token") == self.token:
                os.unlink(self.path)


@contextlib.contextmanager
def _takeover(folder: Path) -> Iterator[None]:
    """One process of a host at a time looks at a lock and takes it over."""
    try:
        guard = os.open(folder / f"{NAME}.guard", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise _folder.system_error("publisher", folder, error) from error
    try:
        deadline = time.monotonic() + _WAIT_S
        while True:
            try:
                fcntl.flock(guard, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if time.monotonic() > deadline:
                    text = f"publisher: {folder / NAME}: another process has been looking at it for {_WAIT_S} s"
                    raise StateError(text) from error
                time.sleep(0.01)
        yield
    finally:
        os.close(guard)


def _read(path: Path) -> dict[str, Any] | None:
    """What a lock says; None: there is none."""
    try:
        data = _folder.read_bytes(path, 1 << 16)
    except FileNotFoundError:
        return None
    try:
        found = json.loads(data)
        if not isinstance(found["epoch"], int) or not isinstance(found["pid"], int):
            raise TypeError("epoch and pid are no numbers")
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise StateError(f"publisher: {path} is not readable: if no publisher is running, remove it") from error
    return found


def _me() -> dict[str, Any]:
    pid = os.getpid()
    return {
        "host": socket.gethostname(),
        "host_id": _ext.get_host().hex(),
        "pid_namespace": os.readlink("/proc/self/ns/pid"),
        "pid": pid,
        "started": _started(pid),
    }


def _started(pid: int) -> str | None:
    """When a process started, in clock ticks since boot: a later process with its number has another. None: dead.

    Raises: OSError if the system does not say.
    """
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except PermissionError:
        pass  # of another user
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return None if fields[0] in "ZX" else fields[19]


def _is_stale(found: dict[str, Any]) -> bool:
    me = _me()
    here = found.get("host_id") == me["host_id"] and found.get("pid_namespace") == me["pid_namespace"]
    try:
        return here and found.get("started") != _started(found["pid"])
    except OSError:  # /proc hides processes of other users, for example
        return False


def _who(found: dict[str, Any]) -> str:
    return f"process {found.get('pid')} on host {found.get('host')!r}, epoch {found.get('epoch')}"
