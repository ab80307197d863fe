"""A network of the tests' own: Mooncake's ports are open on every interface, and here that is the loopback.

Importing this moves the thread, and whatever it starts from then on.  So it comes first: a thread that runs already
stays where it is, and only a process of one thread may do it without being root.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import socket
import struct
import threading
from collections.abc import Iterator
from typing import Final

_CLONE_NEWUSER: Final = 0x10000000
_CLONE_NEWNET: Final = 0x40000000
_SIOCGIFFLAGS: Final = 0x8913
_SIOCSIFFLAGS: Final = 0x8914
_SIOCSIFADDR: Final = 0x8916
_TUNSETIFF: Final = 0x400454CA
_IFF_UP: Final = 0x1
_IFF_TUN_WITHOUT_HEADER: Final = 0x1001
_libc = ctypes.CDLL(None, use_errno=True)


def _isolate() -> str:
    """Move into a new network with a loopback only; "" or why not."""
    uid, gid = os.getuid(), os.getgid()
    if _libc.unshare(_CLONE_NEWNET):
        if threading.active_count() > 1 or _libc.unshare(_CLONE_NEWUSER | _CLONE_NEWNET):
            return f"no network namespace may be made: {os.strerror(ctypes.get_errno())}"
        _write("/proc/self/setgroups", "deny")
        _write("/proc/self/uid_map", f"{uid} {uid} 1")
        _write("/proc/self/gid_map", f"{gid} {gid} 1")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        _raise_up(control, b"lo")
    return ""


@contextlib.contextmanager
def lan(address: str) -> Iterator[str]:
    """An interface with that address, that is no loopback and leads nowhere; OSError where none may be made."""
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.ioctl(fd, _TUNSETIFF, struct.pack("16sH22x", b"lan0", _IFF_TUN_WITHOUT_HEADER))
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
            told = struct.pack("16sHH4s8x8x", b"lan0", socket.AF_INET, 0, socket.inet_aton(address))
            fcntl.ioctl(control, _SIOCSIFADDR, told)
            _raise_up(control, b"lan0")
        yield address
    finally:
        os.close(fd)  # and with it the interface


def interfaces() -> list[str]:
    """Names of the interfaces that this thread sees."""
    return sorted(name for _, name in socket.if_nameindex())


def _raise_up(control: socket.socket, name: bytes) -> None:
    flags = struct.unpack("16sh22x", fcntl.ioctl(control, _SIOCGIFFLAGS, struct.pack("16sh22x", name, 0)))[1]
    fcntl.ioctl(control, _SIOCSIFFLAGS, struct.pack("16sh22x", name, flags | _IFF_UP))


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


PROBLEM: Final = _isolate()
"""Why there is no network of its own; "" if there is."""
