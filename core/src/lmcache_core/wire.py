"""What crosses the socket between a cache and its daemon: length-prefixed msgpack, typed and bounded; no pickle."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sized
from typing import Annotated, Final, Generic, TypeVar

import msgspec

from .chain import Model
from .errors import CacheError

PROTOCOL: Final = 1
MAX_FRAME_NBYTES: Final = 16 << 20
"""Half a million chunks in one message."""
MAX_HELLO_NBYTES: Final = 16 << 10
"""From somebody who has not said who it is."""
MAX_MODELS: Final = 1024
"""On one connection; a client defines a number anew when it needs more."""
MAX_DEPTH: Final = 1 << 20
"""Chunks before the first of a message."""
_LENGTH: Final = struct.Struct("<I")
_DIGESTS: Final = struct.Struct("32s" * 64)
Generations = Annotated[list[int], msgspec.Meta(max_length=1 << 19)]
"""Bounded, since an integer of two bytes on the wire takes forty in memory."""
T = TypeVar("T")


class WireError(CacheError):
    """The other end does not speak our protocol; the connection is of no more use."""


class _Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    pass


def _check_lengths(first: list[int], *others: Sized) -> None:
    if any(len(other) != len(first) for other in others):
        raise ValueError("lists of different lengths")


# From a client.  `call` numbers a question; its answer carries the same number.


class Hello(_Message, frozen=True):
    protocol: int
    client: str
    """Random, of one process: tells the daemon that a new connection is of a client it has seen."""
    quiet: bool
    """No copy of an earlier connection of this client is running any more."""
    token: str = ""


class Quiet(_Message, frozen=True):
    """What `Hello.quiet` did not say yet."""


class Define(_Message, frozen=True):
    """What later messages call `model`."""

    model: int
    definition: Model


class Lookup(_Message, frozen=True):
    call: int
    model: int
    digests: bytes
    tokens: int
    request: str
    token_s: float = 0.0
    """What a restored token is worth to the engine in seconds; 0 if it does not know."""


class Hold(_Message, frozen=True):
    call: int
    model: int
    digests: bytes
    request: str


class Release(_Message, frozen=True):
    request: str


class Reserve(_Message, frozen=True):
    """Slots for the chunks from `start` to the end of `digests`, which begin with the prefix's first."""

    call: int
    model: int
    shard: int
    start: int
    digests: bytes


class Commit(_Message, frozen=True):
    call: int
    generations: Generations


class Abort(_Message, frozen=True):
    generations: Generations
    reason: str


class Acquire(_Message, frozen=True):
    """Records of the chunks `digests`, the first of which is chunk `start`; answered by Arrived and Lost."""

    job: int
    model: int
    shard: int
    start: int
    digests: bytes
    for_engine: bool = True
    """To be copied into an engine, and counted as such; not a prefetch."""


class Unhold(_Message, frozen=True):
    generations: Generations


class Evict(_Message, frozen=True):
    call: int
    model: int
    digests: bytes


class Drain(_Message, frozen=True):
    call: int
    timeout_s: float
    refuse_new: bool = False


class Clear(_Message, frozen=True):
    """Remove what nobody uses of one namespace: a shard_id, a family_id, or all with an empty one."""

    call: int
    namespace: bytes


class Pin(_Message, frozen=True):
    """Hold what is in host memory of a prompt, also when the connection is gone, until Unpin or the daemon's end."""

    call: int
    model: int
    digests: bytes


class Unpin(_Message, frozen=True):
    call: int
    model: int
    digests: bytes


class Status(_Message, frozen=True):
    call: int


class Recall(_Message, frozen=True):
    """What became of a request, and of the chunks `digests`; see `History.report`.  Answered by a StatusReply."""

    call: int
    request: str = ""
    digests: bytes = b""
    limit: int = 16


class Scrape(_Message, frozen=True):
    """The metrics in Prometheus' text format, as a StatusReply with "text"."""

    call: int


# From the daemon.


class Welcome(_Message, frozen=True):
    protocol: int
    boot_id: str
    pid: int


class Refused(_Message, frozen=True):
    """The last message of a connection."""

    reason: str


class ExtentOpened(_Message, frozen=True):
    """Comes with a file descriptor, before the first message that names the extent."""

    extent_id: int
    nbytes: int


class ExtentDropped(_Message, frozen=True):
    extent_id: int


class FoundReply(_Message, frozen=True):
    call: int
    resident: int
    longest: int
    lengths: list[int] | None
    """All restorable lengths; None for every one up to `longest`."""
    pending: bool
    lease_id: int
    refused: int = 0
    tiers: tuple[tuple[str, int], ...] = ()


