"""A stand-in for the library kvikio, as far as the plugin uses it: "device memory" is the host's, cuFile is pread.

It stands for what needs an NVIDIA driver and a GPU; the rest (names, total, publishing, header pages, faults)
is the real thing.  What only hardware proves is in the README.
"""

from __future__ import annotations

import os
from types import TracebackType
from typing import Self

calls: list[tuple[str, str]] = []
"""(flags, verb) of each transfer."""
problem = ""
"""What cuFile says instead of moving anything."""
short = 0
"""Bytes that are left out of each transfer."""


class CuFile:
    def __init__(self, file: str, flags: str = "r") -> None:
        self._flags = flags
        mode = {"r": os.O_RDONLY, "w": os.O_WRONLY | os.O_CREAT | os.O_TRUNC}[flags]
        self._fd = os.open(file, mode | os.O_CLOEXEC)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._fd)

    def read(self, buf: memoryview, size: int | None = None, file_offset: int = 0) -> int:
        return self._moved("read", buf, size)

    def write(self, buf: memoryview, size: int | None = None, file_offset: int = 0) -> int:
        return self._moved("write", buf, size)

    def _moved(self, verb: str, buf: memoryview, size: int | None) -> int:
        calls.append((self._flags, verb))
        if problem:
            raise RuntimeError(problem)
        view = buf[: (len(buf) if size is None else size) - short]
        return os.preadv(self._fd, [view], 0) if verb == "read" else os.pwritev(self._fd, [view], 0)
