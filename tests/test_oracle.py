"""The oracle itself: hand-worked cases, the public numeric cases, and wrong kernels that must not pass."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from tests import oracle
from tests.cases import LAYERS, NUMERIC, Array, Case, NumericCase
from tests.oracle import Pool, Window, adaptive_windows, exact, spread

Kernel = Callable[[Array, tuple[int, ...], Pool | None], Array]


def passes(kernel: Kernel, numeric: NumericCase) -> bool:
    """Whether a kernel gives a numeric case's gradInput (to the rounding of the printed doubles)."""
    result = kernel(numeric.grad_output, numeric.case.self_shape, numeric.case.pool)
    return np.allclose(result, numeric.grad_input, rtol=1e-14, atol=0)


def test_hand_worked_overlap() -> None:
    # Windows [0,2) and [1,3) of three cells, each giving half of its gradient to its cells.
    pool = Pool((1, 2), (1, 1))
    result = oracle.avg_pool2d_backward(exact(np.array([[[10.0, 6.0]]])), (1, 1, 3), pool)
    assert result.tolist() == [[[5, 8, 3]]]


def test_hand_worked_ceil_overhang() -> None:
    # Cells 0..4, kernel 2, stride 2: the last window has one cell and divides by 1.
    assert Pool((2, 2), (2, 2), ceil_mode=True).windows(0, 5) == [(0, 2, 2), (2, 4, 2), (4, 5, 1)]
    # Padding 1 on 4 cells, kernel 3, stride 2: the last window is cell 3 and the padding, and divides by 2.
    assert Pool((3, 3), (2, 2), (1, 1), True).windows(0, 4) == [(0, 2, 3), (1, 4, 3), (3, 4, 2)]
    assert Pool((3, 3), (2, 2), (1, 1), True, False).windows(0, 4) == [(0, 2, 2), (1, 4, 3), (3, 4, 1)]


def test_hand_worked_window_that_starts_past_the_input_does_not_exist() -> None:
    # Kernel 3, stride 4 over 8 cells in ceil mode: ceil(5/4)+1 = 3, but the third would start at cell 8.
    assert Pool((3, 3), (4, 4), ceil_mode=True).windows(0, 8) == [(0, 3, 3), (4, 7, 3)]


def test_hand_worked_adaptive() -> None:
    assert adaptive_windows(5, 3) == [(0, 2, 2), (1, 4, 3), (3, 5, 2)]
    assert adaptive_windows(2, 4) == [(0, 1, 1), (0, 1, 1), (1, 2, 1), (1, 2, 1)]
    result = oracle.adaptive_avg_pool2d_backward(exact(np.array([[[2.0, 3.0, 4.0]]])), (1, 1, 5))
    assert result.tolist() == [[[1, 2, 1, 3, 2]]]


