"""A process that forks users of one disk store: writers to be killed, writers that kill themselves, readers.

The words of a worker are "KIND ROOT CAPACITY SEED NUMBER"; see workers.py.  NUMBER is, for a writer and a reader, the
longest time in microseconds that an operation of the disk takes, and for a suicide the operation that it dies at.
"""

from __future__ import annotations

import os
import random
import signal
import threading
from contextlib import ExitStack
from pathlib import Path

from disk_helpers import open_disk
from failing_os import interposed
from workers import Proof, serve_forks

from lmcache_core.backends.disk import DiskBackend
from lmcache_core.errors import BackendFull
from lmcache_core.keys import ChunkKey
from lmcache_core.testing.memory import buffer, filled, payload

KEYS = 40
SIZES = (4096, 16_384, 100_000, 262_144)
never = threading.Event()


class Wrong(Exception):
    """Bytes of another record, or half of one."""


def key_of(number: int) -> ChunkKey:
    """Of few shards and few directories, so that workers meet."""
    return ChunkKey(bytes(15) + bytes([number % 2]) + bytes([number % 3]) * 16 + number.to_bytes(16, "big"))


def variant(key: ChunkKey, nbytes: int) -> bytes:
    """The identity that the bytes of a record name: its key, and which of the writes that it had."""
    return key + nbytes.to_bytes(8, "big")


def write(backend: DiskBackend, key: ChunkKey, nbytes: int) -> None:
    backend.put(key, filled(variant(key, nbytes), nbytes, 4096))


def proven(backend: DiskBackend, key: ChunkKey) -> bool:
    """Whether the record is there; what is there must be one of the records that were written under its key."""
    into = buffer(max(SIZES), 4096)
    nbytes = backend.get(key, into)
    if nbytes is None:
        return False
    if nbytes not in SIZES or bytes(into[:nbytes]) != payload(variant(key, nbytes), nbytes):
        raise Wrong(f"{key.text}: {nbytes} bytes that are none of its records")
    return True


def churn(backend: DiskBackend, rng: random.Random, proof: Proof) -> None:
    """Put, replace, remove and read for ever."""
    operations = right = 0
    while True:
        key = key_of(rng.randrange(KEYS))
        draw = rng.random()
        if draw < 0.6:
            try:
                write(backend, key, rng.choice(SIZES))
            except BackendFull:
                for entry in list(backend.entries())[:10]:
                    backend.remove(entry.key)
        elif draw < 0.75:
            backend.remove(key)
        else:
            right += proven(backend, key)
        operations += 1
        proof.say(right, operations)


def read(backend: DiskBackend, proof: Proof) -> None:
    """Read whatever is there for ever."""
    right = operations = 0
    while True:
        for entry in backend.entries():
            right += proven(backend, entry.key)
            operations += 1
            proof.say(right, operations)
        never.wait(1e-3)


def once(backend: DiskBackend) -> None:
    """Each way to change a store, once."""
    write(backend, key_of(0), 16_384)
    write(backend, key_of(0), 100_000)
    write(backend, key_of(1), 4096)
    backend.remove(key_of(1))
    backend.close()


def work(words: list[str], proof: Proof) -> None:
    kind, root, capacity, seed, number = words[0], Path(words[1]), int(words[2]), int(words[3]), int(words[4])
    rng = random.Random(seed)

    def slowly(count: int, name: str) -> None:
        if number:
            never.wait(rng.random() * number * 1e-6)

    def die(count: int, name: str) -> None:
        proof.say(0, count)
        if count == number:
            os.kill(os.getpid(), signal.SIGKILL)

    with ExitStack() as stack:
        if kind == "suicide":
            stack.enter_context(interposed(die))
            once(open_disk(root, capacity))
            return
        if number:
            stack.enter_context(interposed(slowly))
        backend = stack.enter_context(open_disk(root, capacity))
        if kind == "writer":
            churn(backend, rng, proof)
        read(backend, proof)


if __name__ == "__main__":
    serve_forks(work)
