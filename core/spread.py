"""The 1-D primitive: `out[i] = sum(source[lo[i]:hi[i]])` along one axis, for a range of cells.

It gathers: each cell gets the sum of the windows that cover it, added in an order that depends on the cell alone,
so that results do not depend on tiles or threads. The source holds the windows `[first, first + length)` that the
cells need, zeros where no such window exists; there is no subtraction, so NaN and infinity stay where they are.

First the sums of every `width` neighbours, for the few widths there are: additions of the whole source to itself,
moved, in one contiguous numpy call each, by doubling and tripling, so that the cost grows with the logarithm of the
width. Then copies of them to the cells, by the axis' strategy:

- few, runs: neighbours covered by the same windows, a broadcast copy; for few, wide windows, and irregular ones;
- phases: every `period`-th cell, a strided slice, or whole periods at once where all cells in them are covered by
  the same windows; for short periods;
- take: all cells by index; for irregular windows on the axis that is contiguous in memory, or on a long one.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from .windows import Cover

Array = NDArray[Any]

LONGEST_PERIOD = 8
FEW = 64
SHORTEST_RUN = 16
MOST_RUNS = 512
TABLE_CHUNK = 1024
ZERO = np.zeros((), np.uint8)
_SIDE_BY_SIDE: dict[int, type[np.unsignedinteger[Any]]] = {2: np.uint32, 4: np.uint64}

MOST_INDEXED = 2048
"""Cells of an irregular axis that one gather may have, which bounds the tables of indices."""

Strategy = Literal["few", "phases", "runs", "take"]


def strategy_of(windows: Cover, contiguous: bool) -> Strategy:
    """How the cells of an axis are grouped into copies; `few` is `runs` with windows cut to those that exist.

    contiguous: whether the axis' neighbours are neighbours in memory.
    """
    long_runs = windows.count <= FEW and windows.cells >= SHORTEST_RUN * windows.count
    if windows.count <= 2 or (long_runs and windows.widths[1] <= 2):
        return "few"
    if windows.period <= LONGEST_PERIOD:
        return "phases"
    copies = windows.widths[1] == 1
    return "take" if contiguous or copies or windows.cells > MOST_RUNS else "runs"


def width_range(windows: Cover, strategy: Strategy) -> tuple[int, int]:
    """Least and greatest number of windows that the cells of an axis sum, those with none apart."""
    least, greatest = windows.widths
    if strategy == "few":
        return 1, max(1, min(greatest, windows.count))
    return max(1, least), max(1, greatest)


@dataclass(frozen=True)
class Piece:
    """Cells computed together: `out[cells]` from windows that start at `source`, `width` each.

    repeat: how many cells in a row get the same.
    """

    cells: slice
    source: slice
    width: int
    repeat: int = 1


@dataclass(frozen=True)
class Gather:
    """How to gather some cells of an axis.

    cells: how many; first: the window at index 0 of the source; length: its extent, a zero for `take` included;
    real: which of its indices are windows that exist.
    """

    cells: int
    first: int
    length: int
    real: slice
    widths: tuple[int, int]
    pieces: tuple[Piece, ...]
    takes: tuple[NDArray[np.intp], ...]

    @property
    def windows(self) -> slice:
        """The existing windows, by their own numbers."""
        return slice(self.real.start + self.first, self.real.stop + self.first)


def is_indexed(windows: Cover, contiguous: bool) -> bool:
    """Whether cells are gathered by index, so that a gather may have `MOST_INDEXED` of them."""
    return strategy_of(windows, contiguous) == "take"


def plan_gather(windows: Cover, start: int, stop: int, contiguous: bool) -> Gather:
    """The gather of cells `[start, stop)`."""
    strategy = strategy_of(windows, contiguous)
    widths = width_range(windows, strategy)
    if start == stop:
        return Gather(0, 0, 0, slice(0, 0), widths, (), ())
    first, last = source_range(windows, start, stop, strategy)
    length = last - first + (strategy == "take")
    begin = min(max(-first, 0), last - first)
    real = slice(begin, max(begin, min(last, windows.count) - first))
    pieces: Iterator[Piece] = iter(())
    takes: tuple[NDArray[np.intp], ...] = ()
    if strategy == "phases":
        pieces = _phases(windows, start, stop, first)
    elif strategy == "take":
        takes = _takes(windows, start, stop, first, widths, zero=length - 1)
    else:
        pieces = _runs(windows, start, stop, first, strategy)
    return Gather(stop - start, first, length, real, widths, tuple(pieces), takes)


def source_extent(windows: Cover, cells: int, contiguous: bool) -> tuple[int, int]:
    """Most windows that gathers of `cells` cells have: that exist, and in their sources (bounds)."""
    strategy = strategy_of(windows, contiguous)
    if cells >= windows.cells:
        first, last = source_range(windows, 0, windows.cells, strategy)
        span = last - first
    else:
        span = windows.span(cells)
    real = min(span, windows.count)
    return real, (real if strategy == "few" else span) + (strategy == "take")


def source_range(windows: Cover, start: int, stop: int, strategy: Strategy) -> tuple[int, int]:
    """The windows that the cells `[start, stop)` are gathered from, beyond those that exist where padded."""
    first, last = _cover(windows, start, strategy)[0], _cover(windows, stop - 1, strategy)[1]
    return first, max(first, last)


def _cover(windows: Cover, cell: int, strategy: Strategy) -> tuple[int, int]:
    """Range of the windows that cover a cell."""
    lo, hi = windows.cover(cell)
    if strategy == "few":
        lo, hi = min(max(lo, 0), windows.count), min(max(hi, 0), windows.count)
    return lo, hi


def _phases(windows: Cover, start: int, stop: int, first: int) -> Iterator[Piece]:
    """A piece for each phase, and first of all one for all phases where they copy the same window."""
    period = windows.period
    begin = start
    whole = (stop - start) // period * period
    lo, hi = windows.cover(start)
    if whole and period > 1 and all(windows.cover(start + phase) == (lo, hi) for phase in range(period)):
        source = slice(lo - first, lo - first + whole // period * windows.shift, windows.shift)
        yield Piece(slice(0, whole), source, hi - lo, period)
        begin += whole
    for cell in range(begin, min(stop, begin + period)):
        lo, hi = windows.cover(cell)
        count = len(range(cell, stop, period))
        source = slice(lo - first, lo - first + (count - 1) * windows.shift + 1, windows.shift)
        yield Piece(slice(cell - start, stop - start, period), source, hi - lo)


def _runs(windows: Cover, start: int, stop: int, first: int, strategy: Strategy) -> Iterator[Piece]:
    begin = start
    while begin < stop:
        lo, hi = _cover(windows, begin, strategy)
        cells = range(begin, stop)
        end = begin + bisect_left(cells, True, key=lambda cell: _cover(windows, cell, strategy) != (lo, hi))
        yield Piece(slice(begin - start, end - start), slice(lo - first, lo - first + 1), hi - lo)
        begin = end


def _takes(
    windows: Cover, start: int, stop: int, first: int, widths: tuple[int, int], zero: int
) -> tuple[NDArray[np.intp], ...]:
    least, greatest = widths
    tables = tuple(np.empty(stop - start, np.intp) for _ in range(greatest - least + 1))
    for begin in range(start, stop, TABLE_CHUNK):
        end = min(stop, begin + TABLE_CHUNK)
        lo, hi = windows.cover(windows.indices(begin, end))
        local, width = (lo - first).astype(np.intp), (hi - lo).astype(np.intp)
        part = slice(begin - start, end - start)
        tables[0][part] = np.where(width > 0, local, zero)
        for further, table in enumerate(tables[1:], least):
            table[part] = np.where(width > further, local + further, zero)
    return tables


def chain(width: int) -> list[int]:
    """How a sum of `width` neighbours is built up: 2 doubles and 3 triples the width so far, 1 adds one neighbour.

    >>> chain(3), chain(16), chain(63)
    ([3], [2, 2, 2, 2], [3, 2, 1, 3, 3])
    """
    if width == 1:
        return []
    for factor in (2, 3):
        if width % factor == 0:
            return [*chain(width // factor), factor]
    return [*chain(width - 1), 1]


def scratch_size(windows: Cover, contiguous: bool, source_size: int, out_size: int) -> int:
    """Elements of scratch that `gather` needs for the cells of an axis."""
    strategy = strategy_of(windows, contiguous)
    least, greatest = width_range(windows, strategy)
    sums = min(2, len(chain(least)))
    if strategy == "take":
        return sums * source_size + out_size
    return (sums + greatest - least) * source_size


def gather(source: Array, out: Array, axis: int, plan: Gather, scratch: Array) -> None:
    """`out` along `axis` from `source`, both of the same dtype and extents else; the source is contiguous.

    scratch: flat, of the same dtype, `scratch_size` elements.
    """
    least, greatest = plan.widths
    slots = (scratch[start:][: source.size] for start in range(0, scratch.size, max(1, source.size)))
    step = math.prod(source.shape[axis + 1 :])
    total = _base_sum(source.reshape(-1), step, least, slots).reshape(source.shape)
    if plan.takes:
        return _take(source, total, out, axis, plan.takes, scratch[scratch.size - out.size :])
    sums = {least: total}
    for width in range(least + 1, greatest + 1):
        sums[width] = next(slots).reshape(source.shape)
        _add_moved(sums[width - 1].reshape(-1), source.reshape(-1), (width - 1) * step, sums[width].reshape(-1))
    for piece in plan.pieces:
        values = sums[piece.width][at(axis, piece.source)] if piece.width else ZERO
        _fill(out[at(axis, piece.cells)], values, axis, piece.repeat)
    return None


def _fill(out: Array, values: Array, axis: int, repeat: int) -> None:
    """Each value to `repeat` neighbours along an axis."""
    if repeat == 1:
        np.copyto(out, values, casting="unsafe")
    elif axis < out.ndim - 1:
        shape = (*out.shape[:axis], out.shape[axis] // repeat, repeat, *out.shape[axis + 1 :])
        np.copyto(out.reshape(shape), np.expand_dims(values, axis + 1), casting="unsafe")
    elif out.dtype == np.uint16 and out.strides[-1] == out.itemsize and repeat in _SIDE_BY_SIDE:
        # As one wider integer: two passes over the values instead of `repeat` over the cells, a third of the time.
        wide = out.view(_SIDE_BY_SIDE[repeat])
        np.copyto(wide, values)
        np.multiply(wide, wide.dtype.type(sum(1 << 16 * place for place in range(repeat))), out=wide)
    else:
        for place in range(repeat):
            np.copyto(out[..., place::repeat], values, casting="unsafe")


def at(axis: int, places: slice) -> tuple[slice, ...]:
    """Index of `places` along an axis."""
    return (slice(None),) * axis + (places,)


def _base_sum(source: Array, step: int, width: int, slots: Iterator[Array]) -> Array:
    """Sums of `width` elements `step` apart, from each element on; those that reach past the end are undefined."""
    steps = chain(width)
    total, wide = source, 1
    buffers = cycle([next(slots) for _ in steps[:2]])
    for factor in steps:
        if factor == 1:
            _add_moved(total, source, wide * step, total)
            wide += 1
            continue
        summed = next(buffers)
        _add_moved(total, total, wide * step, summed)
        if factor == 3:
            _add_moved(summed, total, 2 * wide * step, summed)
        total, wide = summed, wide * factor
    return total


def _add_moved(left: Array, right: Array, offset: int, out: Array) -> None:
    """`out[i] = left[i] + right[i + offset]`, flat: sums across the end of a row are made too, and not used."""
    length = max(0, left.size - offset)
    np.add(left[:length], right[offset:], out=out[:length])


def _take(
    source: Array, total: Array, out: Array, axis: int, takes: tuple[NDArray[np.intp], ...], scratch: Array
) -> None:
    """By index; where a cell lacks a window that others have, it adds the zero at the source's end."""
    for number, indices in enumerate(takes):
        direct = number == 0 and out.flags.c_contiguous
        taken = out if direct else scratch.reshape(out.shape)
        # mode="clip" only because numpy then writes to out= without a copy of its own; no index is outside.
        np.take(source if number else total, indices, axis=axis, out=taken, mode="clip")
        if number:
            np.add(out, taken, out=out)
        elif not direct:
            np.copyto(out, taken)
