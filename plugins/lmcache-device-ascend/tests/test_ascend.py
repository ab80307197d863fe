"""The device `ascend` on simulated machines: what its probe finds, and what it says."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import pytest

from lmcache_core import DeviceError
from lmcache_device_ascend import VENDOR
from lmcache_device_ascend.acl import AclRuntime
from lmcache_device_torch.probe_laws import ProbeLaws
from lmcache_device_torch.simulation import SimulatedMachine


class TestProbe(ProbeLaws):
    vendor = VENDOR
    card = "ascend"
    build = "ascend_torch"


def test_doctor_hears_of_what_the_engine_needs(tmp_path: Path) -> None:
    machine = SimulatedMachine(tmp_path).ascend().ascend_torch().variable("CUDA_VISIBLE_DEVICES", "0")
    assert [finding.level for finding in VENDOR.diagnose(machine.host)] == ["ok", "warning", "note"]
    machine.variable("ASCEND_HOME_PATH", "/usr/local/Ascend/latest")
    assert [finding.level for finding in VENDOR.diagnose(machine.host)] == ["ok", "note"]


class SimulatedAcl:
    """SIMULATED libascendcl: what was asked of it, and the error that it gives."""

    def __init__(self, result: int = 0) -> None:
        self.asked: list[tuple[str, int]] = []
        self._result = result

    def aclrtHostRegister(self, pointer: ctypes.c_void_p, size: ctypes.c_uint64, kind: Any, mapped: Any) -> int:
        self.asked.append(("register", pointer.value or 0))
        return self._result

    def aclrtHostUnregister(self, pointer: ctypes.c_void_p) -> int:
        self.asked.append(("unregister", pointer.value or 0))
        return self._result


def test_memory_is_registered_with_acl_and_let_go() -> None:
    library = SimulatedAcl()
    runtime = AclRuntime(library, "6.8.0-1")
    runtime.pin(None, 4096, 8192)  # type: ignore[arg-type]
    runtime.unpin(None, 4096)  # type: ignore[arg-type]
    assert library.asked == [("register", 4096), ("unregister", 4096)]


@pytest.mark.parametrize(
    ("runtime", "reason"),
    [
        (AclRuntime(SimulatedAcl(507000), "6.8.0"), "error 507000"),
        (AclRuntime(object(), "6.8.0"), "no attribute 'aclrtHostRegister'"),
        (AclRuntime(None, "6.8.0"), "libascendcl.so"),
        (AclRuntime(SimulatedAcl(), "5.10.0-136"), "too old"),
        (AclRuntime(SimulatedAcl(), "?"), "too old"),
    ],
)
def test_memory_that_cannot_be_registered_has_a_reason(runtime: AclRuntime, reason: str) -> None:
    with pytest.raises(DeviceError, match=reason):
        runtime.pin(None, 4096, 8192)  # type: ignore[arg-type]
