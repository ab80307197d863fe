"""Half an hour of mixed load with churned models and size classes: memory, descriptors and threads must stay flat.

One cache in a process of its own, a daemon, and two clients of it, each over a disk tier that is smaller than what goes
through it.  New models come all the time and are never seen again.  Every byte that is loaded is checked.  The load is
paced: well under one core.

`python long_run.py --minutes 30` prints what each process grew by, fitted after warming up, against its bound, and the
path of the plot; it exits with 1 if something grew.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import hashlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from lmcache_core import Cache, Chain, Family, Group, GroupKind, Layout, Model, Region, Shard, open_cache
from lmcache_core.client.cache import connect

CONFIG = """\
chunk_tokens: 16
tiers:
  - {{name: host, backend: memory, capacity: 48MiB}}
  - {{name: disk, backend: disk, capacity: 64MiB, timeout: 5s, options: {{path: "{path}"}}}}
"""
CHUNK = 16
BLOCK_TOKENS = 4
BLOCKS = CHUNK // BLOCK_TOKENS
CLASSES = ((1, 1024), (2, 1024), (2, 4096), (3, 8192), (4, 16_384), (8, 16_384))
"""(layers, bytes of a block): chunks of 4 KiB to 512 KiB."""
MODEL_S = 0.4
"""A new model comes this often, and one that came four before it is not asked for again."""
RECENT = 4
LONGEST = 5
PROMPTS = 6
PACE_S = 0.04
"""Between two operations of one worker."""
SAMPLE_S = 1.0
WARM_SHARE, WARM_S = 0.3, 40.0
"""Of the run, and at least, before the fit begins: tiers fill, pools and caches reach their size."""
WAIT_S = 30.0

MIB = 1 << 20
BOUNDS = {"rss": 6 * MIB, "private": 4 * MIB, "slab": 4 * MIB, "extents": 8.0, "descriptors": 1.0, "threads": 1.0}
"""What a fitted line may grow by from the end of the warm-up to the end of the run."""
FULL_MINUTES, WHILE_FILLING = 20.0, 3.0
"""In a shorter run tables of models and maps of memory are still filling up to their bounds: that is allowed for."""


class Wrong(Exception):
    """Bytes of another record, or a job without an end."""


@lru_cache(maxsize=2 * RECENT)
def model(number: int) -> Model:
    layers, block_nbytes = CLASSES[number % len(CLASSES)]
    family = Family(model=f"org/churn-{number}", weights="1", kv_dtype="float16", chunk_tokens=CHUNK)
    region = Region(
        name="kv", layers=layers, block_tokens=BLOCK_TOKENS, block_nbytes=block_nbytes, dtype="float16", packing="test"
    )
    shard = Shard.of(family, Layout(chunk_tokens=CHUNK, regions=(region,)), layers=(0, layers))
    return Model(family, (Group(GroupKind.FULL, (shard,)),))


def expected(key: bytes, shape: tuple[int, int, int]) -> np.ndarray:
    """The payload of a record, which names it."""
    nbytes = shape[0] * shape[1] * shape[2]
    once = np.frombuffer(hashlib.sha256(key).digest(), np.uint8)
    return np.resize(once, nbytes).reshape(shape)


@dataclass
class Load:
    """One worker's operations on its cache."""

    cache: Cache
    rng: random.Random
    started: float
    done: Counter[str] = field(default_factory=Counter)

    def step(self, number: int) -> None:
        newest = int((time.time() - self.started) / MODEL_S)
        of = model(max(0, newest - self.rng.randrange(RECENT)))
        (shard,) = of.shards
        (region,) = shard.layout.regions
        prompt, chunks = self.rng.randrange(PROMPTS), self.rng.randrange(1, LONGEST + 1)
        tokens = [prompt * 1000 + n for n in range(chunks * CHUNK + 3)]
        chain = Chain.of(of, tokens)
        shape = (region.layers, BLOCKS, region.block_nbytes)
        pages = [[np.full((chunks * BLOCKS, region.block_nbytes), 0xA5, np.uint8) for _ in range(region.layers)]]
        blocks = list(range(chunks * BLOCKS))
        request = f"{os.getpid()}-{number}"
        draw = self.rng.random()
        if draw < 0.45:
            for index, key in enumerate(chain.keys(shard)):
                data = expected(key, shape)
                for layer in range(region.layers):
                    pages[0][layer][index * BLOCKS : (index + 1) * BLOCKS] = data[layer]
            job = self.cache.store(chain, shard, range(chunks), pages, blocks, request=request)
            result = job.wait(WAIT_S)
            if result is None:
                raise Wrong(f"store {number} did not end")
            self.done["stored"] += result.ok_chunks
        elif draw < 0.9:
            hit = self.cache.lookup_answered(chain, request, timeout_s=5)
            self.done["lookups"] += 1
            if draw > 0.88:
                return  # forgotten: the cache must get over it
            span = range(hit.chunks)
            result = self.cache.retrieve(hit, shard, span, pages, blocks[: len(span) * BLOCKS]).wait(WAIT_S)
            if result is None:
                raise Wrong(f"load {number} did not end")
            failed = {chunk for start, stop, _ in result.failed for chunk in range(start, stop)}
            for index, key in enumerate(chain.keys(shard, span)):
                if index in failed:
                    continue
                found = np.stack([layer[index * BLOCKS : (index + 1) * BLOCKS] for layer in pages[0]])
                if not np.array_equal(found, expected(key, shape)):
                    raise Wrong(f"chunk {index} of {chain!r} holds wrong bytes")
                self.done["right"] += 1
            self.done["failed"] += len(failed)
            self.cache.release(request)
        elif draw < 0.93:
            self.cache.pin(chain)
            self.cache.unpin(chain)
        elif draw < 0.96:
            self.cache.prefetch(chain).wait(WAIT_S)
        elif draw < 0.98:
            self.cache.evict(chain)
        else:
            self.cache.drain(0.5)
        self.cache.poll()


