"""The 1-D primitive: `out[i] = sum(source[lo[i]:hi[i]])` along one axis, for a range of cells.

It gathers: each cell adds up the windows that cover it, in an order that depends on the cell alone, so that
results do not depend on tiles or threads. The source holds the windows `[first, first + length)` that the cells
need, zeros where no such window exists; there is no subtraction, so NaN and infinity stay where they are.

Which cells are computed in one numpy call is chosen per axis (never per tile: it decides the additions):

- phases: every `period`-th cell, a strided slice; for short periods;
- runs: neighbours covered by the same windows, a broadcast copy; for few, wide windows;
- take: all cells by index, with a zero for "no further window"; for the rest.

Sums over four windows and more start from partial sums of 2, 4, 8 ... neighbours, so that the cost grows with
the logarithm of the width.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from .windows import Windows

Array = NDArray[Any]
Term = tuple[Array, int]
"""A summand: an array along the axis, and by how much it is moved."""

LONGEST_PERIOD = 8
SHORTEST_RUN = 16

Strategy = Literal["phases", "runs", "take"]


def strategy_of(windows: Windows) -> Strategy:
    """How the cells of an axis are grouped into numpy calls."""
    if windows.count <= 2 or windows.cells >= SHORTEST_RUN * windows.count:
        return "runs"
    return "phases" if windows.period <= LONGEST_PERIOD else "take"


def base_width(windows: Windows) -> int:
    """How many windows every cell sums in the same way; what a cell has more or less is handled apart."""
    return 1 if strategy_of(windows) == "runs" else max(1, windows.widths[0])


@dataclass(frozen=True)
class Piece:
    """Cells computed together: `out[cells]` from windows that start at `source`, `width` each."""

    cells: slice
    source: slice
    width: int


@dataclass(frozen=True)
class Gather:
    """How to gather the cells `[start, stop)` of an axis.

    first: the window at index 0 of the source; length: its extent, a zero for `take` included;
    real: which of its indices are windows that exist.
    """

    first: int
    length: int
    real: slice
    base: int
    pieces: tuple[Piece, ...]
    takes: tuple[NDArray[np.intp], ...]

    @property
    def windows(self) -> slice:
        """The existing windows, by their own numbers."""
        return slice(self.real.start + self.first, self.real.stop + self.first)

    @property
    def pads(self) -> bool:
        """Whether the source has places that no window fills."""
        return self.real != slice(0, self.length)


@lru_cache(maxsize=16)
def plan_gather(windows: Windows, start: int, stop: int) -> Gather:
    """The gather of cells `[start, stop)`."""
    strategy, base = strategy_of(windows), base_width(windows)
    first, last = source_range(windows, start, stop)
    length = last - first + (1 if strategy == "take" else 0)
    real = slice(min(max(-first, 0), last - first), max(0, min(last, windows.count) - first))
    pieces: Iterator[Piece] = iter(())
    takes: Iterator[NDArray[np.intp]] = iter(())
    known = min(stop, start + windows.period) if strategy == "phases" else stop
    lo, hi = windows.cover(windows.indices(start, known))
    if strategy == "runs":
        lo, hi = np.clip(lo, 0, windows.count), np.clip(hi, 0, windows.count)
    local, width = (lo - first).astype(np.intp), (hi - lo).astype(np.intp)
    if strategy == "phases":
        pieces = _phases(local, width, stop - start, windows.period, windows.shift)
    elif strategy == "runs":
        pieces = _runs(local, width)
    else:
        takes = _takes(local, width, base, windows.widths[1], zero=length - 1)
    return Gather(first, length, slice(min(real.start, real.stop), real.stop), base, tuple(pieces), tuple(takes))


def source_range(windows: Windows, start: int, stop: int) -> tuple[int, int]:
    """The windows that the cells `[start, stop)` are gathered from, beyond those that exist where padded."""
    lo, hi = windows.cover(windows.indices(start, start + 1)), windows.cover(windows.indices(stop - 1, stop))
    first, last = int(lo[0][0]), int(hi[1][0])
    if strategy_of(windows) == "runs":
        first, last = min(max(first, 0), windows.count), min(max(last, 0), windows.count)
    return first, max(first, last)


def _phases(local: NDArray[np.intp], width: NDArray[np.intp], cells: int, period: int, shift: int) -> Iterator[Piece]:
    for phase in range(min(period, cells)):
        begin, count = int(local[phase]), len(range(phase, cells, period))
        source = slice(begin, begin + (count - 1) * shift + 1, shift)
        yield Piece(slice(phase, cells, period), source, int(width[phase]))


def _runs(local: NDArray[np.intp], width: NDArray[np.intp]) -> Iterator[Piece]:
    changes = np.flatnonzero((np.diff(local) != 0) | (np.diff(width) != 0)) + 1
    for begin, end in zip([0, *changes.tolist()], [*changes.tolist(), len(local)], strict=True):
        source = int(local[begin])
        yield Piece(slice(begin, end), slice(source, source + 1), int(width[begin]))


def _takes(
    local: NDArray[np.intp], width: NDArray[np.intp], base: int, greatest: int, zero: int
) -> Iterator[NDArray[np.intp]]:
    yield np.where(width > 0, local, zero)
    for further in range(base, greatest):
        yield np.where(width > further, local + further, zero)


def partial_sums(width: int) -> list[int]:
    """Widths of the partial sums by doubling that a sum of `width` windows starts from.

    >>> partial_sums(3), partial_sums(4), partial_sums(63)
    ([], [2], [2, 4, 8, 16])
    """
    widths, half = [], 2
    while 2 * half <= width:
        widths.append(half)
        half *= 2
    return widths


def gather(source: Array, out: Array, axis: int, plan: Gather, scratch: Array) -> None:
    """`out` along `axis` from `source`, both of the same dtype and extents else.

    scratch: flat, of the same dtype: `source.size` for each of `partial_sums`, and `out.size` for takes.
    """
    terms = _base_terms(source, axis, plan.base, scratch)
    for piece in plan.pieces:
        _add_up(out[at(axis, piece.cells)], _terms_of(piece, source, terms, plan.base), axis, piece.source)
    if plan.takes:
        _take(source, out, axis, plan, terms, scratch)


def at(axis: int, places: slice) -> tuple[slice, ...]:
    """Index of `places` along an axis."""
    return (slice(None),) * axis + (places,)


def _base_terms(source: Array, axis: int, width: int, scratch: Array) -> list[Term]:
    """Terms whose sum is that of `width` neighbours, the widest partial sums first."""
    sums = {1: source}
    for index, wide in enumerate(partial_sums(width)):
        half = sums[wide // 2]
        length = source.shape[axis] - wide + 1
        shape = (*source.shape[:axis], length, *source.shape[axis + 1 :])
        total = scratch[index * source.size :][: math.prod(shape)].reshape(shape)
        np.add(
            half[at(axis, slice(0, length))],
            half[at(axis, slice(wide // 2, wide // 2 + length))],
            out=total,
        )
        sums[wide] = total
    terms, offset = [], 0
    for wide in sorted(sums, reverse=True):
        while width - offset >= wide:
            terms.append((sums[wide], offset))
            offset += wide
    return terms


def _terms_of(piece: Piece, source: Array, base_terms: list[Term], base: int) -> list[Term]:
    if piece.width < base:
        return []
    return base_terms + [(source, further) for further in range(base, piece.width)]


def _add_up(out: Array, terms: list[Term], axis: int, places: slice) -> None:
    moved = [
        array[at(axis, slice(places.start + offset, places.stop + offset, places.step))] for array, offset in terms
    ]
    if not moved:
        out[...] = 0
    elif len(moved) == 1:
        np.copyto(out, moved[0])
    else:
        np.add(moved[0], moved[1], out=out)
    for further in moved[2:]:
        np.add(out, further, out=out)


def _take(source: Array, out: Array, axis: int, plan: Gather, terms: list[Term], scratch: Array) -> None:
    """By index. A zero stands for a window that a cell lacks, so only a base of one may have cells without."""
    taken = scratch[len(partial_sums(plan.base)) * source.size :][: out.size].reshape(out.shape)
    indices = [(array, plan.takes[0] + offset) for array, offset in terms]
    indices += [(source, index) for index in plan.takes[1:]]
    for number, (array, index) in enumerate(indices):
        # mode="clip" only because numpy then writes to out= without a copy of its own; no index is outside.
        np.take(array, index, axis=axis, out=taken, mode="clip")
        if number == 0:
            np.copyto(out, taken)
        else:
            np.add(out, taken, out=out)
