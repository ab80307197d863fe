"""The fault-injecting backend does what it is told, the same way each time."""

from __future__ import annotations

import random
import threading

import pytest

from lmcache_core.backend import SupportsListing, SupportsRegistration
from lmcache_core.errors import BackendError, BackendFull, BackendUnavailable
from lmcache_core.keys import ChunkKey
from lmcache_core.testing import BackendLaws, DictBackend, Fault, FaultBackend, in_threads
from lmcache_core.testing.faults import ForeignError
from lmcache_core.testing.memory import buffer, filled, is_poison, payload

KEY = ChunkKey(bytes(range(48)))
NBYTES = 1000


def faulty(*script: Fault | None, verb: str = "get", stored: bool = True) -> FaultBackend:
    inner = DictBackend()
    if stored:
        inner.put(KEY, filled(KEY, NBYTES))
    return FaultBackend(inner, script=script, verbs=[verb])


class TestWithoutFaultsItKeepsTheLaws(BackendLaws):
    def open_backend(self, context: object) -> FaultBackend:
        return FaultBackend(DictBackend(context=context))  # type: ignore[arg-type]


@pytest.mark.parametrize("verb", ["contains", "get", "put", "remove"])
@pytest.mark.parametrize(
    ("fault", "error"),
    [(Fault.UNAVAILABLE, BackendUnavailable), (Fault.BROKEN, BackendError), (Fault.FOREIGN, ForeignError)],
)
def test_errors_are_raised_once_and_leave_the_store_alone(verb: str, fault: Fault, error: type[Exception]) -> None:
    backend = faulty(fault, verb=verb)
    arguments = {"get": (buffer(NBYTES),), "put": (filled(b"other", NBYTES),)}.get(verb, ())
    with pytest.raises(error) as caught:
        getattr(backend, verb)(KEY, *arguments)
    assert type(caught.value) is error
    into = buffer(NBYTES)
    assert backend.inner.get(KEY, into) == NBYTES
    assert bytes(into) == payload(KEY, NBYTES)
    getattr(backend, verb)(KEY, *arguments)
    assert backend.log == [(verb, KEY, fault)]


def test_flip_changes_one_bit_of_what_is_read_and_none_of_what_is_stored() -> None:
    backend = faulty(Fault.FLIP)
    into = buffer(NBYTES)
    assert backend.get(KEY, into) == NBYTES
    differing = int.from_bytes(bytes(into), "big") ^ int.from_bytes(payload(KEY, NBYTES), "big")
    assert differing.bit_count() == 1
    assert backend.get(KEY, into) == NBYTES
    assert bytes(into) == payload(KEY, NBYTES)


def test_truncate_says_half_the_length() -> None:
    assert faulty(Fault.TRUNCATE).get(KEY, buffer(NBYTES)) == NBYTES // 2


@pytest.mark.parametrize("verb", ["get", "contains"])
def test_vanish_removes_the_record_before_the_answer(verb: str) -> None:
    backend = faulty(Fault.VANISH, verb=verb)
    into = buffer(NBYTES)
    assert not (backend.contains(KEY) if verb == "contains" else backend.get(KEY, into))
    assert is_poison(into)
    assert not backend.inner.contains(KEY)


@pytest.mark.parametrize("left", [0, 1, NBYTES // 2, NBYTES])
def test_short_put_leaves_a_part_that_can_be_read_and_raises(left: int) -> None:
    backend = faulty(Fault.SHORT_PUT, verb="put", stored=False)
    backend.short_put_nbytes = left
    with pytest.raises(BackendUnavailable, match=f"{left} of {NBYTES} bytes"):
        backend.put(KEY, filled(KEY, NBYTES))
    assert backend.get(KEY, buffer(NBYTES)) == left


def test_full_stores_nothing() -> None:
    backend = faulty(Fault.FULL, verb="put", stored=False)
    with pytest.raises(BackendFull):
        backend.put(KEY, filled(KEY, NBYTES))
    assert not backend.contains(KEY)


def test_a_stalled_call_goes_on_when_released() -> None:
    backend = faulty(Fault.STALL)
    got: list[int | None] = []

    def release() -> None:
        assert backend.stalled.acquire(timeout=30)
        assert not got
        backend.release_stalls()

    in_threads(lambda: got.append(backend.get(KEY, buffer(NBYTES))), release)
    assert got == [NBYTES]


def test_close_lets_stalled_calls_end() -> None:
    backend = faulty(Fault.STALL)
    done = threading.Event()

    def close() -> None:
        assert backend.stalled.acquire(timeout=30)
        backend.close()

    def get() -> None:
        with pytest.raises(BackendError, match="closed"):
            backend.get(KEY, buffer(NBYTES))
        done.set()

    in_threads(get, close)
    assert done.is_set()


def test_a_fault_that_a_verb_cannot_have_is_none() -> None:
    backend = faulty(Fault.FULL, Fault.FLIP, verb="remove")
    assert backend.remove(KEY)
    assert not backend.remove(KEY)
    assert backend.log == []


def test_the_script_is_used_up_in_order_and_then_the_rates_hold() -> None:
    backend = faulty(None, Fault.VANISH)
    backend.rates[Fault.UNAVAILABLE] = 1.0
    assert backend.get(KEY, buffer(NBYTES)) == NBYTES
    assert backend.get(KEY, buffer(NBYTES)) is None
    with pytest.raises(BackendUnavailable):
        backend.get(KEY, buffer(NBYTES))
    backend.heal()
    assert backend.get(KEY, buffer(NBYTES)) is None


RATES = {Fault.UNAVAILABLE: 0.1, Fault.FLIP: 0.1, Fault.FULL: 0.1, Fault.SHORT_PUT: 0.05, Fault.VANISH: 0.05}


def run(seed: int, shuffled_by: int | None = None) -> set[tuple[str, ChunkKey, Fault]]:
    backend = FaultBackend(DictBackend(), seed=seed, rates=RATES)
    keys = [ChunkKey(bytes([i]) * 48) for i in range(200)]
    if shuffled_by is not None:
        random.Random(shuffled_by).shuffle(keys)
    for key in keys:
        for call in (lambda k: backend.put(k, filled(k, 64)), lambda k: backend.get(k, buffer(64)), backend.contains):
            try:
                call(key)
            except BackendError:
                continue
    return set(backend.log)


def test_the_same_seed_gives_the_same_faults_whatever_the_order_of_the_keys() -> None:
    assert run(7) == run(7, shuffled_by=1) == run(7, shuffled_by=2)
    assert run(7) != run(8)


def test_faults_come_about_as_often_as_their_rates_say() -> None:
    log = run(7)
    for verb, fault, expected in (
        ("put", Fault.FULL, 20),
        ("get", Fault.FLIP, 20),
        ("contains", Fault.UNAVAILABLE, 20),
    ):
        assert expected / 2 < sum(1 for v, _, f in log if (v, f) == (verb, fault)) < expected * 2


def test_capabilities_are_those_of_the_backend_inside() -> None:
    backend: object = faulty()
    assert not isinstance(backend, SupportsRegistration)
    assert isinstance(backend, SupportsListing)
    assert [entry.key for entry in backend.entries()] == [KEY]
