"""Host memory registered with ACL, the runtime of CANN."""

from __future__ import annotations

import ctypes
import os
import re
from typing import TYPE_CHECKING, Any, Final

from lmcache_core import DeviceError

if TYPE_CHECKING:
    import torch

_MAPPED: Final = 0
"""ACL_HOST_REGISTER_MAPPED."""
_OLDEST_KERNEL: Final = (5, 11)
"""Up to 5.10 registering memory that ACL has not allocated itself leads to faults, by CANN's documentation."""


class AclRuntime:
    """`aclrtHostRegister`, in the context that torch_npu has made for the device."""

    def __init__(self, library: Any = None, kernel: str | None = None) -> None:
        self._library = library
        self._kernel = kernel if kernel is not None else os.uname().release

    def pin(self, device: torch.device, address: int, nbytes: int) -> None:
        found = re.match(r"(\d+)\.(\d+)", self._kernel)
        if found is None or (int(found[1]), int(found[2])) < _OLDEST_KERNEL:
            raise DeviceError(f"Linux {self._kernel} is too old for aclrtHostRegister of a slab, it needs 5.11")
        mapped = ctypes.c_void_p()
        self._call(
            "aclrtHostRegister",
            ctypes.c_void_p(address), ctypes.c_uint64(nbytes), ctypes.c_int(_MAPPED), ctypes.byref(mapped),
        )  # fmt: skip

    def unpin(self, device: torch.device, address: int) -> None:
        self._call("aclrtHostUnregister", ctypes.c_void_p(address))

    def _call(self, name: str, *arguments: Any) -> None:
        try:
            if self._library is None:
                self._library = ctypes.CDLL("libascendcl.so")
            result = getattr(self._library, name)(*arguments)
        except (OSError, AttributeError) as error:
            raise DeviceError(f"{name}: {error}") from error
        if result:
            raise DeviceError(f"{name}: error {result}")
