"""The opt-in trace: off unless configured, bounded, for its owner's eyes, and enough to say where requests parted.

Without tokens unless they are asked for too.
"""

from __future__ import annotations

import base64
import json
import os
import stat
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
from serve import Serve, lmc, write_config
from tiny import CHUNK, RECORD, model, store

from lmcache_core import CacheError, Chain, ConfigError, Hit, load_config, open_cache
from lmcache_core import trace as trace_module
from lmcache_core.config import parse_config
from lmcache_core.trace import Trace, TraceConfig, read

TOKENS = list(range(7, 7 + 4 * CHUNK + 3))


def configured(folder: Path, **trace: Any) -> Path:
    path = folder / "c.yaml"
    tiers = [{"name": "host", "backend": "memory", "capacity": 64 * RECORD}]
    path.write_text(json.dumps({"chunk_tokens": CHUNK, "tiers": tiers, "trace": trace}))
    return path


def hit(of: Chain, request: str = "r") -> Hit:
    return Hit(of, request, 0, (), False, "boot", 1)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_nothing_is_written_unless_it_is_asked_for(tmp_path: Path) -> None:
    with open_cache(configured(tmp_path)) as cache:
        assert cache.trace is None
        cache.lookup(cache.chain(TOKENS, model()), "r")
        cache.release("r")
    assert [path.name for path in tmp_path.iterdir()] == ["c.yaml"]


def test_two_past_requests_are_compared_token_by_token_and_by_namespace(tmp_path: Path) -> None:
    file = tmp_path / "trace"
    other = [*TOKENS]
    other[2 * CHUNK + 1] += 1
    with open_cache(configured(tmp_path, path=str(file), tokens=True)) as cache:
        assert isinstance(cache, tiny.LocalCache)
        first = cache.chain(TOKENS, model())
        cache.lookup(first, "one")
        store(cache, first)
        cache.lookup(cache.chain(np.array(other), model()), "two")
        cache.lookup(cache.chain(TOKENS, model(kv_dtype="int8", adapter="x@1")), "three")
        for name in ("one", "two", "three"):
            cache.release(name)
    assert mode(file) == 0o600
    found = json.loads(lmc("explain", "one", "two", "--trace", file, "--json").stdout)
    assert found["difference"]["common_tokens"] == 2 * CHUNK + 1
    assert (found["difference"]["common_chunks"], found["difference"]["lost_chunks"]) == (2, 2)
    text = lmc("explain", "one", "two", "--trace", file).stdout
    assert "B  " in text
    assert "2 of 4 chunks were hit" in text
    assert f"token 33 (chunk 2): A {TOKENS[33]}, B {other[33]}" in text
    text = lmc("explain", "one", "three", "--trace", file).stdout
    assert "A and B are equal" in text
    assert "differ in kv_dtype: float16 | int8; adapter: - | x@1" in text
    result = lmc("explain", "one", "nobody", "--trace", file)
    assert result.exit_code == 2
    assert "no request 'nobody'" in result.output


def test_without_being_told_to_a_trace_has_hashes_and_lengths_and_no_token(tmp_path: Path) -> None:
    file = tmp_path / "trace"
    secret = [71_234_567 + index for index in range(4 * CHUNK)]
    with open_cache(configured(tmp_path, path=str(file))) as cache:
        assert isinstance(cache, tiny.LocalCache)
        first = cache.chain(secret, model(salt_id=b"tenantsalttenant"))
        cache.lookup(first, "one")
        store(cache, first)
        second = cache.chain([*secret[: 2 * CHUNK], *TOKENS], model(salt_id=b"tenantsalttenant"))
        cache.lookup(second, "two")
        for name in ("one", "two"):
            cache.release(name)
    assert mode(file) == 0o600
    one, two = (json.loads(line) for line in file.read_text().splitlines())
    family = first.model.family
    assert one["family"] == {"family_id": family.family_id.hex(), "chunk_tokens": CHUNK}
    assert (two["input_tokens"], two["chunks"], two["hit_chunks"], two["result"]) == (6 * CHUNK + 3, 6, 2, "partial")
    assert one["result"] == "miss"
    assert base64.b64decode(two["digests"]) == b"".join(digest[:8] for digest in second.digests)
    for hidden in (b'tokens": "', b"packed", b"tenantsalttenant".hex().encode(), str(secret[0]).encode()):
        assert hidden not in file.read_bytes()
    text = lmc("explain", "one", "two", "--trace", file).output
    assert "it has no tokens of request 'one'; `trace: {tokens: true}` writes them" in text
    assert "the first 2 chunks are equal, of 4 and 6" in text
    assert lmc("explain", "one", "--trace", file).exit_code == 2


