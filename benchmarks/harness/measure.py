"""Paired measuring: the sides take turns in one run, so that whatever else the machine does hits each of them."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from .peer import Missing, Peer, PeerFailed
from .report import Must, Row, row_of

MiB: Final = 1 << 20
GiB: Final = 1 << 30

Timings = Mapping[str, float]
"""Seconds (or another figure) by what was done: {"write": 0.21, "read": 0.34}."""
Samples = dict[str, list[float]]
Bytes = np.ndarray[Any, np.dtype[np.uint8]]


class WrongBytes(Exception):
    """A side gave back other bytes than it was given: its time means nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How a benchmark is to be run."""

    rounds: int
    """Paired rounds that count; one more goes before them."""
    quick: bool
    """Small sizes, to see that everything works: the figures mean little."""
    directory: Path
    """An empty folder on the file system to measure; removed afterwards."""
    peer: Peer | Missing
    out: Path | None = None
    """Where plots and reports go, of benchmarks that have some."""


def seconds(work: Callable[[], object]) -> float:
    """How long one call takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


@dataclass(frozen=True, slots=True)
class Paired:
    """What one interleaved run measured: by side and by what was done, one figure per round."""

    samples: Mapping[str, Samples]
    load: float
    missing: str
    """Why a side was left out; empty when none was."""

    def row(
        self,
        bench: str,
        row: str,
        unit: str,
        what: str,
        scale: Callable[[float], float],
        *,
        limit: str | None = None,
        peer: str | None = None,
        must: Must | None = None,
        note: str = "",
    ) -> Row:
        """The row of `what`, which `scale` brings into `unit`; `limit` and `peer` name what to set beside it."""
        ours = self.values("ours", what, scale)
        assert ours is not None, f"ours did not measure {what!r}"
        return row_of(
            bench,
            row,
            unit,
            ours,
            limit=self.values("limit", limit or what, scale),
            peer=self.values("peer", peer or what, scale),
            must=must,
            load=self.load,
            note="; ".join(part for part in (note, self.missing) if part),
        )

    def values(self, side: str, what: str, scale: Callable[[float], float]) -> list[float] | None:
        """One side's figures, or None where it did not measure `what`."""
        found = self.samples.get(side, {}).get(what)
        return [scale(value) for value in found] if found else None


def paired(
    options: Options, sides: Mapping[str, Callable[[], Timings] | Missing], case: str = "", **arguments: Any
) -> Paired:
    """Measure the sides and, where `case` names one of the peer's, the peer, in turn; a missing side does not fail."""
    present: dict[str, Callable[[], Timings]] = {}
    missing: list[str] = []
    for side, work in sides.items():
        if isinstance(work, Missing):
            missing.append(f"no {side}: {work.reason}")
        else:
            present[side] = work
    peer = options.peer
    if case and isinstance(peer, Peer):
        refused = peer.setup(case, **arguments)
        if refused is None:
            present["peer"] = lambda: _round_of(peer, case, missing)
        else:
            missing.append(f"no peer: {refused.reason}")
    elif case and isinstance(peer, Missing):
        missing.append(f"no peer: {peer.reason}")
    load = load_average()
    samples = interleave(present, options.rounds)
    if case and "peer" in present and isinstance(peer, Peer):
        peer.end(case)
    return Paired(samples, load, "; ".join(missing))


def _round_of(peer: Peer, case: str, missing: list[str]) -> Timings:
    """A round of the peer; one that it fails has no figures, and the reason is kept."""
    try:
        return peer.round(case)
    except PeerFailed as error:
        reason = f"the peer failed a round: {error}"[:200]
        if reason not in missing:
            missing.append(reason)
        return {}


def interleave(sides: Mapping[str, Callable[[], Timings]], rounds: int) -> dict[str, Samples]:
    """Run the sides in turn, `rounds` times after one round that does not count; figures by side and what was done.

    Every second round goes the other way round: what a side leaves behind, such as caches, troubles both.
    """
    samples: dict[str, Samples] = {side: {} for side in sides}
    for number in range(rounds + 1):
        for side, work in list(sides.items())[:: -1 if number % 2 else 1]:
            for what, value in work().items():
                if number:
                    samples[side].setdefault(what, []).append(value)
    return samples


def milliseconds(taken: float) -> float:
    """Seconds as milliseconds."""
    return taken * 1e3


def gibps(nbytes: int) -> Callable[[float], float]:
    """Seconds for `nbytes` as GiB/s."""
    return lambda taken: nbytes / GiB / taken


def load_average() -> float:
    """The machine's 1-minute load average, our own work included."""
    return os.getloadavg()[0]


def random_bytes(nbytes: int, seed: int) -> Bytes:
    """Bytes that no store can compress and no two records share."""
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


def private_buffer(nbytes: int, *, huge: bool) -> Bytes:
    """Touched anonymous memory in 4 KiB pages, or in huge pages where the machine grants them."""
    mapping = mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    mapping.madvise(mmap.MADV_HUGEPAGE if huge else mmap.MADV_NOHUGEPAGE)
    return _touched(mapping)


def shared_buffer(nbytes: int, *, huge: bool) -> Bytes:
    """A touched mapping of a memfd of our own, as warm as a slab that has been in use."""
    descriptor = os.memfd_create("lmcache-bench")
    try:
        os.ftruncate(descriptor, nbytes)
        mapping = mmap.mmap(descriptor, nbytes, mmap.MAP_SHARED)
    finally:
        os.close(descriptor)
    mapping.madvise(mmap.MADV_HUGEPAGE if huge else mmap.MADV_NOHUGEPAGE)
    return _touched(mapping)


def _touched(mapping: mmap.mmap) -> Bytes:
    view = np.frombuffer(mapping, dtype=np.uint8)
    view.fill(1)
    return view


def check_equal(got: Bytes, wanted: Bytes, what: str) -> None:
    """Raise WrongBytes unless both hold the same bytes."""
    if not np.array_equal(got, wanted):
        raise WrongBytes(f"{what}: the bytes that came back are not those that went in")
