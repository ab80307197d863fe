"""Requests as bytes, signed with AWS Signature Version 4.

botocore has a signer too, which writes session tokens into its debug log; tests hold both to the same signatures.
"""

from __future__ import annotations

import functools
import hashlib
import hmac
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final
from urllib.parse import quote

from .target import Target

if TYPE_CHECKING:
    from botocore.credentials import ReadOnlyCredentials

UNSIGNED: Final = "UNSIGNED-PAYLOAD"
_ALGORITHM: Final = "AWS4-HMAC-SHA256"
_EMPTY: Final = hashlib.sha256(b"").hexdigest()
_SAFE: Final = "-_.~"


def request_head(
    target: Target,
    credentials: ReadOnlyCredentials | None,
    method: str,
    path: str,
    *,
    query: Mapping[str, str],
    headers: Mapping[str, str],
    body: memoryview | None,
    sign_payload: bool,
    now: float | None = None,
) -> bytes:
    """Request line and headers, with the blank line after them; `path` is quoted already, names are in lower case."""
    encoded = "&".join(f"{quote(k, safe=_SAFE)}={quote(v, safe=_SAFE)}" for k, v in sorted(query.items()))
    sent = {"host": target.authority, **headers}
    if body is not None:
        sent["content-length"] = str(len(body))
    if credentials is not None:
        digest = _EMPTY
        if body is not None and len(body):
            digest = hashlib.sha256(body).hexdigest() if sign_payload else UNSIGNED
        _sign(sent, target.region, credentials, method, path, encoded, digest, time.time() if now is None else now)
    lines = [f"{method} {path}{'?' if encoded else ''}{encoded} HTTP/1.1"]
    lines += [f"{name}: {value}" for name, value in sent.items()]
    return "\r\n".join([*lines, "accept-encoding: identity", "", ""]).encode("latin-1")


def _sign(
    sent: dict[str, str],
    region: str,
    credentials: ReadOnlyCredentials,
    method: str,
    path: str,
    query: str,
    digest: str,
    now: float,
) -> None:
    """Add to the headers `sent` what S3 wants to see of a signed request."""
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(now))
    sent["x-amz-date"] = stamp
    sent["x-amz-content-sha256"] = digest
    if credentials.token:
        sent["x-amz-security-token"] = credentials.token
    signed = sorted(name for name in sent if name == "host" or name.startswith("x-amz-"))
    listed = ";".join(signed)
    canonical = "\n".join(
        [method, path or "/", query, *(f"{name}:{sent[name]}" for name in signed), "", listed, digest]
    )
    scope = f"{stamp[:8]}/{region}/s3/aws4_request"
    text = "\n".join([_ALGORITHM, stamp, scope, hashlib.sha256(canonical.encode()).hexdigest()])
    signature = hmac.new(_day_key(credentials.secret_key, stamp[:8], region), text.encode(), hashlib.sha256).hexdigest()
    sent["authorization"] = (
        f"{_ALGORITHM} Credential={credentials.access_key}/{scope}, SignedHeaders={listed}, Signature={signature}"
    )


@functools.lru_cache(maxsize=8)
def _day_key(secret: str, day: str, region: str) -> bytes:
    key = b"AWS4" + secret.encode()
    for part in (day, region, "s3", "aws4_request"):
        key = hmac.new(key, part.encode(), hashlib.sha256).digest()
    return key
