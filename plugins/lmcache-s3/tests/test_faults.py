"""What servers and networks do wrong: a miss or an error that says where, in time, never wrong bytes."""

from __future__ import annotations

import logging
import socket
import time
from collections import deque

import pytest
import seaweed
from places import BUCKET, Open, held, new_key, record
from proxy import Fault, Proxy, What

from lmcache_core import BackendError, BackendFull, BackendUnavailable, ChunkCorrupt
from lmcache_s3 import S3Backend

NBYTES = 300_000


def test_a_404_is_absent_and_not_tried_again(s3: S3Backend, proxy: Proxy) -> None:
    s3.contains(new_key())
    proxy.seen.clear()
    assert s3.contains(new_key()) is False
    assert held(s3, new_key(), 64) is None
    assert proxy.methods() == ["HEAD", "GET"]


def test_head_that_is_overloaded_twice_is_asked_a_third_time(s3: S3Backend, proxy: Proxy) -> None:
    key = new_key()
    s3.put(key, record(64))
    proxy.seen.clear()
    proxy.faults = deque([Fault(status=503, code="SlowDown"), Fault(status=503)])
    assert s3.contains(key) is True
    assert proxy.methods() == ["HEAD"] * 3


@pytest.mark.parametrize("status", [500, 502, 503, 504, 429])
def test_get_and_put_are_tried_again_when_the_server_fails(s3: S3Backend, proxy: Proxy, status: int) -> None:
    key, data = new_key(), record(NBYTES)
    proxy.faults.append(Fault(status=status))
    s3.put(key, data)
    proxy.faults.append(Fault(status=status))
    assert held(s3, key, NBYTES) == data
    assert proxy.methods() == ["PUT", "PUT", "GET", "GET"]


def test_overload_ends_after_the_attempts_and_is_not_remembered_as_absence(open_s3: Open, proxy: Proxy) -> None:
    s3 = open_s3(attempts=3)
    key, data = new_key(), record(64)
    s3.put(key, data)
    proxy.seen.clear()
    proxy.always = lambda seen: Fault(status=503, code="SlowDown")
    with pytest.raises(BackendUnavailable, match="s3 HEAD: 503"):
        s3.contains(key)
    with pytest.raises(BackendUnavailable, match="s3 GET: 503 SlowDown"):
        held(s3, key, 64)
    with pytest.raises(BackendUnavailable):
        s3.contains_prefix([key], timeout_s=20)
    assert proxy.methods() == ["HEAD"] * 3 + ["GET"] * 3 + ["HEAD"] * 3
    proxy.always = lambda seen: None
    assert s3.contains(key)
    assert held(s3, key, 64) == data


def test_a_pause_that_the_deadline_has_no_room_for_is_not_made(
    open_s3: Open, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    s3 = open_s3(timeout_s=1.2, attempts=10)
    monkeypatch.setattr("random.Random.uniform", lambda self, least, most: most)
    proxy.always = lambda seen: Fault(status=503)
    with pytest.raises(BackendUnavailable, match="s3 HEAD: 503"):
        s3.contains(new_key())
    assert len(proxy.seen) == 5  # after pauses of 50, 100, 200 and 400 ms; the next would be 800 ms


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (Fault(status=403, code="AccessDenied"), "403 AccessDenied"),
        (Fault(status=403), "s3:ListBucket"),
        (Fault(status=301, code="PermanentRedirect"), "301 PermanentRedirect; the bucket is in another region"),
        (Fault(status=301, headers=(("x-amz-bucket-region", "eu-west-3"),)), "names region 'eu-west-3'"),
        (Fault(status=400, code="AuthorizationHeaderMalformed"), "in another region"),
        (Fault(status=404, code="NoSuchBucket"), "no such bucket"),
        (Fault(status=418, code="Teapot"), "418 Teapot"),
    ],
)
def test_a_refusal_names_bucket_region_and_endpoint_and_is_not_repeated(
    s3: S3Backend, proxy: Proxy, fault: Fault, said: str
) -> None:
    key = new_key()
    proxy.always = lambda seen: fault
    with pytest.raises(BackendError) as caught:
        held(s3, key, 64)
    message = str(caught.value)
    assert said in message
    assert not isinstance(caught.value, BackendUnavailable)
    assert BUCKET in message
    assert "us-east-1" in message
    assert proxy.url in message
    with pytest.raises(BackendError):
        s3.put(key, record(64))
    assert proxy.methods() == ["GET", "PUT"]


