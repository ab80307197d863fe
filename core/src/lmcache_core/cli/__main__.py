"""`python -m lmcache_core.cli` is `lmc`."""

from __future__ import annotations

from . import main

main(prog_name="lmc")
