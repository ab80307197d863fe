"""The directory of a disk store: named, made, opened, and what is wrong with it said at once."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from ..errors import ConfigError
from ._files import close_fd, open_directory

VERSION_DIR: Final = "v1"


def root_path(path: str) -> Path:
    if not isinstance(path, str) or not path or "\0" in path:
        raise ConfigError(f"disk: path must be the name of a directory, got {path!r}")
    root = Path(path)
    if path.startswith("~"):
        try:
            root = root.expanduser()
        except RuntimeError as error:
            raise ConfigError(f"disk: path {path!r}: {error}") from error
    if not root.is_absolute():
        raise ConfigError(f"disk: path must be absolute or start with ~, got {path!r}")
    return root


def open_version_dir(root: Path) -> int:
    """Create what is missing and return a descriptor of `root/v1`; nothing on the way from `root` may be a link."""
    root.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        root.mkdir(0o700)
    fd = open_directory(str(root), -1)
    try:
        with contextlib.suppress(FileExistsError):
            os.mkdir(VERSION_DIR, 0o700, dir_fd=fd)
        return open_directory(VERSION_DIR, fd)
    finally:
        close_fd(fd)


@contextlib.contextmanager
def naming(root: Path) -> Iterator[None]:
    """Trouble at open is a ConfigError that names the directory and the cause."""
    try:
        yield
    except OSError as error:
        cause = error.strerror or str(error)
        if os.path.islink(root):
            cause = "it is a symbolic link; name the directory itself"
        raise ConfigError(f"disk: cannot use {root}: {cause}") from error