def test_a_bucket_that_is_not_there_is_an_error_for_head_too_which_has_no_body(open_s3: Open) -> None:
    s3 = open_s3(bucket="not-there")
    for call in (
        lambda: s3.contains(new_key()),
        lambda: held(s3, new_key(), 64),
        lambda: s3.contains_prefix([new_key() for _ in range(20)], timeout_s=20),
        lambda: list(s3.entries()),
    ):
        with pytest.raises(BackendError, match="NoSuchBucket.*'not-there'"):
            call()


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"secret_access_key": "wrong+secret"}, "SignatureDoesNotMatch"),
        ({"access_key_id": "AKwrong"}, "InvalidAccessKeyId"),
    ],
)
def test_wrong_keys_are_refused_by_the_server_and_not_told(open_s3: Open, more: dict[str, str], said: str) -> None:
    s3 = open_s3(**more)
    with pytest.raises(BackendError, match=said) as caught:
        held(s3, new_key(), 64)
    assert not any(secret in str(caught.value) for secret in (*more.values(), *seaweed.ADMIN))


def test_a_reader_reads_and_may_not_write(open_s3: Open, s3: S3Backend) -> None:
    key, data = new_key(), record(2 << 20)
    s3.put(key, data)
    reader = open_s3(access_key_id=seaweed.READER[0], secret_access_key=seaweed.READER[1])
    assert held(reader, key, 2 << 20) == data
    for nbytes in (64, 2 << 20):
        with pytest.raises(BackendError, match="AccessDenied"):
            reader.put(new_key(), record(nbytes))


@pytest.mark.parametrize("what", ["short", "reset body", "reset", "hang up after"])
def test_a_body_or_connection_that_breaks_off_once_is_read_again(s3: S3Backend, proxy: Proxy, what: What) -> None:
    key, data = new_key(), record(NBYTES)
    s3.put(key, data)
    for _ in range(3):
        proxy.faults.append(Fault(what))
        assert held(s3, key, NBYTES) == data
        assert held(s3, key, NBYTES) == data


@pytest.mark.parametrize("what", ["short", "reset body", "reset"])
def test_a_body_that_always_breaks_off_is_a_fault(open_s3: Open, proxy: Proxy, what: What) -> None:
    s3 = open_s3(attempts=2)
    key = new_key()
    s3.put(key, record(NBYTES))
    proxy.seen.clear()
    proxy.always = lambda seen: Fault(what)
    with pytest.raises(BackendUnavailable):
        held(s3, key, NBYTES)
    (result,) = s3.get_many([key], [memoryview(bytearray(NBYTES))], timeout_s=20)
    assert isinstance(result, BackendUnavailable)
    # A reset on a connection that had been idle is taken for its end, which costs no attempt.
    assert proxy.methods() == ["GET"] * (5 if what == "reset" else 4)


@pytest.mark.parametrize("what", ["stall", "stall body", "dribble"])
@pytest.mark.parametrize("nbytes", [NBYTES, 2 << 20])
def test_an_answer_that_does_not_come_in_time_is_a_fault_and_the_next_get_is_right(
    open_s3: Open, proxy: Proxy, what: What, nbytes: int
) -> None:
    s3 = open_s3(timeout_s=0.4, range_nbytes=1 << 20)
    keys = [new_key(), new_key()]
    data = [record(nbytes), record(nbytes)]
    for key, each in zip(keys, data, strict=True):
        open_s3().put(key, each)
    proxy.faults.append(Fault(what))
    started = time.monotonic()
    with pytest.raises(BackendUnavailable, match="no answer in 0.4 s"):
        held(s3, keys[0], nbytes)
    assert time.monotonic() - started < 10.0
    proxy.release.set()
    assert held(s3, keys[1], nbytes) == data[1]
    assert held(s3, keys[0], nbytes) == data[0]


def test_a_connection_that_the_server_closed_while_idle_costs_no_attempt(open_s3: Open, proxy: Proxy) -> None:
    s3 = open_s3(attempts=1)
    key, data = new_key(), record(NBYTES)
    s3.put(key, data)
    for _ in range(3):
        proxy.drop_connections()
        assert held(s3, key, NBYTES) == data


def test_a_connection_is_kept_and_used_again(s3: S3Backend, proxy: Proxy) -> None:
    for _ in range(5):
        key = new_key()
        s3.put(key, record(2 << 20))
        held(s3, key, 2 << 20)
        s3.contains(key)
        s3.remove(key)
    assert {seen.connection for seen in proxy.seen} == {1}


def test_a_record_longer_than_the_buffer_leaves_the_connection_fit_for_nothing_and_the_next_get_right(
    s3: S3Backend,
) -> None:
    key, data = new_key(), record(NBYTES)
    s3.put(key, data)
    for _ in range(3):
        with pytest.raises(ChunkCorrupt):
            held(s3, key, NBYTES - 1)
        assert held(s3, key, NBYTES) == data


