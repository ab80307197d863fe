"""One streamed request to an OpenAI-compatible endpoint: when its first token came, and what the usage says."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urlsplit

from lmcache_core import CacheError, ConfigError

MAX_LINE_NBYTES: Final = 1 << 20
MAX_ANSWER_NBYTES: Final = 16 << 20
_CONTENT: Final = ("content", "reasoning_content", "reasoning", "text")

Message = dict[str, str]


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where to ask, and how."""

    url: str
    model: str
    api_key: str = ""
    timeout_s: float = 300.0
    max_tokens: int = 32


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back; times in seconds from the request's begin."""

    text: str = ""
    ttft_s: float = 0.0
    total_s: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int | None = None
    """None where the endpoint does not say."""
    error: str = ""


def ask(endpoint: Endpoint, messages: Sequence[Message], clock: Callable[[], float] = time.perf_counter) -> Answer:
    """Send the messages and read the stream to its end; whatever goes wrong is in `error`."""
    body = {
        "model": endpoint.model,
        "messages": list(messages),
        "max_tokens": endpoint.max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    began = clock()
    connection = _connection(endpoint)
    try:
        connection.request("POST", _path(endpoint, "chat/completions"), json.dumps(body), _headers(endpoint))
        response = connection.getresponse()
        if response.status != 200:
            return Answer(total_s=clock() - began, error=f"{response.status}: {_short(response.read(2000))}")
        return _stream(response, began, endpoint.timeout_s, clock)
    except (OSError, http.client.HTTPException, ValueError) as error:
        return Answer(total_s=clock() - began, error=f"{type(error).__name__}: {error}"[:200])
    finally:
        connection.close()


def model_of(url: str, api_key: str = "", timeout_s: float = 30.0) -> str:
    """The first model that an endpoint serves; CacheError if it cannot be asked."""
    endpoint = Endpoint(url, "", api_key, timeout_s)
    connection = _connection(endpoint)
    try:
        connection.request("GET", _path(endpoint, "models"), headers=_headers(endpoint))
        response = connection.getresponse()
        raw = response.read(MAX_LINE_NBYTES)
        if response.status != 200:
            raise CacheError(f"{url}: it answers {response.status}: {_short(raw)}")
        return str(json.loads(raw)["data"][0]["id"])
    except (OSError, http.client.HTTPException) as error:
        raise CacheError(f"{url}: cannot be reached: {error}") from error
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise CacheError(f"{url}: it lists no models; name one with --model") from error
    finally:
        connection.close()


def checked_url(url: str) -> str:
    """The URL of an endpoint without a trailing slash; ConfigError if it is none."""
    parts = urlsplit(url)
    try:
        sound = parts.scheme in ("http", "https") and parts.hostname and (parts.port is None or parts.port > 0)
    except ValueError:
        sound = False
    if not sound:
        raise ConfigError(f"{url!r} is no URL of an endpoint; write e.g. http://127.0.0.1:8000/v1")
    if parts.username is not None:
        raise ConfigError("a URL with a password would be in every report; --api-key-env names a variable instead")
    return url.rstrip("/")


def _stream(response: http.client.HTTPResponse, began: float, timeout_s: float, clock: Callable[[], float]) -> Answer:
    text: list[str] = []
    first, pieces, nbytes = 0.0, 0, 0
    usage: dict[str, Any] = {}
    done = False
    for event in _events(response):
        if event == b"[DONE]":
            done = True
            break
        nbytes += len(event)
        if nbytes > MAX_ANSWER_NBYTES:
            raise ValueError(f"an answer of more than {MAX_ANSWER_NBYTES} bytes")
        if clock() - began > timeout_s:
            raise TimeoutError(f"not done after {timeout_s:g} s")
        found = json.loads(event)
        if not isinstance(found, dict):
            raise ValueError("an event that is no object")
        if found.get("error"):
            return Answer(total_s=clock() - began, error=_short(json.dumps(found["error"]).encode()))
        usage = found.get("usage") or usage
        piece = _piece(found)
        if piece:
            first = first or clock() - began
            pieces += 1
            text.append(piece)
    if not done and not first:
        raise ValueError("the stream ended before its first token")
    if not done:
        raise ValueError("the stream ended before it was done")
    details = usage.get("prompt_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    total = clock() - began
    return Answer(
        "".join(text), first or total, total, _count(usage.get("prompt_tokens")),
        _count(usage.get("completion_tokens")) or pieces, cached if isinstance(cached, int) else None,
    )  # fmt: skip


def _events(response: http.client.HTTPResponse) -> Iterator[bytes]:
    while line := response.readline(MAX_LINE_NBYTES):
        if line.startswith(b"data:"):
            yield line[5:].strip()


def _piece(found: dict[str, Any]) -> str:
    choices = found.get("choices")
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        return ""
    delta = choices[0].get("delta")
    places = (delta, choices[0]) if isinstance(delta, dict) else (choices[0],)
    return next((str(place[name]) for place in places for name in _CONTENT if place.get(name)), "")


def _connection(endpoint: Endpoint) -> http.client.HTTPConnection:
    parts = urlsplit(endpoint.url)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    return kind(parts.hostname or "", parts.port, timeout=endpoint.timeout_s)


def _path(endpoint: Endpoint, name: str) -> str:
    base = urlsplit(endpoint.url).path.rstrip("/")
    return f"{base}/{name}" if base.endswith("/v1") else f"{base}/v1/{name}"


def _headers(endpoint: Endpoint) -> dict[str, str]:
    key = {"Authorization": f"Bearer {endpoint.api_key}"} if endpoint.api_key else {}
    return {"Content-Type": "application/json", **key}


def _count(value: object) -> int:
    return value if isinstance(value, int) and value > 0 else 0


def _short(raw: bytes) -> str:
    return " ".join(raw.decode("utf-8", "replace").split())[:200]
