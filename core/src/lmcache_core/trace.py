"""The requests that a cache was asked for, in a bounded file: when, how long, which chunks.  Off unless configured.

One JSON object a line, with the first bytes of each chunk's digest, and the tokens only where they are asked for as
well.  Two files of half the size each: `PATH`, and `PATH.1` with what was before.  Mode 0600.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import logging
import os
import queue
import stat
import threading
import time
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from .cache import Hit
from .chain import Chain
from .errors import CacheError, ConfigError
from .keys import pack_tokens
from .options import FieldError
from .unhandled import report

log = logging.getLogger(__name__)

MAX_PROMPTS: Final = 256
"""Whose tokens are kept until their lookup; some hundred KiB each at most."""
MAX_KEPT_NBYTES: Final = 64 << 20
MAX_QUEUED: Final = 256
MAX_TOLD: Final = 1024
"""Answers that are remembered, since an engine asks again and again while a request waits."""
SHORT_NBYTES: Final = 8
"""Of each digest; enough to tell chunks apart, and no key of a record."""
MAX_LINE_NBYTES: Final = 64 << 20
_MIN_NBYTES: Final = 1 << 16


@dataclass(frozen=True, slots=True)
class TraceConfig:
    """Where requests are written, and how much is kept; an empty path for nowhere."""

    path: str = ""
    max_nbytes: int = 64 << 20
    tokens: bool = False
    """Their tokens too, which are prompts."""

    def __post_init__(self) -> None:
        if self.max_nbytes < _MIN_NBYTES:
            raise FieldError("max", f"must be at least 64KiB, got {self.max_nbytes} bytes")


@dataclass(frozen=True, slots=True)
class Traced:
    """A request as the file has it."""

    at: float
    request: str
    family: dict[str, Any]
    tokens: list[int] | None
    """None where they were not asked for."""
    complete: bool
    """False where the prompt was extended, and only the tokens before that are known."""
    hit_chunks: int
    chunks: int
    digests: tuple[bytes, ...]
    """The first bytes of each."""


class Trace:
    """Thread-safe; writes on a thread of its own.  What is too much for it is dropped, never waited for."""

    def __init__(self, config: TraceConfig, *, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._with_tokens = config.tokens
        self._file = _File(Path(config.path).expanduser(), config.max_nbytes)
        self._lock = threading.Lock()
        self._prompts: OrderedDict[bytes, bytes] = OrderedDict()
        self._kept_nbytes = 0
        self._told: OrderedDict[tuple[Any, ...], None] = OrderedDict()
        self._queue: queue.Queue[tuple[float, Hit, bytes | None, bool] | None] = queue.Queue(MAX_QUEUED)
        self._thread = threading.Thread(target=self._run, name="lmcache-trace", daemon=True)
        self._thread.start()
        if config.tokens:
            log.warning("the tokens of every request are written to %s: they are prompts", config.path)
        else:
            log.info("a line for every request is written to %s, without its tokens", config.path)

    def made(self, chain: Chain, tokens: Sequence[int] | Any) -> None:
        """These are the tokens that `chain` was made of."""
        if not self._with_tokens:
            return
        packed = bytes(pack_tokens(tokens))
        key = _last(chain)
        with self._lock:
            self._kept_nbytes += len(packed) - len(self._prompts.pop(key, b""))
            self._prompts[key] = packed
            while len(self._prompts) > MAX_PROMPTS or (self._kept_nbytes > MAX_KEPT_NBYTES and len(self._prompts) > 1):
                self._kept_nbytes -= len(self._prompts.popitem(last=False)[1])

    def answered(self, hit: Hit) -> None:
        """A lookup of a request was answered; the same answer again is not written again."""
        key = (hit.request, hit.boot_id, hit.lease_id, _last(hit.chain), hit.chunks)
        with self._lock:
            if key in self._told:
                return
            self._told[key] = None
            if len(self._told) > MAX_TOLD:
                self._told.popitem(last=False)
            packed, complete = self._packed(hit.chain) if self._with_tokens else (None, False)
        with contextlib.suppress(queue.Full):
            self._queue.put_nowait((self._clock(), hit, packed, complete))

    def _packed(self, chain: Chain) -> tuple[bytes, bool]:
        """The tokens of a chain as far as they are known, and whether that is all of them."""
        packed = self._prompts.get(_last(chain))
        if packed is not None:
            return packed, True
        known = (self._prompts.get(digest) for digest in reversed(chain.digests))
        return next((found for found in known if found is not None), b""), False

    def close(self, timeout_s: float = 5.0) -> None:
        """Write what is queued, at most for `timeout_s`.  Twice is fine."""
        with contextlib.suppress(queue.Full):
            self._queue.put(None, timeout=timeout_s)
        self._thread.join(timeout_s)
        if not self._thread.is_alive():
            self._file.close()

    def _run(self) -> None:
        said = False
        while (answer := self._queue.get()) is not None:
            try:
                self._file.append(json.dumps(_line(*answer)).encode() + b"\n")
            except OSError as error:
                if not said:
                    log.warning("trace: %s: %s; requests go on without", self._file.path, error.strerror)
                said = True
            except BaseException:  # a bug of ours; the next request is written all the same
                report()


def open_daemons_trace(config: TraceConfig) -> Trace | None:
    """What a daemon writes: it sees the digests of requests and none of the tokens, which the engines have.

    ConfigError if it cannot be written.
    """
    if not config.path:
        return None
    if config.tokens:
        log.info("the engines' processes write the trace, since a daemon sees no tokens")
        return None
    return Trace(config)


def read(path: Path, requests: Sequence[str]) -> dict[str, Traced]:
    """The last entry of each request, as far as the files have them; CacheError if there is none to read."""
    found: dict[str, Traced] = {}
    files = [each for each in (_older(path), path) if each.exists()]
    if not files:
        raise CacheError(f"{path}: there is no trace; `trace: {{path: {path}}}` in the configuration makes one")
    for file in files:
        for line in _lines(file):
            with contextlib.suppress(ValueError, KeyError, TypeError, zlib.error):  # cut, or not ours
                entry = json.loads(line)
                name = str(entry["request"])
                if name in requests or name.partition("/")[2] in requests:
                    found[name if name in requests else name.partition("/")[2]] = _traced(entry)
    return found


def _line(at: float, hit: Hit, packed: bytes | None, complete: bool) -> dict[str, Any]:
    chain, family = hit.chain, hit.chain.model.family
    result = "full" if hit.chunks == len(chain) else "partial" if hit.chunks else "miss"
    line = {
        "at": at,
        "request": hit.request,
        "family": {"family_id": family.family_id.hex(), "chunk_tokens": family.chunk_tokens},
        "input_tokens": chain.tokens,
        "chunks": len(chain),
        "hit_chunks": hit.chunks,
        "result": "refused" if hit.refused else result,
        "digests": base64.b64encode(b"".join(digest[:SHORT_NBYTES] for digest in chain.digests)).decode(),
    }
    if packed is not None:
        line["family"] = {
            "family_id": family.family_id.hex(),
            **asdict(family),
            "salt_id": family.salt_id.hex(),
        }
        line["tokens"] = base64.b64encode(zlib.compress(packed, 1)).decode()
        line["complete"] = complete
    return line


def _traced(entry: dict[str, Any]) -> Traced:
    tokens = None
    if "tokens" in entry:
        packed = zlib.decompressobj().decompress(base64.b64decode(entry["tokens"], validate=True), MAX_LINE_NBYTES)
        tokens = list(memoryview(packed[: len(packed) // 4 * 4]).cast("I"))
    short = base64.b64decode(entry["digests"], validate=True)
    digests = tuple(short[at : at + SHORT_NBYTES] for at in range(0, len(short), SHORT_NBYTES))
    return Traced(
        float(entry["at"]), str(entry["request"]), dict(entry["family"]), tokens, bool(entry.get("complete", False)),
        int(entry["hit_chunks"]), int(entry["chunks"]), digests,
    )  # fmt: skip


def _lines(file: Path) -> Iterator[bytes]:
    try:
        with file.open("rb") as stream:
            while line := stream.readline(MAX_LINE_NBYTES):
                yield line
    except OSError as error:
        raise CacheError(f"{file}: cannot be read: {error.strerror}") from error


def _last(chain: Chain) -> bytes:
    return b"".join([chain.digests[-1] if chain.digests else chain.model.family.family_id, chain.tail])


def _older(path: Path) -> Path:
    return path.with_name(f"{path.name}.1")


class _File:
    """The two files; several processes may write to them, one line at a time."""

    def __init__(self, path: Path, max_nbytes: int) -> None:
        self.path = path
        self._half = max_nbytes // 2
        self._fd = -1
        try:
            self._fd = _opened(path)
        except OSError as error:
            raise ConfigError(f"trace.path: {path}: {error.strerror}") from error

    def append(self, line: bytes) -> None:
        """Write one line, in the older file's place where the newer one is full; OSError if it cannot be."""
        if len(line) > self._half:
            return
        while True:
            fcntl.flock(self._fd, fcntl.LOCK_EX)
            try:
                if not self._is_current():  # another process has begun a new one
                    fd, self._fd = self._fd, _opened(self.path)
                    os.close(fd)
                    continue
                if os.fstat(self._fd).st_size + len(line) <= self._half:
                    os.write(self._fd, line)
                    return
                os.rename(self.path, _older(self.path))
            finally:
                with contextlib.suppress(OSError):
                    fcntl.flock(self._fd, fcntl.LOCK_UN)

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _is_current(self) -> bool:
        try:
            there = self.path.lstat()
        except FileNotFoundError:
            return False
        ours = os.fstat(self._fd)
        return (there.st_dev, there.st_ino) == (ours.st_dev, ours.st_ino)


def _opened(path: Path) -> int:
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    fd = os.open(path, flags, 0o600)
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.getuid():
            raise PermissionError(1, "it is not a file of ours")
        if stat.S_IMODE(found.st_mode) != 0o600:
            os.fchmod(fd, 0o600)
    except BaseException:
        os.close(fd)
        raise
    return fd
