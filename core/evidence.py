"""What is known of a gradInput that is to be explained: its values, gradOutput's, and a sample of boxes.

Every value is float64, in the format of the tensors; boxes are read as they are asked for.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .formats import FORMATS, Floats, Format, rounded
from .hypotheses import Call
from .inference import Lines, divisors_in, factors_in, lines_of, ratios
from .prediction import Plan, Predictor
from .tensors import STORAGE
from .tiles import Box, TileSource

SAMPLE = 1 << 17
"""Elements of gradInput that every hypothesis is tried on."""
SCREEN_ROWS = 16
"""Rows of each box of the sample that tell what is hopeless."""
PIECE, WHOLE_AXIS, GROUPS = 64, 256, 6
"""An axis longer than `WHOLE_AXIS` is sampled in three pieces; planes in so many groups."""
MOST_LINES = 1 << 10
"""Rows and columns whose sums are looked at."""


@dataclass
class Evidence:
    """The tensors, and the sample of them on which hypotheses are tried."""

    call: Call
    grad_output: TileSource
    actual: TileSource
    actual_dtype: str
    sample: list[Box] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.own = FORMATS[self.call.self.dtype]
        stored = FORMATS[self.actual_dtype]
        self.form: Format = stored if stored.bits < self.own.bits else self.own
        self.stored = (self.own,) if self.form == self.own else (self.own, self.form)
        height, width = self.call.self.shape[-2:]
        self.extents = (self.call.self.size // (height * width), height, width)
        self.sample = sample_boxes(self.extents, SAMPLE)
        self.complete = len(self.sample) == 1 and box_size(self.sample[0]) == self.call.self.size
        self._kept: dict[str, Floats] = {}

    @property
    def screen(self) -> list[Box]:
        """A few rows of every box of the sample, of each box others; none where the sample is the whole tensor."""
        if self.complete:
            return []
        last, screen = max(1, len(self.sample) - 1), []
        for number, box in enumerate(self.sample):
            plane, rows = box.planes.start, box.rows
            count = min(SCREEN_ROWS, rows.stop - rows.start)
            start = rows.start + (rows.stop - rows.start - count) * number // last
            screen.append(Box(slice(plane, plane + 1), slice(start, start + count), box.columns))
        return screen

    def given(self, planes: slice, rows: slice, columns: slice) -> Floats:
        """Values of gradOutput."""
        return _values(self.grad_output, Box(planes, rows, columns), self.call.self.dtype)

    def values(self, box: Box) -> Floats:
        """Values of the gradInput to explain, in the format of the tensors where it is stored in a wider one."""
        values = _values(self.actual, box, self.actual_dtype)
        return values if self.form.name == self.actual_dtype else rounded(values, self.form)

    def sampled(self, box: Box) -> Floats:
        """The same for a box of the sample, which is read once."""
        key = repr(box)
        if key not in self._kept:
            self._kept[key] = self.values(box)
        return self._kept[key]

    def predictor(self, plan: Plan) -> Predictor:
        """What predicts boxes of this tensor."""
        return Predictor(plan, self.given, self.stored)

    def divisors(self, plan: Plan) -> list[int]:
        """As `hypotheses.Evidence`."""
        return divisors_in(self._ratios(replace(plan, divisor=1, weight=None)))

    def factors(self, plan: Plan) -> list[Fraction]:
        """As `hypotheses.Evidence`."""
        return factors_in(self._ratios(plan))

    def _ratios(self, plan: Plan) -> Any:
        predictor, parts = self.predictor(plan), []
        for box in self.sample:
            where = box.planes, box.rows, box.columns
            sums = predictor.sums(*where)
            parts.append((self.sampled(box).ravel(), sums.ravel(), predictor.magnitudes(*where).ravel()))
        actual, sums, magnitudes = (np.concatenate(column) for column in zip(*parts, strict=True))
        # What additions in float32 may have lost, at the scale of the actual values.
        scale = np.abs(actual) / np.maximum(np.abs(sums), np.finfo(np.float64).tiny)
        slack = 2.0**-23 * plan.most_terms**0.5 * magnitudes * scale if plan.most_terms > 1 else magnitudes * 0
        form = min(self.form, plan.result or self.form, key=lambda form: form.bits)
        return ratios(actual, sums, slack, form)

    def lines(self, axis: int) -> Lines:
        """Sums across an axis, for `inference.calls_that_fit`: of up to 64 planes, of large ones the first corner."""
        planes, *cells = self.extents
        own = [slice(0, min(extent, MOST_LINES)) for extent in cells]
        counts = zip(self.call.grad_output.shape[-2:], cells, own, strict=True)
        given = [slice(0, -(-count * part.stop // extent)) for count, extent, part in counts]
        area = max(own[0].stop * own[1].stop, given[0].stop * given[1].stop)
        parts: list[tuple[Floats, Floats]] = []
        for group in _groups(planes, max(1, min(64, MOST_LINES**2 // area))):
            parts.append((lines_of(self.values(Box(group, *own)), axis), lines_of(self.given(group, *given), axis)))
        return Lines(*(np.concatenate(column) for column in zip(*parts, strict=True)))


class Equal:
    """A tile sink that counts the elements which have the same value in another tensor, NaN for NaN."""

    def __init__(self, other: TileSource, dtype: str) -> None:
        self.count = 0
        self._other, self._dtype = other, dtype
        self._lock = threading.Lock()

    def target(self, box: Box, buffer: NDArray[Any] | None) -> NDArray[Any]:
        """The array to compute a tile into."""
        return np.empty(box.shape, STORAGE[self._dtype]) if buffer is None else buffer

    def write(self, box: Box, tile: NDArray[Any]) -> None:
        """Compare a complete tile."""
        other = self._other.read(box, np.empty(box.shape, STORAGE[self._dtype]))
        bits = f"u{tile.itemsize}"
        differ = tile.view(bits) != other.view(bits)
        one, another = (_values_of(side[differ], self._dtype) for side in (tile, other))
        same = np.count_nonzero((one == another) | (np.isnan(one) & np.isnan(another)))
        with self._lock:
            self.count += tile.size - one.size + int(same)


def _values(source: TileSource, box: Box, dtype: str) -> Floats:
    return _values_of(source.read(box, np.empty(box.shape, STORAGE[dtype])), dtype)


def _values_of(tile: NDArray[Any], dtype: str) -> Floats:
    """Stored elements as float64."""
    if dtype == "bfloat16":
        return (tile.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return np.asarray((tile.view(np.float16) if dtype == "float16" else tile).astype(np.float64))


def box_size(box: Box) -> int:
    """Elements of a box."""
    planes, rows, columns = box.shape
    return planes * rows * columns


# ---- The sample


def sample_boxes(extents: tuple[int, int, int], elements: int) -> list[Box]:
    """About so many elements: whole planes, or the corners, edges and middle of large ones, over the whole tensor."""
    planes, rows, columns = extents
    pieces = [(row, column) for row in _pieces(rows) for column in _pieces(columns)]
    area = sum((row.stop - row.start) * (column.stop - column.start) for row, column in pieces)
    return [Box(group, row, column) for group in _groups(planes, max(1, elements // area)) for row, column in pieces]


def _pieces(extent: int) -> list[slice]:
    if extent <= WHOLE_AXIS:
        return [slice(0, extent)]
    starts = 0, extent // 2 - PIECE // 2, extent - PIECE
    return [slice(start, start + PIECE) for start in starts]


def _groups(planes: int, wanted: int) -> list[slice]:
    """`wanted` planes in groups that are spread over all."""
    if wanted >= planes:
        return [slice(0, planes)]
    count = min(GROUPS, wanted)
    size = wanted // count
    starts = [round(number * (planes - size) / max(count - 1, 1)) for number in range(count)]
    return [slice(start, start + size) for start in starts]


def box_around(wrong: NDArray[np.bool_], box: Box) -> Box:
    """A box of one plane around the first element that is wrong."""
    place = np.unravel_index(int(wrong.argmax()), wrong.shape)
    sides = []
    for index, side in zip(place[1:], (box.rows, box.columns), strict=True):
        middle = side.start + int(index)
        sides.append(slice(max(side.start, middle - PIECE // 2), min(side.stop, middle + PIECE // 2)))
    plane = box.planes.start + int(place[0])
    return Box(slice(plane, plane + 1), *sides)
