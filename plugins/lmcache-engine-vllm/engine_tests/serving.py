"""`vllm serve` as users start it, and a client of its OpenAI protocol over plain HTTP."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from engine import environment

HOST: Final = "127.0.0.1"
NAME: Final = "m"
START_TIMEOUT_S: Final = 240.0
ANSWER_TIMEOUT_S: Final = 300.0
END_TIMEOUT_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back for one prompt."""

    text: str
    ttft_s: float
    prompt_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Server:
    """A server that answers."""

    port: int
    pid: int
    log: Path

    def complete(self, prompt: str | list[int], *, max_tokens: int = 8, **extra: Any) -> Answer:
        """One completion, streamed: the time to the first token is the client's."""
        request = {
            "model": NAME,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **extra,
        }
        link = http.client.HTTPConnection(HOST, self.port, timeout=ANSWER_TIMEOUT_S)
        try:
            began = time.perf_counter()
            link.request("POST", "/v1/completions", json.dumps(request), {"Content-Type": "application/json"})
            response = link.getresponse()
            if response.status != 200:
                raise RuntimeError(f"{response.status}: {response.read()!r}")
            first: float | None = None
            text, usage = "", {}
            for event in _events(response):
                for choice in event["choices"]:
                    first = first or time.perf_counter() - began
                    text += choice["text"]
                usage = event.get("usage") or usage
        finally:
            link.close()
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        return Answer(text, first or 0.0, usage["prompt_tokens"], cached)

    def metrics(self) -> dict[str, float]:
        """Every sample of /metrics by its name with its labels."""
        lines = self._get("/metrics").splitlines()
        samples = (line.rpartition(" ") for line in lines if line and not line.startswith("#"))
        return {name: float(value) for name, _, value in samples}

    def _get(self, path: str) -> str:
        link = http.client.HTTPConnection(HOST, self.port, timeout=ANSWER_TIMEOUT_S)
        try:
            link.request("GET", path)
            response = link.getresponse()
            content = response.read().decode()
            if response.status != 200:
                raise ConnectionError(f"{path}: {response.status}")
            return content
        finally:
            link.close()


@contextmanager
def serve(
    model: Path,
    log: Path,
    *arguments: str,
    transfer: Mapping[str, Any] | None = None,
    python: Path | str = sys.executable,
    variables: Mapping[str, str] | None = None,
    threads: int = 1,
) -> Iterator[Server]:
    """`vllm serve MODEL` with these further arguments, until the block ends."""
    with socket.create_server((HOST, 0)) as probe:
        port = int(probe.getsockname()[1])
    command = [str(python), "-m", "vllm.entrypoints.cli.main", "serve", str(model), "--served-model-name", NAME]
    command += ["--host", HOST, "--port", str(port), "--enable-prompt-tokens-details", "--enforce-eager", *arguments]
    if transfer is not None:
        command += ["--kv-transfer-config", json.dumps(transfer)]
    with log.open("ab") as out:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=out,
            env=environment(threads=threads, **(variables or {})), start_new_session=True,
        )  # fmt: skip
    try:
        server = Server(port, process.pid, log)
        deadline = time.monotonic() + START_TIMEOUT_S
        while not _is_up(server):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"vllm serve did not start: {log.read_text(errors='replace')[-3000:]}")
            time.sleep(0.1)
        yield server
        process.send_signal(signal.SIGINT)
        process.wait(END_TIMEOUT_S)
    finally:
        try:
            os.killpg(process.pid, signal.SIGKILL)  # the group that it leads: ours alone
        except ProcessLookupError:
            pass
        process.wait()


def _is_up(server: Server) -> bool:
    try:
        server._get("/health")
    except OSError:
        return False
    return True


def _events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    """The JSON of a stream of server-sent events."""
    for line in response:
        if line.startswith(b"data: ") and line.strip() != b"data: [DONE]":
            yield json.loads(line.removeprefix(b"data: "))
