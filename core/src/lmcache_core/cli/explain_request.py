"""Why a request missed, as the daemon that answered it remembers."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from lmcache_core.history import meaning

from .display import ago, clean, table
from .target import target_of


def explain_request(
    request: str | None,
    as_json: bool,
    *,
    config: Path | None,
    socket: str | None,
    timeout: float,
    tcp: str,
    ca: Path | None,
) -> int:
    """Print what a daemon remembers of a request, or of the latest ones; the exit status."""
    with target_of(socket, config, timeout, tcp, ca).open() as daemon:
        found = daemon.recall(request or "", limit=16, timeout_s=timeout)
    if as_json:
        click.echo(json.dumps(found, indent=1))
    else:
        click.echo("\n".join(lines(found, request, time.time())))
    return int(request is not None and not found.get("lookup"))


def lines(found: dict[str, Any], request: str | None, now: float) -> Iterator[str]:
    """A report of `History` as `lmc explain` prints it."""
    lookup = found.get("lookup")
    if lookup is None:
        if request is not None:
            yield f"request {clean(request)!r} is not remembered; the latest ones:"
        yield from _latest(found.get("latest") or [], now)
        return
    yield (
        f"request {clean(lookup['request'])!r}, {ago(max(0.0, now - lookup['at']))} ago: {_result(lookup)}, "
        f"{lookup['hit_chunks']:,} of {lookup['chunks']:,} chunks ({lookup['tokens']:,} tokens)"
    )
    if lookup.get("tiers"):
        places = (f"{clean(tier)}: {count:,} chunk{'' if count == 1 else 's'}" for tier, count in lookup["tiers"])
        yield f"found in {', '.join(places)}"
    if not lookup["missing"]:
        return
    yield f"chunk {lookup['hit_chunks']:,} is the first that is missing: {clean(lookup['reason'])}"
    yield f"  {clean(meaning(lookup['reason']))}"
    if lookup["refused_chunks"]:
        yield (
            f"  {lookup['refused_chunks']:,} chunks were found; estimated "
            f"{1e3 * lookup['load_s']:.1f} ms to load them, {1e3 * lookup['recompute_s']:.1f} ms to compute them"
        )
    for loss in (found.get("losses") or {}).get(lookup["missing"], []):
        policy = f", chosen by the policy {loss['policy']}" if loss["policy"] else ""
        yield f"  tier {loss['tier']}: {clean(loss['reason'])}{policy}, {ago(max(0.0, now - loss['at']))} ago"


def _result(lookup: dict[str, Any]) -> str:
    return {"full": "a full hit", "partial": "a partial hit", "miss": "a miss"}.get(
        lookup["result"], clean(lookup["result"])
    )


def _latest(latest: list[dict[str, Any]], now: float) -> Iterator[str]:
    if not latest:
        yield "no request has been answered yet"
        return
    rows = [("REQUEST", "AGO", "RESULT", "CHUNKS", "FIRST MISS")]
    for one in latest:
        chunks = f"{one['hit_chunks']} of {one['chunks']}"
        when = ago(max(0.0, now - one["at"]))
        rows.append((clean(one["request"])[:60], when, one["result"], chunks, clean(one["reason"])[:40]))
    yield from table(rows)
