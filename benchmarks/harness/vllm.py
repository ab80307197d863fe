"""vLLM engines to measure: with us, with nothing, with its own caches, and with the peer, each in its own processes."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from .measure import Options
from .peer import BENCHMARKS, ENVIRONMENT, Missing

SUITE: Final = BENCHMARKS.parent / "plugins" / "lmcache-engine-vllm" / "engine_tests"
sys.path.insert(0, str(SUITE))

import processes  # noqa: E402
from engine import Engine, transfer_config  # noqa: E402

VLLM_VENV_VARIABLE: Final = "LMCACHE_VLLM_VENV"
PEER_VENV_VARIABLE: Final = "LMCACHE_VLLM_PEER_VENV"
START_TIMEOUT_S: Final = 120.0
MODEL_TIMEOUT_S: Final = 300.0
BLOCK_TOKENS: Final = 64
"""Of the engines, and the chunk of every cache: small, since what is not in a whole chunk is computed again."""
THREADS: Final = 2
SMOLLM2_TOKEN_NBYTES: Final = 30 * 3 * 64 * 2 * 2
"""KV of one token in bf16: 30 layers, 3 heads of 64, keys and values."""


@dataclass(frozen=True, slots=True)
class Vllm:
    """Where vLLM is, and the peer on top of it."""

    python: Path
    peer_python: Path | Missing


def venvs() -> tuple[Path, Path]:
    """Where vLLM is (that of the engine tests), and the peer with it."""
    nox = BENCHMARKS.parent / ".nox"
    return (
        Path(os.environ.get(VLLM_VENV_VARIABLE) or nox / "engines-vllm"),
        Path(os.environ.get(PEER_VENV_VARIABLE) or nox / "vllm-peer"),
    )


def find_vllm() -> Vllm | Missing:
    vllm, peer = (folder / "bin" / "python" for folder in venvs())
    if not vllm.exists():
        return Missing(f"no vLLM in {vllm.parent.parent}: run `python benchmarks/run.py vllm-setup`")
    return Vllm(vllm, peer if peer.exists() else Missing("no peer with vLLM: `python benchmarks/run.py vllm-setup`"))


def install_vllm() -> int:
    """Make both environments; the exit status of the script that does it."""
    return subprocess.call([sys.executable, str(BENCHMARKS / "peer" / "setup_vllm.py"), *map(str, venvs())])


def model(vllm: Vllm, name: str) -> Path:
    """A model of the engine tests, made now where it is not there yet."""
    made = vllm.python.parent.parent / "lmcache-models"
    folder = made if name == "smollm2" else made / name
    command = [str(vllm.python), str(SUITE / "models.py"), name, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=MODEL_TIMEOUT_S)
    if done.returncode:
        raise RuntimeError(f"{name} could not be made: {done.stderr[-500:]}")
    return Path(done.stdout.split()[-1])


def ours(socket_path: Path, folder: Path, **extra: Any) -> dict[str, Any]:
    """The connector's configuration for an engine that uses the daemon at that socket."""
    config = folder / "engine.yaml"
    config.write_text(f"chunk_tokens: {BLOCK_TOKENS}\nsocket: {socket_path}\n")
    return transfer_config(config, **extra)


def offloading(nbytes: int) -> dict[str, Any]:
    """vLLM's offloading to memory, with the copy that it lacks on CPUs."""
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": "CopyingSpec",
            "spec_module_path": "vllm_offload",
            "cpu_bytes_to_use": nbytes,
            "block_size": BLOCK_TOKENS,
        },
    }


def peers(port: int) -> dict[str, Any]:
    """The peer's connector for a server of its own."""
    return {
        "kv_connector": "LMCacheMPConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": port},
    }


def start(
    options: Options,
    vllm: Vllm,
    model: Path,
    log: Path,
    *,
    peer: bool = False,
    variables: Mapping[str, str] | None = None,
    **arguments: Any,
) -> Engine:
    """An engine as all sides of a comparison have it; `arguments` are those of vllm.LLM.

    When it only has to be seen to work it gets one thread, and one process where it can: several starve each other on a
    busy machine.
    """
    python = vllm.peer_python if peer else vllm.python
    assert isinstance(python, Path)
    shared = {"dtype": "bfloat16", "block_size": BLOCK_TOKENS, "max_num_batched_tokens": 4608}
    chosen = dict(ENVIRONMENT) if peer else {}
    if options.quick and not peer:
        chosen["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    return Engine(
        model,
        log,
        python=python,
        variables=chosen | dict(variables or {}),
        threads=1 if options.quick else THREADS,
        paths=[BENCHMARKS / "peer"],
        **(shared | arguments),
    )


@contextlib.contextmanager
def peer_server(vllm: Vllm, folder: Path, gib: float) -> Iterator[tuple[int, int]]:
    """The peer's server, as its documentation starts it for engines on CPUs: (port, pid)."""
    assert isinstance(vllm.peer_python, Path)
    port, http_port = _free_port(), _free_port()
    command = [str(vllm.peer_python.with_name("lmcache")), "server", "--port", str(port), "--http-port", str(http_port)]
    command += ["--supported-transfer-mode", "engine_driven", "--shm-name", f"lmcache-bench-{os.getpid()}-{port}"]
    command += ["--chunk-size", str(BLOCK_TOKENS), "--l1-size-gb", str(gib), "--no-l1-use-lazy"]
    command += ["--eviction-policy", "LRU", "--disable-observability"]
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "LMCACHE"))}
    with (folder / "peer-server.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=inherited | ENVIRONMENT)
    try:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not _listens(port):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the peer's server: {(folder / 'peer-server.log').read_text()[-500:]}")
            time.sleep(0.1)
        yield port, process.pid
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        for left in Path("/dev/shm").glob(f"*lmcache-bench-{os.getpid()}-{port}*"):
            left.unlink()


def cpu_s(*pids: int) -> float:
    """CPU-seconds so far of the process trees below `pids`."""
    return sum(map(processes.cpu_s, pids))


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
