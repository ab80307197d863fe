"""Backends that come with core."""
