"""The conformance kit: what a plugin must keep, checked by its own test-suite or by `lmc conform`.

Backends: inherit `BackendLaws` in a test class, or call `run_backend_laws(open_backend) -> list[LawResult]`, where
`open_backend(context: Context) -> Backend` opens a handle on the store.  Only the former needs pytest.
`DeviceIOLaws` are those of them that a suite may want for device I/O alone, say on a stand-in.
`backend_machine(open_backend)` is the state machine behind the law over histories, for those who want longer ones.
Eviction policies: likewise `PolicyLaws` and `run_policy_laws(new_policy)`.
Codecs: likewise `CodecLaws` and `run_codec_laws(open_codec)`.
Devices: `DeviceLaws` and `run_device_laws(device_class)`.
"""

from __future__ import annotations

from .backend_laws import BackendLaws, run_backend_laws
from .codec_laws import CodecLaws, run_codec_laws
from .device_io_laws import DeviceIOLaws
from .device_laws import DeviceLaws, run_device_laws
from .dict_backend import DictBackend, DictStore
from .faults import Fault, FaultBackend
from .history_laws import backend_machine
from .laws import Law, LawBroken, LawResult, Laws, LawSkipped, expect, in_threads, law, skip
from .policy_laws import PolicyLaws, run_policy_laws

__all__ = [
    "BackendLaws",
    "CodecLaws",
    "DeviceIOLaws",
    "DeviceLaws",
    "DictBackend",
    "DictStore",
    "Fault",
    "FaultBackend",
    "Law",
    "LawBroken",
    "LawResult",
    "LawSkipped",
    "Laws",
    "PolicyLaws",
    "backend_machine",
    "expect",
    "in_threads",
    "law",
    "run_backend_laws",
    "run_codec_laws",
    "run_device_laws",
    "run_policy_laws",
    "skip",
]
