"""Both operators through the Python API against the oracle: values, layouts, memory, threads."""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tests.calls import plan, run
from tests.cases import LAYERS, NUMERIC, NUMPY, Array, Case, NumericCase, adaptive, avg, normal, random_cases
from tests.oracle import FORMATS, Format, Pool, average, backward, exact, magnitude, rounded, ulp

from poolgrad.core import AclnnError, CubeMathType, TensorSpec, avg_pool2d_backward
from poolgrad.core.tiles import ArrayTensor, Box

DTYPES = list(NUMPY)
RANDOM = random_cases(150, seed=11)


def bits(array: Array) -> bytes:
    return np.ascontiguousarray(array).tobytes()


def same_bits(actual: Array, expected: Array) -> bool:
    return actual.dtype == expected.dtype and actual.shape == expected.shape and bits(actual) == bits(expected)


# Values: exact equality wherever the answer is a representable number.


@pytest.mark.parametrize("accumulate", ["float32", "float64"])
@pytest.mark.parametrize("numeric", NUMERIC, ids=str)
def test_numeric_cases(numeric: NumericCase, accumulate: str) -> None:
    result = run(numeric.case, numeric.grad_output.astype(np.float32), accumulate=accumulate)
    assert result.shape == numeric.case.self_shape
    tolerance = 4 if accumulate == "float32" else 0.5
    np.testing.assert_allclose(result, numeric.grad_input, rtol=tolerance * 2.0**-23, atol=0)


def _integers(case: Case, seed: int) -> Array:
    """Small multiples of what every divisor divides: all terms are small integers."""
    small = np.random.default_rng(seed).integers(-3, 4, case.grad_shape)
    return (small * float(case.multiple)).astype(np.float32)


def _fits_float32(case: Case) -> bool:
    """Whether small multiples of what every divisor divides are float32 numbers."""
    return case.multiple <= 2**22 or case.multiple & (case.multiple - 1) == 0


@pytest.mark.parametrize("case", [case for case in LAYERS + RANDOM if _fits_float32(case)], ids=str)
def test_integers_are_exact(case: Case) -> None:
    g = _integers(case, 1)
    expected = backward(exact(g), case.self_shape, case.pool)
    assert all(value.denominator == 1 for value in expected.reshape(-1))
    assert np.array_equal(run(case, g), expected.astype(np.float32))
    assert np.array_equal(run(case, g, accumulate="float64"), expected.astype(np.float32))


