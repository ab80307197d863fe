"""Get and put of 8 and 32 MiB in Mooncake Store, with the memory in this process and in another, every byte compared.

Ours is the backend of lmcache-mooncake, one call for a batch, and, in rows of their own, a tier over it with
`checksum: none` and one with checksums, from and into slots that are registered.  The limit is the library's own
`batch_put_from` and `batch_get_into` in the same round, on the same client, from and into the same slots: where memory
lies makes a difference of 5 %.  All of it is TCP, in a process with a network namespace of its own, since the store
listens on all interfaces.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
from harness.measure import MiB, Options, Paired, Timings, gibps, interleave, load_average, milliseconds, seconds
from harness.peer import Missing
from harness.report import Must, Row
from harness.tiers import TIMEOUT_S, TierSlots

from lmcache_core import ChunkKey, frame
from lmcache_core.layout import PAGE_NBYTES

TESTS = Path(__file__).resolve().parent.parent / "plugins" / "lmcache-mooncake" / "tests"
KEYS = 512
ROOM_NBYTES = 1 << 30
_ROUNDS_TIMES = 5
"""A round takes a tenth of a second."""
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
                load = load_average()
                sides = {
                    "checked": lambda: checked.through("checked"),
                    "tier": lambda: ours.through("tier"),
                    "limit": limit.round,
                    "ours": ours.round,
                }
                samples = interleave(sides, _ROUNDS_TIMES * options.rounds)
            together = samples["ours"] | samples["tier"] | samples["checked"]
            measured = Paired({"ours": together, "limit": samples["limit"]}, load, "")
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
    ):
        yield ours, checked, _Bare(ours)


class _Ours(TierSlots):
    """A tier over the backend; both move the same slots."""

    def __init__(self, master: str, segment: int, nbytes: int, records: int, checksum: str) -> None:
        self.record = slice(PAGE_NBYTES + nbytes)
        where = f", segment: {segment}, prefer_local: true" if segment else ""
        where += f", threads: {THREADS}"
        tier = f"name: pool, backend: mooncake, checksum: {checksum}, timeout: 60s"
        tier = f'{{{tier}, options: {{master: "{master}"{where}}}}}'
        super().__init__(tier, nbytes, records, max_queued_nbytes=4 * records * frame.record_nbytes(nbytes))
        backend: Any = self.tier.backend
        self.session, self._transfers = backend._session, backend._transfers
        self._asked = [self.new_key() for _ in range(KEYS)]
        stored = self.tier.backend.put_many(self._asked, [memoryview(b"there")] * KEYS, timeout_s=TIMEOUT_S)
        assert stored == [None] * KEYS, stored

    def round(self) -> Timings:
        backend = self.tier.backend
        keys = self._packed()
        sources = [source[self.record] for source in self.sources]
        targets = [target[self.record] for target in self.targets]
        put = seconds(lambda: _all_none(backend.put_many(keys, sources, timeout_s=TIMEOUT_S)))
        got: list[Any] = []
        get = seconds(lambda: got.extend(backend.get_many(keys, targets, timeout_s=TIMEOUT_S)))
        assert got == [len(source) for source in sources], got
        self.check("the backend's")
        self.remove(keys)
        exists = seconds(lambda: backend.contains_prefix(self._asked, timeout_s=TIMEOUT_S))
        return {"put": put, "get": get, "exists": exists}

    def through(self, tier: str) -> Timings:
        keys = self._packed()
        figures = {f"{tier} put": seconds(lambda: self.store(keys)), f"{tier} get": seconds(lambda: self.load(keys))}
        self.check("the tier's")
        self.remove(keys)
        return figures

    def remove(self, keys: list[ChunkKey]) -> None:
        """By force first, as the limit's are: what the backend removes after a read takes up room for a while."""
        with self.session.use(time.monotonic() + TIMEOUT_S, "remove") as store:
            for key in keys:
                store.remove(self._transfers.name(key), True)
        super().remove(keys)

    def _packed(self) -> list[ChunkKey]:
        """Keys, with the records of them in the sources and nothing in the targets."""
        keys = self.new_keys()
        self.pack(keys)
        self.clear()
        return keys


class _Bare:
    """The library's own calls, on the client and with the memory of `ours`: the same pages on both sides."""

    def __init__(self, ours: _Ours) -> None:
        self._ours = ours
        session = ours.session
        with session.use(time.monotonic() + TIMEOUT_S, "setup") as store:
            self._store, self._config = store, session.config
        self._sources, self._targets = (_addresses(side) for side in (ours.sources, ours.targets))
        self._sizes = [len(source[ours.record]) for source in ours.sources]
        self._numbers = count()
        self._asked = [f"asked-{number}" for number in range(KEYS)]
        few = [self._sources[0]] * KEYS
        codes = self._store.batch_put_from(self._asked, few, [5] * KEYS, self._config)
        assert not any(codes), codes

    def round(self) -> Timings:
        self._ours.clear()
        names = [f"bare-{next(self._numbers)}" for _ in self._sources]
        sizes = self._sizes
        codes: list[int] = []
        put = seconds(lambda: codes.extend(self._store.batch_put_from(names, self._sources, sizes, self._config)))
        assert not any(codes), codes
        got: list[int] = []
        get = seconds(lambda: got.extend(self._store.batch_get_into(names, self._targets, sizes)))
        assert got == sizes, got
        self._ours.check("the bare")
        exists = seconds(lambda: self._store.batch_is_exist(self._asked))
        for name in names:
            self._store.remove(name, True)
        return {"put": put, "get": get, "exists": exists}


def _addresses(views: list[memoryview]) -> list[int]:
    return [int(np.frombuffer(view, np.uint8).ctypes.data) for view in views]


def _all_none(results: list[Any]) -> None:
    assert not any(results), results


if __name__ == "__main__":
    _main(int(sys.argv[1]), sys.argv[2] == "quick")
