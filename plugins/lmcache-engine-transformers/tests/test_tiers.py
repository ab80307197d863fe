"""Prefixes that come back from lower tiers, come late, come damaged or do not come."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import CHUNK, GREEDY, difference, llama, prompt, write_config

from lmcache_core import CacheError, ConfigError, Job, LocalCache
from lmcache_engine_transformers import Limits, PrefixCache, Unsupported, open_prefix_cache

IDS = prompt(4 * CHUNK + 3)
CHILD = """
import json, sys
from conftest import CHUNK, GREEDY, llama, prompt
from lmcache_engine_transformers import open_prefix_cache
with open_prefix_cache(llama(), sys.argv[1], name="tiny") as prefix:
    output, report = prefix.generate(prompt(4 * CHUNK + 3), **GREEDY)
print(json.dumps([report.hit_tokens, report.resident_tokens, [step.tolist() for step in output.logits]]))
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return write_config(tmp_path)


@pytest.fixture
def stored(config: Path, model: Any, tmp_path: Path) -> list[Path]:
    """The files of the four chunks of IDS, in the order of the chain."""
    with open_prefix_cache(model, config, name="tiny") as prefix:
        prefix.generate(IDS, max_new_tokens=1)
        assert prefix.cache.drain(10)
        chain = prefix.cache.chain(IDS[0].numpy(), prefix.model_key())
    files = {path.name: path for path in (tmp_path / "store").rglob("*") if path.is_file()}
    (shard,) = chain.model.shards
    return [files[key.digest.hex()] for key in chain.keys(shard)]


def generated(config: Path, model: Any) -> tuple[Any, Any]:
    with open_prefix_cache(model, config, name="tiny") as prefix:
        return prefix.generate(IDS, **GREEDY)


def test_a_new_cache_finds_on_disk_what_an_earlier_one_stored(stored: list[Path], config: Path, model: Any) -> None:
    output, report = generated(config, model)
    assert (report.hit_tokens, report.resident_tokens) == (4 * CHUNK, 0)
    assert difference(output, model.generate(IDS, **GREEDY)) < 1e-4


def test_a_prefix_that_is_dearer_to_load_than_to_compute_is_computed(
    stored: list[Path], tmp_path: Path, model: Any
) -> None:
    config = write_config(tmp_path, admission="auto")
    with open_prefix_cache(model, config, name="tiny", store_generated=False) as prefix:
        for seed in range(20):  # prefills, from which the cache learns what computing takes
            prefix.generate(prompt(4 * CHUNK + 3, seed=100 + seed), max_new_tokens=1)
        assert isinstance(prefix.cache, LocalCache)
        for _ in range(20):
            prefix.cache._pool.tiers[0].costs.sample(sum(path.stat().st_size for path in stored), 1000.0)
        output, report = prefix.generate(IDS, **GREEDY)
        assert (report.hit_tokens, report.refused_tokens) == (0, 4 * CHUNK)
        assert prefix.cache.metrics.count("lookups", result="refused") == 1
        assert difference(output, model.generate(IDS, **GREEDY)) < 1e-4


