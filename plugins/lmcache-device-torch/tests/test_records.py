"""Records in an accelerator's memory: gathered into, scattered from, with their header page; on tensors of the CPU."""

from __future__ import annotations

import os

import pytest
import torch
from lagging import StagedDevice

from lmcache_core import DeviceError, Layout, Region
from lmcache_device_torch.records import TorchRecord

BLOCKS = 4
LAYOUT = Layout(
    chunk_tokens=64,
    regions=(Region(name="kv", layers=2, block_tokens=16, block_nbytes=96, dtype="float16", packing="test"),),
)
RECORD = 4096 + 4096


def pages(blocks: int = 16) -> list[list[torch.Tensor]]:
    return [[torch.randint(0, 255, (blocks, 48), dtype=torch.int16) for _ in range(2)]]


def test_a_chunk_goes_into_a_record_and_out_of_it_with_its_header_page() -> None:
    device = StagedDevice()
    source, target = pages(), pages()
    record = device.staging(RECORD, source)
    assert isinstance(record, TorchRecord)
    assert record.memory.data_ptr() % 4096 == 0
    assert record.memory.numel() == record.nbytes == RECORD
    header = memoryview(os.urandom(4096))
    try:
        ids = [3, 9, 1, 7]
        assert device.gather(source, ids, LAYOUT, [record.payload(LAYOUT.nbytes)]).wait(30)
        record.write_header(header)
        assert record.read_header() == header
        assert device.scatter([record.payload(LAYOUT.nbytes)], LAYOUT, target, [0, 1, 2, 3]).wait(30)
    finally:
        device.close()
    for layer in range(2):
        assert torch.equal(target[0][layer][:4], source[0][layer][ids])
    assert record.memory[:4096].numpy().tobytes() == header


def test_records_lie_in_a_file_as_they_would_from_host_memory() -> None:
    device = StagedDevice()
    source = pages()
    record = device.staging(RECORD, source)
    host = memoryview(bytearray(LAYOUT.nbytes))
    try:
        ids = [0, 1, 2, 3]
        device.gather(source, ids, LAYOUT, [record.payload(LAYOUT.nbytes)]).wait(30)
        device.gather(source, ids, LAYOUT, [host]).wait(30)
    finally:
        device.close()
    assert record.payload(LAYOUT.nbytes).numpy().tobytes() == host


def test_a_device_without_memory_left_is_a_device_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(*args: object, **more: object) -> torch.Tensor:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(torch, "empty", none_left)
    with pytest.raises(DeviceError, match="out of memory"):
        TorchRecord(RECORD, torch.device("cpu"))