def test_the_daemon_writes_the_hashes_and_engines_the_tokens(tmp_path: Path) -> None:
    settings = json.loads(write_config(tmp_path).read_text())
    for tokens in (False, True):
        file = tmp_path / f"trace {tokens}"
        path = tmp_path / "lmcache.yaml"
        path.write_text(json.dumps(settings | {"trace": {"path": str(file), "tokens": tokens}}))
        with Serve(path) as daemon:
            daemon.said("serving on")
            with open_cache(path) as cache:
                made = cache.chain(TOKENS, model())
                for _ in range(3):
                    cache.lookup_answered(made, "asked again", timeout_s=30.0)
                cache.release("asked again")
            daemon.stop()
        (line,) = (json.loads(line) for line in file.read_text().splitlines())
        assert mode(file) == 0o600
        assert line["request"] == ("asked again" if tokens else "1/asked again")
        assert (line["input_tokens"], line["chunks"], "tokens" in line) == (len(TOKENS), 4, tokens)
        assert read(file, ["asked again"])["asked again"].tokens == (TOKENS if tokens else None)


def test_a_daemon_that_cannot_write_its_trace_does_not_start(tmp_path: Path) -> None:
    path = write_config(tmp_path)
    settings = json.loads(path.read_text())
    path.write_text(json.dumps(settings | {"trace": {"path": str(tmp_path / "no" / "such")}}))
    result = lmc("serve", "--config", path)
    assert result.exit_code == 2
    assert "trace.path" in result.output


def test_a_request_that_was_asked_again_is_there_with_its_last_prompt(tmp_path: Path) -> None:
    trace = Trace(TraceConfig(str(tmp_path / "t"), tokens=True))
    for tokens in (TOKENS, TOKENS[:CHUNK]):
        made = Chain.of(model(), tokens)
        trace.made(made, tokens)
        trace.answered(hit(made))
    trace.close()
    assert read(tmp_path / "t", ["r"])["r"].tokens == TOKENS[:CHUNK]


def test_a_prompt_that_was_extended_is_known_up_to_there_and_says_so(tmp_path: Path) -> None:
    trace = Trace(TraceConfig(str(tmp_path / "t"), tokens=True))
    made = Chain.of(model(), TOKENS[: 2 * CHUNK])
    trace.made(made, TOKENS[: 2 * CHUNK])
    trace.answered(hit(made.extend(TOKENS[2 * CHUNK :])))
    trace.close()
    found = read(tmp_path / "t", ["r"])["r"]
    assert (found.tokens, found.complete) == (TOKENS[: 2 * CHUNK], False)
    assert "only its first 32 tokens are known" in lmc("explain", "r", "--trace", tmp_path / "t").stdout


def test_the_files_never_exceed_their_limit_and_the_newest_are_there(tmp_path: Path) -> None:
    limit = 1 << 16
    trace = Trace(TraceConfig(str(tmp_path / "t"), limit, tokens=True))
    rng = np.random.default_rng(1)
    for number in range(200):
        made = Chain.of(model(), rng.integers(0, 1 << 31, 400))
        trace.made(made, rng.integers(0, 1 << 31, 400))
        while trace._queue.full():
            threading.Event().wait(0.001)
        trace.answered(hit(made, f"r{number}"))
    trace.close()
    files = sorted(tmp_path.iterdir())
    assert [file.name for file in files] == ["t", "t.1"]
    assert sum(file.stat().st_size for file in files) <= limit
    assert {mode(file) for file in files} == {0o600}
    found = read(tmp_path / "t", [f"r{n}" for n in range(200)])
    assert {"r199", "r198"} <= set(found)
    assert "r0" not in found