def work(kind: str, place: str, seed: int, started: float) -> None:
    """Until standard input ends."""
    ended = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), name="end").start()
    opened: Any = open_cache(place) if kind == "local" else connect(place, call_timeout_s=5.0)
    with opened as cache:
        load = Load(cache, random.Random(seed), started)
        number = 0
        while not ended.wait(PACE_S):
            number += 1
            load.step(number)
    print(
        f"{number} operations, {', '.join(f'{count} {name}' for name, count in sorted(load.done.items()))}", flush=True
    )


# Watching them.


@dataclass(frozen=True)
class Sample:
    at_s: float
    rss: int
    private: int
    """Anonymous memory: what the process has for itself."""
    slab: int
    """What it has mapped of shared memory."""
    extents: int
    """Descriptors of the slab: as many as there are extents, which are of unequal length."""
    descriptors: int
    """All others."""
    threads: int
    cpu_s: float


def sample(pid: int, at_s: float) -> Sample:
    """What a process uses now."""
    rss, private, slab = _memory(Path(f"/proc/{pid}/smaps").read_text())
    times = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    extents = descriptors = 0
    for fd in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            extents += "memfd:lmcache-extent" in os.readlink(f"/proc/{pid}/fd/{fd}")
            descriptors += 1
    return Sample(
        at_s,
        rss=rss,
        private=private,
        slab=slab,
        extents=extents,
        descriptors=descriptors - extents,
        threads=len(os.listdir(f"/proc/{pid}/task")),
        cpu_s=(int(times[11]) + int(times[12])) / os.sysconf("SC_CLK_TCK"),
    )


def _memory(smaps: str) -> tuple[int, int, int]:
    """Bytes that are resident, those of them that are private, and those of the slab: what a forked child has not."""
    rss = private = slab = resident = anonymous = 0
    for line in smaps.splitlines():
        name, *rest = line.split()
        if name == "Rss:":
            resident = int(rest[0]) << 10
        elif name == "Anonymous:":
            anonymous = int(rest[0]) << 10
        elif name == "VmFlags:":  # the last of a map
            rss += resident
            if "dc" in rest:
                slab += resident
            else:
                private += anonymous
    return rss, private, slab


def after_warming_up(samples: list[Sample]) -> list[Sample]:
    warm_s = max(WARM_S, WARM_SHARE * samples[-1].at_s)
    return [each for each in samples if each.at_s >= warm_s]


def growth(samples: list[Sample], name: str) -> float:
    """By how much a line through the samples after the warm-up rises from its beginning to its end."""
    rest = after_warming_up(samples)
    at = np.array([each.at_s for each in rest])
    values = np.array([float(getattr(each, name)) for each in rest])
    slope = np.polyfit(at - at[0], values, 1)[0]
    return float(slope * (at[-1] - at[0]))


def grown(taken: dict[str, list[Sample]], minutes: float) -> list[str]:
    """What went over its bound; prints all of it."""
    over = []
    more = 1.0 if minutes >= FULL_MINUTES else WHILE_FILLING
    for process, samples in taken.items():
        row = []
        for name, bound in BOUNDS.items():
            rise = growth(samples, name)
            last = getattr(samples[-1], name)
            unit = MIB if bound >= MIB else 1
            row.append(f"{name} {last / unit:.1f} {rise / unit:+.2f}")
            if rise > bound * more:
                over.append(f"{process}: {name} grew by {rise / unit:.2f}, over the bound of {bound * more / unit:.0f}")
        print(f"{process:9} {'   '.join(row)}")
    return over


