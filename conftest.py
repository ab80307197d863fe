"""What holds for every test of this repository: no silent skip in CI, nothing left running or open behind a test."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

CANNOT_RUN = "cannot run here: "
"""How the reason of a skip begins when the machine lacks what the test needs (a GPU, O_DIRECT) and cannot get it."""
DOES_NOT_APPLY = "does not apply: "
"""How it begins for a law of the conformance kit that says nothing about the plugin."""

LEFTOVER_TIMEOUT_S = 15.0
INSTALLED = (sys.prefix, str(Path(__file__).parent))
"""Where libraries keep fonts and the like open; the checkout itself may lie in the temporary folder."""
SHARED_THREADS = frozenset({"tqdm_monitor"})
"""Threads that a library starts once per process and never ends."""


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "keeps_running: the test leaves threads or descriptors behind on purpose")
    if os.environ.get("CI"):
        _same_examples_every_run()


def _same_examples_every_run() -> None:
    try:
        from hypothesis import settings
    except ImportError:
        return
    settings.register_profile("ci", derandomize=True, deadline=None, print_blob=True)
    settings.load_profile("ci")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """In CI a test that could have run and was skipped has failed."""
    report = yield
    if report.skipped and not hasattr(report, "wasxfail"):
        _, _, reason = report.longrepr
        _forbid_in_ci(report, reason)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Iterator[None]:
    """The same for whole modules (`importorskip`, `allow_module_level`)."""
    report = yield
    if report.skipped:
        _forbid_in_ci(report, str(report.longrepr[-1]))
    return report


def _forbid_in_ci(report: pytest.TestReport | pytest.CollectReport, reason: str) -> None:
    reason = reason.removeprefix("Skipped: ")
    if os.environ.get("CI") and not reason.startswith((CANNOT_RUN, DOES_NOT_APPLY)):
        report.outcome = "failed"
        report.longrepr = f"skipped in CI: {reason!r} does not begin with {CANNOT_RUN!r}"


@pytest.fixture(autouse=True)
def _nothing_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails a test that leaves a thread, or an open memfd, socket, pipe or temporary file."""
    threads, files = _threads(), _open_files()
    yield
    if request.node.get_closest_marker("keeps_running"):
        return
    deadline = time.monotonic() + LEFTOVER_TIMEOUT_S
    while (left := [*(_threads() - threads), *(_open_files() - files)]) and time.monotonic() < deadline:
        time.sleep(0.01)  # threads may be on their way out: this waits for a condition, not for a time
    assert not left, f"left behind: {left}"


def _threads() -> set[str]:
    return {f"thread {t.name} ({t.ident})" for t in threading.enumerate() if t.name not in SHARED_THREADS}


def _open_files() -> set[str]:
    """Descriptors as "number target", of the kinds that tests of a cache can leak."""
    temporary = (os.environ.get("TMPDIR", "/tmp"), "/dev/shm", "/memfd:", "socket:", "pipe:")
    opened = set()
    for fd in Path("/proc/self/fd").iterdir() if Path("/proc/self/fd").exists() else ():
        try:
            target = os.readlink(fd)
        except OSError:
            continue  # closed meanwhile, such as the descriptor of this listing
        if target.startswith(temporary) and not target.startswith(INSTALLED):
            opened.add(f"fd {fd.name} {target}")
    return opened
