"""On a machine with an accelerator: the laws, `lmc bench device`, the benchmark `device`; all in one dated file.

`python benchmarks/on_device.py cuda`, with lmcache-core and the device's package installed, writes
`benchmarks/results/device-cuda-DATE.json` and exits with 1 if a law is broken or a promise missed.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

FOLDER: Final = Path(__file__).resolve().parent
TIMEOUT_S: Final = 540
PACKAGES: Final = ("lmcache-core", "lmcache-device-torch", "lmcache-device-{name}", "torch", "triton", "numpy")
TOOLS: Final = {
    "cuda": ["nvidia-smi", "--query-gpu=name,driver_version,pcie.link.gen.max,pcie.link.width.max", "--format=csv"],
    "rocm": ["rocm-smi", "--showproductname", "--showdriverversion"],
    "maca": ["mx-smi"],
    "ascend": ["npu-smi", "info"],
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", help="the device plugin: cuda, rocm, maca, ascend; cpu tries the script itself")
    parser.add_argument("--out", type=Path, default=FOLDER / "results", help="folder of the file")
    parser.add_argument("--quick", action="store_true", help="small sizes, to see that it works")
    given = parser.parse_args()
    lmc = [sys.executable, "-m", "lmcache_core.cli"]
    size = ["--chunks", "1", "--rounds", "1"] if given.quick else []
    small = ["--quick", "--rounds", "1"] if given.quick else []
    steps = {
        "laws": [*lmc, "conform", f"device:{given.name}", "--json"],
        "paths": [*lmc, "bench", "device", given.name, "--json", *size, *(["--no-keep"] if given.quick else [])],
        "benchmark": [sys.executable, str(FOLDER / "run.py"), "device", "--json", *small],
    }
    found: dict[str, Any] = {
        "device": given.name,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "quick": given.quick,
        "machine": f"{platform.system()} {platform.release()} {platform.machine()}, Python {platform.python_version()}",
        "versions": {(full := name.format(name=given.name)): _version(full) for name in PACKAGES},
        "tool": _tool(TOOLS.get(given.name, [])),
    }
    good = True
    for step, command in steps.items():
        print(f"{step}: {' '.join(command[1:])}", file=sys.stderr, flush=True)
        found[step], fine = _run(command)
        good = good and fine
    missed = [row["row"] for row in found["benchmark"] if isinstance(row, dict) and row.get("reached") is False]
    found["missed"] = missed
    given.out.mkdir(parents=True, exist_ok=True)
    path = given.out / f"device-{given.name}-{found['date'][:10]}{'-quick' if given.quick else ''}.json"
    path.write_text(json.dumps(found, indent=1) + "\n")
    print(f"{path}: {'good' if good and not missed else f'NOT GOOD, missed: {missed}'}")
    return 0 if good and (given.quick or not missed) else 1


def _run(command: list[str]) -> tuple[Any, bool]:
    """What it printed, as one JSON value or one for each line; and whether it went well."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return [f"not done after {TIMEOUT_S} s"], False
    sys.stderr.write(done.stderr[-2000:])
    try:
        return json.loads(done.stdout), done.returncode == 0
    except json.JSONDecodeError:
        pass
    try:
        return [json.loads(line) for line in done.stdout.splitlines()], done.returncode == 0
    except json.JSONDecodeError:
        return [done.stdout[-2000:], done.stderr[-2000:]], False


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _tool(command: list[str]) -> list[str]:
    """What the vendor's management tool says, as it says it."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False) if command else None
    except (OSError, subprocess.TimeoutExpired) as error:
        return [repr(error)]
    return done.stdout.splitlines()[:40] if done is not None else []


if __name__ == "__main__":
    sys.exit(main())
