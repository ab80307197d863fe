"""Which paths a device copies by: measured by `lmc bench device`, kept in a file for the same hardware and versions."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from .device import SupportsPaths
from .errors import ConfigError, DeviceError

log = logging.getLogger(__name__)
_MOST_NBYTES: Final = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The fastest path for each direction, and what it was measured on."""

    gather: str
    scatter: str
    measured_on: str
    """The date."""
    identity: dict[str, str]

    def __str__(self) -> str:
        return f"gather by {self.gather}, scatter by {self.scatter}, as measured on {self.measured_on}"


def choice_file(name: str, environ: Mapping[str, str] = os.environ) -> Path:
    """Where the choice for the device of this entry-point name is kept."""
    base = Path(environ.get("XDG_CACHE_HOME") or "")
    if not base.is_absolute():
        try:
            base = Path.home() / ".cache"
        except RuntimeError as error:
            raise ConfigError("no home folder to keep the choice in: set XDG_CACHE_HOME") from error
    word = name.partition("@")[0]
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", word):
        raise ConfigError(f"no choice is kept for a device that is called {name!r}")
    return base / "lmcache" / f"device-{word}.json"


def find(name: str, kind: Any, environ: Mapping[str, str] = os.environ) -> Choice | str | None:
    """The choice that holds for this device class, or why the one that is kept does not; None where there is none."""
    try:
        path = choice_file(name, environ)
        with path.open("rb") as file:
            content = file.read(_MOST_NBYTES)
    except (FileNotFoundError, NotADirectoryError, ConfigError):
        return None
    except OSError as error:
        return f"{path} cannot be read: {error.strerror}"
    try:
        choice = msgspec.json.decode(content, type=Choice)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return f"{path} is broken"
    identity = dict(kind.identity())
    if choice.identity != identity:
        parts = sorted(key for key in {*identity, *choice.identity} if identity.get(key) != choice.identity.get(key))
        return f"{path} was measured with another {', '.join(parts)}"
    unheard = {choice.gather, choice.scatter} - set(kind.path_names)
    return f"{path} names a path that there is not: {', '.join(sorted(unheard))}" if unheard else choice


def keep(name: str, choice: Choice, environ: Mapping[str, str] = os.environ) -> Path:
    """Write the choice for the next start; whoever reads meanwhile has the old one or the new one."""
    path = choice_file(name, environ)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)  # mode 0600
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(choice)) + b"\n")
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
    return path


def apply(name: str, device: object) -> None:
    """Have a device that is being opened copy by what was measured for it, and say so in one line."""
    if not isinstance(device, SupportsPaths):
        return
    found = find(name, device)
    if isinstance(found, Choice):
        try:
            device.use(gather=found.gather, scatter=found.scatter)
        except DeviceError as error:
            found = str(error)
        else:
            log.info("device %s: %s", name, found)
            return
    why = f"{found}; " if found else ""
    log.info("device %s: copies by %s; %s`lmc bench device` measures the others", name, device.path_names[0], why)
