"""SIGKILL at random points and at every operation of a disk store: whole records, a safe total, nothing left over.

With LMCACHE_SOAK set, ten times as often.
"""

from __future__ import annotations

import os
import random
import subprocess
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from disk_helpers import assert_counted, open_disk, record_files, temp_files
from disk_worker import key_of, proven, write
from tiny import until
from workers import Workers

from lmcache_core.backends.disk import DiskBackend
from lmcache_core.errors import BackendFull

KILLS = 500 if os.environ.get("LMCACHE_SOAK") else 50
KILLS_AT_ONCE = 50
CAPACITY = 4 << 20
WRITERS = 2
SMALL_DISK = "3m"
pause = threading.Event()
"""Never set: its wait is the random time until a kill."""


def check_all(backend: DiskBackend) -> int:
    """How many records there are; the bytes of each must be its own."""
    return sum(proven(backend, entry.key) for entry in list(backend.entries()))


def on_disk(root: Path) -> int:
    nbytes = 0
    for path in record_files(root):
        try:
            nbytes += path.stat().st_size
        except FileNotFoundError:
            continue
    return nbytes


def campaign(root: Path, capacity: int, slow_us: int) -> None:
    """Kill writers while others write and one reads; nobody may ever see a byte that is not of its record."""
    seed = random.randrange(1 << 32)
    totals: Counter[str] = Counter()
    for number in range(KILLS // KILLS_AT_ONCE):
        totals += kills(root, capacity, slow_us, seed + 1000 * number)
        with open_disk(root, capacity) as backend:  # alone: counts anew, and clears up
            assert temp_files(root) == []
            assert_counted(backend, root)
            left = check_all(backend)
            for entry in [*backend.entries()][:1]:  # or there may be no room left on a disk that is full
                assert backend.remove(entry.key)
            write(backend, key_of(0), 4096)
            assert backend.remove(key_of(0))
            assert_counted(backend, root)
    assert totals["right"] > KILLS
    print(
        f"seed {seed}: {KILLS} writers killed in {totals['operations']} operations, {totals['right']} records read and "
        f"right, {left} at the end, {totals['over']} bytes counted too much until the next opening alone"
    )


def kills(root: Path, capacity: int, slow_us: int, seed: int) -> Counter[str]:
    rng = random.Random(seed)
    with Workers("disk_worker.py") as workers, open_disk(root, capacity) as observer:
        reader = workers.fork("reader", root, capacity, seed, 0)
        writers = [workers.fork("writer", root, capacity, seed + 1 + n, slow_us) for n in range(WRITERS)]
        for number in range(KILLS_AT_ONCE):
            _, operations = workers.totals()
            assert until(lambda least=operations + 12: workers.totals()[1] >= least, 60), f"seed {seed}: stuck"
            pause.wait(rng.random() * 0.01)
            workers.kill(writers.pop(rng.randrange(WRITERS)))
            used = observer.used_nbytes
            assert used <= capacity, f"seed {seed}, kill {number}: {used} of {capacity} bytes"
            writers.append(workers.fork("writer", root, capacity, seed + 10 + number, slow_us))
        right, operations = workers.totals()
        for worker in (*writers, reader):  # none had ended by itself, so none ever saw a wrong byte
            workers.kill(worker)
        over = observer.used_nbytes - on_disk(root)
        assert over >= 0, f"seed {seed}: more is on disk than is counted"
    return Counter(right=right, operations=operations, over=over)


def test_writers_killed_at_random_points_leave_whole_records_and_a_safe_total(tmp_path: Path) -> None:
    campaign(tmp_path / "store", CAPACITY, 0)


def test_writers_killed_on_a_slow_disk_leave_whole_records_and_a_safe_total(tmp_path: Path) -> None:
    campaign(tmp_path / "store", CAPACITY, 300)


@contextmanager
def small_disk(path: Path) -> Iterator[Path]:
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={SMALL_DISK}", "tmpfs", str(path)]
    mounted = subprocess.run(command, capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip(f"cannot run here: mount of a tmpfs: {mounted.stderr.decode().strip()}")
    try:
        yield path
    finally:
        subprocess.run(["umount", str(path)], check=True)


def test_writers_killed_on_a_full_disk_leave_whole_records_and_a_safe_total(tmp_path: Path) -> None:
    with small_disk(tmp_path / "small") as path:
        campaign(path / "store", 1 << 30, 0)


def test_a_writer_killed_at_any_of_its_operations_leaves_what_it_had_published(tmp_path: Path) -> None:
    with Workers("disk_worker.py") as workers:
        number = 0
        while True:
            number += 1
            root = tmp_path / str(number)
            with open_disk(root, CAPACITY) as observer:
                write(observer, key_of(2), 16_384)
                before = workers.totals()[1]
                worker = workers.fork("suicide", root, CAPACITY, 0, number)
                code = workers.wait(worker)
                reached = workers.totals()[1] - before
                assert code in (0, -9), "with what it says above"
                assert proven(observer, key_of(2))
                check_all(observer)
                assert on_disk(root) <= observer.used_nbytes <= CAPACITY
                write(observer, key_of(3), 16_384)  # its locks went with it
                with open_disk(root, CAPACITY):  # whoever comes next clears up after it, though others stay
                    assert [name for name in temp_files(root) if not name.endswith(".0")] == [], "but for a probe"
            with open_disk(root, CAPACITY) as backend:
                assert_counted(backend, root)
                assert check_all(backend) >= 2
            if code == 0:
                break
            assert reached == number
    assert number > 60, "a writer that does so little is not the one this is for"
    print(f"killed at each of {number - 1} operations")


def test_a_writer_that_finds_no_room_after_kills_has_it_again_when_the_store_is_opened_alone(tmp_path: Path) -> None:
    with open_disk(tmp_path, CAPACITY) as backend:
        backend._total.reserve(CAPACITY)  # as if by one who was killed before it made its file
        with pytest.raises(BackendFull):
            write(backend, key_of(0), 4096)
    with open_disk(tmp_path, CAPACITY) as backend:
        write(backend, key_of(0), 4096)
