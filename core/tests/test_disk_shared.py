"""The total that processes share, and what is left when one of them is killed."""

from __future__ import annotations

import fcntl
import logging
import mmap
import subprocess
import sys
import time
from pathlib import Path

import pytest
from disk_helpers import (
    NBYTES,
    assert_counted,
    dead_writer,
    holds,
    leave_temp,
    new_key,
    open_disk,
    put,
    record,
    record_files,
    temp_files,
)

from lmcache_core.backends._files import Writer
from lmcache_core.errors import BackendError, BackendFull, BackendUnavailable


def test_what_is_there_is_counted_from_the_first_moment_whatever_the_limit(tmp_path: Path) -> None:
    with open_disk(tmp_path, 50 * NBYTES) as backend:
        keys = put(backend, 50)
    with open_disk(tmp_path, 30 * NBYTES) as backend:
        assert backend.used_nbytes == 50 * NBYTES
        assert {entry.key for entry in backend.entries()} == set(keys)
        with pytest.raises(BackendFull, match=f"{50 * NBYTES} of {30 * NBYTES}"):
            put(backend)
        for key in keys[:21]:
            backend.remove(key)
        put(backend)
        assert backend.used_nbytes == 30 * NBYTES


def test_a_wrong_total_is_mended_at_the_next_exclusive_open(tmp_path: Path) -> None:
    with open_disk(tmp_path) as backend:
        put(backend, 3)
    for garbage in (b"", b"\0" * 24, b"LMCuse\x01\n" + b"\xff" * 100):
        (tmp_path / "v1" / "usage").write_bytes(garbage)
        with open_disk(tmp_path, 4 * NBYTES) as backend:
            assert backend.used_nbytes == 3 * NBYTES


