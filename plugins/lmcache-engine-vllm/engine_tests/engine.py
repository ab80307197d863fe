"""vLLM's offline engine in a process of its own: started with chosen variables, asked, killed by handle.

Needs no vLLM itself: `python` is the one that has it.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Self

import processes

HERE: Final = Path(__file__).resolve().parent
PLUGIN: Final = HERE.parent
CONNECTOR: Final = "LMCacheCoreConnector"
MODULE: Final = "lmcache_engine_vllm"
START_TIMEOUT_S: Final = 240.0
ANSWER_TIMEOUT_S: Final = 300.0
END_TIMEOUT_S: Final = 60.0

ENVIRONMENT: Final = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "TORCHDYNAMO_DISABLE": "1",  # else the first request with logprobs compiles for half a minute
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # else the worker gets one core less than there are
}

Prompt = Mapping[str, Any]


class EngineFailed(Exception):
    """The engine answered with an error, ended, or did not answer in time; with the end of its log."""


def transfer_config(config: Path | str, *, failures: str = "recompute", **extra: Any) -> dict[str, Any]:
    """What `kv_transfer_config` has to be for an engine that uses our connector with that configuration file."""
    return {
        "kv_connector": CONNECTOR,
        "kv_connector_module_path": MODULE,
        "kv_role": "kv_both",
        "kv_load_failure_policy": failures,
        "kv_connector_extra_config": {"config": str(config), **extra},
    }


def environment(*, threads: int = 1, paths: Sequence[Path] = (), **variables: str) -> dict[str, str]:
    """Variables of an engine's processes: nothing from the network, our own sources first, `threads` for compute."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("LMCACHE", "VLLM"))}
    inherited.pop("PYTHONDONTWRITEBYTECODE", None)  # compiling what vLLM imports takes longer than all the rest
    sources = [str(PLUGIN / "src"), str(PLUGIN.parent.parent / "core" / "src"), *map(str, paths)]
    path = os.pathsep.join([*sources, *filter(None, [os.environ.get("PYTHONPATH")])])
    return inherited | ENVIRONMENT | {"OMP_NUM_THREADS": str(threads), "PYTHONPATH": path} | variables


def arguments_for(model: Path) -> dict[str, Any]:
    """Those of vllm.LLM for a small, eager engine without vLLM's own prefix cache."""
    return {
        "model": str(model),
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 4608,
        "block_size": 64,
        "kv_cache_memory_bytes": 128 << 20,
        "max_num_seqs": 8,
        "enable_prefix_caching": False,
        "seed": 0,
        "disable_log_stats": False,
    }


class Engine:
    """One engine.  `arguments` are those of vllm.LLM; by default small, eager, and without vLLM's own prefix cache."""

    def __init__(
        self,
        model: Path,
        log: Path,
        *,
        python: Path | str = sys.executable,
        variables: Mapping[str, str] | None = None,
        threads: int = 1,
        paths: Sequence[Path] = (),
        **arguments: Any,
    ) -> None:
        self.log = log
        began = time.monotonic()
        with log.open("ab") as out:
            self._process = subprocess.Popen(
                [str(python), str(HERE / "engine_process.py")],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=out,
                env=environment(threads=threads, paths=paths, **(variables or {})),
                start_new_session=True,
            )
        try:
            self._send(arguments_for(model) | arguments)
            self._receive(START_TIMEOUT_S)
        except BaseException:
            self.kill()
            raise
        self.ready_s = time.monotonic() - began

    @property
    def pid(self) -> int:
        return self._process.pid

    def reopen(self, model: Path, **arguments: Any) -> None:
        """End it and start another one in the same process; only for an engine of one process."""
        self.ask("reopen", timeout_s=START_TIMEOUT_S, **(arguments_for(model) | arguments))

    def generate(self, prompts: Sequence[Prompt], **params: Any) -> list[dict[str, Any]]:
        """One answer per prompt: tokens, finish, cached_tokens, ttft_s, logprobs if `logprobs=1`."""
        answer: list[dict[str, Any]] = self.ask("generate", prompts=list(prompts), **params)
        return answer

    def one(self, tokens: Sequence[int], **params: Any) -> dict[str, Any]:
        """The answer to one prompt of token ids."""
        (answer,) = self.generate([{"prompt_token_ids": list(tokens)}], **params)
        return answer

    def call(self, name: str, **arguments: Any) -> Any:
        """A method of vllm.LLM in the engine's process."""
        return self.ask("call", name=name, **arguments)

    def ask(self, verb: str, *, timeout_s: float = ANSWER_TIMEOUT_S, **request: Any) -> Any:
        self._send({"verb": verb, **request})
        return self._receive(timeout_s)

    def start(self, verb: str, **request: Any) -> None:
        """Ask without waiting: `finish` has the answer, or the engine is killed meanwhile."""
        self._send({"verb": verb, **request})

    def finish(self, *, timeout_s: float = ANSWER_TIMEOUT_S) -> Any:
        return self._receive(timeout_s)

    def cpu_s(self) -> float:
        """CPU-seconds of all its processes so far."""
        return processes.cpu_s(self.pid)

    def pause(self) -> None:
        """From here on its processes take no CPU, not even what they take while they wait for work."""
        os.killpg(self._process.pid, signal.SIGSTOP)  # the group that it leads: ours alone

    def resume(self) -> None:
        os.killpg(self._process.pid, signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL for all its processes at once, and wait for the first."""
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self._reap()

    def close(self) -> None:
        """End it in good order; by force where that takes too long.  Twice is fine."""
        if self._process.poll() is None:
            try:
                self.resume()
                self.ask("stop", timeout_s=END_TIMEOUT_S)
                assert self._process.stdin is not None
                self._process.stdin.close()
                self._process.wait(END_TIMEOUT_S)
            except (EngineFailed, OSError, subprocess.TimeoutExpired):
                pass
        self.kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _reap(self) -> None:
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            try:
                stream.close()
            except OSError:  # what it never read
                pass

    def _send(self, content: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(content).encode() + b"\n")
            self._process.stdin.flush()
        except OSError as error:
            raise EngineFailed(f"the engine has ended: {self._log_end()}") from error

    def _receive(self, timeout_s: float) -> Any:
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        deadline = time.monotonic() + timeout_s
        line = b""
        while not line.endswith(b"\n"):
            ready, _, _ = select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise EngineFailed(f"no answer in {timeout_s:.0f} s: {self._log_end()}")
            part = os.read(descriptor, 1 << 16)
            if not part:
                raise EngineFailed(f"the engine has ended: {self._log_end()}")
            line += part
        content: dict[str, Any] = json.loads(line)
        if "error" in content:
            raise EngineFailed(f"{content['error']}\n{self._log_end()}")
        return content["answer"]

    def _log_end(self) -> str:
        return self.log.read_text(errors="replace")[-3000:]
