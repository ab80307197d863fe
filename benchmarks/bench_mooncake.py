"""Get and put of 8 and 32 MiB in Mooncake Store, with the memory in this process and in another, every byte compared.

Ours is the backend of lmcache-mooncake, one call for a batch, and, in rows of their own, a tier over it with
`checksum: none` and one with checksums, from and into slots that are registered.  The limit is the library's own
`batch_put_from` and `batch_get_into`, from and into registered memory, by a client of its own in the same process and
round.  All of it is TCP, in a process with a network namespace of its own, since the store listens on all interfaces.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
from harness.measure import MiB, Options, Timings, check_equal, gibps, milliseconds, paired, random_bytes, seconds
from harness.peer import Missing
from harness.report import Must, Row
from harness.tiers import TIMEOUT_S, TierSlots

from lmcache_core import ChunkKey, frame
from lmcache_core.buffers import Slab
from lmcache_core.layout import PAGE_NBYTES

TESTS = Path(__file__).resolve().parent.parent / "plugins" / "lmcache-mooncake" / "tests"
KEYS = 512
ROOM_NBYTES = 1 << 30
THREADS = min(4, os.cpu_count() or 1)


def rows(options: Options) -> Iterator[Row]:
    if importlib.util.find_spec("mooncake") is None:
        print("mooncake: not installed: pip install mooncake-transfer-engine-non-cuda, or run by nox", file=sys.stderr)
        return
    command = [sys.executable, __file__, str(options.rounds), "quick" if options.quick else "full"]
    environment = {**os.environ, "MC_LOG_LEVEL": "ERROR"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment
    ) as child:
        assert child.stdout is not None
        for line in child.stdout:
            if line.startswith("{"):
                yield Row(**json.loads(line))
            elif line.startswith("mooncake:"):
                print(line, end="", file=sys.stderr)
    assert not child.returncode, f"the benchmark ended with {child.returncode}; see it with: {' '.join(command)}"


def _main(rounds: int, quick: bool) -> None:
    sys.path.insert(0, str(TESTS))
    import isolation

    if isolation.PROBLEM:
        print(f"mooncake: cannot run here: {isolation.PROBLEM}", flush=True)
        return
    with tempfile.TemporaryDirectory(prefix="lmcache-mooncake-") as folder:
        options = Options(rounds=rounds, quick=quick, directory=Path(folder), peer=Missing("none"))
        for row in _rows(options):
            print(json.dumps(asdict(row)), flush=True)


def _rows(options: Options) -> Iterator[Row]:
    for where, nodes, segment in (("across processes", 1, 0), ("same process", 0, ROOM_NBYTES)):
        for nbytes, records in ((8 * MiB, 4 if options.quick else 8), (32 * MiB, 2 if options.quick else 4)):
            with _all(options.directory, nodes, segment, nbytes, records) as (ours, checked, limit):
                sides = {
                    "ours": lambda: ours.round() | ours.through("tier") | checked.through("checked"),
                    "limit": limit.round,
                }
                measured = paired(options, sides)
            size = f"{nbytes // MiB} MiB"
            note = f"{records} records of {size} in a batch, TCP on the loopback; limit: batch_get_into, batch_put_from"
            speed = gibps(records * nbytes)
            must = Must(ratio_limit=0.9)
            for what in ("get", "put"):
                row = f"{what}, {size}, {where}"
                yield measured.row("mooncake", row, "GiB/s", what, speed, peer="none", must=must, note=note)
            checksum = f"{note}; a checksum is computed or verified for each record, on {THREADS} threads"
            for tier, how, beside, held in (
                ("tier", "through a tier, checksum: none", note, must),
                ("checked", "through a tier", checksum, None),
            ):
                for what in ("get", "put"):
                    row = f"{what}, {size}, {where}, {how}"
                    figure = f"{tier} {what}"
                    yield measured.row(
                        "mooncake", row, "GiB/s", figure, speed, limit=what, peer="none", must=held, note=beside
                    )
        note = "limit: batch_is_exist"
        row = f"exists, {KEYS} keys, {where}"
        yield measured.row("mooncake", row, "ms", "exists", milliseconds, peer="none", note=note)


@contextlib.contextmanager
def _all(folder: Path, nodes: int, segment: int, nbytes: int, records: int) -> Iterator[tuple[_Ours, _Ours, _Bare]]:
    import servers

    with (
        servers.running(folder, nodes=nodes, nbytes=2 * ROOM_NBYTES) as store,
        contextlib.closing(_Ours(store.master.address, segment, nbytes, records, "none")) as ours,
        contextlib.closing(_Ours(store.master.address, segment, nbytes, records, "xxh3")) as checked,
        contextlib.closing(_Bare(store.master.address, segment, nbytes, records)) as bare,
    ):
        yield ours, checked, bare


class _Ours(TierSlots):
    """A tier over the backend; both move the same slots."""

    def __init__(self, master: str, segment: int, nbytes: int, records: int, checksum: str) -> None:
        self._record = slice(PAGE_NBYTES + nbytes)
        where = f", segment: {segment}, prefer_local: true" if segment else ""
        where += f", threads: {THREADS}"
        tier = f"name: pool, backend: mooncake, checksum: {checksum}, timeout: 60s"
        tier = f'{{{tier}, options: {{master: "{master}"{where}}}}}'
        super().__init__(tier, nbytes, records, max_queued_nbytes=4 * records * frame.record_nbytes(nbytes))
        self._asked = [self.new_key() for _ in range(KEYS)]
        stored = self.tier.backend.put_many(self._asked, [memoryview(b"there")] * KEYS, timeout_s=TIMEOUT_S)
        assert stored == [None] * KEYS, stored

    def round(self) -> Timings:
        backend = self.tier.backend
        keys = self._packed()
        sources = [source[self._record] for source in self.sources]
        targets = [target[self._record] for target in self.targets]
        put = seconds(lambda: _all_none(backend.put_many(keys, sources, timeout_s=TIMEOUT_S)))
        got: list[Any] = []
        get = seconds(lambda: got.extend(backend.get_many(keys, targets, timeout_s=TIMEOUT_S)))
        assert got == [len(source) for source in sources], got
        self.check("the backend's")
        for key in keys:
            backend.remove(key)
        exists = seconds(lambda: backend.contains_prefix(self._asked, timeout_s=TIMEOUT_S))
        return {"put": put, "get": get, "exists": exists}

    def through(self, tier: str) -> Timings:
        keys = self._packed()
        figures = {f"{tier} put": seconds(lambda: self.store(keys)), f"{tier} get": seconds(lambda: self.load(keys))}
        self.check("the tier's")
        self.remove(keys)
        return figures

    def _packed(self) -> list[ChunkKey]:
        """Keys, with the records of them in the sources and nothing in the targets."""
        keys = self.new_keys()
        self.pack(keys)
        self.clear()
        return keys


class _Bare:
    """The library's own client, with memory that it knows."""

    def __init__(self, master: str, segment: int, nbytes: int, records: int) -> None:
        from mooncake.store import MooncakeDistributedStore, ReplicateConfig

        self._store = MooncakeDistributedStore()
        answer = self._store.setup("127.0.0.1", "P2PHANDSHAKE", segment, 0, "tcp", "", master)
        assert not answer, answer
        self._config = ReplicateConfig()
        if segment:
            self._config.preferred_segment = self._store.get_hostname()
        self._nbytes = PAGE_NBYTES + nbytes
        self._slab = Slab(2 * records * self._nbytes, 2 * records * self._nbytes, shared=False)
        slots = [self._slab.take(self._nbytes) for _ in range(2 * records)]
        (extent,) = self._slab.extents.values()
        assert not self._store.register_buffer(extent.address, extent.nbytes)
        self._addresses = [extent.address + slot.offset for slot in slots if slot is not None]
        views = [np.frombuffer(self._slab.view(slot), np.uint8) for slot in slots if slot is not None]
        self._sources, self._targets = views[:records], views[records:]
        for number, source in enumerate(self._sources):
            source[:] = random_bytes(self._nbytes, seed=100 + number)
        self._numbers = count()
        self._asked = [f"asked-{number}" for number in range(KEYS)]
        few = [self._addresses[0]] * KEYS
        codes = self._store.batch_put_from(self._asked, few, [5] * KEYS, self._config)
        assert not any(codes), codes

    def round(self) -> Timings:
        records = len(self._sources)
        names = [f"bare-{next(self._numbers)}" for _ in range(records)]
        sizes = [self._nbytes] * records
        sources, targets = self._addresses[:records], self._addresses[records:]
        for target in self._targets:
            target.fill(0)
        codes: list[int] = []
        put = seconds(lambda: codes.extend(self._store.batch_put_from(names, sources, sizes, self._config)))
        assert not any(codes), codes
        got: list[int] = []
        get = seconds(lambda: got.extend(self._store.batch_get_into(names, targets, sizes)))
        assert got == sizes, got
        for number, (source, target) in enumerate(zip(self._sources, self._targets, strict=True)):
            check_equal(target, source, f"bare record {number}")
        exists = seconds(lambda: self._store.batch_is_exist(self._asked))
        for name in names:
            self._store.remove(name, True)
        return {"put": put, "get": get, "exists": exists}

    def close(self) -> None:
        self._store.close()
        self._sources, self._targets = [], []
        self._slab.close()


def _all_none(results: list[Any]) -> None:
    assert not any(results), results


if __name__ == "__main__":
    _main(int(sys.argv[1]), sys.argv[2] == "quick")
