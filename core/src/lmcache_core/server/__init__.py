"""The daemon: one pool per node, shared by every engine process on it."""
