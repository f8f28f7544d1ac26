"""1-D window geometry of both operators: which windows cover a cell, and what each window divides by.

Seen from an input cell, the windows that cover it are a contiguous range `[lo, hi)` of outputs, for both
operators: a `Cover`. Both are periodic: cell `i + period` is covered by the range of cell `i` moved by `shift`.
That is what `core/spread` builds on. All index arithmetic is in integers; where a product could pass 2**62 it is
in Python's own.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np

Indices = Any
"""A Python integer, or an array of int64, or of Python integers (object) where int64 could overflow."""


@dataclass(frozen=True)
class Cover(ABC):
    """Which of `count` sources each of `cells` cells of an axis sums."""

    cells: int
    count: int

    @abstractmethod
    def cover(self, cells: Indices) -> tuple[Indices, Indices]:
        """Range `[lo, hi)` of the windows that cover each cell.

        It is not cut to `[0, count)`: windows that do not exist are to be taken as zeros, so that `hi - lo`
        takes few values and moves periodically.
        """

    @property
    @abstractmethod
    def period(self) -> int:
        """After this many cells the pattern repeats."""

    @property
    @abstractmethod
    def shift(self) -> int:
        """By how many windows the ranges move in a period."""

    @property
    @abstractmethod
    def widths(self) -> tuple[int, int]:
        """Least and greatest `hi - lo` over all cells (a bound; the least may be 0)."""

    @abstractmethod
    def span(self, cells: int) -> int:
        """Most windows that `cells` neighbours are covered by (a bound)."""

    def indices(self, start: int, stop: int) -> Indices:
        """The integers of a range, wide enough for this axis' arithmetic."""
        return np.arange(start, stop).astype(np.int64 if self._fits_int64 else object)

    @property
    @abstractmethod
    def _fits_int64(self) -> bool: ...

    @property
    def overlap(self) -> bool:
        """Whether some cell is covered by more than one window."""
        return self.widths[1] > 1


@dataclass(frozen=True)
class Windows(Cover):
    """The windows of one axis: `cells` input cells, `count` outputs."""

    @abstractmethod
    def divisors(self, windows: Indices) -> Indices:
        """Divisor of this axis for each window."""

    @property
    @abstractmethod
    def uniform_divisor(self) -> int | None:
        """The divisor when every window has the same one, else None."""

    def passes(self, rounds: bool) -> tuple[Cover | None, Cover | None]:
        """How windows are summed, on as few cells as tell all sums apart, and how those are copied to all cells.

        None where there is nothing to sum or to copy. rounds: whether each sum must be rounded, so that fewer of
        them pay for another pass.
        """
        return (self, None) if self.overlap else (None, self)


