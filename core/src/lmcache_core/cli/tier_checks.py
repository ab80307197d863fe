"""Whether the stores and the daemon that a configuration names answer, and how fast: a few small records each."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

from lmcache_core import __version__, frame
from lmcache_core.audit import aligned_buffer
from lmcache_core.backend import Backend
from lmcache_core.backends.disk import DiskOptions
from lmcache_core.client.control import Control
from lmcache_core.config import MEMORY, CacheConfig, TierConfig
from lmcache_core.diagnosis import Diagnosis
from lmcache_core.errors import BackendError, BackendFull, CacheError, PluginError
from lmcache_core.frame import CHECKSUM_XXH3_64, Frame
from lmcache_core.keys import KEY_NBYTES, ChunkKey
from lmcache_core.layout import PAGE_NBYTES
from lmcache_core.opening import open_backend

from .checks import own
from .display import size

RECORDS: Final = 4
PAYLOAD_NBYTES: Final = 1 << 20
_MAX_HEARD: Final = 20
_SLOW: Final = 0.5
"""Of a tier's timeout: an operation that takes more of it will often be late."""


@dataclass(frozen=True, slots=True)
class Speed:
    """Seconds for one question, and bytes a second for a batch of records."""

    ask_s: float
    write: float
    read: float


def tiers(config: CacheConfig, *, write: bool) -> Iterator[Diagnosis]:
    """Each store: opened, asked, and, if `write`, written to, read from and left as it was."""
    for tier in config.tiers:
        if tier.backend == MEMORY:
            continue
        absent = _not_there_yet(tier)
        yield from absent if absent is not None else _within(tier, config, write)


def daemon(config: CacheConfig, *, timeout_s: float = 2.0) -> tuple[list[Diagnosis], bool]:
    """What a daemon at the configuration's socket says of itself, and whether there is one."""
    path = config.daemon_socket
    try:
        with Control.unix(path, timeout_s=timeout_s) as control:
            status: dict[str, Any] = control.status(timeout_s)
            greeting_s = control.greeting_s
    except CacheError as error:
        if config.socket is None:
            return [Diagnosis("ok", f"none at {path}: engines open a cache of their own")], False
        return [Diagnosis("error", str(error), "start it: lmc serve; until then engines compute everything")], False
    found = [Diagnosis("ok", f"{path} answers in {1e3 * greeting_s:.1f} ms: pid {status['pid']}")]
    if status["version"] != __version__:
        remedy = "install one version on both sides, and start the daemon again"
        found.append(
            Diagnosis("warning", f"the daemon is lmcache-core {status['version']}, this is {__version__}", remedy)
        )
    if status["problem"]:
        found.append(Diagnosis("warning", f"the daemon is not ready: {status['problem']}", "lmc status says more"))
    for tier in status["tiers"]:
        if tier["breaker"] != "closed":
            text = f"the daemon leaves tier {tier['name']} alone ({tier['breaker']}): {tier['reason']}"
            found.append(Diagnosis("error", text, "it tries again by itself once the store answers"))
    return found, True


def probe(backend: Backend[Any], *, timeout_s: float) -> Speed:
    """Write, read and remove a few records under keys that nobody has; CacheError for anything but that.

    They are whole records, so that whoever checks the store meanwhile finds nothing wrong.
    """
    limit = backend.traits.max_nbytes
    payload = PAYLOAD_NBYTES if limit is None else max(PAGE_NBYTES, min(PAYLOAD_NBYTES, limit - PAGE_NBYTES))
    keys = [ChunkKey(os.urandom(KEY_NBYTES)) for _ in range(RECORDS)]
    records = [_record(key, payload, backend) for key in keys]
    into = [aligned_buffer(record.nbytes, backend)[: record.nbytes] for record in records]
    if backend.contains(keys[0]):  # not timed: it connects first
        raise CacheError("it says that it has a record which was never stored")
    began = time.perf_counter()
    backend.contains(keys[1])
    ask_s = time.perf_counter() - began
    try:
        began = time.perf_counter()
        _raise(backend.put_many(keys, records, timeout_s=timeout_s))
        write_s = time.perf_counter() - began
        read_s = float("inf")
        for _ in range(2):  # the first time, more connections are opened
            began = time.perf_counter()
            lengths = backend.get_many(keys, into, timeout_s=timeout_s)
            read_s = min(read_s, time.perf_counter() - began)
        _raise(lengths)
        for length, got, record in zip(lengths, into, records, strict=True):
            if length is None:
                raise CacheError("it does not find what was just stored")
            if length != record.nbytes or got != record:
                raise CacheError("it gives back other bytes than were stored: do not use it before you know why")
    finally:
        for key in keys:
            backend.remove(key)
    nbytes = sum(record.nbytes for record in records)
    return Speed(ask_s, nbytes / write_s, nbytes / read_s)


