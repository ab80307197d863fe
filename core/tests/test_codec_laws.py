"""The codec laws: Identity and a correct model keep them all, and for each law there is a mutant that it catches."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from codec_mutants import MUTANTS, Model, ModelLaws, laws_of

from lmcache_core.codec import Identity
from lmcache_core.testing import CodecLaws, run_codec_laws


class TestIdentity(CodecLaws):
    def open_codec(self) -> Identity:
        return Identity()


class TestModel(ModelLaws):
    """The model keeps every law."""


def test_no_law_is_skipped_for_the_model_and_none_needs_pytest() -> None:
    assert {r.name: r.outcome for r in run_codec_laws(Model)} == {each.name: "passed" for each in CodecLaws.laws()}


def test_every_law_has_a_mutant() -> None:
    assert {name for name, _ in MUTANTS} == {each.name for each in CodecLaws.laws()}


@pytest.mark.parametrize(("name", "mutant"), MUTANTS, ids=[mutant.__name__ for _, mutant in MUTANTS])
def test_the_law_catches_its_mutant(
    name: str, mutant: type[Model], record_property: Callable[[str, object], None]
) -> None:
    record_property("mutant", f"codec {name}")
    (result,) = laws_of(mutant).check([name])
    assert result.outcome == "failed", result
    assert result.detail


def test_a_lossy_codec_is_not_held_to_exact_bytes() -> None:
    class Lossy(Model):
        lossy = True

    (result,) = laws_of(Lossy).check(["test_a_chunk_comes_back_exactly"])
    assert (result.outcome, result.detail) == ("skipped", "the codec is lossy")
