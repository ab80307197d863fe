"""One simulated cache: everything about it drawn from a seed, built of core's real parts, used, healed and closed."""

from __future__ import annotations

import logging
import random
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache as cached
from typing import Any, Final

from tiny import LAYERS, LAYOUT, RECORD, chain, family, model

from lmcache_core import Chain, Group, GroupKind, LocalCache, Model, Shard, late, leases, salt_id
from lmcache_core.backend import Context, Traits
from lmcache_core.buffers import Slab
from lmcache_core.codec import Codec, Identity
from lmcache_core.events import Events
from lmcache_core.layout import Layout
from lmcache_core.metrics import Metrics
from lmcache_core.policies.arc import ARC
from lmcache_core.policies.fifo import FIFO
from lmcache_core.policies.lfu import LFU
from lmcache_core.policies.lru import LRU
from lmcache_core.policies.s3fifo import S3FIFO
from lmcache_core.policy import EvictionPolicy
from lmcache_core.pool import Pool, Write
from lmcache_core.sealing import Sealer
from lmcache_core.tier import Tier

from .scheduler import Scheduler, SimulationError
from .stores import ANY, READS, WRITES, Records, SimBackend, SimDevice, Trouble
from .threads import simulated

WRITE: Final[tuple[Write, ...]] = ("through", "through", "through", "second_use", "on_evict")
POLICIES: Final = (LRU, S3FIFO, LFU, FIFO, ARC)


def _hybrid() -> Model:
    """Attention over everything beside a recurrent state."""
    of = family(model="org/hybrid")
    kinds = (GroupKind.FULL, GroupKind.STATE)
    shards = [Shard.of(of, LAYOUT, group=n, layers=(n * LAYERS, (n + 1) * LAYERS)) for n in range(2)]
    return Model(of, tuple(Group(kind, (shard,)) for kind, shard in zip(kinds, shards, strict=True)))


MODELS: Final = (model(), model(salt_id=salt_id("alice")), model(shards=2, salt_id=salt_id("bob")), _hybrid())
LONGEST: Final = 6


class Inverted(Codec):
    """Lossless, and anything but the identity: bytes inverted, behind a count."""

    api_version = (1, 0)
    lossy = False

    def max_nbytes(self, layout: Layout) -> int:
        return layout.nbytes + 8

    def encode(self, raw: memoryview, layout: Layout, out: memoryview) -> int:
        out[:8] = layout.nbytes.to_bytes(8, "little")
        out[8 : 8 + layout.nbytes] = bytes(raw).translate(_INVERTED)
        return layout.nbytes + 8

    def decode(self, data: memoryview, layout: Layout, out: memoryview) -> None:
        out[:] = bytes(data[8:]).translate(_INVERTED)


_INVERTED: Final = bytes(255 - byte for byte in range(256))


@cached
def prompt(number: int, seed: int, chunks: int) -> Chain:
    """A prompt of a model; those of one seed share a prefix."""
    return chain(chunks, seed=seed, of=MODELS[number])


@dataclass(frozen=True, slots=True)
class TierPlan:
    traits: Traits
    capacity_nbytes: int | None
    quota_nbytes: int | None
    timeout_s: float
    max_queued_nbytes: int
    probe_interval_s: float
    rates: dict[str, float]
    outages: list[tuple[float, float, bool]]
    latency_s: float
    codec: type[Codec]


@dataclass(frozen=True, slots=True)
class Plan:
    """What a seed stands for."""

    seed: int
    slots: int
    extent_slots: int
    write: Write
    policy: type[EvictionPolicy]
    quota_nbytes: int | None
    lease_timeout_s: float
    max_leases: int
    tiers: tuple[TierPlan, ...]
    device: dict[str, float]
    caches: int
    clients: int
    """Of each cache."""
    steps: int
    evictions: float
    """How often a client evicts, beside its other steps."""
    models: int
    prompts: int
    pause_s: float
    again: bool
    """Opened a second time, over what is left in the stores."""
    threads_refused: float
    """How often a thread that is stuck cannot be replaced."""
    abrupt: bool
    """Closed in the middle of everything."""
    switch: float
    lines: int
    delay_s: float

    @property
    def calm(self) -> bool:
        """Whether nothing fails in it, nor is slow."""
        slow = any(tier.latency_s > tier.timeout_s / 50 for tier in self.tiers)
        return not (self.abrupt or self.device or slow or any(tier.rates or tier.outages for tier in self.tiers))


