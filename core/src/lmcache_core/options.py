"""Trees of values into frozen dataclasses, strictly: a name, a type or a unit that does not fit is an error."""

from __future__ import annotations

import enum
import math
import re
import types
import typing
from collections.abc import Mapping
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

from .errors import ConfigError, PluginIncompatible
from .nodes import PROGRAM, Node, Scalar, Sequence, Table, from_python
from .spelling import did_you_mean, shown
from .units import parse_nbytes, parse_seconds

T = TypeVar("T")

NOT_CONFIGURED: Final = {"configured": False}
"""`metadata` of a dataclass field that no configuration sets."""
MEASURE: Final = "measure"
"""Key in the `metadata` of an option that `lmc bench backend` tries: a tuple of values to compare, or "threads" for how
many records are moved at a time."""
_INTEGER: Final = re.compile(r"[+-]?(0|[1-9][0-9]{0,30})")
_MAX_INTEGER: Final = 10**31
_FLOAT: Final = re.compile(r"[+-]?(0|[1-9][0-9]{0,30})(\.[0-9]{1,30})?([eE][+-]?[0-9]{1,3})?")


@dataclass(frozen=True, slots=True)
class Origin:
    """Where an effective value came from."""

    source: str
    """"file:line", "environment variable X", "program" or "default"."""
    literal: str | None = None
    """The text as written, where it held `${VARIABLE}`s."""


Origins = dict[str, Origin]
"""By key path, e.g. "tiers.disk.capacity"; a path that is missing has its default."""


class FieldError(ConfigError):
    """Raised in `__post_init__`: `path`, relative to the dataclass, has this `problem`."""

    def __init__(self, path: str, problem: str) -> None:
        super().__init__(f"{path}: {problem}")
        self.path = path
        self.problem = problem


@dataclass(frozen=True, slots=True)
class RawOptions:
    """The `options:` of a tier, untyped until its plugin is loaded and says what they are."""

    table: Table = field(default_factory=lambda: Table({}, PROGRAM))
    path: str = field(default="options", compare=False)

    @classmethod
    def of(cls, values: Mapping[str, object]) -> RawOptions:
        """Options from a program: Python values, or text that is read as in a configuration file."""
        return cls(_table(from_python(values)))

    def into(self, kind: type[T], origins: Origins | None = None) -> T:
        """An instance of the frozen dataclass `kind`; ConfigError for what it does not know, want or lack.

        Fields may be str, int, float, bool, Path, Literal, Enum, a dataclass of these, tuples of these, and `| None`.
        A field that ends in `_nbytes` takes sizes, one that ends in `_s` durations, both also without that ending.
        A field with `repr=False` is a secret, which may not stand in a file.
        """
        return build(kind, self.table, self.path, {} if origins is None else origins)

    def __repr__(self) -> str:
        return f"RawOptions({', '.join(self.table.items) or 'none'})"


def written(name: str) -> str:
    """How a configuration spells the field `name`: without its unit."""
    return name.removesuffix("_nbytes").removesuffix("_s") if name not in ("_s", "_nbytes") else name


def option_fields(kind: type) -> dict[str, Field[Any]]:
    """The configurable fields of a dataclass by the name that a configuration uses."""
    usable = [f for f in fields(kind) if f.init and f.metadata.get("configured", True)]
    exact = {f.name for f in usable}
    return {f.name if written(f.name) in exact else written(f.name): f for f in usable}


def is_secret(described: Field[Any]) -> bool:
    return not described.repr


