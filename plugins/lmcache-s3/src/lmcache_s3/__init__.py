"""S3 as a tier of LMCache Core: Amazon S3, and every server that speaks its protocol."""

from __future__ import annotations

from .backend import S3Backend
from .options import S3Options

__all__ = ["S3Backend", "S3Options"]
__version__ = "0.1.0"