def test_output_size_is_the_rule_of_the_documents() -> None:
    # floor((n+2p-k)/s)+1; ceil: rounded up, one less if the last window would start at n or later.
    for n in range(1, 10):
        for k in range(1, 12):
            for s in range(1, 6):
                for p in range(k // 2 + 1):
                    spare = n + 2 * p - k
                    upper = -(-spare // s) + 1
                    if (upper - 1) * s >= n + p:
                        upper -= 1
                    floor = len(Pool((k, k), (s, s), (p, p)).windows(0, n))
                    ceil = len(Pool((k, k), (s, s), (p, p), True).windows(0, n))
                    assert (floor, ceil) == (max(spare // s + 1, 0), max(upper, 0)), (n, k, s, p)


@pytest.mark.parametrize("numeric", NUMERIC, ids=str)
def test_numeric_cases(numeric: NumericCase) -> None:
    assert passes(oracle.backward, numeric)


@pytest.mark.parametrize("case", LAYERS, ids=str)
def test_backward_is_the_adjoint_of_the_forward(case: Case) -> None:
    rng = np.random.default_rng(1)
    x = exact(rng.integers(-9, 9, (1, *case.self_shape[-2:])).astype(float))
    g = exact(rng.integers(-9, 9, (1, *case.output)).astype(float))
    override = case.pool.divisor_override if case.pool else 0
    pooled = oracle.average(x, case.windows(0), case.windows(1), override)
    assert (pooled * g).sum() == (x * oracle.backward(g, x.shape, case.pool)).sum()


def test_float64_variant_agrees_with_the_exact_one() -> None:
    for case in LAYERS:
        g = np.random.default_rng(2).standard_normal(case.grad_shape)
        expected = oracle.backward(exact(g), case.self_shape, case.pool).astype(float)
        bound = oracle.magnitude(g, case.self_shape, case.pool) * 1e-14
        assert np.all(abs(oracle.backward(g, case.self_shape, case.pool) - expected) <= bound)


def test_nan_and_infinity_stay_in_their_window() -> None:
    g = np.array([[[np.nan, 1.0, -np.inf]]])
    result = oracle.avg_pool2d_backward(g, (1, 1, 9), Pool((1, 2), (1, 3), (0, 0), True))
    assert np.isnan(result[0, 0, :2]).all()
    assert result[0, 0, 2:6].tolist() == [0, 0.5, 0.5, 0]
    assert result[0, 0, 6:].tolist() == [-np.inf, -np.inf, 0]


# Wrong kernels, as public reports describe them.


def _with_windows(change: Callable[[Pool, int, int, Window, int], Window]) -> Kernel:
    """avg2d with every window of the right kernel changed; adaptive2d as it is."""

    def kernel(g: Array, shape: tuple[int, ...], pool: Pool | None) -> Array:
        if pool is None:
            return oracle.adaptive_avg_pool2d_backward(g, shape)
        cells = shape[-2], shape[-1]
        axes = [
            [change(pool, axis, cells[axis], window, o) for o, window in enumerate(pool.windows(axis, cells[axis]))]
            for axis in (0, 1)
        ]
        return spread(g, axes[0], axes[1], cells, pool.divisor_override)

    return kernel


def _full_kernel(pool: Pool, axis: int, cells: int, window: Window, o: int) -> Window:
    return window._replace(divisor=pool.kernel_size[axis]) if pool.count_include_pad else window


def _padding_lost(pool: Pool, axis: int, cells: int, window: Window, o: int) -> Window:
    start = o * pool.stride[axis]
    return Window(min(start, cells), min(start + pool.kernel_size[axis], cells), window.divisor)


def _padding_counted(pool: Pool, axis: int, cells: int, window: Window, o: int) -> Window:
    start = o * pool.stride[axis] - pool.padding[axis]
    end = min(start + pool.kernel_size[axis], cells + pool.padding[axis])
    return window._replace(divisor=end - start)


def _padding_not_counted(pool: Pool, axis: int, cells: int, window: Window, o: int) -> Window:
    return window._replace(divisor=window.stop - window.start)


def _axes_swapped(g: Array, shape: tuple[int, ...], pool: Pool | None) -> Array:
    swapped = (*range(g.ndim - 2), g.ndim - 1, g.ndim - 2)
    if pool is None or pool.kernel_size[0] == pool.kernel_size[1]:
        return oracle.backward(g, shape, pool)
    turned = (*shape[:-2], shape[-1], shape[-2])
    rows, columns = pool.windows(0, turned[-1]), pool.windows(1, turned[-2])
    return spread(g.transpose(swapped), columns, rows, (turned[-2], turned[-1])).reshape(shape)


def _override_ignored_without_counted_padding(g: Array, shape: tuple[int, ...], pool: Pool | None) -> Array:
    if pool is not None and not pool.count_include_pad:
        pool = Pool(**{**vars(pool), "divisor_override": 0})
    return oracle.backward(g, shape, pool)


def _override_sign_lost(g: Array, shape: tuple[int, ...], pool: Pool | None) -> Array:
    return oracle.backward(g, shape, pool) * (-1 if pool is not None and pool.divisor_override < 0 else 1)


def _adaptive(windows: Callable[[int, int], list[Window]]) -> Kernel:
    def kernel(g: Array, shape: tuple[int, ...], pool: Pool | None) -> Array:
        if pool is not None:
            return oracle.avg_pool2d_backward(g, shape, pool)
        cells = shape[-2], shape[-1]
        rows, columns = (windows(n, m) for n, m in zip(cells, g.shape[-2:], strict=True))
        return spread(g, rows, columns, cells)

    return kernel


def _ends_by_floor(n: int, m: int) -> list[Window]:
    edges = [(o * n // m, max((o + 1) * n // m, o * n // m + 1)) for o in range(m)]
    return [Window(start, stop, stop - start) for start, stop in edges]


def _bins_of_one_size(n: int, m: int) -> list[Window]:
    size = -(-n // m)
    return [Window(min(o * size, n), min((o + 1) * size, n), size) for o in range(m)]


def _summed(g: Array, shape: tuple[int, ...], pool: Pool | None) -> Array:
    return oracle.backward(g, shape, None if pool is None else Pool(**{**vars(pool), "divisor_override": 1}))


WRONG: dict[str, Kernel] = {
    "ceil overhang divided by the full kernel": _with_windows(_full_kernel),
    "padding offset lost": _with_windows(_padding_lost),
    "padding always counted": _with_windows(_padding_counted),
    "padding never counted": _with_windows(_padding_not_counted),
    "H and W swapped": _axes_swapped,
    "divisorOverride ignored without counted padding": _override_ignored_without_counted_padding,
    "sign of divisorOverride lost": _override_sign_lost,
    "adaptive bins ended by floor": _adaptive(_ends_by_floor),
    "adaptive bins all of one size": _adaptive(_bins_of_one_size),
    "sum instead of mean": _summed,
}


@pytest.mark.parametrize("name", WRONG)
def test_planted_wrong_kernel_is_rejected(name: str) -> None:
    failed = [str(numeric) for numeric in NUMERIC if not passes(WRONG[name], numeric)]
    assert failed, f"no numeric case tells '{name}' from the right kernel"


@pytest.mark.parametrize(
    ("value", "dtype", "expected"),
    [
        (Fraction(1, 3), "float32", 11184811 / 2**25),
        (Fraction(2049), "float16", 2048.0),
        (Fraction(2051), "float16", 2052.0),
        (Fraction(65519), "float16", 65504.0),
        (Fraction(65520), "float16", math.inf),
        (Fraction(-65520), "float16", -math.inf),
        (Fraction(1, 2**25), "float16", 0.0),
        (Fraction(3, 2**25), "float16", 2.0**-23),
        (Fraction(257, 256), "bfloat16", 1.0),
        (Fraction(259, 256), "bfloat16", 1.015625),
        (Fraction(2**12 + 1, 2**12), "hfloat32", 1.0),
        (Fraction(2**12 + 3, 2**12), "hfloat32", 1 + 2.0**-10),
        (Fraction(0), "float32", 0.0),
    ],
)
def test_rounding(value: Fraction, dtype: str, expected: float) -> None:
    assert oracle.round_one(value, oracle.FORMATS[dtype]) == expected


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_rounding_agrees_with_numpy_on_float64(dtype: str) -> None:
    # numpy and ml_dtypes are right for these: a float64 that is a float32 cannot be rounded twice.
    rng = np.random.default_rng(3)
    bits = rng.integers(0, 2**31, 3000, dtype=np.uint32)
    values = bits.view(np.float32)
    values = values[np.isfinite(values)]
    target = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}[dtype]
    with np.errstate(all="ignore"):
        expected = values.astype(target).astype(np.float64)
    assert np.array_equal(oracle.rounded(exact(values), dtype), expected)
