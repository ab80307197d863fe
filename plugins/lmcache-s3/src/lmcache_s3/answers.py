"""What S3 says when it does not do what was asked, and its listings; nothing a server sends gets into a message raw."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from lmcache_core import BackendError, BackendFull, BackendUnavailable

from .target import Target
from .wire import Head

_PASSING_STATUS: Final = frozenset((408, 429, 500, 502, 503, 504))
_PASSING_CODES: Final = frozenset(
    (
        "ConditionalRequestConflict", "InternalError", "OperationAborted", "RequestTimeout", "ServiceUnavailable",
        "SlowDown", "ThrottlingException", "TooManyRequests",
    )
)  # fmt: skip
_EXPIRED_CODES: Final = frozenset(("ExpiredToken", "TokenRefreshRequired", "ExpiredTokenException"))
_FULL_CODES: Final = frozenset(
    ("EntityTooLarge", "QuotaExceeded", "XMinioStorageFull", "InsufficientStorage", "InsufficientCapacity")
)
_HINTS: Final = {
    "NoSuchBucket": "there is no such bucket",
    "AccessDenied": "access denied; objects need s3:GetObject, s3:PutObject, s3:DeleteObject, the bucket s3:ListBucket",
    "InvalidAccessKeyId": "the access key is not known there",
    "SignatureDoesNotMatch": "the secret access key is not that of the access key",
    "RequestTimeTooSkewed": "this machine's clock is wrong",
    "PermanentRedirect": "the bucket is in another region or at another endpoint",
    "AuthorizationHeaderMalformed": "the bucket is in another region",
    "NotImplemented": "the server cannot do this",
    "MissingContentSHA256": "the server wants sign_payload: true",
    "XAmzContentSHA256Mismatch": "the server wants sign_payload: true",
}
_BY_STATUS: Final = {301: "PermanentRedirect", 307: "TemporaryRedirect", 403: "AccessDenied", 501: "NotImplemented"}
_CODE: Final = re.compile(rb"<Code>\s*([A-Za-z0-9.]{1,64})\s*</Code>")
_REGION: Final = re.compile(rb"<Region>\s*([a-z0-9-]{1,64})\s*</Region>")
_UPLOAD: Final = re.compile(rb"<UploadId>\s*([^<>\s]{1,1024})\s*</UploadId>")
_SAFE_REGION: Final = re.compile(r"[a-z0-9-]{1,64}")
_REQUEST_ID: Final = re.compile(r"[A-Za-z0-9+/=-]{1,64}")


class Passing(Exception):
    """Trouble that may be over at the next try; `error` is what to raise when there is none."""

    def __init__(self, error: BackendError, *, expired: bool = False) -> None:
        super().__init__(str(error))
        self.error = error
        self.expired = expired


class NotImplementedThere(BackendError):
    """The server does not know something that was asked for."""


def problem(method: str, head: Head, text: bytes, target: Target) -> Exception:
    """The exception for an answer that was not wanted: Passing if trying again can help, else a BackendError."""
    code = error_code(text) or _BY_STATUS.get(head.status, "")
    where = head.headers.get("x-amz-bucket-region", "")
    found = _REGION.search(text)
    region = where if _SAFE_REGION.fullmatch(where) else found[1].decode() if found else ""
    request_id = head.headers.get("x-amz-request-id", "")
    parts = [f"s3 {method}: {head.status} {code}".rstrip()]
    if code in _HINTS:
        parts.append(_HINTS[code])
    if region and region != target.region:
        parts.append(f"the server names region {region!r}")
    parts.append(str(target))
    if _REQUEST_ID.fullmatch(request_id):
        parts.append(f"request {request_id}")
    message = "; ".join(parts)
    if code in _EXPIRED_CODES or (method == "HEAD" and head.status == 400):  # the latter has no body to say why
        return Passing(BackendError(message), expired=True)
    if code in _FULL_CODES or head.status in (413, 507):
        return BackendFull(message)
    if code == "NotImplemented":
        return NotImplementedThere(message)
    if head.status in _PASSING_STATUS or code in _PASSING_CODES:
        return Passing(BackendUnavailable(message))
    if head.status == 307:
        return BackendUnavailable(message)
    return BackendError(message)


def error_code(text: bytes) -> str:
    """The code in an error's body, e.g. "NoSuchKey"; empty where there is none."""
    found = _CODE.search(text)
    return found[1].decode() if found else ""


def upload_id(text: bytes) -> str:
    """Of the answer to the start of a multipart upload."""
    found = _UPLOAD.search(text)
    if found is None:
        raise BackendError("s3: the answer to the start of an upload has no UploadId")
    return found[1].decode()


@dataclass(frozen=True, slots=True)
class Listed:
    """One object of a listing."""

    name: str
    nbytes: int
    stored_at: float


@dataclass(frozen=True, slots=True)
class Page:
    """One page of a listing, in the order of the names; `token` asks for the next one, None after the last."""

    objects: list[Listed]
    token: str | None


def page(text: bytes) -> Page:
    """The answer to ListObjectsV2."""
    try:
        root = ET.fromstring(text)
        objects = [Listed(*parts) for parts in _objects(root)]
    except (ET.ParseError, ValueError, OverflowError) as error:
        raise BackendError("s3: the listing cannot be read") from error
    if _local(root.tag) != "ListBucketResult":
        raise BackendError("s3: the answer to a listing is something else")
    more = _child(root, "IsTruncated") == "true"
    token = _child(root, "NextContinuationToken")
    if more and not token:
        raise BackendError("s3: the listing has more pages and does not say how to get them")
    return Page(objects, token if more else None)


def _objects(root: ET.Element) -> Iterator[tuple[str, int, float]]:
    for element in root:
        if _local(element.tag) != "Contents":
            continue
        fields = {_local(child.tag): child.text or "" for child in element}
        stored_at = datetime.fromisoformat(fields.get("LastModified", "")).timestamp()
        yield fields.get("Key", ""), int(fields.get("Size", "")), stored_at


def _child(root: ET.Element, name: str) -> str:
    return next((child.text or "" for child in root if _local(child.tag) == name), "")


def _local(tag: str) -> str:
    return tag.rpartition("}")[2]