def test_a_new_process_finds_on_disk_what_an_earlier_one_stored(stored: list[Path], config: Path, model: Any) -> None:
    child = subprocess.run(
        [sys.executable, "-c", CHILD, str(config)],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    hit_tokens, resident_tokens, steps = json.loads(child.stdout.splitlines()[-1])
    assert (hit_tokens, resident_tokens) == (4 * CHUNK, 0)
    reference = torch.stack(model.generate(IDS, **GREEDY).logits)
    assert float((torch.tensor(steps) - reference).abs().max()) < 1e-4


@pytest.mark.parametrize("damaged", range(4))
def test_a_damaged_record_ends_the_prefix_before_it(
    stored: list[Path], config: Path, model: Any, damaged: int, caplog: pytest.LogCaptureFixture
) -> None:
    raw = bytearray(stored[damaged].read_bytes())
    raw[4096 + 100] ^= 1
    stored[damaged].write_bytes(raw)
    output, report = generated(config, model)
    assert report.hit_tokens == damaged * CHUNK
    assert difference(output, model.generate(IDS, **GREEDY)) < 1e-4
    assert any("chunks restored" in record.message for record in caplog.records)


def test_what_was_damaged_is_stored_again(stored: list[Path], config: Path, model: Any) -> None:
    stored[2].write_bytes(stored[2].read_bytes()[:5000])
    assert generated(config, model)[1].hit_tokens == 2 * CHUNK
    assert generated(config, model)[1].hit_tokens == 4 * CHUNK


def test_a_record_of_another_tenant_or_model_under_the_same_name_is_not_read(
    stored: list[Path], config: Path, model: Any
) -> None:
    """A file copied onto another's name has the right length and checksum, and the wrong key."""
    stored[1].write_bytes(stored[0].read_bytes())
    output, report = generated(config, model)
    assert report.hit_tokens == CHUNK
    assert difference(output, model.generate(IDS, **GREEDY)) < 1e-4


def test_other_weights_under_the_same_name_find_nothing_and_the_old_ones_all(
    stored: list[Path], config: Path, model: Any
) -> None:
    assert generated(config, llama(seed=5))[1].hit_tokens == 0
    assert generated(config, model)[1].hit_tokens == 4 * CHUNK


class Late(LocalCache):
    """A cache whose loads do not end before they are let go."""

    held: list[Job]

    def retrieve(self, *args: Any, **options: Any) -> Job:
        job = super().retrieve(*args, **options)
        never = Job(job.job_id)
        self.held.append(job)
        return never


def test_a_load_that_is_late_costs_its_limit_and_the_prompt_is_computed(
    prefix: PrefixCache, cache: LocalCache, model: Any
) -> None:
    prefix.generate(IDS, **GREEDY)
    prefix.limits = Limits(restore_timeout_s=0.01)
    cache.__class__, cache.held = Late, []  # type: ignore[attr-defined]
    output, report = prefix.generate(IDS, **GREEDY)
    assert len(cache.held) == 1  # type: ignore[attr-defined]
    assert report.hit_tokens == 0
    assert difference(output, model.generate(IDS, **GREEDY)) < 1e-4
    assert cache.status().records_in_use == 0


def test_a_cache_that_fails_costs_no_request(
    prefix: PrefixCache, cache: LocalCache, model: Any, caplog: pytest.LogCaptureFixture
) -> None:
    prefix.generate(IDS, **GREEDY)
    cache.close()
    output, report = prefix.generate(IDS, **GREEDY)
    assert report.hit_tokens == 0
    assert difference(output, model.generate(IDS, **GREEDY)) == 0.0
    assert any(r.levelno == logging.WARNING and "closed" in r.message for r in caplog.records)


def test_a_request_that_fails_leaves_nothing_leased(prefix: PrefixCache, cache: LocalCache) -> None:
    prefix.generate(IDS, max_new_tokens=1)

    def broken(batch: int, ids: torch.Tensor) -> list[int]:
        raise RuntimeError("a caller's own mistake")

    with pytest.raises(RuntimeError, match="own mistake"):
        prefix.generate(IDS, max_new_tokens=1, prefix_allowed_tokens_fn=broken)
    assert cache.status().records_in_use == 0
    assert prefix.restore(IDS).hit_tokens == 4 * CHUNK
    assert cache.status().records_in_use == 0


def test_the_next_request_finds_what_the_one_before_is_still_storing(prefix: PrefixCache) -> None:
    for seed in range(8):
        ids = prompt(2 * CHUNK + 1, seed=seed)
        prefix.generate(ids, max_new_tokens=1)
        assert prefix.generate(ids, max_new_tokens=1).report.hit_tokens == 2 * CHUNK


def test_what_was_stored_last_is_on_disk_when_the_cache_is_closed(config: Path, model: Any) -> None:
    for seed in range(5):
        ids = prompt(12 * CHUNK, seed=seed)
        with open_prefix_cache(model, config, name="tiny") as prefix:
            prefix.generate(ids, max_new_tokens=1)
        with open_prefix_cache(model, config, name="tiny") as prefix:
            assert prefix.restore(ids).hit_tokens == 12 * CHUNK - 1


def test_a_report_adds_up(prefix: PrefixCache) -> None:
    cold = prefix.generate(IDS, max_new_tokens=1).report
    assert cold.store is not None
    stored = cold.store.wait(10)
    assert stored is not None
    assert (stored.ok_chunks, stored.skipped) == (4, 0)
    warm = prefix.generate(IDS, max_new_tokens=1).report
    assert (warm.prompt_tokens, warm.hit_tokens, warm.resident_tokens) == (4 * CHUNK + 3, 4 * CHUNK, 4 * CHUNK)
    assert warm.nbytes == stored.nbytes == 4 * CHUNK * 3 * 2 * 2 * 8 * 4
    assert warm.store is None
    assert 0 < warm.lookup_s + warm.restore_s <= warm.ttft_s
    assert cold.uncached == warm.uncached == ""


def test_a_model_that_is_refused_leaves_no_cache_open(config: Path) -> None:
    model = llama()
    model.train()
    with pytest.raises(Unsupported):
        open_prefix_cache(model, config, name="tiny")


def test_a_wrong_configuration_is_named(tmp_path: Path, model: Any) -> None:
    path = tmp_path / "wrong.yaml"
    path.write_text("chunk_tokens: 16\ntiers:\n  - {backend: memory, capasity: 1MiB}\n")
    with pytest.raises(ConfigError, match=r"wrong\.yaml:3: .*capasity"):
        open_prefix_cache(model, path)


def test_errors_of_the_adapter_are_errors_of_the_cache() -> None:
    assert issubclass(Unsupported, CacheError)


def test_requests_from_several_threads_get_their_own_answers(prefix: PrefixCache, model: Any) -> None:
    from concurrent.futures import ThreadPoolExecutor

    prompts = [torch.cat([IDS[:, : 2 * CHUNK], prompt(CHUNK + n, seed=n)], dim=1) for n in range(4)]
    references = [model.generate(ids, **GREEDY) for ids in prompts]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(3):
            outputs = list(pool.map(lambda ids: prefix.generate(ids, **GREEDY).output, prompts))
            assert max(map(difference, outputs, references)) < 1e-4
