"""Engines of a simulation: each a thread that stores, looks up, loads, pins and forgets, and checks what it gets."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Final

from tiny import BLOCKS, Engine

from lmcache_core import Chain, GroupKind, Hit, Job, JobResult, Shard

from .world import LONGEST, World, prompt

LOST_S: Final = 3_600.0
"""Simulated seconds after which a job is taken for one that never ends."""


class Client:
    def __init__(self, world: World, number: int) -> None:
        self.world = world
        self.number = number
        self.rng = random.Random(f"client {world.plan.seed} {world.number} {number}")
        self.asked = 0
        self.kept: list[str] = []
        """Requests that were looked up and not released."""

    def run(self) -> None:
        """Do what the plan says, then let go of everything."""
        world, rng = self.world, self.rng
        steps: dict[Callable[[], None], float] = {
            self.store: 4,
            self.load: 8,
            self.pin_or_unpin: 1,
            self.prefetch: 0.7,
            self.evict: world.plan.evictions,
            self.drain: 0.2,
            self.rest: 0.3,
        }
        for _ in range(world.plan.steps):
            step = rng.choices(list(steps), list(steps.values()))[0]
            step()
            world.scheduler.sleep(rng.expovariate(1 / world.plan.pause_s))
        if world.plan.abrupt:
            self.begin_and_leave()
            return
        for request in self.kept:
            world.cache.release(request)
        for chain in [c for c in world.pinned if self._mine(c)]:
            self._unpin(chain)

    def store(self) -> None:
        world, chain = self.world, self._chain()
        start = self.rng.choice((0, 0, self.rng.randrange(len(chain))))
        for shard in chain.model.shards:
            span = range(start, len(chain))
            engine = Engine(len(span) * BLOCKS)
            ids = engine.compute(chain, shard, span)
            world.stored.update(chain.keys(shard, span))
            with self._at_once("store"):
                job = world.cache.store(chain, shard, span, engine.pages, ids)
            self._watch(job, "store", len(span), 0.0)
            if self.rng.random() < 0.7:
                world.expect(job.wait_gathered(LOST_S), "a store's blocks are never given back")
                for layer in engine.pages[0]:
                    layer[:] = 0x5A  # the engine computes something else there

    def load(self) -> None:
        world, rng, chain = self.world, self.rng, self._chain()
        self.asked += 1
        request = f"client {self.number} {self.asked}"
        hit = self._lookup(chain, request)
        if rng.random() < 0.2:  # the scheduler asks again later
            world.scheduler.sleep(rng.expovariate(1 / world.plan.pause_s))
            hit = self._lookup(chain, request)
        at = world.scheduler.now
        if rng.random() < 0.2:
            world.scheduler.sleep(rng.expovariate(1 / world.plan.pause_s))
        way = rng.choice(("release", "release", "release", "abort", "early", "keep"))
        if way == "abort":
            world.cache.release(request)
            return
        span = range(hit.chunks if rng.random() < 0.9 else len(chain))
        leased = world.scheduler.now - at < world.plan.lease_timeout_s and world.plan.max_leases > 1000
        loads = []
        for group in chain.model.groups:
            state = group.kind is GroupKind.STATE
            part = range(max(0, span.stop - 1), span.stop) if state else span
            for shard in group.shards:
                engine = Engine(max(1, len(part)) * BLOCKS)
                with self._at_once("retrieve"):
                    job = world.cache.retrieve(hit, shard, part, engine.pages, list(range(len(part) * BLOCKS)))
                self._watch(job, "retrieve", len(part), self._longest_load_s())
                sure = leased and (not state or span.stop in (hit.resident, hit.chunks))
                loads.append((shard, part, engine, job, sure))
        if way == "early":
            world.cache.release(request)
        for shard, part, engine, job, sure in loads:
            self._check(hit, shard, part, engine, self._end(job), sure)
        if way == "release":
            with self._at_once("release"):
                world.cache.release(request)
        elif way == "keep":
            self.kept.append(request)

    def begin_and_leave(self) -> None:
        """Have some of everything under way, and the stores slow, so that there is more behind it."""
        world, chain = self.world, self._chain()
        for backend in world.backends:
            backend.trouble.latency_s = backend.context.timeout_s
        shard, span = chain.model.shards[0], range(len(chain))
        engine = Engine(len(chain) * BLOCKS)
        ids = engine.compute(chain, shard, span)
        world.stored.update(chain.keys(shard))
        self._watch(world.cache.store(chain, shard, span, engine.pages, ids), "store", len(span), 0.0)
        for number in range(3):
            hit = self._lookup(self._chain(), f"{number} of client {self.number}'s last")
            span, shard = range(len(hit.chain)), hit.chain.model.shards[0]
            engine = Engine(len(span) * BLOCKS)
            job = world.cache.retrieve(hit, shard, span, engine.pages, list(range(len(span) * BLOCKS)))
            self._watch(job, "retrieve", len(span), self._longest_load_s())
            self.prefetch()

    def prefetch(self) -> None:
        chain = self._chain()
        with self._at_once("prefetch"):
            job = self.world.cache.prefetch(chain)
        probing = 2 * max((tier.timeout_s for tier in self.world.plan.tiers), default=0.0)
        if self.world.plan.max_leases < 1000:  # a lease that ends early is asked for again, and again
            probing *= 100
        bound_s = self._longest_load_s() + probing
        self._watch(job, "prefetch", len(chain), bound_s, len(chain.model.shards))
        if self.rng.random() < 0.5 and not self.world.plan.abrupt:
            self._end(job)

    def pin_or_unpin(self) -> None:
        world, chain = self.world, self._chain()
        if not self._mine(chain):
            return
        if chain in world.pinned:
            self._unpin(chain)
        else:
            with self._at_once("pin"):
                count = world.cache.pin(chain)
            world.pinned[chain] = count

    def _unpin(self, chain: Chain) -> None:
        del self.world.pinned[chain]
        self.world.cache.unpin(chain)

    def evict(self) -> None:
        with self._at_once("evict"):
            self.world.cache.evict(self._chain())

    def drain(self) -> None:
        world = self.world
        timeout_s = self.rng.choice((0.1, 3.0))
        with self._within(timeout_s, "drain"):
            world.cache.drain(timeout_s)

    def rest(self) -> None:
        world = self.world
        world.cache.poll()
        long = self.rng.random() < 0.1
        world.scheduler.sleep(7_200.0 if long else self.rng.expovariate(2 / world.plan.lease_timeout_s))

    def _lookup(self, chain: Chain, request: str) -> Hit:
        cache = self.world.cache
        if self.rng.random() < 0.5:
            with self._at_once("lookup"):
                hit = cache.lookup(chain, request)
        else:
            timeout_s = self.rng.choice((0.01, 1.0))
            with self._within(timeout_s, "lookup_answered"):
                hit = cache.lookup_answered(chain, request, timeout_s=timeout_s)
        return hit

    def _check(self, hit: Hit, shard: Shard, span: range, engine: Engine, result: JobResult, leased: bool) -> None:
        """Every chunk that is said to be there is there; every other says why, and left no trace if it never came."""
        world, chain = self.world, hit.chain
        reasons = {n: reason for start, stop, reason in result.failed for n in range(start, stop)}
        leading = min(reasons, default=span.stop) - span.start
        world.expect(result.ok_chunks == leading, "ok_chunks is not the length before a failure")
        keys = chain.keys(shard)
        for n in span:
            at = (n - span.start) * BLOCKS
            reason = reasons.get(n)
            if reason is None:
                world.expect(keys[n] in world.stored, "a chunk was found that nobody stored")
                world.expect(engine.holds(chain, shard, n, at), "a lie: chunk {} holds other bytes", n)
                world.proven += 1
                continue
            world.expect(reason != "overwritten", "a slot was reused while somebody held it")
            if reason.startswith("device"):
                continue
            world.expect(engine.poisoned(at), "chunk {} failed ({}) and its blocks were written", n, reason)
            world.expect(n >= hit.resident or not leased, "chunk {} was leased in host memory, then: {}", n, reason)
            sure = leased and n < hit.chunks and world.plan.calm and world.plan.caches == 1
            world.expect(not sure or reason == "no room", "chunk {} was leased and nothing failed, then: {}", n, reason)

    def _watch(self, job: Job, kind: str, chunks: int, bound_s: float, records_each: int = 1) -> None:
        """The job must end by its deadline, and its result must add up."""
        world, scheduler = self.world, self.world.scheduler
        began, delayed, busy = scheduler.now, scheduler.delayed_s, world.device.busy.seconds()

        def ended(result: JobResult) -> None:
            excused = scheduler.delayed_s - delayed + world.device.busy.seconds() - busy
            if world.closed_at is not None:  # what is under way then ends with the close
                excused += scheduler.now - max(began, world.closed_at)
            took = scheduler.now - began - excused
            world.expect(took <= bound_s + 1e-6, "a {} took {} s, at most {} are allowed", kind, took, bound_s)
            failed = sum(stop - start for start, stop, _ in result.failed)
            if kind == "store":
                world.expect(result.ok_chunks + result.skipped + failed == chunks, "does not add up: {}", result)
                world.jobs["stores ok"] += result.ok_chunks
                world.jobs["stores skipped"] += result.skipped
                world.jobs["stores failed"] += failed
                world.jobs["store_bytes"] += result.nbytes
            elif kind == "retrieve":
                late = sum(stop - start for start, stop, reason in result.failed if reason == "late")
                world.jobs["loads ok"] += chunks - failed
                world.jobs["loads late"] += late
                world.jobs["loads failed"] += failed - late
                world.jobs["load_bytes"] += result.nbytes
            world.jobs["ended"] += 1
            refused = sum(stop - start for start, stop, reason in result.failed if reason == "no room")
            world.jobs["no room"] += refused
            world.jobs["no room, at most"] += refused * records_each

        world.jobs["begun"] += 1
        job.add_done_callback(ended)

    def _end(self, job: Job) -> JobResult:
        result = job.wait(LOST_S)
        if result is None:
            self.world.expect(False, f"job {job.job_id} has no end\n{self.world.scheduler.stacks()}")
        assert result is not None
        return result

    def _longest_load_s(self) -> float:
        return sum(2 * tier.timeout_s for tier in self.world.plan.tiers)

    @contextmanager
    def _within(self, seconds: float, what: str) -> Iterator[None]:
        scheduler = self.world.scheduler
        began, delayed = scheduler.now, scheduler.delayed_s
        yield
        took = scheduler.now - began - (scheduler.delayed_s - delayed)
        self.world.expect(took <= seconds + 1e-6, "{} took {} s, at most {} are allowed", what, took, seconds)

    def _at_once(self, what: str) -> AbstractContextManager[None]:
        return self._within(0.0, what)

    def _chain(self) -> Chain:
        plan, rng = self.world.plan, self.rng
        return prompt(rng.randrange(plan.models), rng.randrange(plan.prompts), rng.randrange(1, LONGEST + 1))

    def _mine(self, chain: Chain) -> bool:
        """Pins have no owner: each client pins chains of its own only."""
        return len(chain) % self.world.plan.clients == self.number
