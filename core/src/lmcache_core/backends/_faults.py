"""What the system says of a file, as an error of the store."""

from __future__ import annotations

import errno
from typing import Final

from ..errors import BackendError, BackendFull, BackendUnavailable
from ..keys import ChunkKey

_NO_ROOM: Final = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EFBIG))
_PASSING: Final = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.ETIMEDOUT, errno.ESTALE))


def fault(error: OSError, verb: str, key: ChunkKey | None) -> BackendError:
    what = f"disk {verb} {key!r}: {error.strerror}" if key else f"disk {verb}: {error.strerror}"
    if error.errno in _NO_ROOM:
        return BackendFull(what)
    if error.errno in _PASSING:
        return BackendUnavailable(what)
    return BackendError(what)
