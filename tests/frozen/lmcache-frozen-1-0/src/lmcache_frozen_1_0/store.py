"""A backend of plugin API 1.0: records in one SQLite file, shared by every process that opens it."""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from lmcache_core import (
    Backend,
    BackendError,
    BackendFull,
    BackendUnavailable,
    ChunkCorrupt,
    ChunkKey,
    Context,
    Entry,
    Traits,
)

_SCHEMA = """
CREATE TABLE IF NOT EXISTS records (
    key BLOB PRIMARY KEY, shard BLOB NOT NULL, nbytes INTEGER NOT NULL, stored_at REAL NOT NULL, data BLOB NOT NULL
) WITHOUT ROWID
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class FrozenOptions:
    path: Path
    """The file; it is made if it is missing."""


class FrozenBackend(Backend[FrozenOptions]):
    """One connection behind one lock.  Writers of other processes are waited for up to the deadline."""

    api_version = (1, 0)
    traits = Traits(persistent=True, shared=True, io_threads=1, max_nbytes=500_000_000)
    Options: ClassVar[type] = FrozenOptions

    def __init__(self, options: FrozenOptions, context: Context) -> None:
        super().__init__(options, context)
        self._lock = threading.Lock()
        with _trouble():
            self._db = sqlite3.connect(options.path, check_same_thread=False, isolation_level=None)
            self._db.execute("PRAGMA journal_mode = WAL")  # readers need not wait for a writer
            self._db.execute("PRAGMA synchronous = OFF")  # a checksum of core's finds what a crash has torn
            self._db.execute(_SCHEMA)

    def contains(self, key: ChunkKey) -> bool:
        with self._connection(self.context.timeout_s) as db:
            return db.execute("SELECT 1 FROM records WHERE key = ?", (key,)).fetchone() is not None

    def get(self, key: ChunkKey, into: memoryview) -> int | None:
        with self._connection(self.context.timeout_s) as db:
            row = db.execute("SELECT data FROM records WHERE key = ?", (key,)).fetchone()
        if row is None:
            return None
        (data,) = row
        if len(data) > into.nbytes:
            raise ChunkCorrupt(f"{key!r}: {len(data)} bytes, expected at most {into.nbytes}")
        into[: len(data)] = data
        return len(data)

    def put(self, key: ChunkKey, data: memoryview) -> None:
        self._put(key, data, self.context.timeout_s)

    def put_many(
        self, keys: Sequence[ChunkKey], data: Sequence[memoryview], *, timeout_s: float
    ) -> list[BackendError | None]:
        """The loop of the base class gives each record `context.timeout_s`; this gives all of them `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        results: list[BackendError | None] = []
        for key, buffer in zip(keys, data, strict=True):
            try:
                self._put(key, buffer, deadline - time.monotonic())
                results.append(None)
            except BackendError as error:
                results.append(error)
        return results

    def remove(self, key: ChunkKey) -> bool:
        with self._connection(self.context.timeout_s) as db:
            return db.execute("DELETE FROM records WHERE key = ?", (key,)).rowcount == 1

    def entries(self, shard_id: bytes | None = None) -> Iterator[Entry]:
        """With this the cache knows after a restart what is there, and answers misses without asking."""
        with self._connection(self.context.timeout_s) as db:
            rows = db.execute(
                "SELECT key, nbytes, stored_at FROM records WHERE ? IS NULL OR shard = ?", (shard_id, shard_id)
            ).fetchall()
        for key, nbytes, stored_at in rows:
            yield Entry(ChunkKey(key), nbytes, stored_at)

    def close(self) -> None:
        with self._lock:
            self._db.close()

    def _put(self, key: ChunkKey, data: memoryview, timeout_s: float) -> None:
        if data.nbytes > (self.traits.max_nbytes or data.nbytes):
            raise BackendFull(f"a record of {data.nbytes} bytes; at most {self.traits.max_nbytes}")
        with self._connection(timeout_s) as db:
            db.execute("BEGIN IMMEDIATE")  # no other process changes the total between the two statements
            try:
                self._check_room(db, key, data.nbytes)
                db.execute(
                    "INSERT OR REPLACE INTO records VALUES (?, ?, ?, ?, ?)",
                    (key, key.shard_id, data.nbytes, time.time(), data),
                )
                db.execute("COMMIT")
            except BaseException:
                db.execute("ROLLBACK")
                raise

    def _check_room(self, db: sqlite3.Connection, key: ChunkKey, nbytes: int) -> None:
        capacity = self.context.capacity_nbytes
        if capacity is None:
            return
        (others,) = db.execute("SELECT total(nbytes) FROM records WHERE key != ?", (key,)).fetchone()
        if others + nbytes > capacity:
            raise BackendFull(f"{nbytes} bytes over {others:.0f} of {capacity}")

    @contextmanager
    def _connection(self, timeout_s: float) -> Iterator[sqlite3.Connection]:
        """The connection, to be had alone.  Trouble with the store is a BackendError; the rest is a bug."""
        deadline = time.monotonic() + timeout_s
        if not self._lock.acquire(timeout=max(0.0, timeout_s)):
            raise BackendUnavailable(f"busy for {timeout_s} s")
        try:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise BackendUnavailable(f"not reached in {timeout_s} s")
            with _trouble():
                self._db.execute(f"PRAGMA busy_timeout = {max(1, int(1000 * left_s))}")
                yield self._db
        finally:
            self._lock.release()


@contextmanager
def _trouble() -> Iterator[None]:
    try:
        yield
    except sqlite3.Error as error:
        raise BackendUnavailable(f"sqlite: {error}") from error
