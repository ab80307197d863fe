"""A JSON Schema of the configuration file, for editors, made from the dataclasses that the file becomes."""

from __future__ import annotations

import ast
import enum
import inspect
import textwrap
import types
import typing
from collections.abc import Mapping
from dataclasses import MISSING, Field, is_dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, Literal

from lmcache_core.config import MEMORY, CacheConfig, TierConfig
from lmcache_core.options import RawOptions, is_secret, option_fields

DIALECT: Final = "https://json-schema.org/draft/2020-12/schema"
_VARIABLE: Final = {"type": "string", "pattern": r"\$\{[A-Za-z_][A-Za-z0-9_]*\}"}
"""Any value may come from the environment."""
_SIZE: Final = {"type": "string", "pattern": r"^(0|[1-9][0-9]*)(\.[0-9]+)? ?(B|[kKMGTP]B|[KMGTP]iB)?$"}
_DURATION: Final = {"type": "string", "pattern": r"^(0|[1-9][0-9]*)(\.[0-9]+)? ?(us|ms|s|min|h)?$"}
_NUMBER: Final = {"type": "number"}
_ANYTHING: Final = {"type": "object"}
_SCALARS: Final[dict[Any, dict[str, Any]]] = {
    str: {"type": "string"},
    Path: {"type": "string", "minLength": 1},
    bool: {"type": "boolean"},
    int: {"type": "integer"},
    float: _NUMBER,
}


def schema(backends: Mapping[str, type]) -> dict[str, Any]:
    """The schema of a configuration file; `backends` maps the names of backends to their `Options`."""
    made = _object(CacheConfig, descriptions={})
    tier = made["properties"]["tiers"]["items"]
    tier["required"] = ["backend"]  # a tier without a name is called like its backend
    tier["properties"]["backend"]["examples"] = [MEMORY, *sorted(backends)]
    tier["allOf"] = [
        {
            "if": {"properties": {"backend": {"enum": [name, f"{name}@lmcache-core"]}}, "required": ["backend"]},
            "then": {"properties": {"options": _object(options)}},
        }
        for name, options in sorted(backends.items())
    ]
    tier["allOf"].append(
        {
            "if": {"properties": {"backend": {"const": MEMORY}}, "required": ["backend"]},
            "then": {"required": ["capacity"]},
        }
    )
    return {"$schema": DIALECT, "title": "Configuration of LMCache Core", **made}


def _object(kind: type, descriptions: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The mapping that becomes the dataclass `kind`; fields with a unit may be written with and without it."""
    hints = typing.get_type_hints(kind)
    said = field_docstrings(kind) if descriptions is None else descriptions
    properties: dict[str, Any] = {}
    required: list[Any] = []
    for name, described in option_fields(kind).items():
        made = _property(hints[described.name], described)
        if described.name in said:
            made["description"] = said[described.name]
        properties[name] = made
        needed = described.default is MISSING and described.default_factory is MISSING
        if name != described.name:
            properties[described.name] = made
            if needed:
                required.append({"anyOf": [{"required": [name]}, {"required": [described.name]}]})
        elif needed and not (kind is TierConfig and name == "name"):
            required.append({"required": [name]})
    out: dict[str, Any] = {"type": "object", "properties": properties, "additionalProperties": False}
    if required:
        out["allOf"] = required
    return out


def _property(kind: Any, described: Field[Any]) -> dict[str, Any]:
    if is_secret(described) and kind is str:
        return {"type": "string", "anyOf": [_VARIABLE, {"const": ""}]}
    return _value(kind, described.name)


def _value(kind: Any, name: str) -> dict[str, Any]:
    origin = typing.get_origin(kind)
    arguments = typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return _any(*({"type": "null"} if arm is types.NoneType else _value(arm, name) for arm in arguments))
    if kind is RawOptions:
        return dict(_ANYTHING)
    if is_dataclass(kind) and isinstance(kind, type):
        return _object(kind)
    if origin is tuple:
        items = _value(arguments[0], name)
        if arguments[-1] is Ellipsis:
            return {"type": "array", "items": items}
        return {"type": "array", "prefixItems": [_value(each, name) for each in arguments], "items": False}
    if origin is Literal:
        return _any({"enum": list(arguments)}, _VARIABLE)
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return _any({"enum": [each.value for each in kind]}, _VARIABLE)
    if kind in (int, float) and name.endswith("_nbytes"):
        return _any({"type": "integer", "minimum": 0}, _SIZE, _VARIABLE)
    if kind in (int, float) and name.endswith("_s"):
        return _any({"type": "number", "minimum": 0}, _DURATION, _VARIABLE)
    scalar = _SCALARS.get(kind)
    if scalar is None:
        return {}
    return dict(scalar) if scalar["type"] == "string" else _any(scalar, _VARIABLE)


def _any(*choices: dict[str, Any]) -> dict[str, Any]:
    return {"anyOf": [choice for index, choice in enumerate(choices) if choice not in choices[:index]]}


def field_docstrings(kind: type) -> dict[str, str]:
    """The text below each field of a dataclass, where its source can be read."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(kind)))
    except (OSError, TypeError, SyntaxError):
        return {}
    (body,) = [node.body for node in tree.body if isinstance(node, ast.ClassDef)][:1] or [[]]
    found: dict[str, str] = {}
    for field, text in pairwise(body):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(text, ast.Expr):
            value = text.value
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                found[field.target.id] = " ".join(value.value.split())
    return found