def plot(taken: dict[str, list[Sample]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(len(BOUNDS), 1, sharex=True, figsize=(10, 12), constrained_layout=True)
    for axis, (name, bound) in zip(axes, BOUNDS.items(), strict=True):
        unit = MIB if bound >= MIB else 1
        for process, samples in taken.items():
            axis.plot([s.at_s / 60 for s in samples], [getattr(s, name) / unit for s in samples], label=process, lw=1)
        axis.set_ylabel(f"{name}{', MiB' if unit > 1 else ''}")
        axis.set_ylim(bottom=0)
    warm = max(after_warming_up(samples)[0].at_s for samples in taken.values()) / 60
    for axis in axes:
        axis.axvline(warm, color="grey", ls=":")
    axes[0].legend(loc="lower right", ncols=len(taken))
    axes[-1].set_xlabel("minutes")
    figure.savefig(path, dpi=100)


@contextlib.contextmanager
def processes(folder: Path, seed: int) -> Iterator[dict[str, subprocess.Popen[str]]]:
    """The daemon and the workers, told to end at the end."""
    started = str(time.time())
    for name in ("local", "daemon"):
        (folder / f"{name}.yaml").write_text(CONFIG.format(path=folder / f"{name}-disk"))
    socket = folder / "s"
    serve = [sys.executable, "-m", "lmcache_core.cli", "serve", "--config", str(folder / "daemon.yaml")]
    running: dict[str, subprocess.Popen[str]] = {}
    try:
        running["daemon"] = subprocess.Popen([*serve, "--socket", str(socket)], text=True)
        deadline = time.monotonic() + WAIT_S
        while not socket.exists():
            if time.monotonic() > deadline or running["daemon"].poll() is not None:
                raise RuntimeError("the daemon did not start")
            time.sleep(0.05)  # waits for a condition, with a deadline
        places = {"local": folder / "local.yaml", "client 1": socket, "client 2": socket}
        for number, (name, place) in enumerate(places.items()):
            words = [sys.executable, __file__, "--worker", name.split()[0], str(place), str(seed + number), started]
            running[name] = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        yield running
    finally:
        for process in running.values():
            if process.poll() is None:
                process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()


def watch(running: dict[str, subprocess.Popen[str]], minutes: float) -> dict[str, list[Sample]]:
    taken: dict[str, list[Sample]] = {name: [] for name in running}
    start = time.monotonic()
    pause = threading.Event()
    while (now := time.monotonic() - start) < 60 * minutes:
        for name, process in running.items():
            if process.poll() is not None:
                raise Wrong(f"{name} ended by itself after {now:.0f} s, with what it says above")
            taken[name].append(sample(process.pid, now))
        pause.wait(SAMPLE_S)
    return taken


def end(running: dict[str, subprocess.Popen[str]]) -> list[str]:
    """Ask each to end, clients first; what was wrong."""
    problems = []
    for name, process in reversed(running.items()):
        if name == "daemon":
            process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=60)
        if output:
            print(f"{name:9} {output.strip()}")
        if process.returncode != 0:
            problems.append(f"{name} ended with {process.returncode}")
    return problems


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--plot", type=Path, default=Path("long_run.png"))
    parser.add_argument("--worker", nargs=4, metavar=("KIND", "PLACE", "SEED", "STARTED"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if 60 * given.minutes < 1.4 * WARM_S:
        parser.error(f"--minutes must be at least {1.4 * WARM_S / 60:.1f}: warming up takes {WARM_S:.0f} s")
    if given.worker:
        kind, place, seed, started = given.worker
        work(kind, place, int(seed), float(started))
        return 0
    seed = random.randrange(1 << 32) if given.seed is None else given.seed
    print(f"seed {seed}, {given.minutes:g} minutes")
    with tempfile.TemporaryDirectory() as folder, processes(Path(folder), seed) as running:
        taken = watch(running, given.minutes)
        problems = end(running)
        left = [path.name for path in Path(folder).glob("*-disk/v1/tmp/*")]
    problems += [f"left behind: {name}" for name in left]
    problems += grown(taken, given.minutes)
    cpu = sum(samples[-1].cpu_s - samples[0].cpu_s for samples in taken.values()) / (60 * given.minutes)
    print(f"{cpu:.2f} cores in use")
    given.plot.parent.mkdir(parents=True, exist_ok=True)
    with given.plot.with_suffix(".csv").open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["process", *Sample.__dataclass_fields__])
        for name, samples in taken.items():
            table.writerows([name, *(getattr(each, key) for key in Sample.__dataclass_fields__)] for each in samples)
    plot(taken, given.plot)
    print(f"plot: {given.plot.resolve()}")
    for problem in problems:
        print(f"FAILED {problem}")
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
