"""LMCache Core on any filesystem that fsspec opens."""

from __future__ import annotations

from .backend import FsspecBackend
from .options import FsspecOptions

__all__ = ["FsspecBackend", "FsspecOptions"]
