"""Records of LMCache Core in Mooncake Store: the memory of many nodes as one, over RDMA or TCP."""

from __future__ import annotations

from .backend import MooncakeBackend
from .options import MooncakeOptions

__all__ = ["MooncakeBackend", "MooncakeOptions"]
