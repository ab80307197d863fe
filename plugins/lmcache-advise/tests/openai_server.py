"""A small OpenAI-compatible server that streams words, counts a prefix cache, and fails as it is told to."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Server(ThreadingHTTPServer):
    """`compute_s` is what a prompt with nothing in the cache takes; a `cache` takes off what it has."""

    daemon_threads = False
    request_queue_size = 64

    def __init__(self, *, cache: bool, compute_s: float = 0.0, says_usage: bool = True, fault: str = "") -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.cache = cache
        self.compute_s = compute_s
        self.says_usage = says_usage
        self.fault = fault
        self.lock = threading.Lock()
        self.seen: set[str] = set()
        self.asked: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.on_ask: Callable[[], object] = lambda: None
        self.at_once = self.most_at_once = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"

    def hit(self, words: list[str]) -> int:
        """Words of the prompt's prefix that are cached, in blocks of 16; it is cached from now on."""
        ends = range(16, len(words) + 1, 16)
        prefixes = [" ".join(words[:end]) for end in ends]
        with self.lock:
            hits = next((index for index, prefix in enumerate(prefixes) if prefix not in self.seen), len(prefixes))
            if self.cache:
                self.seen.update(prefixes)
        return 16 * hits


class Handler(BaseHTTPRequestHandler):
    server: Server

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        listed = [] if self.server.fault == "no models" else [{"id": "tiny"}]
        self._send(200, json.dumps({"data": listed}).encode())

    def do_POST(self) -> None:
        server = self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with server.lock:
            server.asked.append(body)
            server.on_ask()
            server.keys.append(self.headers["Authorization"])
            server.at_once += 1
            server.most_at_once = max(server.most_at_once, server.at_once)
        try:
            self._answer(server, body)
        finally:
            with server.lock:
                server.at_once -= 1

    def _answer(self, server: Server, body: dict[str, Any]) -> None:
        if server.fault == "500":
            self._send(500, b'{"error": {"message": "out of memory"}}')
            return
        words = " ".join(message["content"] for message in body["messages"]).split()
        hits = server.hit(words)
        threading.Event().wait(server.compute_s * (1 - hits / max(1, len(words))))
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        self._event({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
        if server.fault == "cut":
            self._event({"choices": [{"delta": {"content": "wo"}}]})
            return
        if server.fault == "nonsense":
            self.wfile.write(b"data: {nonsense\n\n")
            return
        if server.fault == "error":
            self._event({"error": {"message": "engine died"}})
            return
        for index in range(min(3, body["max_tokens"])):
            self._event({"choices": [{"delta": {"content": f"word{index} "}}]})
        if server.says_usage:
            details = {"prompt_tokens_details": {"cached_tokens": hits}} if server.cache else {}
            self._event({"choices": [], "usage": {"prompt_tokens": len(words), "completion_tokens": 3, **details}})
        self.wfile.write(b": a comment\n\ndata: [DONE]\n\n")

    def _event(self, found: dict[str, Any]) -> None:
        self.wfile.write(b"data: " + json.dumps(found).encode() + b"\n\n")

    def _send(self, status: int, raw: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)


@contextmanager
def serving(**settings: Any) -> Iterator[Server]:
    server = Server(**settings)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
