"""One HTTP/1.1 exchange at a time on one socket, under a deadline; bodies go from and into the caller's memory."""

from __future__ import annotations

import select
import socket
import ssl
import struct
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

MAX_HEAD_NBYTES: Final = 64 << 10
MAX_TEXT_NBYTES: Final = 16 << 20
"""Of listings and error messages: more than a thousand names and their attributes."""
_EXPECT_WAIT_S: Final = 1.0
"""A server that knows no `Expect: 100-continue` gets the body after this long, as RFC 9110 has it."""
_JOIN_NBYTES: Final = 32 << 10
_LAST_WORDS_S: Final = 0.5
_BODILESS: Final = frozenset((204, 304))


class WireError(Exception):
    """The connection is of no more use.  `fresh` says that nothing of an answer had arrived."""

    def __init__(self, problem: str, *, fresh: bool) -> None:
        super().__init__(problem)
        self.fresh = fresh


class Late(Exception):
    """The deadline has passed."""


@dataclass(frozen=True, slots=True)
class Deadline:
    """A moment of the monotonic clock by which a call has ended."""

    at: float
    timeout_s: float

    @classmethod
    def after(cls, timeout_s: float) -> Deadline:
        return cls(time.monotonic() + timeout_s, timeout_s)

    def left(self) -> float:
        """Seconds that remain, more than none; raises Late."""
        left_s = self.at - time.monotonic()
        if left_s <= 0:
            raise Late
        return left_s

    def at_most(self, timeout_s: float) -> Deadline:
        return Deadline(min(self.at, time.monotonic() + timeout_s), self.timeout_s)


@dataclass(frozen=True, slots=True)
class Head:
    """The first part of a response; names of headers in lower case."""

    status: int
    headers: Mapping[str, str]
    nbytes: int | None
    """Length of the body where it is stated."""


