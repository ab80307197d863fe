"""What the web dashboard costs engines: lookups through a daemon whose page is open, and through one without a page.

Ours is sampled each two seconds as always, and asked for its figures twice a second: four times as often as a browser
does.
"""

from __future__ import annotations

import threading
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from harness.caches import ended, layout_of, model_of, new_chain, paged
from harness.daemon import Served, serve, slots
from harness.measure import Options, Timings, paired, private_buffer, seconds
from harness.report import Must, Row

from lmcache_core.client.cache import RemoteCache, connect

CHUNKS = 512
REPEAT = 20
TIMEOUT_S = 60.0


def rows(options: Options) -> Iterator[Row]:
    layout = layout_of(layers=1, blocks=1, block_nbytes=4096)
    model, shard = model_of(layout)
    chain = new_chain(model, CHUNKS)
    pages = paged(private_buffer(CHUNKS * 4096, huge=False), layout)

    def lookups(cache: RemoteCache) -> Callable[[], Timings]:
        assert ended(cache.store(chain, shard, range(CHUNKS), pages, range(CHUNKS)).wait(TIMEOUT_S)).ok_chunks == CHUNKS

        def look() -> None:
            for number in range(REPEAT):
                hit = cache.lookup_answered(chain, f"request {number}", timeout_s=TIMEOUT_S)
                assert hit.chunks == CHUNKS
                cache.release(hit.request)

        return lambda: {"lookup": seconds(look) / REPEAT}

    nbytes = 2 * slots(CHUNKS, layout)
    with (
        serve(options.directory / "watched", nbytes, page=True) as watched,
        serve(options.directory / "plain", nbytes) as plain,
        connect(watched.socket, call_timeout_s=TIMEOUT_S) as ours,
        connect(plain.socket, call_timeout_s=TIMEOUT_S) as limit,
        _looked_at(watched),
    ):
        many = replace(options, rounds=20 * options.rounds)
        measured = paired(many, {"ours": lookups(ours), "limit": lookups(limit)})
    yield measured.row(
        "page", f"lookup of {CHUNKS} chunks, the page open", "ms", "lookup", lambda taken: 1e3 * taken,
        must=Must(ratio_limit=0.97), note="through a daemon; limit: one without a page",
    )  # fmt: skip


@contextmanager
def _looked_at(served: Served) -> Iterator[None]:
    stop = threading.Event()

    def look() -> None:
        while not stop.wait(0.5):
            with urllib.request.urlopen(f"http://{served.page}/data.json", timeout=TIMEOUT_S) as answer:
                assert len(answer.read()) > 1000

    viewer = threading.Thread(target=look)
    viewer.start()
    try:
        yield
    finally:
        stop.set()
        viewer.join()
