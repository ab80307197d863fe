"""From a URL to a filesystem class and a path: what has to be installed, what it needs, how it publishes a file."""

from __future__ import annotations

import inspect
import ipaddress
import os
import re
from collections.abc import Callable, Mapping
from typing import Any, Final
from urllib.parse import urlsplit

import fsspec  # type: ignore[import-untyped]
from fsspec.implementations.local import LocalFileSystem  # type: ignore[import-untyped]
from fsspec.implementations.memory import MemoryFileSystem  # type: ignore[import-untyped]
from fsspec.registry import known_implementations  # type: ignore[import-untyped]
from fsspec.spec import AbstractFileSystem  # type: ignore[import-untyped]

_PROTOCOL: Final = re.compile(r"([A-Za-z][A-Za-z0-9+._-]*)://")
_PUTS_WHOLE: Final = frozenset(
    {"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "oss", "oci", "ocilake", "tos", "tosfs", "hf", "lakefs", "memory"}
)
"""Stores in which a file appears when all of it is there."""
_PACKAGES: Final = {
    "arrow_hdfs": "pyarrow",
    "dbfs": "requests",
    "hdfs": "pyarrow",
    "http": "aiohttp",
    "https": "aiohttp",
    "root": "fsspec-xrootd",
    "sftp": "paramiko",
    "smb": "smbprotocol",
    "ssh": "paramiko",
    "webhdfs": "requests",
}
"""What to install for filesystems that fsspec brings itself; the others are named after the package they come in."""
_PLAIN_TEXT: Final = frozenset({"ftp", "http", "webhdfs"})


def protocol_of(url: str) -> str:
    """The protocol of a URL; ValueError for one that no record can be stored under."""
    if "::" in url:
        raise ValueError("url: a chain of filesystems (::) would cache or wrap what others write; name the store alone")
    match = _PROTOCOL.match(url)
    if match is None:
        raise ValueError(f"url: expected e.g. gcs://bucket/kv or file:///var/kv, got {url!r}")
    if not url[match.end() :].strip("/"):
        raise ValueError(f"url: {url} names no place; write e.g. {match[1]}://bucket/kv")
    return match[1].lower()


def class_for(protocol: str) -> Any:
    """The filesystem's class; ValueError that says what to install."""
    try:
        return fsspec.get_filesystem_class(protocol)
    except ImportError as error:
        package = package_of(protocol)
        cause = error.__cause__ or error
        raise ValueError(
            f"url: {protocol}:// needs the package {package}: pip install {package} ({type(cause).__name__}: {cause})"
        ) from error
    except ValueError as error:
        raise ValueError(f"url: fsspec knows no {protocol}://, nor does an installed package offer it") from error


def package_of(protocol: str) -> str:
    """The package that a known protocol's filesystem comes in, or needs."""
    if protocol in _PACKAGES:
        return _PACKAGES[protocol]
    top: str = known_implementations[protocol]["class"].partition(".")[0] if protocol in known_implementations else ""
    return f"fsspec[{protocol}]" if top in ("", "fsspec") else top.replace("_", "-")


def missing_arguments(cls: Any, url: str, given: Mapping[str, Any]) -> list[str]:
    """What the class cannot be made without and neither the URL nor the configuration says."""
    known = {**cls._get_kwargs_from_urls(url), **given}
    return [
        name
        for name, parameter in inspect.signature(cls.__init__).parameters.items()
        if name != "self"
        and parameter.default is parameter.empty
        and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        and name not in known
    ]


def arguments_for(cls: Any, protocol: str, url: str, given: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
    """What to make an instance with: from the URL, then the configuration, and the deadline where it has a place."""
    found: dict[str, Any] = {**cls._get_kwargs_from_urls(url), **given}
    if protocol in ("ftp", "sftp", "ssh", "webdav", "dav"):
        found.setdefault("timeout", timeout_s)
    return found


def root_of(cls: Any, url: str) -> str:
    """The path of the URL within its filesystem."""
    root: str = cls._strip_protocol(url)
    return root.rstrip("/")


def is_local(cls: Any) -> bool:
    """Whether its files are those of this machine."""
    return issubclass(cls, LocalFileSystem)


def is_memory(cls: Any) -> bool:
    """Whether its files are in this process."""
    return issubclass(cls, MemoryFileSystem)


def puts_whole(protocol: str) -> bool:
    """Whether nobody sees a file before all of it is there."""
    return protocol in _PUTS_WHOLE


def has_move(cls: Any, protocol: str) -> bool:
    """Whether it renames, rather than copying and removing."""
    own = cls.mv is not AbstractFileSystem.mv
    return own or protocol in ("webdav", "dav") or hasattr(cls, "_mv")


def mover(cls: Any, protocol: str) -> str | Callable[[Any, str, str], None]:
    """The name of the method that renames, or a function that does: over what is there, in one step."""
    if is_local(cls):
        return lambda fs, old, new: os.replace(old, new)  # its mv would move into a directory of that name
    if protocol in ("webdav", "dav"):
        return lambda fs, old, new: fs.client.move(old, new, overwrite=True)  # its mv copies and removes
    return "mv"


def plain_text_host(protocol: str, url: str, arguments: Mapping[str, Any]) -> str | None:
    """The host that records would go to for anyone on the way to read; None where there is no such host."""
    hosts = [urlsplit(url).hostname] if protocol in _PLAIN_TEXT and not arguments.get("tls") else []
    hosts += [urlsplit(v).hostname for v in _texts(arguments) if v.lower().startswith("http://")]
    return next((host for host in hosts if host and not _is_loopback(host)), None)


def _texts(values: Any) -> list[str]:
    if isinstance(values, str):
        return [values]
    if isinstance(values, Mapping):
        values = list(values.values())
    return [text for value in values for text in _texts(value)] if isinstance(values, list | tuple) else []


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")
