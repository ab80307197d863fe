"""What a server's error answers mean: which exception, and whether connection and topology are still to be trusted."""

from __future__ import annotations

from typing import Final

from lmcache_core import BackendError, BackendFull, BackendUnavailable, ChunkCorrupt

from .wire import ServerError

_PASSING: Final = frozenset(
    {"READONLY", "LOADING", "BUSY", "MASTERDOWN", "CLUSTERDOWN", "TRYAGAIN", "NOREPLICAS", "MISCONF", "UNBLOCKED"}
)
"""Trying again can help."""
_NOT_FOR_US: Final = {
    "NOAUTH": "it wants a password; set the option password",
    "WRONGPASS": "wrong user or password",
    "NOPERM": "the user may not do this",
    "MOVED": "it is a node of a cluster; set cluster: true",
    "ASK": "it is a node of a cluster; set cluster: true",
    "CROSSSLOT": "it is a node of a cluster; set cluster: true",
}
_LEAVE: Final = frozenset({"READONLY", "LOADING", "MASTERDOWN", "CLUSTERDOWN", "NOAUTH", "WRONGPASS", "UNBLOCKED"})
"""After these the connection is thrown away and the topology asked anew: the server is not what it was."""


def fault(error: ServerError, where: str) -> BackendError:
    """The exception that stands for `error`."""
    text = f"{where}: {error.text[:300]}"
    if error.code == "OOM":
        return BackendFull(text)
    if error.code == "WRONGTYPE":
        return ChunkCorrupt(text)
    if error.code in _PASSING:
        return BackendUnavailable(text)
    hint = _NOT_FOR_US.get(error.code)
    return BackendError(f"{text} ({hint})" if hint else text)


def is_doubtful(error: ServerError) -> bool:
    return error.code in _LEAVE


def redirection(error: ServerError) -> tuple[str, int, str] | None:
    """("MOVED" or "ASK", slot, "host:port") of an answer that says where a key is; None for other errors."""
    words = error.text.split()
    if len(words) != 3 or words[0] not in ("MOVED", "ASK") or not words[1].isdigit():
        return None
    return words[0], int(words[1]), words[2]
