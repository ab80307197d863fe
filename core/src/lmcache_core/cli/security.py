"""What `lmc doctor` finds that lets others in: secrets in files, open modes, plain text over a network."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from ipaddress import ip_address
from pathlib import Path
from typing import Final

from lmcache_core.config import CacheConfig, find_config
from lmcache_core.diagnosis import Diagnosis
from lmcache_core.nodes import Node, Scalar, Sequence, Table
from lmcache_core.settings import is_secret_name

_PASSWORD: Final = re.compile(r"://[^/@\s:]*:[^@/\s]+@")
_PLAIN: Final = frozenset(("redis", "valkey", "http", "tcp", "ftp", "ws", "memcached", "webhdfs", "mongodb", "nats"))
_URL: Final = re.compile(r"([a-z][a-z0-9+.-]*)://([^/?#\s]+)")
_OTHERS: Final = 0o007


def security(config: CacheConfig | None, path: Path | None) -> Iterator[Diagnosis]:
    """Findings only for what is there; nothing wrong is one line."""
    found = find_config(path, os.environ)
    said = list(_of_file(found)) if found is not None else []
    if config is not None:
        said += _of_socket(config)
        if config.trace.path:
            what = "the prompts of every request" if config.trace.tokens else "hashes of every request's prompt"
            text = f"trace: {what} are written to {config.trace.path}"
            said.append(Diagnosis("note", text, "leave it out when you have seen what you wanted, and remove the file"))
        for tier in config.tiers:
            said += _of_options(tier.options.table, f"tiers.{tier.name}.options")
    if os.getuid() == 0:
        said.append(
            Diagnosis("note", "this runs as root", "a user of its own is enough for the daemon and for engines")
        )
    yield from said or [
        Diagnosis("ok", "no secret in the file, no mode too open, nothing in plain text to another host")
    ]


def _of_file(path: Path) -> Iterator[Diagnosis]:
    try:
        status = path.stat()
    except OSError:
        return  # said by the section on the configuration
    mode = stat.S_IMODE(status.st_mode)
    if mode & 0o022:
        yield Diagnosis(
            "error" if mode & 0o002 else "warning",
            f"others may write to {path} (mode {mode:04o}), and so have code of theirs run (plugins.inline)",
            f"chmod go-w {path}",
        )
    if status.st_uid not in (os.getuid(), 0):
        yield Diagnosis("warning", f"{path} belongs to user {status.st_uid}", "use a file of your own, or of root")


def _of_socket(config: CacheConfig) -> Iterator[Diagnosis]:
    path = config.daemon_socket
    remedy = "server.socket_mode 0600, or 0660 with socket_group; server.allowed_uids says who may connect"
    if config.server.mode & _OTHERS:
        yield Diagnosis("warning", f"server.socket_mode {config.server.socket_mode} lets every user knock", remedy)
    try:
        mode = stat.S_IMODE(path.lstat().st_mode)
        folder = path.parent.stat()
    except OSError:
        return
    if mode & _OTHERS and not config.server.mode & _OTHERS:
        yield Diagnosis("warning", f"{path} is open to every user (mode {mode:04o})", remedy)
    if folder.st_mode & 0o002 and not folder.st_mode & stat.S_ISVTX:
        text = f"every user may replace {path}: its folder is open to all"
        yield Diagnosis("error", text, f"chmod o-w {path.parent}")
    if folder.st_uid not in (os.getuid(), 0):
        yield Diagnosis(
            "warning", f"{path.parent} belongs to user {folder.st_uid}", "name a socket in a folder of yours"
        )


def _of_options(node: Node, path: str, name: str = "") -> Iterator[Diagnosis]:
    if isinstance(node, Table):
        for key, item in node.items.items():
            yield from _of_options(item, f"{path}.{key}", key)
    elif isinstance(node, Sequence):
        for index, item in enumerate(node.items):
            yield from _of_options(item, f"{path}[{index}]", name)
    elif isinstance(node.value, str) and node.value:
        yield from _of_value(node, path, name)


def _of_value(node: Scalar, path: str, name: str) -> Iterator[Diagnosis]:
    text = str(node.value)
    written = node.literal if node.literal is not None else text if node.in_file else ""
    clear = node.in_file and is_secret_name(name)
    if clear or any("${" not in match[0] for match in _PASSWORD.finditer(written)):
        yield Diagnosis(
            "error",
            f"{node.source}: {path}: a secret stands in the file",
            'write "${NAME}" there and set the variable; then change the secret, since it has been in a file',
        )
    hosts = [host for scheme, authority in _URL.findall(text) if scheme in _PLAIN for host in _remote(authority)]
    if hosts:
        yield Diagnosis(
            "warning",
            f"{node.source}: {path}: plain text to {', '.join(hosts)}: whoever is on the way reads and changes KV",
            "TLS (rediss://, https://), or a network that only these machines are on",
        )


def _remote(authority: str) -> Iterator[str]:
    """The hosts of a URL that are not this machine."""
    for one in authority.rpartition("@")[2].split(","):
        host = one[1 : one.find("]")] if one.startswith("[") else one.partition(":")[0]
        try:
            local = ip_address(host).is_loopback
        except ValueError:
            local = host.casefold() == "localhost" or host.casefold().endswith(".localhost")
        if host and not local:
            yield host
