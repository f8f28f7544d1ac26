"""What a hypothesis about an average-pooling backward predicts, box by box: any windows, divisors and roundings.

`core/executor` computes the two operators as they are meant to be. Here windows may start anywhere and divide by
anything, weights may be rounded and sums kept in 16 bits, for that is how implementations go wrong. Everything is
computed in float64 and rounded where the plan says so. As in core, nothing is subtracted and nothing is multiplied
by zero: NaN and infinity reach the cells of their windows, no others.
"""

from __future__ import annotations

import bisect
import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .byte_orders import Order, Reader, plain_order, reordered
from .formats import FLOAT32, Floats, Format, Ints, rounded

Edges = Callable[[Ints], tuple[Any, Any, Any]]
"""Window numbers of an axis to their starts, ends and divisors. Starts and ends never fall."""

_WHOLE = 1 << 14
"""Windows of an axis up to which all are looked at together."""
_CHUNK = 1 << 17
"""Windows or cells of an axis that are looked at in one step where all must be."""
_SEVERAL = 4
"""Windows over a cell above which partial sums are shared."""


class Free(StrEnum):
    """Cells that a plan says nothing about."""

    NONE = "none"
    UNCOVERED = "cells that no window covers"
    OVERLAP = "cells under several windows"


# ---- Windows


@dataclass(frozen=True)
class Cover:
    """The windows that meet a range of cells: which ones, their divisors, and the range over each cell."""

    windows: slice
    divisors: Floats
    lo: Ints
    hi: Ints

    @property
    def width(self) -> int:
        """Most windows over a cell."""
        return max(0, int((self.hi - self.lo).max(initial=0)))


@dataclass(frozen=True)
class Axis:
    """The windows of one axis: `count` of them over `cells` cells."""

    cells: int
    count: int
    edges: Edges

    def at(self, windows: Ints) -> tuple[Ints, Ints, Floats]:
        """Starts and ends, cut to the cells, and divisors."""
        start, end, divisor = self.edges(windows)
        start = np.clip(np.asarray(start, np.int64), 0, self.cells)
        end = np.maximum(np.clip(np.asarray(end, np.int64), 0, self.cells), start)
        return start, end, np.broadcast_to(np.asarray(divisor, np.float64), windows.shape)

    @cached_property
    def _all(self) -> tuple[Ints, Ints, Floats]:
        return self.at(np.arange(self.count))

    def cover(self, cells: slice) -> Cover:
        """The windows that meet these cells."""
        if self.count <= _WHOLE:
            start, end, divisor = self._all
            first = int(np.searchsorted(end, cells.start, "right"))
            last = int(np.searchsorted(start, cells.stop, "left"))
            start, end, divisor = start[first:last], end[first:last], divisor[first:last]
        else:
            numbers = range(self.count)
            first = bisect.bisect_right(numbers, cells.start, key=lambda window: self._edge(1, window))
            last = bisect.bisect_left(numbers, cells.stop, key=lambda window: self._edge(0, window))
            start, end, divisor = self.at(np.arange(first, last))
        here = np.arange(cells.start, cells.stop)
        lo, hi = np.searchsorted(end, here, "right"), np.searchsorted(start, here, "right")
        return Cover(slice(first, max(first, last)), divisor, lo, np.maximum(lo, hi))

    def _edge(self, which: int, window: int) -> int:
        return int(self.at(np.array([window]))[which][0])

    @cached_property
    def widths(self) -> tuple[int, int]:
        """Least and most windows over a cell."""
        least, most = self.count, 0
        for first in range(0, self.cells, _CHUNK):
            cover = self.cover(slice(first, min(first + _CHUNK, self.cells)))
            counts = cover.hi - cover.lo
            least, most = min(least, int(counts.min())), max(most, int(counts.max()))
        return least, most

    @cached_property
    def uniform_divisor(self) -> int | None:
        """The divisor that all windows share, or None."""
        found = None
        for first in range(0, self.count, _CHUNK):
            divisors = self.at(np.arange(first, min(first + _CHUNK, self.count)))[2]
            found = float(divisors[0]) if found is None else found
            if (divisors != found).any():
                return None
        return None if found is None else int(found)

    @cached_property
    def places(self) -> str:
        """Equal for axes whose windows cover the same cells."""
        return self._digest(0, 1)

    @cached_property
    def divisors(self) -> str:
        """Equal for axes with the same divisors."""
        return self._digest(2)

    def _digest(self, *which: int) -> str:
        digest = hashlib.blake2b(digest_size=16)
        for first in range(0, self.count, _CHUNK):
            found = self.at(np.arange(first, min(first + _CHUNK, self.count)))
            for index in which:
                digest.update(np.ascontiguousarray(found[index]).tobytes())
        return digest.hexdigest()


