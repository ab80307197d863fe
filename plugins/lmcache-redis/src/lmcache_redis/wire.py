"""RESP on one socket: commands leave the caller's memory, answers land in it, all under one deadline."""

from __future__ import annotations

import os
import socket
import ssl
import struct
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from .address import Address

Part = bytes | memoryview
Answer = Any
"""int, str (a status), None (absent), a list, ServerError, Oversize; bytes for a bulk without a buffer of its own."""

_BUFFER_NBYTES: Final = 16 << 10
_GATHERED_NBYTES: Final = 16 << 10
"""Parts below this are joined before they are sent: a copy costs less than a call."""
_SLICE_NBYTES: Final = 1 << 20
"""Most that one call sends.  On a Unix socket the kernel counts the time anew for each piece of what is sent; over TCP
a call for everything sleeps longer than several do."""
_TOLERANCE: Final = 1.02
"""By how much a single wait may be longer than what is left."""
_MAX_BULK_NBYTES: Final = 1 << 20
"""Largest bulk that is read without a buffer of the caller's: topologies, not records."""
_WITH_A_BUFFER: Final = frozenset((b"$", b"_", b"-", b"!", b">"))
"""What an answer that goes to a buffer may begin with."""
_MAX_ITEMS: Final = 100_000
_MAX_DEPTH: Final = 8


class ProtocolError(ConnectionError):
    """The server's bytes make no sense: whatever follows them belongs to nobody."""


class DeadlineExceeded(TimeoutError):
    """No answer in time."""


@dataclass(frozen=True, slots=True)
class ServerError:
    """An answer that is an error; the connection is in order."""

    text: str

    @property
    def code(self) -> str:
        return self.text.partition(" ")[0]


@dataclass(frozen=True, slots=True)
class Oversize:
    """A bulk longer than the buffer for it; it was skipped."""

    nbytes: int


def command(*arguments: bytes) -> bytes:
    return b"*%d\r\n%b" % (len(arguments), b"".join(b"$%d\r\n%b\r\n" % (len(a), a) for a in arguments))


class _Transport(Protocol):
    """Bytes under a deadline, in seconds of the monotonic clock."""

    def send(self, parts: Sequence[Part], deadline: float) -> None: ...
    def receive(self, into: memoryview, deadline: float) -> int: ...
    def is_quiet(self) -> bool: ...


