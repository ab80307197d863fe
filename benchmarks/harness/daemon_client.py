"""A client process of the daemon under load: stores, looks up and loads until told to stop, then says what it did."""

from __future__ import annotations

import json
import os
import select
import sys
import time

import numpy as np

from lmcache_core.client.cache import connect

from .caches import chain_from, ended, layout_of, model_of, paged
from .measure import private_buffer, random_bytes

LAYERS, BLOCKS, BLOCK_NBYTES = 32, 16, 64 << 10
BATCH = 2
TIMEOUT_S = 60.0
STRIDE = 4096
"""One byte in so many is compared: all of them would be a load of its own."""


def main() -> None:
    socket, number = sys.argv[1], int(sys.argv[2])
    layout = layout_of(layers=LAYERS, blocks=BLOCKS, block_nbytes=BLOCK_NBYTES)
    model, shard = model_of(layout)
    nbytes = BATCH * layout.nbytes
    source, target = private_buffer(nbytes, huge=False), private_buffer(nbytes, huge=False)
    source[:] = random_bytes(nbytes, seed=number)
    pages, back = paged(source, layout), paged(target, layout)
    total = 0
    ids, span = list(range(BATCH * BLOCKS)), range(BATCH)
    with connect(socket, call_timeout_s=TIMEOUT_S, connect_timeout_s=TIMEOUT_S) as cache:
        print(json.dumps({"connected": cache.connected}), flush=True)
        while os.read(0, 1):  # one byte starts a round, the next ends it
            stored = loaded = rounds = 0
            began = time.perf_counter()
            while not select.select([0], [], [], 0)[0]:
                rounds += 1
                chain = chain_from(model, BATCH, 10_000_000 * (number + 1) + total + rounds)
                request = f"{number} {total + rounds}"
                stored += ended(cache.store(chain, shard, span, pages, ids).wait(TIMEOUT_S)).nbytes
                hit = cache.lookup(chain, request)
                found = range(hit.chunks)
                target[::STRIDE] = 0
                result = ended(cache.retrieve(hit, shard, found, back, ids[: len(found) * BLOCKS]).wait(TIMEOUT_S))
                cache.release(request)
                loaded += result.nbytes
                good = result.ok_chunks * BLOCKS
                for before, after in zip(pages[0], back[0], strict=True):
                    assert np.array_equal(before[:good, ::STRIDE], after[:good, ::STRIDE]), "wrong bytes"
            taken = time.perf_counter() - began
            total += rounds
            os.read(0, 1)
            print(json.dumps({"stored": stored, "loaded": loaded, "seconds": taken, "rounds": rounds}), flush=True)


if __name__ == "__main__":
    main()
