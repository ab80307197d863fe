"""The vendor's runtime library that torch has loaded, by ctypes: what is needed of it and torch does not bind."""

from __future__ import annotations

import ctypes
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from lmcache_core import DeviceError

Addresses = np.ndarray[Any, np.dtype[np.uint64]]
_MOST: Final = 4096
"""Copies in one call."""
_FIRST_CUDA: Final = 12080
_CUDA_13: Final = 13000
"""From it on the call has one argument less."""
_IN_STREAM_ORDER: Final = 1
"""cudaMemcpySrcAccessOrderStream."""


@dataclass(frozen=True, slots=True)
class Names:
    """How a vendor calls its library, and what is in it."""

    file: str
    """A regular expression of the file's name."""
    prefix: str
    batches: bool
    """Whether it is known to have batched copies in any version."""


CUDA: Final = Names(r"libcudart[.-].*", "cuda", True)
HIP: Final = Names(r"libamdhip64[.-].*", "hip", True)
MACA: Final = Names(r"libmcruntime[.-].*", "mc", False)


class _Attributes(ctypes.Structure):
    """cudaMemcpyAttributes; the places are hints for memory of other kinds than ours."""

    _fields_ = (
        ("order", ctypes.c_int),
        ("source", ctypes.c_int * 2),
        ("target", ctypes.c_int * 2),
        ("flags", ctypes.c_uint),
    )


class RuntimeLibrary:
    """Found among what this process has mapped: another copy of it would have a state of its own."""

    def __init__(self, names: Names, library: Any = None, maps: Path = Path("/proc/self/maps")) -> None:
        self.names = names
        self._library = library
        self._maps = maps
        self._functions: dict[str, Any] = {}

    def mapped(self, address: int) -> int:
        """The address by which kernels of the current device reach host memory that is pinned from `address` on."""
        found = ctypes.c_void_p()
        self._call("HostGetDevicePointer", ctypes.byref(found), ctypes.c_void_p(address), ctypes.c_uint(0))
        if not found.value:
            raise DeviceError(f"{self.names.prefix}HostGetDevicePointer gives no address")
        return found.value

    def without_batches(self) -> str:
        """Why there are no batched copies; empty where there are."""
        name = f"{self.names.prefix}MemcpyBatchAsync"
        if not self.names.batches:
            return "no batched copy is known of this runtime"
        try:
            self._named("MemcpyBatchAsync")
            version = self._version() if self.names is CUDA else _FIRST_CUDA
        except DeviceError as error:
            return str(error)
        return "" if version >= _FIRST_CUDA else f"{name} came with CUDA 12.8, this is {_spelled(version)}"

    def copy_batch(self, targets: Addresses, sources: Addresses, sizes: Addresses, stream: int) -> None:
        """Queue copies that may be done in any order among each other."""
        attributes = _Attributes(order=_IN_STREAM_ORDER)
        index, failed = ctypes.c_size_t(0), ctypes.c_size_t(0)
        cuda = self.names is CUDA
        # HIP takes no attributes: its copies are in the order of the stream anyway.
        what: list[Any] = [ctypes.byref(attributes), ctypes.byref(index)] if cuda else [None, None]
        fails: list[Any] = [] if cuda and self._version() >= _CUDA_13 else [ctypes.byref(failed)]
        for start in range(0, len(sizes), _MOST):
            part = slice(start, start + _MOST)
            arrays = [np.ascontiguousarray(each[part], np.uint64) for each in (targets, sources, sizes)]
            self._call(
                "MemcpyBatchAsync", *(ctypes.c_void_p(array.ctypes.data) for array in arrays),
                ctypes.c_size_t(len(arrays[0])), *what, ctypes.c_size_t(int(cuda)), *fails, ctypes.c_void_p(stream),
            )  # fmt: skip

    def _version(self) -> int:
        version = ctypes.c_int(0)
        self._call("RuntimeGetVersion", ctypes.byref(version))
        return version.value

    def _call(self, name: str, *arguments: Any) -> None:
        result = self._named(name)(*arguments)
        if result:
            raise DeviceError(f"{self.names.prefix}{name}: error {result}")

    def _named(self, name: str) -> Any:
        found = self._functions.get(name)
        if found is not None:
            return found
        if self._library is None:
            self._library = _loaded(self.names.file, self._maps)
        try:
            found = self._functions[name] = getattr(self._library, self.names.prefix + name)
            return found
        except AttributeError as error:
            raise DeviceError(f"this runtime has no {self.names.prefix}{name}") from error


def _loaded(file: str, maps: Path) -> ctypes.CDLL:
    try:
        lines = maps.read_text(errors="surrogateescape").splitlines()
    except OSError as error:
        raise DeviceError(f"the runtime library cannot be found: {error}") from error
    for line in lines:
        path = line[line.find("/") :] if "/" in line else ""
        if re.fullmatch(file, path.rpartition("/")[2]):
            try:
                return ctypes.CDLL(path)
            except OSError as error:
                raise DeviceError(f"{path}: {error}") from error
    raise DeviceError(f"no library like {file} is loaded")


def _spelled(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"
