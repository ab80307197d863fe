"""What an operator may write in `kv_connector_extra_config`, and what is said of a mistake."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

import lmcache_engine_vllm
from lmcache_core import ConfigError
from lmcache_engine_vllm.settings import read_settings


def test_without_settings_the_defaults_hold() -> None:
    assert read_settings({}).lookup_timeout_s == 0.2


def test_an_unknown_key_is_an_error_that_names_the_nearest() -> None:
    with pytest.raises(
        ConfigError, match="'lookup_timeout': did you mean|unknown key 'lookup_timeout'.*lookup_timeout_s"
    ):
        read_settings({"lookup_timeout": 1})


@pytest.mark.parametrize(
    ("key", "value"),
    [("config", 3), ("save_decode", "yes"), ("lookup_timeout_s", "1s"), ("lookup_timeout_s", True), ("weights", None)],
)
def test_a_value_of_another_type_is_an_error_that_says_what_is_wanted(key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"{key}: .* is not "):
        read_settings({key: value})


@pytest.mark.parametrize("value", [-0.1, 601])
def test_times_have_bounds(value: float) -> None:
    with pytest.raises(ConfigError, match="lookup_grace_s: must be 0 to 600"):
        read_settings({"lookup_grace_s": value})


def test_importing_the_package_imports_neither_vllm_nor_torch() -> None:
    code = "import sys, lmcache_engine_vllm; assert not {'vllm', 'torch', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_another_name_than_the_connectors_is_not_there() -> None:
    with pytest.raises(AttributeError, match="Connector2"):
        getattr(lmcache_engine_vllm, "Connector2")  # noqa: B009
