"""YAML text as a small tree in which every value remembers where it was written.

Built from the parser's events, so that nothing guesses types: a scalar stays the text that was written, `no` is not
False and `017` is not 15.  Depth, count and size have bounds; what could surprise (anchors, tags, several documents,
duplicate keys) is refused with the line.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import yaml

from .errors import ConfigError
from .spelling import shown

MAX_TEXT_NBYTES: Final = 1 << 20
MAX_DEPTH: Final = 20
MAX_NODES: Final = 20_000

PROGRAM: Final = "program"
"""Source of values that came from code rather than from a file or the environment."""
NOT_TEXT: Final = re.compile("[\0\ud800-\udfff]")
"""What no value may hold."""
_VARIABLE: Final = re.compile(r"\$\$\{|\$\{([^}]*)(\}?)")
_VARIABLE_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True, slots=True)
class Scalar:
    """One value; `value` is text unless a program put something else there."""

    value: object = field(repr=False)
    """Not in the repr: it may be a secret."""
    source: str = field(compare=False)
    """"file:line", "environment variable X" or PROGRAM."""
    plain: bool = False
    """Written in YAML without quotes, so that `null`, `~` and nothing at all mean null."""
    literal: str | None = field(default=None, repr=False, compare=False)
    """The text as written in a file, where it held `${VARIABLE}`s."""
    in_file: bool = field(default=False, compare=False)
    """The clear text of `value` stands in a file, so it must not be a secret."""

    @property
    def is_null(self) -> bool:
        return self.value is None or (self.plain and self.value in ("", "~", "null"))


@dataclass(frozen=True, slots=True)
class Sequence:
    items: tuple[Node, ...]
    source: str = field(compare=False)


@dataclass(frozen=True, slots=True)
class Table:
    """A mapping with distinct text keys; `key_sources` says where each key stands."""

    items: Mapping[str, Node]
    source: str = field(compare=False)
    key_sources: Mapping[str, str] = field(default_factory=dict, compare=False)

    def source_of(self, key: str) -> str:
        return self.key_sources.get(key, self.source)

    def with_item(self, key: str, node: Node) -> Table:
        """A copy in which `key` holds `node`."""
        return Table({**self.items, key: node}, self.source, {**self.key_sources, key: node.source})


Node = Scalar | Sequence | Table


def parse_yaml(text: str, source: str, environ: Mapping[str, str]) -> Node | None:
    """The tree of the one document in `text`, `${NAME}` in values replaced from `environ`; `None` if it is empty.

    Every fault is a ConfigError that begins with "source:line: ".
    """
    if len(text.encode("utf-8", "surrogatepass")) > MAX_TEXT_NBYTES:
        raise ConfigError(f"{source}: larger than the limit of {MAX_TEXT_NBYTES} bytes")
    builder = _Builder(source, environ)
    try:
        return builder.build(_events(text, source))
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise ConfigError(f"{source}:{line}: character U+{ord(text[error.position]):04X} is not allowed") from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark else 1
        raise ConfigError(f"{source}:{line}: {_explain(text, mark, error)}") from error


def from_python(value: object, source: str = PROGRAM) -> Node:
    """The tree of plain Python values: mappings with text keys, lists and tuples, and anything else as a scalar."""
    if isinstance(value, Mapping):
        return Table({str(key): from_python(item, source) for key, item in value.items()}, source)
    if isinstance(value, (list, tuple)):
        return Sequence(tuple(from_python(item, source) for item in value), source)
    return Scalar(value, source)


def _events(text: str, source: str) -> Iterator[yaml.Event]:
    events = yaml.parse(text, Loader=yaml.SafeLoader)
    line = 1
    while True:
        try:
            event = next(events, None)
        except (ValueError, OverflowError) as error:  # of an escape that is no character, a version without end
            raise ConfigError(f"{source}:{line}: not valid YAML here or below: {str(error)[:80]}") from error
        if event is None:
            return
        if event.end_mark:
            line = event.end_mark.line + 1
        yield event


class _Builder:
    """One walk over the events of one document, with the bounds counted as it goes."""

    def __init__(self, source: str, environ: Mapping[str, str]) -> None:
        self.source = source
        self.environ = environ
        self.nodes = 0

    def build(self, events: Iterable[yaml.Event]) -> Node | None:
        stream = iter(events)
        root: Node | None = None
        documents = 0
        for event in stream:
            if isinstance(event, yaml.DocumentStartEvent):
                documents += 1
                if documents > 1:
                    raise self.fault(event, "a second document (---); write one")
            elif isinstance(event, (yaml.AliasEvent, yaml.ScalarEvent, yaml.CollectionStartEvent)):
                root = self.node(event, stream, 1)
        if isinstance(root, Scalar) and root.is_null:
            return None
        return root

    def node(self, event: yaml.Event, stream: Iterator[yaml.Event], depth: int) -> Node:
        self.nodes += 1
        if self.nodes > MAX_NODES:
            raise self.fault(event, f"more than {MAX_NODES} values")
        if depth > MAX_DEPTH:
            raise self.fault(event, f"nested deeper than {MAX_DEPTH} levels")
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
            raise self.fault(event, "anchors and aliases (& and *) are not supported; write the value out, or quote it")
        tag = getattr(event, "tag", None)
        if tag:
            raise self.fault(event, f"tags ({tag}) are not supported; write the plain value, or quote it")
        where = self.where(event)
        if isinstance(event, yaml.ScalarEvent):
            return self.scalar(event, where)
        if isinstance(event, yaml.SequenceStartEvent):
            items = []
            while not isinstance(event := next(stream), yaml.SequenceEndEvent):
                items.append(self.node(event, stream, depth + 1))
            return Sequence(tuple(items), where)
        table: dict[str, Node] = {}
        sources: dict[str, str] = {}
        while not isinstance(event := next(stream), yaml.MappingEndEvent):
            key = self.key(event)
            if key in table:
                raise self.fault(event, f"duplicate key {key!r}, first written at {sources[key]}")
            sources[key] = self.where(event)
            table[key] = self.node(next(stream), stream, depth + 1)
        return Table(table, where, sources)

    def key(self, event: yaml.Event) -> str:
        if not isinstance(event, yaml.ScalarEvent) or event.anchor or event.tag:
            raise self.fault(event, "a key must be plain text (quote values that hold { or [)")
        return self.text(event)

    def text(self, event: yaml.ScalarEvent) -> str:
        """What was written; escapes can make what may not stand in a file, and could not be shown or opened."""
        value = str(event.value)
        odd = NOT_TEXT.search(value)
        if odd is not None:
            raise self.fault(event, f"character U+{ord(odd[0]):04X} is not allowed")
        return value

    def scalar(self, event: yaml.ScalarEvent, where: str) -> Scalar:
        text = self.text(event)
        plain = event.style is None
        if "${" not in text:
            return Scalar(text, where, plain, in_file=True)
        kept = all(match[0] == "$${" for match in _VARIABLE.finditer(text))
        return Scalar(self.expand(event, text), where, False, literal=text, in_file=kept)

    def expand(self, event: yaml.Event, text: str) -> str:
        def replace(match: re.Match[str]) -> str:
            if match[0] == "$${":
                return "${"
            name, closed = match[1], match[2]
            if not closed or not _VARIABLE_NAME.fullmatch(name):
                raise self.fault(event, "a variable is written ${NAME}, and a literal ${ as $${")
            if name not in self.environ:
                raise self.fault(event, f"environment variable {shown(name)} is not set")
            return self.environ[name]

        return _VARIABLE.sub(replace, text)

    def where(self, event: yaml.Event) -> str:
        return f"{self.source}:{event.start_mark.line + 1}" if event.start_mark else self.source

    def fault(self, event: yaml.Event, problem: str) -> ConfigError:
        return ConfigError(f"{self.where(event)}: {problem}")


def _explain(text: str, mark: Any, error: yaml.MarkedYAMLError) -> str:
    """A YAML error in a line; the two mistakes that people make most get their remedy."""
    lines = text.splitlines()
    line = lines[mark.line] if mark and mark.line < len(lines) else ""
    if "\t" in line[: mark.column + 1 if mark else 0]:
        return "a tab; YAML indents with spaces"
    problem = error.problem or "not valid YAML"
    if "${" in line:
        problem += ' (quote it: "${NAME}")'
    return f"not valid YAML: {problem}" + (f" {error.context}" if error.context else "")
