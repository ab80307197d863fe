"""`python -m lmcache_engine_transformers.demo`: plays the scenes, shows the table, saves the plot."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

import torch

from lmcache_core import CacheError

from . import weights
from .scenes import obey, play

_CONFIG = """\
chunk_tokens: 256
device: cpu
tiers:
  - name: host
    backend: memory
    capacity: 1GiB
  - name: disk
    backend: disk
    capacity: 4GiB
    options: {{path: {path}}}
"""
_DAEMON_CONFIG = """\
chunk_tokens: 256
device: cpu
socket: {path}
"""


def main(arguments: list[str] | None = None) -> int:
    options = _parse(arguments)
    if options.obey:
        obey(options.obey)
        return 0
    try:
        return _demo(options)
    except (CacheError, weights.ModelMissing) as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1


def _demo(options: argparse.Namespace) -> int:
    from rich.console import Console

    from . import screen

    console = Console() if sys.stdout.isatty() else Console(width=110)  # a log has no width of its own
    with ExitStack() as stack:
        config = options.config or _own_config(options.cache_dir, options.socket, stack)
        with console.status("preparing the model (the first time takes about 20 s)"):
            folder = weights.prepared_model(options.work_dir or weights.default_work_dir())
            model, tokenizer = weights.load(folder)
        screen.show_start(console, weights.NAME, torch.get_num_threads(), config)
        with screen.Bars(console) as bars:
            outcome = play(model, tokenizer, folder, config, bars)
    screen.show_outcome(console, outcome)
    machine = screen.machine(torch.get_num_threads())
    screen.save_plot(outcome, options.plot, f"{weights.NAME}, fp32, {machine}")
    console.print(f"Plot: {options.plot}. Measured on {machine}.", highlight=False, soft_wrap=True)
    if options.json:
        print(json.dumps(outcome.figures), flush=True)
    return 0 if outcome.agreement.tokens_equal and all(row.hit_tokens for row in outcome.rows[1:]) else 1


def _own_config(cache_dir: Path | None, socket: str | None, stack: ExitStack) -> Path:
    """A host tier and a disk tier, or a daemon's socket; in a temporary folder unless one is given."""
    if cache_dir is None:
        cache_dir = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lmcache-demo-")))
    cache_dir.mkdir(parents=True, exist_ok=True)
    config = cache_dir.resolve() / "lmcache.yaml"
    if socket is not None:
        config.write_text(_DAEMON_CONFIG.format(path=json.dumps(socket)))
    else:
        config.write_text(_CONFIG.format(path=json.dumps(str(config.parent / "store"))))
    return config


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m lmcache_engine_transformers.demo", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print the figures as one JSON object, as the last line")
    parser.add_argument("--config", type=Path, help="a configuration of your own, with a tier that outlives a process")
    parser.add_argument("--socket", help="use the daemon (`lmc serve`) at this socket, with all who use it; or `auto`")
    parser.add_argument("--cache-dir", type=Path, help="where the demo's own configuration keeps its records")
    parser.add_argument("--work-dir", type=Path, help="where the model is kept for the next run")
    parser.add_argument("--plot", type=Path, default=Path("out/demo.png"), help="the picture (default: %(default)s)")
    parser.add_argument("--obey", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