@st.composite
def pools(draw: st.DrawFn) -> tuple[tuple[int, int], Pool]:
    """Any legal parameters over small inputs, kernels beyond the input and strides beyond the kernel included."""
    sides = st.integers(1, 11)
    kernel = draw(st.tuples(st.integers(1, 13), st.integers(1, 13)))
    pool = Pool(
        kernel,
        draw(st.tuples(st.integers(1, 15), st.integers(1, 15))),
        draw(st.tuples(st.integers(0, kernel[0] // 2), st.integers(0, kernel[1] // 2))),
        draw(st.booleans()),
        draw(st.booleans()),
        draw(st.sampled_from([0, 0, 0, 1, -1, -7, 255, -255, 2**32, -(2**63)])),
    )
    cells = draw(st.tuples(sides, sides))
    assume(min(pool.output_size(cells)) >= 1)
    return cells, pool


def _assert_adjoint(case: Case, seed: int, threads: int) -> None:
    """<pool(x), g> == <x, backward(g)>, in exact arithmetic on integers."""
    multiple = case.multiple
    assume(multiple <= 2**18 or multiple & (multiple - 1) == 0)
    rng = np.random.default_rng(seed)
    g = (rng.integers(-2, 3, case.grad_shape) * float(multiple)).astype(np.float32)
    x = exact(rng.integers(-9, 10, case.self_shape))
    override = case.pool.divisor_override if case.pool else 0
    pooled = average(x, case.windows(0), case.windows(1), override)
    grad_input = exact(run(case, g, threads=threads))
    assert (pooled * exact(g)).sum() == (x * grad_input).sum()


@settings(max_examples=300, deadline=None)
@given(pools(), st.integers(0, 2**32), st.integers(1, 3))
def test_avg2d_is_the_adjoint_of_the_forward(drawn: tuple[Any, Pool], seed: int, planes: int) -> None:
    cells, pool = drawn
    _assert_adjoint(Case("drawn", (planes, *cells), pool.output_size(cells), pool), seed, threads=1)


@settings(max_examples=150, deadline=None)
@given(st.tuples(*[st.integers(1, 19)] * 4), st.integers(0, 2**32), st.integers(1, 3))
def test_adaptive2d_is_the_adjoint_of_the_forward(sides: Any, seed: int, planes: int) -> None:
    _assert_adjoint(Case("drawn", (planes, *sides[:2]), sides[2:]), seed, threads=1)


@pytest.mark.parametrize("case", [case for case in LAYERS + RANDOM if case.pool is None], ids=str)
def test_adaptive2d_keeps_the_sum(case: Case) -> None:
    g = normal(case.grad_shape, "float32", 2)
    total = run(case, g, accumulate="float64").astype(float).sum(axis=(-2, -1))
    np.testing.assert_allclose(total, g.astype(float).sum(axis=(-2, -1)), rtol=0, atol=1e-5)


@pytest.mark.parametrize("case", [case for case in LAYERS + RANDOM if case.pool is not None], ids=str)
def test_avg2d_keeps_the_sum_where_only_cells_are_counted(case: Case) -> None:
    assert case.pool is not None
    pool = Pool(**{**vars(case.pool), "count_include_pad": False, "divisor_override": 0})
    case = Case(case.name, case.self_shape, case.output, pool)
    g = normal(case.grad_shape, "float32", 2)
    total = run(case, g, accumulate="float64").astype(float).sum(axis=(-2, -1))
    np.testing.assert_allclose(total, g.astype(float).sum(axis=(-2, -1)), rtol=0, atol=2e-5)


def _ulps32(values: Array) -> Array:
    """The step of float32 at each magnitude."""
    return np.asarray(np.exp2(np.maximum(np.frexp(values)[1] - 1, -126) - 23.0))


@pytest.mark.parametrize("case", LAYERS + RANDOM, ids=str)
def test_float32_is_within_4_ulp_of_the_terms(case: Case) -> None:
    g = normal(case.grad_shape, "float32", 3)
    expected = backward(g.astype(float), case.self_shape, case.pool)
    step = _ulps32(magnitude(g.astype(float), case.self_shape, case.pool))
    assert np.all(abs(run(case, g) - expected) <= 4 * step)
    assert np.all(abs(run(case, g, accumulate="float64") - expected) <= 0.51 * step)


def test_float32_is_within_4_ulp_over_long_ranges() -> None:
    for kernel, padding in ((63, 31), (64, 32), (16, 8), (33, 0)):
        case = avg("long", (1, 1, 70, 71), (kernel, kernel), (1, 1), (padding, padding))
        g = abs(normal(case.grad_shape, "float32", kernel))
        expected = backward(g.astype(float), case.self_shape, case.pool)
        assert np.all(abs(run(case, g) - expected) <= 4 * _ulps32(expected)), kernel


def _assert_rounded(case: Case, dtype: str, accumulate: str, scale: float) -> None:
    """Rounded once, from a sum that is within 4 ulp (of float32 or float64) of its terms.

    Away from cancellation that is the correctly rounded value but for near-ties, which may go to the neighbour.
    """
    case = case.with_planes(
        *[1] * (len(case.self_shape) - 3), min(1 if "long" in case.name else 2, case.self_shape[-3])
    )
    g = normal(case.grad_shape, dtype, 4, scale)
    answer, terms = (kernel(exact(g), case.self_shape, case.pool) for kernel in (backward, magnitude))
    right = rounded(answer, dtype).astype(np.float32).astype(NUMPY[dtype])
    result = run(case, g, accumulate=accumulate)
    assert result.dtype == NUMPY[dtype]
    steps = abs(_ordinal(result) - _ordinal(right))
    assert (steps > 0).mean() < (0.03 if accumulate == "float32" else 0.01)
    slack = FORMATS["float32"] if accumulate == "float32" else Format(53, -1022, 1023)
    for index in map(tuple, np.argwhere(steps)):
        allowed = 4 * ulp(terms[index], slack)
        step = ulp(answer[index], FORMATS[dtype])
        assert abs(Fraction(float(result[index])) - answer[index]) <= step / 2 + allowed
        if allowed < step / 4:
            assert steps[index] == 1


def _ordinal(values: Array) -> Array:
    """16-bit floats numbered in their order; both zeros are 0."""
    raw = np.ascontiguousarray(values).view(np.uint16).astype(np.int64)
    return np.where(raw & 0x8000, -(raw & 0x7FFF), raw)


@pytest.mark.parametrize("accumulate", ["float32", "float64"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("case", LAYERS, ids=str)
def test_16_bit_results_are_rounded_once(case: Case, dtype: str, accumulate: str) -> None:
    _assert_rounded(case, dtype, accumulate, 1.0)
    _assert_rounded(case, dtype, accumulate, 2.0**-14)  # subnormal in float16


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_16_bit_sums_do_not_accumulate_in_16_bits(dtype: str) -> None:
    # 1 + 256 * 2**-12 is 1.0625; in 16 bits every small term would be lost.
    case = avg("sum", (1, 17, 17), (17, 17), (1, 1), (8, 8), False, True, 1)
    g = np.full(case.grad_shape, 2.0**-12)
    g[0, 0, 0] = 1
    result = run(case, g.astype(NUMPY[dtype]))
    assert float(result[0, 8, 8]) == rounded(np.array([Fraction(1) + Fraction(288, 4096)]), dtype)[0]


def test_float16_overflows_to_infinity() -> None:
    g = np.full((1, 2, 2), 60000.0, np.float16)
    result = avg_pool2d_backward(g, TensorSpec((1, 3, 3), "float16"), 2, 1, divisor_override=1)
    expected = [[60000, np.inf, 60000], [np.inf, np.inf, np.inf], [60000, np.inf, 60000]]
    assert result[0].tolist() == np.array(expected, np.float16).tolist()


# cubeMathType. Kernel 1 shows what happens to single values.


def _through_kernel_1(values: Array, mode: CubeMathType, **options: Any) -> Array:
    g = values.reshape(1, 1, -1)
    return avg_pool2d_backward(g, g, 1, cube_math_type=mode, **options).reshape(-1)


@pytest.mark.parametrize("accumulate", ["float32", "float64"])
@pytest.mark.parametrize("mode", [CubeMathType.ALLOW_FP32_DOWN_PRECISION, CubeMathType.USE_HF32])
@pytest.mark.parametrize("product", ["atlas-a2", "atlas-a3"])
def test_hf32_vectors(product: str, mode: CubeMathType, accumulate: str) -> None:
    given_bits = [0x3F800800, 0x3F801800, 0x3FFFFFFF, 0x7FC00000, 0xFF800000, 0x7F7FFFFF, 0xBF800801]
    expected = [0x3F800000, 0x3F802000, 0x40000000, 0x7FC00000, 0xFF800000, 0x7F800000, 0xBF801000]
    values = np.array(given_bits, np.uint32).view(np.float32)
    result = _through_kernel_1(values, mode, product=product, accumulate=accumulate)
    assert [hex(x) for x in result.view(np.uint32)] == [hex(x) for x in expected]


@pytest.mark.parametrize("accumulate", ["float32", "float64"])
@pytest.mark.parametrize(
    ("product", "mode"),
    [
        ("atlas-a2", CubeMathType.USE_FP16),
        ("atlas-a3", CubeMathType.USE_FP16),
        ("atlas-inference", CubeMathType.ALLOW_FP32_DOWN_PRECISION),
        ("atlas-inference", CubeMathType.USE_FP16),
        ("atlas-training", CubeMathType.ALLOW_FP32_DOWN_PRECISION),
        ("atlas-training", CubeMathType.USE_FP16),
    ],
)
def test_fp16_mode(product: str, mode: CubeMathType, accumulate: str) -> None:
    values = np.array([1 + 2.0**-11, 1 + 3 * 2.0**-11, 65519.996, 65520, -1e30, 2.0**-25, 2.0**-24, 1e-9], np.float32)
    result = _through_kernel_1(values, mode, product=product, accumulate=accumulate)
    assert result.dtype == np.float32
    assert result.tolist() == [1, 1 + 2.0**-9, 65504, np.inf, -np.inf, 0, 2.0**-24, 0]


@pytest.mark.parametrize("case", [case for case in LAYERS if case.pool is not None], ids=str)
def test_lowered_modes_round_before_and_after(case: Case) -> None:
    g = normal(case.grad_shape, "float32", 5)
    hf32 = rounded(exact(g), "hfloat32")
    step = _ulps32(magnitude(hf32, case.self_shape, case.pool))
    result = run(case, g, cube_math_type=CubeMathType.USE_HF32)
    assert np.all(abs(result - backward(hf32, case.self_shape, case.pool)) <= 4 * step)
    fp16 = run(case, g, cube_math_type=CubeMathType.USE_FP16)
    expected = run(case, g.astype(np.float16))
    assert same_bits(fp16, expected.astype(np.float32))


def test_hf32_differs_from_float32_only_by_its_rounding() -> None:
    values = normal((1000,), "float32", 6)
    lowered = _through_kernel_1(values, CubeMathType.USE_HF32)
    assert (lowered != values).mean() > 0.99
    assert np.all(abs(lowered - values) <= abs(values) * 2.0**-12)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_mode_1_leaves_16_bit_tensors_as_they_are(dtype: str) -> None:
    case = LAYERS[0]
    g = normal(case.grad_shape, dtype, 7)
    lowered = run(case, g, cube_math_type=CubeMathType.ALLOW_FP32_DOWN_PRECISION)
    assert same_bits(lowered, run(case, g))


# NaN, infinity, zero.


def _poisoned(case: Case, dtype: str) -> Array:
    g = normal(case.grad_shape, dtype, 8)
    flat = g.reshape(g.shape[0], -1)
    flat[0, 0], flat[0, -1], flat[0, flat.shape[1] // 2] = np.nan, np.inf, -np.inf
    return g


@pytest.mark.parametrize("accumulate", ["float32", "float64"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", LAYERS, ids=str)
def test_nan_and_infinity_reach_the_cells_of_their_window_and_no_others(
    case: Case, dtype: str, accumulate: str
) -> None:
    g = _poisoned(case, dtype)
    expected = backward(g.astype(float), case.self_shape, case.pool)
    for options in ({}, {"threads": 2, "workspace_limit": _least_limit(case, dtype, accumulate) * 2}):
        result = run(case, g, accumulate=accumulate, **options).astype(float)
        assert np.array_equal(np.isnan(result), np.isnan(expected))
        assert np.array_equal(np.isposinf(result), np.isposinf(expected))
        assert np.array_equal(np.isneginf(result), np.isneginf(expected))


@pytest.mark.parametrize("accumulate", ["float32", "float64"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_signalling_nans_and_overflow_give_no_warnings(dtype: str, accumulate: str) -> None:
    raw = {"float32": 0x7F800001, "float16": 0x7C01, "bfloat16": 0x7F81}[dtype]
    top = {"float32": 0x7F7FFFFF, "float16": 0x7BFF, "bfloat16": 0x7F7F}[dtype]
    word = np.uint32 if dtype == "float32" else np.uint16
    g = np.array([raw, top, top, 1, 0, raw], word).view(NUMPY[dtype]).reshape(1, 2, 3)
    for override in (1, -1, 2**63 - 1):
        with np.errstate(all="raise"):
            result = avg_pool2d_backward(
                g, TensorSpec((1, 3, 4), dtype), 2, 1, divisor_override=override, accumulate=accumulate
            )
        with np.errstate(all="ignore"):
            finite = result.astype(np.float64)
        assert np.isnan(finite[0, 0, 0])
        assert np.isinf(finite[0, 0, 2]) == (abs(override) == 1)


@pytest.mark.parametrize("accumulate", ["float32", "float64"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("override", [0, -3])
def test_cells_that_no_window_covers_are_plus_zero(dtype: str, override: int, accumulate: str) -> None:
    for case in (
        avg("gaps", (2, 3, 17, 17), (2, 2), (3, 3), divisor_override=override),
        avg("wide-gaps", (2, 3, 40, 50), (3, 2), (13, 17), divisor_override=override),
        avg("tail", (2, 3, 5, 9), (2, 2), (2, 2), divisor_override=override),
        avg("rows", (2, 3, 9, 8), (1, 2), (4, 2), divisor_override=override),
        avg("overlap-and-gaps", (2, 3, 9, 12), (3, 2), (1, 4), divisor_override=override),
        avg("overlap-and-tail", (2, 3, 8, 26), (3, 3), (2, 2), divisor_override=override),
    ):
        g = -abs(normal(case.grad_shape, dtype, 9)) - NUMPY[dtype].type(1)
        out = np.full(case.self_shape, 7, NUMPY[dtype])
        covered = backward(np.ones(case.grad_shape), case.self_shape, case.pool) != 0
        assert (~covered).any()
        result = run(case, g, out=out, accumulate=accumulate)
        bare = result[~covered]
        assert (np.ascontiguousarray(bare).view(f"u{bare.itemsize}") == 0).all()
        assert (result[covered] != 0).all()


# The same bits whatever the tiles, threads and layouts.


def _least_limit(case: Case, dtype: str, accumulate: str = "float32", **more: Any) -> int:
    """The smallest workspace that a plan takes, by bisection."""
    low: int = 0
    high: int = plan(case, dtype, accumulate=accumulate, threads=1, **more).workspace_size
    while high - low > 1:
        middle = (low + high) // 2
        try:
            plan(case, dtype, accumulate=accumulate, threads=1, workspace_limit=middle, **more)
            high = middle
        except AclnnError:
            low = middle
    return high


LARGER = [
    avg("resnet", (2, 5, 60, 64), (3, 3), (2, 2), (1, 1)),
    avg("same-size", (2, 5, 40, 44), (3, 3), (1, 1), (1, 1), False, False),
    avg("vgg", (1, 3, 64, 64), (2, 2), (2, 2)),
    avg("long", (1, 2, 80, 90), (17, 19), (1, 1), (8, 9)),
    avg("long-phases", (1, 2, 80, 90), (17, 19), (3, 2), (8, 9), True),
    avg("gaps", (2, 3, 70, 90), (3, 2), (11, 13), ceil_mode=True),
    avg("tall", (1, 2, 9000, 3), (5, 2), (2, 1), (2, 1)),
    avg("wide", (1, 2, 3, 9000), (2, 5), (1, 2), (1, 2)),
    avg("narrow", (16, 16, 7, 7), (3, 3), (1, 1), (1, 1)),
    avg("narrow-copy", (16, 16, 8, 8), (2, 2), (2, 2)),
    adaptive("adaptive", (2, 3, 70, 90), (13, 9)),
    adaptive("adaptive-up", (2, 3, 30, 40), (70, 90)),
    adaptive("adaptive-global", (2, 3, 70, 90), (1, 1)),
    adaptive("adaptive-narrow", (32, 8, 13, 9), (6, 6)),
]


# The least workspace has room for whole planes: small ones, and those that a single row's copies fill.
WHOLE_PLANES_AT_LEAST = ("narrow", "narrow-copy", "adaptive-narrow", "adaptive-global")


@pytest.mark.parametrize("accumulate", ["float32", "float64"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", LARGER, ids=str)
def test_tiles_and_threads_do_not_change_a_bit(case: Case, dtype: str, accumulate: str) -> None:
    g = normal(case.grad_shape, dtype, 10)
    whole = plan(case, dtype, accumulate=accumulate, threads=1)
    expected = run(case, g, accumulate=accumulate, threads=1)
    least = _least_limit(case, dtype, accumulate)
    counts = {whole.tile_count}
    for share, threads in ((0.0, 1), (0.1, 1), (0.25, 2), (0.5, 3), (1.0, 3)):
        limit = threads * (least + int(share * (whole.workspace_size - least)))
        options = {"accumulate": accumulate, "threads": threads, "workspace_limit": limit}
        made = plan(case, dtype, **options)
        assert made.workspace_size <= limit
        counts.add(made.tile_count)
        assert same_bits(run(case, g, **options), expected), options
    planes = int(np.prod(case.self_shape[:-2]))
    assert case.name in WHOLE_PLANES_AT_LEAST or max(counts) > planes, "the limits must force tiles within a plane"
    assert len(counts) >= (2 if case.name in WHOLE_PLANES_AT_LEAST else 3)


@pytest.mark.parametrize("case", LARGER, ids=str)
def test_tiled_results_agree_with_the_oracle(case: Case) -> None:
    g = _integers(case, 12)
    if case.multiple > 2**18:
        g = normal(case.grad_shape, "float32", 12)
    limit = _least_limit(case, "float32")
    expected = backward(g.astype(float), case.self_shape, case.pool)
    bound = 4 * _ulps32(magnitude(g.astype(float), case.self_shape, case.pool))
    result = run(case, g, threads=2, workspace_limit=2 * limit + 4096)
    assert np.all(abs(result - expected) <= bound)


LAYOUTS: dict[str, Callable[[Array], Array]] = {
    "C": lambda array: np.ascontiguousarray(array),
    "Fortran": lambda array: np.asfortranarray(array),
    "channels last": lambda array: np.ascontiguousarray(np.moveaxis(array, -3, -1)),
    "reversed": lambda array: np.ascontiguousarray(array[..., ::-1, ::-1])[..., ::-1, ::-1],
    "planes reversed": lambda array: np.ascontiguousarray(array[::-1])[::-1],
    "every other": lambda array: np.repeat(array, 2, axis=-1)[..., ::2],
    "big-endian": lambda array: array.astype(array.dtype.newbyteorder(">")),
    "big-endian Fortran": lambda array: np.asfortranarray(array.astype(array.dtype.newbyteorder(">"))),
    "unaligned": lambda array: _unaligned(array),
    "read-only": lambda array: _read_only(array),
}


def _unaligned(array: Array) -> Array:
    memory = np.zeros(array.nbytes + 1, np.uint8)
    moved = memory[1:].view(array.dtype).reshape(array.shape)
    moved[...] = array
    return moved


def _read_only(array: Array) -> Array:
    copy = array.copy()
    copy.flags.writeable = False
    return copy


def _laid_out(layout: str, array: Array) -> Array:
    made = LAYOUTS[layout](array)
    return np.moveaxis(made, -1, -3) if layout == "channels last" else made


LAYOUT_CASES = [
    avg("overlap", (3, 4, 12, 15), (3, 3), (2, 2), (1, 1)),
    avg("copy", (3, 4, 12, 24), (2, 2), (2, 2)),
    avg("rank-3", (5, 12, 24), (3, 2), (1, 2), (1, 0)),
    adaptive("adaptive", (3, 4, 12, 25), (5, 7)),
]


# ml_dtypes has no big-endian bfloat16 arrays; files have.
LAYOUTS_AND_DTYPES = [
    (layout, dtype) for layout in LAYOUTS for dtype in DTYPES if not (dtype == "bfloat16" and "big-endian" in layout)
]


@pytest.mark.parametrize(("layout", "dtype"), LAYOUTS_AND_DTYPES)
def test_layout_of_grad_output_does_not_change_a_bit(layout: str, dtype: str) -> None:
    for case in LAYOUT_CASES:
        g = normal(case.grad_shape, dtype, 13)
        given_array = _laid_out(layout, g)
        before = given_array.tobytes()
        result = run(case, given_array)
        assert same_bits(result, run(case, g))
        assert result.dtype.isnative
        assert given_array.tobytes() == before


@pytest.mark.parametrize(("layout", "dtype"), [pair for pair in LAYOUTS_AND_DTYPES if pair[0] != "read-only"])
def test_out_of_any_layout_is_filled_and_returned(layout: str, dtype: str) -> None:
    for case in LAYOUT_CASES:
        g = normal(case.grad_shape, dtype, 14)
        out = _laid_out(layout, np.full(case.self_shape, 7, NUMPY[dtype]))
        assert run(case, g, out=out, threads=2) is out
        assert same_bits(out.astype(NUMPY[dtype]), run(case, g))


def test_out_inside_a_larger_array_leaves_the_rest_alone() -> None:
    case = LAYOUT_CASES[0]
    g = normal(case.grad_shape, "float32", 15)
    canvas = np.full((5, 6, 14, 17), 7, np.float32)
    run(case, g, out=canvas[1:-1, 1:-1, 1:-1, 1:-1])
    assert same_bits(canvas[1:-1, 1:-1, 1:-1, 1:-1].copy(), run(case, g))
    canvas[1:-1, 1:-1, 1:-1, 1:-1] = 7
    assert (canvas == 7).all()


def test_rank_3_is_rank_4_with_one_n() -> None:
    for case in LAYOUT_CASES[:2] + LAYOUT_CASES[3:]:
        g = normal(case.grad_shape, "float32", 16)
        planes = case.self_shape[0] * case.self_shape[1]
        flat = run(case.with_planes(planes), g.reshape(planes, *g.shape[-2:]))
        assert same_bits(flat.reshape(case.self_shape), run(case, g))


def test_self_may_be_an_array_whose_values_are_never_read() -> None:
    case = LAYOUT_CASES[0]
    g = normal(case.grad_shape, "float32", 17)
    values = np.full(case.self_shape, np.nan, np.float32)
    result = avg_pool2d_backward(g, values, 3, 2, 1)
    assert same_bits(result, run(case, g))
    never = np.broadcast_to(np.float32(0), case.self_shape)
    assert same_bits(avg_pool2d_backward(g, never, 3, 2, 1), result)


def test_short_forms_of_the_arguments() -> None:
    g = normal((1, 2, 4, 4), "float32", 18)
    spec = TensorSpec((1, 2, 8, 8), np.float32)
    expected = avg_pool2d_backward(g, spec, (2, 2), (2, 2), (0, 0), False, True, 0)
    forms: list[tuple[Any, ...]] = [
        (2,),
        ([2],),
        ((2, 2), ()),
        (2, []),
        (2, 2, 0),
        (2, [2], [0]),
        (np.int64(2), np.array([2, 2]), 0),
        (2, 2, 0, False, True, None),
        (2, 2, 0, False, True, 4),
    ]
    for arguments in forms:
        assert same_bits(avg_pool2d_backward(g, spec, *arguments), expected), arguments


def test_runs_are_deterministic() -> None:
    case = LARGER[0].with_planes(8, 16)
    g = normal(case.grad_shape, "float16", 19)
    results = {bits(run(case, g, threads=3, workspace_limit=300_000)) for _ in range(5)}
    assert len(results) == 1


# Phase 1 and phase 2.


def _arrays(case: Case, dtype: str, seed: int = 20) -> tuple[ArrayTensor, Array, Array]:
    g = normal(case.grad_shape, dtype, seed)
    storage = np.float32 if dtype == "float32" else np.uint16
    out = np.empty(case.self_shape, NUMPY[dtype])
    return ArrayTensor(g.view(storage)), out, out.view(storage)


LONG_AXES = [
    avg("wide", (1, 1, 4, 1_000_000), (3, 3), (2, 17), (1, 1), True, False),
    avg("tall", (1, 1, 1_000_000, 4), (3, 3), (2, 2), (1, 1), True, False),
    adaptive("wide-take", (1, 1, 4, 1_000_000), (3, 333_337)),
    adaptive("tall-take", (1, 1, 1_000_000, 4), (333_337, 3)),
    adaptive("wide-runs", (1, 1, 4, 1_000_000), (3, 1)),
]


@pytest.mark.parametrize("staging", [False, True])
@pytest.mark.parametrize("case", LONG_AXES, ids=str)
def test_a_run_over_a_long_axis_stays_within_its_workspace(case: Case, staging: bool) -> None:
    executor = plan(case, "float32", threads=2, staging=staging)
    source, _, sink = _arrays(case, "float32")
    workspace = np.empty(executor.workspace_size, np.uint8)
    assert _peak(lambda: executor.run(source, ArrayTensor(sink), workspace)) < PYTHON_OBJECTS


HEAVY = [
    avg("resnet", (4, 16, 112, 112), (3, 3), (2, 2), (1, 1)),
    avg("copy", (4, 16, 112, 112), (2, 2), (2, 2)),
    avg("long", (4, 16, 120, 120), (16, 16), (1, 1), (8, 8), False, False),
    avg("bands", (1, 1, 1024, 1024), (3, 3), (2, 2), (1, 1), True),
    avg("narrow", (64, 256, 7, 7), (3, 3), (1, 1), (1, 1)),
    adaptive("take", (4, 16, 112, 112), (13, 9)),
    adaptive("runs", (4, 16, 112, 112), (1, 1)),
    adaptive("up", (4, 64, 56, 56), (100, 100)),
]

PYTHON_OBJECTS = 400_000
"""Bytes that a run on two threads may allocate beside the workspace: frames, small index arrays, numpy's buffers."""


@pytest.mark.parametrize("staging", [False, True])
@pytest.mark.parametrize("accumulate", ["float32", "float64"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", HEAVY, ids=str)
def test_a_run_stays_within_its_workspace(case: Case, dtype: str, accumulate: str, staging: bool) -> None:
    executor = plan(case, dtype, accumulate=accumulate, threads=2, staging=staging)
    source, _, sink = _arrays(case, dtype)
    assert sink.nbytes > 1_500_000
    given_workspace = np.empty(executor.workspace_size, np.uint8)
    allocated = _peak(lambda: executor.run(source, ArrayTensor(sink), given_workspace))
    assert allocated < PYTHON_OBJECTS
    allocated = _peak(lambda: executor.run(source, ArrayTensor(sink)))
    assert executor.workspace_size <= allocated + 1
    assert allocated < executor.workspace_size + PYTHON_OBJECTS


def _peak(call: Any) -> int:
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("layout", ["C", "Fortran", "channels last"])
def test_the_api_allocates_the_result_and_the_workspace_only(layout: str) -> None:
    case = avg("api", (4, 16, 112, 112), (3, 3), (2, 2), (1, 1))
    g = _laid_out(layout, normal(case.grad_shape, "float16", 21))
    out = np.empty(case.self_shape, np.float16)
    limit = 400_000
    assert _peak(lambda: run(case, g, out=out, workspace_limit=limit, threads=1)) < limit + PYTHON_OBJECTS
    assert _peak(lambda: run(case, g, workspace_limit=limit, threads=1)) < limit + out.nbytes + PYTHON_OBJECTS


def test_the_callers_workspace_is_used_and_may_hold_anything() -> None:
    case = HEAVY[0].with_planes(2, 3)
    executor = plan(case, "float16", threads=2)
    source, out, sink = _arrays(case, "float16")
    executor.run(source, ArrayTensor(sink))
    expected = out.copy()
    for make in (
        lambda size: bytearray(b"\xff" * size),
        lambda size: memoryview(bytearray(b"\x7f" * size)),
        lambda size: np.full(size, 0xAB, np.uint8),
        lambda size: np.full(size // 8 + 1, np.nan),
        lambda size: np.full(size + 3, 0xFF, np.uint8)[3:],
    ):
        workspace = make(executor.workspace_size)
        before = bytes(workspace)
        out[...] = 0
        executor.run(source, ArrayTensor(sink), workspace)
        assert same_bits(out, expected)
        assert bytes(workspace) != before


def test_workspace_of_the_api() -> None:
    case = LARGER[0]
    g = normal(case.grad_shape, "bfloat16", 22)
    size = plan(case, "bfloat16", threads=1).workspace_size
    workspace = bytearray(size)
    assert same_bits(run(case, g, threads=1, workspace=workspace), run(case, g, threads=1))
    assert any(workspace)


@pytest.mark.parametrize("workspace", [bytearray(10), b"\0" * 10_000_000, np.empty(0, np.uint8), "text", 7])
def test_a_workspace_that_will_not_do_is_refused(workspace: Any) -> None:
    case = LARGER[0]
    out = np.full(case.self_shape, 7, np.float32)
    with pytest.raises(AclnnError, match="workspace") as caught:
        run(case, normal(case.grad_shape, "float32", 23), workspace=workspace, out=out, threads=1)
    if isinstance(workspace, bytearray):
        assert "10" in str(caught.value)
        assert str(plan(case, "float32", threads=1).workspace_size) in str(caught.value)
    assert (out == 7).all()


def test_one_byte_less_than_the_workspace_is_refused() -> None:
    case = LARGER[0]
    executor = plan(case, "float32", threads=2)
    source, _, sink = _arrays(case, "float32")
    with pytest.raises(AclnnError, match=str(executor.workspace_size)):
        executor.run(source, ArrayTensor(sink), bytearray(executor.workspace_size - 1))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", LARGER, ids=str)
def test_a_limit_too_small_names_the_least_that_would_do(case: Case, dtype: str) -> None:
    least = _least_limit(case, dtype)
    with pytest.raises(AclnnError, match=rf"\b{least}\b") as caught:
        plan(case, dtype, threads=1, workspace_limit=least - 1)
    assert str(least - 1) in str(caught.value)


def test_an_executor_runs_again_on_other_data() -> None:
    for case in LARGER[:4]:
        executor = plan(case, "float32", threads=2)
        for seed in (1, 2, 1):
            source, out, sink = _arrays(case, "float32", seed)
            executor.run(source, ArrayTensor(sink))
            assert same_bits(out, run(case, normal(case.grad_shape, "float32", seed)))


def test_progress_counts_every_byte_once() -> None:
    case = HEAVY[0]
    for threads in (1, 2):
        executor = plan(case, "float32", threads=threads, workspace_limit=200_000)
        source, _, sink = _arrays(case, "float32")
        seen: list[int] = []
        stats = executor.run(source, ArrayTensor(sink), progress=seen.append)
        assert executor.tile_count > 10
        assert seen == sorted(seen)
        assert seen[-1] == sink.nbytes
        assert stats.compute > 0
        assert stats.total > 0


class _Recording(ArrayTensor):
    """A staged source and sink that checks what it is asked for."""

    def __init__(self, array: Array) -> None:
        super().__init__(array)
        self.boxes: list[Box] = []

    def read(self, box: Box, buffer: Array | None) -> Array:
        assert buffer is not None
        assert buffer.shape == box.shape
        assert buffer.flags.c_contiguous
        buffer.view(np.uint8)[...] = 0xFF
        return super().read(box, buffer)

    def write(self, box: Box, tile: Array) -> None:
        assert tile.shape == box.shape
        self.boxes.append(box)
        super().write(box, tile)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", LARGER, ids=str)
def test_staged_tiles_are_contiguous_and_cover_everything_once(case: Case, dtype: str) -> None:
    least = _least_limit(case, dtype, staging=True)
    source, out, sink = _arrays(case, dtype, 24)
    expected = run(case, normal(case.grad_shape, dtype, 24))
    for limit in (2 * least, 4 * least, 64 * least):
        out[...] = 7
        recorded = _Recording(sink)
        executor = plan(case, dtype, threads=2, workspace_limit=limit, staging=True)
        executor.run(_Recording(source._array), recorded)
        assert same_bits(out, expected)
        seen = np.zeros((int(np.prod(case.self_shape[:-2])), *case.self_shape[-2:]), int)
        for box in recorded.boxes:
            seen[box.planes, box.rows, box.columns] += 1
            assert seen[box.planes, box.rows, box.columns].flags.c_contiguous
        assert (seen == 1).all()
        assert len(recorded.boxes) == executor.tile_count


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("where", ["read", "write"])
def test_an_error_of_the_source_or_sink_comes_out(threads: int, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = HEAVY[0].with_planes(2, 8)
    executor = plan(case, "float32", threads=threads, workspace_limit=500_000, staging=True)
    source, _, sink = _arrays(case, "float32")
    target = ArrayTensor(sink)
    calls = []

    def fail(*arguments: Any) -> None:
        calls.append(arguments)
        raise OSError("the disk is gone")

    monkeypatch.setattr(source if where == "read" else target, where, fail)
    with pytest.raises(OSError, match="the disk is gone"):
        executor.run(source, target)
    assert 1 <= len(calls) <= threads < executor.tile_count


@pytest.mark.parametrize(
    "case",
    [
        avg("many planes", (1024, 1024, 64, 64), (2, 2), (2, 2)),
        adaptive("many rows", (1, 1, 2**18, 2**20), (1, 1)),
        adaptive("one tall axis", (1, 1, 2**31, 1), (1, 1)),
        adaptive("one wide axis", (1, 1, 1, 2**31), (1, 3)),
    ],
    ids=str,
)
def test_phase_1_allocates_next_to_nothing(case: Case) -> None:
    assert _peak(lambda: plan(case, "float32")) < 1_000_000


def test_what_an_executor_tells() -> None:
    case = LAYERS[0]
    executor = plan(case, "float32", threads=2, cube_math_type=CubeMathType.USE_HF32)
    assert (executor.operator, executor.aclnn) == ("avg2d", "aclnnAvgPool2dBackward")
    assert executor.compute_dtype == "hfloat32"
    assert executor.cube_math_type is CubeMathType.USE_HF32
    assert executor.grad_output == TensorSpec(case.grad_shape, "float32")
    assert executor.grad_input == TensorSpec(case.self_shape, "float32")
    assert plan(case, "float32", cube_math_type=2).compute_dtype == "float16"
    assert plan(case, "bfloat16").compute_dtype == "bfloat16"
    other = plan(LAYERS[-1], "float16", accumulate="float64")
    assert (other.operator, other.aclnn) == ("adaptive2d", "aclnnAdaptiveAvgPool2dBackward")
    assert other.cube_math_type is None
    assert other.accumulate == "float64"
    assert other.threads <= other.tile_count


# Huge parameters: right, at once, and in little memory.

HUGE = [
    avg("k=s, ceil", (1, 2, 7, 9), *[(1250999896764,) * 2] * 2, ceil_mode=True),
    avg("k=s, ceil, int64 max", (1, 2, 7, 9), *[(2**63 - 1,) * 2] * 2, ceil_mode=True),
    avg("padded", (1, 2, 7, 9), (2**63 - 1,) * 2, (2**63 - 1,) * 2, (2**62 - 1,) * 2),
    avg("padded, cells counted", (1, 2, 7, 9), (2**63 - 1,) * 2, (1,) * 2, (2**62 - 1,) * 2, True, False),
    avg("stride", (1, 2, 7, 9), (3, 3), (2**63 - 1,) * 2),
    avg("stride, padded", (1, 2, 7, 9), (3, 3), (2**62,) * 2, (1, 1), True),
    avg("divisor 2**32", (1, 2, 7, 9), (3, 3), (2, 2), divisor_override=2**32),
    avg("divisor int64 max", (1, 2, 7, 9), (3, 3), (2, 2), divisor_override=2**63 - 1),
    avg("divisor int64 min", (1, 2, 7, 9), (3, 3), (2, 2), divisor_override=-(2**63)),
    avg("divisor -2**32 - 1", (1, 2, 7, 9), (3, 3), (2, 2), divisor_override=-(2**32) - 1),
    avg("large kernel, many windows", (1, 1, 5, 6), (400, 401), (1, 2), (200, 198)),
]


@pytest.mark.parametrize("case", HUGE, ids=str)
def test_huge_parameters(case: Case) -> None:
    g = normal(case.grad_shape, "float32", 25)
    results: list[Array] = []
    start = time.perf_counter()
    assert _peak(lambda: results.append(run(case, g))) < 3_000_000
    assert time.perf_counter() - start < 1
    expected = backward(exact(g), case.self_shape, case.pool)
    terms = magnitude(exact(g), case.self_shape, case.pool)
    for actual, right, term in zip(results[0].reshape(-1), expected.reshape(-1), terms.reshape(-1), strict=True):
        assert abs(Fraction(float(actual)) - right) <= (4 * ulp(term, FORMATS["float32"]) if term else 0)


def test_divisor_is_not_cut_to_32_bits() -> None:
    g = np.full((1, 1, 1), 2.0**40, np.float32)
    spec = TensorSpec((1, 1, 1), np.float32)
    for divisor in (2**32, -(2**32), 2**62, 2**33 + 2**32):
        assert float(avg_pool2d_backward(g, spec, 1, divisor_override=divisor)[0, 0, 0]) == float(
            np.float32(2.0**40 / divisor)
        )
