"""The storage backend that comes with core."""
