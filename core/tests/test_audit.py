"""What a check of a store finds, on two backends: each kind of damage, nothing else, and what a repair leaves."""

from __future__ import annotations

import json
import os
import random
import stat
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import tiny
import xxhash
from serve import lmc
from tiny import RECORD, chain, model, open_local, store

from lmcache_core import Backend, BackendUnavailable, CacheError, ChunkKey, Context, audit, frame, manifest
from lmcache_core.audit import Finding, Progress
from lmcache_core.backend import Entry
from lmcache_core.backends.disk import DiskBackend, DiskOptions
from lmcache_core.cli.store import Line
from lmcache_core.layout import PAGE_NBYTES
from lmcache_core.testing.dict_backend import DictBackend, DictStore

CHUNKS = 6
INLINE = """
import os
from dataclasses import dataclass
from lmcache_core import Backend, BackendUnavailable, ChunkCorrupt, ChunkKey, Entry, Traits

@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    path: str

class Shelf(Backend):
    api_version = (1, 0)
    Options = Options
    traits = Traits(persistent=True, shared=True, alignment=8192)
    def _at(self, key):
        return os.path.join(self.options.path, key.text)
    def contains(self, key):
        return os.path.exists(self._at(key))
    def get(self, key, into):
        assert len(into) % 8192 == 0
        try:
            with open(self._at(key), "rb") as file:
                if os.fstat(file.fileno()).st_size > len(into):
                    raise ChunkCorrupt("longer than expected")
                return file.readinto(into)
        except FileNotFoundError:
            return None
        except PermissionError as error:
            raise BackendUnavailable(str(error)) from error
    def put(self, key, data):
        with open(self._at(key) + ".new", "wb") as file:
            file.write(data)
        os.replace(self._at(key) + ".new", self._at(key))
    def remove(self, key):
        try:
            os.unlink(self._at(key))
        except FileNotFoundError:
            return False
        return True
    def entries(self, shard_id=None):
        for name in os.listdir(self.options.path):
            if len(name) == 96:
                found = os.stat(os.path.join(self.options.path, name))
                yield Entry(ChunkKey.from_text(name), found.st_size, found.st_mtime)
"""
"""A second store, for the commands: another naming, another alignment, no batches of its own."""


