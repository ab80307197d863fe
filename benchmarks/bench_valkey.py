"""Get and put of 8 and 32 MiB in Valkey on 1 and 4 connections, every byte compared, and existence of 512 keys.

Ours is the backend `valkey` of lmcache-redis, one call for each record.  The limit is a loop of `sendall` and
`recv_into` on the same server in the same round.  The peer is its C++ adapter `resp` with as many workers as there are
connections.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from harness.measure import Options
from harness.report import Must, Row
from harness.resp import context, rows_of
from harness.servers import find_valkey

from lmcache_core.backend import Backend


def rows(options: Options) -> Iterator[Row]:
    yield from rows_of("valkey", find_valkey(), _open, options, get=Must(ratio_limit=0.85, ratio_peer=1.0))


def _open(url: str, connections: int) -> Backend[Any]:
    from lmcache_redis import ValkeyBackend, ValkeyOptions

    return ValkeyBackend(ValkeyOptions(url=url, connections=connections), context())
