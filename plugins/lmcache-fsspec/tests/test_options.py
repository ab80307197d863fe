"""Wrong settings are one clear error, and secrets stay where they were."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
from dataclasses import MISSING, fields
from pathlib import Path

import pytest

from lmcache_core import ConfigError, Context, RawOptions, load_config
from lmcache_fsspec import FsspecBackend, FsspecOptions, locating
from lmcache_fsspec.faults import fault
from lmcache_fsspec.options import MAX_CONNECTIONS

README = Path(__file__).parent.parent / "README.md"


def options_of(tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch, **environ: str) -> FsspecOptions:
    """The options of the only tier of a configuration file."""
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    file = tmp_path / "lmcache.yaml"
    file.write_text(f"tiers:\n  - backend: fsspec\n    options: {text}\n")
    options = load_config(file).tiers[0].options.into(FsspecOptions)
    assert isinstance(options, FsspecOptions)
    return options


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{}", "url: is required and missing"),
        ("{url: /var/kv}", "expected e.g. gcs://bucket/kv or file:///var/kv"),
        ("{url: 'gcs://'}", "names no place"),
        ("{url: 'nosuch://x/y'}", "fsspec knows no nosuch://"),
        ("{url: 'simplecache::file:///x'}", "chain of filesystems"),
        ("{url: 'ftp://me:pw@host/kv'}", "has a password in it"),
        ("{url: 'file:///x', publish: rename}", "none of auto, put, move"),
        ("{url: 'memory://x', publish: move}", "has no move of its own"),
        ("{url: 'file:///x', connections: 0}", "connections: must be 1 to 64"),
        ("{url: 'file:///x', conections: 3}", "did you mean .*connections"),
        ("{url: 'ftp://host/kv', storage: {password: clear}}", "storage.password: is a secret"),
        ("{url: 'ftp://host/kv', storage: {a: {secret: clear}}}", "storage.a.secret: is a secret"),
        ("{url: 'ftp://host/kv', secrets: {password: clear}}", "secrets.password: must not stand in a file"),
        ("{url: 'webdav://kv'}", "webdav:// also needs base_url"),
        ("{url: 'zip://x/y'}", "also needs|publish: put"),
    ],
)
def test_a_wrong_option_is_an_error_with_file_and_line(
    text: str, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError) as error:
        options_of(tmp_path, text, monkeypatch)
    assert re.search(problem, str(error.value)), error.value
    assert f"{tmp_path / 'lmcache.yaml'}:3" in str(error.value)


def test_values_are_text_unless_they_are_unquoted_numbers_or_switches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = """{url: "memory://x", storage: {a: 7, b: "7", c: true, d: "true", e: no, f: 0.5, g: [1, x], h: {i: null}},
               secrets: {j: "${NUMBER}"}}"""
    options = options_of(tmp_path, text, monkeypatch, NUMBER="12")
    assert options.arguments() == {
        "a": 7, "b": "7", "c": True, "d": "true", "e": "no", "f": 0.5, "g": [1, "x"], "h": {"i": None}, "j": "12",
    }  # fmt: skip


def test_a_secret_is_in_no_repr_and_no_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = '{url: "ftp://me@127.0.0.1/kv", secrets: {password: "${PASSWORD}"}}'
    options = options_of(tmp_path, text, monkeypatch, PASSWORD="hunter2-hunter2")
    with FsspecBackend(options, Context()) as backend:
        assert backend._arguments["password"] == "hunter2-hunter2"
        assert "hunter2" not in f"{options!r} {backend!r} {backend.context!r}"
        error = backend._fault(OSError("530 login me:hunter2-hunter2 refused"), "get")
    assert "hunter2" not in str(error)
    assert "***" in str(error)


def test_a_missing_package_is_named_with_the_line_that_installs_it() -> None:
    # In a process that cannot import it, whatever is installed here.
    code = (
        "import sys; sys.modules['paramiko'] = None; sys.modules['s3fs'] = None\n"
        "from lmcache_fsspec import FsspecOptions\n"
        "for url in ('sftp://host/kv', 's3://bucket/kv'):\n"
        "    try: FsspecOptions(url=url)\n"
        "    except ValueError as error: print(error)\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    lines = ran.stdout.splitlines()
    assert lines[0].startswith("url: sftp:// needs the package paramiko: pip install paramiko (")
    assert lines[1].startswith("url: s3:// needs the package s3fs: pip install s3fs (")


@pytest.mark.parametrize(
    ("protocol", "package"),
    [("gcs", "gcsfs"), ("abfs", "adlfs"), ("hdfs", "pyarrow"), ("lakefs", "lakefs-spec"), ("git", "fsspec[git]")],
)
def test_every_protocol_has_a_package_to_install(protocol: str, package: str) -> None:
    assert locating.package_of(protocol) == package


@pytest.mark.parametrize(
    ("url", "storage", "warned"),
    [
        ("ftp://cache.example/kv", {}, "cache.example"),
        ("ftp://127.0.0.1/kv", {}, None),
        ("ftp://localhost/kv", {}, None),
        ("ftp://cache.example/kv", {"tls": True}, None),
        ("webdav://kv", {"base_url": "http://dav.example:80"}, "dav.example"),
        ("webdav://kv", {"base_url": "https://dav.example"}, None),
        ("file:///tmp/kv", {}, None),
    ],
)
def test_plain_text_to_another_host_is_said_once(
    url: str, storage: dict[str, object], warned: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        caplog.at_level(logging.WARNING),
        FsspecBackend(FsspecOptions(url=url, storage=RawOptions.of(storage)), Context()),
    ):
        pass
    said = [r.getMessage() for r in caplog.records if "plain text" in r.getMessage()]
    assert len(said) == (1 if warned else 0)
    assert warned is None or warned in said[0]


@pytest.mark.parametrize(
    ("error", "kind", "retryable"),
    [
        (ConnectionRefusedError(111, "refused"), "BackendUnavailable", True),
        (OSError(28, "no space"), "BackendFull", False),
        (PermissionError(13, "denied"), "BackendError", False),
        (OSError("something of a server's"), "BackendUnavailable", True),
        (NotImplementedError("read only"), "BackendError", False),
    ],
)
def test_what_a_filesystem_raises_is_sorted_by_whether_trying_again_can_help(
    error: Exception, kind: str, retryable: bool
) -> None:
    found = fault(error, "put x")
    assert (type(found).__name__, found.retryable, found.__cause__) == (kind, retryable, error)


@pytest.mark.parametrize(
    ("status", "kind"),
    [(403, "BackendError"), (301, "BackendError"), (429, "BackendUnavailable"), (503, "BackendUnavailable"),
     (507, "BackendFull")],
)  # fmt: skip
def test_an_http_status_decides_wherever_a_client_puts_it(status: int, kind: str) -> None:
    class Answer:
        status_code = status

    class ClientError(Exception):
        response = Answer()

    class Wrapped(OSError):
        pass

    error = Wrapped("wrapped")
    error.__cause__ = ClientError()
    assert type(fault(ClientError(), "get x")).__name__ == kind
    assert type(fault(error, "get x")).__name__ == kind


def test_the_readme_documents_every_option_with_its_default_and_unit() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (.+?) \| (.+?) \|$", README.read_text(), re.M)
    documented = {name: (default.strip("`"), text) for name, default, text in rows}
    assert list(documented) == [f.name for f in fields(FsspecOptions)]
    for each in fields(FsspecOptions):
        default, text = documented[each.name]
        if each.name in ("storage", "secrets"):
            assert default == "{}"
        else:
            assert default == ("required" if each.default is MISSING else str(each.default))
        assert text.endswith(".")
    assert f"1 to {MAX_CONNECTIONS}" in documented["connections"][1]
