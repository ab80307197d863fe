"""Each operation on files that the disk backend does fails once, and from then on: nothing wrong, nothing left over."""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from disk_helpers import NBYTES, dead_writer, leave_temp, open_disk, record, record_files, temp_files
from failing_os import failing, interposed

from lmcache_core.backends._files import Writer, parse_temp, record_dir
from lmcache_core.backends.disk import DiskBackend
from lmcache_core.errors import BackendError, BackendFull, BackendUnavailable, CacheError, ConfigError
from lmcache_core.keys import ChunkKey
from lmcache_core.testing.memory import buffer, payload

CAPACITY = 8 * NBYTES
KEPT = [ChunkKey(bytes([n]) * 48) for n in range(3)]
NEW = ChunkKey(b"\x07" * 48)
OTHER = ChunkKey(b"\x08" * 48)
FOR_EVER = 1 << 30


@dataclass
class Store:
    """A store with three records, open."""

    root: Path
    backend: DiskBackend

    def nbytes_of(self, key: ChunkKey) -> int:
        """Of its record, whose bytes must be right; 0 for none."""
        into = buffer(2 * NBYTES, 4096)
        nbytes = self.backend.get(key, into) or 0
        assert bytes(into[:nbytes]) == payload(key, nbytes)
        return nbytes


def put(store: Store) -> None:
    store.backend.put(NEW, record(NEW))


def replace(store: Store) -> None:
    store.backend.put(KEPT[0], record(KEPT[0], 2 * NBYTES))


def put_after_the_directory_went(store: Store) -> None:
    store.backend.put(NEW, record(NEW))
    store.backend.remove(NEW)
    store.backend._dirs.add(record_dir(NEW)[0])  # as another process would, which has not seen it go
    store.backend.put(NEW, record(NEW))


def put_in_the_room_of_the_dead(store: Store) -> None:
    """Of the room that `filled_store` has filled."""
    store.backend.put(NEW, record(NEW))


def put_an_odd_length(store: Store) -> None:
    store.backend.put(NEW, record(NEW, NBYTES + 1))


def get(store: Store) -> None:
    assert store.nbytes_of(KEPT[0]) == NBYTES


def get_unaligned(store: Store) -> None:
    into = buffer(NBYTES + 8, 4096)[8:]
    assert store.backend.get(KEPT[0], into) == NBYTES
    assert bytes(into) == payload(KEPT[0], NBYTES)


def contains(store: Store) -> None:
    assert store.backend.contains(KEPT[0])


def remove(store: Store) -> None:
    assert store.backend.remove(KEPT[0])


def listing(store: Store) -> None:
    assert {entry.key for entry in store.backend.entries()} == set(KEPT)


def listing_of_a_shard(store: Store) -> None:
    assert [entry.key for entry in store.backend.entries(KEPT[0].shard_id)] == [KEPT[0]]


def used(store: Store) -> None:
    assert store.backend.used_nbytes == 3 * NBYTES


def close(store: Store) -> None:
    store.backend.close()


DEAD: list[Writer] = []
CHANGING: list[Callable[[Store], None]] = [
    put, replace, put_after_the_directory_went, put_in_the_room_of_the_dead, put_an_odd_length, remove, close,
]  # fmt: skip
READING: list[Callable[[Store], None]] = [get, get_unaligned, contains, listing, listing_of_a_shard, used]
FAULTS = [
    pytest.param(errno.EIO, 0, False, id="EIO once"),
    pytest.param(errno.ENOSPC, 0, False, id="ENOSPC once"),
    pytest.param(errno.EIO, FOR_EVER, False, id="EIO from then on"),
    pytest.param(errno.EMFILE, 3, False, id="EMFILE a few times"),
    DONE := pytest.param(errno.EIO, 0, True, id="EIO once, though it was done"),
]
"""The errno, how many more operations fail with it, and whether what fails has been done all the same."""


@pytest.fixture(autouse=True, scope="module")
def _dead_writer() -> Iterator[None]:
    DEAD.append(dead_writer())
    yield
    DEAD.clear()


@contextmanager
def filled_store(root: Path, *, full: bool = False) -> Iterator[Store]:
    """If it is `full`, then with what a writer had reserved that has ended."""
    with open_disk(root, CAPACITY) as backend:
        for key in KEPT:
            backend.put(key, record(key))
        if full:
            leave_temp(root, DEAD[0], 5 * NBYTES)
            backend._total.reserve(5 * NBYTES)
        yield Store(root, backend)


def descriptors(root: Path) -> list[str]:
    """Of files below `root`, this process's."""
    found = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{fd}")
        except FileNotFoundError:
            continue
        if target.startswith(str(root)):
            found.append(target)
    return sorted(found)


def is_free(path: Path) -> bool:
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


def on_disk(root: Path) -> int:
    return sum(path.stat().st_size for path in record_files(root))


def reserved(root: Path) -> int:
    return sum(parsed[1] for name in temp_files(root) if (parsed := parse_temp(name)))


