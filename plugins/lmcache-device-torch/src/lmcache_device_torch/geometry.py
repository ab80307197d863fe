"""How the blocks of a page lie in memory: for paths that copy by addresses instead of by torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from .pages import same_width

if TYPE_CHECKING:
    import torch

WIDTHS = (8, 4, 2, 1)


@dataclass(frozen=True, slots=True)
class Geometry:
    """Every number in bytes.  Pages of one geometry differ by their address alone."""

    element_nbytes: int
    block_stride: int
    sizes: tuple[int, ...]
    """Of the axes inside a block in elements, the last one in the order of the bytes of a chunk."""
    strides: tuple[int, ...]

    @property
    def run_nbytes(self) -> int:
        """How much of a block lies in one piece."""
        return self.sizes[-1] * self.element_nbytes if self.strides[-1] == self.element_nbytes else self.element_nbytes

    @property
    def runs(self) -> list[int]:
        """Where in a block each such piece begins, in the order of a chunk."""
        inner = self.sizes, self.strides
        if self.strides[-1] == self.element_nbytes:
            inner = self.sizes[:-1], self.strides[:-1]
        found = [0]
        for size, stride in zip(*inner, strict=True):
            found = [start + index * stride for start in found for index in range(size)]
        return found

    def width(self, *places: int) -> int:
        """The widest integers as which such blocks can be copied, where they and `places` begin."""
        unit = self.strides[-1] == self.element_nbytes
        numbers = [*places, self.block_stride, *(self.strides[:-1] if unit else self.strides), self.run_nbytes]
        return next(width for width in WIDTHS if not any(number % width for number in numbers))

    def as_integers(self, width: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Sizes and strides in integers of `width` bytes."""
        strides = tuple(stride // width for stride in self.strides)
        if self.strides[-1] == self.element_nbytes:
            return (*self.sizes[:-1], self.run_nbytes // width), (*strides[:-1], 1)
        if width == self.element_nbytes:
            return self.sizes, strides
        return (*self.sizes, self.element_nbytes // width), (*strides, 1)


def geometry_of(page: torch.Tensor) -> Geometry:
    """Axes inside a block that lie as one are one."""
    page = same_width(page)
    nbytes = page.element_size()
    sizes: list[int] = [1]
    strides: list[int] = [nbytes]
    for size, stride in zip(reversed(page.shape[1:]), reversed(page.stride()[1:]), strict=True):
        if size == 1:
            continue
        if sizes[0] == 1:
            sizes[0], strides[0] = size, stride * nbytes
        elif stride * nbytes == sizes[0] * strides[0]:
            sizes[0] *= size
        else:
            sizes.insert(0, size)
            strides.insert(0, stride * nbytes)
    return Geometry(nbytes, page.stride(0) * nbytes, tuple(sizes), tuple(strides))
