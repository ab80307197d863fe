"""A correct codec that is not the identity, and mutants of it: each breaks one sentence of the contract."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import ClassVar

from lmcache_core.backend import API_VERSION, ApiVersion
from lmcache_core.codec import Codec
from lmcache_core.errors import ChunkCorrupt
from lmcache_core.layout import Layout
from lmcache_core.testing import CodecLaws

HEAD = 4


class Model(Codec):
    """Four bytes of length, then the chunk through zlib."""

    api_version: ClassVar[ApiVersion] = (1, 0)

    def max_nbytes(self, layout: Layout) -> int:
        return HEAD + layout.nbytes + 64 + layout.nbytes // 1000

    def encode(self, raw: memoryview, layout: Layout, out: memoryview) -> int:
        data = zlib.compress(raw, 1)
        out[:HEAD] = layout.nbytes.to_bytes(HEAD, "little")
        out[HEAD : HEAD + len(data)] = data
        return HEAD + len(data)

    def decode(self, data: memoryview, layout: Layout, out: memoryview) -> None:
        if int.from_bytes(data[:HEAD], "little") != layout.nbytes:
            raise ChunkCorrupt("another length")
        out[: layout.nbytes] = self.inflated(data[HEAD:], layout.nbytes)

    def inflated(self, data: memoryview, nbytes: int) -> bytes:
        inflate = zlib.decompressobj()
        try:
            raw = inflate.decompress(data, nbytes + 1)
            if len(raw) == nbytes and not inflate.eof:
                raw += inflate.decompress(inflate.unconsumed_tail, 1)
        except zlib.error as error:
            raise ChunkCorrupt(str(error)) from error
        if len(raw) != nbytes or not inflate.eof or inflate.unused_data:
            raise ChunkCorrupt(f"{len(raw)} bytes, not {nbytes}")
        return raw


class ModelLaws(CodecLaws):
    codec_class: ClassVar[type[Codec]] = Model

    def open_codec(self) -> Codec:
        return self.codec_class()


def laws_of(mutant: type[Codec]) -> ModelLaws:
    laws = ModelLaws()
    laws.codec_class = mutant  # type: ignore[misc]
    return laws


MUTANTS: list[tuple[str, type[Model]]] = []


def breaks(name: str) -> Callable[[type[Model]], type[Model]]:
    def add(mutant: type[Model]) -> type[Model]:
        MUTANTS.append((f"test_{name}", mutant))
        return mutant

    return add


@breaks("the_api_version_is_a_literal_that_core_speaks")
class InheritsVersion(Model):
    api_version = API_VERSION


@breaks("the_api_version_is_a_literal_that_core_speaks")
class NewerVersion(Model):
    api_version = (1, 99)


@breaks("the_version_and_lossy_can_be_written_down")
class LargeVersion(Model):
    version = 256


@breaks("the_version_and_lossy_can_be_written_down")
class VersionOfText(Model):
    version = "1"  # type: ignore[assignment]


@breaks("a_chunk_comes_back_exactly")
class RoundsLowBits(Model):
    def encode(self, raw: memoryview, layout: Layout, out: memoryview) -> int:
        rounded = bytes(raw).translate(bytes(b & 0xFE for b in range(256)))
        return super().encode(memoryview(rounded), layout, out)


@breaks("another_instance_reads_what_one_has_written")
class RemembersItsChunks(Model):
    """Sound as long as it lives, as a codec with a dictionary of its own would be."""

    def __init__(self) -> None:
        self.key = id(self).to_bytes(8, "little")

    def encode(self, raw: memoryview, layout: Layout, out: memoryview) -> int:
        nbytes = super().encode(raw, layout, out)
        for index in range(HEAD, nbytes):
            out[index] ^= self.key[index % 8]
        return nbytes

    def decode(self, data: memoryview, layout: Layout, out: memoryview) -> None:
        own = bytearray(data)
        for index in range(HEAD, len(own)):
            own[index] ^= self.key[index % 8]
        super().decode(memoryview(own), layout, out)


@breaks("max_nbytes_is_an_upper_bound")
class HopesThatItShrinks(Model):
    def max_nbytes(self, layout: Layout) -> int:
        return HEAD + layout.nbytes


@breaks("max_nbytes_is_an_upper_bound")
class WritesATail(Model):
    def encode(self, raw: memoryview, layout: Layout, out: memoryview) -> int:
        out[-1] = 0
        return super().encode(raw, layout, out)


@breaks("encode_fits_in_exactly_max_nbytes")
class WantsMoreRoom(Model):
    def encode(self, raw: memoryview, layout: Layout, out: memoryview) -> int:
        if len(out) < self.max_nbytes(layout) + 8:
            raise ValueError("no room to work in")
        return super().encode(raw, layout, out)


@breaks("decode_writes_nothing_past_out")
class WritesBeyondOut(Model):
    def decode(self, data: memoryview, layout: Layout, out: memoryview) -> None:
        super().decode(data, layout, out)
        around = memoryview(out.obj)  # type: ignore[arg-type]
        end = next(i for i in range(len(around) - 1, -1, -1) if around[i] == 0xA5)
        around[end] = 0


@breaks("the_input_is_left_as_it_was")
class EncodesInPlace(Model):
    def encode(self, raw: memoryview, layout: Layout, out: memoryview) -> int:
        nbytes = super().encode(raw, layout, out)
        raw[0] ^= 1
        return nbytes


@breaks("the_input_is_left_as_it_was")
class DecodesInPlace(Model):
    def decode(self, data: memoryview, layout: Layout, out: memoryview) -> None:
        super().decode(data, layout, out)
        data[-1] ^= 1


@breaks("buffers_are_let_go_after_the_call")
class KeepsItsInput(Model):
    def encode(self, raw: memoryview, layout: Layout, out: memoryview) -> int:
        self.last = raw
        return super().encode(raw, layout, out)


@breaks("buffers_are_let_go_after_the_call")
class KeepsItsOutput(Model):
    def decode(self, data: memoryview, layout: Layout, out: memoryview) -> None:
        self.last = out
        super().decode(data, layout, out)


@breaks("decode_refuses_what_is_too_short_or_too_long")
class FillsUpWithZeros(Model):
    def inflated(self, data: memoryview, nbytes: int) -> bytes:
        try:
            return zlib.decompressobj().decompress(data, nbytes).ljust(nbytes, b"\0")
        except zlib.error as error:
            raise ChunkCorrupt(str(error)) from error


@breaks("decode_refuses_what_is_too_short_or_too_long")
class IgnoresWhatFollows(Model):
    def inflated(self, data: memoryview, nbytes: int) -> bytes:
        inflate = zlib.decompressobj()
        try:
            raw = inflate.decompress(data, nbytes + 1)
        except zlib.error as error:
            raise ChunkCorrupt(str(error)) from error
        if len(raw) != nbytes:
            raise ChunkCorrupt(f"{len(raw)} bytes")
        return raw


@breaks("decode_refuses_a_chunk_of_another_size")
class TakesWhatFits(Model):
    def decode(self, data: memoryview, layout: Layout, out: memoryview) -> None:
        nbytes = int.from_bytes(data[:HEAD], "little")
        if nbytes > 1 << 24:
            raise ChunkCorrupt("too long")
        raw = self.inflated(data[HEAD:], nbytes)
        out[:] = raw[: len(out)].ljust(len(out), b"\0")


@breaks("decode_of_anything_is_all_of_a_chunk_or_chunk_corrupt")
class RaisesWhatItsLibraryRaises(Model):
    def inflated(self, data: memoryview, nbytes: int) -> bytes:
        raw = zlib.decompress(data)
        if len(raw) != nbytes:
            raise ChunkCorrupt(f"{len(raw)} bytes")
        return raw


@breaks("decode_of_anything_is_all_of_a_chunk_or_chunk_corrupt")
class LeavesTheRest(Model):
    def decode(self, data: memoryview, layout: Layout, out: memoryview) -> None:
        try:
            super().decode(data, layout, out)
        except ChunkCorrupt:
            out[: len(out) // 2] = bytes(len(out) // 2)


@breaks("decode_allocates_no_more_than_a_few_chunks")
class BelievesTheLength(Model):
    def decode(self, data: memoryview, layout: Layout, out: memoryview) -> None:
        room = bytearray(min(int.from_bytes(data[:HEAD], "little"), 1 << 26))
        del room
        super().decode(data, layout, out)


@breaks("one_instance_serves_many_threads")
class SharesItsScratch(Model):
    def __init__(self) -> None:
        self.scratch = b""

    def encode(self, raw: memoryview, layout: Layout, out: memoryview) -> int:
        self.scratch = b""
        for start in range(0, layout.nbytes, max(1, layout.nbytes // 50)):
            self.scratch = self.scratch + bytes(raw[start : start + max(1, layout.nbytes // 50)])
            zlib.crc32(bytes(1 << 16))  # long enough to let another thread run
        return super().encode(memoryview(self.scratch[: layout.nbytes]), layout, out)
