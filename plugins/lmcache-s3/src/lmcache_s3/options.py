"""The settings of the backend, checked before anything is sent."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal
from urllib.parse import urlsplit

MiB: Final = 1 << 20
MAX_OBJECT_KEY_NBYTES: Final = 1024
"""What S3 allows for the name of an object."""
RECORD_NAME_NBYTES: Final = len("v1/") + 32 + len("/") + 64
MAX_PUT_NBYTES: Final = 5 << 30
"""What S3 takes in one request."""
MIN_PART_NBYTES: Final = 5 * MiB
MAX_PARTS: Final = 10_000
_BUCKET: Final = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_PREFIX: Final = re.compile(r"[A-Za-z0-9._~=-]+(/[A-Za-z0-9._~=-]+)*/?")
_REGION: Final = re.compile(r"[A-Za-z0-9-]{1,64}")
_DOTS: Final = (".", "..")

StorageClass = Literal[
    "STANDARD", "STANDARD_IA", "ONEZONE_IA", "INTELLIGENT_TIERING", "REDUCED_REDUNDANCY", "GLACIER_IR"
]


@dataclass(frozen=True, slots=True, kw_only=True)
class S3Options:
    """What `options:` of an `s3` tier may hold.  The README says more about each."""

    bucket: str
    """Name of the bucket, which has to exist.  No default."""
    prefix: str = ""
    """What the names of our objects begin with, e.g. "kv/prod".  Default: nothing."""
    endpoint: str | None = None
    """URL of the server, e.g. "https://minio:9000".  Default: Amazon S3 in the region."""
    region: str | None = None
    """Region of the bucket.  Default: the profile's or the environment's, else us-east-1."""
    addressing: Literal["auto", "path", "virtual"] = "auto"
    """Where the bucket stands: in the path or in the host name; "auto": the path where there is an `endpoint`."""
    access_key_id: str = field(default="", repr=False)
    """A fixed access key.  A secret: only as "${VARIABLE}".  Default: what botocore finds."""
    secret_access_key: str = field(default="", repr=False)
    """The secret of that key.  A secret."""
    session_token: str = field(default="", repr=False)
    """The token of a temporary key.  A secret."""
    profile: str | None = None
    """Profile of the AWS configuration files to take credentials and region from."""
    anonymous: bool = False
    """Send requests without a signature, for a bucket that is open to all.  Default false."""
    sign_payload: bool = False
    """Hash what is stored into the signature, at 0.6 CPU-s/GB; without it records have only their own checksum."""
    expected_owner: str | None = None
    """Account that the bucket must belong to, 12 digits; another's bucket of that name is refused."""
    ca_file: Path | None = None
    """PEM file of the authorities to trust instead of the system's."""
    encryption: Literal["AES256", "aws:kms", "aws:kms:dsse"] | None = None
    """Server-side encryption to ask for.  Default: the bucket's own rule."""
    kms_key_id: str | None = None
    """The KMS key for "aws:kms" and "aws:kms:dsse".  Default: the account's."""
    bucket_key: bool = False
    """Ask for an S3 bucket key, which spares calls to KMS.  Default false."""
    storage_class: StorageClass | None = None
    """Storage class to ask for.  Default: the bucket's."""
    skip_existing: bool = True
    """Do not send a record that is there already.  Default true."""
    multipart_threshold_nbytes: int = 128 * MiB
    """Larger records are stored in parts, in parallel.  Default 128MiB."""
    part_nbytes: int = 32 * MiB
    """Length of such a part.  Default 32MiB."""
    range_nbytes: int | None = None
    """Read longer records in ranges of this length, in parallel.  Default: each record in one request."""
    parallel: int = 8
    """Requests at once for one batch, one record in parts or one record in ranges.  Default 8."""
    connections: int = 16
    """Open connections at once, at most.  Default 16."""
    connect_timeout_s: float = 2.0
    """Time for a connection, TLS included; never more than the tier's `timeout`.  Default 2s."""
    attempts: int = 4
    """Tries of one request while the server is overloaded, within the deadline.  Default 4."""

    def __post_init__(self) -> None:
        for problem in (_bucket(self), _prefix(self), _endpoint(self), _credentials(self), _limits(self)):
            if problem:
                raise ValueError(problem)


