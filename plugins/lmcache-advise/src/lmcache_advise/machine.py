"""What there is to cache with: the engine's own cache, how fast it computes, and the stores, each given or assumed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from .kv import Kv
from .parameters import Parameters
from .units import count_text, size_text

GiB: Final = 1 << 30
HOST: Final = "host"
DISK: Final = "disk"
REMOTE: Final = "remote"

_USED_SHARE: Final = 0.9
"""Of a GPU's memory, what an engine takes."""
_WEIGHTS_SHARE: Final = 0.75
"""Of a GPU's memory, what weights may take when the number of GPUs is not given."""
_WORKSPACE_NBYTES: Final = 3 * GiB
"""On each GPU, for activations and graphs."""


@dataclass(frozen=True, slots=True)
class Store:
    """A tier that could be had; the times are those of one request's load."""

    name: str
    nbytes: float
    read_nbytes_s: float
    write_nbytes_s: float
    latency_s: float


@dataclass(frozen=True, slots=True)
class Machine:
    """Everything that the advice is made with, beside model and trace."""

    engine_tokens: float
    prefill_tokens_s: float
    stores: tuple[Store, ...]
    assumed: tuple[str, ...] = ()
    """What was not given, in words."""


def engine_tokens_of(kv: Kv, weights_nbytes: float, gpu_nbytes: float, gpus: int) -> float:
    """Tokens of KV that an engine's own cache holds beside the weights."""
    left = _USED_SHARE * gpu_nbytes - weights_nbytes / gpus - _WORKSPACE_NBYTES
    return max(0.0, left / kv.gpu_nbytes(gpus))


def gpus_for(weights_nbytes: float, gpu_nbytes: float) -> int:
    """The smallest power of two whose memories hold the weights and leave some room."""
    count = 1
    while weights_nbytes / count > _WEIGHTS_SHARE * gpu_nbytes and count < 1024:
        count *= 2
    return count


def machine_of(
    kv: Kv,
    parameters: Parameters | None,
    stores: tuple[Store, ...],
    *,
    engine_tokens: float | None,
    prefill_tokens_s: float | None,
    gpu_nbytes: float,
    gpus: int | None,
    tflops: float,
    position: float = 0.0,
) -> Machine:
    """What is given, and estimates from the model's size for what is not.

    `position` is where a token of a prompt stands on average: attention to what is before it takes time too.  Without a
    model to estimate from, `engine_tokens` and `prefill_tokens_s` must be given.
    """
    assumed: list[str] = []
    if engine_tokens is None or prefill_tokens_s is None:
        assert parameters is not None
        count = gpus or gpus_for(parameters.nbytes, gpu_nbytes)
        what = f"{count} GPU{'s' if count > 1 else ''}"
        if engine_tokens is None:
            engine_tokens = engine_tokens_of(kv, parameters.nbytes, gpu_nbytes, count)
            assumed.append(
                f"the engine's own cache holds {count_text(engine_tokens)} tokens: {what} of {size_text(gpu_nbytes)} "
                f"beside {size_text(parameters.nbytes)} of weights (--engine-cache, --gpus, --gpu-memory)"
            )
        if prefill_tokens_s is None:
            prefill_tokens_s = tflops * 1e12 * count / parameters.operations(position)
            assumed.append(
                f"it computes {count_text(prefill_tokens_s)} prompt tokens/s: {what} of {tflops:g} TFLOP/s in use, "
                f"{parameters.active / 1e9:.3g}G active parameters, a context of {count_text(position)} "
                "on average (--prefill, --tflops)"
            )
    return Machine(engine_tokens, prefill_tokens_s, stores, tuple(assumed))
