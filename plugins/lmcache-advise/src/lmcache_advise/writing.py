"""The advice as a configuration for `lmcache.yaml`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from .advice import Advice
from .machine import DISK, HOST, GiB
from .replay import DEFAULT
from .units import count_text

_UNITS: Final = (("TiB", 1 << 40), ("GiB", GiB), ("MiB", 1 << 20))


def yaml_of(advice: Advice, chunk_tokens: int, disk_path: str, remote: Mapping[str, str]) -> str:
    """What `lmc config check` accepts; empty where no cache is advised.

    `remote` has the backend and its url.
    """
    if not advice.plan.levels:
        return ""
    lines = [f"chunk_tokens: {chunk_tokens}", "device: auto"]
    if HOST not in advice.plan.names:
        lines.append("staging: 1GiB")
    lines.append("tiers:")
    for level in advice.plan.levels:
        name = level.store.name
        policy = advice.policy.get(name, DEFAULT)
        fields = [f"name: {name}"]
        fields += ["backend: memory" if name == HOST else f"backend: {DISK if name == DISK else remote['backend']}"]
        fields += [f"capacity: {capacity_text(level.nbytes)}"]
        fields += [f"policy: {policy}"] if policy != DEFAULT else []
        if name == DISK:
            fields.append(f"options: {{path: {_quoted(disk_path)}}}")
        elif name != HOST:
            fields.append(f"options: {{url: {_quoted(remote['url'])}}}")
        lines.append(f"  - {{{', '.join(fields)}}}  # room for {count_text(level.tokens)} tokens")
    return "\n".join(lines) + "\n"


def capacity_text(nbytes: float) -> str:
    """ "64GiB": a whole number of the largest unit that it is a multiple of."""
    whole = max(1 << 20, round(nbytes / (1 << 20)) << 20)
    return next(f"{whole // size}{unit}" for unit, size in _UNITS if not whole % size)


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