class Shop:
    """A filled store of one kind, its records as files that a test may damage, and how the commands call it."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.kind = kind
        self.root = folder / "store"
        self.root.mkdir(mode=0o700)
        if kind == "disk":
            self.which = ["-o", f"path={self.root}"]
        else:
            plugin, config = folder / "shelf.py", folder / "shelf.yaml"
            plugin.write_text(INLINE)
            tier = {"name": "shelf", "backend": "inline:Shelf", "options": {"path": str(self.root)}}
            host = {"backend": "memory", "capacity": "8MiB"}
            config.write_text(json.dumps({"tiers": [host, tier], "plugins": {"inline": str(plugin)}}))
            self.which = ["--config", str(config), "--tier", "shelf"]
        self.prompts = [chain(CHUNKS), chain(CHUNKS, of=model(weights="w2"))]
        with self.open() as backend, open_local([backend]) as cache:
            for prompt in self.prompts:
                store(cache, prompt)
            assert cache.drain(30)

    @contextmanager
    def open(self) -> Iterator[Backend[Any]]:
        if self.kind == "disk":
            backend: Backend[Any] = DiskBackend(DiskOptions(path=str(self.root)), Context())
        else:
            names: dict[str, Any] = {}
            exec(INLINE, names)
            backend = names["Shelf"](names["Options"](path=str(self.root)), Context())
        try:
            yield backend
        finally:
            backend.close()

    def file(self, key: ChunkKey) -> Path:
        text = key.text
        return self.root / ("v1/" + "/".join((text[:32], text[32:34], text[32:])) if self.kind == "disk" else text)

    def key(self, prompt: int, chunk: int) -> ChunkKey:
        of = self.prompts[prompt]
        return of.keys(of.model.shards[0])[chunk]

    def listed(self) -> set[str]:
        with self.open() as backend:
            return {entry.key.text for entry in backend.entries()}  # type: ignore[attr-defined]

    def run(self, command: str, *more: str) -> tuple[int, dict[str, Any]]:
        result = lmc(command, *self.which, "--json", *more)
        return result.exit_code, json.loads(result.stdout)["stores"][0]


@pytest.fixture(params=["disk", "shelf"])
def shop(request: pytest.FixtureRequest, tmp_path: Path) -> Shop:
    return Shop(request.param, tmp_path)


def flip(path: Path, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


def test_a_sound_store_is_sound_and_counted_by_namespace(shop: Shop) -> None:
    code, found = shop.run("verify")
    assert code == 0
    assert (found["checked"], found["sound"], found["findings"]) == (2 * CHUNKS + 2, 2 * CHUNKS + 2, [])
    code, counted = shop.run("du")
    assert code == 0
    assert (counted["records"], counted["manifests"]) == (2 * CHUNKS, 2)
    assert counted["nbytes"] == 2 * CHUNKS * RECORD + counted["manifest_nbytes"]
    assert counted["nbytes_by_age"] == {"1 h": 2 * CHUNKS * RECORD, "1 d": 0, "7 d": 0, "older": 0}
    assert {n["family"]["weights"]: (n["records"], n["nbytes"]) for n in counted["namespaces"]} == {
        "w1": (CHUNKS, CHUNKS * RECORD),
        "w2": (CHUNKS, CHUNKS * RECORD),
    }
    text = lmc("du", *shop.which).stdout
    assert "org/tiny" in text
    assert "12 records" in text


def test_every_seeded_bit_flip_in_what_counts_is_found_and_repaired(shop: Shop) -> None:
    rng = random.Random(5)
    before = shop.listed()
    summed = [*range((PAGE_NBYTES - 8) * 8), *range(PAGE_NBYTES * 8, (PAGE_NBYTES + tiny.RAW) * 8)]
    flipped = {}
    for chunk, bit in enumerate(rng.sample(summed, CHUNKS)):
        key = shop.key(0, chunk)
        flip(shop.file(key), bit)
        flipped[key.text] = bit
    code, found = shop.run("verify")
    assert code == 1
    assert {f["key"] for f in found["findings"]} == set(flipped), flipped
    assert (found["broken"], found["sound"]) == (CHUNKS, CHUNKS + 2)
    assert shop.listed() == before, "a check removes nothing"
    code, found = shop.run("repair", "--dry-run")
    assert (code, found["removed"]) == (1, 0)
    assert shop.listed() == before
    code, found = shop.run("repair")
    assert (code, found["removed"], found["left"]) == (0, CHUNKS, 0)
    assert shop.listed() == before - set(flipped)
    assert shop.run("verify")[0] == 0
    with shop.open() as backend, open_local([backend]) as cache:
        assert tiny.load(cache, shop.prompts[0])[0] == 0
        assert tiny.load(cache, shop.prompts[1])[0] == CHUNKS


def _truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: PAGE_NBYTES + tiny.RAW // 2])


def _beheaded(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:100])


def _empty(path: Path) -> None:
    path.write_bytes(b"")


def _foreign(path: Path) -> None:
    path.write_bytes(b"\x89PNG and so on" * 1000)


def _foreign_and_short(path: Path) -> None:
    path.write_bytes(b"hello\n")


def _longer(path: Path) -> None:
    path.write_bytes(path.read_bytes() + bytes(PAGE_NBYTES))


DAMAGE = {
    "truncated": ("truncated", _truncated),
    "beheaded": ("truncated", _beheaded),
    "empty": ("truncated", _empty),
    "foreign": ("foreign", _foreign),
    "foreign and short": ("foreign", _foreign_and_short),
    "longer": ("damaged", _longer),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_each_kind_of_damage_has_its_name_and_is_removed_alone(shop: Shop, name: str) -> None:
    kind, spoil = DAMAGE[name]
    key = shop.key(1, 3)
    before = shop.listed()
    spoil(shop.file(key))
    code, found = shop.run("repair")
    assert code == 0
    (finding,) = found["findings"]
    assert (finding["key"], finding["kind"], finding["done"]) == (key.text, kind, "removed")
    assert shop.listed() == before - {key.text}


def test_a_record_under_anothers_key_is_misplaced_and_the_other_stays(shop: Shop) -> None:
    here, there = shop.key(0, 1), shop.key(0, 2)
    shop.file(there).write_bytes(shop.file(here).read_bytes())
    code, found = shop.run("repair")
    assert code == 0
    assert [(f["key"], f["kind"]) for f in found["findings"]] == [(there.text, "misplaced")]
    assert here.text in shop.listed()


def test_a_record_of_another_shard_with_a_forged_key_is_not_of_its_manifests_layout(shop: Shop) -> None:
    key = shop.key(0, 0)
    path = shop.file(key)
    data = bytearray(path.read_bytes())
    head = frame.parse(memoryview(data))
    other = frame.Frame(key, head.depth, bytes(16), head.encoded_nbytes, head.raw_nbytes, 1,
                        checksum_kind=head.checksum_kind, checksum=head.checksum)  # fmt: skip
    frame.pack(other, memoryview(data)[:PAGE_NBYTES])
    path.write_bytes(data)
    code, found = shop.run("verify")
    assert code == 1
    assert [(f["key"], f["kind"]) for f in found["findings"]] == [(key.text, "layout")]


def test_a_damaged_manifest_is_removed_and_its_records_stay(shop: Shop) -> None:
    key = manifest.key_of(shop.prompts[0].model.shards[0].shard_id)
    flip(shop.file(key), (PAGE_NBYTES + 3) * 8)
    before = shop.listed()
    _, counted = shop.run("du")
    assert sum(not n["family"] for n in counted["namespaces"]) == 1, "a shard that nobody describes is counted alone"
    code, found = shop.run("repair")
    assert code == 0
    assert [(f["key"], f["kind"]) for f in found["findings"]] == [(key.text, "damaged")]
    assert shop.listed() == before - {key.text}


def test_a_record_of_a_later_version_is_left_alone_and_said(shop: Shop) -> None:
    key = shop.key(0, 0)
    path = shop.file(key)
    data = bytearray(path.read_bytes())
    struct.pack_into("<H", data, 8, 2)
    struct.pack_into("<Q", data, PAGE_NBYTES - 16, xxhash.xxh3_64_intdigest(bytes(data[: PAGE_NBYTES - 16])))
    path.write_bytes(data)
    code, found = shop.run("repair")
    assert (code, found["left"]) == (1, 1)
    assert [(f["kind"], f["broken"], f["done"]) for f in found["findings"]] == [("other version", False, "")]
    assert key.text in shop.listed()


def test_files_that_are_no_records_are_neither_counted_nor_touched(shop: Shop) -> None:
    strangers = [shop.file(shop.key(0, 0)).with_name(name) for name in ("README", "x" * 64, "core.1234")]
    for path in strangers:
        path.write_text("mine")
    code, found = shop.run("repair")
    assert (code, found["checked"], found["findings"]) == (0, 2 * CHUNKS + 2, [])
    assert all(path.read_text() == "mine" for path in strangers)


def test_what_cannot_be_read_is_said_and_stays() -> None:
    class Faulty(DictBackend):
        def get(self, key: ChunkKey, into: memoryview) -> int | None:
            if key in bad:
                raise BackendUnavailable("no answer")
            return super().get(key, into)

    backend = Faulty()
    prompt = chain(20)
    bad = {prompt.keys(prompt.model.shards[0])[2]}
    with open_local([backend]) as cache:
        store(cache, prompt)
        assert cache.drain(30)
        known = audit.survey(backend, now=0.0)
        found = list(audit.check(backend, known, timeout_s=5.0, progress=Progress()))
        assert [(f.key, f.kind, f.broken) for f in found] == [(*bad, "unreadable", False)]
        with pytest.raises(ValueError, match="no reason"):
            audit.remove(backend, found[0], known, timeout_s=5.0)
        bad.update(backend.store.records)
        with pytest.raises(BackendUnavailable, match="16 reads in a row"):
            list(audit.check(backend, known, timeout_s=5.0, progress=Progress()))


def test_a_record_that_is_sound_when_read_again_stays() -> None:
    backend = DictBackend()
    prompt = chain(2)
    with open_local([backend]) as cache:
        store(cache, prompt)
        assert cache.drain(30)
        known = audit.survey(backend, now=0.0)
        key = prompt.keys(prompt.model.shards[0])[0]
        once = Finding(key, RECORD, "damaged", "as it was read the first time")
        assert audit.remove(backend, once, known, timeout_s=5.0) == "sound"
        assert backend.contains(key)
        gone = Finding(ChunkKey(bytes(48)), RECORD, "damaged", "")
        assert audit.remove(backend, gone, known, timeout_s=5.0) == "gone"


def test_memory_is_bounded_however_many_records_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    monkeypatch.setattr(audit, "aligned_buffer", _remembering(audit.aligned_buffer, sizes))
    monkeypatch.setattr(audit, "_BATCH_NBYTES", 4 * RECORD)
    batches: list[int] = []

    class Watched(DictBackend):
        def get_many(self, keys: Any, into: Any, *, timeout_s: float) -> Any:
            batches.append(len(keys))
            return super().get_many(keys, into, timeout_s=timeout_s)

    backend = Watched(store=DictStore())
    prompt = chain(50)
    with open_local([backend]) as cache:
        store(cache, prompt)
        assert cache.drain(30)
        known = audit.survey(backend, now=0.0)
        sizes.clear()
        batches.clear()
        calls: list[None] = []
        progress = Progress()
        found = audit.check(backend, known, timeout_s=5.0, progress=progress, on_progress=lambda: calls.append(None))
        assert list(found) == []
    assert (progress.checked, progress.sound) == (50, 50)
    assert max(batches) == 4
    assert len(calls) == len(batches) == 13
    assert max(sizes) <= 4 * RECORD


def _remembering(buffer: Callable[..., memoryview], sizes: list[int]) -> Callable[..., memoryview]:
    def remember(nbytes: int, backend: Backend[Any]) -> memoryview:
        sizes.append(nbytes)
        return buffer(nbytes, backend)

    return remember


def test_a_record_too_long_to_read_is_broken_only_if_its_layout_is_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(audit, "MAX_RECORD_NBYTES", 2 * RECORD)
    backend = DictBackend()
    prompt = chain(1)
    (key,) = prompt.keys(prompt.model.shards[0])
    backend.put(key, memoryview(bytes(9 * RECORD)))
    known = audit.survey(backend, now=0.0)
    (finding,) = audit.check(backend, known, timeout_s=5.0, progress=Progress())
    assert finding.kind == "too large"
    known.shards[key.shard_id].layout = tiny.LAYOUT
    (finding,) = audit.check(backend, known, timeout_s=5.0, progress=Progress())
    assert finding.kind == "layout"
    assert audit.remove(backend, finding, known, timeout_s=5.0) == "removed"


def test_ages_are_those_of_the_records() -> None:
    backend = DictBackend()
    prompt = chain(3)
    for age, key in zip((10.0, 5000.0, 1e6), prompt.keys(prompt.model.shards[0]), strict=True):
        backend.store.records[key] = (bytes(int(age)), 1e9 - age)
    found = audit.survey(backend, now=1e9, age_limits_s=(3600.0, 86_400.0))
    assert found.ages == [10, 5000, 1_000_000]
    (use,) = found.shards.values()
    assert (use.oldest, use.newest) == (1e9 - 1e6, 1e9 - 10)


def test_a_store_that_does_not_list_says_so() -> None:
    class Blind(DictBackend):
        entries = None  # type: ignore[assignment]

    with pytest.raises(CacheError, match="cannot list"):
        audit.survey(Blind(), now=0.0)


def test_a_store_that_is_not_there_is_an_error_and_is_not_made(tmp_path: Path) -> None:
    for command in ("du", "verify", "repair"):
        result = lmc(command, "-o", f"path={tmp_path}/nothing")
        assert result.exit_code == 2
        assert "there is no store" in result.output
    assert not list(tmp_path.iterdir())


def test_a_wrong_address_is_a_clear_error(tmp_path: Path) -> None:
    config = tmp_path / "c.yaml"
    config.write_text("tiers: [{backend: memory, capacity: 8MiB}, {backend: disk, options: {path: /nowhere/at/all}}]")
    for arguments, text in (
        (["disk", "--config", config], "not both"),
        (["memory"], "host memory of a running cache"),
        (["--config", config, "--tier", "dsik"], "did you mean 'disk'?"),
        (["--config", config], "there is no store"),
        (["disk"], "path"),
        (["dsik", "-o", "path=/x"], "did you mean 'disk'?"),
    ):
        result = lmc("verify", *arguments)
        assert result.exit_code == 2, arguments
        assert text in result.output
    config.write_text("{}")
    assert "no tier below the host memory" in lmc("verify", "--config", config).output


def test_a_check_beside_a_running_cache_finds_nothing_wrong_and_disturbs_nothing(tmp_path: Path) -> None:
    backend = DiskBackend(DiskOptions(path=str(tmp_path / "store")), Context())
    with open_local([backend], tier_capacity_nbytes=64 * RECORD) as cache:
        for seed in range(5):
            store(cache, chain(CHUNKS, seed=seed))
            assert lmc("repair", "-o", f"path={tmp_path}/store").exit_code == 0
        assert cache.drain(30)
        assert backend.used_nbytes == sum(entry.nbytes for entry in backend.entries())
        assert tiny.load(cache, chain(CHUNKS, seed=4))[0] == CHUNKS


def test_a_repair_gives_the_bytes_back_to_the_total(tmp_path: Path) -> None:
    shop = Shop("disk", tmp_path)
    flip(shop.file(shop.key(0, 0)), PAGE_NBYTES * 8)
    with shop.open() as backend:
        assert isinstance(backend, DiskBackend)
        before = backend.used_nbytes
        assert shop.run("repair")[0] == 0
        assert backend.used_nbytes == before - RECORD


def test_the_progress_line_is_for_terminals_and_not_too_often() -> None:
    class Terminal:
        text = ""

        def isatty(self) -> bool:
            return True

        def write(self, text: str) -> None:
            self.text += text

        def flush(self) -> None:
            pass

    now = [0.0]
    terminal: Any = Terminal()
    line = Line(terminal, lambda: now[0])
    for count in range(10):
        line.show(f"{count} %")
        now[0] += 0.0625
    assert [part for part in terminal.text.split("\r\x1b[K") if part] == ["0 %", "4 %", "8 %"]
    line.clear()
    assert terminal.text.endswith("\r\x1b[K")
    elsewhere: Any = Terminal()
    elsewhere.isatty = lambda: False
    Line(elsewhere).show("50 %")
    assert elsewhere.text == ""


def test_what_a_manifest_says_cannot_command_the_terminal(tmp_path: Path) -> None:
    backend = DiskBackend(DiskOptions(path=str(tmp_path / "store")), Context())
    prompt = chain(1, of=model(weights="w\x9b2J\u202e"))
    with open_local([backend]) as cache:
        store(cache, prompt)
        assert cache.drain(30)
    text = lmc("du", "-o", f"path={tmp_path}/store").stdout
    assert "w?2J?" in text


def test_the_store_of_a_check_keeps_its_modes(tmp_path: Path) -> None:
    shop = Shop("disk", tmp_path)
    assert shop.run("verify")[0] == 0
    assert {stat.S_IMODE(os.stat(path).st_mode) for path in shop.root.rglob("*") if path.is_file()} == {0o600}


def test_entries_of_no_length_are_judged_without_a_read_of_nothing() -> None:
    backend = DictBackend()
    key = ChunkKey(bytes(range(48)))
    backend.put(key, memoryview(b""))
    known = audit.survey(backend, now=0.0)
    assert [f.kind for f in audit.check(backend, known, timeout_s=5.0, progress=Progress())] == ["truncated"]
    assert audit._room(Entry(key, 0, 0.0), None) == PAGE_NBYTES
