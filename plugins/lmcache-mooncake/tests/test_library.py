"""The library: which is installed, what it lacks, how long it waits, and what the doctor hears of it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from records import open_backend
from servers import running

from lmcache_core import ConfigError, Context, SupportsDiagnosis, SupportsRegistration
from lmcache_mooncake import MooncakeBackend, MooncakeOptions, library

HERE = Path(__file__).parent


class _Old:
    """A ReplicateConfig of a version that knew soft pins without a lifetime."""

    replica_num = 1
    with_soft_pin = False


class _Older:
    replica_num = 1


def test_versions_with_fewer_settings_are_used_as_far_as_they_go() -> None:
    pinned = MooncakeOptions(master="m:1", soft_pin=True)
    timed = MooncakeOptions(master="m:1", soft_pin=True, soft_pin_ttl_s=1.0)
    old, older = (type("library", (), {"ReplicateConfig": kind}) for kind in (_Old, _Older))
    assert library.replication(old, pinned, "").with_soft_pin
    assert library.replication(older, MooncakeOptions(master="m:1", replicas=3), "").replica_num == 3
    with pytest.raises(ConfigError, match="soft_pin_ttl"):
        library.replication(old, timed, "")
    with pytest.raises(ConfigError, match="soft_pin"):
        library.replication(older, pinned, "")


def _in_python(code: str, *block: str) -> str:
    blocked = f"import sys; [sys.modules.__setitem__(name, None) for name in {block!r}]\n"
    done = subprocess.run([sys.executable, "-c", blocked + code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


OPEN = """
from lmcache_core import ConfigError, Context
from lmcache_mooncake import MooncakeBackend, MooncakeOptions
assert "mooncake.store" not in sys.modules or sys.modules["mooncake.store"] is None
try:
    MooncakeBackend(MooncakeOptions(master="127.0.0.1:1"), Context())
except ConfigError as error:
    print(error)
"""


def test_without_the_library_the_package_imports_and_opening_names_what_to_install() -> None:
    said = _in_python(OPEN, "mooncake", "mooncake.store")
    assert all(name in said for name in library.VARIANTS)
    assert "pip install" in said


def test_a_library_that_cannot_be_loaded_says_what_it_needs(tmp_path: Path) -> None:
    (tmp_path / "mooncake").mkdir()
    (tmp_path / "mooncake" / "__init__.py").touch()
    broken = "raise ImportError('libibverbs.so.1: cannot open shared object file')"
    (tmp_path / "mooncake" / "store.py").write_text(broken)
    said = _in_python(f"sys.path.insert(0, {str(tmp_path)!r})\n{OPEN}")
    assert "libibverbs.so.1" in said
    assert "libibverbs1" in said


def test_the_library_gives_up_in_half_of_the_shortest_timeout_unless_it_was_told_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = ("MC_RPC_TIMEOUT_MS", "MC_TCP_PROGRESS_TIMEOUT_SEC", "MC_TCP_STATUS_TIMEOUT_SEC")
    for name in names:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(library, "_ours", {})
    assert library.bound_waiting(10.0) == 5.0
    assert library.bound_waiting(3.0) == 1.5
    assert library.bound_waiting(60.0) == 1.5
    assert [os.environ[name] for name in names] == ["1500", "2", "2"]
    monkeypatch.setenv(names[0], "7000")
    assert library.bound_waiting(1.0) == 7.0
    assert os.environ[names[0]] == "7000"


def test_the_doctor_hears_of_the_client_and_of_the_master(tmp_path: Path) -> None:
    with running(tmp_path) as store, open_backend(store, protocol="rdma") as backend:
        assert isinstance(backend, SupportsDiagnosis)
        assert isinstance(backend, SupportsRegistration)
        lines = {line.level: line.text for line in backend.diagnose()}
        assert store.master.address in lines["ok"]
        if not Path("/sys/class/infiniband").exists():
            assert "no RDMA device" in lines["error"]
        store.master.kill()
        problems = [line for line in backend.diagnose() if line.level == "error"]
        assert any("accepts no connection" in line.text and line.remedy for line in problems)
        assert any("mooncake-transfer-engine" in line.text for line in backend.diagnose())


def test_a_master_elsewhere_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    with MooncakeBackend(MooncakeOptions(master="10.255.0.1:50051"), Context()) as backend:
        assert sum("unencrypted" in entry.message for entry in caplog.records) == 1
        assert any(line.level == "warning" for line in backend.diagnose())
