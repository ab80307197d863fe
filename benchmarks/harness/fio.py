"""The limit of a file system as fio measures it: new files written and read back, O_DIRECT, several jobs."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from .peer import Missing

JOBS: Final = 4
TIMEOUT_S: Final = 300.0
HUGE_BUFFERS: Final = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
"""Puts fio's buffers into huge pages where the machine grants them: direct I/O to 4 KiB pages is much slower."""


class FioFailed(Exception):
    """fio ran and did not do what it was asked."""


def find_fio() -> Missing | None:
    """None when fio is there, else the reason why it is not."""
    return None if shutil.which("fio") else Missing("fio is not installed")


def fio_round(directory: Path, *, file_nbytes: int, files: int, huge: bool) -> dict[str, float]:
    """Seconds to write `files` new files of `file_nbytes` and to read them again, spread over the jobs.

    Each file goes in one call, as ours do, from and into buffers in 4 KiB or `huge` pages that are touched before.
    fio's own clock counts: opening and creating included, starting fio not.  The files are removed afterwards.
    """
    if files % JOBS:
        raise ValueError(f"{files} files cannot be shared by {JOBS} jobs")
    common = [
        "--name=limit",
        f"--directory={directory}",
        f"--numjobs={JOBS}",
        f"--nrfiles={files // JOBS}",
        f"--filesize={file_nbytes}",
        f"--bs={file_nbytes}",
        "--ioengine=psync",
        "--direct=1",
        "--thread",
        "--openfiles=1",
        "--file_service_type=sequential",
        "--group_reporting",
        "--output-format=json",
    ]
    wanted = files * file_nbytes
    # fio touches its buffers before the clock starts only in jobs that may write: hence a mix of 100 % reads.
    jobs = {
        "write": ["--rw=write", "--create_on_open=1", "--fallocate=none"],
        "read": ["--rw=rw", "--rwmixread=100"],
    }
    environment = os.environ | (HUGE_BUFFERS if huge else {})
    try:
        return {what: parse(_fio([*common, *job], environment), what, wanted) for what, job in jobs.items()}
    finally:
        for path in directory.glob("limit.*"):
            path.unlink()


def parse(output: str, direction: str, wanted_nbytes: int) -> float:
    """Seconds that fio's JSON report gives for `direction`; FioFailed unless all bytes were done without an error."""
    try:
        report: dict[str, Any] = json.loads(output[output.index("{") :])
        job = report["jobs"][0]
        done, rate, error = job[direction]["io_bytes"], job[direction]["bw_bytes"], job["error"]
    except (ValueError, KeyError, IndexError) as problem:
        raise FioFailed(f"fio's report cannot be read: {output[:200]!r}") from problem
    if error or done != wanted_nbytes:
        raise FioFailed(f"fio {direction}: error {error}, {done} of {wanted_nbytes} bytes")
    return float(done / rate)


def _fio(arguments: list[str], environment: Mapping[str, str]) -> str:
    command = ["fio", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, env=environment)
    if done.returncode:
        raise FioFailed(f"fio ended with {done.returncode}: {done.stderr.strip()[-300:]}")
    return done.stdout
