"""The exceptions of spccl. Each text says who failed, where, what was found and wanted, and what to do.

Each class derives from `spccl.Error`; `status` holds the number of the failure (a `Status`). Most derive also
from the builtin exception for such a failure: `TimeoutError` is a `builtins.TimeoutError`, `FormatError` a
`ValueError`. Source: docs/ERRORS.md says for each status what happened and what to do.
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
