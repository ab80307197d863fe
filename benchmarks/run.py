"""Run a benchmark: `python benchmarks/run.py NAME [--json] [--quick]`; `--list` names them."""

from __future__ import annotations

import argparse
import importlib
import logging
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from harness.measure import Options, load_average
from harness.peer import Peer, find_peer, install_peer
from harness.report import Row, print_table, to_json
from harness.vllm import install_vllm

FOLDER: Final = Path(__file__).resolve().parent
ROUNDS: Final = 9
QUICK_ROUNDS: Final = 3
SETUPS: Final = {"peer-setup": install_peer, "vllm-setup": install_vllm}


def names() -> list[str]:
    """The benchmarks there are: one module each, found by its file name."""
    return sorted(path.stem.removeprefix("bench_").replace("_", "-") for path in FOLDER.glob("bench_*.py"))


def module(name: str) -> Any:
    """The module of one benchmark."""
    return importlib.import_module(f"bench_{name.replace('-', '_')}")


def rows(name: str, options: Options) -> Iterator[Row]:
    """The rows of one benchmark, as they are measured."""
    yield from module(name).rows(options)


def main() -> int:
    known = names()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", nargs="*", metavar="NAME", help=f"{', '.join(known)}; or {', '.join(SETUPS)}")
    parser.add_argument("--json", action="store_true", help="one JSON line per row instead of a table")
    parser.add_argument("--list", action="store_true", help="name the benchmarks")
    parser.add_argument("--quick", action="store_true", help="few rounds of small sizes, to see that it works")
    parser.add_argument("--rounds", type=int, help=f"paired rounds, {ROUNDS} by default")
    parser.add_argument("--out", type=Path, help="folder for the plots and reports of benchmarks that have some")
    parser.add_argument("--dir", type=Path, help="folder on the file system to measure (default: the temporary one)")
    arguments = parser.parse_args()
    if arguments.list:
        for name in known:
            summary = (module(name).__doc__ or "").partition("\n")[0]
            print(f"{name:14} {summary}")
        return 0
    if len(arguments.name) == 1 and (setup := SETUPS.get(arguments.name[0])):
        return setup()
    unknown = [name for name in arguments.name if name not in known]
    if unknown or not arguments.name:
        parser.error(f"{'no benchmark ' + unknown[0] if unknown else 'name a benchmark'}: there are {', '.join(known)}")
    # What a benchmark provokes on purpose, such as a full cache, would be logged between its rows.
    logging.basicConfig(level=logging.ERROR)
    print(f"load average {load_average():.2f}", file=sys.stderr)
    peer = find_peer()
    try:
        for name in arguments.name:
            with tempfile.TemporaryDirectory(prefix="lmcache-bench-", dir=arguments.dir) as directory:
                options = Options(
                    rounds=arguments.rounds or (QUICK_ROUNDS if arguments.quick else ROUNDS),
                    quick=arguments.quick,
                    directory=Path(directory),
                    peer=peer,
                    out=arguments.out,
                )
                if arguments.json:
                    for row in rows(name, options):
                        print(to_json(row), flush=True)
                else:
                    print(f"{name}:")
                    print_table(rows(name, options), sys.stdout)
    finally:
        if isinstance(peer, Peer):
            peer.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
