"""The device that comes with core."""
