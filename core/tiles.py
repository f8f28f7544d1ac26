"""Tiles: how gradInput is cut into boxes that fit a core's cache, and where they come from and go to.

A tile is contiguous in C order, in memory and in a file: many whole planes, a band of rows of one plane, or a
piece of one row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Box:
    """A range of planes (the flattened N*C axis), rows and columns, with concrete ends."""

    planes: slice
    rows: slice
    columns: slice

    @property
    def shape(self) -> tuple[int, int, int]:
        """Extents (planes, rows, columns)."""
        b, r, c = self.planes, self.rows, self.columns
        return b.stop - b.start, r.stop - r.start, c.stop - c.start


class TileSource(Protocol):
    """Where tiles of gradOutput come from. Called by several threads at once."""

    def read(self, box: Box, buffer: NDArray[Any] | None) -> NDArray[Any]:
        """The box, as `STORAGE[dtype]`: read into `buffer` (C-contiguous, native, of the box's shape), if given."""


class TileSink(Protocol):
    """Where tiles of gradInput go to. Called by several threads at once, for boxes that do not meet."""

    def target(self, box: Box, buffer: NDArray[Any] | None) -> NDArray[Any]:
        """The array to compute the tile into, C-contiguous: `buffer`, if given."""

    def write(self, box: Box, tile: NDArray[Any]) -> None:
        """Takes what `target` returned, now complete."""


@dataclass(frozen=True)
class Tiling:
    """A tensor of (planes, rows, columns) in tiles of `tile` extents; the last of an axis may be smaller."""

    extents: tuple[int, int, int]
    tile: tuple[int, int, int]

    @classmethod
    def of(cls, extents: tuple[int, int, int], elements: int, most: tuple[int, int] | None = None) -> Tiling:
        """Tiles of about `elements` elements, of at most `most` rows and columns.

        >>> Tiling.of((4, 8, 8), 128).tile, Tiling.of((4, 8, 8), 20).tile, Tiling.of((4, 8, 8), 5).tile
        ((2, 8, 8), (1, 2, 8), (1, 1, 5))
        """
        planes, rows, columns = extents
        most_rows, most_columns = most or (rows, columns)
        if columns > min(elements, most_columns):
            return cls(extents, (1, 1, min(elements, most_columns)))
        if rows > min(elements // columns, most_rows):
            return cls(extents, (1, min(elements // columns, most_rows), columns))
        return cls(extents, (min(planes, elements // (rows * columns)), rows, columns))

    @property
    def counts(self) -> tuple[int, int, int]:
        """Number of tiles along each axis."""
        planes, rows, columns = (-(-extent // size) for extent, size in zip(self.extents, self.tile, strict=True))
        return planes, rows, columns

    def __len__(self) -> int:
        planes, rows, columns = self.counts
        return planes * rows * columns

    def __getitem__(self, index: int) -> Box:
        _, rows, columns = self.counts
        numbers = index // (rows * columns), index // columns % rows, index % columns
        return Box(
            *(
                slice(number * size, min((number + 1) * size, extent))
                for number, size, extent in zip(numbers, self.tile, self.extents, strict=True)
            )
        )


class ArrayTensor:
    """An array of rank 3 or 4 as a source or a sink.

    Without a buffer, tiles are views, which takes a C-contiguous array; with one, any strides and byte order do.
    """

    def __init__(self, array: NDArray[Any]) -> None:
        self._array = array.reshape(1, *array.shape) if array.ndim == 3 else array
        self._flat = array.reshape(-1, *array.shape[-2:]) if array.flags.c_contiguous else None

    def read(self, box: Box, buffer: NDArray[Any] | None) -> NDArray[Any]:
        """A view, or a copy in the buffer."""
        if buffer is None:
            return self._view(box)
        for part, view in self._parts(box, buffer):
            np.copyto(part, view)
        return buffer

    def target(self, box: Box, buffer: NDArray[Any] | None) -> NDArray[Any]:
        """A view, or the buffer."""
        return self._view(box) if buffer is None else buffer

    def write(self, box: Box, tile: NDArray[Any]) -> None:
        """Copies a buffer to its place; a view is already there."""
        if self._flat is None or not np.may_share_memory(self._flat, tile):
            for part, view in self._parts(box, tile):
                np.copyto(view, part)

    def _view(self, box: Box) -> NDArray[Any]:
        assert self._flat is not None, "a tile can be a view of a C-contiguous array only"
        return self._flat[box.planes, box.rows, box.columns]

    def _parts(self, box: Box, tile: NDArray[Any]) -> list[tuple[NDArray[Any], NDArray[Any]]]:
        """The tile in parts of one n each, with their places: N and C of any strides need not make one axis."""
        channels, parts, plane = self._array.shape[1], [], box.planes.start
        while plane < box.planes.stop:
            n, c = divmod(plane, channels)
            count = min(channels - c, box.planes.stop - plane)
            part = tile[plane - box.planes.start :][:count]
            parts.append((part, self._array[n, c : c + count, box.rows, box.columns]))
            plane += count
        return parts