def test_a_line_larger_than_the_file_is_left_out(tmp_path: Path) -> None:
    trace = Trace(TraceConfig(str(tmp_path / "t"), 1 << 16, tokens=True))
    tokens = np.random.default_rng(2).integers(0, 1 << 31, 40_000)
    made = Chain.of(model(), tokens)
    trace.made(made, tokens)
    trace.answered(hit(made))
    trace.close()
    assert (tmp_path / "t").stat().st_size == 0


def test_two_processes_worth_of_writers_share_a_file(tmp_path: Path) -> None:
    limit = 1 << 16
    one, two = (Trace(TraceConfig(str(tmp_path / "t"), limit, tokens=True)) for _ in range(2))
    for number in range(60):
        for name, trace in (("a", one), ("b", two)):
            tokens = np.random.default_rng(number).integers(0, 1 << 31, 300)
            made = Chain.of(model(), tokens)
            trace.made(made, tokens)
            trace.answered(hit(made, f"{name}{number}"))
    one.close()
    two.close()
    files = sorted(tmp_path.iterdir())
    assert [file.name for file in files] == ["t", "t.1"]
    assert sum(file.stat().st_size for file in files) <= limit
    for file in files:
        for line in file.read_bytes().splitlines():
            json.loads(line)
    found = read(tmp_path / "t", [f"{name}{n}" for name in "ab" for n in range(60)])
    assert {"a59", "b59"} & set(found), "whoever wrote last is there"
    assert len(found) > 10


def test_memory_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_module, "MAX_PROMPTS", 5)
    monkeypatch.setattr(trace_module, "MAX_KEPT_NBYTES", 1000)
    trace = Trace(TraceConfig(str(tmp_path / "t"), tokens=True))
    for number in range(20):
        trace.made(Chain.of(model(), [number]), [number])
    assert len(trace._prompts) == 5
    for number in range(20):
        trace.made(Chain.of(model(), range(number, number + 100)), range(number, number + 100))
    assert trace._kept_nbytes == sum(map(len, trace._prompts.values())) <= 1000
    trace.close()


def test_a_file_that_is_not_ours_or_no_file_is_refused_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    os.mkfifo(tmp_path / "fifo")
    for name in ("link", "fifo", "no/such/folder"):
        with pytest.raises(ConfigError, match=r"trace\.path"):
            open_cache(configured(tmp_path, path=str(tmp_path / name)))
    assert not (tmp_path / "elsewhere").exists()
    wide = tmp_path / "wide"
    wide.write_text("")
    wide.chmod(0o644)
    Trace(TraceConfig(str(wide))).close()
    assert mode(wide) == 0o600


def test_a_disk_that_fails_costs_the_trace_and_says_so_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    trace = Trace(TraceConfig(str(tmp_path / "t"), tokens=True))

    def fail(line: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(trace._file, "append", fail)
    for number in range(3):
        made = Chain.of(model(), [number] * CHUNK)
        trace.made(made, [number] * CHUNK)
        trace.answered(hit(made))
    trace.close()
    assert caplog.text.count("No space left on device") == 1


def test_a_trace_that_is_damaged_or_missing_is_no_traceback(tmp_path: Path) -> None:
    with pytest.raises(CacheError, match="there is no trace"):
        read(tmp_path / "t", ["r"])
    (tmp_path / "t").write_bytes(b'{"request": "r"}\nnot json\n\xff\n{"request": "r", "tokens": "!"}\n[]\n')
    assert read(tmp_path / "t", ["r"]) == {}


def test_the_setting_is_read_with_its_units() -> None:
    config = parse_config("trace: {path: /tmp/x, max: 1MiB}")
    assert (config.trace.path, config.trace.max_nbytes, config.trace.tokens) == ("/tmp/x", 1 << 20, False)
    assert parse_config("trace: {path: /tmp/x, tokens: true}").trace.tokens
    assert parse_config("", environ={"LMCACHE__TRACE__PATH": "/tmp/y"}).trace.path == "/tmp/y"
    assert load_config(environ={}).trace.path == ""
    with pytest.raises(ConfigError, match="at least 64KiB"):
        parse_config("trace: {path: /tmp/x, max: 1kB}")
