"""`lmc config schema`: a valid schema that takes what the program takes, and refuses what has a wrong shape or name."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, Literal

import pytest
import yaml
from click.testing import CliRunner
from jsonschema import Draft202012Validator

from lmcache_core.cli import main
from lmcache_core.cli.config import STARTER
from lmcache_core.cli.schema import schema
from lmcache_core.config import parse_config
from lmcache_core.errors import ConfigError

DOCS = Path(__file__).parents[2] / "docs"


class Mode(Enum):
    FAST = "fast"
    SAFE = "safe"


@dataclass(frozen=True, kw_only=True)
class Auth:
    user: str
    token: str = field(default="", repr=False)


@dataclass(frozen=True, kw_only=True)
class ShelfOptions:
    path: Path
    """Where the records are,
    all of them."""
    mode: Mode = Mode.FAST
    level: Literal[1, 2] = 1
    limit_nbytes: int | None = None
    hosts: tuple[str, ...] = ()
    pair: tuple[int, float] = (1, 2.0)
    auth: Auth | None = None
    password: str = field(default="", repr=False)


@pytest.fixture(scope="module")
def validator() -> Draft202012Validator:
    result = CliRunner().invoke(main, ["config", "schema"])
    assert result.exit_code == 0, result.output
    made = json.loads(result.output[result.output.index("{") :])
    Draft202012Validator.check_schema(made)
    return Draft202012Validator(made)


def with_shelf(options: dict[str, Any]) -> list[str]:
    made = schema({"shelf": ShelfOptions})
    Draft202012Validator.check_schema(made)
    tiers = {"tiers": [{"backend": "shelf", "options": options}]}
    return [error.message for error in Draft202012Validator(made).iter_errors(tiers)]


def test_it_takes_the_starter_and_every_example_of_the_documentation(validator: Draft202012Validator) -> None:
    examples = [STARTER]
    for page in ("config.md", "hooks.md"):
        examples += re.findall(r"^```yaml\n(.*?)^```", (DOCS / page).read_text(), re.MULTILINE | re.DOTALL)
    assert len(examples) >= 3
    for example in examples:
        assert not list(validator.iter_errors(yaml.safe_load(example))), example


@pytest.mark.parametrize(
    "text",
    [
        "chunk_tokens: 64",
        "staging: 1GiB",
        "staging: 1048576",
        "staging_nbytes: 2MiB",
        "lease_timeout: 500ms",
        "key_secret: ${SECRET}",
        "chunk_tokens: ${CHUNK}",
        "tiers: [{backend: memory, capacity: 1GiB}]",
        "tiers: [{backend: disk, options: {path: /x, direct: 'off'}}]",
        'tiers: [{name: mine, backend: "inline:Mine", options: {whatever: 3}}]',
        "server: {socket_mode: '0660', allowed_uids: [1, 2]}",
        "plugins: {disable: [a], hooks: [log], inline: ./x.py}",
    ],
)
def test_it_takes_what_the_program_takes(validator: Draft202012Validator, text: str) -> None:
    parse_config(text, environ={"SECRET": "x", "CHUNK": "64"})
    assert not list(validator.iter_errors(yaml.safe_load(text)))


@pytest.mark.parametrize(
    "text",
    [
        "chunk_token: 64",
        "chunk_tokens: many",
        "staging: 1G",
        "lease_timeout: 5 days",
        "key_secret: in clear",
        "write: sometimes",
        "tiers: {}",
        "tiers: [{name: host}]",
        "tiers: [{backend: memory}]",
        "tiers: [{backend: memory, capacity: 1GiB, polciy: lru}]",
        "plugins: {disable: log}",
        "server: {http_port: 3}",
    ],
)
def test_it_refuses_what_the_program_refuses(validator: Draft202012Validator, text: str) -> None:
    with pytest.raises(ConfigError):
        parse_config(text, environ={})
    assert list(validator.iter_errors(yaml.safe_load(text)))


@pytest.mark.parametrize(
    "options",
    [{}, {"path": ""}, {"path": "/x", "direct": "perhaps"}, {"path": "/x", "pahth": "/y"}, {"path": {"a": 1}}],
)
def test_it_knows_the_options_of_an_installed_backend(validator: Draft202012Validator, options: dict[str, Any]) -> None:
    if options == {"path": ""}:
        options = {"path": 3}
    assert list(validator.iter_errors({"tiers": [{"backend": "disk", "options": options}]}))


def test_every_type_that_options_may_have_has_a_shape() -> None:
    good = {
        "path": "/x", "mode": "safe", "level": 2, "limit": "1GiB", "hosts": ["a", "b"], "pair": [3, 1.5],
        "auth": {"user": "me", "token": "${TOKEN}"}, "password": "${PASSWORD}",
    }  # fmt: skip
    assert with_shelf(good) == []
    assert with_shelf({**good, "limit": None, "auth": None, "mode": "${MODE}"}) == []
    for key, wrong in {
        "path": 3, "mode": "slow", "level": 3, "limit": "1G", "hosts": "a", "pair": [1, 2, 3], "auth": {"token": ""},
        "password": "clear",
    }.items():  # fmt: skip
        assert with_shelf({**good, key: wrong}), key


def test_the_docstrings_of_options_are_its_descriptions() -> None:
    made = schema({"shelf": ShelfOptions})
    (branch, _) = made["properties"]["tiers"]["items"]["allOf"][-2:]
    assert branch["then"]["properties"]["options"]["properties"]["path"]["description"] == (
        "Where the records are, all of them."
    )
