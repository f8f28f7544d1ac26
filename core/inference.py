"""What the data alone say: a common divisor, a constant factor, and which windows could have made them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from .formats import Floats, Format, ulp
from .hypotheses import Call, extents, pool, undivided
from .operators import output_size
from .prediction import Axis

MOST_DIVISORS = 3
MOST_CANDIDATES = 3000
"""Windows of an axis that are scored by its sums."""
BEST_CANDIDATES = 10
"""Windows of an axis that are then tried together with the other axis'."""
_MOST_LOOPED = 600
"""Kernels up to which every padding is looked at."""
_MOST_KERNEL = 20_000


# ---- A common divisor or factor


@dataclass(frozen=True)
class Span:
    """Numbers from `low` to `high`."""

    low: float
    high: float

    @property
    def middle(self) -> float:
        """Halfway, by ratio."""
        return math.copysign(math.sqrt(self.low * self.high), self.low)


def ratios(numerators: Floats, sums: Floats, slack: Floats, form: Format) -> Span | None:
    """The q with numerators = q * sums for every element, within an ulp and slack of the numerators.

    None where there is no such q. Elements that say nothing (zeros, subnormals, infinities) are passed over.
    """
    error = ulp(numerators, form) + slack
    telling = np.isfinite(numerators) & np.isfinite(sums) & (sums != 0) & (np.abs(numerators) > 4 * error)
    telling &= np.abs(numerators) >= 2.0**form.least
    if np.count_nonzero(telling) < max(2, numerators.size // 100):
        return None
    a, s, error = numerators[telling], sums[telling], error[telling]
    ends = (a - error) / s, (a + error) / s
    low, high = float(np.minimum(*ends).max()), float(np.maximum(*ends).min())
    return Span(low, high) if low <= high and low * high > 0 else None


def divisors_in(span: Span | None) -> list[int]:
    """The integers d nearest the middle for which 1/d is in the span."""
    if span is None:
        return []
    ends = sorted((1 / span.low, 1 / span.high))
    if max(map(abs, ends)) >= 2.0**63:
        return []
    low, high = math.ceil(ends[0]), math.floor(ends[1])
    middle = round(1 / span.middle)
    near = sorted(range(max(low, middle - 2), min(high, middle + 2) + 1), key=lambda number: abs(number - middle))
    return [number for number in near if number][:MOST_DIVISORS]


def factors_in(span: Span | None) -> list[Fraction]:
    """The simplest factor in the span: a power of two, else the fraction of the least terms; none for 1."""
    if span is None or span.low <= 1 <= span.high:
        return []
    sign = 1 if span.low > 0 else -1
    low, high = sorted((abs(span.low), abs(span.high)))
    if not 1e-300 < low <= high < 1e300:
        return []
    power = math.floor(math.log2(high))
    if 2.0**power >= low:
        return [sign * Fraction(2) ** power]
    return [sign * _simplest(Fraction(low), Fraction(high))]


def _simplest(low: Fraction, high: Fraction) -> Fraction:
    """The fraction of the least denominator from low to high, both positive, by their continued fractions.

    >>> _simplest(Fraction(31, 100), Fraction(35, 100))
    Fraction(1, 3)
    """
    whole = math.floor(low)
    if whole == low or whole + 1 <= high:
        return Fraction(math.ceil(low))
    return whole + 1 / _simplest(1 / (high - whole), 1 / (low - whole))


# ---- Windows that fit


@dataclass(frozen=True)
class Lines:
    """Sums across an axis for every plane of a sample: of gradInput by cell, of gradOutput by window."""

    cells: Floats
    windows: Floats


@dataclass(frozen=True, order=True)
class Fit:
    """Windows of one axis that give its size; ordered by how little of the sums they leave unexplained."""

    rest: float
    kernel: int
    padding: int
    stride: int
    ceil_mode: bool


def fitting(cells: int, count: int) -> Iterator[tuple[int, int, int, bool]]:
    """(kernel, stride, padding, ceil_mode) that make `count` windows of `cells` cells, small kernels first.

    Of strides that come to the same, as with one window, the kernel's own or the least; floor before ceil.
    """
    for kernel in range(1, min(2 * cells + 1, _MOST_KERNEL) + 1):
        most = kernel // 2 if kernel <= _MOST_LOOPED else min(3, kernel // 2)
        for padding in range(most + 1):
            if kernel <= 2 * cells + 2 * padding:
                for stride in _strides(cells, count, kernel, padding):
                    for ceil_mode in (False, True):
                        if output_size(cells, kernel, stride, padding, ceil_mode) == count:
                            yield kernel, stride, padding, ceil_mode
                            break


def _strides(cells: int, count: int, kernel: int, padding: int) -> Iterable[int]:
    if count == 1:
        return (kernel,)
    span = cells + 2 * padding - kernel
    least = max(1, span // count)
    return range(least, max(least, (cells + padding) // (count - 1)) + 1)


def fits_of_axis(cells: int, count: int, lines: Lines) -> list[Fit]:
    """The best windows of an axis, by least squares on the sums across it with any constant factor."""
    found = []
    for kernel, stride, padding, ceil_mode in itertools.islice(fitting(cells, count), MOST_CANDIDATES):
        # Divisors of all three kinds, for which of them it is cannot be told from one axis.
        kinds = [pool(cells, kernel, stride, padding, include) for include in (True, False)]
        kinds.append(undivided(kinds[0]))
        rest = min(_unexplained(Axis(cells, count, kind), lines) for kind in kinds)
        found.append(Fit(round(rest, 9), kernel, padding, stride, ceil_mode))
    return sorted(found)[:BEST_CANDIDATES]


def _unexplained(axis: Axis, lines: Lines) -> float:
    """Share of the sums' squares that the best multiple of the prediction leaves."""
    cells = lines.cells.shape[1]
    cover = axis.cover(slice(0, cells))
    known = lines.windows.shape[1]
    if cover.windows.stop > known:
        cells = int(np.searchsorted(cover.hi, known - cover.windows.start, "right"))
    terms = lines.windows[:, cover.windows.start : min(cover.windows.stop, known)]
    totals = np.zeros((terms.shape[0], terms.shape[1] + 1))
    np.cumsum(terms / cover.divisors[: terms.shape[1]], axis=1, out=totals[:, 1:])
    predicted = totals[:, cover.hi[:cells]] - totals[:, cover.lo[:cells]]
    actual = lines.cells[:, :cells]
    squares = float((predicted * predicted).sum())
    if squares == 0 or actual.size == 0:
        return 1.0
    factor = float((predicted * actual).sum()) / squares
    rest = actual - factor * predicted
    return float((rest * rest).sum()) / max(float((actual * actual).sum()), 1e-300)


def calls_that_fit(call: Call, lines: tuple[Lines, Lines]) -> Iterator[Call]:
    """avg2d calls on the same tensors, the likeliest first: both axes alike before axes that differ."""
    rows, columns = (fits_of_axis(*extents(call, axis), lines[axis]) for axis in (0, 1))
    pairs = sorted(itertools.product(rows, columns), key=lambda pair: pair[0].rest + pair[1].rest)
    for row, column in pairs:
        for padded in (True, False):
            made = _call(call, row, column, padded)
            if made is not None:
                yield made


def _call(call: Call, row: Fit, column: Fit, count_include_pad: bool) -> Call | None:
    made = replace(
        call,
        operator="avg2d",
        kernel=(row.kernel, column.kernel),
        stride=(row.stride, column.stride),
        padding=(row.padding, column.padding),
        count_include_pad=count_include_pad,
        divisor_override=0,
    )
    modes = dict.fromkeys((row.ceil_mode or column.ceil_mode, False, True))
    legal = (replace(made, ceil_mode=ceil_mode) for ceil_mode in modes)
    return next((candidate for candidate in legal if candidate.is_legal), None)


def lines_of(values: NDArray[np.float64], axis: int) -> Floats:
    """Sums across an axis of (planes, rows, columns), by plane; what is not finite counts as 0."""
    finite = np.where(np.isfinite(values), values, 0.0)
    return np.asarray(finite.sum(axis=2 if axis == 0 else 1))
