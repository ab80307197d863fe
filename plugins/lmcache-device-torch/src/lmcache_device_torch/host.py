"""What can be seen of a machine without touching its accelerators: files, variables, and which torch is installed."""

from __future__ import annotations

import ast
import importlib.machinery
import importlib.metadata
import importlib.util
import os
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

_ASSIGNMENT: Final = re.compile(r"^(\w+)\s*(?::[^=\n]+)?=\s*(.+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class TorchBuild:
    """What a torch was built for, read from its files; it is not imported."""

    version: str
    cuda: str | None
    hip: str | None
    knows_maca: bool
    """Its extension builder has MACA_HOME, as MetaX's has."""
    folder: Path

    @property
    def kind(self) -> str:
        """ "rocm", "maca", "cuda" or "cpu".  ROCm and MACA also call themselves "cuda" to whoever asks torch."""
        if self.hip:
            return "rocm"
        if "metax" in self.version.lower() or self.knows_maca:
            return "maca"
        return "cuda" if self.cuda else "cpu"

    @property
    def described(self) -> str:
        runtime = {
            "rocm": f"ROCm {self.hip}",
            "maca": f"MACA, CUDA {self.cuda} by its own account",
            "cuda": f"CUDA {self.cuda}",
            "cpu": "the CPU",
        }
        return f"torch {self.version}, built for {runtime[self.kind]}"


@dataclass(frozen=True, slots=True)
class Host:
    """A machine, by default this one.  A simulated one has its files below a folder."""

    root: Path = Path("/")
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    search: Sequence[str] | None = None
    """Where packages lie; None: where this Python finds them."""

    def path(self, name: str) -> Path:
        return self.root / name

    def nodes(self, pattern: str) -> list[Path]:
        """Files below the root whose whole path matches; the last part of `pattern` is a regular expression."""
        folder, _, last = pattern.rpartition("/")
        try:
            names = sorted(os.listdir(self.root / folder))
        except OSError:
            return []
        return [self.root / folder / name for name in names if re.fullmatch(last, name)]

    def text(self, name: str | Path) -> str:
        """The content of a file; nothing where it cannot be read."""
        try:
            return (self.root / name).read_text(errors="replace").strip()
        except OSError:
            return ""

    def may_use(self, node: Path) -> bool:
        return os.access(node, os.R_OK | os.W_OK)

    def tool(self, name: str) -> str | None:
        return shutil.which(name, path=self.environ.get("PATH", ""))

    def package(self, name: str) -> Path | None:
        """The folder of an installed package, which is not imported."""
        try:
            if self.search is None:
                spec = importlib.util.find_spec(name)
            else:
                spec = importlib.machinery.PathFinder.find_spec(name, self.search)
        except (ImportError, ValueError):
            return None
        return Path(spec.origin).parent if spec is not None and spec.origin else None

    def version(self, name: str) -> str:
        """Of an installed distribution, which is not imported."""
        where = sys.path if self.search is None else list(self.search)
        found = next(iter(importlib.metadata.distributions(name=name, path=where)), None)
        return found.version if found is not None else "none"

    def torch(self) -> TorchBuild | None:
        folder = self.package("torch")
        if folder is None:
            return None
        said = _literals(folder / "version.py")
        cuda, hip = said.get("cuda"), said.get("hip")
        builder = folder / "utils" / "cpp_extension.py"
        try:
            knows_maca = bool(cuda) and b"MACA_HOME" in builder.read_bytes()
        except OSError:
            knows_maca = False
        return TorchBuild(said.get("__version__") or "of unknown version", cuda, hip, knows_maca, folder)


def _literals(path: Path) -> dict[str, str | None]:
    """The plain assignments of a Python file."""
    try:
        text = path.read_text(errors="replace")
    except OSError:
        return {}
    found: dict[str, str | None] = {}
    for match in _ASSIGNMENT.finditer(text):
        try:
            value = ast.literal_eval(match[2])
        except (ValueError, SyntaxError):
            continue
        if value is None or isinstance(value, str):
            found[match[1]] = value
    return found
