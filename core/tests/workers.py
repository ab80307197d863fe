"""Workers forked from a process that has imported everything already, to be watched, waited for and killed."""

from __future__ import annotations

import mmap
import os
import signal
import struct
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

MAX_WORKERS = 4096


class Proof:
    """Where a worker says how far it is, readable by others also when it has been killed."""

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory

    def say(self, proven: int, operations: int) -> None:
        struct.pack_into("<QQ", self._memory, 0, proven, operations)

    def read(self) -> tuple[int, int]:
        proven, operations = struct.unpack_from("<QQ", self._memory, 0)
        return proven, operations


def serve_forks(work: Callable[[list[str], Proof], Any]) -> None:
    """The program that forks: "fork WORDS", "wait PID" and "totals" on standard input, one line of numbers for each.

    A worker is `work(words, proof)`; it exits with 0 if that returns, else with 1 and a traceback.
    """
    shared = memoryview(mmap.mmap(-1, 16 * MAX_WORKERS))
    proofs: list[Proof] = []
    for line in sys.stdin:
        command, *words = line.split()
        if command == "fork":
            proofs.append(Proof(shared[16 * len(proofs) :]))
            pid = os.fork()
            if pid == 0:
                status = 1
                try:
                    work(words, proofs[-1])
                    status = 0
                except BaseException:
                    sys.stderr.write(f"worker {' '.join(words)}:\n")
                    traceback.print_exc()
                finally:
                    sys.stderr.flush()
                    os._exit(status)
            print(pid, flush=True)
        elif command == "wait":
            _, status = os.waitpid(int(words[0]), 0)
            print(os.waitstatus_to_exitcode(status), flush=True)
        else:
            print(*[sum(each) for each in zip((0, 0), *(proof.read() for proof in proofs), strict=True)], flush=True)


class Workers:
    """The other end of `serve_forks` in the program `script`, which lies beside this file."""

    def __init__(self, script: str) -> None:
        command = [sys.executable, str(Path(__file__).with_name(script))]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.running: list[int] = []

    def ask(self, *words: object) -> list[int]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(*words, file=self.process.stdin, flush=True)
        return [int(word) for word in self.process.stdout.readline().split()]

    def fork(self, *words: object) -> int:
        (pid,) = self.ask("fork", *words)
        self.running.append(pid)
        return pid

    def wait(self, pid: int) -> int:
        self.running.remove(pid)
        return self.ask("wait", pid)[0]

    def kill(self, pid: int) -> None:
        os.kill(pid, signal.SIGKILL)
        assert self.wait(pid) == -signal.SIGKILL, "the worker had ended by itself, with what it says above"

    def totals(self) -> tuple[int, int]:
        """What was proven right, and operations, of all workers."""
        proven, operations = self.ask("totals")
        return proven, operations

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *exc: object) -> None:
        for pid in list(self.running):
            os.kill(pid, signal.SIGKILL)
            self.wait(pid)
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()
        self.process.wait()
