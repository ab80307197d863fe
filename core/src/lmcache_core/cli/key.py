"""`lmc key`: the keys of a prompt's chunks, for support and for comparing nodes."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import IO, Any, Final, TypeVar

import click

from lmcache_core.chain import Chain, Group, GroupKind, Model, Shard
from lmcache_core.errors import CacheError, ConfigError
from lmcache_core.keys import Family, salt_id
from lmcache_core.layout import Layout, Region

MAX_TOKENS_NBYTES: Final = 64 << 20
F = TypeVar("F", bound=Callable[..., Any])


def prompt_options(command: F) -> F:
    """The options that describe a prompt; they reach the command as keywords for `prompt_of`."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


_OPTIONS: Final = (
    click.option("--tokens", help="Token ids, separated by commas or spaces."),
    click.option(
        "--tokens-file", type=click.File("rb"), help="A file with them (JSON array, or separated); - is stdin."
    ),
    click.option("--model", required=True, help="Name of the model."),
    click.option("--weights", required=True, help="Revision or digest of its weights."),
    click.option("--kv-dtype", required=True, help='Element type of the KV, e.g. "bfloat16".'),
    click.option("--chunk-tokens", type=int, default=256, show_default=True),
    click.option("--adapter", default="", help="LoRA adapter: name and digest."),
    click.option("--salt", envvar="LMCACHE_SALT", help="Tenant salt."),
    click.option("--key-secret", envvar="LMCACHE_KEY_SECRET", default="", help="Secret that keys the salt."),
    click.option("--tag", "tags", multiple=True, metavar="NAME=VALUE", help="What else changes the bytes; repeatable."),
    click.option("--layers", default="0:1", show_default=True, metavar="A:B", help="Layer range of the shard."),
    click.option(
        "--heads", default="0:0", show_default=True, metavar="A:B", help="Head range; 0:0 is no split by heads."
    ),
    click.option("--group", type=int, default=0, show_default=True, help="Layer group."),
    click.option("--block-tokens", type=int, help="Tokens of a block.  [default: --chunk-tokens]"),
    click.option("--block-nbytes", type=int, default=4096, show_default=True, help="Bytes of a block in one layer."),
    click.option("--region", default="kv", show_default=True, help="Name of the one region of the layout."),
    click.option("--packing", default="HND", show_default=True, help="How a block's bytes are arranged."),
)


def prompt_of(
    *,
    tokens: str | None,
    tokens_file: IO[bytes] | None,
    model: str,
    weights: str,
    kv_dtype: str,
    chunk_tokens: int,
    adapter: str,
    salt: str | None,
    key_secret: str,
    tags: tuple[str, ...],
    layers: str,
    heads: str,
    group: int,
    block_tokens: int | None,
    block_nbytes: int,
    region: str,
    packing: str,
) -> Chain:
    """The chain of a prompt in a model of one shard, as the options describe it."""
    family = Family(
        model=model,
        weights=weights,
        kv_dtype=kv_dtype,
        chunk_tokens=chunk_tokens,
        adapter=adapter,
        tags=_tags(tags),
        salt_id=salt_id(salt, key_secret),
    )
    start, stop = _range("--layers", layers)
    try:
        one = Region(
            name=region,
            layers=stop - start,
            block_tokens=block_tokens or chunk_tokens,
            block_nbytes=block_nbytes,
            dtype=kv_dtype,
            packing=packing,
        )
        layout = Layout(chunk_tokens=chunk_tokens, regions=(one,))
        shard = Shard.of(family, layout, group=group, layers=(start, stop), heads=_range("--heads", heads))
        return Chain.of(Model(family, (Group(GroupKind.FULL, (shard,)),)), _tokens(tokens, tokens_file))
    except ValueError as error:
        raise ConfigError(str(error)) from error


@click.command("key", help="Print the keys of a prompt's chunks.")
@prompt_options
@click.option("--json", "as_json", is_flag=True)
def command(as_json: bool, **prompt: Any) -> None:
    chain = prompt_of(**prompt)
    family = chain.model.family
    (shard,) = chain.model.shards
    layout = shard.layout
    keys = [key.text for key in chain.keys(shard)]
    if as_json:
        found = {
            "family_id": family.family_id.hex(),
            "shard_id": shard.shard_id.hex(),
            "layout": layout.fingerprint.hex(),
            "tokens": chain.tokens,
            "keys": keys,
        }
        click.echo(json.dumps(found, indent=1))
        return
    click.echo(f"family {family.family_id.hex()}")
    click.echo(f"shard  {shard.shard_id.hex()}  (layout {layout.fingerprint.hex()}, {layout.nbytes} bytes a chunk)")
    for index, key in enumerate(keys):
        click.echo(f"chunk {index}  tokens {index * layout.chunk_tokens}..{(index + 1) * layout.chunk_tokens}  {key}")
    tail = chain.tokens - len(keys) * layout.chunk_tokens
    click.echo(
        f"{chain.tokens} tokens, {len(keys)} whole chunks of {layout.chunk_tokens}, {tail} in the tail without a key"
    )


def _tokens(text: str | None, stream: IO[bytes] | None) -> list[int]:
    if (text is None) == (stream is None):
        raise click.UsageError("give either --tokens or --tokens-file")
    source = "--tokens"
    if stream is not None:
        source = str(getattr(stream, "name", "standard input"))
        raw = stream.read(MAX_TOKENS_NBYTES + 1)
        if len(raw) > MAX_TOKENS_NBYTES:
            raise CacheError(f"{source}: larger than the limit of {MAX_TOKENS_NBYTES} bytes")
        text = raw.decode("utf-8", "replace")
    assert text is not None
    return token_ids(text, source)


def token_ids(text: str, source: str) -> list[int]:
    """The ids in a JSON array or a list separated by commas or spaces."""
    words = re.split(r"[\s,]+", text.strip().removeprefix("[").removesuffix("]").strip())
    ids = []
    for place, word in enumerate(words):
        if not re.fullmatch(r"[0-9]{1,10}", word):
            if words == [""]:
                return []
            raise ConfigError(f"{source}: token {place} is {word[:40]!r}, not a token id")
        ids.append(int(word))
    return ids


def _tags(tags: tuple[str, ...]) -> tuple[tuple[str, str], ...]:
    pairs = [tuple(tag.partition("=")[::2]) for tag in tags if "=" in tag]
    if len(pairs) != len(tags):
        raise click.UsageError("--tag takes NAME=VALUE")
    return tuple(sorted((name, value) for name, value in pairs))


def _range(option: str, text: str) -> tuple[int, int]:
    match = re.fullmatch(r"([0-9]{1,9}):([0-9]{1,9})", text)
    if match is None:
        raise click.UsageError(f"{option} takes A:B, got {text!r}")
    return int(match[1]), int(match[2])
