"""Ten times the capacity offered at full speed: the limit holds, and what is dropped is counted and had to be.

Once with nothing pinned, the engine waiting for each copy out of its pages before it reuses them: nothing may be
dropped.  Once without waiting, when slots that are still being filled are in use.  Once with every record pinned:
everything is dropped, counted, and the pinned records stay.  All the while a thread samples the bytes in use, as the
cache counts them and as the kernel backs them.  Our figures are the worst of all rounds, the peer's its best.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Self

from harness.caches import backed_nbytes, ended, layout_of, memory_cache, model_of, new_chain, paged
from harness.measure import MiB, Options, Paired, Timings, check_equal, paired, private_buffer, random_bytes
from harness.report import Must, Row, row_of

from lmcache_core.chain import Chain
from lmcache_core.local import LocalCache

CHUNK_NBYTES = 8 * MiB
LAYERS, BLOCKS = 8, 16
BATCH = 4
TIMES = 10
TIMEOUT_S = 60.0
SAMPLE_INTERVAL_S = 0.02


def rows(options: Options) -> Iterator[Row]:
    slots = 16 if options.quick else 64
    layout = layout_of(layers=LAYERS, blocks=BLOCKS, block_nbytes=CHUNK_NBYTES // (LAYERS * BLOCKS))
    with memory_cache(slots, layout) as cache:
        offer = Offer(cache, slots)
        measured = paired(
            options,
            {"ours": offer.round},
            "pressure",
            capacity_nbytes=slots * CHUNK_NBYTES,
            chunk_nbytes=CHUNK_NBYTES,
        )
    size = f"{TIMES * slots} chunks of {CHUNK_NBYTES // MiB} MiB, room for {slots}"
    yield _worst(
        measured, "stored, nothing pinned", "% stored", "stored", min, Must(at_least=100.0), f"{size}; peer: LRU"
    )
    yield _worst(
        measured, "stored without waiting for copies", "% stored", "rushing", min, None,
        f"{size}; a slot that is being filled is in use",
    )  # fmt: skip
    yield _worst(
        measured, "drops counted, everything pinned", "% counted", "counted", min, Must(at_least=100.0),
        f"{size}; none stored, none of the pinned evicted",
    )  # fmt: skip
    yield _worst(
        measured, "most in use at any sample", "% of capacity", "peak", max, Must(at_most=100.0),
        f"{int(offer.samples)} samples, bytes counted and bytes backed by the kernel",
    )  # fmt: skip


def _worst(
    measured: Paired,
    row: str,
    unit: str,
    what: str,
    pick: Callable[[list[float]], float],
    must: Must | None,
    note: str,
) -> Row:
    ours, peer = measured.values("ours", what, float), measured.values("peer", what, float)
    assert ours is not None
    notes = "; ".join(part for part in (note, measured.missing) if part)
    return row_of(
        "pressure",
        row,
        unit,
        [pick(ours)],
        peer=[max(peer)] if peer else None,
        must=must,
        load=measured.load,
        note=notes,
    )


class Offer:
    """A cache and the pages of an engine that stores far more than fits."""

    def __init__(self, cache: LocalCache, slots: int) -> None:
        self.cache = cache
        self.slots = slots
        self.samples = 0
        layout = layout_of(layers=LAYERS, blocks=BLOCKS, block_nbytes=CHUNK_NBYTES // (LAYERS * BLOCKS))
        self.model, self.shard = model_of(layout)
        self.source = private_buffer(BATCH * CHUNK_NBYTES, huge=False)
        self.source[:] = random_bytes(self.source.nbytes, seed=0)
        self.target = private_buffer(self.source.nbytes, huge=False)
        self.pages, self.target_pages = paged(self.source, layout), paged(self.target, layout)
        self.block_ids = range(BATCH * BLOCKS)

    def round(self) -> Timings:
        with Sampler(self.cache) as sampler:
            waiting, last = self._offer(wait=True)
            self._check(last)
            rushing, _ = self._offer(wait=False)
            counted = self._pinned()
        self.samples += sampler.samples
        peak = 100 * sampler.peak_nbytes / self.cache.status().capacity_nbytes
        return {"stored": waiting, "rushing": rushing, "counted": counted, "peak": peak}

    def _offer(self, *, wait: bool) -> tuple[float, Chain]:
        """Store ten times the capacity; percent stored, and the last chain."""
        before = self._drops()
        jobs = []
        for _ in range(TIMES * self.slots // BATCH):
            chain = new_chain(self.model, BATCH)
            jobs.append(self.cache.store(chain, self.shard, range(BATCH), self.pages, self.block_ids))
            if wait:
                assert jobs[-1].wait_gathered(TIMEOUT_S), "a copy did not end"
        results = [ended(job.wait(TIMEOUT_S)) for job in jobs]
        stored = sum(result.ok_chunks for result in results)
        dropped = sum(stop - start for result in results for start, stop, _ in result.failed)
        assert stored + dropped == TIMES * self.slots, f"{stored} stored and {dropped} dropped of {TIMES * self.slots}"
        assert self._drops() - before == dropped, f"{dropped} dropped, {self._drops() - before} counted"
        return 100 * stored / (stored + dropped), chain

    def _check(self, chain: Chain) -> None:
        """What was stored last is there and has the bytes that it was given."""
        self.target.fill(0)
        hit = self.cache.lookup(chain, "check")
        assert hit.resident == BATCH, "the newest records are not there"
        ended(self.cache.retrieve(hit, self.shard, range(BATCH), self.target_pages, self.block_ids).wait(TIMEOUT_S))
        self.cache.release("check")
        check_equal(self.target, self.source, "the newest records")

    def _pinned(self) -> float:
        """Offer with every record pinned; percent of the drops that were counted."""
        chains = [new_chain(self.model, BATCH) for _ in range(self.slots // BATCH)]
        held = 0
        for chain in chains:  # pinned one by one: the policy may keep older records that were used before newer ones
            ended(self.cache.store(chain, self.shard, range(BATCH), self.pages, self.block_ids).wait(TIMEOUT_S))
            held += self.cache.pin(chain)
        assert held == self.slots, f"{held} of {self.slots} records are pinned"
        before = self._drops()
        stored, _ = self._offer(wait=True)
        counted = self._drops() - before
        assert stored == 0, f"{stored} % stored where everything is pinned"
        for chain in chains:
            assert self.cache.lookup(chain, "check").resident == BATCH, "a pinned record was evicted"
            self.cache.release("check")
            self.cache.unpin(chain)
        return 100 * counted / (TIMES * self.slots)

    def _drops(self) -> int:
        return int(self.cache.metrics.count("drops", tier="host", reason="no room"))


class Sampler:
    """A thread that looks every 20 milliseconds at how much memory is in use."""

    def __init__(self, cache: LocalCache) -> None:
        self.peak_nbytes = 0
        self.samples = 0
        self._cache = cache
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self._stop.wait(SAMPLE_INTERVAL_S):
            backed = backed_nbytes(self._cache._pool.slab)
            self.peak_nbytes = max(self.peak_nbytes, backed, self._cache.status().used_nbytes)
            self.samples += 1

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._thread.join()
