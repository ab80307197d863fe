"""Traces of requests from files: ours, the published format of hash ids, and plain lines of tokens or block hashes."""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
import numpy as np

from lmcache_core import ConfigError

from .requests import MAX_BLOCKS, Blocks, Builder, Requests

LMCACHE: Final = "lmcache"
MOONCAKE: Final = "mooncake"
JSONL: Final = "jsonl"
FORMATS: Final = (LMCACHE, MOONCAKE, JSONL)
MAX_LINE_NBYTES: Final = 64 << 20
MAX_TOLD: Final = 5
"""Bad lines that are named; the others are counted."""
_BATCH: Final = 20_000
_MOONCAKE_TOKENS: Final = 512
_REPEATS: Final = 4096
"""Requests of our own trace whose last line is remembered, since an engine may ask again."""
_SHORT: Final = 8

Natural = Annotated[int, msgspec.Meta(ge=0)]


class _Mooncake(msgspec.Struct):
    timestamp: float
    input_length: Natural
    hash_ids: list[Natural]
    output_length: Natural = 0


class _Family(msgspec.Struct):
    family_id: str
    chunk_tokens: Annotated[int, msgspec.Meta(ge=1)]


class _Ours(msgspec.Struct):
    at: float
    request: str
    family: _Family
    input_tokens: Natural
    digests: str


class _Plain(msgspec.Struct):
    timestamp: float | None = None
    at: float | None = None
    tokens: list[Natural] | None = None
    token_ids: list[Natural] | None = None
    prompt_token_ids: list[Natural] | None = None
    block_hashes: list[int | str] | None = None
    hash_ids: list[int | str] | None = None
    input_length: Natural | None = None
    output_length: Natural = 0
    model: str = ""


@dataclass(frozen=True, slots=True)
class Trace:
    """What was read."""

    requests: Requests
    kind: str
    lines: int
    bad_lines: int = 0
    bad: tuple[str, ...] = ()
    """The first of them: file, line, what is wrong."""


@dataclass(slots=True)
class _Line:
    """One request on its way into a batch."""

    at: float
    blocks: list[int] | Blocks
    input_tokens: int
    output_tokens: int = 0
    seed: int = 0


