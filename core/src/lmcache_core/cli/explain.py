"""`lmc explain`: where two prompts part, what stores have of them, and why a request missed."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import click

from lmcache_core.config import DEFAULT_FILE, find_config, load_config
from lmcache_core.errors import CacheError, ConfigError

from . import parting
from .display import clean
from .key import MAX_TOKENS_NBYTES, token_ids
from .tokenizing import Tokenizer, load_tokenizer

_IDS: Final = re.compile(r"\s*\[?[\d\s,]*\]?\s*")


@click.command("explain", help="Say where two prompts part, or why a request missed.")
@click.argument("prompts", nargs=-1, metavar="[A [B]]", type=click.Path(path_type=Path, allow_dash=True))
@click.option("--tokenizer", help="Of the model: a tokenizer.json, its folder, or a name that transformers knows.")
@click.option("--chunk-tokens", type=click.IntRange(1, 1 << 20), help="[default: that of the configuration]")
@click.option("--text", is_flag=True, help="A and B are text, also where they hold nothing but numbers.")
@click.option("--request", help="A request that a daemon answered lately, by the engine's name for it.")
@click.option(
    "--trace", type=click.Path(path_type=Path), help="A and B are requests in this file of `trace:` with tokens."
)
@click.option("--latest", is_flag=True, help="The requests that a daemon answered lately.")
@click.option("--config", type=click.Path(path_type=Path), help=f"Default: $LMCACHE_CONFIG, else {DEFAULT_FILE}.")
@click.option("--tier", help="Look only into this tier of the configuration for what is stored of A and B.")
@click.option("--store", "backend", help="Look into this backend instead, e.g. disk.")
@click.option("-o", "pairs", multiple=True, metavar="KEY=VALUE", help="An option of --store (disk); repeatable.")
@click.option("--socket", help="The daemon's socket.  [default: that of the configuration]")
@click.option("--tcp", default="", metavar="IP:PORT", help="Over TCP instead; the token is $LMCACHE_TOKEN.")
@click.option("--ca", type=click.Path(path_type=Path), help="Certificate to trust for --tcp.")
@click.option("--timeout", type=float, default=5.0, show_default=True, help="Seconds to wait for an answer.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def command(
    prompts: tuple[Path, ...],
    tokenizer: str | None,
    chunk_tokens: int | None,
    text: bool,
    request: str | None,
    trace: Path | None,
    latest: bool,
    config: Path | None,
    tier: str | None,
    backend: str | None,
    pairs: tuple[str, ...],
    as_json: bool,
    **daemon: Any,
) -> None:
    """A and B are files of text, or of token ids (a JSON array, or separated); - is standard input."""
    if request is not None or latest:
        if prompts:
            raise click.UsageError("give prompts, or a request; not both")
        from .explain_request import explain_request

        sys.exit(explain_request(request, as_json, config=config, **daemon))
    if not 1 <= len(prompts) <= 2:
        raise click.UsageError("give two prompts (or one, to see what is stored of it), --request, or --latest")
    found = load_config(config)
    with_tokenizer = load_tokenizer(tokenizer) if tokenizer else None
    size = chunk_tokens or found.chunk_tokens
    told: list[str] = []
    if trace is not None:
        from .explain_trace import traced

        read, told, traced_size = traced(trace, [str(name) for name in prompts], with_tokenizer)
        size = chunk_tokens or traced_size
    else:
        read = [read_prompt(path, with_tokenizer, text) for path in prompts]
    compared = compare(read[0], read[1], size, with_tokenizer) if len(read) == 2 else None
    stored = None
    if pairs or backend is not None or tier is not None or find_config(config, os.environ) is not None:
        from .explain_stores import stored_of

        stored = stored_of(read, backend=backend, pairs=pairs, config=config, tier=tier)
    if as_json:
        sides = [{"name": p.name, "tokens": None if p.ids is None else len(p.ids)} for p in read]
        object_: dict[str, Any] = {"prompts": sides, "chunk_tokens": size}
        object_["difference"] = compared.as_json() if compared is not None else None
        object_["trace"] = told
        object_["stored"] = stored.as_json() if stored is not None else None
        click.echo(json.dumps(object_, indent=1))
        return
    for label, prompt in zip("AB", read, strict=False):
        click.echo(prompt.line(label, size))
    for line in told:
        click.echo(line)
    for line in compared.lines() if compared is not None else ():
        click.echo(line)
    for line in stored.lines() if stored is not None else ():
        click.echo(line)


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as far as it is known: text, token ids, or both."""

    name: str
    text: str | None
    ids: list[int] | None

    def line(self, label: str, chunk_tokens: int) -> str:
        if self.ids is None:
            return f"{label}  {self.name}: {len(self.text or ''):,} characters"
        return f"{label}  {self.name}: {len(self.ids):,} tokens, {_chunks(len(self.ids) // chunk_tokens)}"


