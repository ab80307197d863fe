"""A small HTTP proxy in front of a real server that does wrong, on demand, what servers and networks do wrong."""

from __future__ import annotations

import contextlib
import http.client
import socket
import ssl
import struct
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal, Self

What = Literal[
    "answer", "short", "stall", "stall body", "dribble", "reset", "reset body", "hang up after", "no 100", "first bytes"
]


@dataclass(frozen=True)
class Fault:
    """What happens to one request.  "answer" sends `status` and an S3 error body with `code` instead of asking."""

    what: What = "answer"
    status: int = 503
    code: str = ""
    headers: tuple[tuple[str, str], ...] = ()
    body: bytes | None = None


@dataclass
class Seen:
    """A request as it arrived."""

    method: str
    path: str
    headers: dict[str, str]
    body_nbytes: int = 0
    connection: int = 0


@dataclass
class Proxy:
    """Forwards to `upstream` on loopback.  The next matching request takes the next of `faults`."""

    upstream: int
    tls: ssl.SSLContext | None = None
    faults: deque[Fault] = field(default_factory=deque)
    always: Callable[[Seen], Fault | None] = lambda seen: None
    seen: list[Seen] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.release = threading.Event()
        self.broken = False
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._open: set[socket.socket] = set()
        self._count = 0
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.port: int = self._listener.getsockname()[1]
        self._acceptor = threading.Thread(target=self._accept, name="proxy")
        self._acceptor.start()

    @property
    def url(self) -> str:
        return f"{'https' if self.tls else 'http'}://{'localhost' if self.tls else '127.0.0.1'}:{self.port}"

    def methods(self) -> list[str]:
        return [seen.method for seen in self.seen]

    @contextlib.contextmanager
    def stalled(self) -> Iterator[None]:
        """While inside, requests are read and not answered."""
        before, self.always = self.always, lambda seen: Fault("stall")
        try:
            yield
        finally:
            self.always = before
            self.release.set()

    def drop_connections(self) -> None:
        """Close what is open, as a server does with connections that were idle for long."""
        with self._lock:
            sockets = list(self._open)
        for sock in sockets:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.broken = True
        self.release.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._acceptor.join()
        self._listener.close()
        self.drop_connections()
        for thread in self._threads:
            thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            with self._lock:
                self._count += 1
                number = self._count
                self._open.add(sock)
            thread = threading.Thread(target=self._serve, args=(sock, number), name=f"proxy {number}")
            self._threads.append(thread)
            thread.start()

    def _serve(self, sock: socket.socket, number: int) -> None:
        raw = sock
        upstream = http.client.HTTPConnection("127.0.0.1", self.upstream, timeout=30)
        try:
            if self.tls is not None:
                sock = self.tls.wrap_socket(sock, server_side=True)
            with sock.makefile("rb") as stream:
                while not self.broken and self._one(sock, stream, upstream, number):
                    pass
        except (OSError, http.client.HTTPException, ValueError):
            pass
        finally:
            upstream.close()
            with self._lock:
                self._open.discard(raw)
            sock.close()
            raw.close()

    def _one(self, sock: socket.socket, stream: object, upstream: http.client.HTTPConnection, number: int) -> bool:
        """One request and its answer; whether the connection goes on."""
        read = stream.readline  # type: ignore[attr-defined]
        line = read().decode().split()
        if len(line) != 3:
            return False
        headers: dict[str, str] = {}
        while (text := read().decode().strip()) != "":
            name, _, value = text.partition(":")
            headers[name.lower()] = value.strip()
        seen = Seen(line[0], line[1], headers, connection=number)
        self.seen.append(seen)
        fault = self.always(seen)
        if fault is None and self.faults:
            fault = self.faults.popleft()
        expects = headers.pop("expect", "").lower() == "100-continue"
        if fault is not None and self._before_body(sock, fault):
            return False
        if expects and not (fault is not None and fault.what == "no 100"):
            sock.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        if fault is not None and fault.what == "first bytes":  # another range, as long as the one asked for
            first, _, last = headers["range"].removeprefix("bytes=").partition("-")
            headers["range"] = f"bytes=0-{int(last) - int(first)}"
        body = stream.read(int(headers.get("content-length", "0")))  # type: ignore[attr-defined]
        seen.body_nbytes = len(body)
        upstream.request(line[0], line[1], body=body or None, headers=headers)
        with upstream.getresponse() as response:
            data = response.read()
            kept = [
                (name, value)
                for name, value in response.getheaders()
                if name.lower() not in ("connection", "transfer-encoding", "content-length")
            ]
            length = response.getheader("content-length") or str(len(data)) if line[0] == "HEAD" else str(len(data))
        head = f"HTTP/1.1 {response.status} {response.reason}\r\n" + "".join(f"{n}: {v}\r\n" for n, v in kept)
        head += f"Content-Length: {length}\r\n\r\n"
        return self._answer(sock, head.encode(), data, fault)

    def _before_body(self, sock: socket.socket, fault: Fault) -> bool:
        """Faults that need no answer of the server's; True if the connection has ended with it."""
        if fault.what == "answer":
            body = fault.body
            if body is None:
                body = f"<?xml version='1.0'?><Error><Code>{fault.code}</Code></Error>".encode() if fault.code else b""
            if self.seen[-1].method == "HEAD":
                body = b""
            more = "".join(f"{name}: {value}\r\n" for name, value in fault.headers)
            head = f"HTTP/1.1 {fault.status} x\r\n{more}Connection: close\r\nContent-Length: {len(body)}\r\n\r\n"
            sock.sendall(head.encode() + body)
            return True
        if fault.what == "stall":
            self.release.wait()
            return True
        if fault.what == "reset":
            _reset(sock)
            return True
        return False

    def _answer(self, sock: socket.socket, head: bytes, data: bytes, fault: Fault | None) -> bool:
        what = fault.what if fault is not None else ""
        if what in ("short", "stall body", "reset body", "dribble"):
            sock.sendall(head + data[: len(data) // 2])
            if what == "stall body":
                self.release.wait()
            elif what == "reset body":
                _reset(sock)
            elif what == "dribble":
                for byte in data[len(data) // 2 :]:
                    if self.release.wait(0.02):
                        break
                    sock.sendall(bytes((byte,)))
            return False
        sock.sendall(head + data)
        return what != "hang up after"


def _reset(sock: socket.socket) -> None:
    """Make the close that follows a reset of the connection."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.shutdown(socket.SHUT_RD)