def build(kind: type[T], table: Table, path: str, origins: Origins) -> T:
    """An instance of the dataclass `kind` from `table`; one ConfigError with a line for each problem."""
    known = option_fields(kind)
    spelled = {name: name for name in known} | {f.name: name for name, f in known.items()}
    hints = _hints(kind)
    values: dict[str, Any] = {}
    given: dict[str, str] = {}
    problems: list[str] = []
    for key, node in table.items.items():
        name = spelled.get(key)
        where = f"{table.source_of(key)}: {_join(path, shown(key))}: "
        if name is None:
            names = f"known here: {', '.join(sorted(known))}" if known else "nothing can be set here"
            below = "; what its backend takes goes under options" if RawOptions in hints.values() else ""
            problems.append(f"{where}unknown key{did_you_mean(key, known)} ({names}{below})")
            continue
        if name in given:
            problems.append(f"{where}given twice, also as {given[name]}")
            continue
        given[name] = key
        described = known[name]
        try:
            _refuse_clear_secret(described, node, where)
            values[described.name] = convert(hints[described.name], node, described.name, _join(path, name), origins)
        except ConfigError as error:
            problems.append(str(error))
        if isinstance(node, Scalar):
            origins[_join(path, name)] = Origin(node.source, node.literal)
    for name, described in known.items():
        if name not in given and described.default is MISSING and described.default_factory is MISSING:
            problems.append(f"{table.source}: {_join(path, name)}: is required and missing")
    if problems:
        raise ConfigError("\n".join(problems))
    try:
        return kind(**values)
    except FieldError as error:
        full = _join(path, error.path)
        origin = origins.get(full)
        raise ConfigError(f"{origin.source if origin else table.source}: {full}: {error.problem}") from error
    except ValueError as error:
        raise ConfigError(f"{table.source}: {path or 'configuration'}: {error}") from error


def convert(kind: Any, node: Node, name: str, path: str, origins: Origins) -> Any:
    """The value of `node` as a `kind`; `name` is the field's, whose ending gives the unit."""
    origin = typing.get_origin(kind)
    if origin in (typing.Union, types.UnionType):
        return _union(typing.get_args(kind), node, name, path, origins)
    if kind is RawOptions:
        return RawOptions(_expect_table(node, path), path)
    if is_dataclass(kind) and isinstance(kind, type):
        if isinstance(node, Scalar) and isinstance(node.value, kind):
            return node.value
        return build(kind, _expect_table(node, path), path, origins)
    if origin is tuple:
        return _tuple(typing.get_args(kind), node, name, path, origins)
    if not isinstance(node, Scalar):
        found = "a list" if isinstance(node, Sequence) else "a mapping"
        raise ConfigError(f"{node.source}: {path}: {found}, where one value is expected")
    try:
        return _scalar(kind, origin, node, name)
    except ValueError as error:
        raise ConfigError(f"{node.source}: {path}: {error}") from error


def _scalar(kind: Any, origin: Any, node: Scalar, name: str) -> Any:
    if node.is_null:
        raise ValueError("is empty; give a value or leave the key out")
    value = node.value
    if origin is Literal:
        return _choice({_text(choice): choice for choice in typing.get_args(kind)}, value)
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return value if isinstance(value, kind) else _choice({_text(item.value): item for item in kind}, value)
    if kind in (int, float) and isinstance(value, str):
        if name.endswith("_nbytes"):
            return kind(parse_nbytes(value))
        if name.endswith("_s"):
            return _exact(kind, parse_seconds(value))
    parse = _SCALARS.get(kind)
    if parse is None:
        raise PluginIncompatible(f"the field {name!r} has the type {kind}, which a configuration cannot express")
    return parse(value)


def _exact(kind: type, number: float) -> Any:
    if kind(number) != number:
        raise ValueError(f"{number} is not a whole number of seconds")
    return kind(number)


def _parse_str(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"expected text, got {_text(value)}")
    return value


def _parse_bool(value: object) -> bool:
    if isinstance(value, bool):
        return value
    if value in ("true", "false"):
        return value == "true"
    raise ValueError(f"{_text(value)!r} is not a switch; write true or false")


def _parse_int(value: object) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) < _MAX_INTEGER:
        return value
    if isinstance(value, str) and _INTEGER.fullmatch(value):
        return int(value)
    raise ValueError(f"{_text(value)!r} is not a whole number; write decimal digits, without a leading zero")


def _parse_float(value: object) -> float:
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) < _MAX_INTEGER:
        return float(value)
    if isinstance(value, float) and math.isfinite(value):
        return value
    if isinstance(value, str) and _FLOAT.fullmatch(value) and math.isfinite(float(value)):
        return float(value)
    raise ValueError(f"{_text(value)!r} is not a number; write e.g. 0.5")


