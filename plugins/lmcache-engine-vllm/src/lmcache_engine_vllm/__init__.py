"""The KV cache of vLLM, kept outside the engine: a connector for `--kv-transfer-config`.

Every process of an engine imports this module, so that it costs next to nothing: vLLM is imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from .connector import LMCacheCoreConnector

__all__ = ["LMCacheCoreConnector", "register"]

NAME: Final = "LMCacheCoreConnector"


def register() -> None:
    """Make the connector known to vLLM by its name alone; called by vLLM's plugin entry point in every process."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if NAME not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(NAME, f"{__name__}.connector", NAME)


def __getattr__(name: str) -> Any:
    if name != NAME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .connector import LMCacheCoreConnector

    return LMCacheCoreConnector
