"""The backends `redis` and `valkey`: records as string values, batches in one round trip."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar, Final, Literal

from lmcache_core import (
    ApiVersion,
    Backend,
    BackendError,
    BackendFull,
    ChunkCorrupt,
    ChunkKey,
    ConfigError,
    Context,
    GetResult,
    Traits,
)

from .dialing import ClientName, Dialer
from .exchange import Call, Exchange
from .faults import fault
from .links import LinkPool
from .options import DEFAULT_MAX_VALUE_NBYTES, RedisOptions, ValkeyOptions
from .slices import SlicedReader
from .topology import Cluster, OneServer, Sentinels, Topology
from .wire import Answer, Oversize, ServerError

logger = logging.getLogger(__name__)

_WINDOW_NBYTES: Final = 64 << 20
_WINDOW_KEYS: Final = 4096
"""A batch goes out in windows of this size: what the server holds ready for us stays bounded."""


class RedisBackend(Backend[RedisOptions]):
    """Records in Redis, under `prefix` and the key in hexadecimal.

    The server bounds itself (`maxmemory` and its eviction policy), so no capacity is kept here.  Nothing connects
    before it is needed, and nothing is tried twice: the breaker of the tier decides when to ask again.  An operation on
    one record has the tier's timeout; whatever goes wrong on a connection, that connection is not used again.
    """

    api_version: ClassVar[ApiVersion] = (1, 0)
    traits: ClassVar[Traits] = Traits(
        persistent=True, shared=True, alignment=1, io_threads=4, max_nbytes=DEFAULT_MAX_VALUE_NBYTES
    )
    Options: ClassVar[type] = RedisOptions
    client: ClassVar[ClientName] = "redis"

    def __init__(self, options: RedisOptions, context: Context) -> None:
        limit = options.max_value_nbytes
        if context.record_nbytes is not None and context.record_nbytes > limit:
            raise ConfigError(
                f"{self.client}: records will have {context.record_nbytes} bytes, the server takes {limit} (max_value, "
                "its proto-max-bulk-len); use smaller chunks or raise both"
            )
        if context.capacity_nbytes is not None:
            logger.info("%s: capacity bounds what each process keeps; the server's total is its maxmemory", self.client)
        super().__init__(options, replace(context, capacity_nbytes=None))
        self.traits = replace(type(self).traits, io_threads=options.connections, max_nbytes=limit)  # type: ignore[misc]
        self._prefix = options.prefix.encode("ascii")
        self._slices = SlicedReader(self.client, options.read_slice_nbytes)
        self._set, self._set_end = _set_command(options.ttl_s)
        dialer = Dialer.of(self.client, options)
        self._pool = LinkPool(self.client, dialer.dial, options.connections)
        topology = _topology(self.client, options, dialer, self._pool)
        self._exchange = Exchange(self.client, topology, self._pool)
        _warn(self.client, options)

    def contains(self, key: ChunkKey) -> bool:
        return self.contains_prefix([key], timeout_s=self.context.timeout_s) == 1

    def get(self, key: ChunkKey, into: memoryview) -> int | None:
        (result,) = self.get_many([key], [into], timeout_s=self.context.timeout_s)
        if isinstance(result, BackendError):
            raise result
        return result

    def put(self, key: ChunkKey, data: memoryview) -> None:
        (error,) = self.put_many([key], [data], timeout_s=self.context.timeout_s)
        if error is not None:
            raise error

    def remove(self, key: ChunkKey) -> bool:
        (answer,) = self._exchange.run(
            [self._call(b"UNLINK", key, "a number")], time.monotonic() + self.context.timeout_s
        )
        return self._number(answer, "UNLINK") > 0

    def contains_prefix(self, keys: Sequence[ChunkKey], *, timeout_s: float) -> int:
        deadline = time.monotonic() + timeout_s
        for start in range(0, len(keys), _WINDOW_KEYS):
            window = keys[start : start + _WINDOW_KEYS]
            answers = self._exchange.run([self._call(b"EXISTS", key, "a number") for key in window], deadline)
            for index, answer in enumerate(answers):
                if not self._number(answer, "EXISTS"):
                    return start + index
        return len(keys)

    def get_many(self, keys: Sequence[ChunkKey], into: Sequence[memoryview], *, timeout_s: float) -> list[GetResult]:
        deadline = time.monotonic() + timeout_s
        calls = [self._get_call(key, view) for key, view in zip(keys, into, strict=True)]
        answers = self._in_windows(calls, [len(view) for view in into], deadline)
        return [self._got(key, view, answer) for key, view, answer in zip(keys, into, answers, strict=True)]

    def put_many(
        self, keys: Sequence[ChunkKey], data: Sequence[memoryview], *, timeout_s: float
    ) -> list[BackendError | None]:
        deadline = time.monotonic() + timeout_s
        results: list[BackendError | None] = [None] * len(keys)
        calls: list[Call] = []
        asked: list[int] = []
        for index, (key, record) in enumerate(zip(keys, data, strict=True)):
            if len(record) > self.options.max_value_nbytes:
                results[index] = BackendFull(
                    f"{self.client}: a record of {len(record)} bytes, max_value is {self.options.max_value_nbytes}"
                )
                continue
            name = self._prefix + key.text.encode()
            head = b"%b$%d\r\n%b\r\n$%d\r\n" % (self._set, len(name), name, len(record))
            calls.append(Call(name, (head, record, self._set_end), "OK"))
            asked.append(index)
        answers = self._in_windows(calls, [len(data[index]) for index in asked], deadline)
        for index, answer in zip(asked, answers, strict=True):
            results[index] = self._stored(answer)
        return results

    def close(self) -> None:
        self._pool.close()

    def _call(
        self, verb: bytes, key: ChunkKey, wants: Literal["a number", "a record"], into: memoryview | None = None
    ) -> Call:
        name = self._prefix + key.text.encode()
        return Call(name, (b"*2\r\n$%d\r\n%b\r\n$%d\r\n%b\r\n" % (len(verb), verb, len(name), name),), wants, into)

    def _get_call(self, key: ChunkKey, into: memoryview) -> Call:
        call = self._call(b"GET", key, "a record", into)
        if not self._slices.wants(len(into)):
            return call
        return replace(call, converse=lambda link: self._slices.read(link, call.key, into))

    def _in_windows(self, calls: Sequence[Call], sizes: Sequence[int], deadline: float) -> list[Answer]:
        answers: list[Answer] = []
        start = 0
        while start < len(calls):
            end, room = start, _WINDOW_NBYTES
            while end < len(calls) and end - start < _WINDOW_KEYS and (end == start or sizes[end] <= room):
                room -= sizes[end]
                end += 1
            answers += self._exchange.run(calls[start:end], deadline)
            start = end
        return answers

    def _got(self, key: ChunkKey, view: memoryview, answer: Answer) -> GetResult:
        match answer:
            case ServerError():
                return fault(answer, f"{self.client} GET")
            case Oversize(nbytes):
                return ChunkCorrupt(f"{key!r} has {nbytes} bytes in {self.client}, at most {len(view)} were expected")
        result: GetResult = answer
        return result

    def _stored(self, answer: Answer) -> BackendError | None:
        match answer:
            case ServerError():
                return fault(answer, f"{self.client} SET")
            case BackendError():
                return answer
        return None

    def _number(self, answer: Answer, verb: str) -> int:
        match answer:
            case ServerError():
                raise fault(answer, f"{self.client} {verb}")
            case BackendError():
                raise answer
        number: int = answer
        return number


class ValkeyBackend(RedisBackend):
    """The same in Valkey, through its own client."""

    api_version: ClassVar[ApiVersion] = (1, 0)
    Options: ClassVar[type] = ValkeyOptions
    client: ClassVar[ClientName] = "valkey"


def _set_command(ttl_s: float | None) -> tuple[bytes, bytes]:
    """What goes before the key and after the value of a SET."""
    if ttl_s is None:
        return b"*3\r\n$3\r\nSET\r\n", b"\r\n"
    millis = b"%d" % round(ttl_s * 1000)
    return b"*5\r\n$3\r\nSET\r\n", b"\r\n$2\r\nPX\r\n$%d\r\n%b\r\n" % (len(millis), millis)


def _topology(client: ClientName, options: RedisOptions, dialer: Dialer, pool: LinkPool) -> Topology:
    addresses = options.location.addresses
    if options.cluster:
        return Cluster(addresses, dialer.dial, pool.retain)
    if options.master:
        return Sentinels(addresses, options.master, Dialer.of(client, options, sentinel=True).dial, pool.retain)
    return OneServer(addresses[0])


def _warn(client: str, options: RedisOptions) -> None:
    location = options.location
    far = [str(address) for address in location.addresses if not address.is_local]
    if far and not location.tls:
        logger.warning("%s: records and password go to %s unencrypted; rediss:// is TLS", client, ", ".join(far))
    if options.tls_verify == "none":
        logger.warning("%s: the server's certificate is not checked: anybody may answer in its place", client)
