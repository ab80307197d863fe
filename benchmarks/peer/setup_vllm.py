"""Install vLLM for CPUs, and the peer beside it: `python setup_vllm.py VLLM_FOLDER PEER_FOLDER`.

The first environment is that of the engine tests: vLLM, and nothing of the peer.  The second sees the packages of the
first and adds LMCache 0.5.6 with what its connector for vLLM imports.
"""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
SUITE: Final = ROOT / "plugins" / "lmcache-engine-vllm" / "engine_tests"
PEER: Final = [
    "lmcache==0.5.6",
    "aiofile==3.12.3",
    "aiofiles==25.1.0",
    "awscrt",
    "caio==0.12.10",
    "llvmlite==0.50.0",
    "numba==0.68.1",
    "nvtx==0.2.17",
    "opentelemetry-exporter-prometheus==0.66b2",
    "redis==8.1.0",
    "sortedcontainers==2.4.0",
]


def install_vllm(folder: Path) -> None:
    """vLLM, what it imports, and core."""
    venv.create(folder, with_pip=True)
    python = str(folder / "bin" / "python")
    _pip(python, "--no-deps", "--no-compile", "-r", str(SUITE / "requirements.txt"))
    _pip(python, str(ROOT / "core"))
    subprocess.run([python, str(SUITE / "prepare.py")], check=True)


def install_peer(folder: Path, vllm: Path) -> None:
    """The peer in an environment of its own on top of `vllm`."""
    venv.create(folder, with_pip=True)
    (below,) = vllm.glob("lib/python3*/site-packages")
    (own,) = folder.glob("lib/python3*/site-packages")
    (own / "vllm-below.pth").write_text(f"{below}\n")
    _pip(str(folder / "bin" / "python"), "--no-deps", *PEER)


def _pip(python: str, *arguments: str) -> None:
    print("pip install", *arguments, file=sys.stderr, flush=True)
    command = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*command, *arguments], check=True)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(f"usage: {sys.argv[0]} VLLM_FOLDER PEER_FOLDER")
    vllm, peer = map(Path, sys.argv[1:])
    if not (vllm / "bin" / "python").exists():
        install_vllm(vllm)
    install_peer(peer, vllm)
