"""CPU-seconds of starting: `lmc --help`, and importing the package.

Each figure is the CPU time, user and system, of a process of its own from start to exit, byte code compiled before.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from harness.measure import Options, Timings, paired
from harness.peer import Missing, peer_environment, peer_venv
from harness.report import Must, Row

HELP = "import sys; sys.argv = ['lmc', '--help']; from lmcache_core.cli import main; main()"
EVERY_NAME = "import lmcache_core; [getattr(lmcache_core, name) for name in lmcache_core.__all__]"


class Failed(Exception):
    """A command that is to be timed did not succeed."""


def rows(options: Options) -> Iterator[Row]:
    ours = [sys.executable, "-c"]
    python = peer_venv() / "bin" / "python"
    command = Path(python).with_name("lmcache")

    def run_ours() -> Timings:
        return {
            "help": cpu_seconds([*ours, HELP]),
            "import": cpu_seconds([*ours, "import lmcache_core"]),
            "names": cpu_seconds([*ours, EVERY_NAME]),
        }

    def run_limit() -> Timings:
        numpy = cpu_seconds([*ours, "import numpy"])
        return {"help": cpu_seconds([*ours, "import click"]), "import": numpy, "names": numpy}

    def run_peer() -> Timings:
        environment = peer_environment()
        loaded = cpu_seconds([str(python), "-c", "import lmcache"], environment)
        return {"help": cpu_seconds([str(command), "--help"], environment), "import": loaded, "names": loaded}

    peer = run_peer if command.exists() else Missing(f"no peer in {peer_venv()}")
    measured = paired(options, {"ours": run_ours, "limit": run_limit, "peer": peer})
    loaded = imported_by(HELP, ("numpy", "torch", "rich", "yaml"))
    yield measured.row(
        "startup", "lmc --help", "CPU-s", "help", float, must=Must(at_most=0.0 if "numpy" in loaded else 0.15),
        note=f"limit: `import click`; imports {', '.join(loaded) or 'neither numpy, torch, rich nor yaml'}",
    )  # fmt: skip
    yield measured.row(
        "startup", "import lmcache_core", "CPU-s", "import", float, must=Must(ratio_limit=1 / 1.3),
        note="limit: `import numpy`",
    )  # fmt: skip
    yield measured.row("startup", "every public name", "CPU-s", "names", float, note="limit: `import numpy`")


def cpu_seconds(command: Sequence[str], environment: Mapping[str, str] | None = None) -> float:
    """User and system time of `command`, its children included; Failed unless it ends with 0."""
    with subprocess.Popen(
        command, env=environment, cwd="/", stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    ) as process:
        assert process.stderr is not None
        complaint = process.stderr.read()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise Failed(f"{list(command)} ended with {process.returncode}: {complaint.decode(errors='replace')[-300:]}")
    return usage.ru_utime + usage.ru_stime


def imported_by(code: str, modules: Sequence[str]) -> list[str]:
    """Which of `modules` are loaded when `code` has run."""
    watch = (
        "import sys\ntry:\n    exec(sys.argv.pop())\nexcept SystemExit:\n    pass\nprint(*sys.modules, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", watch, code], capture_output=True, text=True, cwd="/")
    loaded = done.stderr.split()
    return [module for module in modules if module in loaded]
