"""What the store's numbers mean: a miss, no room, trouble that may pass, trouble that will not."""

from __future__ import annotations

from typing import Final

from lmcache_core import BackendError, BackendFull, BackendUnavailable

FULL: Final = -200
TOO_SMALL: Final = -600
NOT_READY: Final = -703
NOT_FOUND: Final = -704
EXISTS: Final = -705
LEASED: Final = -706
REPLICATING: Final = -708
GONE: Final = -712
BUSY: Final = -714
CHECKSUM: Final = -801
RPC_FAILED: Final = -900
RPC_TIMED_OUT: Final = -901

MISSES: Final = frozenset({NOT_READY, NOT_FOUND, GONE})
"""Not there, or not there yet."""
HELD: Final = frozenset({LEASED, REPLICATING, BUSY})
"""There, and protected from a removal that is not forced."""
NO_MASTER: Final = frozenset({RPC_FAILED, RPC_TIMED_OUT})
_PASSING: Final = {
    -1: "an internal error",
    -101: "there is no such segment any more",
    -500: "the write failed",
    -601: "the master does not know this client yet, or another has taken the write over",
    -702: "a replica is not valid",
    -707: "the lease ended before the read did: a longer --default_kv_lease_ttl of the master helps",
    -710: "there is no such replica any more",
    -800: "the transfer failed: the node that has the memory may be gone",
    -1010: "not in the state that the store is in",
    -1011: "not in the mode that the store is in",
    RPC_FAILED: "the master does not answer",
    RPC_TIMED_OUT: "the master did not answer in time",
}
_LASTING: Final = {
    -10: "a buffer is too small",
    -400: "the key is not valid",
    TOO_SMALL: "a parameter is not valid",
    -700: "the write is not valid",
    -701: "the read is not valid",
}


def fault(code: int, verb: str, master: str) -> BackendError:
    """The exception that stands for a negative answer."""
    if code == FULL:
        return BackendFull(f"mooncake {verb}: no segment has room ({code}); the store evicts, later than it is asked")
    text = f"mooncake {verb}: {_PASSING.get(code) or _LASTING.get(code) or 'failed'} ({code}, master {master})"
    return BackendError(text) if code in _LASTING else BackendUnavailable(text)
