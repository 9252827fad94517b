"""The exceptions of spccl. Every text says who, where, got, wanted, and what to do.

Each is a `spccl.Error` with the number of the failure in `status` (a `Status`), and also the exception
that Python code expects for it: `TimeoutError` is a `builtins.TimeoutError`, `FormatError` a `ValueError`.
Source: docs/ERRORS.md says of each status what happened and what to do.
"""

import enum

from ._ext import (
    AbortedError,
    ArgumentError,
    AuthError,
    DeviceError,
    Error,
    FormatError,
    InternalError,
    MismatchError,
    OutOfMemoryError,
    PeerError,
    SettingError,
    StateError,
    SystemCallError,
    TimeoutError,
    UnreachableError,
    UnsupportedError,
)

__all__ = [
    "AbortedError",
    "ArgumentError",
    "AuthError",
    "DeviceError",
    "Error",
    "FormatError",
    "InternalError",
    "MismatchError",
    "OutOfMemoryError",
    "PeerError",
    "SettingError",
    "StateError",
    "Status",
    "SystemCallError",
    "TimeoutError",
    "UnreachableError",
    "UnsupportedError",
]


class Status(enum.IntEnum):
    """`Error.status`: the numbers of `spccl_status` in spccl.h; they never change."""

    ARG = -10
    DTYPE = -11
    DST_SMALL = -12
    ALIAS = -13
    STATE = -14
    UNSUPPORTED = -15
    SETTING = -16
    FORMAT = -20
    VERSION = -21
    FRAME = -22
    NOMEM = -30
    SYSTEM = -31
    PEER = -40
    TIMEOUT = -41
    MISMATCH = -42
    ABORTED = -43
    AUTH = -44
    UNREACHABLE = -45
    DEVICE = -50
    BUG = -90
