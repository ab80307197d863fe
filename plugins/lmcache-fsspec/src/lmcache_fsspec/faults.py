"""What a filesystem raises, as the errors of the contract: whatever its client library calls them."""

from __future__ import annotations

import asyncio
import errno
import ftplib
from collections.abc import Iterable
from typing import Final

from fsspec.exceptions import FSTimeoutError  # type: ignore[import-untyped]

from lmcache_core import BackendError, BackendFull, BackendUnavailable

ABSENT: Final = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
_NO_ROOM: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_LASTING: Final = frozenset({errno.EACCES, errno.EPERM, errno.EROFS, errno.EINVAL, errno.ENAMETOOLONG, errno.EISDIR})
_PASSING: Final = (FSTimeoutError, asyncio.TimeoutError, TimeoutError, ConnectionError, EOFError, ftplib.error_temp)
_CLIENTS: Final = frozenset(
    {
        "aiobotocore",
        "aiohttp",
        "asyncssh",
        "azure",
        "botocore",
        "httpcore",
        "httpx",
        "paramiko",
        "requests",
        "smbprotocol",
        "urllib3",
    }
)
"""Libraries whose errors, unless they carry a status, speak of the connection."""
_TEXT: Final = 200


def fault(error: BaseException, what: str, hidden: Iterable[str] = ()) -> BackendError:
    """The BackendError for `error`; its message has none of the `hidden` texts."""
    if isinstance(error, BackendError):
        return error
    text = " ".join(str(error).split())
    for secret in hidden:
        text = text.replace(secret, "***") if secret else text
    found = _kind(error)(f"fsspec {what}: {type(error).__name__}: {text[:_TEXT]}")
    found.__cause__ = error
    return found


def is_absence(error: BaseException) -> bool:
    """Whether it says that there is no such file."""
    return isinstance(error, ABSENT) or _status(error) == 404


def spoils_connection(error: BaseException) -> bool:
    """Whether what is said next on the same connection could be the answer to something else."""
    return not isinstance(error, (*ABSENT, FileExistsError, PermissionError, ftplib.error_perm))


def _kind(error: BaseException) -> type[BackendError]:
    status = _status(error)
    if status is not None:
        if status in (413, 507):
            return BackendFull
        return BackendUnavailable if status in (408, 425, 429) or status >= 500 else BackendError
    if isinstance(error, ftplib.error_perm):
        return BackendFull if str(error)[:3] in ("452", "552") else BackendError
    if isinstance(error, _PASSING):
        return BackendUnavailable
    if isinstance(error, OSError):
        if error.errno in _NO_ROOM:
            return BackendFull
        lasting = isinstance(error, PermissionError) or error.errno in _LASTING
        return BackendError if lasting else BackendUnavailable
    library = type(error).__module__.partition(".")[0]
    return BackendUnavailable if library in _CLIENTS else BackendError


def _status(error: BaseException) -> int | None:
    """The HTTP status that the error, its response or its cause carries."""
    seen: BaseException | None = error
    for _ in range(4):
        if seen is None:
            return None
        for holder in (seen, getattr(seen, "response", None)):
            for name in ("status", "status_code", "code"):
                value = getattr(holder, name, None)
                if isinstance(value, str) and value.isdecimal():
                    value = int(value)
                if type(value) is int and 300 <= value < 600:
                    return value
        if isinstance(holder := getattr(seen, "response", None), dict):  # botocore
            value = holder.get("ResponseMetadata", {}).get("HTTPStatusCode")
            if type(value) is int:
                return value
        seen = seen.__cause__
    return None
