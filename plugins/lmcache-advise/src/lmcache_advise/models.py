"""What a model's config.json says: the names that families of models have for the same things."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from lmcache_core import ConfigError

MAX_NBYTES: Final = 16 << 20
MAX_LAYERS: Final = 4096
_INSIDE: Final = ("text_config", "language_config", "llm_config", "thinker_config")
"""Where a model of several modalities keeps the configuration of its language model."""
DTYPE_NBYTES: Final = {
    "float32": 4.0, "bfloat16": 2.0, "float16": 2.0, "int8": 1.0,
    "fp8": 1.0, "fp8_e4m3": 1.0, "fp8_e5m2": 1.0, "float8_e4m3fn": 1.0, "float8_e5m2": 1.0,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The object in a config.json, that of the language model where there are several."""

    path: str
    values: Mapping[str, Any]

    @property
    def model_type(self) -> str:
        return str(self.values.get("model_type", "a model"))

    def integer(self, *names: str, default: int | None = None) -> int:
        """The first of `names` that is there; ConfigError if it is no positive integer, or missing without default."""
        for name in names:
            value = self.values.get(name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 40:
                raise ConfigError(f"{self.path}: {name}: expected a number, got {str(value)[:60]!r}")
            return value
        if default is None:
            raise ConfigError(f"{self.path}: has no {' or '.join(names)}")
        return default

    def has(self, name: str) -> bool:
        return self.values.get(name) is not None

    def names(self, name: str) -> list[str] | None:
        """A list of text, or None."""
        value = self.values.get(name)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) > MAX_LAYERS or not all(isinstance(each, str) for each in value):
            raise ConfigError(f"{self.path}: {name}: expected a list of names")
        return value

    @property
    def layers(self) -> int:
        count = self.integer("num_hidden_layers", "n_layer", "num_layers", "n_layers")
        if not 1 <= count <= MAX_LAYERS:
            raise ConfigError(f"{self.path}: num_hidden_layers: {count} is not 1 to {MAX_LAYERS}")
        return count

    @property
    def dtype(self) -> str:
        """Of the weights before quantisation."""
        text = str(self.values.get("dtype") or self.values.get("torch_dtype") or "bfloat16").removeprefix("torch.")
        return text if text in DTYPE_NBYTES else "bfloat16"

    @property
    def weights_nbytes(self) -> int | None:
        """As the index beside the file says; None where there is none."""
        index = Path(self.path).with_name("model.safetensors.index.json")
        try:
            found = json.loads(index.read_bytes())["metadata"]["total_size"]
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return int(found) if isinstance(found, int | float) and found > 0 else None


def read_model(path: Path) -> ModelConfig:
    """The config.json at `path`, or in the folder `path`; ConfigError says what is wrong with it."""
    file = path / "config.json" if path.is_dir() else path
    try:
        with file.open("rb") as stream:
            raw = stream.read(MAX_NBYTES + 1)
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror}") from error
    if len(raw) > MAX_NBYTES:
        raise ConfigError(f"{file}: larger than the limit of {MAX_NBYTES} bytes")
    try:
        values = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file}: not JSON: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{file}: expected a JSON object")
    return ModelConfig(str(file), _inner(values))


def _inner(values: dict[str, Any]) -> dict[str, Any]:
    for name in _INSIDE:
        inner = values.get(name)
        if isinstance(inner, dict) and inner:
            shared: dict[str, Any] = {
                key: values[key] for key in ("dtype", "torch_dtype", "quantization_config") if key in values
            }
            return _inner(shared | inner)
    return values
