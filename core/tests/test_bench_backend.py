"""`lmc bench backend`: a store is measured, left as it was, and what it recommends follows from what was measured."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import pytest
from click.testing import CliRunner, Result

from lmcache_core import plugins
from lmcache_core.backend import Backend, Context
from lmcache_core.backends.disk import DiskBackend
from lmcache_core.cli import main
from lmcache_core.cli.bench_backend import Run, advise
from lmcache_core.cli.store_speed import Latency, Speed
from lmcache_core.errors import BackendUnavailable
from lmcache_core.keys import ChunkKey

SMALL = ("--data", "1MiB", "--sizes", "16KiB,64KiB")


def bench(backend: str, *arguments: object) -> Result:
    return CliRunner().invoke(main, ["bench", "backend", backend, *map(str, arguments)])


def as_json(result: Result) -> Any:
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.fixture
def offered(monkeypatch: pytest.MonkeyPatch) -> dict[str, type[Backend[Any]]]:
    """Backends by name, as if they were installed."""
    found: dict[str, type[Backend[Any]]] = {}
    real = plugins.load

    def load(group: str, name: str, *more: Any) -> Any:
        return found[name] if group == plugins.BACKENDS and name in found else real(group, name, *more)

    monkeypatch.setattr(plugins, "load", load)
    return found


def test_a_disk_is_measured_and_left_as_it_was(tmp_path: Path) -> None:
    result = bench("disk", "-o", f"path={tmp_path}/store", *SMALL)
    assert result.exit_code == 0, result.output
    for said in ("64.0 KiB, 5 threads", "direct=on", "direct=off", "chunk_tokens", f'path: "{tmp_path}/store"'):
        assert said in result.output
    assert sorted(os.listdir(tmp_path / "store" / "v1")) == ["lock", "usage"]


def test_json_has_every_figure_and_the_advice(tmp_path: Path) -> None:
    found = as_json(bench("disk", "-o", f"path={tmp_path}/store", *SMALL, "--json"))
    sizes = [run["payload_nbytes"] for run in found["runs"] if not run["options"]]
    assert sizes == [16 << 10, 64 << 10]
    for run in found["runs"]:
        speed = run["speed"]
        assert min(speed["put"], speed["get"], speed["exists"]) > 0
        for operation in ("put", "get", "exists"):
            latency = speed[f"{operation}_latency"]
            assert 0 < latency["p50_s"] <= latency["p95_s"] <= latency["p99_s"]
    assert found["advice"]["options"]["direct"] in ("on", "off")


def test_quick_measures_the_options_as_they_are(tmp_path: Path) -> None:
    found = as_json(bench("disk", "-o", f"path={tmp_path}/store", *SMALL, "--json", "--quick"))
    assert [run["options"] for run in found["runs"]] == [{}, {}]
    assert found["advice"]["options"] == {}


def test_an_option_that_is_given_is_not_varied(tmp_path: Path) -> None:
    found = as_json(bench("disk", "-o", f"path={tmp_path}/store", "-o", "direct=off", *SMALL, "--json"))
    assert [run["options"] for run in found["runs"]] == [{}, {}]
    assert found["runs"][0]["speed"]["description"] == "buffered I/O: direct is off"


class Broken(DiskBackend):
    """Takes nothing."""

    api_version: ClassVar[tuple[int, int]] = (1, 0)

    def put(self, key: ChunkKey, data: memoryview) -> None:
        raise BackendUnavailable("the cable is out")


class Forgetful(DiskBackend):
    """Takes everything and has nothing."""

    api_version: ClassVar[tuple[int, int]] = (1, 0)

    def get(self, key: ChunkKey, into: memoryview) -> int | None:
        return None


class Unopened(DiskBackend):
    """A bug at start."""

    api_version: ClassVar[tuple[int, int]] = (1, 0)

    def __init__(self, options: Any, context: Context) -> None:
        raise ZeroDivisionError("a bug")


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        (Broken, "Error: put: 1 of 1 failed: fault: the cable is out"),
        (Forgetful, "Error: get: 1 of 1 failed: miss"),
        (Unopened, "Error: the backend 'mine' could not be opened: ZeroDivisionError: a bug"),
    ],
)
def test_a_broken_store_is_one_clear_line_and_leaves_nothing(
    broken: type[DiskBackend], said: str, tmp_path: Path, offered: dict[str, type[Backend[Any]]]
) -> None:
    offered["mine"] = broken
    result = bench("mine", "-o", f"path={tmp_path}/store", *SMALL)
    assert result.exit_code == 2
    assert result.output.strip().splitlines()[-1] == said
    left = [path for path in tmp_path.rglob("*") if path.is_file() and path.name not in ("lock", "usage")]
    assert left == []


def test_a_value_that_does_not_work_is_said_and_the_rest_goes_on(
    tmp_path: Path, offered: dict[str, type[Backend[Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lmcache_core.backends.disk.probe_io", lambda *args, **more: False)
    found = as_json(bench("disk", "-o", f"path={tmp_path}/store", *SMALL, "--json"))
    (problem,) = [run["problem"] for run in found["runs"] if run["options"] == {"direct": "on"}]
    assert "O_DIRECT does not work" in problem
    assert found["advice"]["options"] == {"direct": "off"}


@dataclass(frozen=True, slots=True, kw_only=True)
class SecretOptions:
    path: str
    password: str = field(default="", repr=False)


class WithPassword(DiskBackend):
    """Has an option that nobody may print."""

    api_version: ClassVar[tuple[int, int]] = (1, 0)
    Options: ClassVar[type] = SecretOptions

    def __init__(self, options: Any, context: Context) -> None:
        super().__init__(DiskBackend.Options(path=options.path), context)


def test_a_secret_is_not_printed(tmp_path: Path, offered: dict[str, type[Backend[Any]]]) -> None:
    offered["mine"] = WithPassword
    result = bench("mine", "-o", f"path={tmp_path}/store", "-o", "password=hunter2", *SMALL, "--quick")
    assert result.exit_code == 0, result.output
    assert 'password: "${PASSWORD}"' in result.output
    assert "hunter2" not in result.output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--sizes", "1x"), "--sizes 1x"),
        (("--sizes", "0"), "--sizes: 1 to"),
        (("--data", "1KiB"), "--data: from 1MiB to 64GiB"),
        (("--data", "1MiB", "--sizes", "1MiB"), "less than two records"),
        (("--timeout", "soon"), "--timeout soon"),
        (("-o", "pth=/x"), "pth"),
    ],
)
def test_what_cannot_be_measured_is_refused(arguments: tuple[str, ...], said: str, tmp_path: Path) -> None:
    result = bench("disk", "-o", f"path={tmp_path}", *arguments)
    assert result.exit_code == 2
    assert said in result.output


def test_host_memory_is_no_store() -> None:
    assert "memory is the host memory itself" in bench("memory").output


# The advice.


def speed(get: float, put: float = 1e9, p99_s: float = 0.001, nbytes: int = 1 << 20) -> Speed:
    latency = Latency(0.001, 0.001, p99_s)
    return Speed(nbytes, 4, 8, put, get, latency, latency, latency, 1e5, "")


def test_the_smallest_size_that_is_about_as_fast_as_any_is_recommended() -> None:
    runs = [Run({}, nbytes, speed(get, nbytes=nbytes)) for nbytes, get in ((1, 1e8), (2, 9.2e8), (3, 1e9))]
    assert advise(runs).record_nbytes == 2


def test_the_fewest_threads_that_are_about_as_fast_as_any_are_recommended() -> None:
    rates = {"2": 1e8, "4": 9.5e8, "16": 1e9}
    runs = [Run({}, 1, speed(1e9)), *(Run({"n": n}, 1, speed(rate, rate)) for n, rate in rates.items())]
    assert advise(runs).options == {"n": "4"}


@pytest.mark.parametrize(("buffered", "chosen"), [(1.9e9, "on"), (2.1e9, "off")])
def test_another_value_has_to_write_twice_as_fast_as_the_one_named_first(buffered: float, chosen: str) -> None:
    runs = [Run({}, 1, speed(1e9)), Run({"d": "on"}, 1, speed(1e9)), Run({"d": "off"}, 1, speed(9e9, buffered))]
    assert advise(runs).options == {"d": chosen}


def test_the_timeout_leaves_room_for_the_slowest_record() -> None:
    assert advise([Run({}, 1, speed(1e9))]).timeout_s == 2
    assert advise([Run({}, 1, speed(1e9, p99_s=0.5))]).timeout_s == 10