def _bucket(o: S3Options) -> str:
    if o.bucket.endswith("--x-s3"):
        return (
            f"bucket {o.bucket!r} is an S3 Express directory bucket, which needs sessions that are not supported here"
        )
    if not _BUCKET.fullmatch(o.bucket) or ".." in o.bucket:
        return f"bucket {o.bucket!r} is not a bucket's name: 3 to 63 of a-z 0-9 . -, without s3:// and without a path"
    return ""


def _prefix(o: S3Options) -> str:
    if not o.prefix:
        return ""
    if not _PREFIX.fullmatch(o.prefix) or any(part in _DOTS for part in o.prefix.split("/")):
        return f"prefix {o.prefix!r}: write names of A-Z a-z 0-9 . _ ~ = - with single slashes between them"
    length = len(o.prefix.rstrip("/")) + 1 + RECORD_NAME_NBYTES
    if length > MAX_OBJECT_KEY_NBYTES:
        return f"prefix of {len(o.prefix)} characters makes names of {length}; S3 allows {MAX_OBJECT_KEY_NBYTES}"
    return ""


def _endpoint(o: S3Options) -> str:
    if o.region is not None and not _REGION.fullmatch(o.region):
        return f"region {o.region!r} is not the name of a region, e.g. eu-central-1"
    if o.expected_owner is not None and not re.fullmatch(r"[0-9]{12}", o.expected_owner):
        return f"expected_owner {o.expected_owner!r} is not an account of 12 digits"
    if o.endpoint is None:
        return ""
    try:
        url = urlsplit(o.endpoint)
        port = url.port
    except ValueError as error:
        return f"endpoint is not a URL: {error}"
    if url.username is not None or url.password is not None:
        return "endpoint holds a user or password; credentials go into access_key_id and secret_access_key"
    if url.scheme not in ("http", "https") or not url.hostname or port == 0:
        return f"endpoint {o.endpoint!r} is not a URL like https://minio:9000"
    if url.path not in ("", "/") or url.query or url.fragment:
        return (
            f"endpoint {o.endpoint!r} has more than scheme, host and port; bucket and prefix have settings of their own"
        )
    return ""


def _credentials(o: S3Options) -> str:
    if bool(o.access_key_id) != bool(o.secret_access_key):
        return "access_key_id and secret_access_key go together"
    if o.session_token and not o.access_key_id:
        return "session_token needs access_key_id and secret_access_key"
    if o.access_key_id and (o.profile is not None or o.anonymous):
        return "access_key_id excludes profile and anonymous"
    if o.anonymous and o.profile is not None:
        return "anonymous excludes profile"
    for secret in ("access_key_id", "secret_access_key", "session_token"):
        if re.search(r"[^\x21-\x7e]", getattr(o, secret)):
            return f"{secret} holds a space, a line break or another character that no key has"
    return ""


def _limits(o: S3Options) -> str:
    if o.kms_key_id is not None and o.encryption not in ("aws:kms", "aws:kms:dsse"):
        return "kms_key_id needs encryption aws:kms or aws:kms:dsse"
    if o.kms_key_id is not None and not re.fullmatch(r"[\x21-\x7e]{1,2048}", o.kms_key_id):
        return "kms_key_id is not a key's id, alias or ARN"
    if not MIN_PART_NBYTES <= o.part_nbytes <= MAX_PUT_NBYTES:
        return f"part must be 5MiB to 5GiB, got {o.part_nbytes} bytes"
    if not o.part_nbytes <= o.multipart_threshold_nbytes <= MAX_PUT_NBYTES:
        return (
            f"multipart_threshold must be from part ({o.part_nbytes} bytes) to 5GiB, got {o.multipart_threshold_nbytes}"
        )
    if o.range_nbytes is not None and o.range_nbytes < MiB:
        return f"range must be at least 1MiB, got {o.range_nbytes} bytes"
    for name, least, most in (("parallel", 1, 64), ("connections", 1, 256), ("attempts", 1, 10)):
        if not least <= getattr(o, name) <= most:
            return f"{name} must be {least} to {most}, got {getattr(o, name)}"
    if not 0 < o.connect_timeout_s <= 60:
        return f"connect_timeout must be over 0 and at most 60s, got {o.connect_timeout_s}"
    return ""
