"""Device I/O by cuFile through the library kvikio, imported only where everything that it needs is there."""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from lmcache_core import BackendError, ChunkCorrupt, ChunkKey, DeviceRecord, DiskBackend

DRIVER: Final = "libcuda.so.1"
NVIDIA_FS: Final = Path("/proc/driver/nvidia-fs/version")


def why_no_device() -> str:
    """Why records cannot go between device memory and storage here, and what to install; "" where they can.

    Looks without initialising the device, and without importing anything.
    """
    try:
        ctypes.CDLL(DRIVER)
    except OSError:
        return f"there is no NVIDIA driver ({DRIVER})"
    if importlib.util.find_spec("kvikio") is None:
        return "kvikio is not installed: pip install kvikio-cu12 (or -cu13, as your driver has it)"
    if not NVIDIA_FS.exists():
        return "the kernel module nvidia-fs is not loaded, without which cuFile itself goes through host memory"
    return ""


class CuFileIO:
    """The files of a disk store, from and into device memory.

    cuFile opens them by descriptor, so that names, total and publishing are the disk store's, as for any other record.
    """

    def __init__(self, run: Callable[[Callable[[DiskBackend], Any]], Any]) -> None:
        self._run = run
        """Calls with the open store, on the thread of whoever asks: a device's memory cannot be left to a late call."""
        self._kvikio: Any = importlib.import_module("kvikio")

    def get(self, key: ChunkKey, into: DeviceRecord) -> int | None:
        def read(disk: DiskBackend) -> int | None:
            with disk.reading(key) as file:
                if file is None:
                    return None
                if file.nbytes > into.nbytes:
                    raise ChunkCorrupt(f"{key!r} has {file.nbytes} bytes, at most {into.nbytes} were expected")
                done = self._moved("read", file.fd, "r", into, file.nbytes)
                if done != file.nbytes:
                    raise ChunkCorrupt(f"{key!r}: {done} bytes of {file.nbytes} could be read")
                return file.nbytes

        found: int | None = self._run(read)
        return found

    def put(self, key: ChunkKey, data: DeviceRecord) -> None:
        def write(disk: DiskBackend) -> None:
            with disk.writing(key, data.nbytes) as file:
                done = self._moved("write", file.fd, "w", data, data.nbytes)
                if done != data.nbytes:
                    raise BackendError(f"{key!r}: {done} bytes of {data.nbytes} could be written")

        self._run(write)

    def _moved(self, verb: str, fd: int, flags: str, record: DeviceRecord, nbytes: int) -> int:
        try:
            with self._kvikio.CuFile(f"/proc/self/fd/{fd}", flags) as opened:
                return int(getattr(opened, verb)(record.memory, nbytes))
        except RuntimeError as error:  # what cuFile and CUDA say, by kvikio
            raise BackendError(f"cuFile {verb}: {error}") from error
