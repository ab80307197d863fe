"""A server that says exactly what a test wants, byte by byte, on each connection in turn."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

Serve = Callable[[socket.socket], None]


@dataclass
class Scripted:
    """Serves connection number n with `scripts[n]`, the last one for all that follow."""

    scripts: Sequence[Serve]
    port: int = 0
    connections: list[socket.socket] = field(default_factory=list)
    threads: list[threading.Thread] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"


def answers(*replies: bytes, hang_up: bool = False) -> Serve:
    """One reply for each read that brings something; then silence, or the end of the connection."""

    def serve(connection: socket.socket) -> None:
        for reply in replies:
            if not connection.recv(1 << 20):
                return
            connection.sendall(reply)
        if hang_up:
            connection.shutdown(socket.SHUT_RDWR)
            return
        while connection.recv(1 << 20):
            pass

    return serve


@contextlib.contextmanager
def scripted(*scripts: Serve) -> Iterator[Scripted]:
    listener = socket.create_server(("127.0.0.1", 0))
    server = Scripted(scripts, listener.getsockname()[1])

    def serve(connection: socket.socket, script: Serve) -> None:
        with connection, contextlib.suppress(OSError):
            script(connection)

    def accept() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            script = server.scripts[min(len(server.connections), len(server.scripts) - 1)]
            server.connections.append(connection)
            server.threads.append(threading.Thread(target=serve, args=(connection, script), daemon=True))
            server.threads[-1].start()

    acceptor = threading.Thread(target=accept, daemon=True)
    acceptor.start()
    try:
        yield server
    finally:
        with contextlib.suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        acceptor.join(5)
        for connection in server.connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        for thread in server.threads:
            thread.join(5)
