"""Where a record lies below the URL, and which of the files there are records."""

from __future__ import annotations

import os
import re
import secrets
import socket
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Final

from lmcache_core import ChunkKey

FOLDER: Final = "records-v1"
TEMP: Final = "tmp"
_SHARD: Final = re.compile(r"[0-9a-f]{32}")
_RECORD: Final = re.compile(r"([0-9a-f]{32})/([0-9a-f]{2})/([0-9a-f]{64})")
_TIMES: Final = (
    "mtime",
    "LastModified",
    "last_modified",
    "updated",
    "modified",
    "modify",
    "modificationTime",
    "created",
)


def record_path(root: str, key: ChunkKey) -> str:
    """`ROOT/records-v1/<shard>/<two digits>/<digest>`."""
    text = key.text
    return f"{root}/{FOLDER}/{text[:32]}/{text[32:34]}/{text[32:]}"


def temp_path(root: str) -> str:
    """A name that no other writer uses."""
    return f"{root}/{FOLDER}/{TEMP}/{socket.gethostname()[:64]}.{os.getpid()}.{secrets.token_hex(8)}"


def parent(path: str) -> str:
    return path.rpartition("/")[0]


def is_shard(path: str) -> bool:
    """Whether it is the directory of one shard."""
    return _SHARD.fullmatch(path.rstrip("/").rpartition("/")[2]) is not None


def key_of(path: str) -> ChunkKey | None:
    """The key of the record at `path`; None where that is no record of ours."""
    match = _RECORD.fullmatch("/".join(path.rstrip("/").rsplit("/", 3)[-3:]))
    if match is None or not match[3].startswith(match[2]):
        return None
    return ChunkKey(bytes.fromhex(match[1] + match[3]))


def is_file(info: Mapping[str, Any]) -> bool:
    """Whether it is a file itself, no link to one."""
    return info.get("type") == "file" and not info.get("islink")


def stored_at(info: Mapping[str, Any]) -> float:
    """When a file was written, in seconds since the epoch; 0 where its filesystem does not say."""
    for name in _TIMES:
        seconds = _seconds(info.get(name))
        if seconds is not None:
            return seconds
    return 0.0


def _seconds(value: object) -> float | None:
    if isinstance(value, datetime):
        return (value if value.tzinfo else value.replace(tzinfo=UTC)).timestamp()
    if isinstance(value, int | float) and value > 0:
        return value / 1000 if value > 100 * time.time() else float(value)  # HDFS counts milliseconds
    if not isinstance(value, str):
        return None
    try:
        if re.fullmatch(r"\d{14}(\.\d+)?", value):  # FTP
            return datetime.strptime(value[:14], "%Y%m%d%H%M%S").replace(tzinfo=UTC).timestamp()
        return _seconds(datetime.fromisoformat(value))
    except ValueError:
        return None
