"""`lmc config migrate`: what maps is carried over and valid, what does not is named with its reason, secrets leave."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from lmcache_core.cli import main
from lmcache_core.cli.incumbent import migrate
from lmcache_core.config import CacheConfig, parse_config
from lmcache_core.errors import ConfigError

KEYS = [
    "app_id",
    "audit_actual_remote_url",
    "blend_check_layers",
    "blend_min_tokens",
    "blend_recompute_ratios",
    "blend_special_str",
    "blend_thresholds",
    "blocking_timeout_secs",
    "cache_policy",
    "chunk_size",
    "chunk_statistics_auto_exit_target_unique_chunks",
    "chunk_statistics_auto_exit_timeout_hours",
    "chunk_statistics_auto_start_statistics",
    "chunk_statistics_strategy",
    "controller_pull_url",
    "controller_reply_url",
    "controller_url",
    "enable_async_loading",
    "enable_blending",
    "enable_chunk_statistics",
    "enable_controller",
    "enable_hidden_state_cache",
    "enable_kv_events",
    "enable_lazy_memory_allocator",
    "enable_p2p",
    "enable_pd",
    "enable_scheduler_bypass_lookup",
    "enable_xpyd",
    "external_backends",
    "external_lookup_client",
    "extra_config",
    "gds_backend",
    "gds_buffer_size",
    "gds_path",
    "gds_path_sharding",
    "hidden_state_layers",
    "hidden_states_retrieve_mode",
    "hit_miss_ratio",
    "internal_api_server_enabled",
    "internal_api_server_host",
    "internal_api_server_include_index_list",
    "internal_api_server_port_start",
    "internal_api_server_socket_path_prefix",
    "lazy_memory_expand_trigger_ratio",
    "lazy_memory_initial_ratio",
    "lazy_memory_safe_size",
    "lazy_memory_step_ratio",
    "lmcache_instance_id",
    "lmcache_worker_heartbeat_delay_time",
    "lmcache_worker_heartbeat_time",
    "lmcache_worker_ids",
    "lmcache_worker_port",
    "lmcache_worker_ports",
    "local_cpu",
    "local_cpu_use_hugepages",
    "local_disk",
    "local_disk_path_sharding",
    "lookup_server_worker_ids",
    "lookup_timeout_ms",
    "maru_path",
    "maru_pool_size",
    "max_hidden_state_cpu_size",
    "max_local_cpu_size",
    "max_local_disk_size",
    "min_retrieve_tokens",
    "mp_host",
    "mp_port",
    "nixl_backends",
    "nixl_buffer_device",
    "nixl_buffer_size",
    "nixl_peer_alloc_port",
    "nixl_peer_host",
    "nixl_peer_init_port",
    "nixl_peer_port",
    "nixl_proxy_host",
    "nixl_proxy_port",
    "nixl_role",
    "numa_mode",
    "p2p_host",
    "p2p_init_ports",
    "p2p_lookup_ports",
    "pd_allocation_timeout_sec",
    "pd_backend_mode",
    "pd_bidirectional",
    "pd_buffer_device",
    "pd_buffer_size",
    "pd_condition_poll_interval_sec",
    "pd_max_prefill_len",
    "pd_peer_alloc_port",
    "pd_peer_host",
    "pd_peer_init_port",
    "pd_peer_query_port",
    "pd_proxy_host",
    "pd_proxy_port",
    "pd_role",
    "pd_shutdown_timeout_sec",
    "pd_skip_proxy_notification",
    "pin_check_interval_sec",
    "pin_timeout_sec",
    "plugin_locations",
    "pre_caching_hash_algorithm",
    "priority_limit",
    "py_enable_gc",
    "remote_config_url",
    "remote_serde",
    "remote_storage_plugins",
    "remote_url",
    "reserve_local_cpu_size",
    "retrieve_locations",
    "run_script_api_enabled",
    "runtime_plugin_locations",
    "save_decode_cache",
    "save_unfull_chunk",
    "script_allowed_imports",
    "storage_plugins",
    "store_location",
    "transfer_channel",
    "use_gds",
    "use_gpu_connector_v3",
    "use_layerwise",
]
"""Every key that LMCache 0.5.6 reads."""


def lmc(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["config", *map(str, arguments)])


def config(theirs: dict[str, Any]) -> CacheConfig:
    made = migrate(theirs)
    return parse_config(yaml.safe_dump(made.config), environ=dict.fromkeys(made.environ, "from the environment"))


def noted(theirs: dict[str, Any]) -> dict[str, str]:
    return {note.key: note.why for note in migrate(theirs).notes}


def test_every_key_of_the_other_cache_is_carried_over_or_has_a_reason() -> None:
    carried = []
    for key in KEYS:
        notes = noted({key: {} if key == "extra_config" else "1"})
        if key in notes:
            assert "not a setting" not in notes[key], key
        else:
            carried.append(key)
    assert set(carried) == {
        "blocking_timeout_secs", "chunk_size", "extra_config", "local_cpu", "max_local_cpu_size",
        "max_local_disk_size", "pin_timeout_sec",
    }  # fmt: skip


def test_memory_disk_and_redis_are_carried_over() -> None:
    theirs = {
        "chunk_size": 128, "local_cpu": True, "max_local_cpu_size": 40.5, "local_disk": "file:///mnt/cache",
        "max_local_disk_size": 100, "remote_url": "rediss://user:p%40ss@cache:6380", "remote_serde": "naive",
        "cache_policy": "LRU", "blocking_timeout_secs": 3, "pin_timeout_sec": 90,
    }  # fmt: skip
    made = migrate(theirs)
    assert made.notes == []
    assert made.environ == ["REDIS_PASSWORD"]
    ours = config(theirs)
    host, disk, remote = ours.tiers
    assert (ours.chunk_tokens, ours.lease_timeout_s) == (128, 90)
    assert (host.backend, host.capacity_nbytes, host.policy) == ("memory", 40.5 * (1 << 30), "lru")
    assert (disk.backend, disk.capacity_nbytes, disk.timeout_s) == ("disk", 100 << 30, 3)
    assert remote.backend == "redis"
    assert made.config["tiers"][1]["options"] == {"path": "/mnt/cache"}
    assert made.config["tiers"][2]["options"] == {
        "url": "rediss://cache:6380", "username": "user", "password": "${REDIS_PASSWORD}",
    }  # fmt: skip


def test_nothing_written_means_its_defaults() -> None:
    ours = config({})
    assert [(tier.backend, tier.capacity_nbytes) for tier in ours.tiers] == [("memory", 5 << 30)]
    assert ours.chunk_tokens == 256


@pytest.mark.parametrize(
    ("url", "extra", "backend", "options"),
    [
        ("redis://h:1/2", {}, "redis", {"url": "redis://h:1/2"}),
        ("redis-cluster://a:1,b:2", {}, "redis", {"url": "redis://a:1,b:2", "cluster": True}),
        ("resp://h:1", {"username": "u"}, "redis", {"url": "redis://h:1", "username": "u"}),
        ("unix:///run/redis.sock", {}, "redis", {"url": "unix:///run/redis.sock"}),
        ("valkey://h:1", {"password": "x"}, "valkey", {"url": "valkey://h:1", "password": "${VALKEY_PASSWORD}"}),
        ("s3://bucket.s3.eu-west-1.amazonaws.com/kv/a/", {}, "s3",
         {"bucket": "bucket", "region": "eu-west-1", "prefix": "kv/a"}),
        ("s3://bucket", {"s3_region": "us-east-2", "aws_access_key_id": "A", "aws_secret_access_key": "S"}, "s3",
         {"bucket": "bucket", "region": "us-east-2", "access_key_id": "${AWS_ACCESS_KEY_ID}",
          "secret_access_key": "${AWS_SECRET_ACCESS_KEY}"}),
        ("fs://h:0/mnt/shared", {}, "disk", {"path": "/mnt/shared"}),
        ("azure://container", {}, "fsspec", {"url": "az://container"}),
    ],
)  # fmt: skip
def test_a_remote_store_becomes_a_tier(url: str, extra: dict[str, str], backend: str, options: dict[str, Any]) -> None:
    made = migrate({"remote_url": url, "extra_config": extra})
    tier = made.config["tiers"][-1]
    assert (tier["backend"], tier["options"]) == (backend, options)
    assert not [note for note in made.notes if note.key.startswith("extra_config")]
    config({"remote_url": url, "extra_config": extra})


@pytest.mark.parametrize(
    ("theirs", "key", "says"),
    [
        ({"remote_url": "redis-sentinel://a:1"}, "remote_url", "master: NAME"),
        ({"remote_url": "lm://h:1"}, "remote_url", "no counterpart"),
        ({"remote_url": "mooncakestore://h:1"}, "remote_url", "no backend here is known to speak mooncakestore"),
        ({"remote_url": "redis://h", "remote_serde": "cachegen"}, "remote_serde", "lossy"),
        ({"cache_policy": "MRU"}, "cache_policy", "no such policy"),
        ({"local_cpu": False}, "local_cpu", "a cache needs a tier"),
        ({"local_cpu": False, "remote_url": "redis://h"}, "local_cpu", "staging memory (1GiB)"),
        ({"local_disk": "/a,/b", "max_local_disk_size": 1}, "local_disk", "one directory serves every process"),
        ({"local_disk": "/a"}, "max_local_disk_size", "state a capacity"),
        ({"local_disk": "kv", "max_local_disk_size": 1}, "local_disk", "absolute path"),
        ({"extra_config": {"nvme": 1}}, "extra_config.nvme", "no counterpart"),
        ({"chunksize": 3}, "chunksize", "not a setting of LMCache 0.5; did you mean 'chunk_size'?"),
    ],
)
def test_what_does_not_map_is_named_with_its_reason(theirs: dict[str, Any], key: str, says: str) -> None:
    assert says in noted(theirs)[key]
    config(theirs)


def test_no_secret_is_printed_or_written(tmp_path: Path) -> None:
    file = tmp_path / "theirs.yaml"
    secrets = ("hunter2", "AKIASECRET")
    file.write_text(
        f"remote_url: redis-sentinel://u:{secrets[0]}@h\nextra_config: {{aws_secret_access_key: {secrets[1]}}}\n"
    )
    result = lmc("migrate", file)
    assert result.exit_code == 0, result.output
    assert not [secret for secret in secrets if secret in result.output]
    assert "redis-sentinel://u:***@h" in result.output


def test_the_command_writes_a_new_file_that_the_check_accepts(tmp_path: Path) -> None:
    file, new = tmp_path / "theirs.yaml", tmp_path / "ours.yaml"
    file.write_text("chunk_size: 64\nlocal_cpu: true\nmax_local_cpu_size: 0.25\nsave_decode_cache: true\n")
    result = lmc("migrate", file, "--output", new)
    assert result.exit_code == 0, result.output
    assert "not carried over: save_decode_cache: True: " in result.output
    assert "#   save_decode_cache: True: " in new.read_text()
    assert lmc("check", "--config", new).exit_code == 0
    before = new.read_text()
    again = lmc("migrate", file, "--output", new)
    assert again.exit_code == 2
    assert "is there already" in again.output
    assert new.read_text() == before


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("- a\n- b\n", "must be a mapping"),
        ("a: [", "is not YAML"),
        ("!!python/object/apply:os.system [true]", "is not YAML"),
        ("1: 2", "must be a mapping"),
        ("chunk_size: many", "chunk_size: 'many' is not a number"),
        ("max_local_cpu_size: -3", "is not a size in GiB"),
        ("max_local_cpu_size: .nan", "is not a size in GiB"),
        ("extra_config: 3", "extra_config: expected a mapping"),
        ("chunk_size: 0", "chunk_size: must be 1 to 1,048,576, got 0"),
        ("\x00", "is not YAML"),
        ("a: " + "[" * 3000, "is not YAML"),
    ],
)
def test_a_file_that_is_none_of_theirs_is_an_error_that_says_why(tmp_path: Path, text: str, says: str) -> None:
    file = tmp_path / "theirs.yaml"
    file.write_text(text)
    result = lmc("migrate", file)
    assert result.exit_code == 2
    assert says in result.output
    assert isinstance(result.exception, SystemExit)


def test_a_missing_or_huge_file_is_an_error(tmp_path: Path) -> None:
    assert "cannot be read" in lmc("migrate", tmp_path / "nowhere.yaml").output
    (tmp_path / "huge.yaml").write_text("#" * (1 << 20) + "#")
    assert "larger than the limit" in lmc("migrate", tmp_path / "huge.yaml").output


def test_a_number_that_is_none_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="max_local_disk_size: 'x' is not a number"):
        migrate({"local_disk": "/a", "max_local_disk_size": "x"})


def test_what_looks_like_a_variable_of_ours_and_was_none_stays_text() -> None:
    theirs = {"local_disk": "/x/${HOME}", "max_local_disk_size": 1, "remote_url": "redis://%24%7BX@h:1"}
    text = yaml.safe_dump(migrate(theirs).config)
    config = parse_config(text, environ={})
    shown = {tier.backend: str(tier.options.table.items) for tier in config.tiers}
    values = {tier.backend: tier.options.table.items for tier in config.tiers}
    assert values["disk"]["path"].value == "/x/${HOME}", shown
    assert values["redis"]["username"].value == "${X", shown


def test_paths_without_end_are_cut_in_what_is_said_of_them() -> None:
    made = migrate({"local_disk": ",".join(letter * 5000 for letter in "def")})
    assert [note.key for note in made.notes].count("local_disk") == 2
    assert all(len(note.value) < 200 for note in made.notes)


@pytest.mark.parametrize("key", ["pin_timeout_sec", "blocking_timeout_secs"])
@pytest.mark.parametrize("seconds", [0, -3, 0.4])
def test_a_time_that_is_none_is_said_and_left_at_its_default(key: str, seconds: float) -> None:
    made = migrate({"local_disk": "/mnt/cache", "max_local_disk_size": 5, key: seconds})
    assert [(note.key, note.value) for note in made.notes] == [(key, str(int(seconds)))]
    parse_config(yaml.safe_dump(made.config), "ours", {})


@pytest.mark.parametrize(
    ("text", "said"), [('"/mnt/a\\0b"', "U+0000 is not allowed"), ('"\\UFFFFFFFF"', "is not YAML")]
)
def test_an_escape_that_is_no_character_is_refused(text: str, said: str, tmp_path: Path) -> None:
    theirs = tmp_path / "theirs.yaml"
    theirs.write_text(f"local_disk: {text}\nmax_local_disk_size: 5\n")
    result = CliRunner().invoke(main, ["config", "migrate", str(theirs)])
    assert result.exit_code == 2
    assert said in result.output


@pytest.mark.parametrize("end", ["\n", "\x85", "\u2028"])
def test_what_ends_a_line_does_not_end_a_comment(end: str, tmp_path: Path) -> None:
    theirs = tmp_path / "theirs.yaml"
    theirs.write_text(yaml.safe_dump({"local_disk": f"cache{end}tiers: 3", "max_local_disk_size": 5}), encoding="utf-8")
    result = CliRunner().invoke(main, ["config", "migrate", str(theirs)])
    assert result.exit_code == 0, result.output
    assert "tiers" in yaml.safe_load(result.stdout)
