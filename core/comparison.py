"""Compares two tensors of any size, block by block, on threads; the figures depend on the tensors alone.

Blocks are cut by the tensors' shape, whatever tiles they come in: a tile is cut into the blocks in it, and what it
has of others waits until its neighbours bring the rest. Each block's figures are computed by itself, and
`core/figures` merges them to the same whole in any order.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .block_errors import BlockErrors, Workspace
from .figures import Figures, figures_of
from .places import ErrorMap, Plane, PlaneRanking, RegionCounter
from .sharing import share
from .standards import ComparisonError, Standard
from .tensors import STORAGE, TensorSpec
from .tiles import Box, TileSink, TileSource, Tiling
from .windows import Windows

BLOCK = 1 << 16
"""Elements of a block. Another number would round the sums of blocks elsewhere, by parts in 1e16."""

Array = NDArray[Any]


def check_specs(actual: TensorSpec, expected: TensorSpec) -> None:
    """Refuse what cannot be compared: other shapes, and dtypes but the same or a 16-bit ACTUAL with float32."""
    for name, spec in (("ACTUAL", actual), ("EXPECTED", expected)):
        if len(spec.shape) not in (3, 4):
            raise ComparisonError(f"{name} is {spec}; expected rank 4, (N, C, H, W), or 3, (C, H, W)")
        if spec.dtype not in STORAGE:
            raise ComparisonError(f"{name} is {spec}; expected {', '.join(STORAGE)}")
    if actual.shape != expected.shape:
        raise ComparisonError(f"ACTUAL is {actual} and EXPECTED {expected}; expected the same shape")
    if actual.size == 0:
        raise ComparisonError(f"ACTUAL and EXPECTED are empty, {actual}; there is nothing to compare")
    if actual.dtype != expected.dtype and expected.dtype != "float32":
        raise ComparisonError(
            f"ACTUAL is {actual.dtype} and EXPECTED {expected.dtype}; expected the same dtype, or EXPECTED in float32"
        )


def _check_standard(actual: TensorSpec, expected: TensorSpec, standard: Standard) -> None:
    if standard.compares_bits and actual.dtype != expected.dtype:
        raise ComparisonError(
            f"ACTUAL is {actual.dtype} and EXPECTED {expected.dtype}; the standard {standard.name} compares bits, "
            "which takes the same dtype"
        )


@dataclass
class Charts:
    """Histograms for pictures: by the binary exponents of |expected|, |actual - expected| and relative error.

    errors[i, j]: pairs with exponent `i - ORIGIN` of |expected| and `j - ORIGIN` of the error; relative[j] alike.
    Row and column 0 hold zeros.
    """

    errors: NDArray[np.int64]
    relative: NDArray[np.int64]

    ORIGIN = 160
    EXTENT = 320

    @classmethod
    def empty(cls) -> Charts:
        """No pairs."""
        return cls(np.zeros((cls.EXTENT, cls.EXTENT), np.int64), np.zeros(cls.EXTENT, np.int64))

    def add(self, errors: BlockErrors) -> None:
        """Count a block's finite pairs."""
        finite = slice(None) if errors.excluded is None else ~errors.excluded
        magnitude = _exponents(np.abs(errors.magnitude[finite]))
        if not errors.differs:
            self.errors[:, 0] += np.bincount(magnitude, minlength=self.EXTENT)
            self.relative[0] += magnitude.size
            return
        error, relative = _exponents(errors.absolute[finite]), _exponents(errors.relative[finite])
        pairs = np.bincount(magnitude * self.EXTENT + error, minlength=self.EXTENT**2)
        self.errors += pairs.reshape(self.errors.shape)
        self.relative += np.bincount(relative, minlength=self.EXTENT)


def _exponents(values: NDArray[np.float64]) -> NDArray[np.int64]:
    """Places in a chart: the binary exponent over the origin, cut to the chart; 0 of 0."""
    exponents = (values.view(np.int64) >> 52) - 1023 + Charts.ORIGIN
    clipped: NDArray[np.int64] = np.clip(exponents, 1, Charts.EXTENT - 1)
    clipped[values == 0] = 0
    return clipped


