"""The effective values of a configuration for people to read, each with where it came from; secrets are masked."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, is_dataclass
from typing import Any, Final

from .nodes import Node, Sequence, Table
from .options import Origin, Origins, RawOptions, is_secret, option_fields
from .spelling import printable
from .units import format_nbytes, format_seconds

_SECRET_NAME: Final = re.compile(
    r"(^|_)(password|passwd|secret|token|credential|api_?key|secret_access_key|private_key)s?$"
)
_URL_PASSWORD: Final = re.compile(r"(://[^/@\s:]*:)[^@/\s]+(?=@)")


@dataclass(frozen=True, slots=True)
class Setting:
    """One effective value for people to read; secrets are masked."""

    path: str
    value: str
    source: str


def is_secret_name(name: str) -> bool:
    """Whether an option of that name is likely a secret, also where its plugin is not there to say so."""
    return bool(_SECRET_NAME.search(name))


def settings(value: Any, path: str, origins: Origins) -> Iterator[Setting]:
    """Each value in the dataclass `value`, in order, with where it came from."""
    for name, described in option_fields(type(value)).items():
        yield from _settings(getattr(value, described.name), described.name, f"{path}.{name}" if path else name,
                             origins, is_secret(described))  # fmt: skip


def _settings(value: Any, name: str, path: str, origins: Origins, secret: bool) -> Iterator[Setting]:
    if isinstance(value, RawOptions):
        yield from _raw_settings(value.table, path)
    elif is_dataclass(value) and not isinstance(value, type):
        yield from settings(value, path, origins)
    elif isinstance(value, tuple) and value and all(map(is_dataclass, value)):
        for index, item in enumerate(value):
            label = getattr(item, "name", None)
            yield from settings(item, f"{path}.{label}" if label else f"{path}[{index}]", origins)
    else:
        origin = origins.get(path, Origin("default"))
        yield Setting(path, printable(_shown(value, name, origin, secret)), origin.source)


def _raw_settings(node: Node, path: str) -> Iterator[Setting]:
    """Options whose plugin is not loaded: what stands in the file is shown, unless its name sounds like a secret's."""
    if isinstance(node, Table):
        for key, item in node.items.items():
            yield from _raw_settings(item, f"{path}.{printable(key)}")
    elif isinstance(node, Sequence):
        for index, item in enumerate(node.items):
            yield from _raw_settings(item, f"{path}[{index}]")
    else:
        named = path.rpartition(".")[2].partition("[")[0]
        clear = node.literal or (node.value if node.in_file and not is_secret_name(named) else "***")
        yield Setting(path, printable(mask_url(str(clear))), node.source)


def _shown(value: Any, name: str, origin: Origin, secret: bool) -> str:
    if origin.literal is not None:
        return origin.literal
    if secret:
        return "***" if value else '""'
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int) and name.endswith("_nbytes"):
        return format_nbytes(value)
    if isinstance(value, (int, float)) and name.endswith("_s"):
        return format_seconds(value)
    if isinstance(value, tuple):
        return f"[{', '.join(_shown(item, name, origin, False) for item in value)}]"
    return mask_url(str(getattr(value, "value", value))) or '""'


def mask_url(text: str) -> str:
    """`text` without the passwords of the URLs in it."""
    return _URL_PASSWORD.sub(r"\1***", text)
