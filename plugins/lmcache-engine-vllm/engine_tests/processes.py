"""An engine's processes as the kernel sees them: who belongs to it, and how much CPU they have used."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")


def tree(pid: int) -> set[int]:
    """`pid` and everything that it and its children started, as far as it lives."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and (fields := _fields(int(folder.name))):
            children.setdefault(int(fields[1]), []).append(int(folder.name))
    found, left = set(), [pid]
    while left:
        each = left.pop()
        found.add(each)
        left += children.get(each, [])
    return found


def cpu_s(pid: int) -> float:
    """CPU-seconds of the tree below `pid`, its children that have ended and been waited for included."""
    return sum(sum(map(int, fields[11:15])) for each in tree(pid) if (fields := _fields(each))) / TICKS_PER_S


def _fields(pid: int) -> list[str]:
    """/proc/PID/stat from the state on; empty when the process is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