class Comparison:
    """Compares blocks as they come, on any number of threads.

    windows: those of rows and columns, where the call is known that made the tensors: then errors are told apart
    by regions of cells. charts: whether to count for pictures, too.
    """

    def __init__(
        self,
        actual: TensorSpec,
        expected: TensorSpec,
        standard: Standard,
        windows: tuple[Windows, Windows] | None = None,
        charts: bool = False,
    ) -> None:
        check_specs(actual, expected)
        _check_standard(actual, expected, standard)
        height, width = actual.shape[-2:]
        self.specs = actual, expected
        self.blocks = Tiling.of((actual.size // (height * width), height, width), BLOCK)
        self.standard = standard
        self.figures = Figures(standard)
        self.map = ErrorMap(height, width)
        self.charts = Charts.empty() if charts else None
        self._planes = PlaneRanking(height * width)
        self._windows = windows
        self._idle: list[_Station] = []
        self._lock = threading.Lock()

    @property
    def worst_planes(self) -> list[Plane]:
        """The worst planes, of the flattened N*C axis, the worst first."""
        return self._planes.worst

    def index(self, element: int) -> tuple[int, ...]:
        """The index of an element of the flat tensor."""
        return tuple(int(place) for place in np.unravel_index(element, self.specs[0].shape))

    def plane_index(self, plane: int) -> tuple[int, ...]:
        """The index of a plane of the flattened N*C axis."""
        return self.index(plane * math.prod(self.specs[0].shape[-2:]))[:-2]

    def first_element(self, box: Box) -> int:
        """The place in the flat tensor of a box's first element."""
        _, height, width = self.blocks.extents
        return int((box.planes.start * height + box.rows.start) * width + box.columns.start)

    def block_at(self, element: int) -> int:
        """The number of the block that an element is in."""
        _, height, width = self.blocks.extents
        plane, cell = divmod(element, height * width)
        places = plane, *divmod(cell, width)
        numbers = [place // size for place, size in zip(places, self.blocks.tile, strict=True)]
        _, rows, columns = self.blocks.counts
        return (numbers[0] * rows + numbers[1]) * columns + numbers[2]

    def add(self, number: int, actual: TileSource, expected: TileSource | Array) -> None:
        """Compare a block: ACTUAL is read, EXPECTED is read or given as a flat array."""
        station = self._station()
        box = self.blocks[number]
        size = math.prod(box.shape)
        left = actual.read(box, station.work.read_actual[:size].reshape(box.shape)).reshape(-1)
        if isinstance(expected, np.ndarray):
            right = expected
        else:
            right = expected.read(box, station.work.read_expected[:size].reshape(box.shape)).reshape(-1)
        with np.errstate(all="ignore"):
            self._compare(box, left, right, station)
        with self._lock:
            self._idle.append(station)

    def _compare(self, box: Box, actual: Array, expected: Array, station: _Station) -> None:
        errors = BlockErrors(actual, expected, station.work)
        marked = figures_of(errors, self.standard, self.first_element(box), self.figures)
        self._planes.add(box, marked)
        if marked.severity is not None:
            planes, rows, columns = box.shape
            cells = marked.severity.reshape(planes, rows * columns)
            self.map.add(box, (cells.max(axis=0) if planes > 1 else cells).reshape(rows, columns))
        if station.regions is not None:
            marked.figures.regions = station.regions.count(box, errors, marked.mismatches)
        with self._lock:
            self.figures.merge(marked.figures)
            if self.charts is not None:
                self.charts.add(errors)

    def _station(self) -> _Station:
        with self._lock:
            if self._idle:
                return self._idle.pop()
        size = min(BLOCK, math.prod(self.blocks.tile))
        return _Station(
            Workspace(size, self.specs[0].dtype, self.specs[1].dtype),
            RegionCounter(self._windows) if self._windows else None,
        )

    def run(
        self,
        actual: TileSource,
        expected: TileSource,
        threads: int = 1,
        progress: Callable[[int], None] | None = None,
    ) -> Comparison:
        """Compare all blocks of two sources.

        progress: called now and then, on this thread, with the elements that are done.
        """

        def compare(number: int) -> None:
            self.add(number, actual, expected)

        workers = [compare] * min(threads, len(self.blocks))
        share(range(len(self.blocks)), workers, progress and (lambda: progress(self.figures.compared)))
        return self


@dataclass(frozen=True)
class _Station:
    """What one thread needs to compare a block."""

    work: Workspace
    regions: RegionCounter | None


class ComparisonSink:
    """A sink that compares EXPECTED with ACTUAL as its tiles are computed, and passes them on to `inner`."""

    def __init__(self, comparison: Comparison, actual: TileSource, inner: TileSink | None = None) -> None:
        self.busy = 0.0
        self._comparison, self._actual, self._inner = comparison, actual, inner
        self._parts: dict[int, tuple[Array, int]] = {}
        self._lock = threading.Lock()

    def target(self, box: Box, buffer: Array | None) -> Array:
        """The array to compute the tile into."""
        if self._inner is not None:
            return self._inner.target(box, buffer)
        return np.empty(box.shape, STORAGE[self._comparison.specs[1].dtype]) if buffer is None else buffer

    def write(self, box: Box, tile: Array) -> None:
        """Compare a complete tile, as far as blocks are complete."""
        if self._inner is not None:
            self._inner.write(box, tile)
        began = time.perf_counter()
        flat, comparison = tile.reshape(-1), self._comparison
        start = comparison.first_element(box)
        position = start
        while position < start + flat.size:
            number = comparison.block_at(position)
            block = comparison.blocks[number]
            first, size = comparison.first_element(block), math.prod(block.shape)
            stop = min(first + size, start + flat.size)
            whole = self._gather(number, size, position - first, flat[position - start : stop - start])
            if whole is not None:
                comparison.add(number, self._actual, whole)
            position = stop
        with self._lock:
            self.busy += time.perf_counter() - began

    def _gather(self, number: int, size: int, offset: int, part: Array) -> Array | None:
        """The whole block, once its last part has come."""
        if part.size == size:
            return part
        with self._lock:
            whole, missing = self._parts.get(number) or (np.empty(size, part.dtype), size)
            whole[offset : offset + part.size] = part
            missing -= part.size
            if missing:
                self._parts[number] = whole, missing
                return None
            self._parts.pop(number)
            return whole
