"""Health and metrics over HTTP, on loopback: /healthz (alive), /readyz (tiers usable), /metrics (Prometheus)."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from .endpoints import Address, parse_address
from .errors import ConfigError
from .metrics import Metrics


class HttpServer:
    """A server on a thread of its own, so that a slow scrape delays no client."""

    def __init__(self, server: ThreadingHTTPServer) -> None:
        self._server = server
        self._thread = threading.Thread(target=server.serve_forever, args=(0.1,), name="lmcache-http", daemon=True)
        self._thread.start()
        host, port = server.server_address[:2]
        self.address = Address(str(host), port)

    @classmethod
    def start(
        cls, address: str, metrics: Metrics, readiness: Callable[[], str], setting: str = "server.http"
    ) -> HttpServer | None:
        """Serve on "host:port", port 0 for a free one; nothing for "".  `setting` is where a person wrote it."""
        if not address:
            return None
        where = parse_address(address)

        class Server(ThreadingHTTPServer):
            address_family = socket.AF_INET6 if ":" in where.host else socket.AF_INET
            daemon_threads = True

        class Handler(BaseHTTPRequestHandler):
            timeout = 10.0  # a scrape that takes longer to ask is no scrape

            def do_GET(self) -> None:  # the name is the library's
                if self.path == "/healthz":
                    self._answer(200, "alive\n")
                elif self.path == "/readyz":
                    problem = readiness()
                    self._answer(503 if problem else 200, f"{problem or 'ready'}\n")
                elif self.path == "/metrics":
                    self._answer(200, metrics.prometheus_text(), "text/plain; version=0.0.4; charset=utf-8")
                else:
                    self._answer(404, "there is /healthz, /readyz and /metrics\n")

            def _answer(self, code: int, text: str, kind: str = "text/plain; charset=utf-8") -> None:
                body = text.encode()
                self.send_response(code)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

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
