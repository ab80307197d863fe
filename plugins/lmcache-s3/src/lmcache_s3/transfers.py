"""One record to and from S3: in one request, or in parts and ranges that go in parallel."""

from __future__ import annotations

import contextlib
import logging
import re
import threading
from dataclasses import dataclass
from typing import Final

from lmcache_core import BackendError, ChunkCorrupt, ChunkKey

from .answers import NotImplementedThere, Passing, error_code, problem, upload_id
from .client import Client, Exchange, Request
from .helpers import Helpers
from .options import MAX_PARTS, S3Options
from .wire import Deadline

log = logging.getLogger(__name__)

_LARGE_NBYTES: Final = 1 << 20
"""From here on S3 is asked first whether it has the record, and says before it is sent whether it takes it."""
_ABORT_S: Final = 1.0
_CONTENT_RANGE: Final = re.compile(r"bytes ([0-9]{1,18})-([0-9]{1,18})/([0-9]{1,18})")


@dataclass(frozen=True, slots=True)
class _Opened:
    """What the first range told of the record; `done` if it was all of it."""

    nbytes: int
    etag: str
    done: bool


class Transfers:
    def __init__(self, options: S3Options, client: Client, helpers: Helpers) -> None:
        self._options = options
        self._client = client
        self._target = client.target
        self._helpers = helpers
        self._conditional = options.skip_existing
        self._lock = threading.Lock()

    def get(self, key: ChunkKey, into: memoryview, deadline: Deadline) -> int | None:
        """Read the record into the front of `into`; its length, or None."""
        length = self._options.range_nbytes
        if length is not None and len(into) > length:
            return self._get_ranges(key, into, length, deadline)
        return self._get_whole(key, into, deadline)

    def put(self, key: ChunkKey, data: memoryview, deadline: Deadline) -> None:
        if self._options.skip_existing and len(data) >= _LARGE_NBYTES and self._is_there(key, deadline):
            return
        if len(data) > self._options.multipart_threshold_nbytes:
            self._put_parts(key, data, deadline)
            return
        conditional = self._conditional
        try:
            self._put_whole(key, data, deadline, conditional)
        except NotImplementedThere:
            if not conditional:
                raise
            with self._lock:
                if self._conditional:
                    log.warning("s3: the server knows no If-None-Match: records are sent again; %s", self._target)
                self._conditional = False
            self._put_whole(key, data, deadline, False)

    def _get_whole(self, key: ChunkKey, into: memoryview, deadline: Deadline) -> int | None:
        def read(exchange: Exchange) -> int | None:
            if exchange.head.status == 404:
                self._check_absent(exchange)
                return None
            return self._read(key, exchange, into)

        return self._client.call(Request("GET", self._target.path(key), (200, 404)), read, deadline)

    def _get_ranges(self, key: ChunkKey, into: memoryview, length: int, deadline: Deadline) -> int | None:
        path = self._target.path(key)

        def open_(exchange: Exchange) -> _Opened | None:
            if exchange.head.status == 404:
                self._check_absent(exchange)
                return None
            if exchange.head.status == 416:
                raise ChunkCorrupt(f"{key!r} has no bytes in S3")
            if exchange.head.status == 200:  # a server without ranges
                return _Opened(self._read(key, exchange, into), "", True)
            start, end, total = _content_range(exchange)
            if total > len(into):
                raise ChunkCorrupt(f"{key!r} has {total} bytes in S3, at most {len(into)} were expected")
            if start != 0 or end != min(length, total) or exchange.head.nbytes != end:
                raise BackendError(f"s3 GET: another range than the one asked for; {self._target}")
            exchange.read_into(into[:end])
            return _Opened(total, exchange.head.headers.get("etag", ""), end == total)

        request = Request("GET", path, (200, 206, 404, 416), headers={"range": f"bytes=0-{length - 1}"})
        opened = self._client.call(request, open_, deadline)
        if opened is None or opened.done:
            return None if opened is None else opened.nbytes
        changed = threading.Event()

        def get(index: int) -> bool:
            first = (index + 1) * length
            part = into[first : min(first + length, opened.nbytes)]

            def read(exchange: Exchange) -> None:
                if exchange.head.status != 206:
                    exchange.text()
                    changed.set()
                    return
                if _content_range(exchange) != (first, first + len(part), opened.nbytes):
                    raise BackendError(f"s3 GET: another range than the one asked for; {self._target}")
                if exchange.head.nbytes != len(part):
                    raise BackendError(f"s3 GET: a range of another length; {self._target}")
                exchange.read_into(part)

            headers = {"range": f"bytes={first}-{first + len(part) - 1}"}
            if opened.etag:
                headers["if-match"] = opened.etag
            self._client.call(Request("GET", path, (206, 404, 412, 416), headers=headers), read, deadline)
            return not changed.is_set()

        self._helpers.each(get, -(-opened.nbytes // length) - 1)
        # Ranges of two objects are never put together: one that was replaced meanwhile is read at once.
        return self._get_whole(key, into, deadline) if changed.is_set() else opened.nbytes

    def _read(self, key: ChunkKey, exchange: Exchange, into: memoryview) -> int:
        nbytes = exchange.head.nbytes
        if nbytes is None:
            raise BackendError(f"s3 GET: the server does not state the length of {key!r}; {self._target}")
        if nbytes > len(into):
            raise ChunkCorrupt(f"{key!r} has {nbytes} bytes in S3, at most {len(into)} were expected")
        exchange.read_into(into[:nbytes])
        return nbytes

    def _check_absent(self, exchange: Exchange) -> None:
        text = exchange.text()
        if error_code(text) == "NoSuchBucket":
            raise problem("GET", exchange.head, text, self._target)

    def _is_there(self, key: ChunkKey, deadline: Deadline) -> bool:
        request = Request("HEAD", self._target.path(key), (200, 404))
        return self._client.call(request, lambda exchange: exchange.head.status == 200, deadline)

    def _put_whole(self, key: ChunkKey, data: memoryview, deadline: Deadline, conditional: bool) -> None:
        headers = self._headers()
        if conditional:
            headers["if-none-match"] = "*"
        if len(data) >= _LARGE_NBYTES:
            headers["expect"] = "100-continue"
        wanted = (200, 412) if conditional else (200,)
        request = Request("PUT", self._target.path(key), wanted, headers=headers, body=data)
        self._client.call(request, lambda exchange: exchange.text(), deadline)

    def _put_parts(self, key: ChunkKey, data: memoryview, deadline: Deadline) -> None:
        path = self._target.path(key)
        start = Request("POST", path, (200,), {"uploads": ""}, self._headers(), memoryview(b""))
        upload = upload_id(self._client.call(start, lambda exchange: exchange.text(), deadline))
        length = max(self._options.part_nbytes, -(-len(data) // MAX_PARTS))
        etags = [""] * -(-len(data) // length)

        def put(index: int) -> bool:
            part = data[index * length : (index + 1) * length]
            query = {"partNumber": str(index + 1), "uploadId": upload}

            def read(exchange: Exchange) -> None:
                exchange.text()
                etags[index] = exchange.head.headers.get("etag", "")

            self._client.call(Request("PUT", path, (200,), query, body=part), read, deadline)
            return True

        try:
            self._helpers.each(put, len(etags))
            self._complete(path, upload, etags, deadline)
        except BaseException:
            abort = Request("DELETE", path, (200, 204, 404), {"uploadId": upload})
            with contextlib.suppress(BackendError):
                self._client.call(abort, lambda exchange: exchange.text(), Deadline.after(_ABORT_S))
            raise

    def _complete(self, path: str, upload: str, etags: list[str], deadline: Deadline) -> None:
        parts = "".join(
            f"<Part><PartNumber>{number}</PartNumber><ETag>{_escaped(etag)}</ETag></Part>"
            for number, etag in enumerate(etags, start=1)
        )
        body = f"<CompleteMultipartUpload>{parts}</CompleteMultipartUpload>".encode()

        def read(exchange: Exchange) -> None:
            text = exchange.text()
            if exchange.head.status == 404 and exchange.tries == 1:
                raise problem("POST", exchange.head, text, self._target)
            # S3 may find out after it has said 200.  A 404 to a repeated request: the first one got through.
            if exchange.head.status == 200 and b"<Error>" in text:
                found = problem("POST", exchange.head, text, self._target)
                raise found if isinstance(found, Passing) else BackendError(str(found))

        request = Request("POST", path, (200, 404), {"uploadId": upload}, body=memoryview(body))
        self._client.call(request, read, deadline)

    def _headers(self) -> dict[str, str]:
        """What a new object is asked to be like."""
        options = self._options
        named = {
            "x-amz-server-side-encryption": options.encryption,
            "x-amz-server-side-encryption-aws-kms-key-id": options.kms_key_id,
            "x-amz-server-side-encryption-bucket-key-enabled": "true" if options.bucket_key else None,
            "x-amz-storage-class": options.storage_class,
        }
        return {"content-type": "application/octet-stream"} | {k: v for k, v in named.items() if v is not None}


def _content_range(exchange: Exchange) -> tuple[int, int, int]:
    """(start, end, total) of a 206, the end not included."""
    found = _CONTENT_RANGE.fullmatch(exchange.head.headers.get("content-range", ""))
    if found is None:
        raise BackendError("s3 GET: a partial answer that does not say which part it is")
    first, last, total = map(int, found.groups())
    return first, last + 1, total


def _escaped(etag: str) -> str:
    return etag.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
