"""The engine's side of the daemon."""
