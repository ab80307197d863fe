"""What is mounted where a store lies, by the kernel's table: a mount that hangs is not touched for it."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

TABLE: Final = Path("/proc/self/mountinfo")
_REMOTE: Final = frozenset(
    ("9p", "afs", "beegfs", "ceph", "cifs", "glusterfs", "gpfs", "lustre", "nfs", "nfs4", "orangefs", "panfs", "pvfs2",
     "smb3", "virtiofs", "wekafs")
)  # fmt: skip
_OCTAL: Final = re.compile(r"\\([0-7]{3})")


@dataclass(frozen=True, slots=True)
class Mount:
    """One line of the kernel's table of mounts."""

    point: str
    kind: str
    """As in /proc/mounts: "ext4", "fuse.weed", "nfs4"."""

    @property
    def may_hang(self) -> bool:
        """Whether another process or machine answers for it, which may stop doing so."""
        return self.kind in _REMOTE or self.kind == "fuse" or self.kind.startswith("fuse.")


def mount_at(path: str, table: Path = TABLE) -> Mount:
    """The mount that an absolute path lies on, symbolic links on the way not considered."""
    wanted = os.path.normpath(path)
    best = Mount("/", "unknown")
    with table.open(encoding="utf-8", errors="surrogateescape") as file:
        for line in file:
            fields, _, rest = line.partition(" - ")
            point = _OCTAL.sub(lambda match: chr(int(match[1], 8)), fields.split()[4])
            # Of two mounts on one point the later one is on top.
            if len(point) >= len(best.point) and (wanted == point or wanted.startswith(point.rstrip("/") + "/")):
                best = Mount(point, rest.split()[0])
    return best
