"""On local file systems: one layout with the disk backend, which way is used and said, and what is refused."""

from __future__ import annotations

import dataclasses
import logging
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from stores import holds, new_key, open_disk, open_gds, record

from lmcache_core import BackendError, BackendUnavailable, ConfigError, RawOptions
from lmcache_gds import GdsOptions, backend, cufile
from lmcache_gds.mounts import mount_at

README = Path(__file__).parent.parent / "README.md"
OPTIONS = {field.name: field for field in dataclasses.fields(GdsOptions)}


@pytest.mark.parametrize("guard", ["on", "off"])
def test_a_directory_is_shared_with_the_disk_backend_both_ways_and_under_one_total(tmp_path: Path, guard: str) -> None:
    ours, theirs = new_key(), new_key()
    with open_gds(tmp_path / "s", guard=guard) as gds, open_disk(tmp_path / "s") as disk:
        gds.put(ours, record(ours))
        disk.put(theirs, record(theirs))
        assert holds(disk, ours)
        assert holds(gds, theirs)
        assert {entry.key for entry in gds.entries()} == {entry.key for entry in disk.entries()} == {ours, theirs}
        assert disk.used_nbytes == 2 * len(record(ours))
        assert gds.remove(theirs)
        assert not disk.contains(theirs)
    with open_disk(tmp_path / "s") as disk:
        assert holds(disk, ours)


def test_the_way_in_use_and_why_not_a_faster_one_are_said_in_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cufile, "DRIVER", "libcuda-that-is-not-there.so.1")
    with caplog.at_level(logging.INFO, "lmcache_gds"), open_gds(tmp_path / "s") as gds:
        said = gds.description()
        assert said in [line.text.partition(": ")[2] for line in gds.diagnose()]
    assert re.fullmatch(
        r"(direct|buffered) I/O on \w+ \(.*not device: there is no NVIDIA driver \(libcuda-that-is-not-there.so.1\)\)",
        said,
    )
    assert [r.getMessage() for r in caplog.records] == [f"gds store {tmp_path / 's'}: {said}"]


def test_where_o_direct_does_not_work_it_is_buffered_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lmcache_core.backends.disk.probe_io", lambda *args, **more: False)
    with open_gds(tmp_path / "s") as gds:
        assert gds.description().startswith("buffered I/O on ")
        assert "not direct: O_DIRECT does not work on " in gds.description()
    with pytest.raises(ConfigError, match="O_DIRECT does not work"):
        open_gds(tmp_path / "s", io="direct")


def test_a_way_that_is_asked_for_and_not_there_is_an_error_that_names_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend, "why_no_device", lambda: "kvikio is not installed: pip install kvikio-cu12")
    with pytest.raises(ConfigError, match="io is device, but kvikio is not installed: pip install kvikio-cu12"):
        open_gds(tmp_path / "s", io="device")
    with open_gds(tmp_path / "s", io="buffered") as gds:
        assert "(io is buffered)" in gds.description()


def test_what_device_io_lacks_is_named_one_thing_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = tmp_path / "version"
    there.write_text("GDS Version: 1.15\n")
    monkeypatch.setattr(cufile.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(cufile, "NVIDIA_FS", tmp_path / "none")
    monkeypatch.setattr(cufile, "DRIVER", "libcuda-that-is-not-there.so.1")
    assert cufile.why_no_device() == "there is no NVIDIA driver (libcuda-that-is-not-there.so.1)"
    monkeypatch.setattr(cufile, "DRIVER", "libc.so.6")
    assert cufile.why_no_device().startswith("kvikio is not installed: pip install kvikio-cu12")
    monkeypatch.setattr(cufile.importlib.util, "find_spec", lambda name: object())
    assert "nvidia-fs is not loaded" in cufile.why_no_device()
    monkeypatch.setattr(cufile, "NVIDIA_FS", there)
    assert cufile.why_no_device() == ""


def test_the_readme_tells_every_option_and_its_default() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \| (\S+) \|", README.read_text(), re.M))
    told = {name: "required" if f.default is dataclasses.MISSING else f.default for name, f in OPTIONS.items()}
    assert rows == {name: str(default) or '""' for name, default in told.items()}


def test_importing_the_plugin_imports_neither_kvikio_nor_nixl_nor_torch() -> None:
    program = (
        "import sys, lmcache_gds.backend; print([n for n in ('kvikio', 'nixl', 'torch', 'cupy') if n in sys.modules])"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert ran.stdout.strip() == "[]"


def test_a_file_system_that_is_not_mounted_is_unavailable_and_nothing_is_written_in_its_place(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    key = new_key()
    with open_gds(tmp_path / "s", filesystem="lustre") as gds:
        assert "lustre is not mounted" in gds.description()
        with pytest.raises(BackendUnavailable, match="lustre is not mounted"):
            gds.put(key, record(key))
    assert list(tmp_path.iterdir()) == []
    assert len([r for r in caplog.records if r.levelno == logging.WARNING]) == 1


def test_a_directory_that_cannot_be_used_is_a_config_error(tmp_path: Path) -> None:
    (tmp_path / "s").write_text("a file")
    for guard in ("on", "off"):
        with pytest.raises(ConfigError, match="Not a directory"):
            open_gds(tmp_path / "s", guard=guard)


def test_after_close_every_call_is_a_backend_error(tmp_path: Path) -> None:
    for guard in ("on", "off"):
        gds = open_gds(tmp_path / "s", guard=guard)
        gds.close()
        with pytest.raises(BackendError, match="closed"):
            gds.contains(new_key())
        assert gds.description() == "not open: it is closed"


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"path": "relative"}, "absolute directory"),
        ({"path": ""}, "absolute directory"),
        ({"path": "/a\0b"}, "absolute directory"),
        ({"filesystem": "Lustre FS"}, "e.g. lustre"),
        ({"io_threads": 0}, "1 to 64"),
        ({"io_threads": 65}, "1 to 64"),
    ],
)
def test_a_wrong_setting_is_refused_in_words_that_help(changed: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        GdsOptions(**{"path": "/x", **changed})


def test_options_are_read_as_from_a_file() -> None:
    read = RawOptions.of({"path": "/mnt/kv", "io": "direct", "io_threads": "8"}).into(GdsOptions)
    assert read == GdsOptions(path="/mnt/kv", io="direct", io_threads=8)


TABLE = """\
22 1 254:0 / / rw,relatime - ext4 /dev/vda rw
30 22 0:40 / /mnt rw - tmpfs tmpfs rw
31 30 0:41 / /mnt/kv rw - lustre 10.0.0.1@tcp:/kv rw
32 30 0:42 / /mnt/with\\040space rw - fuse.weed filer rw
33 30 0:43 / /mnt/kv/deep rw shared:1 - nfs4 server:/x rw
34 30 0:44 / /mnt/kv/deep rw - wekafs weka rw
"""


@pytest.mark.parametrize(
    ("path", "kind", "may_hang"),
    [
        ("/var/x", "ext4", False),
        ("/mnt/kvx", "tmpfs", False),
        ("/mnt/kv", "lustre", True),
        ("/mnt/kv/../kv/a", "lustre", True),
        ("/mnt/kv/deep/a", "wekafs", True),
        ("/mnt/with space/a", "fuse.weed", True),
    ],
)
def test_what_is_mounted_at_a_path_is_read_from_the_kernels_table(
    path: str, kind: str, may_hang: bool, tmp_path: Path
) -> None:
    table = tmp_path / "mountinfo"
    table.write_text(TABLE)
    found = mount_at(path, table)
    assert (found.kind, found.may_hang) == (kind, may_hang)
