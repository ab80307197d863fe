"""What stores have of a prompt, in each namespace, and in what the namespaces of one model differ."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from lmcache_core import audit
from lmcache_core.backend import Backend
from lmcache_core.errors import BackendError, CacheError
from lmcache_core.keys import ChunkKey, chain_digests

from .display import clean, table
from .stores import stores_of

if TYPE_CHECKING:
    from .explain import Prompt

FIELDS: Final = ("weights", "kv_dtype", "chunk_tokens", "adapter", "tags", "salt_id")
"""Of a family, beside its model; `salt_id` is its tenant."""
MAX_FAMILIES: Final = 64
_TIMEOUT_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class Namespace:
    """One family in one store, and how many of each prompt's chunks it has there from the first on."""

    store: str
    family: dict[str, Any]
    chunks: tuple[int, ...]
    of: tuple[int, ...]
    """Whole chunks of each prompt at this family's chunk size."""


@dataclass(frozen=True, slots=True)
class Stored:
    namespaces: list[Namespace]
    problems: list[str]
    """Of stores that could not be asked."""

    def as_json(self) -> dict[str, Any]:
        return {
            "namespaces": [
                {"store": n.store, "family": n.family, "chunks": n.chunks, "of": n.of} for n in self.namespaces
            ],
            "differences": [{"model": model, "fields": fields} for model, fields in self.differences()],
            "problems": self.problems,
        }

    def differences(self) -> Iterator[tuple[str, dict[str, list[str]]]]:
        """For each model in more than one namespace: the fields in which these differ, with their values."""
        models: dict[str, dict[str, dict[str, Any]]] = {}
        for namespace in self.namespaces:
            family = namespace.family
            models.setdefault(_base(family["model"]), {})[family["family_id"]] = family
        for families in models.values():
            values = {
                field: list(dict.fromkeys(value_of(family, field) for family in families.values()))
                for field in ("model", *FIELDS)
            }
            differing = {field: found for field, found in values.items() if len(found) > 1}
            if differing:
                yield str(next(iter(families.values()))["model"]), differing

    def lines(self) -> Iterator[str]:
        yield ""
        yield from (f"not looked into: {clean(problem)}" for problem in self.problems)
        if not self.namespaces:
            if not self.problems:
                yield "nothing is stored there"
            return
        prompts = len(self.namespaces[0].chunks)
        told = [f for f in FIELDS if any(value_of(n.family, f) != "-" for n in self.namespaces)]
        heads = ("tenant" if f == "salt_id" else f for f in told)
        rows = [("STORE", "MODEL", *(h.upper() for h in heads), *(f"{label}: STORED" for label in "AB"[:prompts]))]
        for n in self.namespaces:
            counts = (f"{have} of {of} chunks" for have, of in zip(n.chunks, n.of, strict=True))
            rows.append((n.store, value_of(n.family, "model"), *(value_of(n.family, f) for f in told), *counts))
        yield from table([[cell[:40] for cell in row] for row in rows])
        for model, fields in self.differences():
            differ = "; ".join(f"{field}: {' | '.join(values)}" for field, values in fields.items())
            yield f"{clean(model)} is stored in namespaces that never share KV, since they differ in {differ}"
        if prompts and all(n.of[0] and not any(n.chunks) for n in self.namespaces):
            yield "none of them has the first chunk: nothing was stored, it was evicted, or the tokens are others"


def stored_of(
    prompts: Sequence[Prompt], *, backend: str | None, pairs: tuple[str, ...], config: Path | None, tier: str | None
) -> Stored:
    """Ask each store that those options name; one that cannot be asked is no reason to say nothing of the others."""
    named = backend is not None or bool(pairs)
    try:
        stores = stores_of(backend, pairs, None if named else config, None if named else tier)
    except CacheError as error:
        if named or tier is not None:
            raise
        return Stored([], [str(error)])
    found: list[Namespace] = []
    problems: list[str] = []
    for store in stores:
        try:
            with store.open() as opened:
                survey = audit.survey(opened, now=time.time())
                found += _namespaces(store.name, opened, survey, prompts)
            unnamed = sum(use.records for use in survey.shards.values() if use.manifest is None)
            if unnamed:
                problems.append(f"{store.name}: {unnamed:,} records without a manifest that says whose they are")
        except CacheError as error:
            if named:
                raise
            problems.append(f"{store.name}: {error}")
    return Stored(found, problems)


def _namespaces(
    store: str, backend: Backend[Any], survey: audit.Survey, prompts: Sequence[Prompt]
) -> Iterator[Namespace]:
    families: dict[bytes, list[audit.ShardUse]] = {}
    for use in survey.shards.values():
        if use.manifest is not None:
            families.setdefault(use.manifest.family_id, []).append(use)
    largest = sorted(families.items(), key=lambda item: -sum(use.records for use in item[1]))
    for family_id, uses in largest[:MAX_FAMILIES]:
        assert uses[0].manifest is not None
        family = uses[0].manifest.described["family"]
        size = int(family.get("chunk_tokens", 256))
        full = [u for u in uses if u.manifest is not None and u.manifest.described.get("group") == "full"] or uses
        chunks, of = [], []
        for prompt in prompts:
            if prompt.ids is None:
                continue
            digests = chain_digests(family_id, prompt.ids, size)
            of.append(len(digests))
            chunks.append(min(_prefix(backend, use.shard_id, digests) for use in full))
        yield Namespace(store, family, tuple(chunks), tuple(of))


def _prefix(backend: Backend[Any], shard_id: bytes, digests: Sequence[bytes]) -> int:
    keys = [ChunkKey(shard_id + digest) for digest in digests]
    try:
        return backend.contains_prefix(keys, timeout_s=_TIMEOUT_S) if keys else 0
    except BackendError as error:
        raise CacheError(str(error)) from error


def _base(model: object) -> str:
    """Two paths to one model end alike."""
    return str(model).rstrip("/").rpartition("/")[2].casefold()


def value_of(family: dict[str, Any], field: str) -> str:
    value = family.get(field)
    if field == "tags":
        value = ", ".join("=".join(map(str, pair)) for pair in value or ())
    if field == "salt_id":
        value = str(value or "")[:8]
    return clean(str(value)) if value not in (None, "") else "-"