@dataclass(slots=True)
class _Reader:
    """What the lines of one format are decoded with, and what is known from the lines before."""

    kind: str
    block_tokens: int
    decode: Callable[[bytes], Any] = field(init=False)
    weights: Blocks = field(init=False)
    seen: OrderedDict[tuple[str, str], None] = field(default_factory=OrderedDict)

    def __post_init__(self) -> None:
        shape = {LMCACHE: _Ours, MOONCAKE: _Mooncake, JSONL: _Plain}[self.kind]
        self.decode = msgspec.json.Decoder(shape).decode
        rng = np.random.default_rng(0x6C6D63)
        self.weights = rng.integers(0, 1 << 63, self.block_tokens, dtype=np.uint64) * np.uint64(2) + np.uint64(1)

    def line(self, raw: bytes) -> _Line | None:
        """One request; None for one that was there already.  ValueError says what is wrong with it."""
        found = self.decode(raw)
        if self.kind == MOONCAKE:
            return self._mooncake(found)
        return self._ours(found) if self.kind == LMCACHE else self._plain(found)

    def _mooncake(self, found: _Mooncake) -> _Line:
        whole, rest = divmod(found.input_length, self.block_tokens)
        if not whole <= len(found.hash_ids) <= whole + bool(rest):
            raise ValueError(
                f"{len(found.hash_ids)} hash_ids for {found.input_length} tokens are no blocks of {self.block_tokens}; "
                "--block-tokens says how long they are"
            )
        return _Line(found.timestamp / 1e3, found.hash_ids[:whole], found.input_length, found.output_length)

    def _ours(self, found: _Ours) -> _Line | None:
        if found.family.chunk_tokens != self.block_tokens:
            raise ValueError(f"chunks of {found.family.chunk_tokens} tokens, after others of {self.block_tokens}")
        try:
            raw = base64.b64decode(found.digests, validate=True)
            seed = int.from_bytes(bytes.fromhex(found.family.family_id)[:_SHORT], "big")
        except (binascii.Error, ValueError) as error:
            raise ValueError("digests or family_id are not as a trace has them") from error
        if len(raw) % _SHORT or len(raw) // _SHORT != found.input_tokens // self.block_tokens:
            raise ValueError(f"{len(raw)} bytes of digests for {found.input_tokens} tokens")
        key = (found.request, found.digests)
        if key in self.seen:
            return None
        self.seen[key] = None
        if len(self.seen) > _REPEATS:
            self.seen.popitem(last=False)
        return _Line(found.at, np.frombuffer(raw, ">u8").astype(np.uint64), found.input_tokens, 0, seed)

    def _plain(self, found: _Plain) -> _Line:
        at = found.timestamp if found.timestamp is not None else found.at
        if at is None:
            raise ValueError("no timestamp")
        seed = _number(found.model) if found.model else 0
        tokens = next(
            (each for each in (found.tokens, found.token_ids, found.prompt_token_ids) if each is not None), None
        )
        if tokens is not None:
            return _Line(at, self._of_tokens(tokens), len(tokens), found.output_length, seed)
        hashes = found.block_hashes if found.block_hashes is not None else found.hash_ids
        if hashes is None:
            raise ValueError("neither tokens nor block_hashes")
        blocks = [_number(each) for each in hashes]
        length = found.input_length if found.input_length is not None else len(blocks) * self.block_tokens
        return _Line(at, blocks[: length // self.block_tokens], length, found.output_length, seed)

    def _of_tokens(self, tokens: list[int]) -> Blocks:
        count = len(tokens) // self.block_tokens
        try:
            array = np.array(tokens[: count * self.block_tokens], np.uint64).reshape(count, self.block_tokens)
        except OverflowError as error:
            raise ValueError("a token id is too large") from error
        return np.asarray(((array + np.uint64(1)) * self.weights).sum(axis=1, dtype=np.uint64))


def read_trace(
    paths: Sequence[Path], *, kind: str = "auto", block_tokens: int | None = None, max_blocks: int = MAX_BLOCKS,
) -> Trace:  # fmt: skip
    """The requests of one or several files of one format.

    Bad lines are left out and named.  ConfigError where a file cannot be read, is of no format that is known here, or
    more than a tenth of its lines is bad.
    """
    first = next((raw for path in paths for _, raw in _lines(path) if raw.strip()), None)
    if first is None:
        raise ConfigError(f"{', '.join(map(str, paths))}: empty")
    found = _kind_of(first, paths[0]) if kind == "auto" else kind
    reader = _Reader(found, block_tokens or _block_tokens_of(first, found))
    builder = Builder(reader.block_tokens, max_blocks)
    bad: list[str] = []
    lines = bad_lines = 0
    batch: list[_Line] = []
    for path in paths:
        for number, raw in _lines(path):
            if not raw.strip():
                continue
            lines += 1
            try:
                line = reader.line(raw)
            except (ValueError, msgspec.MsgspecError) as error:
                bad_lines += 1
                if len(bad) < MAX_TOLD:
                    bad.append(f"{path}:{number}: {_plainly(error)}")
                continue
            if line is not None:
                batch.append(line)
            if len(batch) >= _BATCH:
                _add(builder, batch)
                batch.clear()
    _add(builder, batch)
    if bad_lines > max(1, lines // 10) or bad_lines == lines:
        more = f"\nand {bad_lines - len(bad)} more" if bad_lines > len(bad) else ""
        raise ConfigError(f"{bad_lines} of {lines} lines cannot be used as {found}:\n" + "\n".join(bad) + more)
    return Trace(builder.build(), found, lines, bad_lines, tuple(bad))


def with_older(path: Path) -> list[Path]:
    """A trace of ours lies in two files, the older one beside the newer."""
    older = path.with_name(f"{path.name}.1")
    return [older, path] if older.exists() else [path]


def _add(builder: Builder, batch: list[_Line]) -> None:
    if not batch:
        return
    parts = [line.blocks for line in batch]
    if isinstance(parts[0], list):
        ids: Any = np.fromiter((each for part in parts for each in part), np.uint64)
    else:
        ids = np.concatenate([np.asarray(part, np.uint64) for part in parts])
    builder.add(
        [line.at for line in batch],
        [len(part) for part in parts],
        ids,
        [line.input_tokens for line in batch],
        [line.output_tokens for line in batch],
        np.array([line.seed for line in batch], np.uint64),
    )


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    try:
        with path.open("rb") as stream:
            number = 0
            while raw := stream.readline(MAX_LINE_NBYTES):
                number += 1
                yield number, raw
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error


def _object(raw: bytes) -> dict[str, Any]:
    try:
        found = msgspec.json.decode(raw)
    except msgspec.MsgspecError:
        return {}
    return found if isinstance(found, dict) else {}


def _kind_of(raw: bytes, path: Path) -> str:
    keys = _object(raw).keys()
    if {"digests", "family"} <= keys:
        return LMCACHE
    if {"hash_ids", "input_length", "timestamp"} <= keys:
        return MOONCAKE
    if keys & {"tokens", "token_ids", "prompt_token_ids", "block_hashes", "hash_ids"}:
        return JSONL
    raise ConfigError(
        f"{path}:1: no trace that is known here: a line is a JSON object with family and digests (lmcache), with "
        "timestamp, input_length and hash_ids (mooncake), or with timestamp and tokens or block_hashes (jsonl)"
    )


def _block_tokens_of(raw: bytes, kind: str) -> int:
    """Of our trace what its first line says, of others what is usual."""
    if kind == LMCACHE:
        family = _object(raw).get("family")
        found = family.get("chunk_tokens") if isinstance(family, dict) else None
        return found if isinstance(found, int) and 1 <= found <= 1 << 20 else 256
    hashes = _object(raw).keys() & {"block_hashes", "hash_ids"}
    return _MOONCAKE_TOKENS if kind == MOONCAKE else 16 if hashes else 256


def _number(value: int | str) -> int:
    """64 bits for a hash of any length."""
    if isinstance(value, int):
        return value & 0xFFFF_FFFF_FFFF_FFFF
    return int.from_bytes(hashlib.blake2b(value.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big")


def _plainly(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text[:200] or type(error).__name__
