"""One plugin of each kind, written for plugin API 1.0 and never changed since."""