@dataclass(frozen=True)
class PoolWindows(Windows):
    """avg2d: windows of `kernel` cells, `stride` apart, the first one `padding` before the input.

    PyTorch's semantics (`aten::avg_pool2d_backward`): a window ends with the right padding at the latest, and
    its divisor is its length there, or, without `count_include_pad`, the number of cells in it.

    >>> axis = PoolWindows.of(cells=5, count=3, kernel=2, stride=2, padding=0, count_include_pad=True)
    >>> axis.divisors(axis.indices(0, 3)).tolist()
    [2, 2, 1]
    """

    kernel: int
    stride: int
    padding: int
    count_include_pad: bool
    reach: int
    lead: int
    step: int

    @classmethod
    def of(
        cls, cells: int, count: int, kernel: int, stride: int, padding: int, count_include_pad: bool
    ) -> PoolWindows:
        """Windows with the cover in its least form.

        A kernel far wider than the input covers what a smaller one does: `reach`, `lead` and `step` are kernel,
        padding and stride cut to what can be told apart, so that no cost grows with the parameters' size.
        """
        lead = min(padding, (count - 1) * stride)
        reach = min(kernel - (padding - lead), cells + lead)
        step = stride if count > 1 else max(cells, reach)
        return cls(cells, count, kernel, stride, padding, count_include_pad, reach, lead, step)

    def cover(self, cells: Indices) -> tuple[Indices, Indices]:
        """As of the base class."""
        hi = (cells + self.lead) // self.step + 1
        lo = (cells + self.lead - self.reach) // self.step + 1
        return lo, hi

    def divisors(self, windows: Indices) -> Indices:
        """As of the base class."""
        start = windows * self.stride - self.padding
        end = np.minimum(start + self.kernel, self.cells + self.padding)
        if self.count_include_pad:
            return np.asarray(end - start)
        return np.asarray(np.minimum(end, self.cells) - np.maximum(start, 0))

    @property
    def period(self) -> int:
        """As of the base class."""
        return self.step

    @property
    def shift(self) -> int:
        """As of the base class."""
        return 1

    @property
    def widths(self) -> tuple[int, int]:
        """As of the base class."""
        return self.reach // self.step, -(-self.reach // self.step)

    def span(self, cells: int) -> int:
        """As of the base class."""
        return -(-(cells - 1 + self.reach) // self.step)

    @property
    def uniform_divisor(self) -> int | None:
        """As of the base class."""
        border = self.padding if self.count_include_pad else 0
        first = -self.padding
        last = (self.count - 1) * self.stride - self.padding
        inside = first >= -border and last + self.kernel <= self.cells + border
        if inside or self.count == 1:
            return int(self.divisors(np.array([0], dtype=object))[0])
        return None

    @property
    def _fits_int64(self) -> bool:
        return self.cells + self.count * self.stride + 2 * self.kernel < 2**62

    def passes(self, rounds: bool) -> tuple[Cover | None, Cover | None]:
        """As of the base class: a run has `wide` windows, or, where kernels do not end on strides, one more."""
        wide, rest = divmod(self.reach, self.step)
        pays = (self.step >= 3 and rounds) if rest else self.step >= 2
        if not self.overlap or not pays:
            return super().passes(rounds)
        runs = PoolRuns.of(self.cells, self.lead, self.step, rest)
        kernel, stride = (2 * wide + 1, 2) if rest else (wide, 1)
        return PoolWindows.of(runs.count, self.count, kernel, stride, runs.first, count_include_pad=True), runs


@dataclass(frozen=True)
class PoolRuns(Cover):
    """Which run each cell of avg2d is in: a new one begins where a window does, and where one ends.

    Windows are `step` apart and begin `lead` before the cells; they end `rest` after another has begun. Runs are
    counted from `first`, the one of cell 0.
    """

    first: int
    lead: int
    step: int
    rest: int

    @classmethod
    def of(cls, cells: int, lead: int, step: int, rest: int) -> PoolRuns:
        """The runs of some cells."""
        one = cls(1, 0, 0, lead, step, rest)
        first, last = one.cover(0)[0], one.cover(cells - 1)[0]
        return cls(cells, last - first + 1, first, lead, step, rest)

    def cover(self, cells: Indices) -> tuple[Indices, Indices]:
        """As of the base class."""
        run = (cells + self.lead) // self.step - self.first
        if self.rest:
            run = run + (cells + self.lead - self.rest) // self.step + 1
        return run, run + 1

    @property
    def period(self) -> int:
        """As of the base class."""
        return self.step

    @property
    def shift(self) -> int:
        """As of the base class."""
        return 2 if self.rest else 1

    @property
    def widths(self) -> tuple[int, int]:
        """As of the base class."""
        return 1, 1

    def span(self, cells: int) -> int:
        """As of the base class."""
        return self.shift * -(-cells // self.step) + 1

    @property
    def _fits_int64(self) -> bool:
        return self.cells + self.lead + self.step < 2**62


@dataclass(frozen=True)
class AdaptiveWindows(Windows):
    """adaptive2d: window `o` is `[floor(o*n/m), ceil((o+1)*n/m))`, as `aten::_adaptive_avg_pool2d_backward`.

    >>> axis = AdaptiveWindows(cells=5, count=3)
    >>> axis.divisors(axis.indices(0, 3)).tolist()
    [2, 3, 2]
    """

    def cover(self, cells: Indices) -> tuple[Indices, Indices]:
        """As of the base class."""
        # floor(o*n/m) <= i < ceil((o+1)*n/m), solved for o: the same formula with n and m exchanged.
        return cells * self.count // self.cells, -(-(cells + 1) * self.count // self.cells)

    def divisors(self, windows: Indices) -> Indices:
        """As of the base class."""
        start = windows * self.cells // self.count
        return np.asarray(-(-(windows + 1) * self.cells // self.count) - start)

    @property
    def period(self) -> int:
        """As of the base class."""
        return self.cells // math.gcd(self.cells, self.count)

    @property
    def shift(self) -> int:
        """As of the base class."""
        return self.count // math.gcd(self.cells, self.count)

    @property
    def widths(self) -> tuple[int, int]:
        """As of the base class."""
        if self.count % self.cells == 0:
            return self.count // self.cells, self.count // self.cells
        if self.cells % self.count == 0:
            return 1, 1
        least = -(-self.count // self.cells)
        return least, least + 1

    def span(self, cells: int) -> int:
        """As of the base class."""
        return -(-cells * self.count // self.cells) + 1

    @property
    def uniform_divisor(self) -> int | None:
        """As of the base class."""
        return self.cells // self.count if self.cells % self.count == 0 else None

    @property
    def _fits_int64(self) -> bool:
        return (self.cells + 1) * (self.count + 1) < 2**62

    def passes(self, rounds: bool) -> tuple[Cover | None, Cover | None]:
        """As of the base class: a run is of one window alone, or of two neighbours."""
        if not self.overlap or 8 * self.count > 3 * self.cells:
            return super().passes(rounds)
        runs = 2 * self.count - 1
        return PoolWindows.of(runs, self.count, 3, 2, 1, count_include_pad=True), AdaptiveRuns(self.cells, runs)


@dataclass(frozen=True)
class AdaptiveRuns(Cover):
    """Which run each cell of adaptive2d is in: run 2*o of window o alone, run 2*o+1 of windows o and o+1."""

    def cover(self, cells: Indices) -> tuple[Indices, Indices]:
        """As of the base class."""
        lo, hi = self._windows.cover(cells)
        return lo + hi - 1, lo + hi

    @property
    def period(self) -> int:
        """As of the base class."""
        return self._windows.period

    @property
    def shift(self) -> int:
        """As of the base class."""
        return 2 * self._windows.shift

    @property
    def widths(self) -> tuple[int, int]:
        """As of the base class."""
        return 1, 1

    def span(self, cells: int) -> int:
        """As of the base class."""
        return 2 * self._windows.span(cells)

    @property
    def _windows(self) -> AdaptiveWindows:
        return AdaptiveWindows(self.cells, (self.count + 1) // 2)

    @property
    def _fits_int64(self) -> bool:
        return self._windows._fits_int64
