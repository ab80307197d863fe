"""The kernel that copies blocks between pages and pinned host memory.  Imports triton: only when the path is used."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl


def _copy_blocks(  # type: ignore[no-untyped-def]  # the compiler reads annotations, and knows none but its own
    table, pages_at, hosts_at, offsets_at,  # where in the table: block ids are at its start
    chunks, blocks, first, items, parts,
    elements, block_stride,
    n1, n2, n3, s0, s1, s2, s3,  # sizes and strides inside a block, outermost first
    TO_HOST: tl.constexpr, UNIT: tl.constexpr, AXES: tl.constexpr, TYPE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # An item is a part of one block of one layer; few programs take many, so that the engine's kernels find room.
    # No name and no number here is that of a vendor: what compiles it is the triton of the torch that is installed.
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        part = item % parts
        block = item // parts % blocks
        chunk = item // (parts * blocks) % chunks
        plane = item // (parts * blocks * chunks)
        place = chunk * blocks + block
        page = tl.load(table + pages_at + plane)
        host = tl.load(table + hosts_at + chunk) + tl.load(table + offsets_at + plane)
        element = part * BLOCK + tl.arange(0, BLOCK)
        wanted = (element < elements) & (place >= first)
        if AXES == 1:
            inside = element.to(tl.int64)
            if not UNIT:
                inside = inside * s3
        else:
            rest = element // n3
            inside = (element % n3).to(tl.int64)
            if not UNIT:
                inside = inside * s3
            inside += (rest % n2).to(tl.int64) * s2
            if AXES > 2:
                rest = rest // n2
                inside += (rest % n1).to(tl.int64) * s1
                inside += (rest // n1).to(tl.int64) * s0
        there = page.to(tl.pointer_type(TYPE)) + tl.load(table + place) * block_stride + inside
        here = host.to(tl.pointer_type(TYPE)) + block.to(tl.int64) * elements + element
        if TO_HOST:
            tl.store(here, tl.load(there, mask=wanted), mask=wanted)
        else:
            tl.store(there, tl.load(here, mask=wanted), mask=wanted)


_NUMBERS = "pages_at hosts_at offsets_at chunks blocks first items parts elements block_stride n1 n2 n3 s0 s1 s2 s3"

copy_blocks: Any = triton.jit(_copy_blocks, do_not_specialize=_NUMBERS.split())
"""Numbers are not compiled in: one kernel for each direction, width and number of axes."""

TYPES = {8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}
