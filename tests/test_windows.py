"""core/windows against the oracle's windows, cell by cell."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.oracle import Pool, Window, adaptive_windows

from poolgrad.core.windows import AdaptiveWindows, Cover, Indices, PoolWindows, Windows

Axis = tuple[Windows, list[Window]]


def _pool_axis(cells: int, kernel: int, stride: int, padding: int, ceil: bool, counted: bool) -> Axis | None:
    pool = Pool((kernel, kernel), (stride, stride), (padding, padding), ceil, counted)
    expected = pool.windows(0, cells)
    if not expected:
        return None
    return PoolWindows.of(cells, len(expected), kernel, stride, padding, counted), expected


def _assert_covers(windows: Windows, expected: list[Window], lo: Indices, hi: Indices) -> None:
    """The range of each cell, cut to the windows that exist, has just those that cover it."""
    covering = [[o for o, w in enumerate(expected) if w.start <= cell < w.stop] for cell in range(windows.cells)]
    cut = [list(range(max(a, 0), min(b, windows.count))) for a, b in zip(lo.tolist(), hi.tolist(), strict=True)]
    assert cut == covering


def _assert_agrees(windows: Windows, expected: list[Window]) -> None:
    cells = windows.indices(0, windows.cells)
    lo, hi = windows.cover(cells)
    _assert_covers(windows, expected, lo, hi)
    divisors = windows.divisors(windows.indices(0, windows.count)).tolist()
    assert divisors == [window.divisor for window in expected]
    assert windows.uniform_divisor in (None, divisors[0])
    if windows.uniform_divisor is not None:
        assert set(divisors) == {windows.uniform_divisor}


def _assert_passes(windows: Windows, expected: list[Window], rounds: bool) -> bool:
    """Each cell copies, of the summed ones, one that sums its own windows; returns whether there are two passes."""
    sums, copies = windows.passes(rounds)
    for cover in (sums, copies):
        if cover:
            _assert_periodic(cover)
    if not (sums and copies):
        assert (sums or copies) is windows
        return False
    assert (sums.count, copies.count, copies.cells) == (windows.count, sums.cells, windows.cells)
    copied, end = copies.cover(copies.indices(0, copies.cells))
    assert np.array_equal(copied + 1, end)
    assert (copied.min(), copied.max()) == (0, sums.cells - 1)
    _assert_covers(windows, expected, *sums.cover(copied))
    return True


def _assert_periodic(windows: Cover) -> None:
    """Cell i + period has the range of cell i moved by shift; widths and span bound what cells sum."""
    cells = windows.indices(0, windows.cells)
    lo, hi = windows.cover(cells)
    later_lo, later_hi = windows.cover(cells + windows.period)
    assert np.array_equal(later_lo, lo + windows.shift)
    assert np.array_equal(later_hi, hi + windows.shift)
    least, greatest = windows.widths
    assert least <= (hi - lo).min()
    assert (hi - lo).max() <= greatest
    assert (np.diff(lo) >= 0).all()
    assert (np.diff(hi) >= 0).all()
    for extent in range(1, windows.cells + 1):
        assert (hi[extent - 1 :] - lo[: windows.cells - extent + 1]).max() <= windows.span(extent)


@given(st.integers(1, 20), st.integers(1, 30), st.integers(1, 12), st.data(), st.booleans(), st.booleans())
def test_pool_windows(cells: int, kernel: int, stride: int, data: st.DataObject, ceil: bool, counted: bool) -> None:
    axis = _pool_axis(cells, kernel, stride, data.draw(st.integers(0, kernel // 2)), ceil, counted)
    if axis:
        _assert_agrees(*axis)
        _assert_periodic(axis[0])
        for rounds in (False, True):
            _assert_passes(*axis, rounds)


def test_every_small_pool() -> None:
    checked = two_passes = 0
    for cells in range(1, 8):
        for kernel in range(1, 8):
            for stride in range(1, 5):
                for padding in range(kernel // 2 + 1):
                    for flags in ((False, True), (True, True), (True, False), (False, False)):
                        if axis := _pool_axis(cells, kernel, stride, padding, *flags):
                            _assert_agrees(*axis)
                            two_passes += _assert_passes(*axis, rounds=True)
                            checked += 1
    assert checked > 1000
    assert two_passes > 100


@given(st.integers(1, 60), st.integers(1, 60))
def test_adaptive_windows(cells: int, count: int) -> None:
    windows, expected = AdaptiveWindows(cells, count), adaptive_windows(cells, count)
    _assert_agrees(windows, expected)
    _assert_periodic(windows)
    _assert_passes(windows, expected, rounds=True)


@pytest.mark.parametrize("counted", [True, False])
@pytest.mark.parametrize("kernel", [1280, 1250999896764, 2**63 - 1])
def test_huge_pool_windows(kernel: int, counted: bool) -> None:
    checked = 0
    for stride in (1, 3, 1280, 1250999896764, 2**63 - 1):
        for padding in (0, 5, kernel // 3, kernel // 2):
            if axis := _pool_axis(7, kernel, stride, padding, True, counted):
                _assert_agrees(*axis)
                checked += 1
    assert checked >= 8


def test_huge_adaptive_windows_need_no_wider_integers_than_they_have() -> None:
    windows = AdaptiveWindows(2**40, 2**39 + 1)
    last = windows.indices(2**40 - 1, 2**40)
    lo, hi = windows.cover(last)
    assert int(lo[0]) == (2**40 - 1) * (2**39 + 1) // 2**40
    assert int(hi[0]) == 2**39 + 1
    assert int(windows.divisors(windows.indices(2**39, 2**39 + 1))[0]) == 2**40 - 2**39 * 2**40 // (2**39 + 1)
