"""What the engine tests share: a node's daemon, a configuration that names it, models made once."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", VLLM_NO_USAGE_STATS="1", DO_NOT_TRACK="1")
sys.dont_write_bytecode = False  # compiling what vLLM imports takes longer than importing it
with warnings.catch_warnings():  # what vLLM and torch import is theirs
    warnings.simplefilter("ignore")
    import vllm.v1.core.sched.async_scheduler  # noqa: F401

CHUNK_TOKENS = 64
START_TIMEOUT_S = 30.0


@contextmanager
def daemon(config: Path, socket: Path, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """`lmc serve`, from when it listens until its end."""
    with config.with_suffix(".log").open("ab") as log:
        command = [sys.executable, "-m", "lmcache_core.cli", "serve", "--config", str(config), *arguments]
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not socket.exists():
            assert process.poll() is None, config.with_suffix(".log").read_text()
            assert time.monotonic() < deadline, "the daemon does not listen"
            time.sleep(0.02)
        yield process
    finally:
        process.kill()
        process.wait()


def write_config(folder: Path, *, socket: Path | None, patience: str = "5s") -> Path:
    """A configuration with 1 GiB of host memory; `patience` with the daemon is for a machine that is busy."""
    path = folder / "lmcache.yaml"
    lines = [f"chunk_tokens: {CHUNK_TOKENS}", f"socket_timeout: {patience}"]
    lines += [f"socket: {socket}"] if socket is not None else []
    path.write_text("\n".join([*lines, "tiers:", "  - {name: host, backend: memory, capacity: 1GiB}", ""]))
    return path


@pytest.fixture(scope="session")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The configuration of a daemon that runs as long as the tests."""
    folder = tmp_path_factory.mktemp("node")
    config = write_config(folder, socket=folder / "s")
    with daemon(config, folder / "s"):
        yield config