class Link:
    """A connection that is ours.  One thread uses it at a time; after any exception it is good for nothing."""

    def __init__(self, sock: socket.socket, address: Address) -> None:
        self.address = address
        self.pid = os.getpid()
        self.deadline = 0.0
        self._sock = sock
        in_kernel = os.name == "posix" and not isinstance(sock, ssl.SSLSocket)
        self._transport: _Transport = _KernelTimed(sock) if in_kernel else _PolledTimed(sock)
        self._buffer = bytearray(_BUFFER_NBYTES)
        self._view = memoryview(self._buffer)
        self._start = self._end = 0

    def send(self, parts: Iterable[Part]) -> None:
        self._transport.send(_gathered(parts), self.deadline)

    def ask(self, *arguments: bytes) -> Answer:
        """One small command and its answer."""
        self.send([command(*arguments)])
        return self.read()

    def read(self, into: memoryview | None = None) -> Answer:
        """The next answer; a bulk lands in the front of `into`, and its length is returned."""
        return self._read(into, 0)

    def _read(self, into: memoryview | None, depth: int) -> Answer:
        while True:
            line = self._line()
            kind, rest = line[:1], line[1:]
            if into is not None and kind not in _WITH_A_BUFFER:
                raise ProtocolError(f"{line[:32]!r} where a bulk is expected")
            match kind:
                case b":":
                    return _integer(rest)
                case b"$" | b"=":
                    return self._bulk(_integer(rest), into)
                case b"+":
                    return rest.decode("utf-8", "replace")
                case b"-":
                    return ServerError(rest.decode("utf-8", "replace"))
                case b"!":
                    text = self._bulk(_integer(rest), None)
                    return ServerError(text.decode("utf-8", "replace") if text else "ERR")
                case b"_":
                    return None
                case b"#" | b"," | b"(":
                    return rest.decode("utf-8", "replace")
                case b"*" | b"~":
                    return self._items(_integer(rest), depth)
                case b"%":
                    return self._items(2 * _integer(rest), depth)
                case b">" if not depth:
                    self._items(_integer(rest), depth)  # news that nobody asked for
                case _:
                    raise ProtocolError(f"an answer that begins with {bytes(line[:16])!r}")

    def _items(self, count: int, depth: int) -> list[Answer] | None:
        if count == -1:
            return None
        if not 0 <= count <= _MAX_ITEMS or depth >= _MAX_DEPTH:
            raise ProtocolError(f"a list of {count} items, {depth} deep")
        return [self._read(None, depth + 1) for _ in range(count)]

    def _bulk(self, nbytes: int, into: memoryview | None) -> Answer:
        if nbytes == -1:
            return None
        if nbytes < 0 or (into is None and nbytes > _MAX_BULK_NBYTES):
            raise ProtocolError(f"a bulk of {nbytes} bytes")
        if into is None:
            found = bytearray(nbytes)
            self._read_exactly(memoryview(found))
            self._end_of_bulk()
            return bytes(found)
        if nbytes > len(into):
            self._skip(nbytes)
            self._end_of_bulk()
            return Oversize(nbytes)
        self._read_exactly(into[:nbytes])
        self._end_of_bulk()
        return nbytes

    def _end_of_bulk(self) -> None:
        while self._end - self._start < 2:
            self._fill()
        if self._buffer[self._start : self._start + 2] != b"\r\n":
            raise ProtocolError("a bulk that does not end where it said")
        self._start += 2

    def _line(self) -> bytes:
        searched = self._start
        while (found := self._buffer.find(b"\r\n", searched, self._end)) < 0:
            searched = max(self._start, self._end - 1)
            moved = self._fill()
            searched -= moved
        line = bytes(self._view[self._start : found])
        self._start = found + 2
        return line

    def _read_exactly(self, into: memoryview) -> None:
        have = min(len(into), self._end - self._start)
        into[:have] = self._view[self._start : self._start + have]
        self._start += have
        while have < len(into):
            have += self._receive(into[have:])

    def _skip(self, nbytes: int) -> None:
        have = min(nbytes, self._end - self._start)
        self._start += have
        nbytes -= have
        scratch = memoryview(bytearray(min(nbytes, 1 << 20)))
        while nbytes:
            nbytes -= self._receive(scratch[: min(nbytes, len(scratch))])

    def _fill(self) -> int:
        """Receive a little more; returns by how much what was there has moved to the front."""
        moved = 0
        if self._start == self._end:
            moved, self._start, self._end = self._start, 0, 0
        elif self._end == len(self._buffer):
            moved = self._start
            if not moved:
                raise ProtocolError(f"a line of more than {len(self._buffer)} bytes")
            kept = self._end - self._start
            self._buffer[:kept] = self._buffer[self._start : self._end]
            self._start, self._end = 0, kept
        self._end += self._receive(self._view[self._end :])
        return moved

    def _receive(self, into: memoryview) -> int:
        count = self._transport.receive(into, self.deadline)
        if not count:
            raise ConnectionError("the server closed the connection")
        return count

    @property
    def is_idle(self) -> bool:
        """Whether the connection is up and nothing has come that nobody asked for."""
        return self._start == self._end and self._transport.is_quiet()

    def last_words(self) -> str:
        """What the server said before it closed, as far as it has arrived; "" for nothing."""
        self.deadline = time.monotonic() + 0.05
        said = ""
        try:
            while True:
                line = self._line()
                if line[:1] == b"-":
                    said = line[1:].decode("utf-8", "replace")
        except OSError:
            return said

    def abort(self) -> None:
        """From another thread: whoever waits on this link stops waiting."""
        try:
            socket.socket.shutdown(self._sock, socket.SHUT_RDWR)  # not the SSLSocket's, which is not thread-safe
        except OSError:
            pass

    def close(self) -> None:
        self._sock.close()


