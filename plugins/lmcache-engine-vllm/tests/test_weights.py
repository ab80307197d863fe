"""The digest of a model's weights: equal for equal files, another one for any other."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from lmcache_core import NamespaceError
from lmcache_engine_vllm import weights
from lmcache_engine_vllm.weights import files_digest, weights_of


def model(folder: Path, content: bytes = b"w" * 1000, name: str = "model.safetensors") -> Path:
    folder.mkdir()
    (folder / name).write_bytes(content)
    (folder / "config.json").write_text("{}")
    return folder


def test_the_same_weights_elsewhere_have_the_same_digest(tmp_path: Path) -> None:
    assert files_digest(model(tmp_path / "a")) == files_digest(model(tmp_path / "b"))


@pytest.mark.parametrize("change", ["byte", "length", "name"])
def test_other_weights_have_another_digest(tmp_path: Path, change: str) -> None:
    content = b"w" * 999 + b"x" if change == "byte" else b"w" * (1001 if change == "length" else 1000)
    other = model(tmp_path / "b", content, "other.safetensors" if change == "name" else "model.safetensors")
    assert files_digest(model(tmp_path / "a")) != files_digest(other)


@pytest.mark.parametrize("position", [0, 1_500_000, 3_999_999])
def test_large_weights_are_sampled_from_end_to_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, position: int
) -> None:
    monkeypatch.setattr(weights, "_WHOLE_NBYTES", 1000)
    content = bytearray(4_000_000)
    first = files_digest(model(tmp_path / "a", bytes(content)))
    content[position] = 1
    assert files_digest(model(tmp_path / "b", bytes(content))) != first


def test_a_folder_without_weights_cannot_be_told_from_others(tmp_path: Path) -> None:
    with pytest.raises(NamespaceError, match="weights: no weights in"):
        files_digest(model(tmp_path / "a", name="readme.txt"))


def test_dummy_weights_are_the_same_everywhere(tmp_path: Path) -> None:
    config = SimpleNamespace(model=str(tmp_path), revision=None)
    assert weights_of(config, SimpleNamespace(load_format="dummy")) == "dummy"


def test_a_model_that_is_nowhere_has_no_weights() -> None:
    config = SimpleNamespace(model="nobody/nothing", revision=None)
    with pytest.raises(NamespaceError, match="weights: no local snapshot of nobody/nothing"):
        weights_of(config, SimpleNamespace(load_format="auto", download_dir=None))