def read_prompt(path: Path, tokenizer: Tokenizer | None, is_text: bool) -> Prompt:
    """The prompt in a file; ids are decoded, and text is tokenised, where there is a tokenizer."""
    name = "standard input" if str(path) == "-" else str(path)
    try:
        if str(path) == "-":
            raw = sys.stdin.buffer.read(MAX_TOKENS_NBYTES + 1)
        else:
            with path.open("rb") as stream:
                raw = stream.read(MAX_TOKENS_NBYTES + 1)
    except OSError as error:
        raise CacheError(f"{name}: cannot be read: {error.strerror}") from error
    if len(raw) > MAX_TOKENS_NBYTES:
        raise CacheError(f"{name}: larger than the limit of {MAX_TOKENS_NBYTES} bytes")
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{name}: not UTF-8 text at byte {error.start}") from error
    if not is_text and text.strip() and _IDS.fullmatch(text):
        ids = token_ids(text, name)
        return Prompt(name, tokenizer.decode(ids) if tokenizer is not None else None, ids)
    return Prompt(name, text, tokenizer.encode(text) if tokenizer is not None else None)


@dataclass(frozen=True, slots=True)
class Difference:
    """Where A and B part.  What needs tokens, or text, is None without."""

    equal: bool
    a_tokens: int | None
    b_tokens: int | None
    chunk_tokens: int
    common_tokens: int | None
    token_a: str
    token_b: str
    """The first tokens that differ, as `id «text»`; empty at the end of a prompt, or without tokens."""
    at: parting.Place | None
    """The first character that differs."""
    before: str
    rest_a: str
    rest_b: str
    """The text around, every character visible."""
    what: str

    @property
    def common_chunks(self) -> int | None:
        return None if self.common_tokens is None else self.common_tokens // self.chunk_tokens

    @property
    def lost_chunks(self) -> int | None:
        """Of B's whole chunks, those that A does not have too."""
        if self.common_chunks is None or self.b_tokens is None:
            return None
        return self.b_tokens // self.chunk_tokens - self.common_chunks

    def _lost(self) -> str:
        assert self.b_tokens is not None
        whole = self.b_tokens // self.chunk_tokens
        return (
            f"{self.lost_chunks:,} of B's {whole:,} chunks are lost to the difference"
            if whole
            else "B has no whole one"
        )

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"common_chunks": self.common_chunks, "lost_chunks": self.lost_chunks}

    def lines(self) -> Iterator[str]:
        if self.common_tokens is None:
            yield "no --tokenizer: the characters are compared, and chunks cannot be counted"
        if self.equal:
            yield "A and B are equal: if one misses what the other stored, their namespaces differ"
            return
        if self.common_tokens is not None and self.common_chunks is not None:
            yield (
                f"the first {self.common_tokens:,} tokens are the same, {_chunks(self.common_chunks)} of "
                f"{self.chunk_tokens}; {self._lost()}"
            )
            ends = [f"A {self.token_a or 'ends'}", f"B {self.token_b or 'ends'}"]
            yield f"token {self.common_tokens:,} (chunk {self.common_tokens // self.chunk_tokens:,}): {', '.join(ends)}"
        if self.at is not None:
            yield ""
            yield f"character {self.at.offset:,}: line {self.at.line}, column {self.at.column}"
            dots = "…" if self.at.offset > parting.CONTEXT else ""
            yield f"  A  {dots}{self.before}{self.rest_a}"
            yield f"  B  {dots}{self.before}{self.rest_b}"
            yield " " * (5 + len(dots) + len(self.before)) + "^"
        yield self.what


def compare(a: Prompt, b: Prompt, chunk_tokens: int, tokenizer: Tokenizer | None) -> Difference:
    """Where two prompts part, by tokens and by characters as far as both have them."""
    common = token_a = token_b = None
    if a.ids is not None and b.ids is not None:
        common = parting.common(a.ids, b.ids)
        token_a, token_b = _token(a.ids, common, tokenizer), _token(b.ids, common, tokenizer)
    elif (a.ids is None) != (b.ids is None) and (a.text is None or b.text is None):
        raise ConfigError("one prompt is text, the other token ids: give the --tokenizer of the model")
    same_tokens = a.ids is None or b.ids is None or a.ids == b.ids
    at, before, rest_a, rest_b, what = None, "", "", "", ""
    if a.text is not None and b.text is not None:
        if a.text == b.text:
            what = (
                "" if same_tokens else "the text is the same, cut into other tokens: another tokenizer made one of them"
            )
        else:
            offset = parting.common(a.text, b.text)
            at = parting.place(a.text, offset)
            before = parting.visible(a.text[max(0, offset - parting.CONTEXT) : offset])
            rest_a, rest_b = (parting.visible(t[offset : offset + parting.CONTEXT]) for t in (a.text, b.text))
            what = parting.describe(parting.change(a.text, b.text, offset))
    elif not same_tokens:
        what = "with the --tokenizer of the model, the text around is shown"
    equal = same_tokens and (a.text == b.text or a.text is None or b.text is None)
    counts = [None if p.ids is None else len(p.ids) for p in (a, b)]
    return Difference(
        equal,
        counts[0],
        counts[1],
        chunk_tokens,
        common,
        token_a or "",
        token_b or "",
        at,
        before,
        rest_a,
        rest_b,
        what,
    )


def _chunks(count: int) -> str:
    return f"{count:,} whole chunk{'' if count == 1 else 's'}"


def _token(ids: list[int], at: int, tokenizer: Tokenizer | None) -> str:
    if at == len(ids):
        return ""
    text = f" «{clean(parting.visible(tokenizer.decode(ids[at : at + 1])))}»" if tokenizer is not None else ""
    return f"{ids[at]}{text}"
