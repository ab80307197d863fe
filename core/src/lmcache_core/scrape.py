"""HTTP on loopback: a small server for whoever answers its requests; /healthz, /readyz and /metrics for machines."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final

from .endpoints import Address, parse_address
from .errors import ConfigError
from .metrics import Metrics

MAX_CONNECTIONS: Final = 32
"""At a time, for each server; more are closed at once."""
MAX_BODY_NBYTES: Final = 4096


@dataclass(frozen=True, slots=True)
class Request:
    method: str
    """GET or POST."""
    target: str
    """The path, with what may follow it behind a question mark."""
    headers: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Answer:
    code: int
    body: bytes
    kind: str = "text/plain; charset=utf-8"
    headers: Mapping[str, str] | None = None


Respond = Callable[[Request], Answer]
"""Called on a thread for each connection."""


def health(metrics: Metrics, readiness: Callable[[], str]) -> Respond:
    """/healthz (alive), /readyz (tiers usable: `readiness` says what is wrong), /metrics (Prometheus)."""

    def respond(request: Request) -> Answer:
        if request.method != "GET":
            return Answer(405, b"there is nothing to do here\n")
        if request.target == "/healthz":
            return Answer(200, b"alive\n")
        if request.target == "/readyz":
            problem = readiness()
            return Answer(503 if problem else 200, f"{problem or 'ready'}\n".encode())
        if request.target == "/metrics":
            return Answer(200, metrics.prometheus_text().encode(), "text/plain; version=0.0.4; charset=utf-8")
        return Answer(404, b"there is /healthz, /readyz and /metrics\n")

    return respond


class HttpServer:
    """A server on a thread of its own, so that a slow scrape delays no client."""

    def __init__(self, server: ThreadingHTTPServer) -> None:
        self._server = server
        self._thread = threading.Thread(target=server.serve_forever, args=(0.1,), name="lmcache-http", daemon=True)
        self._thread.start()
        host, port = server.server_address[:2]
        self.address = Address(str(host), port)

    @classmethod
    def start(cls, address: str, respond: Respond, setting: str = "server.http") -> HttpServer | None:
        """Serve on "host:port", port 0 for a free one; nothing for "".  `setting` is where a person wrote it."""
        if not address:
            return None
        where = parse_address(address)
        free = threading.BoundedSemaphore(MAX_CONNECTIONS)

        class Server(ThreadingHTTPServer):
            address_family = socket.AF_INET6 if ":" in where.host else socket.AF_INET
            daemon_threads = True

            def process_request(self, request: Any, client_address: Any) -> None:
                if free.acquire(blocking=False):
                    super().process_request(request, client_address)
                else:
                    self.shutdown_request(request)

            def process_request_thread(self, request: Any, client_address: Any) -> None:
                try:
                    super().process_request_thread(request, client_address)
                finally:
                    free.release()

        class Handler(BaseHTTPRequestHandler):
            timeout = 10.0  # a scrape that takes longer to ask is no scrape
            server_version = "lmcache"
            sys_version = ""

            def do_GET(self) -> None:  # the name is the library's
                self._answer(respond(Request("GET", self.path, dict(self.headers.items()))))

            def do_POST(self) -> None:  # the name is the library's
                length = self.headers.get("Content-Length", "0")
                if not length.isdecimal() or int(length) > MAX_BODY_NBYTES:
                    self._answer(Answer(413, b"too long\n"))
                    return
                self.rfile.read(int(length))  # nobody wants it; unread, it would reset the connection
                self._answer(respond(Request("POST", self.path, dict(self.headers.items()))))

            def _answer(self, answer: Answer) -> None:
                self.send_response(answer.code)
                self.send_header("Content-Type", answer.kind)
                self.send_header("Content-Length", str(len(answer.body)))
                for name, value in (answer.headers or {}).items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(answer.body)

            def log_message(self, format: str, *args: object) -> None:  # the name is the library's
                return None

        try:
            server = Server((where.host, where.port), Handler)
        except OSError as error:
            raise ConfigError(f"{setting}: cannot listen on {address}: {error}") from error
        return cls(server)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
