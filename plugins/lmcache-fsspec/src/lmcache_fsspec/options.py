"""The settings of the backend: a URL, what its filesystem takes, and how a record is published."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal
from urllib.parse import urlsplit

from lmcache_core import RawOptions

from .locating import class_for, has_move, missing_arguments, protocol_of, puts_whole

MAX_CONNECTIONS: Final = 64
_SECRET: Final = re.compile(
    r"(^|_)(password|passwd|passphrase|secret|token|sas|credentials?|connection_string"
    r"|(account|secret|access|api|private|client|session)_(key|token|secret))$"
)
_NO_SECRETS: Final = frozenset({"anon", "google_default", "cache", "cloud", "browser"})
"""Values of `token` that say where to find credentials rather than being one."""
_NUMBER: Final = re.compile(r"-?(0|[1-9][0-9]{0,17})")
_DECIMAL: Final = re.compile(r"-?(0|[1-9][0-9]{0,17})\.[0-9]{1,17}")


@dataclass(frozen=True, slots=True, kw_only=True)
class FsspecOptions:
    """Settings of the fsspec backend."""

    url: str
    """Where the records go, e.g. "gcs://bucket/kv".  Required."""
    storage: RawOptions = field(default_factory=RawOptions)
    """Keyword arguments of the filesystem's class.  Default {}."""
    secrets: RawOptions = field(default_factory=RawOptions, repr=False)
    """More keyword arguments, each value from `"${VARIABLE}"`.  Default {}."""
    publish: Literal["auto", "put", "move"] = "auto"
    """How a record appears whole: "put" in one call, "move" under another name first.  Default "auto"."""
    connections: int = field(default=4, metadata={"measure": "threads"})
    """Operations at the same time, 1 to 64.  Default 4."""

    def __post_init__(self) -> None:
        # A ValueError here is reported with the file and line of the options.
        protocol = protocol_of(self.url)
        if urlsplit(self.url).password is not None:
            raise ValueError('url: has a password in it; write secrets: {password: "${VARIABLE}"} instead')
        if self.publish not in ("auto", "put", "move"):
            raise ValueError(f"publish: must be auto, put or move, got {self.publish!r}")
        if not 1 <= self.connections <= MAX_CONNECTIONS:
            raise ValueError(f"connections: must be 1 to {MAX_CONNECTIONS}, got {self.connections}")
        for path, node in _scalars(self.storage.table):
            if _is_secret(path.rpartition(".")[2], node.value):
                raise ValueError(f'storage.{path}: is a secret; write it under secrets, as "${{VARIABLE}}"')
        for path, node in _scalars(self.secrets.table):
            if node.in_file and not node.is_null:
                raise ValueError(f'secrets.{path}: must not stand in a file; write "${{VARIABLE}}" and set it')
        cls = class_for(protocol)
        missing = missing_arguments(cls, self.url, self.arguments())
        if missing:
            raise ValueError(f"storage: {protocol}:// also needs {', '.join(missing)}")
        if self.publish == "move" and not has_move(cls, protocol):
            raise ValueError(f"publish: the filesystem of {protocol}:// has no move of its own; write put or auto")
        if self.publish == "auto" and not puts_whole(protocol) and not has_move(cls, protocol):
            raise ValueError(
                f"url: nothing is known of {protocol}:// that makes a record appear whole; if it shows a file only "
                "when all of it is there, write publish: put"
            )

    def arguments(self) -> dict[str, Any]:
        """`storage` and `secrets` together, as Python values."""
        found: dict[str, Any] = {**_plain(self.storage.table), **_plain(self.secrets.table)}
        return found

    def hidden(self) -> list[str]:
        """The texts that no message may contain."""
        return [str(node.value) for _, node in _scalars(self.secrets.table) if not node.is_null]


def _is_secret(name: str, value: object) -> bool:
    if _SECRET.search(name) is None or not isinstance(value, str):
        return False
    return value not in _NO_SECRETS and not value.startswith(("/", "~"))


def _scalars(node: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every single value below `node`, with its path."""
    items = getattr(node, "items", None)
    if items is None:
        yield path, node
    elif isinstance(items, Mapping):
        for key, item in items.items():
            yield from _scalars(item, f"{path}.{key}" if path else key)
    else:
        for item in items:
            yield from _scalars(item, path)


def _plain(node: Any, name: str = "") -> Any:
    """The Python value of a node of the configuration: text, unless it is an unquoted number, true, false or null."""
    items = getattr(node, "items", None)
    if isinstance(items, Mapping):
        return {key: _plain(item, key) for key, item in items.items()}
    if items is not None:
        values = [_plain(item) for item in items]
        return tuple(values) if name == "auth" else values  # HTTP clients take a pair for nothing but a tuple
    value = node.value
    if node.is_null:
        return None
    if not isinstance(value, str) or (node.in_file and not node.plain) or node.literal is not None:
        return value
    if value in ("true", "false"):
        return value == "true"
    if _NUMBER.fullmatch(value):
        return int(value)
    return float(value) if _DECIMAL.fullmatch(value) else value