class Connection:
    """A socket, and what has been read of it beyond the last head.  One thread at a time uses it."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._in_kernel = not isinstance(sock, ssl.SSLSocket)
        if self._in_kernel:
            sock.settimeout(None)
        self._ahead = memoryview(b"")
        self._clean = True
        self._last = False
        self.used_at = time.monotonic()

    @classmethod
    def open(cls, host: str, port: int, tls: ssl.SSLContext | None, deadline: Deadline) -> Connection:
        """Connect to the first address that answers; OSError or Late if none does."""
        problem: OSError | None = None
        for family, kind, protocol, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
            sock = socket.socket(family, kind, protocol)
            try:
                sock.settimeout(deadline.left())
                sock.connect(address)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                if tls is not None:
                    sock.settimeout(deadline.left())
                    sock = tls.wrap_socket(sock, server_hostname=host)
                return cls(sock)
            except OSError as error:
                sock.close()
                problem = error
            except BaseException:
                sock.close()
                raise
        raise problem or OSError(f"{host} has no address")

    @property
    def reusable(self) -> bool:
        """Whether the last exchange ended cleanly and the server has neither said anything more nor hung up."""
        if not self._clean or self._ahead or (isinstance(self._sock, ssl.SSLSocket) and self._sock.pending()):
            return False
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        return not poll.poll(0)

    def send(self, head: bytes, body: memoryview | None, deadline: Deadline) -> Head | None:
        """Send a request; the response instead, if the server had it ready before the body was wanted."""
        self._clean = False
        try:
            if body is None or not len(body):
                self._send(head, deadline)
                return None
            if b"\r\nexpect: 100-continue\r\n" in head:
                self._send(head, deadline)
                early = self._await_continue(deadline)
                if early is not None:
                    return early
                self._send(body, deadline)
            elif len(body) <= _JOIN_NBYTES:
                self._send(b"".join((head, body)), deadline)
            else:
                self._send(head, deadline)
                self._send(body, deadline)
            return None
        except (TimeoutError, BlockingIOError) as error:
            raise Late from error
        except (OSError, ValueError) as error:
            # It may have said why before it hung up.
            self._last = True
            try:
                return self.head(deadline.at_most(_LAST_WORDS_S))
            except (WireError, Late):
                raise WireError(f"while sending: {_cause(error)}", fresh=True) from error

    def head(self, deadline: Deadline, *, bodiless: bool = False) -> Head:
        """Read the head of the response, past any 1xx before it."""
        self._clean = False
        while True:
            head = _parse(self._until_blank_line(deadline), bodiless)
            if head.status >= 200:
                if head.nbytes == 0:
                    self._ended(head)
                return head

    def read_into(self, head: Head, into: memoryview, deadline: Deadline) -> None:
        """Fill `into`, which is as long as the body; WireError if there is less of it."""
        done = min(len(self._ahead), len(into))
        into[:done] = self._ahead[:done]
        self._ahead = self._ahead[done:]
        nbytes = len(into)
        flags = socket.MSG_WAITALL if self._in_kernel else 0
        try:
            while done < nbytes:
                self._allow(socket.SO_RCVTIMEO, deadline)
                count = self._sock.recv_into(into[done:], 0, flags)
                if not count:
                    raise WireError(f"the body ended after {done} of {nbytes} bytes", fresh=False)
                done += count
        except (TimeoutError, BlockingIOError) as error:
            raise Late from error
        except (OSError, ValueError) as error:
            raise WireError(f"after {done} of {nbytes} bytes: {_cause(error)}", fresh=False) from error
        self._ended(head)

    def read_text(self, head: Head, deadline: Deadline) -> bytes:
        """A body of listings or errors, whatever way its length is told; WireError over MAX_TEXT_NBYTES."""
        if head.nbytes is not None:
            if head.nbytes > MAX_TEXT_NBYTES:
                raise WireError(f"a text of {head.nbytes} bytes", fresh=False)
            text = bytearray(head.nbytes)
            self.read_into(head, memoryview(text), deadline)
            return bytes(text)
        parts: list[bytes] = []
        if head.headers.get("transfer-encoding", "").lower() != "chunked":
            while part := self._some(deadline):
                parts.append(part)
                _check_text(parts)
            return b"".join(parts)
        while nbytes := _chunk_nbytes(self._line(deadline)):
            parts.append(self._exactly(nbytes, deadline))
            _check_text(parts)
            self._line(deadline)
        while self._line(deadline):
            pass
        self._ended(head)
        return b"".join(parts)

    def close(self) -> None:
        self._clean = False
        self._sock.close()

    def _send(self, data: bytes | memoryview, deadline: Deadline) -> None:
        view = memoryview(data)
        done = 0
        while done < len(view):
            self._allow(socket.SO_SNDTIMEO, deadline)
            done += self._sock.send(view[done:])

    def _allow(self, what: int, deadline: Deadline) -> None:
        """Bound the next call on the socket by what is left of the deadline.

        The kernel keeps the time of a whole transfer, in one call without the interpreter; with TLS Python has to.
        """
        left_s = deadline.left()
        if self._in_kernel:
            whole = int(left_s)
            micros = max(1, int((left_s - whole) * 1e6))
            self._sock.setsockopt(socket.SOL_SOCKET, what, struct.pack("@ll", whole, micros))
        else:
            self._sock.settimeout(left_s)

    def _await_continue(self, deadline: Deadline) -> Head | None:
        try:
            head = _parse(self._until_blank_line(deadline.at_most(_EXPECT_WAIT_S)), False)
        except Late:
            deadline.left()
            return None
        if head.status < 200:
            return None
        # The server may wait for the body all the same, so this connection has had its last exchange.
        self._last = True
        return head

    def _until_blank_line(self, deadline: Deadline) -> bytes:
        received = bytes(self._ahead)
        while (end := received.find(b"\r\n\r\n")) < 0:
            if len(received) > MAX_HEAD_NBYTES:
                raise WireError(f"a head of over {MAX_HEAD_NBYTES} bytes", fresh=False)
            self._ahead = memoryview(received)
            part = self._receive(deadline)
            if not part:
                raise WireError("the connection was closed without an answer", fresh=not received)
            received += part
        self._ahead = memoryview(received)[end + 4 :]
        return received[:end]

    def _some(self, deadline: Deadline) -> bytes:
        if self._ahead:
            part = bytes(self._ahead)
            self._ahead = memoryview(b"")
            return part
        return self._receive(deadline)

    def _receive(self, deadline: Deadline) -> bytes:
        fresh = not self._ahead
        try:
            self._allow(socket.SO_RCVTIMEO, deadline)
            return self._sock.recv(16 << 10)
        except (TimeoutError, BlockingIOError) as error:
            raise Late from error
        except (OSError, ValueError) as error:
            raise WireError(_cause(error), fresh=fresh) from error

    def _line(self, deadline: Deadline) -> bytes:
        line = bytes(self._ahead)
        self._ahead = memoryview(b"")
        while (end := line.find(b"\r\n")) < 0:
            if len(line) > MAX_HEAD_NBYTES:
                raise WireError("a line without an end", fresh=False)
            part = self._receive(deadline)
            if not part:
                raise WireError("the connection was closed inside an answer", fresh=False)
            line += part
        self._ahead = memoryview(line)[end + 2 :]
        return line[:end]

    def _exactly(self, nbytes: int, deadline: Deadline) -> bytes:
        parts: list[bytes] = []
        while nbytes > 0:
            part = self._some(deadline)
            if not part:
                raise WireError("the connection was closed inside an answer", fresh=False)
            if len(part) > nbytes:
                self._ahead = memoryview(part)[nbytes:]
                part = part[:nbytes]
            parts.append(part)
            nbytes -= len(part)
        return b"".join(parts)

    def _ended(self, head: Head) -> None:
        self._clean = not self._last and "close" not in head.headers.get("connection", "").lower()
        self.used_at = time.monotonic()


def _parse(head: bytes, bodiless: bool) -> Head:
    first, *lines = head.decode("latin-1").split("\r\n")
    version, _, rest = first.partition(" ")
    code = rest[:3]
    if not version.startswith("HTTP/1.") or len(code) != 3 or not code.isascii() or not code.isdigit():
        raise WireError("the answer is not HTTP/1.1", fresh=False)
    headers: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.partition(":")
        if not colon:
            raise WireError("a header without a colon", fresh=False)
        headers[name.lower()] = value.strip()
    if version == "HTTP/1.0":
        headers.setdefault("connection", "close")
    status = int(code)
    if bodiless or status in _BODILESS or status < 200:
        return Head(status, headers, 0)
    length = headers.get("content-length")
    if length is None or "transfer-encoding" in headers:
        return Head(status, headers, None)
    if not length.isascii() or not length.isdigit() or len(length) > 18:
        raise WireError("a length that is no number", fresh=False)
    return Head(status, headers, int(length))


def _chunk_nbytes(line: bytes) -> int:
    try:
        nbytes = int(line.partition(b";")[0].strip()[:16], 16)
    except ValueError as error:
        raise WireError("a chunk without a length", fresh=False) from error
    if not 0 <= nbytes <= MAX_TEXT_NBYTES:
        raise WireError("a chunk that is too long", fresh=False)
    return nbytes


def _check_text(parts: list[bytes]) -> None:
    if sum(map(len, parts)) > MAX_TEXT_NBYTES:
        raise WireError(f"a text of over {MAX_TEXT_NBYTES} bytes", fresh=False)


def _cause(error: BaseException) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
