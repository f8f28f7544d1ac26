"""Where errors are: the worst planes, a map of the plane, and regions of cells, from blocks in any order."""

from __future__ import annotations

import functools
import threading
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .block_errors import BlockErrors
from .figures import WORST, Marked, RegionFigures
from .regions import axis_codes, cell_codes
from .standards import Float64s, Mask
from .tiles import Box
from .windows import Windows

MAP_EXTENT = 512
"""Most rows and columns of the map; of a larger plane each holds the largest of several."""

_SLICES = 32

Counts = NDArray[np.int64]


@dataclass(frozen=True)
class Plane:
    """A plane (of the flattened N*C axis) with errors."""

    index: int
    mismatched: int
    severity: float

    @property
    def rank(self) -> tuple[int, float, int]:
        """The worst first: by mismatches, then by the largest."""
        return -self.mismatched, -self.severity, self.index


class ErrorMap:
    """The largest severity of each cell over all planes.

    `cells` has at most `MAP_EXTENT` rows and columns; one stands for `sizes` rows and columns of the plane.
    """

    def __init__(self, rows: int, columns: int) -> None:
        self.extents = rows, columns
        self.sizes = -(-rows // MAP_EXTENT), -(-columns // MAP_EXTENT)
        self.cells = np.zeros((-(-rows // self.sizes[0]), -(-columns // self.sizes[1])))
        self._lock = threading.Lock()

    def add(self, box: Box, largest: Float64s) -> None:
        """largest: over the block's planes, (rows, columns)."""
        largest = _binned(largest, 0, box.rows.start, self.sizes[0])
        largest = _binned(largest, 1, box.columns.start, self.sizes[1])
        top, left = box.rows.start // self.sizes[0], box.columns.start // self.sizes[1]
        part = self.cells[top : top + largest.shape[0], left : left + largest.shape[1]]
        with self._lock:
            np.maximum(part, largest, out=part)


def _binned(values: Float64s, axis: int, start: int, size: int) -> Float64s:
    """The largest of each bin of `size` along an axis whose first place is `start`."""
    if size == 1:
        return values
    moved = np.moveaxis(values, axis, 0)
    head = min(-start % size, len(moved))
    if size < _SLICES:
        binned = _binned_by_slices(moved, head, size)
    else:
        starts = np.arange(head, len(moved), size)
        binned = np.maximum.reduceat(moved, np.append(0, starts) if head else starts, axis=0)
    return np.moveaxis(binned, 0, axis)


def _binned_by_slices(values: Float64s, head: int, size: int) -> Float64s:
    """The first `head` and then bins of `size`: quicker by slices of that stride than bin by bin."""
    whole = head + (len(values) - head) // size * size
    parts = [values[:head].max(axis=0, keepdims=True)] if head else []
    if whole > head:
        parts.append(functools.reduce(np.maximum, [values[first:whole:size] for first in range(head, head + size)]))
    if whole < len(values):
        parts.append(values[whole:].max(axis=0, keepdims=True))
    return np.concatenate(parts)


class PlaneRanking:
    """The worst planes. Only planes of which a part has been seen are kept beside them."""

    def __init__(self, plane_size: int) -> None:
        self.worst: list[Plane] = []
        self._size = plane_size
        self._parts: dict[int, tuple[int, Plane]] = {}
        self._lock = threading.Lock()

    def add(self, box: Box, block: Marked) -> None:
        """Count a block."""
        planes, rows, columns = box.shape
        if rows * columns < self._size:
            self._add_part(Plane(box.planes.start, block.figures.mismatched, block.most), rows * columns)
        elif block.severity is not None and self._may_rank(box.planes.start, block):
            self._add_whole(box.planes.start, planes, block.severity, block.mismatches)

    def _may_rank(self, first: int, block: Marked) -> bool:
        best = Plane(first, block.figures.mismatched, block.most)
        return len(self.worst) < WORST or best.rank < self.worst[-1].rank

    def _add_part(self, part: Plane, seen: int) -> None:
        with self._lock:
            before, plane = self._parts.pop(part.index, (0, Plane(part.index, 0, 0.0)))
            severity = max(plane.severity, part.severity)
            plane = Plane(part.index, plane.mismatched + part.mismatched, severity)
            if before + seen == self._size:
                self._keep([plane])
            else:
                self._parts[part.index] = before + seen, plane

    def _add_whole(self, first: int, planes: int, severity: Float64s, mismatches: Mask | None) -> None:
        most = severity.reshape(planes, -1).max(axis=1)
        if mismatches is None:
            counts = np.zeros(planes, np.int64)
        else:
            counts = np.count_nonzero(mismatches.reshape(planes, -1), axis=1)
        order = np.lexsort((-most, -counts))[:WORST]
        found = [Plane(first + int(index), int(counts[index]), float(most[index])) for index in order]
        with self._lock:
            self._keep(found)

    def _keep(self, planes: list[Plane]) -> None:
        erring = [plane for plane in planes if plane.severity > 0]
        self.worst = sorted(self.worst + erring, key=lambda plane: plane.rank)[:WORST]


class RegionCounter:
    """The figures of each kind of cell (`core/regions`) in a block. One thread's: it keeps what it knows of cells."""

    def __init__(self, windows: tuple[Windows, Windows]) -> None:
        self._windows = windows
        self._span: tuple[slice, slice] | None = None
        self._places: dict[int, NDArray[np.intp]] = {}

    def count(self, box: Box, errors: BlockErrors, mismatches: Mask | None) -> dict[int, RegionFigures]:
        """By the cells' codes."""
        if self._span != (box.rows, box.columns):
            self._enter(box)
        regions = {
            code: RegionFigures(compared=places.size * box.shape[0], finite=places.size * box.shape[0])
            for code, places in self._places.items()
        }
        if errors.excluded is not None:
            self._add_counts(regions, "finite", errors.excluded, -1)
        if mismatches is not None:
            self._add_counts(regions, "mismatched", mismatches, 1)
        if errors.differs:
            self._add_errors(regions, errors, box.shape[0])
        return regions

    def _enter(self, box: Box) -> None:
        spans = (box.rows, box.columns)
        codes = (axis_codes(axis, span.start, span.stop) for axis, span in zip(self._windows, spans, strict=True))
        cells = cell_codes(*codes).reshape(-1)
        self._places = {int(code): np.flatnonzero(cells == code) for code in np.unique(cells)}
        self._span = spans

    def _add_counts(self, regions: dict[int, RegionFigures], name: str, marked: Mask, sign: int) -> None:
        per_cell = np.count_nonzero(marked.reshape(-1, self._cells), axis=0)
        for code, places in self._places.items():
            setattr(regions[code], name, getattr(regions[code], name) + sign * int(per_cell[places].sum()))

    def _add_errors(self, regions: dict[int, RegionFigures], errors: BlockErrors, planes: int) -> None:
        absolute, relative = (values.reshape(planes, -1) for values in (errors.absolute, errors.relative))
        most_absolute, most_relative = absolute.max(axis=0), relative.max(axis=0)
        total = relative.sum(axis=0)
        for code, places in self._places.items():
            region = regions[code]
            region.max_absolute = float(most_absolute[places].max())
            region.max_relative = float(most_relative[places].max())
            region.relative.add(float(total[places].sum()))

    @property
    def _cells(self) -> int:
        return sum(places.size for places in self._places.values())
