"""What `lmc doctor` says of a disk store: how it is read, whether the capacity fits, who else may look."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from ..diagnosis import Diagnosis

_IN_MEMORY: Final = frozenset(("tmpfs", "ramfs"))
_NETWORK: Final = frozenset(("nfs", "nfs4", "cifs", "smb3", "ceph", "lustre", "glusterfs", "9p", "fuse.sshfs"))


def diagnose(root: Path, *, direct: bool, used_nbytes: int, limit_nbytes: int | None) -> Iterator[Diagnosis]:
    """Of the open store at `root`; `limit_nbytes` is the smallest that its processes have."""
    kind = file_system(root)
    if direct:
        yield Diagnosis("ok", f"{root}: direct I/O on {kind}")
    else:
        yield Diagnosis(
            "note",
            f"{root}: buffered I/O, since O_DIRECT does not work on {kind} or is switched off",
            "another file system (ext4, xfs) keeps KV from pushing everything else out of the page cache",
        )
    if kind in _IN_MEMORY:
        remedy = "name a directory on a disk, or make the host tier larger"
        yield Diagnosis("warning", f"{root} is in memory ({kind})", remedy)
    if kind in _NETWORK:
        yield Diagnosis("note", f"{root} is on a network file system ({kind})", "its flock must work between the hosts")
    found = os.statvfs(root)
    free = found.f_bavail * found.f_frsize
    if limit_nbytes is None:
        yield Diagnosis("note", f"{root} has no capacity: it grows to the {_about(free)} that are free", "set capacity")
    elif limit_nbytes - used_nbytes > free:
        yield Diagnosis(
            "warning",
            f"the capacity of {_about(limit_nbytes)} does not fit: {_about(used_nbytes)} in use, {_about(free)} free",
            "lower capacity, or free space: writes that find no room are dropped",
        )
    else:
        yield Diagnosis(
            "ok", f"{_about(used_nbytes)} of {_about(limit_nbytes)} in use, {_about(free)} free on the disk"
        )
    mode = stat.S_IMODE(os.stat(root).st_mode)
    if mode & 0o077:
        yield Diagnosis(
            "warning",
            f"other users can get into {root} (mode {mode:04o}); KV gives prompts away",
            f"chmod 700 {root}",
        )


def file_system(path: Path) -> str:
    """The type of the file system at `path`, as the kernel names it."""
    device = os.stat(path).st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    with open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as file:
        for line in file:
            fields, _, rest = line.partition(" - ")
            if fields.split()[2] == wanted:
                return rest.split()[0]
    return "an unknown file system"


def _about(nbytes: int) -> str:
    return f"{nbytes / (1 << 30):.1f} GiB" if nbytes >= 1 << 30 else f"{nbytes / (1 << 20):.1f} MiB"