class Answered(_Message, frozen=True):
    """Asking again for this request will tell more."""

    request: str


class Reserved(_Message, frozen=True):
    call: int
    positions: list[int]
    slots: list[tuple[int, int, int]]
    generations: list[int]
    skipped: int
    refused: list[int]

    def __post_init__(self) -> None:
        _check_lengths(self.positions, self.slots, self.generations)


class Arrived(_Message, frozen=True):
    job: int
    positions: list[int]
    slots: list[tuple[int, int, int]]
    generations: list[int]
    tiers: list[str] = []
    """Where each came from; empty when all were in host memory."""

    def __post_init__(self) -> None:
        _check_lengths(self.positions, self.slots, self.generations, self.tiers or self.positions)


class Lost(_Message, frozen=True):
    job: int
    positions: list[int]
    reasons: list[str]

    def __post_init__(self) -> None:
        _check_lengths(self.positions, self.reasons)


class Count(_Message, frozen=True):
    call: int
    count: int


class StatusReply(_Message, frozen=True):
    call: int
    status: dict[str, object]


class Failed(_Message, frozen=True):
    call: int
    reason: str


ToDaemon = (
    Hello
    | Quiet
    | Define
    | Lookup
    | Hold
    | Release
    | Reserve
    | Commit
    | Abort
    | Acquire
    | Unhold
    | Evict
    | Drain
    | Clear
    | Pin
    | Unpin
    | Status
    | Recall
    | Scrape
)
Reply = FoundReply | Reserved | Count | StatusReply | Failed
ToClient = Welcome | Refused | ExtentOpened | ExtentDropped | Answered | Arrived | Lost | Reply

_encoder: Final = msgspec.msgpack.Encoder()


def to_daemon_decoder() -> msgspec.msgpack.Decoder[ToDaemon]:
    return msgspec.msgpack.Decoder(ToDaemon)


def to_client_decoder() -> msgspec.msgpack.Decoder[ToClient]:
    return msgspec.msgpack.Decoder(ToClient)


def encode(message: object) -> bytes:
    """One frame; WireError for what cannot cross, such as a name that is not Unicode."""
    try:
        body = _encoder.encode(message)
    except (UnicodeEncodeError, OverflowError) as error:
        raise WireError(f"{type(message).__name__} cannot be sent: {error}") from error
    if len(body) > MAX_FRAME_NBYTES:
        raise WireError(f"a message of {len(body)} bytes is over the limit of {MAX_FRAME_NBYTES}")
    return _LENGTH.pack(len(body)) + body


class Frames(Generic[T]):
    """Cuts a byte stream into messages; holds at most one frame.  WireError for anything malformed or too large."""

    def __init__(self, decoder: msgspec.msgpack.Decoder[T], max_nbytes: int = MAX_FRAME_NBYTES) -> None:
        self._decoder = decoder
        self.max_nbytes = max_nbytes
        self._buffer = bytearray()

    def feed(self, data: bytes | memoryview) -> Iterator[T]:
        """Every message that is complete now."""
        self._buffer += data
        start = 0
        try:
            while len(self._buffer) - start >= 4:
                (nbytes,) = _LENGTH.unpack_from(self._buffer, start)
                if nbytes > self.max_nbytes:
                    raise WireError(f"a frame of {nbytes} bytes is over the limit of {self.max_nbytes}")
                if len(self._buffer) - start - 4 < nbytes:
                    break
                body = bytes(self._buffer[start + 4 : start + 4 + nbytes])
                start += 4 + nbytes
                yield self._decode(body)
        finally:
            del self._buffer[:start]

    def _decode(self, body: bytes) -> T:
        try:
            return self._decoder.decode(body)
        except (msgspec.MsgspecError, ValueError, CacheError, RecursionError) as error:
            raise WireError(f"not a message of ours: {error}") from error


def split_digests(digests: bytes) -> tuple[bytes, ...]:
    """The 32-byte digests of a message, each at most once: a prompt's chunks differ, if only by their parents."""
    if len(digests) % 32:
        raise WireError(f"{len(digests)} bytes are not whole digests of 32")
    split: list[bytes] = []
    while len(digests) - 32 * len(split) >= _DIGESTS.size:  # six times as fast as slices
        split += _DIGESTS.unpack_from(digests, 32 * len(split))
    split += [digests[at : at + 32] for at in range(32 * len(split), len(digests), 32)]
    if len(set(split)) != len(split):
        raise WireError("one digest twice")
    return tuple(split)
