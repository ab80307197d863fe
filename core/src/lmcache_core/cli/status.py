"""`lmc status`: how a daemon is, for people or as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import click

from .display import ago, clean, size, table
from .target import target_of, target_options


@click.command("status", help="Show how a daemon is.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@target_options(tcp=True)
def command(as_json: bool, **where: Any) -> None:
    target = target_of(**where)
    with target.open() as daemon:
        status: dict[str, Any] = daemon.status(target.timeout_s)
    click.echo(json.dumps(status, indent=1) if as_json else "\n".join(lines(status)))


def lines(status: dict[str, Any]) -> Iterator[str]:
    """A status as `lmc status` prints it."""
    state = status["problem"] or "ready"
    yield f"{state}: lmcache-core {status['version']}, pid {status['pid']}, up {ago(status['uptime_s'])}"
    places = [status["socket"], *(f"{kind} {status[kind]}" for kind in ("http", "page", "tcp") if status.get(kind))]
    yield f"on {', '.join(places)}; boot id {status['boot_id']}"
    held = [
        f"{status['clients']} clients",
        f"{status['leases']} leases",
        f"{status['records_in_use']} records in use",
        f"{status['pins']} pins",
    ]
    if status["quarantined_slots"]:
        held.append(f"{status['quarantined_slots']} slots kept aside for lost clients")
    yield ", ".join(held)
    yield ""
    rows = [("TIER", "BACKEND", "STATE", "RECORDS", "USED", "OF", "FILL", "QUEUED")]
    used, capacity = status["used_nbytes"], status["capacity_nbytes"]
    rows.append((status["name"], "memory", "ready", *_fill(status["records"], used, capacity), ""))
    for tier in status["tiers"]:
        state = "ready" if tier["breaker"] == "closed" else f"{tier['breaker']}: {tier['reason']}"
        queued = f"{tier['queued_loads']} loads, {tier['queued_stores']} stores"
        fill = _fill(tier["records"], tier["used_nbytes"], tier["capacity_nbytes"])
        rows.append((tier["name"], tier["backend"], state[:60], *fill, queued))
    yield from table(rows)
    for tier in status["tiers"]:
        if tier.get("description"):
            yield clean(f"{tier['name']}: {tier['description']}")


def _fill(records: int, used: int, capacity: int | None) -> tuple[str, str, str, str]:
    share = f"{100 * used / capacity:.0f} %" if capacity else "-"
    return f"{records:,}", size(used), size(capacity) if capacity else "-", share
