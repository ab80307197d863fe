"""`lmc doctor`: what it finds in each place, what it leaves as it was, and that nothing it asks can stop it."""

from __future__ import annotations

import importlib
import json
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import daemons
import pytest
from serve import lmc

from lmcache_core import BackendError, CacheError, Context, Diagnosis, SupportsDiagnosis, audit
from lmcache_core.backends import _diagnosis
from lmcache_core.backends.disk import DiskBackend, DiskOptions
from lmcache_core.cli import checks, tier_checks
from lmcache_core.cli.security import _remote
from lmcache_core.config import CacheConfig
from lmcache_core.device import Device
from lmcache_core.plugins import BACKENDS, DEVICES
from lmcache_core.testing.dict_backend import DictBackend, DictStore

PLUGINS = """
import logging
from lmcache_core import BackendUnavailable, Diagnosis, Probe
from lmcache_core.devices.cpu import CpuDevice
from lmcache_core.testing.dict_backend import DictBackend

class Quiet(DictBackend):
    api_version = (1, 0)

class Saying(DictBackend):
    api_version = (1, 0)
    def diagnose(self):
        print("noise")
        yield Diagnosis("warning", "no password is set", "set requirepass")

class Raising(DictBackend):
    api_version = (1, 0)
    def diagnose(self):
        raise KeyError("oops")

class Down(DictBackend):
    api_version = (1, 0)
    def contains(self, key):
        raise BackendUnavailable("refused")

class Warning(DictBackend):
    api_version = (1, 0)
    def __init__(self, *args):
        super().__init__(*args)
        logging.getLogger("acme").warning("the server evicts %s", "nothing")

class Buggy(DictBackend):
    api_version = (1, 0)
    def contains(self, key):
        raise ZeroDivisionError("oops")

class Absent(CpuDevice):
    api_version = (1, 0)
    @classmethod
    def probe(cls):
        return Probe(0, "no /dev/kfd: the kernel module amdgpu is not loaded")

class Present(CpuDevice):
    api_version = (1, 0)
    @classmethod
    def probe(cls):
        return Probe(2)
    @classmethod
    def diagnose(cls):
        return [Diagnosis("note", "peer access is off", "set it on")]
"""


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.delenv("LMCACHE_CONFIG", raising=False)


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A distribution with backends and devices."""
    site = tmp_path / "site"
    info = site / "acme-1.5.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme\nVersion: 1.5\n")
    backends = "".join(
        f"{name.lower()} = acme_plugin:{name}\n" for name in ("Quiet", "Saying", "Raising", "Down", "Warning", "Buggy")
    )
    gpus = "acme-gpu = acme_plugin:Absent\nacme-two = acme_plugin:Present\n"
    (info / "entry_points.txt").write_text(f"[{BACKENDS}]\n{backends}\n[{DEVICES}]\n{gpus}")
    (site / "acme_plugin.py").write_text(PLUGINS)
    monkeypatch.syspath_prepend(str(site))
    importlib.invalidate_caches()
    yield "acme"
    sys.modules.pop("acme_plugin", None)


def config(*tiers: dict[str, Any], **more: Any) -> Path:
    path = Path("c.yaml")
    host = {"name": "host", "backend": "memory", "capacity": "8MiB"}
    path.write_text(json.dumps({"tiers": [host, *tiers], **more}))
    path.chmod(0o600)
    return path


def doctor(path: Path | None = None, *more: str) -> tuple[int, dict[str, list[dict[str, str]]]]:
    result = lmc("doctor", *(["--config", path] if path is not None else []), "--json", *more)
    found = json.loads(result.stdout)
    lines = [line for section in found["sections"].values() for line in section]
    assert found["counts"] == {
        level: sum(line["level"] == level for line in lines) for level in ("error", "warning", "note", "ok")
    }
    sections: dict[str, list[dict[str, str]]] = found["sections"]
    return result.exit_code, sections


def bad(lines: list[dict[str, str]]) -> list[str]:
    return [line["text"] for line in lines if line["level"] in ("warning", "error")]


def test_a_sound_setup_has_no_error_and_shows_where_each_value_is_from(tmp_path: Path) -> None:
    path = config({"name": "disk", "backend": "disk", "capacity": "64MiB", "options": {"path": f"{tmp_path}/store"}})
    with DiskBackend(DiskOptions(path=str(tmp_path / "store")), Context()) as backend:
        code, found = doctor(path)
        assert code == 0, found
        assert list(backend.entries()) == [], "what was written for the test is gone"
        assert backend.used_nbytes == 0
    assert set(found) == {
        *("environment", "plugins", "configuration", "devices", "daemon", "limits", "stores", "security")
    }
    assert any("lmcache-core" in line["text"] and "backend disk" in line["text"] for line in found["plugins"])
    shown = [line["text"] for line in found["configuration"]]
    assert "tiers.disk.capacity: 64MiB  # c.yaml:1" in shown
    assert any(line["text"].startswith("disk: answers in") for line in found["stores"])
    text = lmc("doctor", "--config", path).stdout
    assert text.splitlines()[-1].startswith("0 errors, ")
    quiet = lmc("doctor", "--config", path, "--quiet").stdout
    assert "  ok " not in quiet


def test_a_setting_that_only_sounds_like_a_secret_is_shown() -> None:
    _, found = doctor(config(chunk_tokens=128))
    assert "chunk_tokens: 128  # c.yaml:1" in [line["text"] for line in found["configuration"]]


def test_without_a_file_it_says_so_and_is_content() -> None:
    code, found = doctor()
    assert code == 0
    assert found["configuration"][0]["text"] == "no file: the defaults are in effect"


def test_a_configuration_that_cannot_be_read_is_a_finding_and_the_rest_is_looked_at() -> None:
    path = Path("c.yaml")
    path.write_text("tiers: [{backend: memory, capcity: 1GiB}]\nchunk_token: 3\n")
    code, found = doctor(path)
    assert code == 1
    assert any("did you mean 'capacity'?" in text for text in bad(found["configuration"]))
    assert len(bad(found["configuration"])) >= 2
    assert {"environment", "plugins", "security"} <= set(found)


def test_a_plugin_that_is_missing_is_an_error_once() -> None:
    code, found = doctor(config({"backend": "nowhere", "options": {"url": "redis://localhost"}}))
    assert code == 1
    assert sum("no backend 'nowhere' is installed" in text for lines in found.values() for text in bad(lines)) == 1


def test_a_store_that_is_not_there_yet_is_not_made(tmp_path: Path) -> None:
    code, found = doctor(config({"backend": "disk", "options": {"path": f"{tmp_path}/to/come"}}))
    assert code == 0
    assert "made at the first start" in found["stores"][0]["text"]
    assert not (tmp_path / "to").exists()


def test_what_plugins_say_of_themselves_is_shown_with_its_remedy(plugin: str) -> None:
    code, found = doctor(config({"backend": "saying"}))
    assert code == 0
    assert {"level": "warning", "text": "saying: no password is set", "remedy": "set requirepass"} in found["stores"]
    assert doctor(config({"backend": "saying"}), "--strict")[0] == 1
    assert {"level": "note", "text": "acme-two: peer access is off", "remedy": "set it on"} in found["devices"]
    text = lmc("doctor", "--config", "c.yaml").stdout
    assert "warning  saying: no password is set" in text
    assert "-> set requirepass" in text


def test_what_a_backend_logs_as_a_warning_is_a_finding(plugin: str) -> None:
    result = lmc("doctor", "--config", config({"backend": "warning"}))
    assert "  warning  warning: the server evicts nothing" in result.stdout
    assert result.output.count("the server evicts nothing") == 1


def test_every_device_has_a_line_and_an_absent_one_its_reason(plugin: str) -> None:
    _, found = doctor(config())
    said = {line["text"]: line["level"] for line in found["devices"]}
    assert said["acme-gpu: none here: no /dev/kfd: the kernel module amdgpu is not loaded"] == "note"
    assert said["acme-two: 2 here"] == "ok"
    assert said["device: auto means acme-two"] == "ok"
    code, found = doctor(config(device="acme-gpu"))
    assert code == 1
    assert bad(found["devices"]) == ["acme-gpu: none here: no /dev/kfd: the kernel module amdgpu is not loaded"]


@pytest.mark.parametrize(
    ("backend", "said"),
    [
        ("down", "down: refused"),
        ("buggy", "raised ZeroDivisionError: oops"),
        ("raising", "its own check raised KeyError"),
    ],
)
def test_a_store_that_fails_stops_neither_the_doctor_nor_the_next_store(plugin: str, backend: str, said: str) -> None:
    code, found = doctor(config({"backend": backend}, {"backend": "quiet"}))
    assert code == (0 if backend == "raising" else 1)
    assert any(said in text for text in bad(found["stores"]))
    assert any(line["text"].startswith("quiet: answers in") for line in found["stores"])


def test_a_store_that_hangs_is_told_of_in_bounded_time(plugin: str, monkeypatch: pytest.MonkeyPatch) -> None:
    let_go = threading.Event()
    monkeypatch.setattr(tier_checks, "_check", lambda *_: [let_go.wait(60)][:0])
    joined: list[float | None] = []
    join = threading.Thread.join

    def at_once(thread: threading.Thread, timeout: float | None = None) -> None:
        if thread.name == "lmc-doctor":
            joined.append(timeout)
            timeout = 0.01
        join(thread, timeout)

    monkeypatch.setattr(threading.Thread, "join", at_once)
    try:
        code, found = doctor(config({"backend": "quiet", "timeout": "2s"}))
    finally:
        let_go.set()
    assert code == 1
    assert bad(found["stores"]) == ["quiet: no end after 13 s"]
    assert joined == [13.0]


def test_a_probe_removes_what_it_wrote_also_when_it_fails() -> None:
    class Failing(DictBackend):
        def get(self, key: Any, into: memoryview) -> int | None:
            raise BackendError("broken")

    class Lying(DictBackend):
        def get(self, key: Any, into: memoryview) -> int | None:
            nbytes = super().get(key, into)
            into[5000] ^= 1
            return nbytes

    class Losing(DictBackend):
        def put(self, key: Any, data: memoryview) -> None:
            pass

    for kind, error in ((Failing, "broken"), (Lying, "other bytes"), (Losing, "does not find")):
        backend = kind(store=DictStore())
        with pytest.raises(CacheError, match=error):
            tier_checks.probe(backend, timeout_s=5.0)
        assert not backend.store.records


def test_what_a_probe_writes_is_sound_to_whoever_checks_meanwhile() -> None:
    seen: list[audit.Finding] = []

    class Checked(DictBackend):
        def get_many(self, keys: Any, into: Any, *, timeout_s: float) -> Any:
            if not checking:
                checking.append(True)
                known = audit.survey(self, now=0.0)
                progress = audit.Progress()
                seen.extend(audit.check(self, known, timeout_s=5.0, progress=progress))
                assert progress.sound == tier_checks.RECORDS
            return super().get_many(keys, into, timeout_s=timeout_s)

    checking: list[bool] = []
    speed = tier_checks.probe(Checked(), timeout_s=5.0)
    assert checking
    assert seen == []
    assert min(speed.ask_s, speed.read, speed.write) > 0


def test_nothing_is_written_where_that_is_not_wanted(plugin: str, tmp_path: Path) -> None:
    path = config({"name": "disk", "backend": "disk", "options": {"path": f"{tmp_path}/store"}})
    with DiskBackend(DiskOptions(path=str(tmp_path / "store")), Context(capacity_nbytes=4096)):
        code, found = doctor(path, "--no-write")
        assert any("and answers" in line["text"] for line in found["stores"])
        code, found = doctor(path)
        assert code == 0
        assert any(line["text"].startswith("disk: full") and line["level"] == "note" for line in found["stores"])


def test_a_slow_store_is_a_warning() -> None:
    slow = tier_checks.Speed(ask_s=0.001, write=3 << 20, read=1 << 30)
    assert [d.level for d in tier_checks._judged("pool", slow, timeout_s=2.0)] == ["warning"]
    assert [d.level for d in tier_checks._judged("pool", slow, timeout_s=10.0)] == ["ok"]
    far = tier_checks.Speed(ask_s=1.5, write=1 << 30, read=1 << 30)
    assert [d.level for d in tier_checks._judged("pool", far, timeout_s=2.0)] == ["warning"]


def test_the_daemon_is_asked_and_one_that_is_wanted_and_missing_is_an_error(tmp_path: Path) -> None:
    socket = tmp_path / "s"
    path = config(socket=str(socket))
    code, found = doctor(path)
    assert code == 1
    assert "no daemon was started there" in bad(found["daemon"])[0]
    with daemons.serving(socket, [DictBackend()], chunks=8) as daemon:
        code, found = doctor(path)
        assert code == 0, found
        assert found["daemon"][0]["text"].startswith(f"{socket} answers in")
        daemon._pool.tiers[0].breaker.failed("refused", fatal=True)
        code, found = doctor(path)
        assert code == 1
        assert any("leaves tier tier1 alone" in text and "refused" in text for text in bad(found["daemon"]))


def test_a_host_tier_that_does_not_fit_is_an_error() -> None:
    total, available = checks.memory()
    assert 0 < available <= total

    def level(wanted: int, daemon_runs: bool = False) -> str:
        (line,) = checks._memory(wanted, daemon_runs)
        return line.level

    assert level(1 << 20) == "ok"
    assert level(1 << 60) == "error"


def test_limits_are_read_from_the_machine(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text("1048576\n")
    assert checks.cgroup_limit(tmp_path) == 1 << 20
    (tmp_path / "memory.max").write_text("max\n")
    assert checks.cgroup_limit(tmp_path) is None
    (tmp_path / "shmem_enabled").write_text("always within_size [never] deny\n")
    assert [d.level for d in checks._huge_pages(tmp_path)] == ["note"]
    (tmp_path / "shmem_enabled").write_text("always [advise] never\n")
    assert [d.level for d in checks._huge_pages(tmp_path)] == ["ok"]
    (tmp_path / "enabled").write_text("always madvise [never]\n")
    shared, private = checks._huge_pages(tmp_path)
    assert (shared.level, private.level) == ("ok", "note")
    assert f"echo madvise > {tmp_path}/enabled" in private.remedy
    assert [d.level for d in checks._clock(1e9)] == ["error"]
    texts = [d.text for d in checks.limits(CacheConfig(), daemon_runs=False)]
    for word in ("host memory", "memlock", "open files"):
        assert any(text.startswith(word) for text in texts)


# Security.


def said(path: Path) -> list[str]:
    return bad(doctor(path)[1]["security"])


def test_secrets_in_the_file_are_errors_and_are_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"url": "rediss://me:hunter2@10.0.0.1/0", "password": "swordfish", "prefix": "x:"}
    result = lmc("doctor", "--config", config({"backend": "nowhere", "options": options}))
    assert result.exit_code == 1
    assert result.stdout.count("a secret stands in the file") == 2
    assert "hunter2" not in result.output
    assert "swordfish" not in result.output
    monkeypatch.setenv("PW", "swordfish")
    options = {"url": "rediss://me:${PW}@10.0.0.1/0", "password": "${PW}"}
    found = lmc("doctor", "--config", config({"backend": "nowhere", "options": options}))
    assert "a secret stands in the file" not in found.stdout
    assert "swordfish" not in found.output


def test_plain_text_to_another_host_is_a_warning() -> None:
    for url, hosts in (
        ("redis://cache:6379/0", "cache"),
        ("redis://127.0.0.1:1,10.0.0.2:3/0", "10.0.0.2"),
        ("http://minio.internal:9000", "minio.internal"),
        ("redis://[2001:db8::1]:6379", "2001:db8::1"),
        ("rediss://cache:6379/0", ""),
        ("https://s3.example", ""),
        ("redis://localhost:6379", ""),
        ("redis://[::1]:6379", ""),
        ("unix:///run/redis.sock", ""),
    ):
        found = said(config({"backend": "nowhere", "options": {"url": url}}))
        assert bool(found) == bool(hosts), url
        assert not hosts or f"plain text to {hosts}:" in found[0]
    assert list(_remote("me:pw@10.0.0.1:80")) == ["10.0.0.1"]


def test_a_file_that_others_may_write_to_is_told_of() -> None:
    path = config()
    assert said(path) == []
    path.chmod(0o620)
    assert "others may write" in said(path)[0]
    path.chmod(0o602)
    assert doctor(path)[0] == 1


def test_a_trace_that_is_on_is_told_of(tmp_path: Path) -> None:
    for tokens, text in ((True, "the prompts of every request"), (False, "hashes of every request's prompt")):
        _, found = doctor(config(trace={"path": str(tmp_path / "trace"), "tokens": tokens}))
        assert any(line["level"] == "note" and text in line["text"] for line in found["security"])
    assert not (tmp_path / "trace").exists()


def test_a_socket_that_everybody_may_open_is_told_of(tmp_path: Path) -> None:
    socket = tmp_path / "run" / "s"
    assert "lets every user knock" in said(config(server={"socket": str(socket), "socket_mode": "0666"}))[0]
    path = config(server={"socket": str(socket)})
    with daemons.serving(socket):
        assert said(path) == []
        socket.chmod(0o606)
        assert "is open to every user" in said(path)[0]
        socket.chmod(0o600)
        socket.parent.chmod(0o777)
        assert "may replace" in said(path)[0]
        socket.parent.chmod(0o700)


def test_a_disk_store_tells_its_mode_its_room_and_its_file_system(tmp_path: Path) -> None:
    root = tmp_path / "store"
    with DiskBackend(DiskOptions(path=str(root)), Context(capacity_nbytes=1 << 20)) as backend:
        assert isinstance(backend, SupportsDiagnosis)
        assert {d.level for d in backend.diagnose()} <= {"ok", "note"}
        root.chmod(0o755)
        assert [d.text for d in backend.diagnose() if d.level == "warning"] == [
            f"other users can get into {root} (mode 0755); KV gives prompts away"
        ]
        root.chmod(0o700)

        def levels(limit: int | None, direct: bool = True) -> list[str]:
            return [d.level for d in _diagnosis.diagnose(root, direct=direct, used_nbytes=0, limit_nbytes=limit)]

        assert levels(1 << 60) == ["ok", "warning"]
        assert levels(None) == ["ok", "note"]
        assert levels(1 << 20, direct=False) == ["note", "ok"]
    assert _diagnosis.file_system(Path("/proc")) == "proc"


def test_a_store_in_memory_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_diagnosis, "file_system", lambda path: "tmpfs")
    found = list(_diagnosis.diagnose(tmp_path, direct=False, used_nbytes=0, limit_nbytes=1))
    assert any(d.level == "warning" and "in memory (tmpfs)" in d.text for d in found)


def test_what_a_plugin_says_cannot_command_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "environment", lambda: iter([Diagnosis("note", "a\x1b[2Jb", "c\rd")]))
    text = lmc("doctor").stdout
    assert "a?[2Jb" in text
    assert "c?d" in text


def test_devices_and_backends_need_not_say_anything() -> None:
    assert not isinstance(Device, SupportsDiagnosis)
    assert list(checks.own(DictBackend(), "dict")) == []