def plan_of(seed: int) -> Plan:
    rng = random.Random(f"plan {seed}")
    calm = rng.random() < 0.25
    slots = rng.choice((6, 8, 10, 16, 24))
    return Plan(
        seed=seed,
        slots=slots,
        extent_slots=rng.choice((1, 2, 5)),
        write=rng.choice(WRITE),
        policy=rng.choice(POLICIES),
        quota_nbytes=rng.choice((None, None, max(2, slots // 3) * RECORD)),
        lease_timeout_s=rng.choice((5.0, 60.0)),
        max_leases=rng.choice((65_536, 65_536, 65_536, 4)),
        tiers=tuple(_tier_plan(rng, calm, slots) for _ in range(rng.choice((0, 1, 1, 1, 2, 2)))),
        device={} if calm or rng.random() < 0.5 else _rates(rng, DEVICE_FAULTS, 0.08),
        caches=rng.choice((1, 1, 1, 2)),
        clients=rng.choice((1, 2, 3, 4)),
        steps=rng.choice((10, 25, 40)),
        evictions=rng.choice((0.0, 0.4, 3.0)),
        models=rng.choice((1, 1, 2, 3, 4)),
        prompts=rng.choice((1, 3, 6)),
        pause_s=rng.choice((0.0005, 0.005, 0.05, 0.5)),
        again=rng.random() < 0.2,
        threads_refused=rng.choice((0.0, 0.0, 0.5)),
        abrupt=rng.random() < 0.3,
        switch=rng.choice((0.02, 0.1, 0.3)),
        lines=rng.choice((0, 0, 0, 30, 300)),
        delay_s=rng.choice((0.0, 0.0, 0.001, 0.1)),
    )


DEVICE_FAULTS: Final = (
    "device_async",
    "device_slow",
    "device_error",
    "device_foreign",
    "device_late",
    "refuse_register",
)


def _rates(rng: random.Random, faults: tuple[str, ...], highest: float) -> dict[str, float]:
    """Each fault with its own rate; few seeds have all."""
    chosen = [fault for fault in faults if rng.random() < 0.4]
    return {fault: rng.uniform(0.1, 1.0) * highest for fault in chosen}


def _tier_plan(rng: random.Random, calm: bool, slots: int) -> TierPlan:
    timeout_s = rng.choice((0.2, 1.0))
    outages: list[tuple[float, float, bool]] = []
    if not calm and rng.random() < 0.4:
        at = 1_000.0 + rng.choice((0.0, rng.expovariate(1.0)))
        for _ in range(rng.randrange(1, 4)):
            outages.append((at, at + rng.expovariate(0.5), rng.random() < 0.5))
            at = outages[-1][1] + rng.expovariate(0.5)
    return TierPlan(
        traits=Traits(
            persistent=rng.random() < 0.5,
            shared=rng.random() < 0.4,
            io_threads=rng.choice((1, 2, 4, 6)),
            max_nbytes=RECORD - 4096 if rng.random() < 0.05 else None,
        ),
        capacity_nbytes=rng.choice((None, None, 8 * RECORD, 8 * RECORD, 30 * RECORD)),
        quota_nbytes=rng.choice((None, None, 6 * RECORD)),
        timeout_s=timeout_s,
        max_queued_nbytes=rng.choice((1, 4 * RECORD, max(1, slots // 4) * RECORD, 1 << 30, 1 << 30)),
        probe_interval_s=rng.choice((0.5, 1.0, 5.0)),
        rates={} if calm or rng.random() < 0.3 else _rates(rng, ANY, 0.2) | _rates(rng, (*READS, *WRITES, "lie"), 0.4),
        outages=outages,
        latency_s=rng.choice((0.0001, 0.002)) if calm else rng.choice((0.0001, 0.002, timeout_s / 4)),
        codec=rng.choice((Identity, Identity, Inverted)),
    )


@dataclass(slots=True)
class World:
    """What runs, and what its clients know to be true."""

    plan: Plan
    number: int
    scheduler: Scheduler
    metrics: Metrics
    events: Events
    cache: LocalCache
    device: SimDevice
    backends: list[SimBackend]
    stored: set[bytes]
    """Keys of which a store was ever asked, of any cache."""
    heard: Counter[tuple[str, str]]
    """Keys of the eviction events, by tier and reason."""
    pinned: dict[Chain, int] = field(default_factory=dict)
    """Chains that are pinned now, with what `pin` returned."""
    jobs: Counter[str] = field(default_factory=Counter)
    """Chunks of the jobs that ended, by kind and outcome, as their results tell it."""
    closed_at: float | None = None
    proven: int = 0
    """Chunks whose bytes were compared."""

    @property
    def pool(self) -> Pool:
        return self.cache._pool

    def expect(self, truth: object, problem: str, *details: object) -> None:
        """End the simulation unless `truth`."""
        if not truth:
            self.scheduler.fail(SimulationError(problem.format(*details)))

    def models(self) -> tuple[Model, ...]:
        return MODELS[: self.plan.models]


def build(scheduler: Scheduler, plan: Plan, number: int, records: list[Records], stored: set[bytes]) -> World:
    """One cache as planned, over what these stores hold."""
    metrics = Metrics()
    heard: Counter[tuple[str, str]] = Counter()

    def hear(hook: str, arguments: dict[str, Any]) -> None:
        if hook == "lmcache_chunks_evicted":
            heard[arguments["tier"], arguments["reason"]] += len(arguments["keys"])

    events = Events(hear, lambda: metrics.add("hook_drops"))
    clock = lambda: scheduler.now  # noqa: E731
    backends: list[SimBackend] = []
    tiers: list[Tier] = []
    for each, held in zip(plan.tiers, records, strict=True):
        context = Context(capacity_nbytes=each.capacity_nbytes, timeout_s=each.timeout_s)
        trouble = Trouble(each.rates, each.outages, each.latency_s)
        backends.append(SimBackend(scheduler, trouble, held, each.traits, context))
        tiers.append(
            Tier(
                f"tier{len(tiers)}",
                backends[-1],
                backend_name="simulated",
                sealer=Sealer(each.codec(), "identity" if each.codec is Identity else "inverted", lambda name: None),
                new_policy=plan.policy,
                capacity_nbytes=each.capacity_nbytes,
                tenant_quota_nbytes=each.quota_nbytes,
                timeout_s=each.timeout_s,
                max_queued_nbytes=each.max_queued_nbytes,
                metrics=metrics,
                events=events,
                probe_interval_s=each.probe_interval_s,
                clock=clock,
            )
        )
        tiers[-1].start()
    pool = Pool(
        Slab(plan.slots * RECORD, plan.extent_slots * RECORD),
        tiers,
        new_policy=plan.policy,
        metrics=metrics,
        events=events,
        write=plan.write,
        tenant_quota_nbytes=plan.quota_nbytes,
        lease_timeout_s=plan.lease_timeout_s,
        clock=clock,
    )
    device = SimDevice(scheduler, dict(plan.device))
    cache = LocalCache(pool, device, metrics=metrics, events=events, device_name="simulated")
    return World(plan, number, scheduler, metrics, events, cache, device, backends, stored, heard)


@contextmanager
def simulation(plan: Plan) -> Iterator[Scheduler]:
    """Core over simulated threads and time, quiet: what it logs of faults is not what is looked at."""
    scheduler = Scheduler(plan.seed, switch=plan.switch, lines=plan.lines, delay_s=plan.delay_s)
    core = logging.getLogger("lmcache_core")
    level, most = core.level, leases.MAX_LEASES
    core.setLevel(logging.CRITICAL + 1)
    leases.MAX_LEASES = plan.max_leases  # type: ignore[misc]
    try:
        with simulated(scheduler):
            yield scheduler
    finally:
        leases.MAX_LEASES = most  # type: ignore[misc]
        late._unending.clear()
        core.setLevel(level)
