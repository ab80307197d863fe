"""Our signatures are those of botocore, for every kind of request that is sent."""

from __future__ import annotations

import datetime
from typing import Any
from unittest import mock
from urllib.parse import parse_qsl

import botocore.auth
import pytest
from botocore.awsrequest import AWSRequest
from botocore.credentials import ReadOnlyCredentials
from places import new_key

from lmcache_s3 import S3Options
from lmcache_s3.signing import request_head
from lmcache_s3.target import Target

NOW = 1_900_000_000.0
KEYS = ReadOnlyCredentials("AKIDEXAMPLE", "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY", None)
ROLE = ReadOnlyCredentials("ASIAEXAMPLE", "other/secret", "token/with+signs==")


@pytest.mark.parametrize("credentials", [KEYS, ROLE], ids=["keys", "role"])
@pytest.mark.parametrize("sign_payload", [False, True])
@pytest.mark.parametrize(
    ("method", "prefix", "query", "headers", "body"),
    [
        ("GET", "", {}, {}, None),
        ("GET", "a=b/c~d", {}, {"range": "bytes=0-9", "if-match": '"x"'}, None),
        ("PUT", "kv", {}, {"x-amz-storage-class": "STANDARD_IA", "expect": "100-continue"}, b"body"),
        ("PUT", "kv", {"uploadId": "a/b+c=~", "partNumber": "10"}, {}, b"x" * 1000),
        ("POST", "kv", {"uploads": ""}, {"content-type": "application/octet-stream"}, b""),
        ("GET", "kv", {"list-type": "2", "prefix": "kv/v1/", "continuation-token": "1/+= ü"}, {}, None),
    ],
)
@pytest.mark.parametrize("endpoint", ["https://minio:9000", "http://[::1]:80", "https://s3.example.com"])
def test_signatures_agree_with_botocore(
    credentials: Any, sign_payload: bool, method: str, prefix: str, query: Any, headers: Any, body: Any, endpoint: str
) -> None:
    target = Target.of(
        S3Options(bucket="kv-cache", prefix=prefix, endpoint=endpoint, region="eu-west-1", anonymous=True)
    )
    view = None if body is None else memoryview(body)
    head = request_head(
        target, credentials, method, target.path(new_key()), query=query, headers=headers, body=view,
        sign_payload=sign_payload, now=NOW,
    ).decode()  # fmt: skip
    first, *lines = head.rstrip().split("\r\n")
    sent = dict(line.split(": ", 1) for line in lines)
    ours = sent.pop("authorization")
    signed = ours.partition("SignedHeaders=")[2].partition(",")[0].split(";")
    path, _, asked = first.split()[1].partition("?")
    assert dict(parse_qsl(asked, keep_blank_values=True)) == query
    request = AWSRequest(method, target.url + path, {name: sent[name] for name in signed}, params=query)
    with mock.patch.object(botocore.auth, "get_current_datetime") as clock:
        clock.return_value = datetime.datetime.fromtimestamp(NOW, datetime.UTC)
        auth = botocore.auth.S3SigV4Auth(credentials, "s3", "eu-west-1")
        auth.payload = lambda request: sent["x-amz-content-sha256"]
        auth.add_auth(request)
    assert request.headers["Authorization"] == ours
    assert request.headers["X-Amz-Date"] == sent["x-amz-date"]
