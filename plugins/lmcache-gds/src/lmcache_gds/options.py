"""The settings of the backend, checked before anything is opened."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Final, Literal

MAX_THREADS: Final = 64
_KIND: Final = re.compile(r"[a-z0-9._-]{1,64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class GdsOptions:
    """What `options:` of a `gds` tier may hold.  The README says more about each."""

    path: str
    """Directory of the store: absolute, or from "~".  Created (mode 0700) if it is missing.  No default."""
    io: Literal["auto", "device", "direct", "buffered"] = field(
        default="auto", metadata={"measure": ("direct", "buffered")}
    )
    """How bytes move: "auto" the fastest way that works; another one, or an error where it does not."""
    filesystem: str = ""
    """Type of the file system that must be mounted there, as in /proc/mounts; empty for any."""
    guard: Literal["auto", "on", "off"] = "auto"
    """Whether calls may not outlast their deadline, at one copy a record: "auto" on network and FUSE mounts."""
    io_threads: int = field(default=5, metadata={"measure": "threads"})
    """Records that are read or written at a time.  1 to 64.  Default 5."""

    def __post_init__(self) -> None:
        if not self.path or "\0" in self.path or not self.path.startswith(("/", "~")):
            raise ValueError(f"path must be an absolute directory, or begin with ~, got {self.path!r}")
        if self.filesystem and not _KIND.fullmatch(self.filesystem):
            raise ValueError(f"filesystem is a type as in /proc/mounts, e.g. lustre, got {self.filesystem!r}")
        if not 1 <= self.io_threads <= MAX_THREADS:
            raise ValueError(f"io_threads must be 1 to {MAX_THREADS}, got {self.io_threads}")
