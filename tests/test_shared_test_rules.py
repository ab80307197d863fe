"""The rules that the root conftest holds over every test, each on a test that breaks it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def run(folder: Path, test: str, *, ci: bool) -> str:
    """The output of pytest over one test module under our conftest and settings."""
    for name in ("conftest.py", "pyproject.toml"):
        shutil.copy(ROOT / name, folder)
    (folder / "test_it.py").write_text(test)
    environment = {name: value for name, value in os.environ.items() if name != "CI"} | ({"CI": "true"} if ci else {})
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "test_it.py"]
    ran = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=False)
    return ran.stdout


SKIPS = """
import pytest
def test_call(): pytest.skip('{0}')
@pytest.mark.skip(reason='{0}')
def test_mark(): pass
@pytest.mark.skipif(True, reason='{0}')
def test_condition(): pass
"""
SKIPPED_MODULE = "import pytest\npytest.skip('{0}', allow_module_level=True)"


def test_in_ci_a_skip_without_need_fails_with_its_reason(tmp_path: Path) -> None:
    output = run(tmp_path, SKIPS.format("no time"), ci=True)
    assert "1 failed, 2 errors" in output
    assert "skipped in CI: 'no time'" in run(tmp_path, SKIPPED_MODULE.format("no time"), ci=True)


def test_in_ci_a_missing_import_fails_the_module(tmp_path: Path) -> None:
    assert "1 error" in run(tmp_path, "import pytest\npytest.importorskip('no_such_module_x')", ci=True)


@pytest.mark.parametrize(
    ("reason", "ci"), [("no time", False), ("cannot run here: no GPU", True), ("does not apply: no listing", True)]
)
def test_by_hand_or_for_what_the_machine_lacks_a_skip_stays_one(tmp_path: Path, reason: str, ci: bool) -> None:
    assert "3 skipped" in run(tmp_path, SKIPS.format(reason), ci=ci)
    assert "1 skipped" in run(tmp_path, SKIPPED_MODULE.format(reason), ci=ci)


LEFT = """
import os, socket, threading
stop, kept = threading.Event(), []
def test_thread(): threading.Thread(target=stop.wait, name='left', daemon=True).start()
def test_memfd(): os.memfd_create('left')
def test_socket(): kept.append(socket.socket())
def test_file(tmp_path): os.open(tmp_path / 'left', os.O_CREAT)
"""


def test_what_a_test_leaves_behind_fails_it(tmp_path: Path) -> None:
    output = run(tmp_path, LEFT, ci=False)
    assert "4 errors" in output
    for left in ("left behind: ['thread left", "memfd:left", "socket:[", "/left'"):
        assert left in output


def test_what_ends_soon_is_not_left_behind_and_an_expected_failure_is_no_skip(tmp_path: Path) -> None:
    test = """
import pytest, threading
def test_timer(): threading.Timer(0.2, list).start()
@pytest.mark.xfail(reason='known')
def test_known(): assert False
"""
    output = run(tmp_path, test, ci=True)
    assert "1 passed, 1 xfailed" in output


def test_a_warning_fails_a_test(tmp_path: Path) -> None:
    assert "1 failed" in run(tmp_path, "import warnings\ndef test(): warnings.warn('old')", ci=False)
