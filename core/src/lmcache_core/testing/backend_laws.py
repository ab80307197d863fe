"""The specification of a backend, as laws that any plugin's test-suite inherits and `lmc conform` checks.

    class TestMyBackend(BackendLaws):
        def open_backend(self, context):
            return MyBackend(MyOptions(...), context)

Without pytest: `run_backend_laws(lambda context: MyBackend(MyOptions(...), context))` returns one `LawResult` per law.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..backend import Backend, Context
from .device_io_laws import DeviceIOLaws
from .history_laws import HistoryLaws
from .laws import LawResult
from .record_laws import RecordLaws
from .store_laws import StoreLaws


class BackendLaws(RecordLaws, StoreLaws, DeviceIOLaws, HistoryLaws):
    """What the contract in `lmcache_core.backend` promises.  A subclass supplies `open_backend`."""


def run_backend_laws(
    open_backend: Callable[[Context], Backend[Any]],
    *,
    known_failures: Mapping[str, str] | None = None,
    only: Sequence[str] = (),
    on_result: Callable[[LawResult], None] | None = None,
) -> list[LawResult]:
    """Check every law (or those named in `only`) on what `open_backend` opens.

    The store may hold records: the laws use keys of their own, remove what they put, and touch nothing else.  A shared
    store should not be in use meanwhile, since some laws state a small capacity, which then holds for all.
    `on_result` hears of each law as it has been checked.
    """
    members = {
        "open_backend": lambda self, context: open_backend(context),
        "known_failures": dict(known_failures or {}),
    }
    laws: BackendLaws = type("LawsOfOneBackend", (BackendLaws,), members)()
    return laws.results(only, on_result)
