"""Which weights a model has, from its files: a digest that another set of weights does not share."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, Final

from lmcache_core import NamespaceError

_WHOLE_NBYTES: Final = 1 << 30
"""Up to here every byte is read (half a second); of larger weights the head, the tail and evenly spread samples."""
_SAMPLE_NBYTES: Final = 64 << 10
_SAMPLES: Final = 256
_SUFFIXES: Final = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
_STEP_NBYTES: Final = 4 << 20


def weights_of(model_config: Any, load_config: Any) -> str:
    """A name for the weights that vLLM loads; NamespaceError("weights") where there is none to be had."""
    if str(getattr(load_config, "load_format", "")) == "dummy":
        return "dummy"
    path = Path(model_config.model)
    if path.exists():
        return files_digest(path)
    return _snapshot(str(model_config.model), model_config.revision, getattr(load_config, "download_dir", None))


def files_digest(path: Path) -> str:
    """ "sha256:..." over names, sizes and content of the weights in a folder, or of one file."""
    try:
        files = [path] if path.is_file() else sorted(file for file in path.iterdir() if file.suffix in _SUFFIXES)
        if not files:
            raise NamespaceError("weights", f"no weights in {path}; name them with `weights`")
        whole = sum(file.stat().st_size for file in files) <= _WHOLE_NBYTES
        digest = hashlib.sha256(b"whole" if whole else b"sampled")
        for file in files:
            size = file.stat().st_size
            head = f"{file.name if path.is_dir() else ''}\0{size}\0".encode()
            digest.update(len(head).to_bytes(4, "little") + head)
            _read(file, [(0, size)] if whole else _samples(size), digest)
    except OSError as error:
        raise NamespaceError("weights", f"cannot be read: {error}") from error
    return f"sha256:{digest.hexdigest()}"


def _read(file: Path, ranges: list[tuple[int, int]], digest: Any) -> None:
    with file.open("rb") as opened:
        for start, stop in ranges:
            opened.seek(start)
            while start < stop and (data := opened.read(min(_STEP_NBYTES, stop - start))):
                digest.update(data)
                start += len(data)


def _samples(size: int) -> list[tuple[int, int]]:
    """Ranges of a file: its first mebibyte, which holds the index of a safetensors file, and samples to its end."""
    last = max(size - _SAMPLE_NBYTES, 0)
    starts = [last * index // (_SAMPLES - 1) for index in range(_SAMPLES)]
    return [(0, min(size, 1 << 20)), *((start, min(size, start + _SAMPLE_NBYTES)) for start in starts)]


def _snapshot(name: str, revision: str | None, folder: str | None) -> str:
    """The commit of a model that was loaded from the Hugging Face hub's cache."""
    try:
        from huggingface_hub import snapshot_download

        found = snapshot_download(
            name, revision=revision, cache_dir=folder, local_files_only=True, allow_patterns=["config.json"]
        )
    except Exception as error:  # whatever this library raises: it is not there
        raise NamespaceError("weights", f"no local snapshot of {name}; name the weights with `weights`") from error
    return f"commit:{Path(found).name}"
