"""Install the peer, LMCache 0.5.6, in an environment of its own: `python setup.py FOLDER`.

Its declared dependencies include CUDA packages that a machine without a GPU cannot use, so it goes in alone, followed
by what its CPU paths import.
"""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path
from typing import Final

PEER: Final = "lmcache==0.5.6"
TORCH: Final = "torch==2.13.0"
IMPORTED: Final = [
    "msgspec",
    "pyzmq",
    "pyyaml",
    "psutil",
    "sortedcontainers",
    "prometheus_client",
    "blake3",
    "aiofile",
    "aiofiles",
    "numpy==2.2.6",
    "safetensors",
    "redis",
    "fastapi",
    "uvicorn",
    "httptools",
    "httpx",
    "aiohttp",
    "cachetools",
    "py-cpuinfo",
    "opentelemetry-api",
    "opentelemetry-sdk",
    "opentelemetry-exporter-prometheus",
    "grpcio",
    "protobuf",
    "nvtx",
    "numba",
    "requests",
    "transformers",
    "cryptography",
]


def install(folder: Path) -> None:
    """Create `folder` and install into it; what is there already is kept."""
    venv.create(folder, with_pip=True)
    pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    for arguments in ([TORCH], ["--no-deps", PEER], IMPORTED):
        print("pip install", *arguments, file=sys.stderr, flush=True)
        subprocess.run([*pip, *arguments], check=True)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(f"usage: {sys.argv[0]} FOLDER")
    install(Path(sys.argv[1]))
