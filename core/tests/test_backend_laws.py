"""The backend laws: a correct model keeps them all, and for each law there is a mutant of the model that it catches."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from backend_mutants import LEFT, MUTANTS, KeepsTheBuffer, Model, ModelLaws, ModelStore, laws_of

from lmcache_core.backend import Context
from lmcache_core.errors import BackendUnavailable
from lmcache_core.keys import ChunkKey
from lmcache_core.testing import (
    BackendLaws,
    DictBackend,
    LawBroken,
    LawResult,
    expect,
    law,
    run_backend_laws,
)
from lmcache_core.testing.memory import filled


@pytest.fixture(autouse=True)
def clear_away() -> Iterator[None]:
    yield
    while LEFT:
        match LEFT.pop():
            case (event, thread):
                event.set()
                thread.join()
            case file:
                file.close()


class TestModel(ModelLaws):
    """The model keeps every law, collected by pytest as a plugin's test-suite would be."""


def test_no_law_is_skipped_for_the_model() -> None:
    assert {r.name: r.outcome for r in ModelLaws().check()} == {each.name: "passed" for each in BackendLaws.laws()}


def test_every_law_has_a_mutant() -> None:
    assert {name for name, _ in MUTANTS} == {each.name for each in BackendLaws.laws()}


@pytest.mark.parametrize(("name", "mutant"), MUTANTS, ids=[mutant.__name__ for _, mutant in MUTANTS])
def test_the_law_catches_its_mutant(
    name: str, mutant: type[Model], record_property: Callable[[str, object], None]
) -> None:
    record_property("mutant", f"backend {name}")
    (result,) = laws_of(mutant).check([name])
    assert result.outcome == "failed", result
    assert result.detail


def test_a_law_cannot_be_redefined() -> None:
    with pytest.raises(TypeError, match="redefines the law test_put_copies"):

        class Redefines(BackendLaws):
            def test_put_copies(self) -> None:
                return None


def test_a_law_cannot_be_disabled_with_none() -> None:
    with pytest.raises(TypeError, match="redefines the law test_put_copies"):
        type("Disables", (BackendLaws,), {"test_put_copies": None})


def test_a_law_cannot_be_redefined_by_a_mixin() -> None:
    class Mixin:
        def test_put_copies(self) -> None:
            return None

    with pytest.raises(TypeError, match="redefines the law test_put_copies"):
        type("Mixed", (Mixin, BackendLaws), {})


def test_a_known_failure_is_reported_with_its_reason() -> None:
    laws = laws_of(KeepsTheBuffer)
    laws.known_failures = {"test_put_copies": "zero copy, on purpose"}  # type: ignore[misc]
    (result,) = laws.check(["test_put_copies"])
    assert (result.outcome, result.detail, result.ok) == ("known", "zero copy, on purpose", True)


def test_a_known_failure_that_holds_is_a_failure() -> None:
    laws = laws_of(Model)
    laws.known_failures = {"test_put_copies": "once upon a time"}  # type: ignore[misc]
    (result,) = laws.check(["test_put_copies"])
    assert result.outcome == "failed"
    assert "once upon a time" in result.detail


def test_a_known_failure_of_no_law_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="test_put_copied"):
        type("Misspelt", (BackendLaws,), {"known_failures": {"test_put_copied": "typo"}})


class LaterLaws(ModelLaws):
    @law(since=(1, 7))
    def test_a_later_law(self) -> None:
        expect(False, "broken")


def test_a_law_newer_than_the_plugin_is_skipped() -> None:
    (result,) = LaterLaws().check(["test_a_later_law"])
    assert result.outcome == "skipped"
    assert result.detail == "a law since API 1.7, the plugin declares 1.0"


def test_a_law_as_old_as_the_plugin_is_checked() -> None:
    class Newer(Model):
        api_version = (1, 7)

    laws = LaterLaws()
    laws.backend_class = Newer  # type: ignore[misc]
    (result,) = laws.check(["test_a_later_law"])
    assert (result.outcome, result.detail) == ("failed", "broken")
    assert isinstance(result.error, LawBroken)


def test_pytest_fails_skips_and_xfails_as_the_results_say() -> None:
    laws: Any = laws_of(KeepsTheBuffer)
    with pytest.raises(LawBroken):
        laws.test_put_copies()
    laws.known_failures = {"test_put_copies": "why"}
    with pytest.raises(pytest.xfail.Exception, match="why"):
        laws.test_put_copies()
    plain: Any = type("Plain", (BackendLaws,), {"open_backend": lambda self, context: DictBackend(context=context)})()
    with pytest.raises(pytest.skip.Exception, match="not persistent"):
        plain.test_records_survive_reopening()


def test_laws_run_without_pytest_on_a_store_in_use_and_leave_it_as_it_was() -> None:
    store = ModelStore()
    store.answering.set()
    mine = {ChunkKey(os.urandom(48)): 5000 for _ in range(5)}
    with Model(Context(), store) as backend:
        for key, nbytes in mine.items():
            backend.put(key, filled(key, nbytes))
    before = dict(store.records)
    heard: list[LawResult] = []
    results = run_backend_laws(lambda context: Model(context, store), on_result=heard.append)
    assert results == heard
    assert not [r for r in results if not r.ok]
    assert len(results) == len(BackendLaws.laws())
    assert store.records == before
    assert store.nbytes == 25_000


def test_a_plugin_that_cannot_be_opened_fails_every_law_and_raises_nothing() -> None:
    def refuse(context: Context) -> Model:
        raise BackendUnavailable("nobody is listening")

    results = run_backend_laws(refuse)
    assert {r.outcome for r in results} == {"failed"}
    assert "nobody is listening" in results[0].detail
