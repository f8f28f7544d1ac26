"""Against PyTorch's backward kernels in float64 and float32, over a few hundred parameter sets: `pytest -m torch`."""

from __future__ import annotations

import numpy as np
import pytest
from tests import oracle
from tests.calls import run
from tests.cases import LAYERS, NUMERIC, NUMPY, Array, Case, NumericCase, normal, random_cases

from poolgrad.core import AclnnError, CubeMathType, TensorSpec, adaptive_avg_pool2d_backward, avg_pool2d_backward

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

CASES = LAYERS + [numeric.case for numeric in NUMERIC] + random_cases(400, seed=77)


def aten(case: Case, grad_output: Array) -> Array:
    """torch's gradInput, in grad_output's dtype."""
    given = torch.from_numpy(np.ascontiguousarray(grad_output))
    own = torch.empty(case.self_shape, dtype=given.dtype)
    if case.pool is None:
        result = torch.ops.aten._adaptive_avg_pool2d_backward(given, own)
    else:
        pool = case.pool
        result = torch.ops.aten.avg_pool2d_backward(
            given,
            own,
            list(pool.kernel_size),
            list(pool.stride),
            list(pool.padding),
            pool.ceil_mode,
            pool.count_include_pad,
            pool.divisor_override or None,
        )
    return np.asarray(result.numpy())


def terms(case: Case, grad_output: Array) -> Array:
    """sum(|terms|) of every cell."""
    return oracle.magnitude(grad_output.astype(float), case.self_shape, case.pool)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_float32_agrees_with_torch_in_float64(case: Case) -> None:
    g = normal(case.grad_shape, "float32", 31)
    expected = aten(case, g.astype(np.float64))
    error, scale = abs(run(case, g) - expected), terms(case, g)
    assert np.all(error <= scale * 4 * 2.0**-23)
    assert np.all(abs(run(case, g, accumulate="float64") - expected) <= abs(expected) * 2.0**-24 + scale * 2.0**-48)


@pytest.mark.parametrize("case", CASES[::4], ids=str)
def test_float32_agrees_with_torch_in_float32(case: Case) -> None:
    # torch divides by a product computed in float32 and adds in its own order: both are a few ulp from the exact sum.
    g = normal(case.grad_shape, "float32", 32)
    windows = sum(1 for window in case.windows(0) for _ in case.windows(1))
    allowed = terms(case, g) * (4 + min(windows, 300)) * 2.0**-23
    assert np.all(abs(run(case, g) - aten(case, g)) <= allowed)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("case", CASES[::3], ids=str)
def test_16_bit_agrees_with_torch_in_float64_rounded_once(case: Case, dtype: str) -> None:
    g = normal(case.grad_shape, dtype, 33)
    expected = aten(case, g.astype(np.float64))
    for accumulate, slack in (("float32", 4 * 2.0**-23), ("float64", 2.0**-48)):
        result = run(case, g, accumulate=accumulate).astype(np.float64)
        step = 2.0 ** (np.maximum(np.frexp(expected)[1], -13 if dtype == "float16" else -125))
        step *= 2.0 ** -(11 if dtype == "float16" else 8)
        assert np.all(abs(result - expected) <= step / 2 + terms(case, g) * slack)


@pytest.mark.parametrize("case", CASES[::5], ids=str)
def test_nan_and_infinity_agree_with_torch(case: Case) -> None:
    g = normal(case.grad_shape, "float32", 34)
    flat = g.reshape(-1)
    flat[0], flat[-1], flat[flat.size // 2] = np.nan, np.inf, -np.inf
    expected, actual = aten(case, g.astype(np.float64)), run(case, g)
    assert np.array_equal(np.isnan(actual), np.isnan(expected))
    assert np.array_equal(np.isinf(actual), np.isinf(expected))
    infinite = np.isinf(expected)
    assert np.array_equal(actual[infinite], expected[infinite].astype(np.float32))


@pytest.mark.parametrize("numeric", NUMERIC, ids=str)
def test_numeric_cases_are_what_torch_gives(numeric: NumericCase) -> None:
    result = aten(numeric.case, numeric.grad_output)
    np.testing.assert_allclose(result, numeric.grad_input, rtol=1e-14, atol=0)


@pytest.mark.parametrize("case", LAYERS, ids=str)
def test_autograd_of_the_forward_agrees(case: Case) -> None:
    """Against torch.nn.functional, whose forward also checks the output size."""
    x = torch.zeros(case.self_shape, dtype=torch.float64, requires_grad=True)
    if case.pool is None:
        y = torch.nn.functional.adaptive_avg_pool2d(x, case.output)
    else:
        pool = case.pool
        flags = pool.ceil_mode, pool.count_include_pad, pool.divisor_override or None
        y = torch.nn.functional.avg_pool2d(x, pool.kernel_size, pool.stride, pool.padding, *flags)
    g = normal(case.grad_shape, "float32", 35)
    assert tuple(y.shape) == case.grad_shape
    y.backward(torch.from_numpy(g.astype(np.float64)))
    assert np.all(abs(run(case, g) - x.grad.numpy()) <= terms(case, g) * 4 * 2.0**-23)


def test_output_sizes_agree_with_torch() -> None:
    checked = 0
    for n in range(1, 7):
        for k in range(1, 8):
            for s in range(1, 4):
                for p in range(k // 2 + 1):
                    for ceil in (False, True):
                        checked += _size_agrees(n, k, s, p, ceil)
    assert checked > 300


def _size_agrees(n: int, k: int, s: int, p: int, ceil: bool) -> bool:
    try:
        size = torch.nn.functional.avg_pool2d(torch.zeros(1, n, n), k, s, p, ceil).shape[-1]
    except RuntimeError:
        return False
    g = np.ones((1, size, size), np.float32)
    avg_pool2d_backward(g, TensorSpec((1, n, n), "float32"), k, s, p, ceil)
    with pytest.raises(AclnnError):
        avg_pool2d_backward(np.ones((1, size, size + 1), np.float32), TensorSpec((1, n, n), "float32"), k, s, p, ceil)
    return True


def test_float16_mode_is_float16_of_torch_in_float64() -> None:
    case = LAYERS[0]
    g = normal(case.grad_shape, "float32", 36)
    expected = aten(case, g.astype(np.float16).astype(np.float64)).astype(np.float16)
    result = run(case, g, cube_math_type=CubeMathType.USE_FP16, accumulate="float64")
    assert (result != expected.astype(np.float32)).mean() < 0.01
    assert NUMPY["float32"] == result.dtype


def test_a_torch_tensor_is_refused_in_words() -> None:
    tensor = torch.ones(1, 2, 2, 2)
    with pytest.raises(AclnnError, match="numpy"):
        avg_pool2d_backward(tensor, TensorSpec((1, 2, 4, 4), "float32"), 2)
    with pytest.raises(AclnnError, match="numpy"):
        adaptive_avg_pool2d_backward(tensor.numpy(), tensor)
