"""Fast file systems as a tier of LMCache Core: GPUDirect Storage, direct I/O, and mounts that may stop answering."""

from __future__ import annotations

from .backend import GdsBackend
from .options import GdsOptions

__all__ = ["GdsBackend", "GdsOptions"]
__version__ = "0.1.0"
