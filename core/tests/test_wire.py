"""What may come over the socket: messages as they were sent however they are cut, and for all else WireError."""

from __future__ import annotations

import os
import random
import struct
import tracemalloc

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import chain, model

from lmcache_core import wire
from lmcache_core.wire import Frames, WireError, encode, split_digests, to_client_decoder, to_daemon_decoder

CASES = 1_000_000 if os.environ.get("LMCACHE_SOAK") else 40_000
DIGESTS = b"".join(chain(3).digests)
SLOTS = [(0, 4096, 8192), (1, 0, 8192)]

TO_DAEMON: list[object] = [
    wire.Hello(wire.PROTOCOL, "client", True),
    wire.Define(1, model(shards=2)),
    wire.Lookup(7, 1, DIGESTS, 51, "request"),
    wire.Hold(8, 1, DIGESTS, "pin"),
    wire.Release("request"),
    wire.Reserve(9, 1, 0, 1, DIGESTS),
    wire.Commit(10, [1, 2, 3]),
    wire.Abort([4], "why"),
    wire.Acquire(11, 1, 0, 2, DIGESTS),
    wire.Unhold([5, 6]),
    wire.Evict(12, 1, DIGESTS),
    wire.Status(15),
]
TO_CLIENT: list[object] = [
    wire.Welcome(wire.PROTOCOL, "boot", 1),
    wire.Refused("why"),
    wire.ExtentOpened(0, 1 << 20),
    wire.ExtentDropped(0),
    wire.FoundReply(7, 2, 3, None, False, 1),
    wire.FoundReply(7, 2, 3, [1, 3], True, 1),
    wire.Answered("request"),
    wire.Reserved(9, [0, 1], SLOTS, [1, 2], 1, [2]),
    wire.Arrived(11, [0, 1], SLOTS, [1, 2]),
    wire.Lost(11, [0, 1], ["miss", "late"]),
    wire.Count(10, 3),
    wire.StatusReply(15, {"boot_id": "x"}),
    wire.Failed(9, "why"),
]
DECODERS = [(to_daemon_decoder(), TO_DAEMON), (to_client_decoder(), TO_CLIENT)]


@pytest.mark.parametrize(("decoder", "messages"), DECODERS, ids=["to daemon", "to client"])
def test_every_message_arrives_as_it_was_sent_however_the_stream_is_cut(decoder, messages):
    stream = b"".join(map(encode, messages))
    for nbytes in (1, 2, 3, 5, 64, 1000, len(stream)):
        frames = Frames(decoder)
        got = [m for at in range(0, len(stream), nbytes) for m in frames.feed(stream[at : at + nbytes])]
        assert got == messages


@settings(deadline=None)
@given(st.binary(max_size=400), st.integers(0, 1), st.lists(st.integers(1, 50), max_size=8))
def test_arbitrary_bytes_are_messages_or_a_wire_error(data, end, cuts):
    frames = Frames(DECODERS[end][0])
    at = 0
    try:
        for cut in [*cuts, len(data)]:
            list(frames.feed(data[at : at + cut]))
            at += cut
    except WireError:
        pass


@settings(deadline=None)
@given(
    st.recursive(
        st.integers(-(2**63), 2**64 - 1)
        | st.binary(max_size=40)
        | st.text(max_size=8)
        | st.none()
        | st.booleans()
        | st.floats(),
        lambda x: st.lists(x, max_size=6) | st.dictionaries(st.text(max_size=6), x, max_size=4),
    ),
    st.integers(0, 1),
)
def test_any_msgpack_is_a_message_or_a_wire_error(value, end):
    body = msgspec.msgpack.encode(value)
    try:
        list(Frames(DECODERS[end][0]).feed(struct.pack("<I", len(body)) + body))
    except WireError:
        pass


def mutate(rng: random.Random, frame: bytes) -> bytes:
    """`frame` with a few bytes flipped, removed, doubled or made up, its length mended or not."""
    body = bytearray(frame[4:])
    for _ in range(rng.randrange(1, 5)):
        at = rng.randrange(len(body) + 1)
        match rng.randrange(5):
            case 0 if at < len(body):
                body[at] ^= 1 << rng.randrange(8)
            case 1:
                del body[at : at + rng.randrange(1, 9)]
            case 2:
                body[at:at] = body[at : at + rng.randrange(1, 40)]
            case 3:
                body[at:at] = rng.randbytes(rng.randrange(1, 6))
            case _ if at < len(body):
                body[at] = rng.choice((0xC0, 0xC1, 0xC6, 0xC9, 0xD9, 0xDB, 0xDC, 0xDD, 0xDE, 0xDF, 0xFF, 0x80, 0x90))
    nbytes = len(body) if rng.random() < 0.9 else rng.choice((0, 1, 2**31, 2**32 - 1, len(body) + 1))
    return struct.pack("<I", nbytes) + bytes(body)


