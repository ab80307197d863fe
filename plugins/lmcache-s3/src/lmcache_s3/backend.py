"""The backend: one object per record, found by its name alone."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import ClassVar, Final, TypeVar

from lmcache_core import (
    ApiVersion,
    Backend,
    BackendError,
    ChunkKey,
    Context,
    Entry,
    GetResult,
    Traits,
)

from .answers import Page, page
from .client import Client, Request
from .helpers import Helpers
from .options import S3Options
from .transfers import Transfers
from .wire import Deadline

T = TypeVar("T")

MAX_NBYTES: Final = 5 << 40
PAGE_KEYS: Final = 1000
"""Names of one page of a listing, the most that S3 gives."""
_FEW_KEYS: Final = 8
"""Up to here keys are asked for one by one."""
_KEYS_PER_PAGE: Final = 64
"""A page takes S3 about as long as this many questions asked several at a time."""
_LARGE_SHARDS: Final = 1024
_LARGE_FOR_S: Final = 60.0


class S3Backend(Backend[S3Options]):
    """Records as objects `PREFIX/v1/<shard_id>/<digest>`, complete from the moment they have that name.

    The bucket bounds itself: a rule of its lifecycle expires what is old, and a capacity is kept by the tier alone,
    over what it knows of.  Safe to use after `os.fork` in the child, which makes connections of its own.
    """

    api_version: ClassVar[ApiVersion] = (1, 0)
    traits: ClassVar[Traits] = Traits(persistent=True, shared=True, io_threads=8, max_nbytes=MAX_NBYTES)
    Options: ClassVar[type] = S3Options

    def __init__(self, options: S3Options, context: Context) -> None:
        super().__init__(options, replace(context, capacity_nbytes=None))
        self._client = Client(options)
        self._target = self._client.target
        self._helpers = Helpers(options.parallel)
        self._transfers = Transfers(options, self._client, self._helpers)
        self._lock = threading.Lock()
        self._large: dict[bytes, float] = {}
        """Shards whose listing is long, and until when that is taken for granted."""
        self._bucket_seen = False

    def contains(self, key: ChunkKey) -> bool:
        return self._contains(key, self._deadline())

    def get(self, key: ChunkKey, into: memoryview) -> int | None:
        return self._transfers.get(key, into, self._deadline())

    def put(self, key: ChunkKey, data: memoryview) -> None:
        self._transfers.put(key, data, self._deadline())

    def remove(self, key: ChunkKey) -> bool:
        deadline = self._deadline()
        # S3 answers a DELETE alike whether there was something or not.
        if not self._contains(key, deadline):
            return False
        request = Request("DELETE", self._target.path(key), (200, 204, 404))
        self._client.call(request, lambda exchange: exchange.text(), deadline)
        return True

    def contains_prefix(self, keys: Sequence[ChunkKey], *, timeout_s: float) -> int:
        deadline = Deadline.after(timeout_s)
        known = self._list_some(keys, deadline)
        asked = [index for index, key in enumerate(keys) if known.get(key) is None]
        first_missing = next((index for index, key in enumerate(keys) if known.get(key) is False), len(keys))
        missing = [first_missing]

        def ask(number: int) -> bool:
            index = asked[number]
            if index >= min(missing):
                return False
            if not self._contains(keys[index], deadline):
                missing.append(index)
            return True

        self._helpers.each(ask, len(asked))
        return min(missing)

    def get_many(self, keys: Sequence[ChunkKey], into: Sequence[memoryview], *, timeout_s: float) -> list[GetResult]:
        deadline = Deadline.after(timeout_s)
        results: list[GetResult] = [None] * len(keys)
        pairs = list(zip(keys, into, strict=True))

        def get(index: int) -> bool:
            results[index] = _caught(lambda: self._transfers.get(*pairs[index], deadline))
            return True

        self._helpers.each(get, len(pairs))
        return results

    def put_many(
        self, keys: Sequence[ChunkKey], data: Sequence[memoryview], *, timeout_s: float
    ) -> list[BackendError | None]:
        deadline = Deadline.after(timeout_s)
        results: list[BackendError | None] = [None] * len(keys)
        pairs = list(zip(keys, data, strict=True))

        def put(index: int) -> bool:
            results[index] = _caught(lambda: self._transfers.put(*pairs[index], deadline))
            return True

        self._helpers.each(put, len(pairs))
        return results

    def entries(self, shard_id: bytes | None = None) -> Iterator[Entry]:
        """Every record, page by page, each under its own deadline.  Objects that are no records are passed over."""
        prefix = self._target.prefix + (f"{shard_id.hex()}/" if shard_id is not None else "")
        token: str | None = None
        while True:
            listed = self._page(prefix, token, self._deadline())
            for item in listed.objects:
                key = self._target.key(item.name)
                if key is not None:
                    yield Entry(key, item.nbytes, item.stored_at)
            if listed.token is None:
                return
            token = listed.token

    def close(self) -> None:
        self._client.close()
        self._helpers.close()

    def _deadline(self) -> Deadline:
        return Deadline.after(self.context.timeout_s)

    def _contains(self, key: ChunkKey, deadline: Deadline) -> bool:
        request = Request("HEAD", self._target.path(key), (200, 404))
        there = self._client.call(request, lambda exchange: exchange.head.status == 200, deadline)
        if there:
            self._bucket_seen = True
        elif not self._bucket_seen:
            # A 404 without a body may mean that there is no such bucket: ask once for a body that tells.
            self._page(self._target.prefix, None, deadline, max_keys=1)
        return there

    def _list_some(self, keys: Sequence[ChunkKey], deadline: Deadline) -> dict[ChunkKey, bool]:
        """Which of `keys` are there, of as many as a listing tells more cheaply than one question for each."""
        shards: dict[bytes, list[ChunkKey]] = {}
        for key in keys:
            shards.setdefault(key.shard_id, []).append(key)
        known: dict[ChunkKey, bool] = {}
        for shard_id, of_shard in shards.items():
            if len(of_shard) > _FEW_KEYS and not self._is_large(shard_id):
                self._list_shard(shard_id, of_shard, known, deadline)
        return known

    def _list_shard(
        self, shard_id: bytes, keys: list[ChunkKey], known: dict[ChunkKey, bool], deadline: Deadline
    ) -> None:
        prefix = f"{self._target.prefix}{shard_id.hex()}/"
        names: set[str] = set()
        last, token = "", None
        for _ in range(1 + len(keys) // _KEYS_PER_PAGE):
            listed = self._page(prefix, token, deadline)
            names.update(item.name for item in listed.objects)
            token = listed.token
            if token is None:
                break
            last = listed.objects[-1].name if listed.objects else last
        else:
            self._remember_large(shard_id)
        for key in keys:
            name = self._target.name(key)
            if token is None or name <= last:
                known[key] = name in names

    def _is_large(self, shard_id: bytes) -> bool:
        return self._large.get(shard_id, 0.0) > time.monotonic()

    def _remember_large(self, shard_id: bytes) -> None:
        with self._lock:
            if len(self._large) >= _LARGE_SHARDS:
                self._large.clear()
            self._large[shard_id] = time.monotonic() + _LARGE_FOR_S

    def _page(self, prefix: str, token: str | None, deadline: Deadline, max_keys: int = PAGE_KEYS) -> Page:
        query = {"list-type": "2", "prefix": prefix, "max-keys": str(max_keys)}
        if token is not None:
            query["continuation-token"] = token
        request = Request("GET", self._target.bucket_path, (200,), query)
        listed = page(self._client.call(request, lambda exchange: exchange.text(), deadline))
        self._bucket_seen = True
        return listed


def _caught(call: Callable[[], T]) -> T | BackendError:
    """One key's trouble is that key's answer."""
    try:
        return call()
    except BackendError as error:
        return error