class _KernelTimed:
    """A plain socket whose timeouts the kernel keeps."""

    def __init__(self, sock: socket.socket) -> None:
        sock.settimeout(None)
        self._sock = sock
        self._set_s = {socket.SO_SNDTIMEO: 0.0, socket.SO_RCVTIMEO: 0.0}
        """What the kernel was told last."""

    def send(self, parts: Sequence[Part], deadline: float) -> None:
        # A call for each part: header and payload in one `sendmsg` cost a third more time in the kernel.
        for part in parts:
            view = memoryview(part)
            while view:
                self._limit(socket.SO_SNDTIMEO, deadline)
                try:
                    view = view[self._sock.send(view[:_SLICE_NBYTES]) :]
                except BlockingIOError as error:
                    raise DeadlineExceeded("the server did not take what was sent in time") from error

    def receive(self, into: memoryview, deadline: float) -> int:
        self._limit(socket.SO_RCVTIMEO, deadline)
        try:
            return self._sock.recv_into(into)  # waiting for all of it in one call (MSG_WAITALL) takes longer
        except BlockingIOError as error:
            raise DeadlineExceeded("no answer in time") from error

    def is_quiet(self) -> bool:
        try:
            self._sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False  # the end, or bytes: either way not ours to use

    def _limit(self, option: int, deadline: float) -> None:
        left = deadline - time.monotonic()
        if left <= 0:
            raise DeadlineExceeded("no answer in time")
        if left <= self._set_s[option] <= left * _TOLERANCE:
            return  # a call less for each piece that comes
        self._set_s[option] = left
        micros = max(1, int(left * 1e6))
        self._sock.setsockopt(socket.SOL_SOCKET, option, struct.pack("@ll", micros // 1_000_000, micros % 1_000_000))


class _PolledTimed:
    """A socket, such as one with TLS, whose timeouts Python keeps."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    def send(self, parts: Sequence[Part], deadline: float) -> None:
        for part in parts:
            view = memoryview(part)
            while view:
                self._limit(deadline)
                view = view[self._sock.send(view[:_SLICE_NBYTES]) :]

    def receive(self, into: memoryview, deadline: float) -> int:
        self._limit(deadline)
        return self._sock.recv_into(into)

    def is_quiet(self) -> bool:
        self._sock.settimeout(0)
        try:
            self._sock.recv(1)
        except (BlockingIOError, ssl.SSLWantReadError):
            return True  # at most a message of TLS itself
        except OSError:
            return False
        return False

    def _limit(self, deadline: float) -> None:
        left = deadline - time.monotonic()
        if left <= 0:
            raise DeadlineExceeded("no answer in time")
        self._sock.settimeout(left)


def _integer(text: bytes) -> int:
    try:
        return int(text)
    except ValueError as error:
        raise ProtocolError(f"{text[:32]!r} where a number is expected") from error


def _gathered(parts: Iterable[Part]) -> list[Part]:
    """The same bytes in fewer parts."""
    gathered: list[Part] = []
    small: list[Part] = []
    nbytes = 0
    for part in parts:
        if len(part) < _GATHERED_NBYTES:
            small.append(part)
            nbytes += len(part)
            if nbytes < 4 * _GATHERED_NBYTES:
                continue
        if small:
            gathered.append(b"".join(small))
            small, nbytes = [], 0
        if len(part) >= _GATHERED_NBYTES:
            gathered.append(part)
    if small:
        gathered.append(b"".join(small))
    return gathered
