"""What the demo's agent is told and asked: the help desk of a library network, its tools and two conversations."""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any, Final

SPACE_AFTER: Final = "A booking is at most three hours"
"""Where the demo's last prompt has one space more: what an edit in a template or a trailing blank does in real life."""

TURNS: Final = (
    "Good morning! I have two books from the Old Mill that are due this week. Can I keep them for longer?",
    "My card ends in 417. One of them is the novel about the lighthouse. Does anybody wait for it?",
    "Thank you. Is there a quiet room at Station Square on Thursday where four of us could meet, without steps?",
)
OTHER_CONVERSATION: Final = (
    "Hello, my daughter is nine and loves volcanoes. Is there an event for her, and what could she read?"
)


def system_prompt() -> str:
    """Rules, tool definitions and examples, about four thousand tokens."""
    tools = "\n".join(json.dumps(tool, ensure_ascii=False, indent=1) for tool in tool_definitions())
    return f"{_text('rules.txt')}\n\nThe tools\n{tools}\n\n{_text('examples.txt')}"


def with_one_space_more(text: str) -> str:
    """The same text with a second space after `SPACE_AFTER`."""
    before, found, after = text.partition(SPACE_AFTER)
    if not found:
        raise ValueError(f"the text does not say {SPACE_AFTER!r}")
    return f"{before}{found} {after}"


def tool_definitions() -> list[dict[str, Any]]:
    """The tools as the JSON schemas that chat models are given, from one line per tool and parameter."""
    tools: list[dict[str, Any]] = []
    for line in _text("tools.txt").splitlines():
        if not line.startswith(" "):
            name, _, description = line.partition(": ")
            parameters: dict[str, Any] = {"type": "object", "properties": {}, "required": []}
            tools.append({"name": name, "description": description, "parameters": parameters})
            continue
        name, kind, description = line.split(maxsplit=2)
        parameters = tools[-1]["parameters"]
        parameters["properties"][name] = {"type": kind.rstrip("!"), "description": description}
        if kind.endswith("!"):
            parameters["required"].append(name)
    return tools


def _text(name: str) -> str:
    return (files(__package__) / "prompt" / name).read_text(encoding="utf-8").strip()