def test_answers_that_are_no_http_or_no_listing_are_faults(s3: S3Backend, proxy: Proxy) -> None:
    for body in (b"", b"<html>", b"<a/>", b"<ListBucketResult><Contents/></ListBucketResult>"):
        proxy.faults.append(Fault(status=200, body=body))
        with pytest.raises(BackendError, match="listing"):
            list(s3.entries())
    truncated = b"<ListBucketResult><IsTruncated>true</IsTruncated></ListBucketResult>"
    proxy.faults.append(Fault(status=200, body=truncated))
    with pytest.raises(BackendError, match="more pages"):
        list(s3.entries())


def test_a_full_store_is_full(s3: S3Backend, proxy: Proxy) -> None:
    for fault in (Fault(status=403, code="QuotaExceeded"), Fault(status=507)):
        proxy.faults.append(fault)
        with pytest.raises(BackendFull):
            s3.put(new_key(), record(64))


def test_nothing_listening_is_said_at_once(open_s3: Open) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    s3 = open_s3(endpoint=f"http://127.0.0.1:{port}", timeout_s=20.0)
    started = time.monotonic()
    with pytest.raises(BackendUnavailable, match=f"refused.*'{BUCKET}'.*us-east-1.*127.0.0.1:{port}"):
        s3.contains(new_key())
    with pytest.raises(BackendUnavailable):
        list(s3.entries())
    assert time.monotonic() - started < 10.0


def test_a_black_hole_takes_no_longer_than_the_time_to_connect(open_s3: Open) -> None:
    with socket.socket() as hole:
        hole.bind(("127.0.0.1", 0))
        hole.listen(0)
        port = hole.getsockname()[1]
        # What fills the queue of a listener that accepts nobody: further connections are not answered.
        fillers = [socket.socket() for _ in range(3)]
        for filler in fillers:
            filler.setblocking(False)
            filler.connect_ex(("127.0.0.1", port))
        s3 = open_s3(endpoint=f"http://127.0.0.1:{port}", timeout_s=20.0, connect_timeout_s=0.3)
        started = time.monotonic()
        with pytest.raises(BackendUnavailable, match="no connection in 0.3 s"):
            s3.contains(new_key())
        assert 0.2 < time.monotonic() - started < 10.0
        for filler in fillers:
            filler.close()


def test_a_server_that_goes_and_comes_back_is_used_again(s3: S3Backend, proxy: Proxy) -> None:
    key, data = new_key(), record(NBYTES)
    s3.put(key, data)
    proxy.always = lambda seen: Fault("reset")
    for _ in range(3):
        with pytest.raises(BackendUnavailable):
            held(s3, key, NBYTES)
    proxy.always = lambda seen: None
    assert held(s3, key, NBYTES) == data


def test_messages_hold_nothing_that_the_server_made_up(s3: S3Backend, proxy: Proxy) -> None:
    nasty = "x\r\nInjected: \x1b[31m"
    proxy.faults.append(Fault(status=403, body=f"<Error><Code>{nasty}</Code><Region>{nasty}</Region></Error>".encode()))
    with pytest.raises(BackendError) as caught:
        held(s3, new_key(), 64)
    assert "Injected" not in str(caught.value)
    assert str(caught.value).isprintable()


def test_debug_logs_and_errors_hold_no_secret(open_s3: Open, proxy: Proxy, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    s3 = open_s3(session_token="very-secret-token")
    for fault in (None, Fault(status=403), Fault(status=400, code="ExpiredToken"), Fault("short")):
        if fault is not None:
            proxy.faults.append(fault)
        with pytest.raises(BackendError) as caught:
            held(s3, new_key(), 64)
        texts = [str(caught.value), repr(caught.value), repr(s3.options), caplog.text, repr(s3), str(s3.__dict__)]
        for secret in ("very-secret-token", *seaweed.ADMIN):
            assert not [text for text in texts if secret in text]


def test_plain_text_to_another_host_is_warned_of_once(open_s3: Open, caplog: pytest.LogCaptureFixture) -> None:
    for endpoint in ("http://127.0.0.1:9000", "http://localhost:9000", "http://[::1]:9000", "https://minio:9000"):
        open_s3(endpoint=endpoint)
    assert not caplog.records
    open_s3(endpoint="http://minio:9000")
    assert [r.levelname for r in caplog.records] == ["WARNING"]
    assert "not encrypted" in caplog.text
