"""Tokenizers, where a package for them is installed: text to ids and back."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmcache_core.errors import CacheError, ConfigError


@dataclass(frozen=True, slots=True)
class Tokenizer:
    """A tokenizer as the commands use it."""

    name: str
    encode: Callable[[str], list[int]]
    decode: Callable[[Sequence[int]], str]


def load_tokenizer(name: str) -> Tokenizer:
    """A `tokenizer.json`, a folder with one, or what transformers knows by that name; CacheError says why not."""
    path = Path(name)
    file = path / "tokenizer.json" if path.is_dir() else path
    try:
        if file.is_file():
            return _of_file(name, file)
        return _of_transformers(name)
    except CacheError:
        raise
    except Exception as error:  # theirs raise plain Exception, OSError, ValueError
        raise ConfigError(f"--tokenizer {name}: {type(error).__name__}: {str(error).splitlines()[0][:200]}") from error


def _of_file(name: str, file: Path) -> Tokenizer:
    made: Any = _package("tokenizers", name).Tokenizer.from_file(str(file))
    return Tokenizer(name, lambda text: list(made.encode(text).ids), lambda ids: _decoded(made, ids))


def _of_transformers(name: str) -> Tokenizer:
    made: Any = _package("transformers", name).AutoTokenizer.from_pretrained(name)
    return Tokenizer(name, lambda text: list(made.encode(text)), lambda ids: _decoded(made, ids))


def _decoded(made: Any, ids: Sequence[int]) -> str:
    return str(made.decode(list(ids), skip_special_tokens=False))


def _package(package: str, name: str) -> Any:
    try:
        return importlib.import_module(package)
    except ImportError as error:
        help_ = f"pip install {package}, or give files of token ids"
        raise ConfigError(f"--tokenizer {name}: the package {package} is not installed; {help_}") from error