def test_a_damaged_total_is_counted_anew_by_whoever_opens_next(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with open_disk(tmp_path) as backend:
        put(backend, 2)
        (tmp_path / "v1" / "usage").write_bytes(b"garbage")
        with pytest.raises(BackendError, match="damaged"):
            put(backend)
        assert temp_files(tmp_path) == []
        with open_disk(tmp_path) as other:
            assert other.used_nbytes == backend.used_nbytes == 2 * NBYTES
            put(backend)
    assert "damaged" in caplog.text


def test_an_overwrite_with_another_length_nets_out(tmp_path: Path) -> None:
    with open_disk(tmp_path) as backend:
        key = new_key()
        for nbytes in (NBYTES, 4096, 3 * NBYTES, 1):
            backend.put(key, record(key, nbytes))
            assert backend.used_nbytes == nbytes
        backend.remove(key)
        assert backend.used_nbytes == 0


def test_with_different_limits_the_smallest_holds_with_a_warning_until_it_closes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with open_disk(tmp_path, 10 * NBYTES) as large:
        assert not [r for r in caplog.records if r.levelno >= logging.WARNING]
        with open_disk(tmp_path, 2 * NBYTES):
            (warning,) = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
            assert str(10 * NBYTES) in warning
            assert str(2 * NBYTES) in warning
            put(large, 2)
            with pytest.raises(BackendFull):
                put(large)
        put(large, 8)
        with pytest.raises(BackendFull):
            put(large)


def test_a_lock_that_is_held_too_long_is_unavailable(tmp_path: Path) -> None:
    with open_disk(tmp_path, timeout_s=0.1) as backend:
        (key,) = put(backend)
        with open(tmp_path / "v1" / "usage", "rb") as stuck:
            fcntl.flock(stuck, fcntl.LOCK_EX)
            started = time.monotonic()
            with pytest.raises(BackendUnavailable, match="lock"):
                put(backend)
            assert holds(backend, key)  # reading needs no lock
            assert time.monotonic() - started < 5
        put(backend)
        assert_counted(backend, tmp_path)


def test_temporary_files_of_dead_writers_are_removed_and_those_of_live_ones_are_not(tmp_path: Path) -> None:
    dead, live = dead_writer(), Writer.current()
    reused = Writer(live.host, live.pid, live.start - 1)
    elsewhere = Writer("other-host-1", dead.pid, dead.start)
    with open_disk(tmp_path) as backend:
        names = {w: leave_temp(tmp_path, w) for w in (dead, live, reused, elsewhere)}
        backend._total.reserve(4 * NBYTES)
        with open_disk(tmp_path) as other:  # not alone: only what is known to be dead
            assert set(temp_files(tmp_path)) == {names[live], names[elsewhere]}
            assert other.used_nbytes == 2 * NBYTES
    with open_disk(tmp_path) as backend:  # alone
        assert temp_files(tmp_path) == [names[live]]
        assert backend.used_nbytes == NBYTES


def test_what_dead_writers_reserved_makes_room_before_a_write_is_refused(tmp_path: Path) -> None:
    dead = dead_writer()
    with open_disk(tmp_path, 2 * NBYTES) as backend:
        put(backend)
        leave_temp(tmp_path, dead)
        backend._total.reserve(NBYTES)
        put(backend)
        with pytest.raises(BackendFull):
            put(backend)


PRELUDE = """
import os, sys, random
from pathlib import Path
from lmcache_core.backend import Context
from lmcache_core.backends.disk import DiskBackend, DiskOptions
from lmcache_core.errors import BackendFull
from lmcache_core.keys import ChunkKey
from lmcache_core.testing.memory import filled
root, capacity, seed = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
backend = DiskBackend(DiskOptions(path=root), Context(capacity_nbytes=capacity))
rng = random.Random(seed)
def say(text):
    os.write(1, text.encode())
"""

FILL = """
taken = 0
say("r")
sys.stdin.read(1)
for _ in range(30):
    key = ChunkKey(rng.randbytes(48))
    try:
        backend.put(key, filled(key, 16384, 4096))
        taken += 1
    except BackendFull:
        pass
backend.close()
say(f" {taken}")
"""

CHURN = """
keys = [ChunkKey(bytes([i]) * 48) for i in range(6)]
say("r")
sys.stdin.read(1)
for _ in range(200):
    key = rng.choice(keys)
    if rng.random() < 0.6:
        backend.put(key, filled(key, 16384 if rng.random() < 0.7 else 8192, 4096))
    else:
        backend.remove(key)
backend.close()
"""

WRITE_FOREVER = """
while True:
    key = ChunkKey(rng.randbytes(48))
    try:
        backend.put(key, filled(key, rng.choice((4096, 16384, 262144)), 4096))
    except BackendFull:
        for entry in list(backend.entries())[:20]:
            backend.remove(entry.key)
    say(".")
"""


def start(code: str, root: Path, capacity_nbytes: int, seed: int) -> subprocess.Popen[bytes]:
    args = [sys.executable, "-c", PRELUDE + code, str(root), str(capacity_nbytes), str(seed)]
    return subprocess.Popen(args, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def run_together(code: str, root: Path, capacity_nbytes: int, count: int = 3) -> list[bytes]:
    """Start processes, let them go when all are ready, and return what each of them said."""
    children = [start(code, root, capacity_nbytes, seed) for seed in range(count)]
    try:
        for child in children:
            assert child.stdout
            assert child.stdout.read(1) == b"r"
        for child in children:
            assert child.stdin
            child.stdin.write(b"g")
            child.stdin.flush()
        outputs = [child.communicate(timeout=60)[0] for child in children]
        assert [child.returncode for child in children] == [0] * count
        return outputs
    finally:
        for child in children:
            with child:
                child.kill()


def test_processes_share_one_capacity(tmp_path: Path) -> None:
    taken = [int(output) for output in run_together(FILL, tmp_path, 40 * NBYTES)]
    assert sum(taken) == len(record_files(tmp_path)) == 40
    with open_disk(tmp_path) as backend:
        assert backend.used_nbytes == 40 * NBYTES


def test_processes_that_put_and_remove_the_same_keys_keep_the_total_right(tmp_path: Path) -> None:
    with open_disk(tmp_path) as backend:  # held open, so that nobody counts anew
        run_together(CHURN, tmp_path, 1 << 30)
        assert_counted(backend, tmp_path)
        assert temp_files(tmp_path) == []


def test_a_killed_writer_is_cleaned_up_by_the_next_process_while_others_stay_open(tmp_path: Path) -> None:
    with open_disk(tmp_path) as stays:
        left = 0
        for seed in range(30):
            with start(WRITE_FOREVER, tmp_path, 1 << 30, seed) as writer:
                assert writer.stdout
                assert writer.stdout.read(1) == b"."
                writer.kill()
            left += len(temp_files(tmp_path))
            with open_disk(tmp_path):
                assert temp_files(tmp_path) == []
            if left >= 3:
                break
        assert stays.used_nbytes >= sum(path.stat().st_size for path in record_files(tmp_path))


def test_memory_of_a_mapping_can_be_freed_after_use(tmp_path: Path) -> None:
    with open_disk(tmp_path) as backend:
        memory = mmap.mmap(-1, NBYTES)
        view = memoryview(memory)
        key = new_key()
        backend.put(key, view)
        backend.get(key, view)
        view.release()
        memory.close()
