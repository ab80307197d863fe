"""A short connection to a daemon for one command after the other, over its Unix socket or over TLS.  No thread."""

from __future__ import annotations

import contextlib
import itertools
import socket
import ssl
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Self, TypeVar

from .. import wire
from ..chain import Chain, Model
from ..endpoints import Address
from ..errors import BackendUnavailable

_RECV_NBYTES = 1 << 16
ReplyT = TypeVar("ReplyT", wire.Count, wire.StatusReply)


class Control:
    """One connection.  Every call raises BackendUnavailable or WireError, with a reason for people."""

    def __init__(self, sock: socket.socket, where: str, token: str, timeout_s: float) -> None:
        self.where = where
        self._sock = sock
        self._calls = itertools.count(1)
        self._models: dict[Model, int] = {}
        self._frames = wire.Frames(wire.to_client_decoder())
        self._inbox: Iterator[wire.ToClient] = iter(())
        began = time.monotonic()
        self._send(wire.Hello(wire.PROTOCOL, uuid.uuid4().hex, quiet=True, token=token))
        welcome = self._receive(timeout_s)
        if not isinstance(welcome, wire.Welcome):
            raise wire.WireError(f"{where}: the first answer is {type(welcome).__name__}")
        self.welcome = welcome
        self.greeting_s = time.monotonic() - began
        """From our first message to the answer."""

    @classmethod
    def unix(cls, path: Path, *, timeout_s: float) -> Self:
        """Through the daemon's socket."""
        return cls._over(lambda: _unix(path, timeout_s), f"daemon at {path}", "", timeout_s)

    @classmethod
    def tcp(cls, address: Address, *, token: str, ca: Path | None, timeout_s: float) -> Self:
        """Over TCP, with TLS where `ca`, whose certificates we trust, is given."""
        return cls._over(lambda: _tls(address, ca, timeout_s), f"daemon at {address}", token, timeout_s)

    @classmethod
    def _over(cls, connect: Callable[[], socket.socket], where: str, token: str, timeout_s: float) -> Self:
        with contextlib.ExitStack() as stack:
            try:
                sock = stack.enter_context(contextlib.closing(connect()))
            except (OSError, ValueError) as error:
                raise BackendUnavailable(f"{where} cannot be reached: {_reason(error)}") from error
            made = cls(sock, where, token, timeout_s)
            stack.pop_all()
            return made

    def status(self, timeout_s: float) -> dict[str, object]:
        """The daemon's account of itself."""
        return self._ask(wire.Status(next(self._calls)), wire.StatusReply, timeout_s).status

    def recall(
        self, request: str = "", digests: Sequence[bytes] = (), *, limit: int = 16, timeout_s: float
    ) -> dict[str, object]:
        """What became of a request and of chunks; see `History.report`."""
        recall = wire.Recall(next(self._calls), request, b"".join(digests), limit)
        return self._ask(recall, wire.StatusReply, timeout_s).status

    def scrape(self, timeout_s: float) -> str:
        """The daemon's metrics in Prometheus' text format."""
        return str(self._ask(wire.Scrape(next(self._calls)), wire.StatusReply, timeout_s).status["text"])

    def drain(self, timeout_s: float) -> bool:
        """Refuse new stores and write what is not written; False when that was not done in time."""
        drain = wire.Drain(next(self._calls), timeout_s, refuse_new=True)
        return bool(self._ask(drain, wire.Count, timeout_s + 5.0).count)

    def clear(self, namespace: bytes, timeout_s: float) -> int:
        """Remove a family, a shard, or with b"" all; return how many records went."""
        return self._ask(wire.Clear(next(self._calls), namespace), wire.Count, timeout_s).count

    def pin(self, chain: Chain, timeout_s: float) -> int:
        """Hold what is in host memory of `chain` until `unpin`; return its length in chunks."""
        digests = b"".join(chain.digests)
        return self._ask(wire.Pin(next(self._calls), self._model(chain), digests), wire.Count, timeout_s).count

    def unpin(self, chain: Chain, timeout_s: float) -> bool:
        """Whether it was pinned."""
        digests = b"".join(chain.digests)
        unpin = wire.Unpin(next(self._calls), self._model(chain), digests)
        return bool(self._ask(unpin, wire.Count, timeout_s).count)

    def close(self) -> None:
        self._sock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _model(self, chain: Chain) -> int:
        number = self._models.setdefault(chain.model, len(self._models) + 1)
        self._send(wire.Define(number, chain.model))
        return number

    def _ask(self, question: object, kind: type[ReplyT], timeout_s: float) -> ReplyT:
        self._send(question)
        answer = self._receive(timeout_s)
        if isinstance(answer, wire.Failed):
            raise BackendUnavailable(f"{self.where}: {answer.reason}")
        if not isinstance(answer, kind):
            raise wire.WireError(f"{self.where}: the answer is {type(answer).__name__}")
        return answer

    def _send(self, message: object) -> None:
        try:
            self._sock.sendall(wire.encode(message))
        except BrokenPipeError:
            pass  # its last message says why
        except OSError as error:
            raise BackendUnavailable(f"{self.where}: {_reason(error)}") from error

    def _receive(self, timeout_s: float) -> wire.ToClient:
        """The next message; Refused is raised."""
        deadline = time.monotonic() + timeout_s
        while (message := next(self._inbox, None)) is None:
            try:
                self._sock.settimeout(max(1e-3, deadline - time.monotonic()))
                data = self._sock.recv(_RECV_NBYTES)
            except TimeoutError as error:
                raise BackendUnavailable(f"{self.where} does not answer within {timeout_s:g} s") from error
            except OSError as error:
                raise BackendUnavailable(f"{self.where}: {_reason(error)}") from error
            if not data:
                raise BackendUnavailable(f"{self.where} closed the connection")
            self._inbox = iter(list(self._frames.feed(data)))
        if isinstance(message, wire.Refused):
            raise wire.WireError(f"{self.where} refuses us: {message.reason}")
        return message


def _unix(path: Path, timeout_s: float) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.settimeout(timeout_s)
        sock.connect(str(path))
    except BaseException:
        sock.close()
        raise
    return sock


def _tls(address: Address, ca: Path | None, timeout_s: float) -> socket.socket:
    if ca is None:
        if not address.is_loopback:
            raise ValueError("beyond loopback there is no TCP without TLS, which needs a certificate to trust")
        return socket.create_connection((address.host, address.port), timeout_s)
    try:
        context = ssl.create_default_context(cafile=str(ca))
    except OSError as error:
        raise ValueError(f"{ca}: {error.strerror or error}") from error
    sock = socket.create_connection((address.host, address.port), timeout_s)
    try:
        return context.wrap_socket(sock, server_hostname=address.host)
    except BaseException:
        sock.close()
        raise


def _reason(error: Exception) -> str:
    if isinstance(error, FileNotFoundError):
        return "no daemon was started there"
    if isinstance(error, ConnectionRefusedError):
        return "no daemon serves it any more"
    if isinstance(error, TimeoutError):
        return "it does not answer"
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