@pytest.mark.parametrize(("decoder", "messages"), DECODERS, ids=["to daemon", "to client"])
def test_mutated_frames_are_messages_or_a_wire_error(decoder, messages):
    seed = random.randrange(1 << 32)
    rng = random.Random(seed)
    frames = [encode(message) for message in messages]
    refused = 0
    for case in range(CASES):
        mutated = mutate(rng, rng.choice(frames))
        try:
            list(Frames(decoder).feed(mutated))
        except WireError:
            refused += 1
        except BaseException as error:
            raise AssertionError(f"seed {seed}, case {case}: {mutated!r} raised {error!r}") from error
    assert refused > CASES // 4


CORPUS = [
    b"\xdd\xff\xff\xff\xff",
    b"\xdf\xff\xff\xff\xff",
    b"\xdb\xff\xff\xff\xff",
    b"\xc6\xff\xff\xff\xff",
    b"\x93\xa6Commit\x01\xdd\xff\xff\xff\xff",
    b"\x93\xa6Commit\x01\xdd\x00\xff\xff\xff" + b"\x01" * 1000,
    b"\x91" * 50_000,
    b"\x93\xa6Define\x01" + b"\x91" * 50_000,
    b"\x93\xa6Define\x01\x81\xa6groups\xdd\xff\xff\xff\xff",
    b"\x92\xa7Release\xa1\xff",
    b"\x92\xa7Release\xc0",
    b"\x91\xa7Release",
    b"\x93\xa7Unknown\x01\x02",
    b"\xc1",
    b"",
]


@pytest.mark.parametrize("body", CORPUS)
def test_lengths_that_lie_and_depths_without_end_cost_no_memory(body):
    tracemalloc.start()
    try:
        for decoder, _ in DECODERS:
            with pytest.raises(WireError):
                list(Frames(decoder).feed(struct.pack("<I", len(body)) + body))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 64 * len(body) + (1 << 20)


def test_the_worst_frame_takes_no_more_than_its_bound_in_memory():
    count = (1 << 19) + 1
    too_many = b"\x93\xa6Commit\x01\xdd" + struct.pack(">I", count) + b"\xcd\x11\x11" * count
    most = b"\x93\xa6Commit\x01\xdd" + struct.pack(">I", count - 1) + b"\xcd\x11\x11" * (count - 1)
    tracemalloc.start()
    try:
        with pytest.raises(WireError, match="length"):
            list(Frames(to_daemon_decoder()).feed(struct.pack("<I", len(too_many)) + too_many))
        ((message),) = Frames(to_daemon_decoder()).feed(struct.pack("<I", len(most)) + most)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(message.generations) == count - 1
    assert peak < 48 << 20


def test_a_frame_over_the_limit_is_refused_by_its_first_four_bytes():
    frames = Frames(to_daemon_decoder(), max_nbytes=1000)
    with pytest.raises(WireError, match="a frame of 1001 bytes is over the limit of 1000"):
        list(frames.feed(struct.pack("<I", 1001)))
    assert list(Frames(to_daemon_decoder(), max_nbytes=1000).feed(struct.pack("<I", 1000) + b"x" * 999)) == []


def test_what_is_kept_of_a_stream_is_less_than_a_frame():
    frames = Frames(to_daemon_decoder(), max_nbytes=4096)
    one = encode(wire.Release("r" * 1000))
    for _ in range(100):
        for at in range(0, len(one), 700):
            list(frames.feed(one[at : at + 700]))
            assert len(frames._buffer) < 4096 + 4
    assert not frames._buffer


def test_a_message_over_the_limit_is_not_sent():
    with pytest.raises(WireError, match="over the limit"):
        encode(wire.Lookup(1, 1, bytes(wire.MAX_FRAME_NBYTES + 1), 0, "r"))


def test_a_name_that_is_no_unicode_is_a_wire_error_not_a_crash():
    with pytest.raises(WireError, match="Release cannot be sent"):
        encode(wire.Release("\ud800"))


@pytest.mark.parametrize("nbytes", [1, 31, 33, 95])
def test_digests_of_odd_length_are_refused(nbytes):
    with pytest.raises(WireError, match="not whole digests"):
        split_digests(bytes(nbytes))


def test_a_digest_that_comes_twice_is_refused():
    with pytest.raises(WireError, match="twice"):
        split_digests(DIGESTS + DIGESTS[:32])
    assert split_digests(DIGESTS) == chain(3).digests
    assert split_digests(b"") == ()


@pytest.mark.parametrize(
    "body",
    [
        ["Arrived", 1, [0, 1], [[0, 0, 1]], [1, 2]],
        ["Arrived", 1, [0], [[0, 0, 1]], []],
        ["Reserved", 1, [0, 1], [[0, 0, 1]], [1], 0, []],
        ["Lost", 1, [0, 1], ["miss"]],
    ],
)
def test_lists_that_belong_together_and_differ_in_length_are_refused(body):
    data = msgspec.msgpack.encode(body)
    with pytest.raises(WireError, match="different lengths"):
        list(Frames(to_client_decoder()).feed(struct.pack("<I", len(data)) + data))


@pytest.mark.parametrize("count", [1, 63, 64, 65, 128, 515])
def test_digests_come_apart_as_they_were_put_together(count: int) -> None:
    digests = tuple(n.to_bytes(31, "little") + b"\0" for n in range(count))
    assert split_digests(b"".join(digests)) == digests
    with pytest.raises(WireError):
        split_digests(b"".join(digests) + b"x")
