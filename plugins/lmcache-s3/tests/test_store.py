"""How records lie in a bucket, how existence is found out, and what is not sent."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
from places import BUCKET, Open, boto, held, new_key, options, record
from proxy import Fault, Proxy
from seaweed import Seaweed

from lmcache_core import BackendError, ChunkCorrupt, ChunkKey, Context
from lmcache_s3 import S3Backend

MiB = 1 << 20
MANY = 1005


def test_a_record_is_one_object_named_by_its_key(s3: S3Backend, server: Seaweed, prefix: str) -> None:
    key, data = new_key(), record(70_000)
    s3.put(key, data)
    name = f"{prefix}/v1/{key.shard_id.hex()}/{key.digest.hex()}"
    assert boto(server.url).get_object(Bucket=BUCKET, Key=name)["Body"].read() == data


def test_a_prefix_with_or_without_a_slash_at_its_end_is_the_same_place(open_s3: Open) -> None:
    key, data = new_key(), record(64)
    open_s3(prefix="same/a=b~c").put(key, data)
    assert held(open_s3(prefix="same/a=b~c/"), key, 64) == data
    assert held(open_s3(prefix="same"), key, 64) is None


def test_an_object_name_of_1024_bytes_works_and_a_longer_one_is_refused_when_configured(open_s3: Open) -> None:
    room = 1024 - len("/v1/") - 32 - len("/") - 64
    longest = "/".join(["x" * 200] * 5)[:room]
    s3 = open_s3(prefix=longest)
    key, data = new_key(), record(64)
    s3.put(key, data)
    assert held(s3, key, 64) == data
    assert [entry.key for entry in s3.entries()] == [key]
    assert s3.remove(key)
    with pytest.raises(ValueError, match="1025; S3 allows 1024"):
        open_s3(prefix=longest + "x")


def test_objects_that_are_no_records_are_neither_listed_nor_touched(
    s3: S3Backend, server: Seaweed, prefix: str
) -> None:
    client = boto(server.url)
    key = new_key()
    s3.put(key, record(64))
    names = [f"{prefix}/v1/{'A' * 32}/{'0' * 64}", f"{prefix}/v1/notes.txt", f"{prefix}/v1/{'0' * 32}/{'0' * 63}"]
    for name in (*names, f"{prefix}/other", f"{prefix}-2/v1/{'0' * 32}/{'0' * 64}"):
        client.put_object(Bucket=BUCKET, Key=name, Body=b"mine")
    assert [entry.key for entry in s3.entries()] == [key]
    for name in names:
        assert client.get_object(Bucket=BUCKET, Key=name)["Body"].read() == b"mine"


@pytest.fixture(scope="module")
def large(server: Seaweed) -> tuple[str, list[ChunkKey]]:
    """A prefix with one shard of more records than a page of a listing has."""
    prefix, shard = f"large-{os.urandom(6).hex()}", os.urandom(16)
    keys = [new_key(shard) for _ in range(MANY)]
    with S3Backend(options(server.url, prefix), Context()) as backend:
        results = backend.put_many(keys, [record(16)] * MANY, timeout_s=60)
    assert results == [None] * MANY
    return prefix, keys


def test_the_listing_goes_on_over_pages(open_s3: Open, proxy: Proxy, large: tuple[str, list[ChunkKey]]) -> None:
    prefix, keys = large
    s3 = open_s3(prefix=prefix)
    assert sorted(entry.key for entry in s3.entries()) == sorted(keys)
    assert sorted(entry.key for entry in s3.entries(keys[0].shard_id)) == sorted(keys)
    assert list(s3.entries(os.urandom(16))) == []
    assert proxy.methods() == ["GET"] * 5


def test_a_later_page_that_fails_is_a_fault_and_no_short_listing(
    open_s3: Open, proxy: Proxy, large: tuple[str, list[ChunkKey]]
) -> None:
    s3 = open_s3(prefix=large[0])
    proxy.always = lambda seen: Fault(status=403) if "continuation-token" in seen.path else None
    with pytest.raises(BackendError, match="403"):
        list(s3.entries())


def test_existence_of_512_keys_takes_a_page_or_two(
    open_s3: Open, proxy: Proxy, large: tuple[str, list[ChunkKey]]
) -> None:
    prefix, keys = large
    s3 = open_s3(prefix=prefix)
    assert s3.contains_prefix(keys[:512], timeout_s=20) == 512
    absent = [*keys[:300], new_key(keys[0].shard_id), *keys[300:511]]
    assert s3.contains_prefix(absent, timeout_s=20) == 300
    assert proxy.methods() == ["GET"] * 4


def test_a_few_keys_of_a_large_shard_are_asked_for_one_by_one(
    open_s3: Open, proxy: Proxy, large: tuple[str, list[ChunkKey]]
) -> None:
    prefix, keys = large
    s3 = open_s3(prefix=prefix)
    assert s3.contains_prefix(keys[:3], timeout_s=20) == 3
    assert proxy.methods() == ["HEAD"] * 3
    # A page shows that the shard is larger than it is worth listing; what lies beyond it is asked for.
    last = sorted(keys)[-12:]
    proxy.seen.clear()
    assert s3.contains_prefix(last, timeout_s=20) == 12
    assert proxy.methods().count("GET") == 1
    assert proxy.methods().count("HEAD") >= 5
    proxy.seen.clear()
    absent = [*last[:5], new_key(keys[0].shard_id), *last[5:]]
    assert s3.contains_prefix(absent, timeout_s=20) == 5
    assert set(proxy.methods()) == {"HEAD"}


def test_a_hole_ends_the_questions(open_s3: Open, proxy: Proxy) -> None:
    s3 = open_s3(parallel=2)
    keys = [new_key() for _ in range(60)]
    s3.put(keys[0], record(16))
    proxy.seen.clear()
    assert s3.contains_prefix(keys, timeout_s=20) == 1
    assert proxy.methods().count("HEAD") <= 5


def test_a_large_record_that_is_there_is_not_sent_again(open_s3: Open, proxy: Proxy) -> None:
    key, data = new_key(), record(2 * MiB)
    open_s3().put(key, data)
    proxy.seen.clear()
    open_s3().put(key, data)
    assert [(seen.method, seen.body_nbytes) for seen in proxy.seen] == [("HEAD", 0)]
    proxy.seen.clear()
    open_s3(skip_existing=False).put(key, data)
    assert [(seen.method, seen.body_nbytes) for seen in proxy.seen] == [("PUT", len(data))]


def test_a_record_that_another_stores_meanwhile_is_stored_once(open_s3: Open, proxy: Proxy) -> None:
    key, data = new_key(), record(2 * MiB)
    s3 = open_s3()
    s3.put(key, data)
    proxy.seen.clear()
    proxy.faults.append(Fault(status=404))  # as seen before the other had finished
    s3.put(key, data)
    assert [seen.headers.get("if-none-match") for seen in proxy.seen] == [None, "*"]
    assert held(s3, key, len(data)) == data


def test_a_server_without_if_none_match_gets_the_record_without_it(
    open_s3: Open, proxy: Proxy, caplog: pytest.LogCaptureFixture
) -> None:
    s3 = open_s3()
    proxy.always = lambda seen: Fault(status=501, code="NotImplemented") if "if-none-match" in seen.headers else None
    keys, data = [new_key() for _ in range(3)], record(64)
    for key in keys:
        s3.put(key, data)
        assert held(s3, key, 64) == data
    assert proxy.methods() == ["PUT", "PUT", "GET", "PUT", "GET", "PUT", "GET"]
    assert len(caplog.records) == 1


def test_a_server_that_does_not_say_continue_gets_the_record_all_the_same(s3: S3Backend, proxy: Proxy) -> None:
    key, data = new_key(), record(2 * MiB)
    proxy.always = lambda seen: Fault("no 100")
    s3.put(key, data)
    assert held(s3, key, len(data)) == data


def test_a_refused_put_does_not_send_its_record(s3: S3Backend, proxy: Proxy) -> None:
    proxy.always = lambda seen: Fault(status=403, code="AccessDenied") if seen.method == "PUT" else None
    with pytest.raises(BackendError, match="AccessDenied"):
        s3.put(new_key(), record(8 * MiB))
    assert [seen.body_nbytes for seen in proxy.seen] == [0, 0]


def test_a_large_record_goes_in_parts_and_comes_in_ranges(
    open_s3: Open, proxy: Proxy, server: Seaweed, prefix: str
) -> None:
    s3 = open_s3(part_nbytes=5 * MiB, multipart_threshold_nbytes=6 * MiB, range_nbytes=3 * MiB)
    key, data = new_key(), record(17 * MiB + 123)
    s3.put(key, data)
    assert proxy.methods() == ["HEAD", "POST", "PUT", "PUT", "PUT", "PUT", "POST"]
    assert boto(server.url).list_multipart_uploads(Bucket=BUCKET, Prefix=prefix).get("Uploads", []) == []
    proxy.seen.clear()
    assert held(s3, key, len(data) + 5) == data
    assert len(proxy.seen) == 6
    assert all("range" in seen.headers for seen in proxy.seen)
    assert {seen.headers.get("if-match") for seen in proxy.seen[1:]} != {None}
    with pytest.raises(ChunkCorrupt):
        held(s3, key, len(data) - 1)
    proxy.seen.clear()
    s3.put(key, data)
    assert proxy.methods() == ["HEAD"]


def test_an_upload_in_parts_that_fails_leaves_no_parts(
    open_s3: Open, proxy: Proxy, server: Seaweed, prefix: str
) -> None:
    s3 = open_s3(part_nbytes=5 * MiB, multipart_threshold_nbytes=5 * MiB)
    key = new_key()
    for bad in ("partNumber=2", "uploadId="):
        proxy.always = lambda seen, bad=bad: (  # type: ignore[misc]
            Fault(status=403) if bad in seen.path and seen.method != "DELETE" else None
        )
        with pytest.raises(BackendError, match="403"):
            s3.put(key, record(11 * MiB))
    proxy.always = lambda seen: None
    assert boto(server.url).list_multipart_uploads(Bucket=BUCKET, Prefix=prefix).get("Uploads", []) == []
    assert not s3.contains(key)


def test_a_completion_that_fails_after_it_said_200_is_a_fault(open_s3: Open, proxy: Proxy) -> None:
    s3 = open_s3(part_nbytes=5 * MiB, multipart_threshold_nbytes=5 * MiB, attempts=2)
    error = b"<Error><Code>InternalError</Code></Error>"
    fault = Fault(status=200, body=error)
    key, data = new_key(), record(6 * MiB)
    completions = iter([fault, None])
    proxy.always = lambda seen: next(completions) if seen.method == "POST" and "uploadId" in seen.path else None
    s3.put(key, data)
    assert held(s3, key, len(data)) == data


@pytest.mark.parametrize("replaced", ["other bytes", "gone"])
def test_ranges_of_two_objects_are_never_put_together(
    open_s3: Open, proxy: Proxy, server: Seaweed, prefix: str, replaced: str
) -> None:
    s3 = open_s3(range_nbytes=MiB, parallel=1)
    key, old, new = new_key(), record(3 * MiB), record(3 * MiB)
    s3.put(key, old)
    name = f"{prefix}/v1/{key.shard_id.hex()}/{key.digest.hex()}"
    asked: list[str] = []

    def replace_after_the_first_range(seen: object) -> None:
        asked.append("")
        if len(asked) == 2:
            with contextlib.closing(boto(server.url)) as client:
                client.delete_object(Bucket=BUCKET, Key=name)
                if replaced != "gone":
                    client.put_object(Bucket=BUCKET, Key=name, Body=bytes(new))

    proxy.always = replace_after_the_first_range
    got = held(s3, key, 3 * MiB)
    assert got == (None if replaced == "gone" else new)


def test_a_range_that_was_not_asked_for_is_a_fault(open_s3: Open, proxy: Proxy) -> None:
    s3 = open_s3(range_nbytes=MiB, parallel=1)
    key, data = new_key(), record(4 * MiB)
    s3.put(key, data)
    proxy.always = lambda seen: None if seen.headers.get("range", "").startswith("bytes=0-") else Fault("first bytes")
    with pytest.raises(BackendError, match="another range"):
        held(s3, key, len(data))


def test_what_new_objects_are_to_be_like_is_asked_for(open_s3: Open, proxy: Proxy) -> None:
    s3 = open_s3(
        encryption="aws:kms", kms_key_id="alias/kv", bucket_key=True, storage_class="STANDARD_IA",
        expected_owner="123456789012",
    )  # fmt: skip
    proxy.always = lambda seen: Fault(status=200)
    s3.put(new_key(), record(64))
    headers = proxy.seen[0].headers
    assert headers["x-amz-server-side-encryption"] == "aws:kms"
    assert headers["x-amz-server-side-encryption-aws-kms-key-id"] == "alias/kv"
    assert headers["x-amz-server-side-encryption-bucket-key-enabled"] == "true"
    assert headers["x-amz-storage-class"] == "STANDARD_IA"
    assert headers["x-amz-expected-bucket-owner"] == "123456789012"
    signed = headers["authorization"].partition("SignedHeaders=")[2].partition(",")[0].split(";")
    assert {name for name in headers if name.startswith("x-amz-")} <= set(signed)
    held(s3, new_key(), 64)
    assert "x-amz-server-side-encryption" not in proxy.seen[1].headers
    assert proxy.seen[1].headers["x-amz-expected-bucket-owner"] == "123456789012"


def test_encrypted_records_come_back_from_a_real_server(open_s3: Open) -> None:
    s3 = open_s3(encryption="AES256")
    key, data = new_key(), record(300_000)
    s3.put(key, data)
    assert held(s3, key, len(data)) == data


def test_an_open_connection_per_call_and_no_more_than_allowed(open_s3: Open, proxy: Proxy) -> None:
    s3 = open_s3(connections=2, parallel=8)
    keys, data = [new_key() for _ in range(40)], record(30_000)
    assert s3.put_many(keys, [data] * 40, timeout_s=30) == [None] * 40
    assert len({seen.connection for seen in proxy.seen}) <= 2


def test_a_forked_child_reads_with_connections_of_its_own(server: Seaweed, prefix: str, tmp_path: Path) -> None:
    program = f"""
import os, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from places import held, new_key, options, record
from lmcache_core import Context
from lmcache_s3 import S3Backend
backend = S3Backend(options({server.url!r}, {prefix!r}), Context())
keys, data = [new_key() for _ in range(9)], record(100_000)
assert backend.put_many(keys, [data] * 9, timeout_s=20) == [None] * 9
child = os.fork()
into = [memoryview(bytearray(100_000)) for _ in keys]
for _ in range(3):
    assert backend.get_many(keys, into, timeout_s=20) == [100_000] * 9
    assert all(view == data for view in into)
backend.close()
if not child:
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