# ---- Plans


@dataclass(frozen=True)
class Plan:
    """All that a prediction depends on.

    shape: (N, C) of the tensors. divisor: instead of the product of the axes' divisors. given: what gradOutput is
    rounded to first. weight: what 1/divisor is rounded to, if it is multiplied with. terms, sums: what
    every term and then every sum is rounded to, in the order of the windows. result: what the result goes through
    before it is stored. given_order, result_order: as what the bytes of gradOutput and gradInput are read.
    """

    shape: tuple[int, int]
    rows: Axis
    columns: Axis
    divisor: int | None = None
    given: Format | None = None
    ties_away: bool = False
    weight: Format | None = None
    terms: Format | None = None
    sums: Format | None = None
    result: Format | None = None
    factor: Fraction = Fraction(1)
    given_order: Order = Order.AS_IS
    result_order: Order = Order.AS_IS
    free: Free = Free.NONE

    @cached_property
    def identity(self) -> tuple[object, ...]:
        """Equal for plans that predict the same, whatever the data."""
        divisor: object = (self.rows.divisors, self.columns.divisors)
        common, factor, weight = self.common_divisor, self.factor, self.weight
        if common is not None and weight and rounded(np.array([1 / common]), weight)[0] == 1 / common:
            weight = None
        if common is not None:
            divisor, factor = (common, factor) if weight else (Fraction(common) / factor, Fraction(1))
        places = self.rows.places, self.columns.places
        roundings = self.given, self.ties_away and self.given is not None, weight, self.terms, self.sums, self.result
        return places, divisor, factor, roundings, self._orders, self.free

    @property
    def common_divisor(self) -> int | None:
        """The divisor that all windows share, or None."""
        if self.divisor is not None:
            return self.divisor
        rows, columns = self.rows.uniform_divisor, self.columns.uniform_divisor
        return None if not rows or not columns else rows * columns

    @property
    def divisor_and_factor(self) -> tuple[Fraction | None, Fraction]:
        """The divisor that all windows share, if they do, and what sums are multiplied with: once, where possible."""
        common = self.common_divisor
        if common is None or self.weight or self.sums:
            return None if common is None else Fraction(common), self.factor
        return Fraction(common) / self.factor, Fraction(1)

    @property
    def _orders(self) -> tuple[Order, Order]:
        extents = (self.rows.count, self.columns.count), (self.rows.cells, self.columns.cells)
        orders = zip((self.given_order, self.result_order), extents, strict=True)
        given, result = (plain_order(order, self.shape[1], *plane) for order, plane in orders)
        if given is result is Order.TRANSPOSED and self._is_symmetric:
            return Order.AS_IS, Order.AS_IS
        return given, result

    @property
    def _is_symmetric(self) -> bool:
        """Whether the windows of both axes are the same, so that a transposed tensor has a transposed result."""
        rows, columns = self.rows, self.columns
        return (rows.cells, rows.places, rows.divisors) == (columns.cells, columns.places, columns.divisors)

    @property
    def most_terms(self) -> int:
        """Most windows over a cell."""
        return self.rows.widths[1] * self.columns.widths[1]


