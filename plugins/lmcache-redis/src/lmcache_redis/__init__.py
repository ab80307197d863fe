"""Records of LMCache Core in Redis and Valkey: one server, Sentinel, or Cluster."""

from __future__ import annotations

from .backend import RedisBackend, ValkeyBackend
from .options import RedisOptions, ValkeyOptions

__all__ = ["RedisBackend", "RedisOptions", "ValkeyBackend", "ValkeyOptions"]
