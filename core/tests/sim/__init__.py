"""Deterministic simulation: core's real code under a scheduler and a clock of our own, with faults, from one seed.

`world` builds a cache by seed, `clients` use it, `checks` say what must hold; `python -m sim SEED` replays a failure.
"""