class Predictor:
    """Predicts boxes of gradInput from a reader of gradOutput; `stored` is what results are rounded to, in turn."""

    def __init__(self, plan: Plan, read: Reader, stored: tuple[Format, ...]) -> None:
        self.plan = plan
        self._divisor, factor = plan.divisor_and_factor
        self._factor = float(factor)
        self._stored = ((plan.result,) if plan.result else ()) + stored
        given, result = plan._orders
        windows = plan.rows.count, plan.columns.count
        cells = plan.rows.cells, plan.columns.cells
        self._read = reordered(read, given, plan.shape[1], *windows)
        self.values: Reader = reordered(self._values, result, plan.shape[1], *cells)
        self.magnitudes: Reader = reordered(self._magnitudes, result, plan.shape[1], *cells)
        self.sums: Reader = reordered(self._sums, result, plan.shape[1], *cells)

    def free(self, rows: slice, columns: slice) -> NDArray[np.bool_]:
        """Which cells of a plane the plan says nothing about."""
        covers = self.plan.rows.cover(rows), self.plan.columns.cover(columns)
        high, wide = (cover.hi - cover.lo for cover in covers)
        counts = high[:, None] * wide[None, :]
        return np.asarray(counts == 0 if self.plan.free is Free.UNCOVERED else counts > 1)

    def bounds(self, planes: slice, rows: slice, columns: slice) -> tuple[Floats, Floats]:
        """What the least and the greatest sum are rounded to that other roundings of the additions may give.

        n additions in float32 are off by sqrt(n) ulp of sum(|terms|), as roundings go; of sums in 16 bits, one may be
        rounded the other way.
        """
        box = planes, rows, columns
        sums, form = self.plan.sums, self.plan.sums or FLOAT32
        steps = math.sqrt(self.plan.most_terms) if sums is None else 1.0
        slack = steps * 2.0 ** (1 - form.bits) * self.magnitudes(*box)
        middle = self.sums(*box)
        return self._stored_as(middle - slack), self._stored_as(middle + slack)

    def _values(self, planes: slice, rows: slice, columns: slice) -> Floats:
        return self._stored_as(self._sums(planes, rows, columns)) + 0.0

    def _stored_as(self, values: Floats) -> Floats:
        for form in self._stored:
            values = rounded(values, form)
        return values

    def _sums(self, planes: slice, rows: slice, columns: slice) -> Floats:
        high, wide = self.plan.rows.cover(rows), self.plan.columns.cover(columns)
        terms = self._terms(planes, high, wide)
        if self.plan.sums is None:
            total = _spread(terms, high, wide)
        else:
            total = _rounded_spread(rounded(terms, self.plan.terms or FLOAT32), high, wide, self.plan.sums)
        return total if self._factor == 1 else total * self._factor

    def _magnitudes(self, planes: slice, rows: slice, columns: slice) -> Floats:
        """sum(|terms|) of every cell."""
        high, wide = self.plan.rows.cover(rows), self.plan.columns.cover(columns)
        terms = np.abs(self._terms(planes, high, wide))
        return _spread(terms, high, wide) * abs(self._factor)

    def _terms(self, planes: slice, high: Cover, wide: Cover) -> Floats:
        plan = self.plan
        values = self._read(planes, high.windows, wide.windows)
        if plan.given is not None:
            values = rounded(values, plan.given, plan.ties_away)
        divisor: Any = high.divisors[:, None] * wide.divisors[None, :]
        if self._divisor is not None:
            divisor = float(self._divisor)
        if plan.weight is None:
            return np.asarray(values / divisor)
        return np.asarray(values * rounded(np.asarray(1.0 / np.atleast_1d(divisor)), plan.weight))


# ---- Sums over windows


def _spread(terms: Floats, high: Cover, wide: Cover) -> Floats:
    return _gather(_gather(terms, wide, 2), high, 1)


def _gather(values: Floats, cover: Cover, axis: int) -> Floats:
    """For each cell the sum of its range of windows along an axis."""
    if cover.width <= 1 and np.array_equal(cover.lo, np.arange(values.shape[axis])) and (cover.hi > cover.lo).all():
        return values
    values = _with_zero(values, axis)
    zero = values.shape[axis] - 1
    total = np.take(values, np.where(cover.lo < cover.hi, cover.lo, zero), axis=axis)
    if cover.width <= _SEVERAL:
        for number in range(1, cover.width):
            window = cover.lo + number
            total += np.take(values, np.where(window < cover.hi, window, zero), axis=axis)
        return total
    return _gather_doubling(values, cover, axis, zero)


def _gather_doubling(values: Floats, cover: Cover, axis: int, zero: int) -> Floats:
    """By sums over 1, 2, 4 ... windows, so that the cost grows with the logarithm of the width."""
    place, left, total = cover.lo.copy(), cover.hi - cover.lo, None
    size = 1
    while True:
        taken = (left & size) != 0
        part = np.take(values, np.where(taken, place, zero), axis=axis)
        total = part if total is None else total + part
        place = place + np.where(taken, size, 0)
        size *= 2
        if size > cover.width:
            return total
        wider = values.copy()
        shifted, kept = ([slice(None)] * 3 for _ in range(2))
        shifted[axis], kept[axis] = slice(size // 2, zero), slice(0, max(0, zero - size // 2))
        wider[tuple(kept)] += values[tuple(shifted)]
        values = wider


def _with_zero(values: Floats, axis: int) -> Floats:
    shape = list(values.shape)
    shape[axis] += 1
    padded = np.zeros(shape)
    inside = tuple(slice(extent) for extent in values.shape)
    padded[inside] = values
    return padded


def _rounded_spread(terms: Floats, high: Cover, wide: Cover, form: Format) -> Floats:
    """Window after window, every sum made in float32 and rounded."""
    terms = _with_zero(_with_zero(terms, 1), 2)
    total = np.zeros((terms.shape[0], high.lo.size, wide.lo.size))
    for down in range(high.width):
        row = np.where(high.lo + down < high.hi, high.lo + down, terms.shape[1] - 1)
        for right in range(wide.width):
            column = np.where(wide.lo + right < wide.hi, wide.lo + right, terms.shape[2] - 1)
            total = total + np.take(np.take(terms, row, axis=1), column, axis=2)
            total = rounded(rounded(total, FLOAT32), form)
    return total