def _record(key: ChunkKey, nbytes: int, backend: Backend[Any]) -> memoryview:
    record = aligned_buffer(frame.record_nbytes(nbytes), backend)[: frame.record_nbytes(nbytes)]
    record[PAGE_NBYTES : PAGE_NBYTES + nbytes] = os.urandom(nbytes)
    checksum = frame.payload_checksum(record[PAGE_NBYTES : PAGE_NBYTES + nbytes])
    head = Frame(key, 0, bytes(16), nbytes, nbytes, time.time_ns(), checksum_kind=CHECKSUM_XXH3_64, checksum=checksum)
    frame.pack(head, record[:PAGE_NBYTES])
    return record


def _raise(results: list[Any]) -> None:
    for result in results:
        if isinstance(result, BackendError):
            raise result


def _within(tier: TierConfig, config: CacheConfig, write: bool) -> list[Diagnosis]:
    """The check of one store, or, when it hangs, that it does: a plugin may ignore every deadline."""
    found: list[Diagnosis] = []
    thread = threading.Thread(target=lambda: found.extend(_check(tier, config, write)), name="lmc-doctor", daemon=True)
    thread.start()
    limit_s = 4 * tier.timeout_s + 5
    thread.join(limit_s)
    if thread.is_alive():
        return [
            Diagnosis(
                "error", f"{tier.name}: no end after {limit_s:.0f} s", "its backend waits longer than its timeout"
            )
        ]
    return found


def _check(tier: TierConfig, config: CacheConfig, write: bool) -> list[Diagnosis]:
    with _Heard() as heard:
        found = _asked(tier, config, write)
    return found + [Diagnosis("warning", f"{tier.name}: {text}") for text in heard.texts]


class _Heard(logging.Handler):
    """The warnings that a backend logs meanwhile: findings, not lines in between."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if len(self.texts) < _MAX_HEARD:
            self.texts.append(record.getMessage())

    def __enter__(self) -> Self:
        logging.getLogger().addHandler(self)
        return self

    def __exit__(self, *exc: object) -> None:
        logging.getLogger().removeHandler(self)


def _asked(tier: TierConfig, config: CacheConfig, write: bool) -> list[Diagnosis]:
    found: list[Diagnosis] = []
    name = tier.name
    try:
        began = time.perf_counter()
        with open_backend(tier, config.plugins) as backend:
            opened_s = time.perf_counter() - began
            if write:
                found += _judged(name, probe(backend, timeout_s=tier.timeout_s), tier.timeout_s)
            else:
                backend.contains(ChunkKey(os.urandom(KEY_NBYTES)))
                found.append(Diagnosis("ok", f"{name}: opened in {1e3 * opened_s:.0f} ms, and answers"))
            found += own(backend, name)
    except BackendFull as error:
        remedy = "a cache makes room by itself; nothing to do if one uses it"
        found.append(Diagnosis("note", f"{name}: full: {error}", remedy))
    except PluginError:
        pass  # said by the section on the configuration
    except CacheError as error:
        found.append(Diagnosis("error", f"{name}: {error}", "until it answers, what is in it is a miss"))
    except Exception as error:  # a plugin may raise anything
        kind = type(error).__name__
        found.append(
            Diagnosis("error", f"{name}: its backend raised {kind}: {error}", "tell whoever maintains the plugin")
        )
    return found


def _judged(name: str, speed: Speed, timeout_s: float) -> Iterator[Diagnosis]:
    text = (
        f"{name}: answers in {1e3 * speed.ask_s:.1f} ms; {RECORDS} records of {size(PAYLOAD_NBYTES)}: "
        f"written at {size(int(speed.write))}/s, read at {size(int(speed.read))}/s"
    )
    slowest = max(speed.ask_s, RECORDS * PAYLOAD_NBYTES / min(speed.write, speed.read))
    if slowest > _SLOW * timeout_s:
        remedy = f"its timeout is {timeout_s:g} s: raise it, or leave this store out; what is late is a miss"
        yield Diagnosis("warning", text, remedy)
    else:
        yield Diagnosis("ok", text)


def _not_there_yet(tier: TierConfig) -> list[Diagnosis] | None:
    """Of a disk store that opening it would make; None for any other."""
    if tier.backend not in ("disk", "disk@lmcache-core"):
        return None
    try:
        root = Path(tier.options.into(DiskOptions).path).expanduser()
    except (CacheError, RuntimeError):
        return None  # opening it says what is wrong
    if (root / "v1").exists() or root.is_symlink():
        return None
    parent = next((p for p in (root, *root.parents) if p.exists()), root)
    if os.access(parent, os.W_OK | os.X_OK):
        return [Diagnosis("ok", f"{tier.name}: {root} is not there yet; it is made at the first start")]
    return [
        Diagnosis("error", f"{tier.name}: {root} is not there, and {parent} is not ours to write to", f"make {root}")
    ]
