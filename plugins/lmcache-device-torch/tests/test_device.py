"""The torch device under the laws, on tensors of the CPU: copied directly, and staged as on an accelerator."""

from __future__ import annotations

from typing import Any

import torch
from lagging import StagedDevice

from lmcache_core import Probe
from lmcache_core.testing import DeviceLaws
from lmcache_device_torch import TorchDevice


class DirectDevice(TorchDevice):
    api_version = (1, 0)
    torch_type = "cpu"

    @classmethod
    def probe(cls) -> Probe:
        return Probe(1)


class TensorLaws(DeviceLaws):
    """The laws, with pages that are tensors of the CPU."""

    def to_device(self, array: Any) -> Any:
        return torch.from_numpy(array.copy())

    def to_host(self, placed: Any) -> Any:
        return placed.numpy()

    def overwrite(self, placed: Any, array: Any) -> None:
        placed.copy_(torch.from_numpy(array))


class TestDirect(TensorLaws):
    device_class = DirectDevice


class TestStaged(TensorLaws):
    device_class = StagedDevice


class TestStagedThroughALittleMemory(TensorLaws):
    """A staging buffer that hardly any layer fits into."""

    device_class = StagedDevice

    def new_device(self) -> StagedDevice:
        return StagedDevice(staging_nbytes=1500)