def expected_error(number: int) -> tuple[type[CacheError], ...]:
    match number:
        case errno.ENOSPC:
            return (BackendFull,)
        case errno.EMFILE:
            return (BackendUnavailable,)
    return (BackendError,)


@pytest.mark.parametrize(
    ("verb", "number", "more", "done"),
    [
        pytest.param(verb, *fault.values, id=f"{verb.__name__}, {fault.id}")
        for verb in CHANGING + READING
        for fault in FAULTS
        if verb in CHANGING or fault is not DONE
    ],
)
def test_whichever_operation_fails_a_call_fails_whole_and_the_next_one_works(
    tmp_path: Path, verb: Callable[[Store], None], number: int, more: int, done: bool
) -> None:
    for first in itertools.count(1):
        root = tmp_path / str(first)
        with filled_store(root, full=verb is put_in_the_room_of_the_dead) as store:
            before = descriptors(root)
            error: BackendError | None = None
            with interposed(failing(number, first, first + more), done) as calls:
                try:
                    verb(store)
                except BackendError as raised:
                    error = raised
            hit = calls.names[first - 1 : first + more]
            where = f"{verb.__name__}, operation {first}: {calls.names[:first]}"
            if error is not None:
                assert type(error) in (*expected_error(number), BackendError), where
                assert error.__cause__ is None or isinstance(error.__cause__, OSError | BackendError), where
            if verb is close:
                assert descriptors(root) == [], where
                assert is_free(root / "v1" / "lock"), where
                assert is_free(root / "v1" / "usage"), where
            else:
                check_open(store, before, hit, error, where)
                check_content(store, verb, error, where)
        assert descriptors(root) == [], where
        if error is None and calls.count < first:
            break
        check_reopened(root, where)
    assert first > 1, f"{verb.__name__} did nothing"


def check_open(store: Store, before: list[str], hit: list[str], error: BackendError | None, where: str) -> None:
    """Nothing is left open, locked or half written, and what is counted is no less than what is there."""
    assert descriptors(store.root) == before, where
    assert is_free(store.root / "v1" / "usage") or "unlock" in hit, where
    if "unlink" not in hit:
        own = [name for name in temp_files(store.root) if parse_temp(name)[0] != DEAD[0]]  # type: ignore[index]
        assert own == [], where
    counted = store.backend.used_nbytes
    assert is_free(store.root / "v1" / "usage"), where
    assert counted >= on_disk(store.root) + reserved(store.root), where
    if error is None and "pwrite" not in hit:
        assert counted == on_disk(store.root) + reserved(store.root), where


def check_content(store: Store, verb: Callable[[Store], None], error: BackendError | None, where: str) -> None:
    for key in KEPT[1:]:
        assert store.nbytes_of(key) == NBYTES, where
    first, new = store.nbytes_of(KEPT[0]), store.nbytes_of(NEW)
    if verb is remove:
        assert first == 0 or (error is not None and first == NBYTES), where
    elif verb is replace:
        assert first == 2 * NBYTES or (error is not None and first == NBYTES), where
    else:
        assert first == NBYTES, where
    if verb.__name__.startswith("put"):
        assert new in (NBYTES, NBYTES + 1) or (error is not None and new == 0), where
    else:
        assert new == 0, where
    if store.backend.used_nbytes + NBYTES <= CAPACITY:
        store.backend.put(OTHER, record(OTHER))
        assert store.nbytes_of(OTHER) == NBYTES, where
        assert store.backend.remove(OTHER), where


def check_reopened(root: Path, where: str) -> None:
    with open_disk(root, CAPACITY) as backend:
        assert backend.used_nbytes == on_disk(root) + reserved(root), where
        assert {entry.key for entry in backend.entries()} <= {*KEPT, NEW}, where


@pytest.mark.parametrize(("number", "more", "done"), FAULTS)
def test_whichever_operation_fails_a_store_is_opened_right_or_not_at_all_and_nothing_stays_open(
    tmp_path: Path, number: int, more: int, done: bool
) -> None:
    for first in itertools.count(1):
        root = tmp_path / str(first) / "store"
        with filled_store(root):
            pass
        leave_temp(root, DEAD[0])
        error: CacheError | None = None
        with ExitStack() as stack, interposed(failing(number, first, first + more), done) as calls:
            try:
                stack.enter_context(open_disk(root, CAPACITY))
            except (ConfigError, BackendError) as raised:
                error = raised
        where = f"operation {first}: {calls.names[:first]}"
        assert descriptors(root) == [], where
        assert is_free(root / "v1" / "lock"), where
        assert is_free(root / "v1" / "usage"), where
        check_reopened(root, where)
        with open_disk(root, CAPACITY) as backend:
            store = Store(root, backend)
            assert [store.nbytes_of(key) for key in KEPT] == [NBYTES] * 3, where
        if error is None and calls.count < first:
            break
        if error is not None:
            assert str(root) in str(error), where
    assert first > (6 if done else 30), "an opening that does so little is not the one this is for"