def _parse_path(value: object) -> Path:
    if isinstance(value, Path):
        return value
    text = _parse_str(value)
    if not text or "\0" in text:
        raise ValueError(f"{text!r} is not a path")
    if text.startswith("~"):
        try:
            return Path(text).expanduser()
        except RuntimeError as error:
            raise ValueError(f"{text!r}: {error}") from error
    return Path(text)


_SCALARS: Final[dict[Any, Any]] = {
    str: _parse_str,
    bool: _parse_bool,
    int: _parse_int,
    float: _parse_float,
    Path: _parse_path,
}


def _choice(choices: Mapping[str, Any], value: object) -> Any:
    text = _text(value)
    if text not in choices:
        raise ValueError(f"{text!r} is none of {', '.join(choices)}{did_you_mean(text, choices)}")
    return choices[text]


def _union(arms: tuple[Any, ...], node: Node, name: str, path: str, origins: Origins) -> Any:
    if types.NoneType in arms and isinstance(node, Scalar) and node.is_null:
        return None
    problem: ConfigError | None = None
    for arm in arms:
        if arm is types.NoneType:
            continue
        try:
            return convert(arm, node, name, path, origins)
        except ConfigError as error:
            problem = problem or error
    assert problem is not None
    raise problem


def _tuple(kinds: tuple[Any, ...], node: Node, name: str, path: str, origins: Origins) -> tuple[Any, ...]:
    if isinstance(node, Scalar) and isinstance(node.value, str) and not node.in_file and node.source != PROGRAM:
        parts = [part.strip() for part in node.value.split(",")] if node.value.strip() else []
        node = Sequence(tuple(Scalar(part, node.source) for part in parts), node.source)
    if not isinstance(node, Sequence):
        raise ConfigError(f"{node.source}: {path}: expected a list; write [a, b]")
    if kinds[-1] is Ellipsis:
        kinds = kinds[:1] * len(node.items)
    elif len(kinds) != len(node.items):
        raise ConfigError(f"{node.source}: {path}: expected {len(kinds)} values, got {len(node.items)}")
    values: list[Any] = []
    problems: list[str] = []
    for index, (kind, item) in enumerate(zip(kinds, node.items, strict=True)):
        try:
            values.append(convert(kind, item, name, _item_path(path, index, item), origins))
        except ConfigError as error:
            problems.append(str(error))
    if problems:
        raise ConfigError("\n".join(problems))
    origins[path] = Origin(node.source)
    return tuple(values)


def _item_path(path: str, index: int, item: Node) -> str:
    """Items that have a name are called by it."""
    name = item.items.get("name") if isinstance(item, Table) else None
    if isinstance(name, Scalar) and isinstance(name.value, str) and name.value:
        return f"{path}.{shown(name.value)}"
    return f"{path}[{index}]"


def _refuse_clear_secret(described: Field[Any], node: Node, where: str) -> None:
    if is_secret(described) and isinstance(node, Scalar) and node.in_file and not node.is_null and node.value != "":
        variable = re.sub(r"[^A-Z0-9]+", "_", described.name.upper())
        raise ConfigError(f'{where}is a secret, which must not stand in a file; write "${{{variable}}}" and set it')


def _expect_table(node: Node, path: str) -> Table:
    if isinstance(node, Scalar) and node.is_null:
        return Table({}, node.source)
    if not isinstance(node, Table):
        found = "a list" if isinstance(node, Sequence) else "one value"
        raise ConfigError(f"{node.source}: {path}: {found}, where a mapping (key: value) is expected")
    return node


def _table(node: Node) -> Table:
    assert isinstance(node, Table)
    return node


def _hints(kind: type) -> dict[str, Any]:
    try:
        return typing.get_type_hints(kind)
    except NameError as error:
        raise PluginIncompatible(f"{kind.__module__}.{kind.__qualname__}: {error}") from error


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def _text(value: object) -> str:
    if isinstance(value, int) and abs(value) >= _MAX_INTEGER:
        return "a number of more than 31 digits"
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return text if len(text) <= 60 else text[:60] + "…"
