"""One record in the memory of an accelerator, on its way between pages and a store that reads and writes there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from lmcache_core import DeviceError, DeviceRecord

if TYPE_CHECKING:
    import torch

_PAGE_NBYTES: Final = 4096


class TorchRecord(DeviceRecord):
    """A tensor of bytes that begins at a page, as direct I/O wants it."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        import torch

        self.nbytes = nbytes
        try:
            whole = torch.empty(nbytes + _PAGE_NBYTES, dtype=torch.uint8, device=device)
        except RuntimeError as error:  # torch's, for no memory left
            raise DeviceError(f"no {nbytes} bytes on {device}: {error}") from error
        skip = -whole.data_ptr() % _PAGE_NBYTES
        self._bytes = whole[skip : skip + nbytes]

    @property
    def memory(self) -> torch.Tensor:
        return self._bytes

    def payload(self, nbytes: int) -> torch.Tensor:
        return self._bytes[_PAGE_NBYTES : _PAGE_NBYTES + nbytes]

    def read_header(self) -> memoryview:
        return memoryview(self._bytes[:_PAGE_NBYTES].cpu().numpy().tobytes())

    def write_header(self, page: memoryview) -> None:
        import torch

        self._bytes[:_PAGE_NBYTES].copy_(torch.frombuffer(bytearray(page), dtype=torch.uint8))
        device = self._bytes.device
        if device.type != "cpu":
            getattr(torch, device.type).current_stream(device).synchronize()
