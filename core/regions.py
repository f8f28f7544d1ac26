"""What kind of cell each cell of gradInput is, as far as errors may depend on it: clipped windows and overlap.

A cell's kind is a code of flags, and follows from its row's and its column's alone.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .windows import PoolWindows, Windows

COVERED, SEVERAL, CLIPPED = 1, 2, 4
"""Flags: some window covers the cell; more than one does; one that does reaches past the input."""

KINDS = {
    "clipped": (COVERED | CLIPPED, COVERED | CLIPPED),
    "not_clipped": (COVERED | CLIPPED, COVERED),
    "several": (COVERED | SEVERAL, COVERED | SEVERAL),
    "one": (COVERED | SEVERAL, COVERED),
    "none": (COVERED, 0),
}
"""Kinds of cells by name: those whose flags of the first mask are just the second. The first two are all cells that
a window covers, as are the next two."""

Codes = NDArray[np.uint8]


def axis_codes(windows: Windows, start: int, stop: int) -> Codes:
    """The flags of the cells of one axis in a range.

    >>> axis_codes(PoolWindows.of(6, 2, 3, 2, 1, True), 0, 6).tolist()
    [5, 7, 1, 1, 0, 0]
    """
    lo, hi = windows.cover(windows.indices(start, stop))
    lo, hi = np.maximum(lo, 0), np.minimum(hi, windows.count)
    covered = lo < hi
    codes = covered * COVERED + (hi - lo > 1) * SEVERAL
    if isinstance(windows, PoolWindows):
        first, last = lo * windows.stride - windows.padding, (hi - 1) * windows.stride - windows.padding
        clipped = (first < 0) | (last + windows.kernel > windows.cells)
        codes = codes + (covered & clipped) * CLIPPED
    return np.asarray(codes, np.uint8)


def cell_codes(rows: Codes, columns: Codes) -> Codes:
    """The codes of the cells of a rectangle, from those of its rows and columns."""
    covered = rows[:, None] & columns & COVERED
    flags = (rows[:, None] | columns) & (SEVERAL | CLIPPED)
    return np.where(covered, covered | flags, 0).astype(np.uint8)
